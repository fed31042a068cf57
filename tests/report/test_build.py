"""Views made from a simulated run: the sums hold, the sentence follows, recorded and predicted are what they are."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from foretrace.graph.taskgraph import TaskKind
from foretrace.report import check as simulated
from foretrace.report import compare, html, show, tracks
from foretrace.report import whatif as predicted
from foretrace.report.jsonout import dumps, loads
from foretrace.report.terminal import Terminal, render
from foretrace.report.views import PARTS
from foretrace.simulate.breakdown import recurring
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.techniques.data.prefetch_data import PrefetchData
from foretrace.techniques.selection import Scale
from foretrace.techniques.whatif import WhatIf, whatif
from tests.report.report_demo import NASTY, demo_graph, make_runs


@pytest.fixture(scope="module")
def runs() -> dict[str, Timeline]:
    return make_runs()


@pytest.mark.parametrize("steps", [1, 2, 5, 6])
def test_the_breakdown_sums_to_the_step(steps: int) -> None:
    view = show.show(simulate(demo_graph(steps=steps, layers=6)))
    assert math.fsum(view.breakdown_s.parts().values()) == pytest.approx(view.step_time_s.median, abs=1e-15)
    assert math.fsum(view.breakdown_mean_s.parts().values()) == pytest.approx(view.step_time_s.mean, abs=1e-15)
    assert view.steps == steps == len(view.step_times_s) == len(view.step_numbers)


def test_show_tells_what_was_recorded(runs: dict[str, Timeline]) -> None:
    view = show.show(runs["recorded"], path="some/demo.json.gz")
    assert view.headline.startswith("The GPU waits for data: ")
    assert view.headline.endswith("ms are DataLoader work that nothing overlaps.")
    assert (view.bottleneck, view.source, view.device, view.ranks) == (
        "data_loading",
        "demo.json.gz",
        "Demo V100 <&>",
        1,
    )
    assert view.next == "foretrace advise some/demo.json.gz"
    assert view.holds_back[0].kind == "data"
    assert view.attributed_gpu_share == pytest.approx(0.987)
    assert loads(dumps(view), "show") == view


def test_a_path_is_quoted_for_the_shell(runs: dict[str, Timeline]) -> None:
    assert '"my run.json"' in show.show(runs["recorded"], path="my run.json").next
    assert "'$HOME'" in show.show(runs["recorded"], path="$HOME").next
    assert show.show(runs["recorded"]).next == ""


def test_without_the_loader_something_else_is_the_limit(runs: dict[str, Timeline]) -> None:
    view = show.show(runs["prefetch-data"])
    assert view.bottleneck == "compute"
    assert view.headline.startswith("The GPU computes nearly all the time: ")


def test_a_wait_that_recurs_is_named_although_the_median_step_hides_it() -> None:
    graph = demo_graph(steps=6, loader_us=500)
    stall = (graph.kind == TaskKind.DATA) & np.isin(graph.step, [1, 4])
    stalled = simulate(graph.with_columns(dur=np.where(stall, np.int64(400_000_000), graph.dur)))
    view = show.show(stalled)
    assert view.bottleneck == "data_loading"
    assert view.headline.startswith("The GPU waits for data in 2 of 6 steps: on average ")
    assert view.breakdown_s.data_loading < 0.01 < view.breakdown_mean_s.data_loading
    once = (graph.kind == TaskKind.DATA) & (graph.step == 1)
    assert show.show(simulate(graph.with_columns(dur=np.where(once, np.int64(400_000_000), graph.dur)))).bottleneck != (
        "data_loading"
    )


def test_recurring_needs_steps() -> None:
    assert recurring(np.zeros((3, len(PARTS)), dtype=np.int64)) is None


def test_blame_rows_are_those_of_the_timeline(runs: dict[str, Timeline]) -> None:
    for by in ("name", "layer", "kind", "phase"):
        view = show.blame(runs["recorded"], by, path="demo.json")
        rows = runs["recorded"].blame(by)
        assert [row.name for row in view.rows] == [row.name for row in rows]
        assert [row.saved_if_removed_s for row in view.rows] == [row.saved_if_removed_s for row in rows]
        assert "(no " not in view.headline
        assert loads(dumps(view), "blame") == view


def test_simulate_compares_with_the_recording(runs: dict[str, Timeline]) -> None:
    view = simulated.simulate(runs["recorded"], path="demo.json")
    assert view.error == 0 and view.structural_error == pytest.approx(0, abs=1e-9)
    assert view.measured_s == view.step_time_s
    assert view.interval_s[0] <= view.step_time_s <= view.interval_s[1]
    assert "exactly the recorded" in view.headline
    shorter = simulated.simulate(runs["prefetch-data"])
    assert shorter.error < -0.2
    assert loads(dumps(view), "simulate") == view


def test_a_track_is_the_run(runs: dict[str, Timeline]) -> None:
    track = tracks.track("recorded", runs["recorded"])
    assert np.array_equal(track.start, runs["recorded"].start)
    assert np.array_equal(np.diff(track.marks), runs["recorded"].step_times_ns)
    assert 0 <= html.median_step(runs["recorded"]) < 6


def test_a_track_of_lanes_that_ran_in_their_own_order(runs: dict[str, Timeline]) -> None:
    graph = runs["recorded"].graph
    lanes = tuple(replace(lane, ordered=lane.stream != 20) for lane in graph.lanes)
    free = simulate(replace(graph, lanes=lanes))
    assert free.order is not None
    track = tracks.track("free", free)
    assert sorted(track.end.tolist()) == sorted(free.end.tolist())
    assert track.end[track.critical[-1]] == free.end[graph.marks[-1]]
    assert np.array_equal(np.diff(track.marks), free.step_times_ns)


def test_compare_explains_the_difference(runs: dict[str, Timeline]) -> None:
    view = compare.compare(runs["recorded"], runs["prefetch-data"], before_path="a.json", after_path="b.json")
    assert view.change_s == pytest.approx(view.after_s - view.before_s) and view.change_s < 0
    assert math.fsum(view.breakdown_change_s.parts().values()) == pytest.approx(view.change_s, abs=1e-12)
    assert "most of it data loading (−" in view.headline
    assert view.matched_share == 1.0
    assert math.fsum(row.critical_before_s for row in view.rows) == pytest.approx(
        float(np.sort(runs["recorded"].step_times_ns)[2]) / 1e9
    )
    assert (view.before_source, view.after_source) == ("a.json", "b.json")
    assert loads(dumps(view), "compare") == view
    same = compare.compare(runs["recorded"], runs["recorded"])
    assert same.headline.startswith("Both take the same time")


@pytest.fixture(scope="module")
def prediction(runs: dict[str, Timeline]) -> WhatIf:
    return whatif(runs["recorded"].graph, [PrefetchData(), Scale(named="volta*", by=0.5)])


def test_whatif_carries_the_whole_prediction(prediction: WhatIf) -> None:
    view = predicted.whatif(prediction, path="demo.json")
    assert view.techniques == ("prefetch-data", "scale")
    assert view.headline.startswith(f"{view.speedup:.2f}× faster: ")
    assert view.interval_s[0] <= view.after_s <= view.interval_s[1]
    assert [stage.before_s for stage in view.stages] == [view.before_s, view.stages[0].after_s]
    assert math.fsum(stage.saved_s for stage in view.stages) == pytest.approx(view.saved_s)
    for breakdown, step in ((view.breakdown_before_s, view.before_s), (view.breakdown_after_s, view.after_s)):
        assert math.fsum(breakdown.parts().values()) == pytest.approx(step, abs=1e-15)
    assert view.changes and view.assumptions and view.critical_path_moved
    moved = [max(abs(a.step_at_low_s - view.after_s), abs(a.step_at_high_s - view.after_s)) for a in view.assumptions]
    assert moved == sorted(moved, reverse=True)
    assert view.next.startswith("foretrace export demo.json --do prefetch-data --do ")
    assert loads(dumps(view), "whatif") == view


def test_whatif_reads_well(prediction: WhatIf) -> None:
    text = " ".join(render(predicted.whatif(prediction), Terminal(width=110)).split())
    assert "critical path: " in text and "assumed: " in text and "less than 1 %" in text


def test_a_page_holds_everything(runs: dict[str, Timeline], prediction: WhatIf) -> None:
    page = html.page_of(runs["recorded"], [prediction], path="demo.json")
    assert [blame.by for blame in page.blames] == ["name", "layer", "kind", "phase"]
    assert [track.name for track in page.tracks] == ["recorded", page.whatifs[0].name]
    text = html.render(page)
    assert "Demo V100 &lt;&amp;&gt;" in text and NASTY not in text
    assert page.whatifs[0].headline in text.replace("\N{NO-BREAK SPACE}", " ")
    assert html.render(page) == text


def test_a_cpu_recording_speaks_of_python(runs: dict[str, Timeline]) -> None:
    info = replace(runs["recorded"].graph.info, platform="cpu", devices=())
    view = show.show(replace(runs["recorded"], graph=replace(runs["recorded"].graph, info=info)))
    assert view.attributed_gpu_share is None and view.device == ""
    text = render(view, Terminal(width=110))
    assert "CPU only" in text and "launch-bound" not in text
