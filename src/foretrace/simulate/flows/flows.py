"""Flows: an event-driven run in which chosen tasks move bytes over links that they share.

All rules of `foretrace.simulate.schedule` hold (lanes, slots, groups, removed tasks); beside them:

- A *flow* carries one or several tasks: a copy, or the COLLECTIVE tasks of all members. It begins when the last of its
  tasks has begun, waits its latency, then moves its bytes; all its tasks end together. Their durations in the graph do
  not matter. A removed task takes no part.
- A flow is a bundle of equal connections that advance in lock step, like those of a ring. `nbytes` is what one of
  them moves, its rate is that of one of them, and a link that m of them cross carries m times the rate.
- The flows that move bytes at one time share the links **max-min fairly**: no rate can grow without a smaller or
  equal one shrinking. Progressive filling (Bertsekas and Gallager, Data Networks, 2nd edition, 6.5.2; for links that
  a flow crosses several times Radunovic and Le Boudec, IEEE/ACM ToN 15(5), 2007): all rates grow alike until a link
  is full, the flows on it stop, the others continue. Rates are computed again when flows join or end, once per instant.
- A flow without bytes or without links takes its latency alone.
- While a rank takes part in a flow, or runs a COLLECTIVE that is none, its kernels progress at 1 / factor of their
  speed (`Interference`).

**Rounding.** Rates are whole multiples of 2^-60 of the widest link's capacity, shares rounded down (`shares.py`).
Times are whole nanoseconds: when a rate changes, the end of that flow becomes now + remaining bytes / rate to the
nearest ns, halves to even; it stays as it is while the rate does. The same holds for slowed kernels. Rates depend on
which flows are active, not on how they or the links are numbered.

A task that turns out to have been ready in the past (negative lags) has that start; bytes move from then on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretrace.arrays import Float64, Int32, Int64, Mask
from foretrace.errors import GraphError
from foretrace.graph.assemble import pointers
from foretrace.graph.sound import fixed, verify
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.simulate.groups import groups
from foretrace.simulate.overlap import covered
from foretrace.simulate.replay import effective
from foretrace.simulate.schedule import edges_that_hold, lane_table, need_slots, stuck
from foretrace.simulate.unwritten import unwritten, written

_LONGEST_NS = 1e18  # some thirty years: what all links together may need, far from the end of int64
_WIDEST = 2.0**24  # times the narrowest link: rates on it then still have some 25 bits if a thousand flows share it
_TAKES_NO_TIME = (TaskKind.RETURN, TaskKind.MARK, TaskKind.JOIN, TaskKind.ARRIVAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What one flow moves: `nbytes` over each of its connections after `latency_ns`.

    `route` says how many of the connections cross each link (numbers of links as in the capacities).
    """

    nbytes: float
    route: Mapping[int, int]
    latency_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flows:
    """F flows as columns: `task` (k rows of a graph) with `flow` (k), the flow that each of them is part of.

    `nbytes` (F) per connection, `latency_ns` (F). Flow f crosses `route_link[route_ptr[f] : route_ptr[f + 1]]` with
    `route_times` connections each.
    """

    task: Int32
    flow: Int32
    nbytes: Float64
    latency_ns: Int64
    route_ptr: Int64
    route_link: Int32
    route_times: Int64

    def __len__(self) -> int:
        return len(self.nbytes)

    @classmethod
    def of(cls, transfers: Iterable[tuple[Sequence[int], Transfer]]) -> Flows:
        """Return flows from (rows of the graph, what they move together)."""
        pairs = list(transfers)
        length = [len(transfer.route) for _, transfer in pairs]
        return cls(
            task=np.array([row for rows, _ in pairs for row in rows], dtype=np.int32),
            flow=np.repeat(np.arange(len(pairs), dtype=np.int32), [len(rows) for rows, _ in pairs]),
            nbytes=np.array([transfer.nbytes for _, transfer in pairs], dtype=np.float64),
            latency_ns=np.array([transfer.latency_ns for _, transfer in pairs], dtype=np.int64),
            route_ptr=np.concatenate([[0], np.cumsum(length, dtype=np.int64)]).astype(np.int64),
            route_link=np.array([link for _, transfer in pairs for link in transfer.route], dtype=np.int32),
            route_times=np.array([m for _, transfer in pairs for m in transfer.route.values()], dtype=np.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Interference:
    """How many times longer a kernel takes while its rank communicates (1 or more), and how that is known.

    `tasks` (n) marks what is slowed; by default the tasks of kind KERNEL that are no flow.
    """

    factor: float
    why: str = "stated"
    tasks: Mask | None = None


def simulate_flows(
    graph: TaskGraph, flows: Flows, capacity: Float64, *, interference: Interference | None = None
) -> tuple[Int64, Int64]:
    """Start and end of every task (n each, ns) with flows over links of `capacity` (L, bytes per second each).

    With lanes that are all ordered, `graph.with_columns(dur=end - start)` is the graph whose replay is this run, for
    critical path and blame. Raises GraphError for capacities, routes or bytes that cannot be, and where flows or
    collectives wait for each other forever.
    """
    n = len(verify(graph))
    capacity = np.asarray(capacity, dtype=np.float64)
    need_slots(graph)
    _check(graph, flows, capacity)
    flow = np.full(n, -1, dtype=np.int32)
    here = ~graph.gone[flows.task]
    flow[flows.task[here]] = flows.flow[here]
    slowed, slows, factor = _interfering(graph, flow, interference)
    per_ns = capacity / 1e9
    start, end, decided = _run(graph, flows, flow, per_ns, slowed, slows, factor)
    if not decided.all():
        stuck(graph, np.flatnonzero(decided).astype(np.int32), "flows")
    written(start, end)
    return start, end


Result = tuple[Int64, Int64, Mask]


def _run(
    graph: TaskGraph, flows: Flows, flow: Int32, per_ns: Float64, slowed: Mask, slows: Mask, factor: float
) -> Result:
    from foretrace.simulate.flows import engine as flow_engine
    from foretrace.simulate.flows.shares import Shares

    n = len(graph)
    columns, lanes, group = effective(graph), lane_table(graph), groups(graph)
    dst = graph.dst
    kept = np.flatnonzero(edges_that_hold(graph))
    by_src = kept[np.argsort(graph.src[kept], kind="stable")]
    members = np.flatnonzero(flow >= 0)
    members = members[np.argsort(flow[members], kind="stable")]
    start, end = unwritten(n), unwritten(n)
    decided = np.zeros(n, dtype=np.uint8)
    ranks = np.unique(graph.rank, return_inverse=True)[1].astype(np.int32)
    holds, arrivals = np.zeros(n, dtype=np.uint8), np.zeros(n, dtype=np.int32)
    if group.holds is not None and group.arrivals is not None:
        holds, arrivals = group.holds, group.arrivals
    arguments: tuple[Any, ...] = (
        graph.release.astype(np.int64), fixed(columns.dur), fixed(columns.delay), np.bincount(dst[kept], minlength=n),
        fixed(graph.lane), ranks, fixed(graph.priority), pointers(graph.src[kept], n), dst[by_src], columns.lag[by_src],
        graph.from_start[by_src].view(np.uint8), lanes.ordered, lanes.slots, holds, arrivals, flow,
        slowed.view(np.uint8), slows.view(np.uint8), factor, pointers(flow[members], len(flows)),
        members.astype(np.int32), flows.nbytes, flows.latency_ns,
        *Shares.of(flows.route_ptr, flows.route_link, flows.route_times, per_ns), start, end, decided,
    )  # fmt: skip
    flow_engine.run(*arguments)
    return start, end, decided.view(np.bool_)


def _interfering(graph: TaskGraph, flow: Int32, interference: Interference | None) -> tuple[Mask, Mask, float]:
    """Return which tasks are slowed and which, beside flows, slow others; by how much."""
    n = len(graph)
    if interference is None:
        return np.zeros(n, dtype=np.bool_), np.zeros(n, dtype=np.bool_), 1.0
    if not (math.isfinite(interference.factor) and interference.factor >= 1):
        raise GraphError(
            f"a slow-down of {interference.factor:g} by communication cannot be; write how many times longer a kernel "
            "takes, 1 or more."
        )
    runs = ~graph.gone & (graph.dur > 0) & (flow < 0)
    tasks = graph.kind == TaskKind.KERNEL if interference.tasks is None else interference.tasks
    if tasks.shape != (n,):
        raise GraphError(f"the tasks that communication slows have shape {tasks.shape}; mark each of the {n} tasks.")
    slowed = runs & tasks
    return slowed, runs & (graph.kind == TaskKind.COLLECTIVE) & ~slowed, float(interference.factor)


def _check(graph: TaskGraph, flows: Flows, capacity: Float64) -> None:
    """Refuse what cannot be, with the sentence that says what and where."""
    bad = np.flatnonzero(~(np.isfinite(capacity) & (capacity > 0)))
    if len(bad):
        raise GraphError(
            f"link {bad[0]} has a capacity of {capacity[bad[0]]:g} bytes/s; a link carries more than 0 and less than "
            "infinity."
        )
    if len(capacity) and capacity.max() > _WIDEST * capacity.min():
        raise GraphError(
            f"link {capacity.argmax()} carries {capacity.max() / capacity.min():.3g} times as much as link "
            f"{capacity.argmin()}; leave out links that never hold anybody up, or check the units."
        )
    of = np.repeat(np.arange(len(flows)), np.diff(flows.route_ptr))
    bad = np.flatnonzero((flows.route_link < 0) | (flows.route_link >= len(capacity)))
    if len(bad):
        raise GraphError(
            f"flow {of[bad[0]]} goes over link {flows.route_link[bad[0]]}, but there are {len(capacity)} links, "
            "counted from 0."
        )
    bad = np.flatnonzero(flows.route_times < 1)
    if len(bad):
        raise GraphError(
            f"flow {of[bad[0]]} crosses link {flows.route_link[bad[0]]} {flows.route_times[bad[0]]} times; leave out "
            "links that it does not cross."
        )
    key = of * max(len(capacity), 1) + flows.route_link
    if len(np.unique(key)) < len(key):
        raise GraphError("a flow names the same link twice; give the number of its connections there instead.")
    bad = np.flatnonzero(~(np.isfinite(flows.nbytes) & (flows.nbytes >= 0)))
    if len(bad):
        raise GraphError(f"flow {bad[0]} moves {flows.nbytes[bad[0]]:g} bytes; it moves 0 or more.")
    bad = np.flatnonzero(flows.latency_ns < 0)
    if len(bad):
        raise GraphError(f"flow {bad[0]} has a latency of {flows.latency_ns[bad[0]]} ns; it has 0 or more.")
    needs = np.bincount(flows.route_link, weights=flows.route_times * flows.nbytes[of], minlength=len(capacity))
    longest = float((needs / capacity).sum()) * 1e9 + float(flows.latency_ns.sum(dtype=np.float64))
    if longest > _LONGEST_NS:
        raise GraphError(
            f"the flows need {longest / 1e9:.3g} s on these links, more than thirty years; check the units."
        )
    bad = np.flatnonzero((flows.task < 0) | (flows.task >= len(graph)))
    if len(bad):
        raise GraphError(
            f"flow {flows.flow[bad[0]]} carries task {flows.task[bad[0]]}; the graph has {len(graph)} tasks."
        )
    rows, count = np.unique(flows.task, return_counts=True)
    if np.any(count > 1):
        raise GraphError(f"task {rows[count > 1][0]} is part of two flows; a task is part of one.")
    bad = np.flatnonzero(np.isin(graph.kind[flows.task], _TAKES_NO_TIME))
    if len(bad):
        row = flows.task[bad[0]]
        kind = TaskKind(int(graph.kind[row])).name
        raise GraphError(f"task {row} is of kind {kind} and takes no time; a flow carries transfers.")
    lonely = np.setdiff1d(np.arange(len(flows)), flows.flow)
    if len(lonely):
        raise GraphError(f"flow {lonely[0]} carries no task of the graph; give it at least one.")


BESIDE, ALONE = 0.9, 0.01  # shares of a kernel's time that a collective of its rank runs
FEWEST = 3  # kernels of each sort that a median needs


def measured_interference(graph: TaskGraph, start: Int64, end: Int64) -> Interference | None:
    """Return the slow-down that a run shows (`start`, `end`: n each, ns), None where it cannot be told.

    Kernels are compared with those of the same name, operator and input shapes: median beside collectives of the
    rank over median alone, averaged over the time beside. At least three kernels of each sort are needed. A factor
    below 1 is noise and counts as 1.
    """
    takes, rank = ~graph.gone & (end > start), graph.rank
    share = np.zeros(len(graph))
    for each in np.unique(rank):
        mine = np.flatnonzero(takes & (rank == each) & (graph.kind == TaskKind.KERNEL))
        others = np.flatnonzero(takes & (rank == each) & (graph.kind == TaskKind.COLLECTIVE))
        if len(mine) and len(others):
            share[mine] = covered(start[others], end[others], start[mine], end[mine]) / (end - start)[mine]
    kernels = np.flatnonzero(takes & (graph.kind == TaskKind.KERNEL))
    if not len(kernels):
        return None
    sort = np.unique(np.stack([graph.name, graph.op, graph.shape])[:, kernels], axis=1, return_inverse=True)[1].ravel()
    order = np.argsort(sort, kind="stable")
    alike = np.split(kernels[order], np.flatnonzero(np.diff(sort[order])) + 1)
    slowed_ns = alone_ns = 0.0
    compared = 0
    for rows in alike:
        beside, alone = rows[share[rows] >= BESIDE], rows[share[rows] <= ALONE]
        if min(len(beside), len(alone)) >= FEWEST:
            compared += len(beside)
            slowed_ns += len(beside) * float(np.median((end - start)[beside]))
            alone_ns += len(beside) * float(np.median((end - start)[alone]))
    if not compared:
        return None
    return Interference(
        factor=max(1.0, slowed_ns / alone_ns),
        why=f"{compared} kernels beside collectives against the same kernels alone, {slowed_ns / 1e6:.3g} ms against "
        f"{alone_ns / 1e6:.3g} ms",
    )
