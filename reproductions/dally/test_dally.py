"""The Dally study: its jobs have the published marginals, cells repeat, and every verdict is computed from rows."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace import executor
from foretrace.errors import ForetraceError
from foretrace.fleet.policy import Policy
from foretrace.fleet.workload import Workload
from reproductions.__main__ import main
from reproductions.dally import cells as dally_cells
from reproductions.dally import study as dally
from reproductions.dally import sums as dally_sums
from reproductions.dally import tables as dally_tables
from reproductions.dally.findings import findings_of
from reproductions.dally.workload import (
    DEMANDS,
    GPU_HOURS,
    JOBS,
    LOADS,
    MODELS,
    consecutive,
    published_like,
    quantiles,
)

Row = dict[str, Any]


# ---------------------------------------------------------------- jobs


@settings(max_examples=20)
@given(draw=st.integers(0, 1000), spread=st.floats(0, 3), load=st.sampled_from(LOADS))
def test_jobs_have_the_published_marginals(draw: int, spread: float, load: str) -> None:
    made = published_like(load, spread=spread, draw=draw)
    assert len(made) == JOBS
    assert Counter(made.model.tolist()) == MODELS
    assert Counter(made.gpus.tolist()) == DEMANDS
    # ideal run time × GPUs is the published sum, and only who has how much is drawn
    assert made.gpu_seconds.sum() / 3600 == pytest.approx(GPU_HOURS)
    assert np.sort(made.gpu_seconds) == pytest.approx(quantiles(spread))
    again = published_like(load, spread=spread, draw=draw)
    assert (again.work_s == made.work_s).all() and (again.submit_ns == made.submit_ns).all()


def test_arrivals_and_capped_jobs() -> None:
    assert not published_like("all-at-0").submit_ns.any()
    days = [published_like(load, draw=3).submit_ns[-1] / 86400e9 for load in ("100/day", "100/week")]
    assert days[0] == pytest.approx(5, rel=0.2) and days[1] == pytest.approx(35, rel=0.2)
    whole, small = published_like(draw=5), published_like(draw=5, largest=8)
    assert small.gpus.max() == 8 and (small.gpus == np.minimum(whole.gpus, 8)).all()
    assert small.gpu_seconds == pytest.approx(whole.gpu_seconds)
    assert (published_like(draw=6).gpus != whole.gpus).any()
    with pytest.raises(ForetraceError, match="no load '1000/day'"):
        published_like("1000/day")


def test_consecutive_jobs_of_a_log() -> None:
    log = Workload.of(
        submit_s=[0, 10, 20, 30, 40, 50], gpus=[1, 2, 1, 4, 2, 8], work_s=[1, 2, 3, 4, 5, 6], model=["x"] * 6
    )
    part = consecutive(log, jobs=2, gpus_from=2)
    assert part.job.tolist() == ["3", "4"] and part.submit_ns.tolist() == [0, 10_000_000_000]
    assert set(part.model) <= set(MODELS) and not (part.logged_start_ns >= 0).any()
    with pytest.raises(ForetraceError, match="has 4 jobs with 2 GPUs or more, and 5 are needed"):
        consecutive(log, jobs=5, gpus_from=2)


# ---------------------------------------------------------------- cells


def small(part: str = "grid", **values: Any) -> Row:
    """A cell with few jobs that queue."""
    return dally_cells.cell(part, **{"first": 50, "load": "all-at-0", "largest": 8, "cluster": "2x2x4", **values})


def test_a_cell_repeats_and_conserves_work() -> None:
    cell = small(policies="all")
    first, second = dally_cells.play_cell(cell), dally_cells.play_cell(json.loads(json.dumps(cell)))
    assert json.dumps(first) == json.dumps(second)
    assert len(first["runs"]) == len(dally_cells.NAMED) + 19 - len(dally_cells.SAME)
    made = published_like("all-at-0", largest=8).take(np.arange(50))
    for name, run in first["runs"].items():
        assert run["run_h"] - run["comm_h"] == pytest.approx(made.work_s.mean() / 3600, rel=1e-6), name
        assert run["above_low_h"] - 1e-9 <= run["above_h"] <= run["above_high_h"] + 1e-9, name
        assert 0 <= run["above_h"] <= run["comm_h"] + 1e-9 and run["makespan_h"] >= run["jct_h"], name


def test_policies_that_stand_for_each_other_are_equal() -> None:
    every, named = dally_cells.factorial(600.0), {name: made(600.0) for name, made in dally_cells.NAMED.items()}
    told = [field.name for field in fields(Policy) if field.name != "name"]
    for factor, name in dally_cells.SAME.items():
        assert all(getattr(every[factor], each) == getattr(named[name], each) for each in told), factor
    assert all(policy.compiled for policy in [*every.values(), *named.values()])


def test_a_capped_run_is_none_and_in_no_figure() -> None:
    row = small(cap=130, draw=1)
    row = {**row, **dally_cells.play_cell(row)}
    runs = row["runs"]
    assert runs["dally-auto"] is None and runs["las-strict"] is None and runs["fifo-hol"] is not None
    assert dally_sums.gain(row, "jct_h", "fifo-hol") is None and dally_sums.gains_of([row]) == ()
    whole = small()
    whole = {**whole, **dally_cells.play_cell(whole)}
    both = {each.baseline: each for each in dally_sums.gains_of([row, whole]) if each.figure == "jct_h"}
    assert (both["fifo-hol"].cells, both["fifo-hol"].left_out) == (1, 1)


def test_cells_of_a_study_differ() -> None:
    for quick in (True, False):
        wanted = dally.all_cells(seeds=20, quick=quick, trace=Path("log.csv"))
        assert len({json.dumps(each, sort_keys=True) for each in wanted}) == len(wanted)
    quick_ones = {json.dumps(each, sort_keys=True) for each in dally.all_cells(seeds=20, quick=True, trace=None)}
    assert 20 <= len(quick_ones) <= 50
    parts = Counter(each["part"] for each in wanted)
    assert parts["jitter"] == parts["redraw"] == 20 * len(dally_cells.REPEATED)


# ---------------------------------------------------------------- sums


def told(jct: float, makespan: float, comm: float, **baselines: tuple[float, float, float]) -> Row:
    """A row with Dally's figures and those of baselines, all communication above the machine."""

    def run(figures: tuple[float, float, float]) -> dict[str, float]:
        return {
            "jct_h": figures[0], "makespan_h": figures[1], "comm_h": figures[2], "above_h": figures[2],
            "comm_share": figures[2] / 100,
        }  # fmt: skip

    runs = {name.replace("_", "-"): run(figures) for name, figures in baselines.items()}
    return dally_cells.cell("grid") | {"runs": {"dally-auto": run((jct, makespan, comm)), **runs}}


def test_claims_are_computed_from_rows() -> None:
    near = told(20, 40, 3, fifo_hol=(100, 100, 4), las_strict=(10, 40, 4))
    far = told(10, 40, 3, fifo_hol=(100, 100, 4), las_strict=(10, 40, 4)) | {"congestion": 100}
    jct = {row.baseline: row for row in dally_sums.gains_of([near, far]) if row.figure == "jct_h"}
    hol = jct["fifo-hol"]
    assert (hol.median, hol.best, hol.worst) == pytest.approx((-0.85, -0.9, -0.8))
    assert (hol.reached, hol.cells, hol.ties) == (1, 2, 0) and "×100" in hol.best_cell
    assert jct["las-strict"].ties == 1 and jct["las-strict"].worst == pytest.approx(1.0)
    claims = {row.figure: row for row in dally_sums.claims_of([near, far])}
    assert claims["jct_h"].reached_against == ("fifo-hol (−90 %, 1 of 2 cells)",)
    assert claims["jct_h"].reached_only_where == ("congestion ×100",)
    assert claims["makespan_h"].verdict == "not reached" and len(claims["makespan_h"].not_reached) == 2
    # the same rows with a worse Dally: the claim falls
    worse = [row | {"runs": {**row["runs"], "dally-auto": near["runs"]["dally-auto"]}} for row in (near, far)]
    assert {row.figure: row for row in dally_sums.claims_of(worse)}["jct_h"].verdict == "not reached"


def test_kinds_of_cells_are_compared_on_the_same_cells() -> None:
    rows = [
        told(20, 40, 3, fifo_hol=(100, 100, 4)) | {"congestion": 1},
        told(10, 40, 3, fifo_hol=(100, 100, 4)) | {"congestion": 10},
        told(90, 40, 3, fifo_hol=(100, 100, 4)) | {"congestion": 1, "load": "100/week"},  # no twin with ×10
    ]
    at = {(row.dimension, row.value): row for row in dally_sums.drivers_of(rows)}
    jct = [at["congestion", value].jct_hol for value in ("×1", "×10")]
    assert jct == pytest.approx([-0.8, -0.9]) and at["congestion", "×1"].cells == 1
    assert at["arrivals", "100/week"].jct_hol == pytest.approx(-0.1) and at["all", ""].cells == 3


def test_variants_of_dally_are_no_baselines_of_a_claim() -> None:
    row = told(1, 1, 1, dally_0=(100, 100, 100), fifo_hol=(2, 2, 2))
    claims = {each.figure: each for each in dally_sums.claims_of([row])}
    assert not claims["jct_h"].reached_against
    assert {each.baseline for each in dally_sums.gains_of([row])} == {"dally-0", "fifo-hol"}


def test_timers_by_quarter() -> None:
    timers = [[0.0, 8, 1, 6.0], [1.0, 8, 1, 18.0], [2.0, 8, 1, 6.0], [0.0, 16, 2, 12.0], [4.0, 16, 2, 12.0]]
    row = dally_cells.cell("tuned", lease_s=600.0, history=20) | {"timers": timers, "runs": {}}
    rack, network = dally_sums.timers_of([row])
    assert rack.mean == pytest.approx((6, 18, 6, 6)) and rack.sd == pytest.approx((0, 0, 0, 0))
    assert (rack.at_floor, rack.at_cap) == pytest.approx((0.75, 0)) and rack.changes == 2
    assert (network.level, network.at_floor) == ("between racks", 1.0)
    capped = row | {"timers": [[each[0], each[1], each[2], 16.0] for each in timers]}
    assert dally_sums.timers_of([capped])[0].at_cap == pytest.approx(1)


# ---------------------------------------------------------------- the whole, small


def small_study_cells(**_: Any) -> list[Row]:
    found = [small(policies="all", congestion=each) for each in dally_cells.CONGESTIONS]
    found += [small("jitter", jitter=seed, named="small") for seed in range(3)]
    found += [small("tuned", lease_s=600.0, history=144), small("manual", lease_s=600.0, waits=(1.0, 2.0), jitter=0)]
    return [*found, small("lease", policies="leased"), small("spread", policies="few", spread=1.0)]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> dally.DallyStudy:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dally, "all_cells", small_study_cells)
        patch.setattr(executor, "cores", lambda: 1)
        folder = tmp_path_factory.mktemp("dally") / "cells"
        seen: list[float] = []
        first = dally.run_study(folder=folder, seeds=3, progress=seen.append)
        again = dally.run_study(folder=folder, seeds=3)
    assert seen[-1] == 1 and (first.reused, again.reused) == (0, len(small_study_cells()))
    times = {"took_s": 0.0, "reused": 0, "date": ""}
    assert msgspec.structs.replace(first, **times) == msgspec.structs.replace(again, **times)
    return first


def test_a_wrong_log_is_told_before_anything_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log.csv"
    log.write_text("# foretrace workload 1\njob,submit_s,gpus,work_s\na,0,1,60\n")
    monkeypatch.setattr(dally, "sweep", lambda *_, **__: pytest.fail("played"))
    with pytest.raises(ForetraceError, match="has 1 jobs with 1 GPUs or more, and 500 are needed"):
        dally.run_study(folder=tmp_path, quick=True, trace=log)
    with pytest.raises(ForetraceError, match="does not exist"):
        dally.run_study(folder=tmp_path, quick=True, trace=tmp_path / "none.csv")


def test_the_study_is_json_and_has_every_table(study: dally.DallyStudy) -> None:
    assert msgspec.json.decode(msgspec.json.encode(study), type=dally.DallyStudy) == study
    assert study.capped == 0 and study.runs > 80
    for name in ("claims", "gains", "drivers", "factors", "best", "repeated", "timers", "waits", "leases", "spreads"):
        assert getattr(study, name), name
    assert {row.verdict.partition(":")[0] for row in study.findings} <= {"confirmed", "refuted", "not comparable"}
    own = next(row for row in study.repeated if row.policy == "dally-auto")
    assert own.verdicts == ("same",) * 3 and own.repetitions == 3


def test_findings_follow_the_rows(study: dally.DallyStudy) -> None:
    rows = [told(10, 90, 3, fifo_hol=(100, 100, 4)), told(10, 20, 3, fifo_hol=(100, 100, 4))]
    upto = [{row.finding: row.verdict for row in findings_of(study, rows[:count])} for count in (1, 2)]
    finding = "makespan −69 % is not reached against FIFO that blocks"
    assert [each[finding] for each in upto] == ["confirmed", "refuted"]


def test_the_section_replaces_itself(study: dally.DallyStudy, tmp_path: Path) -> None:
    page = tmp_path / "fleet-dally.md"
    page.write_text(f"# Dally\n\nBefore.\n\n{dally_tables.MARKS[0]}\nold\n{dally_tables.MARKS[1]}\n\nAfter.\n")
    dally_tables.write(study, page)
    text = page.read_text()
    assert text.startswith("# Dally\n\nBefore.\n") and text.endswith("\n\nAfter.\n") and "\nold\n" not in text
    dally_tables.write(study, page)
    assert page.read_text() == text
    assert all(row.claim in text for row in study.claims) and study.date in text and study.machine in text


def test_the_plot_shows_timers_that_moved(study: dally.DallyStudy) -> None:
    steps = (("2x4x8", 120.0, 4, 1, 0.0, 6.0), ("2x4x8", 120.0, 4, 1, 30.0, 80.0), ("2x4x8", 600.0, 4, 1, 1.0, 6.0))
    drawn = dally_tables.timers_svg(msgspec.structs.replace(study, timer_steps=steps))
    assert drawn is not None and drawn.count("<polyline") == 1 and "lease 120 s" in drawn and ">4</text>" in drawn
    assert dally_tables.timers_svg(msgspec.structs.replace(study, timer_steps=steps[2:])) is None


def test_a_log_is_played(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    lines = [
        f"2017-10-03 05:{i % 60:02}:00,{600 + 60 * i},{1 + i % 4},{(600 + 60 * i) * (1 + i % 4)},a" for i in range(30)
    ]
    log.write_text("timestamp,duration,num_gpus,gpu_time,cluster\n" + "\n".join(lines) + "\n")
    cell = dally_cells.philly_cells(str(log), quick=True)[0] | {"jobs": 20, "cluster": "1x2x4"}
    row = {**cell, **dally_cells.play_cell(cell)}
    logged = dally_sums.logged_of([row])
    assert [each.policy for each in logged] == list(dally_cells.NAMED) and all((each.jct_h or 0) > 0 for each in logged)


def test_the_protocol_prints_and_writes(
    study: dally.DallyStudy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(dally, "run_study", lambda **_: study)
    assert main(["dally", "--quick", "--write", str(tmp_path / "page.md")]) == 0
    assert study.headline in capsys.readouterr().out and study.headline in (tmp_path / "page.md").read_text()
    assert main(["dally", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=dally.DallyStudy) == study
