"""The page's figures on the small sample, and the claims that stand on the traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from energy_tune import trainings
from foretrace.experiment.trial import figured
from foretrace.serving.energy import recorded
from reproductions import ROOT
from reproductions.polythrottle.protocol import enumerated, held_pairs, interference_table, saved


def test_optima_of_the_sample() -> None:
    training = recorded.read([f"zeus:{ROOT / 'tests' / 'data' / 'energy'}", "workload=squad"])
    assert enumerated(training)[0] == "49"
    assert enumerated(training)[3] == "batch=12 gpu-power-limit=200: 1,341,226 J, 7,157.6 s"


def test_what_is_saved(shared_data: Path) -> None:
    traces = shared_data / "energy" / "zeus"
    if not traces.is_dir():
        pytest.skip(f"no traces of Zeus at {traces}")
    against_fastest = [saved(each)[1] for each in trainings(traces).values()]
    assert min(against_fastest) > 0.036 and max(against_fastest) == pytest.approx(0.452, abs=1e-3)


def test_without_traces_one_sentence(tmp_path: Path) -> None:
    from reproductions.__main__ import main as reproduce

    assert reproduce(["polythrottle", "--shared-data", str(tmp_path)]) == 2


def test_pairs_of_the_ledger_are_shown() -> None:
    pytest.importorskip("torch")
    rows = [
        figured((value_s, 0.9 * value_s, 1.1 * value_s), [0.02] * 5).row(
            f"energy-colocate latency.2+{step}", model="bert", size="tiny",
            parameters={"request": 2, "step": step, "tuned": "ncf"},
        )
        for step, value_s in ((2, 0.02), (8, 0.04))
    ]  # fmt: skip
    assert held_pairs(rows).startswith("latency of 1 of 2 pairs") and "2 conclusive ones 1; median" in held_pairs(rows)
    lines = interference_table(rows).splitlines()
    assert "| 2 + 2 | 20.0 ms | 18.0 ms – 22.0 ms | 20.0 ms | 0 | covered |" in lines[2], lines[2]
    assert "| 2 + 8 | 40.0 ms |" in lines[3] and "| +100.00 | missed |" in lines[3]
    assert held_pairs([]) == "no pair was measured" and interference_table([]) == "Not measured."
