"""Lanes with several slots and collectives of several ranks in the schedule engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace as with_fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import GraphError
from foretrace.graph.assemble import assemble
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, GraphInfo, Lane, TaskGraph, TaskKind
from foretrace.simulate.groups import own_collective
from foretrace.simulate.replay import replay
from foretrace.simulate.schedule import _slot_givers, as_run, schedule, schedule_in_order
from foretrace.simulate.timeline import simulate
from foretrace.trace.trace import LaneKind
from tests.simulate import twins

COMPUTE, LINK = 0, 1  # lanes of every rank


class Ranks:
    """A graph of several ranks under construction: per rank a stream that computes and a lane for collectives."""

    def __init__(self, ranks: int, *, slots: Sequence[int], ordered: bool = False) -> None:
        self.tasks: list[dict[str, int]] = []
        self.edges: list[tuple[int, int, int, int]] = []  # src, dst, kind, lag
        self.names: list[str] = []
        self.lanes: list[Lane] = []
        self.last: dict[int, int] = {}
        self.ordered = ordered
        for rank in range(ranks):
            self.lanes.append(Lane(rank=rank, kind=LaneKind.GPU, device=0, label="compute", ordered=True))
            self.lanes.append(
                Lane(rank=rank, kind=LaneKind.LINK, label="comm", ordered=ordered, slots=slots[rank % len(slots)])
            )
        self.lanes.append(Lane(rank=0, kind=LaneKind.LINK, label="joins", ordered=False))

    def task(self, lane: int, kind: TaskKind, dur: int, after: Sequence[int] = (), /, **columns: int) -> int:
        """One task; on a lane that keeps its order it follows the task before it."""
        row = len(self.tasks)
        self.names.append(f"{kind.name.lower()} {row}")
        release = NO_RELEASE if len(after) or lane in self.last else 0
        values = {"lane": lane, "kind": kind, "dur": dur, "name": row, "release": release, "step": 0}
        self.tasks.append({**values, "recorded": row, "delay": 0, "priority": 0, "gone": 0} | columns)
        for before in after:
            self.edges.append((before, row, EdgeKind.EVENT, 0))
        if lane in self.last and (self.lanes[lane].ordered or lane % 2 == LINK):
            self.edges.append((self.last[lane], row, EdgeKind.STREAM, 0))
        self.last[lane] = row
        return row

    def collective(
        self, after: Mapping[int, Sequence[int]], dur: int, *, join: bool = False, **columns: int
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Arrival and transfer of every rank in `after`, which says what each rank does before."""
        arrive = {
            rank: self.task(2 * rank + LINK, TaskKind.ARRIVAL, 0, rows, **columns) for rank, rows in after.items()
        }
        sources = list(arrive.values())
        if join:
            meet = self.task(len(self.lanes) - 1, TaskKind.JOIN, 0)
            self.last.pop(len(self.lanes) - 1)
            self.edges += [(row, meet, EdgeKind.COLLECTIVE, 0) for row in sources]
            self.tasks[meet]["release"] = NO_RELEASE
            sources = [meet]
        transfer = {}
        for rank in arrive:
            transfer[rank] = row = self.task(2 * rank + LINK, TaskKind.COLLECTIVE, dur, **columns)
            self.tasks[row]["release"] = NO_RELEASE
            self.edges += [(before, row, EdgeKind.COLLECTIVE, 0) for before in sources]
        return arrive, transfer

    def graph(self) -> TaskGraph:
        """The graph; its marks are the first and the last task."""
        columns = list(zip(*self.edges, strict=True)) or [()] * 4
        rows = len(self.tasks)
        return assemble(
            {key: np.array([task[key] for task in self.tasks]) for key in self.tasks[0]},
            {
                key: np.array(column, dtype=np.int64)
                for key, column in zip(("src", "dst", "edge_kind", "lag"), columns, strict=True)
            },
            marks=np.array([0, rows - 1]),
            names=tuple(self.names),
            layers=(),
            lanes=tuple(self.lanes),
            info=GraphInfo(platform="cuda", steps=(0,), world_size=len(self.lanes) // 2),
        )


@st.composite
def group_graphs(draw: st.DrawFn, *, ordered: bool = False) -> TaskGraph:
    """Two to four ranks that compute and enter collectives, some of them removed, on lanes of one to three slots."""
    ranks = draw(st.integers(2, 4))
    build = Ranks(ranks, slots=draw(st.lists(st.integers(1, 3), min_size=ranks, max_size=ranks)), ordered=ordered)
    small, gone = st.integers(0, 12), st.sampled_from((0, 0, 0, 0, 0, 1))
    done = [[build.task(2 * rank, TaskKind.KERNEL, draw(small))] for rank in range(ranks)]
    for _ in range(draw(st.integers(1, 8))):
        what = draw(st.integers(0, 5))
        columns = {"priority": draw(st.integers(-1, 1)), "delay": draw(st.sampled_from((0, 0, 3))), "gone": draw(gone)}
        members = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks, unique=True))
        after = {
            rank: draw(st.lists(st.sampled_from(done[rank]), min_size=0 if ordered else 1, max_size=2))
            for rank in members
        }
        if what >= 3:
            arrive, transfer = build.collective(after, draw(small), join=draw(st.booleans()), **columns)
            if draw(st.integers(0, 5)) == 0:
                build.tasks[arrive[members[0]]]["gone"] = 1
            for rank in members:
                done[rank].append(transfer[rank])
        else:
            kind = (TaskKind.COLLECTIVE, TaskKind.KERNEL, TaskKind.ARRIVAL)[what]
            dur = 0 if kind == TaskKind.ARRIVAL else draw(small)
            lane = 2 * members[0] + draw(st.sampled_from((COMPUTE, LINK)))
            done[members[0]].append(build.task(lane, kind, dur, after[members[0]], **columns))
    for _ in range(draw(st.integers(0, 4))):  # edges of the same kinds that make no groups, or other ones
        a, b = sorted(draw(st.lists(st.integers(0, len(build.tasks) - 1), min_size=2, max_size=2)))
        if a < b:
            build.edges.append((a, b, draw(st.sampled_from((EdgeKind.COLLECTIVE, EdgeKind.EVENT))), draw(small)))
    for rank in range(ranks):
        build.task(2 * rank, TaskKind.KERNEL, 1, [done[rank][-1]])
    return build.graph()


@given(group_graphs())
def test_schedule_and_its_order_equal_their_twins(graph: TaskGraph) -> None:
    assert own_collective(graph).tolist() == twins.own_collective(graph)
    start, end, order = twins.schedule(graph)
    if len(order) < len(graph):
        with pytest.raises(GraphError, match="wait for each other forever"):
            schedule(graph)
        return
    run = schedule_in_order(graph)
    assert (run.start.tolist(), run.end.tolist()) == (start, end)
    assert sorted(run.order.tolist()) == list(range(len(graph)))


@given(group_graphs())
def test_the_graph_as_it_ran_replays_to_the_schedule(graph: TaskGraph) -> None:
    try:
        run = schedule_in_order(graph)
    except GraphError:
        return
    ordered = as_run(graph, run.order)
    start, end = replay(ordered)
    assert np.array_equal(start, run.start[run.order])
    assert np.array_equal(end, run.end[run.order])
    assert np.all(ordered.src < ordered.dst)
    assert all(lane.ordered for lane in ordered.lanes)
    assert _slot_givers(graph, run.order).tolist() == twins.slot_givers(graph, run.order.tolist())


@given(group_graphs())
def test_no_lane_runs_more_than_its_slots(graph: TaskGraph) -> None:
    try:
        start, end = schedule(graph)
    except GraphError:
        return
    own = own_collective(graph)
    until = np.where(own >= 0, end[own], end)
    takes = ~np.isin(np.arange(len(graph)), own[own >= 0])
    for i, lane in enumerate(graph.lanes):
        rows = np.flatnonzero((graph.lane == i) & takes & (until > start))
        if not lane.ordered:
            for now in start[rows]:
                assert np.sum((start[rows] <= now) & (now < until[rows])) <= lane.slots


@given(group_graphs())
def test_a_transfer_begins_when_all_have_arrived_and_all_ends_agree(graph: TaskGraph) -> None:
    try:
        start, end = schedule(graph)
    except GraphError:
        return
    dst = graph.dst
    for v in np.unique(own_collective(graph)):
        if v >= 0:
            into = np.flatnonzero(dst == v)
            into = into[~((graph.edge_kind[into] == EdgeKind.STREAM) & (graph.lane[graph.src[into]] == graph.lane[v]))]
            assert start[v] == np.max(end[graph.src[into]] + graph.lag[into]) + graph.delay[v]


@settings(max_examples=40)
@given(group_graphs())
def test_causes_are_those_of_the_run(graph: TaskGraph) -> None:
    try:
        timeline = simulate(graph)
    except GraphError:
        return
    if timeline.end[graph.marks[1]] < timeline.end[graph.marks[0]]:  # the marks are on two ranks
        return
    assert timeline.critical_path().total_ns == timeline.window_ns
    assert len(timeline.slack()) == len(graph)


@given(group_graphs(ordered=True))
def test_groups_on_ordered_lanes_are_the_replay(graph: TaskGraph) -> None:
    graph = with_fields(graph, lanes=tuple(with_fields(lane, ordered=True) for lane in graph.lanes))
    for mine, theirs in zip(schedule(graph), replay(graph), strict=True):
        assert np.array_equal(mine, theirs)


@settings(max_examples=40)
@given(group_graphs())
def test_many_slots_are_enough(graph: TaskGraph) -> None:
    """With a slot for every task nothing waits: the replay of a graph without its STREAM edges on link lanes."""
    many = with_fields(graph, lanes=tuple(with_fields(lane, slots=10**9) for lane in graph.lanes))
    start, _ = schedule(many)
    kept = ~((graph.edge_kind == EdgeKind.STREAM) & np.isin(graph.lane[graph.dst], _unordered(graph)))
    in_ptr = np.concatenate([[0], np.cumsum(np.bincount(graph.dst[kept], minlength=len(graph)))])
    edges = {key: getattr(graph, key)[kept] for key in ("src", "edge_kind", "lag", "typical", "from_start", "inferred")}
    assert np.array_equal(start, replay(with_fields(graph, in_ptr=in_ptr, **edges))[0])


def _unordered(graph: TaskGraph) -> list[int]:
    return [i for i, lane in enumerate(graph.lanes) if not lane.ordered]


def _two_in_opposite_order(slots: int, *, first: int = 1) -> Ranks:
    """Rank 0 enters A at 10 and B at 20; rank 1 enters B at 10 and A at 20. Each transfer takes 100."""
    build = Ranks(2, slots=[slots])
    begin = [(build.task(2 * r, TaskKind.KERNEL, 10), build.task(2 * r, TaskKind.KERNEL, 10)) for r in (0, 1)]
    build.collective({0: [begin[0][0]], 1: [begin[1][first]]}, 100)
    build.collective({0: [begin[0][1]], 1: [begin[1][1 - first]]}, 100)
    build.task(0, TaskKind.KERNEL, 1)
    return build


def test_collectives_entered_in_opposite_orders_are_a_deadlock() -> None:
    build = _two_in_opposite_order(1)
    for i, name in {6: "all-reduce A", 7: "all-reduce A", 10: "all-reduce B", 11: "all-reduce B"}.items():
        build.names[i] = name
    with pytest.raises(GraphError, match="wait for each other forever") as raised:
        schedule(build.graph())
    for word in ("all-reduce A", "all-reduce B", "comm of rank 0", "comm of rank 1", "same order", "more slots"):
        assert word in str(raised.value)
    assert len(twins.schedule(build.graph())[2]) < len(build.graph())


def test_slots_for_both_resolve_the_opposite_orders() -> None:
    start, end = _times(_two_in_opposite_order(2).graph())
    assert start["collective 6"] == start["collective 10"] == 20
    assert end["collective 7"] == end["collective 11"] == 120


def test_one_slot_keeps_the_second_collective_out_until_the_first_has_ended() -> None:
    start, end = _times(_two_in_opposite_order(1, first=0).graph())
    assert (start["arrival 4"], start["collective 6"], end["collective 6"]) == (10, 10, 110)
    assert (start["arrival 8"], start["collective 10"], end["collective 10"]) == (110, 110, 210)


def test_a_late_rank_holds_up_the_other_lane() -> None:
    """Rank 0 waits 90 inside the collective and a copy that needs its lane waits with it; on rank 1 it ran before."""
    build = Ranks(2, slots=[1])
    early, late = build.task(0, TaskKind.KERNEL, 10), build.task(2, TaskKind.KERNEL, 100)
    copies = [build.task(2 * r + LINK, TaskKind.COPY, 7, release=20) for r in (0, 1)]
    arrive, transfer = build.collective({0: [early], 1: [late]}, 30, join=True)
    build.task(0, TaskKind.KERNEL, 1)
    start, end = _times(build.graph())
    name = {row: build.names[row] for row in range(len(build.names))}
    assert (start[name[arrive[0]]], start[name[transfer[0]]], end[name[transfer[0]]]) == (10, 100, 130)
    assert (start[name[copies[0]]], start[name[copies[1]]]) == (130, 20)
    timeline = simulate(build.graph())
    assert timeline.critical_path().total_ns == timeline.window_ns


def test_two_slots_hold_two_collectives_and_the_third_waits() -> None:
    build = Ranks(2, slots=[2])
    begin = {rank: [build.task(2 * rank, TaskKind.KERNEL, 5)] for rank in (0, 1)}
    transfers = [build.collective(begin, dur)[1][0] for dur in (50, 20, 40)]
    build.task(0, TaskKind.KERNEL, 1)
    start, end = _times(build.graph())
    assert [start[build.names[row]] for row in transfers] == [5, 5, 25]
    assert [end[build.names[row]] for row in transfers] == [55, 25, 65]


def test_removed_collectives_hold_no_slot() -> None:
    build = _two_in_opposite_order(1)
    for task in build.tasks:
        task["gone"] = task["kind"] in (TaskKind.ARRIVAL, TaskKind.COLLECTIVE)
    _, end = schedule(build.graph())
    assert end.max() == 21


def test_a_lane_without_slots_is_refused() -> None:
    graph = _two_in_opposite_order(0).graph()
    with pytest.raises(GraphError, match="lane comm of rank 0 has 0 slots and can run nothing; give it 1 or more"):
        schedule(graph)


def test_a_collective_that_needs_its_own_lane_is_named() -> None:
    """One rank enters the same collective twice: the second arrival never finds the slot that the first one holds."""
    build = Ranks(2, slots=[1])
    arrive, transfer = build.collective({0: [], 1: []}, 10)
    build.last.clear()
    again = build.task(LINK, TaskKind.ARRIVAL, 0, release=0)
    build.edges.append((again, transfer[0], EdgeKind.COLLECTIVE, 0))
    with pytest.raises(
        GraphError, match=r"holds lane comm of rank 0 and waits for task \d+ \(arrival 4\), which waits"
    ):
        schedule(build.graph())
    assert len(arrive) == 2


def _times(graph: TaskGraph) -> tuple[dict[str, int], dict[str, int]]:
    start, end = schedule(graph)
    return tuple(  # type: ignore[return-value]  # two of them
        {graph.names[graph.name[v]]: int(column[v]) for v in range(len(graph))} for column in (start, end)
    )
