"""Replay: start and end of every task by one pass over the rows, for one graph or for many variants of it.

**Removed tasks.** A task with `gone` set takes no time but keeps its place, so that what waited for it waits for
what came before it. Its duration and delay count as 0. Its incoming LAUNCH, QUEUE, SYNC, CONTENTION and DATA edges
are ignored: what is not there is not launched, does not block and is not held up. Positive lags of its incoming
STREAM, EVENT and COLLECTIVE edges count as 0, and it waits for no other rank. Its release time and its PROGRAM and
THREAD edges stay as they are. `LAG_CEILING_WHEN_GONE` holds this rule, as an upper bound of the lag by kind of edge.

**Rounding.** A scaled duration is rounded to the nearest nanosecond, halves to even.

The loops are compiled by numba. With its own NUMBA_DISABLE_JIT=1 they run as plain Python, some hundred times slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from foretrace.arrays import Array, Float64, Int32, Int64, Mask, UInt8, UInt32
from foretrace.graph.sound import END, LONGEST, fixed, verify
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, TaskGraph
from foretrace.simulate.unwritten import unwritten, written

Scalar = TypeVar("Scalar", bound=np.generic)

CROSS_RANK = len(EdgeKind)  # stands for the kind of a COLLECTIVE edge between two ranks
LAG_CEILING_WHEN_GONE = np.full(len(EdgeKind) + 1, np.iinfo(np.int64).max)
LAG_CEILING_WHEN_GONE[[EdgeKind.STREAM, EdgeKind.EVENT, EdgeKind.COLLECTIVE]] = 0
LAG_CEILING_WHEN_GONE[
    [EdgeKind.LAUNCH, EdgeKind.QUEUE, EdgeKind.SYNC, EdgeKind.CONTENTION, EdgeKind.DATA, CROSS_RANK]
] = NO_RELEASE  # never binds
LAG_CEILING_WHEN_GONE.flags.writeable = False

WIDEST_BLOCK = 64  # variants side by side; a few registers per 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Effective:
    """Columns of a graph as the engines read them, after the rule for removed tasks."""

    dur: Int64
    delay: Int64
    lag: Int64


def effective(graph: TaskGraph, *, structural: bool = False) -> Effective:
    """Return durations, delays (n) and lags (m) of a replay; structural: typical lags and no delays.

    Every engine takes its columns from here, hence those of sound graphs only: GraphError for any other.
    """
    verify(graph)
    dur, delay = graph.dur, graph.delay
    lag = graph.typical if structural else graph.lag
    if structural:
        delay = np.zeros_like(delay)
    if graph.gone.any():
        dur, delay = np.where(graph.gone, 0, dur), np.where(graph.gone, 0, delay)
        into_gone = np.repeat(graph.gone, np.diff(graph.in_ptr))
        lag = np.where(into_gone, np.minimum(lag, LAG_CEILING_WHEN_GONE[edge_classes(graph)]), lag)
    return Effective(dur=dur, delay=delay, lag=lag)


def edge_classes(graph: TaskGraph) -> UInt8:
    """Return the kind of every edge (m) as `LAG_CEILING_WHEN_GONE` counts them."""
    ranks = np.array([lane.rank for lane in graph.lanes])
    if len(set(ranks.tolist())) < 2:
        return graph.edge_kind
    rank = ranks[graph.lane]
    crossing = (graph.edge_kind == EdgeKind.COLLECTIVE) & (rank[graph.src] != rank[graph.dst])
    return np.where(crossing, CROSS_RANK, graph.edge_kind).astype(np.uint8)


def replay(graph: TaskGraph, *, structural: bool = False) -> tuple[Int64, Int64]:
    """Start and end of every task (n each, ns), lanes in the recorded order.

    `structural` takes typical lags and no delays: the test of the edges, see `TaskGraph`.
    """
    from foretrace.simulate import engine  # loads the compiler

    columns = effective(graph, structural=structural)
    times = unwritten((2, len(graph)))
    given = (columns.lag, columns.dur, columns.delay, graph.release)
    engine.replay(*structure(graph), *map(fixed, given), times.reshape(-1))  # type: ignore[call-arg]
    written(times)
    end, start = times
    return start, end


def replay_variants(
    graph: TaskGraph,
    group: Int32,
    scale: Float64,
    gone: Mask | None = None,
    *,
    full: bool = False,
) -> Int64:
    """Return ends (ns) in K variants of a graph: of its marks (marks x K), or of all tasks (n x K) if `full`.

    Variant k multiplies the duration of every task v with `group[v]` = g >= 0 by `scale[g, k]` (G x K, finite, not
    negative) and removes it where `gone[g, k]`. Equal to K single replays of the edited graphs, bit for bit.
    """
    n_groups, n_variants = _check_groups(graph, group, scale)
    if gone is not None and gone.shape != scale.shape:
        raise ValueError(f"gone: {gone.shape}, want {scale.shape}")
    rows = np.arange(len(graph), dtype=np.int32) if full else graph.marks
    if n_variants == 0 or len(rows) == 0:
        return np.zeros((len(rows), n_variants), dtype=np.int64)
    from foretrace.simulate.vectors import LANES  # loads the compiler

    blocks = -(-n_variants // WIDEST_BLOCK)
    width = -(-n_variants // (blocks * LANES)) * LANES
    factors = np.ones((n_groups + 1, blocks * width))
    factors[1:, :n_variants] = scale
    removed = np.zeros(factors.shape, dtype=np.bool_)
    if gone is not None:
        removed[1:, :n_variants] = gone
        factors[removed] = 0.0
    return _side_by_side(graph, group, _by_block(factors, blocks), _by_block(removed, blocks), rows)[:, :n_variants]


def replay_copies(graph: TaskGraph, meets: Mask, group: Int32, scale: Float64, rows: Int32) -> Int64:
    """Return ends (ns) of some tasks in one run of K copies of the graph that meet in some collectives (len(rows) x K).

    Everything is as recorded inside a copy, and through the edges of collectives that grow with the job (`meets`) a
    task waits for its source in all copies. Copies are kept side by side, as variants are: the memory that they take
    does not grow with the graph.

    Args:
        graph: all lanes ordered.
        meets: edges (m) through which a task waits for its source in every copy. Nothing of a removed task meets.
        group: label below G of every task (n), −1 for none.
        scale: factor of the durations of a group in a copy (G x K), finite, 0 or more.
        rows: the tasks that are asked for.

    Equal to the replay of one graph with all copies in it, bit for bit.

    """
    n_groups, copies = _check_groups(graph, group, scale)
    if meets.shape != (graph.edges,) or copies < 1:
        raise ValueError(f"meets: want {graph.edges} edges, and at least one copy")
    width = -(-copies // 16) * 16  # whole vectors
    factors = np.ones((1, n_groups + 1, width))
    factors[0, 1:, :copies] = scale
    factors[0, 1:, copies:] = scale[:, :1]  # what fills the last vector arrives with the first copy
    meets = meets & ~np.repeat(graph.gone, np.diff(graph.in_ptr))
    return _side_by_side(graph, group, factors, np.zeros(factors.shape, dtype=np.bool_), rows, meets)[:, :copies]


def _side_by_side(
    graph: TaskGraph, group: Int32, factors: Float64, removed: Mask, rows: Int32, meets: Mask | None = None
) -> Int64:
    """Return ends of some tasks in all variants; factors and what is removed are (blocks, groups + 1, width)."""
    from foretrace.simulate import engine, vectors

    columns = effective(graph)
    blocks, _, width = factors.shape
    read, slot, used = _value_slots(graph)
    in_order = np.argsort(rows, kind="stable")
    out = unwritten((len(rows), blocks * width))
    given = (
        fixed(graph.in_ptr), read, slot, _on_lines(unwritten((used, width))), fixed(edge_classes(graph)),
        fixed(columns.lag), fixed(columns.dur), fixed(columns.delay), fixed(graph.release), fixed(group),
        _on_lines(factors),
    )  # fmt: skip
    longest, last = float(columns.dur.max(initial=0)) * float(factors.max(initial=0)), END
    soon = float(graph.release.max(initial=0)) + len(graph) * longest < vectors.LATEST
    to = (LAG_CEILING_WHEN_GONE, rows[in_order], out)
    if meets is None and longest < vectors.LARGEST and soon and vectors.COMPILED:
        last = vectors.LATEST + 2 * LONGEST
        gone = _on_lines(-removed.astype(np.int64)) if removed.any() else None
        engine.replay_side_by_side(*given, gone, *to)
    else:
        any_gone = np.asarray(removed.any(axis=2), dtype=np.uint8)
        meet = None if meets is None else fixed(meets).view(np.uint8)
        engine.replay_variants(*given, removed.astype(np.int64) - 1, any_gone, *to, meet)
    ends = np.empty_like(out)
    ends[in_order] = out
    written(ends, last=last)
    return ends


def _value_slots(graph: TaskGraph) -> tuple[UInt32, Int32, int]:
    """Return what `engine.value_slots` lays out, kept with what has passed of the graph and its relatives."""
    from foretrace.simulate import engine

    edges = (graph.in_ptr, graph.src, graph.from_start)
    known = graph.passed.get("value slots")
    if known is None or any(mine is not theirs for mine, theirs in zip(edges, known[:3], strict=True)):
        n, (in_ptr, src, from_start) = len(graph), structure(graph)
        last_use, slot = np.full(2 * n, -1, dtype=np.int32), np.zeros(2 * n, dtype=np.int32)
        read, free = np.empty_like(src), np.empty(2 * n + 1, dtype=np.int32)
        used = engine.value_slots(in_ptr, src, from_start, last_use, read, slot, free)
        known = graph.passed["value slots"] = (*edges, read, slot, used)
    return known[3:]


def _check_groups(graph: TaskGraph, group: Int32, scale: Float64) -> tuple[int, int]:
    """Return shape of a table of factors, groups x variants. Raises ValueError where labels or factors do not fit."""
    n_groups, n_variants = scale.shape
    if group.shape != (len(graph),) or (len(group) and group.max() >= n_groups):
        raise ValueError(f"group: want {len(graph)} labels below {n_groups}")
    if not np.all(np.isfinite(scale)) or np.any(scale < 0):
        raise ValueError("scale: want finite factors, 0 or more")
    return n_groups, n_variants


def _by_block(table: Array, blocks: int) -> Array:
    """Return groups x (blocks · width) -> blocks x groups x width."""
    return table.reshape(len(table), blocks, -1).swapaxes(0, 1)


def _on_lines(table: Array) -> Array:
    """Return a copy that begins with a cache line: a register's worth that lies on two takes twice as long."""
    room = np.empty(table.nbytes + 64, dtype=np.uint8)
    skip = -room.ctypes.data % 64
    copy = room[skip : skip + table.nbytes].view(table.dtype).reshape(table.shape)
    copy[...] = table
    return copy


def structure(graph: TaskGraph) -> tuple[Int64, UInt32, UInt8]:
    """Return `in_ptr`, `src` and `from_start` as the kernels want them."""
    return fixed(graph.in_ptr), fixed(graph.src).view(np.uint32), fixed(graph.from_start).view(np.uint8)
