"""Soundness: the engines take only graphs in which nothing can be read before it was written."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import GraphError
from foretrace.graph.sound import first_fault, sound, sound_rows, verify
from foretrace.graph.taskgraph import ALL_COLUMNS, EDGE_COLUMNS, TASK_COLUMNS, TaskGraph
from foretrace.simulate.replay import replay
from foretrace.simulate.timeline import simulate
from tests.strategies import task_graphs


def shuffled(graph: TaskGraph, order: list[int]) -> TaskGraph:
    """The same tasks and edges with row i in the place of row order[i], whatever the edges say."""
    place = np.empty(len(graph), dtype=np.int32)
    place[order] = np.arange(len(graph), dtype=np.int32)
    src, dst = place[graph.src], place[graph.dst]
    by_dst = np.lexsort((graph.edge_kind, src, dst))
    columns: dict[str, Any] = {key: getattr(graph, key)[order] for key in TASK_COLUMNS}
    columns |= {key: (src if key == "src" else getattr(graph, key))[by_dst] for key in EDGE_COLUMNS}
    in_ptr = np.append(0, np.cumsum(np.bincount(dst, minlength=len(graph)))).astype(np.int64)
    return replace(graph, **columns, in_ptr=in_ptr, marks=place[graph.marks])


@given(task_graphs(), st.data())
def test_rows_in_any_order_replay_as_before(graph: TaskGraph, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(graph))))
    mixed = shuffled(graph, order)
    mended, rows = sound_rows(mixed)
    assert np.array_equal(replay(mended)[1][rows], replay(graph)[1][order])
    if np.all(mixed.src < mixed.dst):
        assert mended is mixed
    else:
        with pytest.raises(GraphError, match="goes backward"):
            replay(mixed)


def test_a_cycle_is_named_by_its_tasks() -> None:
    graph = chain(5)
    src = graph.src.copy()
    src[1] = 3  # 3 -> 2 beside 2 -> 3
    with pytest.raises(GraphError, match=r"cycle through task 2 \(t\) and task 3 \(t\)\.$"):
        sound(graph.with_columns(src=src))


FAULTS: dict[str, tuple[str, int, Any]] = {
    "dur": ("dur", 1, -1),
    "delay": ("delay", 1, -5),
    "dur beyond any time": ("dur", 1, 1 << 62),
    "release": ("release", 0, 1 << 62),
    "kind": ("kind", 2, 77),
    "phase": ("phase", 2, 9),
    "lane": ("lane", 1, 4),
    "lane below": ("lane", 1, -1),
    "name": ("name", 0, 1),
    "layer": ("layer", 0, 0),
    "step": ("step", 0, 50),
    "op": ("op", 0, 7),
    "shape": ("shape", 0, 0),
    "nbytes": ("nbytes", 0, -2),
    "probes": ("probes", 0, -1),
    "flops": ("flops", 0, np.nan),
    "flops without end": ("flops", 0, np.inf),
    "flops below": ("flops", 0, -1.0),
    "edge_kind": ("edge_kind", 0, 10),
    "lag": ("lag", 0, 1 << 62),
    "src": ("src", 0, -1),
    "src beyond": ("src", 0, 90),
    "in_ptr": ("in_ptr", 1, 9),
    "in_ptr falls": ("in_ptr", 3, 0),
    "marks": ("marks", 1, 5),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_is_named_and_never_replayed(fault: str) -> None:
    key, at, value = FAULTS[fault]
    graph = chain(5)
    column = getattr(graph, key).copy()
    column[at] = value
    damaged = graph.with_columns(**{key: column})
    with pytest.raises(GraphError, match={"src": "edge 0 comes from row", "marks": "mark 1"}.get(key, key)):
        replay(damaged)
    with pytest.raises(GraphError):
        sound(damaged)


@pytest.mark.parametrize("key", [*TASK_COLUMNS, *EDGE_COLUMNS, "in_ptr", "marks"])
def test_lengths_and_types_are_checked(key: str) -> None:
    graph = chain(5)
    changed: dict[str, Any] = {key: getattr(graph, key)[:-1]}
    if key != "marks":
        with pytest.raises(GraphError, match="column"):
            verify(replace(graph, **changed))
    changed = {key: getattr(graph, key).astype(np.int16)}
    with pytest.raises(GraphError, match=f"column {key} must hold"):
        verify(replace(graph, **changed))


def test_a_step_that_ends_before_it_begins_is_refused() -> None:
    graph = chain(5)
    with pytest.raises(GraphError, match="step 0 would end 40 ns before it begins"):
        simulate(graph.with_columns(marks=graph.marks[::-1])).step_time_s  # noqa: B018


def test_a_truth_value_is_0_or_1() -> None:
    graph = chain(5)
    odd = np.full(len(graph), 3, dtype=np.uint8).view(np.bool_)
    with pytest.raises(GraphError, match=r"gone 3, which must lie between 0 and 1"):
        verify(graph.with_columns(gone=odd))


def looked_at(graph: TaskGraph) -> set[str]:
    """What is looked at when this graph is verified now."""
    before = dict(graph.passed)
    verify(graph)
    return {what for what, known in graph.passed.items() if known is not before.get(what)}


def test_what_passed_is_good_for_these_very_arrays_alone() -> None:
    graph = chain(5)
    # Durations of a relative that is replayed first: what both hold is looked at once, whoever comes first.
    assert looked_at(graph.with_columns(dur=2 * graph.dur)) == {*ALL_COLUMNS, "steps", "edges"}
    assert looked_at(graph) == {"dur"}
    assert not looked_at(graph.noted())
    assert looked_at(graph.with_columns(dur=3 * graph.dur)) == {"dur"}
    assert not graph.dur.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        graph.dur[0] = -1
    assert looked_at(verify(chain(6)).with_columns(src=chain(6).src)) == {"src", "edges"}
    assert looked_at(replace(verify(chain(7)), names=("t", "more"))) == {"name", "op"}


def test_a_table_that_shrinks_is_looked_at_again() -> None:
    graph = verify(chain(5))
    with pytest.raises(GraphError, match="has name 0, which must lie between 0 and -1"):
        verify(replace(graph, names=()))
    with pytest.raises(GraphError, match="has lane 0, which must lie between 0 and -1"):
        verify(replace(graph, lanes=()))


def test_what_somebody_can_still_write_to_is_copied_or_looked_at_again() -> None:
    graph = verify(chain(5))
    mine = np.full(2 * len(graph), 10)
    shared = verify(graph.with_columns(dur=mine[: len(graph)]))
    mine[:] = -1
    assert shared.dur.tolist() == [10] * len(graph)
    travelled = pickle.loads(pickle.dumps(graph))  # arrives with columns that can be written to
    if not travelled.dur.flags.writeable:  # from numpy 2.5 on: then somebody gives it one
        travelled = replace(travelled, dur=travelled.dur.copy())
    travelled.dur[0] = -1
    with pytest.raises(GraphError, match="has dur -1"):
        replay(travelled)


@given(task_graphs(), st.data())
def test_damage_leaves_no_edge_that_goes_backward_unseen(graph: TaskGraph, data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(["dur", "delay", "lane", "name", "kind", "src", "in_ptr", "lag", "gone", "flops"]))
    column = getattr(graph, key).copy()
    if len(column):
        raw = column.view(np.uint8)
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    damaged = graph.with_columns(**{key: column})
    found = first_fault(replace(damaged, passed={}))
    if found is None or found.backward:
        edges = ((u, v) for v in range(len(graph)) for u in damaged.src[damaged.in_ptr[v] : damaged.in_ptr[v + 1]])
        assert any(u >= v for u, v in edges) == (found is not None)


def chain(n: int) -> TaskGraph:
    """Tasks one after the other on one thread, the first and the last of which are marks."""
    from foretrace.graph.assemble import assemble
    from foretrace.graph.taskgraph import GraphInfo, Lane, TaskKind
    from foretrace.trace.trace import LaneKind

    kind = np.full(n, TaskKind.CPU)
    kind[[0, -1]] = TaskKind.MARK
    return assemble(
        {"kind": kind, "lane": np.zeros(n), "name": np.zeros(n), "dur": np.full(n, 10), "recorded": np.arange(n)},
        {"src": np.arange(n - 1), "dst": np.arange(1, n), "edge_kind": np.zeros(n - 1), "lag": np.zeros(n - 1)},
        marks=np.array([0, n - 1]),
        names=("t",),
        layers=(),
        lanes=(Lane(rank=0, kind=LaneKind.CPU),),
        info=GraphInfo(),
    )


@given(task_graphs(), st.data())
def test_some_edges_of_a_proven_graph_are_sound(graph: TaskGraph, data: st.DataObject) -> None:
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=graph.edges, max_size=graph.edges)), dtype=np.bool_)
    some = verify(graph).with_edges(kept)
    assert first_fault(replace(some, passed={})) is None
    assert np.array_equal(some.dst, graph.dst[kept])
