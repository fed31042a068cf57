"""Views made from a simulated run: the sums hold, the sentence follows, recorded and predicted are what they are."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from foretrace.graph.taskgraph import TaskKind
from foretrace.report import build, headline
from foretrace.report.jsonout import dumps, loads
from foretrace.report.paths import path_moved, path_parts
from foretrace.report.views import PARTS
from foretrace.simulate.timeline import Timeline, simulate
from tests.report.report_demo import demo_graph, make_runs


@pytest.fixture(scope="module")
def runs() -> dict[str, Timeline]:
    return make_runs()


@pytest.mark.parametrize("steps", [1, 2, 5, 6])
def test_the_breakdown_sums_to_the_step(steps: int) -> None:
    view = build.show(simulate(demo_graph(steps=steps, layers=6)))
    assert math.fsum(view.breakdown_s.parts().values()) == pytest.approx(view.step_time_s.median, abs=1e-15)
    assert math.fsum(view.breakdown_mean_s.parts().values()) == pytest.approx(view.step_time_s.mean, abs=1e-15)
    assert view.steps == steps == len(view.step_times_s) == len(view.step_numbers)


def test_show_tells_what_was_recorded(runs: dict[str, Timeline]) -> None:
    view = build.show(runs["recorded"], path="some/demo.json.gz")
    assert view.headline.startswith("The GPU waits for data: ")
    assert view.headline.endswith("ms are DataLoader work that nothing overlaps.")
    assert (view.bottleneck, view.source, view.device, view.ranks) == (
        "data_loading",
        "demo.json.gz",
        "Demo V100 <&>",
        1,
    )
    assert view.next == "foretrace whatif some/demo.json.gz --do prefetch-data"
    assert view.holds_back[0].kind == "data"
    assert view.attributed_gpu_share == pytest.approx(0.987)
    assert loads(dumps(view), "show") == view


def test_a_path_is_quoted_for_the_shell(runs: dict[str, Timeline]) -> None:
    assert "'my run.json'" in build.show(runs["recorded"], path="my run.json").next
    assert build.show(runs["recorded"]).next == ""


def test_without_the_loader_something_else_is_the_limit(runs: dict[str, Timeline]) -> None:
    view = build.show(runs["prefetch-data"])
    assert view.bottleneck == "compute"
    assert view.headline.startswith("The GPU computes nearly all the time: ")


def test_a_wait_that_recurs_is_named_although_the_median_step_hides_it() -> None:
    graph = demo_graph(steps=6, loader_us=500)
    stall = (graph.kind == TaskKind.DATA) & np.isin(graph.step, [1, 4])
    stalled = simulate(graph.with_columns(dur=np.where(stall, np.int64(400_000_000), graph.dur)))
    view = build.show(stalled)
    assert view.bottleneck == "data_loading"
    assert view.headline.startswith("The GPU waits for data in 2 of 6 steps: on average ")
    assert view.breakdown_s.data_loading < 0.01 < view.breakdown_mean_s.data_loading
    once = (graph.kind == TaskKind.DATA) & (graph.step == 1)
    assert build.show(
        simulate(graph.with_columns(dur=np.where(once, np.int64(400_000_000), graph.dur)))
    ).bottleneck != ("data_loading")


def test_recurring_needs_steps() -> None:
    assert headline.recurring(np.zeros((3, len(PARTS)), dtype=np.int64)) is None


def test_blame_rows_are_those_of_the_timeline(runs: dict[str, Timeline]) -> None:
    for by in ("name", "layer", "kind", "phase"):
        view = build.blame(runs["recorded"], by, path="demo.json")
        rows = runs["recorded"].blame(by)
        assert [row.name for row in view.rows] == [row.name for row in rows]
        assert [row.saved_if_removed_s for row in view.rows] == [row.saved_if_removed_s for row in rows]
        assert "(no " not in view.headline
        assert loads(dumps(view), "blame") == view


def test_simulate_compares_with_the_recording(runs: dict[str, Timeline]) -> None:
    view = build.simulate(runs["recorded"], path="demo.json")
    assert view.error == 0 and view.structural_error == pytest.approx(0, abs=1e-9)
    assert view.measured_s == view.step_time_s
    assert view.interval_s[0] <= view.step_time_s <= view.interval_s[1]
    assert "exactly the recorded" in view.headline
    shorter = build.simulate(runs["prefetch-data"])
    assert shorter.error < -0.2
    assert loads(dumps(view), "simulate") == view


def test_the_critical_path_in_words(runs: dict[str, Timeline]) -> None:
    before, after = path_parts(runs["recorded"]), path_parts(runs["prefetch-data"])
    assert [part.name for part in before][:1] == ["data loading"]
    for parts, run in ((before, runs["recorded"]), (after, runs["prefetch-data"])):
        assert math.fsum(part.time_s for part in parts) == pytest.approx(run.window_ns / 1e9 / run.graph.n_steps)
    names = [part.name for part in before]
    assert names.index("forward kernels") < names.index("backward kernels")
    assert path_moved(before, after) and not path_moved(before, before)


def test_a_track_is_the_run(runs: dict[str, Timeline]) -> None:
    track = build.track("recorded", runs["recorded"])
    assert np.array_equal(track.start, runs["recorded"].start)
    assert np.array_equal(np.diff(track.marks), runs["recorded"].step_times_ns)
    assert 0 <= build.median_step(runs["recorded"]) < 6


def test_a_track_of_lanes_that_ran_in_their_own_order(runs: dict[str, Timeline]) -> None:
    graph = runs["recorded"].graph
    lanes = tuple(replace(lane, ordered=lane.stream != 20) for lane in graph.lanes)
    free = simulate(replace(graph, lanes=lanes))
    assert free.order is not None
    track = build.track("free", free)
    assert sorted(track.end.tolist()) == sorted(free.end.tolist())
    assert track.end[track.critical[-1]] == free.end[graph.marks[-1]]
    assert np.array_equal(np.diff(track.marks), free.step_times_ns)


def test_compare_explains_the_difference(runs: dict[str, Timeline]) -> None:
    view = build.compare(runs["recorded"], runs["prefetch-data"], before_path="a.json", after_path="b.json")
    assert view.change_s == pytest.approx(view.after_s - view.before_s) and view.change_s < 0
    assert math.fsum(view.breakdown_change_s.parts().values()) == pytest.approx(view.change_s, abs=1e-12)
    assert "most of it data loading (−" in view.headline
    assert view.matched_share == 1.0
    assert math.fsum(row.critical_before_s for row in view.rows) == pytest.approx(
        float(np.sort(runs["recorded"].step_times_ns)[2]) / 1e9
    )
    assert (view.before_source, view.after_source) == ("a.json", "b.json")
    assert loads(dumps(view), "compare") == view
    same = build.compare(runs["recorded"], runs["recorded"])
    assert same.headline.startswith("Both take the same time")
