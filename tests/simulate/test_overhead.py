"""The cost of recording is found from unprofiled neighbours and removed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.graph import edit
from foretrace.graph.builder import build
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.check import check
from foretrace.simulate.compare import compare
from foretrace.simulate.overhead import clock_of, disturbance, one_clock, unprofiled
from foretrace.simulate.replay import replay
from foretrace.simulate.timeline import simulate
from tests.kineto_files import Recording

PER_EVENT_US = 2.0


def recorded(steps: int, neighbours: list[float], *, wall_over_cpu: float = 1.0) -> TaskGraph:
    """Steps of ten operators of 10 us with 5 us of Python between, each event made longer by the profiler."""
    r = Recording(device="")
    at = 0.0
    for step in range(steps):
        begin = at
        for _ in range(10):
            at += 5 + PER_EVENT_US / 2
            r.op("aten::mm", at, 10)
            at += 10 + PER_EVENT_US / 2
        r.note(f"ProfilerStep#{step}", begin, at - begin)
    profiled = at / steps * 1000
    stamps: list[dict[str, Any]] = [
        {"step": i, "phase": "before", "wall_ns": int(t * 1000), "cpu_ns": int(t * 1000)}
        for i, t in enumerate(neighbours)
    ]
    r.extra["foretrace"] = {
        "format": 1,
        "steps": stamps,
        "overhead": {
            "profiled": {"wall_ns": int(profiled * wall_over_cpu), "cpu_ns": int(profiled)},
            "unprofiled": {"wall_ns": 150_000, "cpu_ns": 150_000},
        },
    }
    return build(r.trace())


def steps_of(graph: TaskGraph) -> list[int]:
    _, end = replay(graph)
    return [int(t) for t in np.diff(end[graph.marks])]


def test_a_changed_graph_is_left_as_it_is() -> None:
    changed = edit.scale(recorded(5, [148, 149, 150, 151, 152]), np.array([3]), 0.5)
    assert unprofiled(changed) is changed


def test_corrected_steps_take_as_long_as_unprofiled_ones() -> None:
    graph = recorded(5, [148, 149, 150, 151, 152])
    assert np.median(steps_of(graph)) == 170_000
    corrected = unprofiled(graph)
    assert np.median(steps_of(corrected)) == pytest.approx(150_000, rel=0.002)
    assert corrected.info.overhead["per_event_s"] * 1e6 == pytest.approx(PER_EVENT_US, rel=0.15)
    assert len(corrected.changes) == 1


def test_operators_keep_their_time_and_python_loses_the_probes() -> None:
    graph = recorded(5, [150] * 5)
    corrected = unprofiled(graph)
    work = graph.kind == 1
    assert corrected.dur[work].sum() == pytest.approx(graph.dur[work].sum(), rel=0.01)


def test_the_cost_of_an_event_comes_from_the_shortest_steps() -> None:
    graph = recorded(5, [150, 260, 270, 280, 290])  # others disturbed most of the plain steps
    stamps = graph.info.recording["steps"]
    stamps += [
        {"step": 10 + i, "phase": "active", "wall_ns": ns, "cpu_ns": ns}
        for i, ns in enumerate((170_000, 300_000, 310_000))
    ]
    corrected = unprofiled(graph)
    assert corrected.info.overhead["per_event_s"] * 1e6 == pytest.approx(PER_EVENT_US, rel=0.15)
    assert np.median(steps_of(corrected)) == pytest.approx(270_000, rel=0.002)
    python = graph.kind != 1
    share = corrected.dur[python].sum() / corrected.dur.sum()
    assert share == pytest.approx(1 / 3, rel=0.02), "Python takes 5 of every 15 us, whatever the profiler cost"


def test_spread_of_the_unprofiled_steps_stays() -> None:
    corrected = unprofiled(recorded(5, [130, 140, 150, 160, 170]))
    assert max(steps_of(corrected)) - min(steps_of(corrected)) > 20_000


def test_recording_without_neighbours_is_left_alone() -> None:
    r = Recording(device="")
    r.note("ProfilerStep#1", 0, 100)
    r.op("aten::mm", 10, 50)
    graph = build(r.trace())
    assert unprofiled(graph) is graph


def test_disturbed_recording_is_said_to_be() -> None:
    assert not disturbance(recorded(5, [150] * 5))
    graph = recorded(5, [150] * 5, wall_over_cpu=1.5)
    [said] = disturbance(graph)
    assert "1.50 times their CPU time" in said
    assert said in unprofiled(graph).info.notes


def test_disturbed_steps_are_set_to_their_cpu_time() -> None:
    graph = recorded(5, [150] * 5, wall_over_cpu=1.5)
    for stamp in graph.info.recording["steps"]:
        stamp["wall_ns"] *= 2
    assert np.median(steps_of(unprofiled(graph))) == pytest.approx(150_000, rel=0.002)


def test_waiting_for_storage_is_a_step_s_own_time() -> None:
    graph = recorded(5, [400.0] * 4, wall_over_cpu=4.0)
    extra = 3 * graph.info.recording["overhead"]["profiled"]["cpu_ns"]
    loader = {"loader_wall_ns": extra + 1000, "loader_cpu_ns": 600, "loader_queued_ns": 400}
    steps = [
        {**step, **loader, "phase": phase} for step in graph.info.recording["steps"] for phase in ("active", "before")
    ]
    waited = replace(graph, info=replace(graph.info, recording={**graph.info.recording, "steps": steps}))
    assert disturbance(graph) and not disturbance(waited)
    assert clock_of(unprofiled(waited)) == "wall"


def test_corrected_graph_still_passes_the_checks() -> None:
    assert check(unprofiled(recorded(5, [150] * 5))).ok


def wall_stretched(by: float, *, threads: int = 1) -> TaskGraph:
    """The recording of a step of 150 us of CPU time whose wall time, profiled or not, is so many times that."""
    graph = recorded(5, [150] * 5, wall_over_cpu=by)
    for stamp in graph.info.recording["steps"]:
        stamp["wall_ns"] = int(stamp["wall_ns"] * by)
    graph.info.recording["overhead"]["unprofiled"]["wall_ns"] = int(150_000 * by)
    graph.info.recording["threads"] = {"intra_op": threads}
    return graph


def test_two_recordings_are_compared_on_one_clock() -> None:
    calm, disturbed = unprofiled(wall_stretched(1.08)), unprofiled(wall_stretched(1.5))
    assert (clock_of(calm), clock_of(disturbed)) == ("wall", "cpu")
    assert np.median(steps_of(calm)) == pytest.approx(162_000, rel=0.002), "on the wall clock"
    for before, after in ((calm, disturbed), (disturbed, calm)):
        found = compare(simulate(before), simulate(after))
        assert found.after_ns == pytest.approx(found.before_ns, rel=0.002), "the same job on the same clock"
        assert "is in CPU time, so" in found.note
    same, other, said = one_clock(calm, unprofiled(wall_stretched(1.0)))
    assert not said and same is calm and clock_of(other) == "wall"


def test_a_step_without_cpu_time_takes_the_other_back_to_the_wall_clock() -> None:
    several, disturbed = unprofiled(wall_stretched(1.0, threads=2)), unprofiled(wall_stretched(1.5))
    before, after, said = one_clock(several, disturbed)
    assert before is several and clock_of(after) == "wall"
    assert "several threads, so AFTER is in wall time" in said
    assert np.median(steps_of(after)) == pytest.approx(225_000, rel=0.002)


def test_recordings_that_share_no_clock_are_refused() -> None:
    r = Recording(device="")
    r.note("ProfilerStep#1", 0, 100)
    r.op("aten::mm", 10, 50)
    foreign, disturbed = build(r.trace()), unprofiled(wall_stretched(1.5))
    for stamp in disturbed.info.recording["steps"]:
        del stamp["wall_ns"]
    del disturbed.info.recording["overhead"]["unprofiled"]["wall_ns"]
    with pytest.raises(ForetraceError, match=r"does not tell its CPU time .* record both with foretrace record"):
        compare(simulate(disturbed), simulate(foreign))


def test_a_clock_can_be_asked_for() -> None:
    graph = wall_stretched(1.08)
    assert np.median(steps_of(unprofiled(graph, "cpu"))) == pytest.approx(150_000, rel=0.002)
    assert np.median(steps_of(unprofiled(wall_stretched(1.5), "wall"))) == pytest.approx(225_000, rel=0.002)
    assert clock_of(unprofiled(wall_stretched(1.08, threads=2), "cpu")) == "wall", "two threads have no such time"
