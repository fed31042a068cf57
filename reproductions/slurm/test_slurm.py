"""The kept runs, simulated again: near what Slurm did, and nearer than the policy that knows nothing of Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretrace.fleet.rig.cluster import SlurmSetup
from reproductions.__main__ import main
from reproductions.slurm import rules, runs, section
from reproductions.slurm.cells import SETUP, Cell, cells, workload


def test_kept_runs_are_simulated_again(tmp_path: Path) -> None:
    known = {"fifo slurm=": 0, "backfill slurm=": 0}
    wanted = [each for each in runs.stored(runs.RUNS) if each["cell"][1] in (11, 22) and each["repeat"] == 0]
    found = runs.rows(wanted)
    for row in found:
        assert row.jobs == 200 and row.simulated.jct_error < 0.02 < 0.1 + row.plain.jct_error
        assert row.simulated.order_equal > 0.98 and row.simulated.within > 0.95
        assert row.simulated.jct_error < row.plain.jct_error
        known[row.cell.policy[: row.cell.policy.index("=") + 1]] += 1
    assert set(known.values()) == {1}
    page = tmp_path / "page.md"
    page.write_text(f"before\n{section.BEGIN}\nold\n{section.END}\nbehind\n")
    section.write(found, (), page)
    assert (
        "old" not in page.read_text() and page.read_text().startswith("before\n") and "in all three" in page.read_text()
    )


def test_single_rules_are_simulated_again() -> None:
    wanted = {"arrays", "partition_prio, suspend", "reservation of all", "fair share"}
    kept = [each for each in runs.stored(rules.RUNS) if each["rule"] in wanted and each["repeat"] == 0]
    found = rules.rule_rows(kept)
    assert {row.name for row in found} == wanted
    for row in found:
        assert row.simulated.jct_error < 0.03 and row.simulated.order_equal > 0.98, row.name
    assert "fair share" in section.section((), found)


def test_without_runs_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "--runs", str(tmp_path / "none.jsonl.gz")]) == 2
    assert "play some with --run" in capsys.readouterr().err


def test_workloads_differ_and_fit() -> None:
    every = list(cells())
    assert len(set(every)) == len(every) == 24 and SlurmSetup() == SETUP
    first, again = (workload(Cell("drawn", 20, 1.0, "fifo slurm=yes")) for _ in range(2))
    assert len(first) == 200 and (first.work_s == again.work_s).all() and first.gpus.max() <= 64
