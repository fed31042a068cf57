"""Edits that keep the rows of a graph: scale, remove, cut, set priorities.

Every edit returns a new graph that shares the untouched columns with the old one and carries a `Change`; the
rows keep their numbers, so masks and row numbers stay good from one of these edits to the next. Edits that
add tasks are in `foretrace.graph.insert`. The primitives are those of Daydream (ATC 2020, section 4.3).
"""

from __future__ import annotations

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.errors import GraphError
from foretrace.graph.taskgraph import EDGE_COLUMNS, Change, EdgeKind, TaskGraph, TaskKind


def scale(graph: TaskGraph, mask: Mask, by: float | Float64) -> TaskGraph:
    """Multiply the durations of the chosen tasks by one factor or by one each; below 0 is a GraphError."""
    factors = np.asarray(by, dtype=np.float64)
    if not np.all(np.isfinite(factors) & (factors >= 0)):
        raise GraphError("a task cannot be scaled by a negative or infinite factor; give by=0.5 for half the time.")
    kind = np.unique(factors)
    how = f"by {kind[0]:.4g}" if len(kind) == 1 else f"by {kind.min(initial=1):.3g} to {kind.max(initial=1):.3g}"
    new = graph.dur[np.flatnonzero(mask)] * factors
    return retime(graph, mask, new, what=f"scaled {{}} {how}")


def retime(
    graph: TaskGraph, mask: Mask, dur_ns: Float64 | Int64, *, what: str = "gave new durations to {}"
) -> TaskGraph:
    """Give the chosen tasks new durations in ns, one per chosen task in row order."""
    dur = graph.dur.copy()
    dur[np.flatnonzero(mask)] = np.rint(dur_ns).astype(np.int64)
    return graph.with_columns(dur=dur).noted(_change(what.format(describe(graph, mask)), mask))


def remove(graph: TaskGraph, mask: Mask) -> TaskGraph:
    """Mark tasks as gone: no time, delay or gap of their own, but what came before still precedes what follows.

    A launch call goes with the last of the device tasks that it launched, and the return of a blocking call
    with its call. A synchronising call waits for what is left of the work launched before it; a launch that
    waited for a slot in a full queue waits for the task that now holds this slot. Host tasks keep their
    position as zero-length tasks, so that events and forks bound to them stay in place. Of a collective between
    ranks, the arrival goes with the transfer.
    """
    gone = graph.gone | mask | _arrivals(graph, mask)
    new_gone = gone & ~graph.gone
    dst = graph.dst
    launch = graph.edge_kind == EdgeKind.LAUNCH
    # calls that lose a task now and have none left
    losing = graph.mask(graph.src[launch & new_gone[dst]])
    left = graph.mask(graph.src[launch & ~gone[dst]])
    calls = losing & ~left & ~gone & (graph.kind == TaskKind.CALL)
    gone = gone | calls
    # the return of a call that is gone
    into_return = (graph.edge_kind == EdgeKind.PROGRAM) & (graph.kind[dst] == TaskKind.RETURN)
    into_return &= gone[graph.src] & (graph.kind[graph.src] == TaskKind.CALL) & ~gone[dst]
    gone = gone.copy()
    gone[dst[into_return]] = True

    # Of two gaps around a task that is gone one remains, and an overlap with it is none with its neighbours.
    lag, typical = graph.lag.copy(), graph.typical.copy()
    into, out = gone[dst], gone[graph.src]
    stream = graph.edge_kind == EdgeKind.STREAM
    free = (into & (stream | (graph.edge_kind == EdgeKind.COLLECTIVE))) | (out & stream & (lag < 0))
    lag[free], typical[free] = 0, 0
    rank = graph.rank
    drop = (graph.edge_kind == EdgeKind.CONTENTION) & (into | out)
    drop |= into & np.isin(graph.edge_kind, (EdgeKind.LAUNCH, EdgeKind.SYNC, EdgeKind.QUEUE, EdgeKind.DATA))
    drop |= into & (graph.edge_kind == EdgeKind.COLLECTIVE) & (rank[graph.src] != rank[dst])

    dur, delay = graph.dur.copy(), graph.delay.copy()
    dur[gone], delay[gone] = 0, 0
    result = graph.with_columns(dur=dur, delay=delay, gone=gone, lag=lag, typical=typical)
    result = requeue(result.with_edges(~drop), queue_slots(graph))
    extra = int(calls.sum())
    what = f"removed {describe(graph, mask & ~graph.gone)}"
    if extra:
        what += f" and {extra} launch{'es' if extra > 1 else ''}"
    return result.noted(_change(what, gone & ~graph.gone))


def _arrivals(graph: TaskGraph, mask: Mask) -> Mask:
    """Return the arrivals of the chosen transfers, on their own ranks."""
    dst = graph.dst
    own = (graph.edge_kind == EdgeKind.COLLECTIVE) & (graph.kind[graph.src] == TaskKind.ARRIVAL)
    own &= (graph.lane[graph.src] == graph.lane[dst]) & (graph.kind[dst] == TaskKind.COLLECTIVE) & mask[dst]
    return graph.mask(graph.src[own])


def cut(graph: TaskGraph, edges: Mask, *, technique: str = "") -> TaskGraph:
    """Take edges out (m rows, bool): what they ordered is no longer ordered by them."""
    kinds = sorted({EdgeKind(kind).name.lower() for kind in np.unique(graph.edge_kind[edges])})
    what = f"cut {int(edges.sum())} {' and '.join(kinds)} edges"
    return graph.with_edges(~edges).noted(Change(technique=technique, what=what, tasks=int(edges.sum())))


def queue_slots(graph: TaskGraph) -> Int64:
    """Return per RETURN that waited for a full launch queue the places between the task that freed a slot and it.

    −1 for all other tasks. Tasks that are gone take no place.
    """
    slots = np.full(len(graph), -1, dtype=np.int64)
    edges = np.flatnonzero(graph.edge_kind == EdgeKind.QUEUE)
    if len(edges):
        task, src, back = launched_by_return(graph)[graph.dst[edges]], graph.src[edges], graph.dst[edges]
        for lane in np.unique(graph.lane[src]):
            mine = (graph.lane[src] == lane) & (task >= 0) & (graph.lane[task] == lane)
            live = np.flatnonzero((graph.lane == lane) & ~graph.gone)
            slots[back[mine]] = np.searchsorted(live, task[mine]) - np.searchsorted(live, src[mine])
    return slots


def requeue(graph: TaskGraph, slots: Int64) -> TaskGraph:
    """Point the queue edges at the tasks that free the slot now; cut those whose queue is no longer full.

    A launch into a full queue waits for the task so many places ahead of its own on the stream (1,022 on
    CUDA); the number is that of `slots`, see `queue_slots`.
    """
    edges = np.flatnonzero((graph.edge_kind == EdgeKind.QUEUE) & (slots[graph.dst] >= 0))
    if not len(edges):
        return graph
    task, back = launched_by_return(graph)[graph.dst[edges]], graph.dst[edges]
    src = graph.src.copy()
    drop = np.zeros(graph.edges, dtype=np.bool_)
    for lane in np.unique(graph.lane[src[edges]]):
        mine = graph.lane[src[edges]] == lane
        live = np.flatnonzero((graph.lane == lane) & ~graph.gone)
        place = np.searchsorted(live, task[mine]) - slots[back[mine]]
        src[edges[mine]] = live[np.maximum(place, 0)] if len(live) else src[edges[mine]]
        drop[edges[mine]] = place < 0
    order = np.lexsort((graph.edge_kind, src, graph.dst))
    columns = {key: src if key == "src" else getattr(graph, key) for key in EDGE_COLUMNS}
    moved = graph.with_columns(**{key: column[order] for key, column in columns.items()})
    return moved.with_edges(~drop[order])


def launched_by_return(graph: TaskGraph) -> Int64:
    """Return per RETURN the first device task that its call launched; −1 for calls without one and other tasks."""
    first = np.full(len(graph), -1, dtype=np.int64)
    dst = graph.dst
    launch = np.flatnonzero(graph.edge_kind == EdgeKind.LAUNCH)[::-1]  # the earliest row is written last
    first[graph.src[launch]] = dst[launch]
    result = np.full(len(graph), -1, dtype=np.int64)
    program = (graph.edge_kind == EdgeKind.PROGRAM) & (graph.kind[dst] == TaskKind.RETURN)
    result[dst[program]] = first[graph.src[program]]
    return result


def describe(graph: TaskGraph, mask: Mask) -> str:
    """Return the chosen tasks in words: "161 kernels and 3 copies"."""
    count = np.bincount(graph.kind[np.flatnonzero(mask)], minlength=len(TaskKind))
    parts = [f"{count[kind]:,} {_noun(TaskKind(int(kind)), int(count[kind]))}" for kind in np.flatnonzero(count)]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts) or "no tasks"


_NOUNS = {
    TaskKind.CPU: "stretch of host work",
    TaskKind.OPERATOR: "operator",
    TaskKind.PYTHON: "stretch of Python",
    TaskKind.DATA: "fetch",
    TaskKind.COPY: "copy",
}


def _noun(kind: TaskKind, count: int) -> str:
    noun = _NOUNS.get(kind, kind.name.lower())
    if count == 1:
        return noun
    first, _, rest = noun.partition(" ")
    plural = first[:-1] + "ies" if first.endswith("py") else first + ("es" if first.endswith("ch") else "s")
    return f"{plural} {rest}".rstrip()


def _change(what: str, mask: Mask) -> Change:
    return Change(what=what, tasks=int(mask.sum()))
