"""The flow as a Python user walks through it: read, build, simulate, change, compare."""

from __future__ import annotations

from pathlib import Path

import pytest

import foretrace as ft
from foretrace.simulate.replay import replay

DATA = Path(__file__).resolve().parent / "data"


@pytest.fixture(scope="module")
def run() -> ft.Run:
    return ft.read(DATA / "recommender.json.gz")


def test_the_whole_flow_is_one_line() -> None:
    timeline = ft.read(DATA / "cnn.json.gz").graph().apply(ft.techniques.PrefetchData(workers=1)).simulate()
    assert timeline.step_time_s > 0


def test_a_graph_as_recorded_reproduces_the_recording(run: ft.Run) -> None:
    graph = run.graph(as_recorded=True).graph
    start, _ = replay(graph)
    assert (start == graph.recorded).all()


def test_a_graph_without_the_cost_of_recording_says_what_was_taken_out(run: ft.Run) -> None:
    recorded, unprofiled = run.graph(as_recorded=True), run.graph()
    assert unprofiled.simulate().step_time_s < recorded.simulate().step_time_s
    assert unprofiled.graph.info.overhead["unprofiled_s"] > 0
    assert unprofiled.graph.changes


def test_apply_leaves_the_scenario_as_it_was(run: ft.Run) -> None:
    scenario = run.graph()
    before = scenario.simulate().step_time_s
    faster = scenario.apply(ft.techniques.Scale(by=0.5, phase="optimizer"))
    assert faster.recorded is scenario.graph
    assert faster.simulate().step_time_s < before
    assert scenario.simulate().step_time_s == before
    assert not scenario.techniques


def test_techniques_may_be_applied_one_by_one_or_together(run: ft.Run) -> None:
    first, second = ft.techniques.FusedOptimizer(), ft.techniques.Scale(by=0.5, phase="forward")
    together = run.graph().apply(first, second)
    one_by_one = run.graph().apply(first).apply(second)
    assert together.simulate().step_time_s == one_by_one.simulate().step_time_s
    assert one_by_one.techniques == (first, second)
    assert one_by_one.whatif().before_s == run.graph().simulate().step_time_s


def test_whatif_and_simulate_agree(run: ft.Run) -> None:
    scenario = run.graph().apply(ft.techniques.FusedOptimizer())
    assert scenario.whatif().after_s == scenario.simulate().step_time_s


def test_a_saved_scenario_comes_back(run: ft.Run, tmp_path: Path) -> None:
    scenario = run.graph().apply(ft.techniques.FusedOptimizer())
    loaded = ft.load(scenario.save(tmp_path / "fused.graph"))
    assert loaded.simulate().step_time_s == scenario.simulate().step_time_s
    assert loaded.graph.assumptions == scenario.graph.assumptions


def test_compare_says_where_a_change_is(run: ft.Run) -> None:
    recorded = run.graph()
    found = ft.compare(recorded, recorded.apply(ft.techniques.Scale(by=0.5, phase="optimizer")))
    changed = [row for row in found.rows if row.changed]
    assert {row.phase for row in changed} == {"optimizer"}
    assert sum(row.critical_after_ns - row.critical_before_ns for row in found.rows) == found.after_ns - found.before_ns


def test_a_missing_rank_is_one_sentence() -> None:
    with pytest.raises(ft.ForetraceError, match="has no rank 5"):
        ft.read(DATA / "cnn.json.gz", ranks=[5])


def test_a_path_is_opened_whatever_it_is(run: ft.Run, tmp_path: Path) -> None:
    opened = ft.scenario(DATA / "recommender.json.gz")
    assert opened.trace is not None
    assert opened.simulate().step_time_s == run.graph().simulate().step_time_s
    saved = opened.save(tmp_path / "step.graph")
    assert ft.scenario(saved).simulate().step_time_s == opened.simulate().step_time_s
    with pytest.raises(ft.ForetraceError, match=r"saved graph, which `rank=` cannot change"):
        ft.scenario(saved, rank=0)
    with pytest.raises(ft.ForetraceError, match=r"one rank; leave `all_ranks=` out"):
        ft.scenario(DATA / "recommender.json.gz", all_ranks=True)


def test_a_model_that_never_ran_is_one_line() -> None:
    found = ft.estimate("gpt2", device="h100", batch=1, size="tiny")
    low_s, high_s = found.step.interval_s
    assert 0 < low_s < found.step.step_time_s < high_s
    with pytest.raises(ft.ForetraceError, match=r"`zero=3` shares among several workers; say how many with `workers=`"):
        ft.estimate("gpt2", device="h100", zero=3)


def test_a_fleet_is_one_line() -> None:
    result = ft.flow.fleet(DATA.parents[1] / "examples" / "jobs.csv", cluster="2x4x8", policy="las").play()
    assert (result.jct_s > 0).all()
