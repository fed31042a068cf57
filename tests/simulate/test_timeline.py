"""What `Timeline` says, held against brute force on random graphs and against small known answers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError, GraphError
from foretrace.graph.taskgraph import EdgeKind, TaskGraph, TaskKind
from foretrace.simulate.breakdown import PARTS, recurring
from foretrace.simulate.critical import UNBOUNDED, UNREACHED, reason_name, tails
from foretrace.simulate.replay import effective, replay
from foretrace.simulate.schedule import as_run, schedule_in_order
from foretrace.simulate.sensitivity import range_maximum, with_calls
from foretrace.simulate.timeline import simulate
from tests.simulate import twins
from tests.simulate.small import small_graph
from tests.strategies import task_graphs

Mask = npt.NDArray[np.bool_]


def _window(graph: TaskGraph) -> int:
    end = replay(graph)[1]
    return int(end[graph.marks[-1]] - end[graph.marks[0]])


@given(task_graphs(ranks=2), st.data())
def test_tails_equal_their_twin(graph: TaskGraph, data: st.DataObject) -> None:
    target = data.draw(st.integers(0, len(graph) - 1))
    mine, theirs = tails(graph, target), twins.tails(graph, target)
    for fast, slow in zip(mine, theirs, strict=True):
        assert [None if path < UNREACHED else path for path in fast.tolist()] == slow


@given(task_graphs())
def test_slack_is_how_far_a_task_can_grow(graph: TaskGraph) -> None:
    timeline = simulate(graph)
    slack, last = timeline.slack(), graph.marks[-1]
    for v in np.flatnonzero(~graph.gone).tolist():
        room = 10_000 if slack[v] == UNBOUNDED else int(slack[v])
        if room > 1 << 59:  # of what started when time began
            continue
        dur = graph.dur.copy()
        dur[v] += room
        assert replay(graph.with_columns(dur=dur))[1][last] == timeline.end[last]
        dur = graph.dur.copy()
        dur[v] += room + 3
        moved = 0 if slack[v] == UNBOUNDED else 3
        assert replay(graph.with_columns(dur=dur))[1][last] == timeline.end[last] + moved


@given(task_graphs(max_tasks=24))
def test_the_critical_path_sums_to_the_window(graph: TaskGraph) -> None:
    timeline = simulate(graph)
    path = timeline.critical_path()
    assert path.total_ns == timeline.window_ns
    assert sum(row.time_ns for row in path.summary()) == timeline.window_ns
    assert np.all(np.diff(path.task) > 0)
    assert np.all(path.work_ns <= effective(graph).dur[path.task])
    if len(path):
        assert path.task[-1] == graph.marks[-1]


@given(task_graphs(), st.sampled_from([0.1, 0.5]))
def test_sensitivity_of_single_tasks_is_exact(graph: TaskGraph, faster: float) -> None:
    timeline = simulate(graph)
    sensitivity = timeline.sensitivity(faster=faster)
    for v in range(len(graph)):
        for factor, saved in ((1 - faster, sensitivity.saved_if_faster_ns), (0.0, sensitivity.saved_if_zero_ns)):
            dur = graph.dur.copy()
            dur[v] = np.rint(dur[v] * factor)
            assert saved[v] == timeline.window_ns - _window(graph.with_columns(dur=dur))


@given(task_graphs(), st.sampled_from(["name", "layer", "kind", "phase"]))
def test_blame_is_the_difference_of_two_simulations(graph: TaskGraph, by: str) -> None:
    timeline = simulate(graph)
    for row in timeline.blame(by):  # type: ignore[arg-type]
        chosen = ~graph.gone & ~np.isin(graph.kind, (TaskKind.RETURN, TaskKind.MARK, TaskKind.JOIN))
        if by == "name":
            operator = (graph.kind == TaskKind.CPU) & (graph.op >= 0)
            chosen &= np.array(graph.names)[np.where(operator, graph.op, graph.name)] == row.name
            on_device = TaskKind[row.kind.upper()].on_device
            chosen &= np.array([TaskKind(k).on_device for k in graph.kind]) == on_device
        elif by == "layer":
            chosen &= np.array([*graph.layers, "(no layer)"])[graph.layer] == row.name
        elif by == "kind":
            chosen &= graph.kind == TaskKind[row.name.upper()]
        else:
            phases = ("(no phase)", "data", "forward", "backward", "optimizer", "recompute")
            chosen &= np.array(phases)[graph.phase] == row.name
        inside = chosen & (graph.step >= 0)
        assert row.count * graph.n_steps == pytest.approx(int(inside.sum()))
        assert row.time_s * graph.n_steps * 1e9 == pytest.approx(int(graph.dur[inside].sum()))
        dur = np.where(chosen, np.rint(graph.dur * 0.9).astype(np.int64), graph.dur)
        faster = timeline.window_ns - _window(graph.with_columns(dur=dur))
        assert row.saved_if_10pct_faster_s * graph.n_steps * 1e9 == pytest.approx(faster)
        without = timeline.window_ns - _window(graph.with_columns(gone=graph.gone | _with_calls(graph, chosen)))
        assert row.saved_if_removed_s * graph.n_steps * 1e9 == pytest.approx(without)


def _with_calls(graph: TaskGraph, chosen: Mask) -> Mask:
    """Brute force of `with_calls`: calls whose launched tasks are all chosen, and the RETURNs of removed calls."""
    gone = chosen.copy()
    out: dict[int, list[int]] = {}
    for e, v in enumerate(graph.dst.tolist()):
        if graph.edge_kind[e] == EdgeKind.LAUNCH and not graph.gone[v]:
            out.setdefault(int(graph.src[e]), []).append(v)
    for call, tasks in out.items():
        if graph.kind[call] == TaskKind.CALL and all(chosen[tasks]):
            gone[call] = True
    for e, v in enumerate(graph.dst.tolist()):
        u = int(graph.src[e])
        back = graph.edge_kind[e] == EdgeKind.PROGRAM and graph.kind[v] == TaskKind.RETURN
        if back and graph.kind[u] == TaskKind.CALL:
            gone[v] = gone[u]
    return gone


@given(task_graphs(lane_order=None))
def test_the_graph_as_it_ran_replays_to_the_schedule(graph: TaskGraph) -> None:
    run = schedule_in_order(graph)
    ordered = as_run(graph, run.order)
    start, end = replay(ordered)
    assert np.array_equal(start, run.start[run.order])
    assert np.array_equal(end, run.end[run.order])
    assert np.all(ordered.src < ordered.dst)


@given(task_graphs(lane_order=None))
def test_causes_of_a_scheduled_run_are_those_of_its_order(graph: TaskGraph) -> None:
    timeline = simulate(graph)
    assert timeline.critical_path().total_ns == timeline.window_ns
    assert len(timeline.slack()) == len(timeline.sensitivity().saved_if_zero_ns) == len(graph)
    for row in timeline.blame("kind"):
        assert TaskKind[row.name.upper()] in graph.kind


@given(st.one_of(task_graphs(loose=False), task_graphs(loose=False, gpu=False)))
def test_breakdown_sums_to_every_step(graph: TaskGraph) -> None:
    timeline = simulate(graph)
    assume(np.all(timeline.step_times_ns >= 0))
    breakdown = timeline.breakdown()
    assert breakdown.steps_ns.sum(axis=1).tolist() == timeline.step_times_ns.tolist()
    assert breakdown.steps_ns.min() >= 0
    assert sum(breakdown.median_s().values()) == pytest.approx(timeline.step_time_s)
    assert sum(breakdown.mean_s().values()) * 1e9 * graph.n_steps == pytest.approx(timeline.window_ns)
    for lane in timeline.lanes():
        assert sum(lane.busy_ns.values()) + lane.idle_ns == timeline.window_ns
        assert lane.idle_ns >= 0


@given(st.one_of(task_graphs(loose=False), task_graphs(loose=False, gpu=False)))
def test_breakdown_equals_a_walk_through_every_nanosecond(graph: TaskGraph) -> None:
    timeline = simulate(graph)
    assume(np.all(timeline.step_times_ns >= 0))
    bounds = timeline.end[graph.marks].tolist()
    has_device = bool(np.any(graph.on_device & ~graph.gone))
    expected = [dict.fromkeys(timeline.breakdown().total_ns(), 0) for _ in range(graph.n_steps)]
    blocked = [
        (int(timeline.end[graph.src[e]]), int(timeline.start[v]))
        for e, v in enumerate(graph.dst.tolist())
        if graph.edge_kind[e] == EdgeKind.PROGRAM and graph.kind[v] == TaskKind.RETURN and not graph.gone[v]
    ]
    for step, (begin, finish) in enumerate(pairwise(bounds)):
        for now in range(begin, finish):
            running = {
                TaskKind(graph.kind[v])
                for v in range(len(graph))
                if timeline.start[v] <= now < timeline.end[v] and not graph.gone[v]
            }
            expected[step][_part(running, has_device, any(a <= now < b for a, b in blocked))] += 1
    breakdown = timeline.breakdown()
    for step, parts in enumerate(expected):
        assert breakdown.steps_ns[step].tolist() == list(parts.values())


def test_a_wait_of_some_steps_recurs_and_one_of_a_single_step_does_not() -> None:
    steps = np.zeros((9, len(PARTS)), np.int64)
    steps[:, PARTS.index("compute")] = 100
    steps[4, PARTS.index("data_loading")] = 900
    assert recurring(steps) is None  # a disturbance, though half of the time
    steps[[1, 4, 7], PARTS.index("data_loading")] = 100
    found = recurring(steps)
    assert found is not None and (found.part, found.steps, found.of) == ("data_loading", 3, 9)
    steps[:, PARTS.index("data_loading")] = 100
    assert recurring(steps) is None  # the median step shows it


def _part(running: set[TaskKind], has_device: bool, blocked: bool) -> str:
    if TaskKind.KERNEL in running or (TaskKind.OPERATOR in running and not has_device):
        return "compute"
    if TaskKind.COLLECTIVE in running:
        return "exposed_communication"
    if running & {TaskKind.COPY, TaskKind.MEMSET}:
        return "exposed_copy"
    if TaskKind.DATA in running:
        return "data_loading"
    if running & {TaskKind.CPU, TaskKind.CALL, TaskKind.OPERATOR, TaskKind.PYTHON}:
        return "launch_bound"
    return "synchronisation" if blocked else "idle"


@given(task_graphs(max_tasks=24, loose=False))
def test_intervals_are_repeatable_and_contain_the_step(graph: TaskGraph) -> None:
    timeline = simulate(graph)
    interval = timeline.interval_s()
    assert interval == timeline.interval_s()
    assert interval.low_s <= timeline.step_time_s <= interval.high_s
    assert interval.steps == graph.n_steps
    assert ("other recordings" in interval.source) == (graph.n_steps < 3)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(-50, 50)), max_size=30))
def test_range_maximum(intervals: list[tuple[int, int, int]]) -> None:
    n = 41
    first = np.array([min(a, b) for a, b, _ in intervals], dtype=np.int64)
    last = np.array([max(a, b) for a, b, _ in intervals], dtype=np.int64)
    value = np.array([v for _, _, v in intervals], dtype=np.int64)
    best = range_maximum(n, first, last, value)
    for i in range(n):
        covering = value[(first <= i) & (i <= last)]
        assert best[i] == (covering.max() if len(covering) else best.min())
        assert len(covering) or best[i] < -(10**15)


@given(task_graphs(), st.integers(0, 5))
def test_with_calls_by_brute_force(graph: TaskGraph, name: int) -> None:
    chosen = (graph.name == name) & (graph.kind != TaskKind.RETURN)
    own, launcher = with_calls(graph, np.where(chosen, 0, -1).astype(np.int32))
    assert np.array_equal((own == 0) | (launcher == 0), _with_calls(graph, chosen))


@settings(max_examples=5)
@given(task_graphs())
def test_mistakes_are_refused(graph: TaskGraph) -> None:
    with pytest.raises(ForetraceError, match="choose name, layer, kind or phase"):
        simulate(graph).blame("colour")  # type: ignore[arg-type]
    no_steps = replace(simulate(graph), graph=replace(graph, marks=graph.marks[:1]))
    for answer in (no_steps.blame, no_steps.slack, no_steps.critical_path, no_steps.breakdown, no_steps.lanes):
        with pytest.raises(GraphError, match="no step boundaries"):
            answer()


def _launch_and_wait() -> TaskGraph:
    """A mark, host work, a launch, a kernel, a blocking call, a mark: 20 host work, 5 launch, then 6 to the kernel."""
    graph = small_graph(
        [
            (0, TaskKind.MARK, 0), (0, TaskKind.CPU, 20), (0, TaskKind.CALL, 5), (1, TaskKind.KERNEL, 100),
            (0, TaskKind.CALL, 3), (0, TaskKind.RETURN, 0), (0, TaskKind.MARK, 0),
        ],
        [
            (0, 1, EdgeKind.PROGRAM, 0, False), (1, 2, EdgeKind.PROGRAM, 0, False), (2, 3, EdgeKind.LAUNCH, 6, True),
            (2, 4, EdgeKind.PROGRAM, 0, False), (4, 5, EdgeKind.PROGRAM, 0, False), (3, 5, EdgeKind.SYNC, 2, False),
            (5, 6, EdgeKind.PROGRAM, 0, False),
        ],
    )  # fmt: skip
    return graph.with_columns(delay=np.array([0, 0, 0, 4, 0, 0, 0]))


def test_known_critical_path() -> None:
    """20 of work, launched 6 after the start of the call, 4 of delay, 100 of kernel, 2 until the call returns."""
    timeline = simulate(_launch_and_wait())
    path = timeline.critical_path()
    assert timeline.step_times_ns.tolist() == [132]
    assert path.task.tolist() == [1, 2, 3, 5, 6]
    assert [reason_name(reason) for reason in path.reason] == ["window", "program", "launch", "sync", "program"]
    assert (path.lag_ns.tolist(), path.delay_ns.tolist(), path.work_ns.tolist()) == (
        [0, 0, 6, 2, 0],
        [0, 0, 4, 0, 0],
        [20, 0, 100, 0, 0],
    )
    assert [(row.reason, row.lane, row.name, row.time_ns) for row in path.summary()] == [
        ("work", "gpu", "kernel", 100),
        ("work", "cpu", "other", 20),
        ("launch", "", "", 6),
        ("delay", "", "", 4),
        ("sync", "", "", 2),
    ]


def test_known_breakdown() -> None:
    """The device waits 35 for its kernel: 20 + 5 + 3 of host work and 2 blocked; it is blocked 2 more at the end."""
    breakdown = simulate(_launch_and_wait()).breakdown()
    assert breakdown.total_ns() == {
        "compute": 100,
        "exposed_copy": 0,
        "exposed_communication": 0,
        "launch_bound": 28,
        "data_loading": 0,
        "synchronisation": 4,
        "idle": 0,
    }
    host, stream = simulate(_launch_and_wait()).lanes()
    assert host.busy_ns == {TaskKind.CPU: 20, TaskKind.CALL: 8}
    assert (stream.busy_ns, stream.idle_ns) == ({TaskKind.KERNEL: 100}, 32)


def test_known_slack_and_blame() -> None:
    timeline = simulate(_launch_and_wait())
    assert timeline.slack().tolist() == [0, 0, 104, 0, 104, 0, 0]
    rows = {row.name: row for row in timeline.blame("kind")}
    assert rows["kernel"].saved_if_10pct_faster_s == pytest.approx(10e-9)
    # Gone with its launch: what remains is the host's work, and the blocking call that waits for nothing.
    assert rows["kernel"].saved_if_removed_s == pytest.approx((132 - 23) * 1e-9)
    assert rows["cpu"].saved_if_removed_s == pytest.approx(20e-9)
    assert [row.name for row in timeline.blame("kind")] == ["kernel", "cpu", "call"]


@pytest.mark.parametrize("blocking", [False, True])
def test_noise_of_the_device_counts_where_the_step_waits_for_it(blocking: bool) -> None:
    """Four steps of constant host work; kernels vary, and hide behind it unless the step waits for them."""
    rows, edges = [(0, TaskKind.MARK, 0)], []
    for kernel in (110, 120, 115, 112):
        at = len(rows)
        rows += [(0, TaskKind.CALL, 1), (1, TaskKind.KERNEL, kernel), (0, TaskKind.CPU, 149), (0, TaskKind.MARK, 0)]
        edges += [
            (at - 1, at, EdgeKind.PROGRAM, 0, False), (at, at + 1, EdgeKind.LAUNCH, 1, False),
            (at, at + 2, EdgeKind.PROGRAM, 0, False), (at + 2, at + 3, EdgeKind.PROGRAM, 0, False),
            (at + 1, at + 3, EdgeKind.SYNC, 100 if blocking else 0, False),
        ]  # fmt: skip
    graph = small_graph(rows, edges)
    marks = np.flatnonzero(graph.kind == TaskKind.MARK)
    step = (np.searchsorted(marks, np.arange(len(graph)), side="right") - 1).astype(np.int32)
    interval = simulate(replace(graph, marks=marks.astype(np.int32), step=step)).interval_s()
    if blocking:
        assert interval.low_s < 215.5e-9 < interval.high_s  # 1 + 1 + 113.5 + 100, the median of four
    else:
        assert interval.low_s == interval.high_s == pytest.approx(150e-9)
