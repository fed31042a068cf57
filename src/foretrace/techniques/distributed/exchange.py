"""Messages between workers in the graph of one of them: symmetric ranks are folded into the one that was recorded.

A message is a task on a link. It starts when its worker is there (and the others, `lag_ns` later), may share the link
with others in flight, and the worker waits for it where it needs the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.arrays import Float64, Int64, Mask
from foretrace.graph.assemble import part_of
from foretrace.graph.edit import remove
from foretrace.graph.insert import DeviceTask, EdgeList, HostTask, extend, insert_at
from foretrace.graph.taskgraph import Change, EdgeKind, Lane, Phase, TaskGraph, TaskKind
from foretrace.simulate.replay import replay
from foretrace.trace.trace import LaneKind

WAIT = "wait for other workers"
LAUNCH = "launch of a collective"
COPIES = "gradients out of buckets"
_MEETINGS = 6  # times that durations and what lies beside what are worked out in turns; they settle in three
LINK = "exchange"  # label of the lane of messages that a technique put into a graph, or its first word


@dataclass(frozen=True, kw_only=True, eq=False)
class Message:
    """One collective per step.

    `after` and `waits` are host rows per step (n_steps); `device` the device row that it also follows, −1 for none.
    The link is taken by nothing else for `wire_ns` from its start; it ends `dur_ns` after it.
    """

    name: str  # "all-reduce bucket 0"
    nbytes: int  # what a worker holds
    dur_ns: int
    wire_ns: int
    after: Int64
    waits: Int64 | None  # the worker waits for it behind this host row; None: only messages that follow it do
    device: Int64 | None = None
    lag_ns: int = 0  # from its worker's arrival to that of the last one, and handing over
    host_ns: int = 0  # what starting it takes on the host
    link: str = LINK  # messages of one link queue behind each other
    follows: tuple[int, ...] = ()  # numbers of messages of the same step that come before it
    next_step: bool = False  # waited for in the step after it
    priority: int = 0  # smaller goes first, where the link has no order


@dataclass(frozen=True, kw_only=True, eq=False)
class Stop:
    """Where the worker waits for messages, and what it does afterwards (copies results out of buffers).

    With `device` rows, what it does is a task on the device behind these rows and not work of the host.
    """

    waits: Int64  # host row per step
    then_ns: int = 0
    name: str = COPIES
    device: Int64 | None = None


def exchange(
    graph: TaskGraph,
    messages: Sequence[Message],
    stops: Sequence[Stop],
    *,
    in_flight: int,
    ordered: bool = True,
    as_issued: bool = False,
) -> TaskGraph:
    """Return the graph with these messages, in their order on every link, at most `in_flight` at a time.

    With `as_issued` they are in the order of `after` in every step, which may differ between steps. Every message must
    wait at one of the `stops` (the same rows). In a recording of a device it is the first device task behind the stop
    that waits, not the host. Links that are not `ordered` take the message that is there, by priority. Raises
    GraphError where a wait would come before its message.
    """
    steps, count = graph.n_steps, len(messages)
    tasks, joins, starts = list[HostTask | DeviceTask](), dict[tuple[int, int], int](), dict[tuple[int, int], int]()
    size = 0  # tasks so far; a device task comes with its call
    for j, message in enumerate(messages):
        for step in range(steps if message.host_ns else 0):
            starts[j, step] = size
            tasks.append(HostTask(after=int(message.after[step]), name=LAUNCH, dur_ns=message.host_ns))
            size += 1
    for i, stop in enumerate(stops):
        for step in range(steps):
            row = int(stop.waits[step])
            joins[i, step] = size
            tasks.append(HostTask(after=row, name=WAIT, dur_ns=0, kind=TaskKind.JOIN))
            size += 1
            if not stop.then_ns:
                continue
            if stop.device is not None and stop.device[step] >= 0:
                behind = int(stop.device[step])
                tasks.append(DeviceTask(after=behind, launched_after=row, name=stop.name, dur_ns=stop.then_ns))
                size += 2
            else:
                tasks.append(HostTask(after=row, name=stop.name, dur_ns=stop.then_ns, phase=Phase.BACKWARD))
                size += 1
    waiting, new = insert_at(graph, tasks)
    old, n = len(graph), len(waiting)
    stop_of = {tuple(stop.waits.tolist()): i for i, stop in enumerate(stops)}
    labels = tuple(dict.fromkeys(message.link for message in messages))
    rank = graph.lanes[graph.lane[graph.marks[0]]].rank
    at = np.arange(count * steps).reshape(steps, count) + n  # message j of step i
    names = {message.name: len(waiting.names) + i for i, message in enumerate({m.name: m for m in messages}.values())}
    edges = EdgeList()
    behind_join: dict[int, int] = {}
    launched = _Launched(waiting) if graph.on_device.any() else None

    def waits(here: int, join: int) -> None:
        if join not in behind_join:
            behind_join[join] = launched.next_behind(join) if launched else -1
        edges.add(here, behind_join[join] if behind_join[join] >= 0 else join, EdgeKind.COLLECTIVE)

    recorded = np.zeros((steps, count), dtype=np.int64)
    for step in range(steps):
        for j, message in enumerate(messages):
            here = int(at[step, j])
            host = int(new[old + starts[j, step]] if message.host_ns else new[message.after[step]])
            edges.add(host, here, EdgeKind.COLLECTIVE, message.lag_ns)
            recorded[step, j] = waiting.recorded[host] + waiting.dur[host]
            if message.device is not None and message.device[step] >= 0:
                edges.add(int(new[message.device[step]]), here, EdgeKind.EVENT, message.lag_ns)
            for former in message.follows:
                edges.add(int(at[step, former]), here, EdgeKind.COLLECTIVE)
            until = step + message.next_step
            if message.waits is not None and until < steps:
                waits(here, int(new[old + joins[stop_of[tuple(message.waits.tolist())], until]]))
    by_link: dict[str, list[tuple[int, int]]] = defaultdict(list)  # (row, time that the link is taken)
    for step in range(steps):
        rank_of = [int(message.after[step]) if as_issued else 0 for message in messages]
        for j in sorted(range(count), key=rank_of.__getitem__):
            by_link[messages[j].link].append((int(at[step, j]), messages[j].wire_ns))
    for queue in by_link.values() if ordered else ():
        for (u, taken), (v, _) in pairwise(queue):
            edges.add(u, v, EdgeKind.STREAM, taken, from_start=True)
        for (u, _), (v, _) in zip(queue, queue[in_flight:], strict=False):
            edges.add(u, v, EdgeKind.STREAM)
    lane = {label: len(waiting.lanes) + i for i, label in enumerate(labels)}
    columns: dict[str, npt.NDArray[Any]] = {
        "kind": np.full(count * steps, TaskKind.COLLECTIVE, dtype=np.uint8),
        "lane": np.tile([lane[message.link] for message in messages], steps),
        "name": np.tile([names[message.name] for message in messages], steps),
        "step": np.repeat(np.arange(steps), count),
        "dur": np.tile([message.dur_ns for message in messages], steps),
        "recorded": np.maximum.accumulate(recorded.ravel()),
        "nbytes": np.tile([message.nbytes for message in messages], steps),
        "priority": np.tile([message.priority for message in messages], steps),
    }
    total = sum(message.nbytes for message in messages)
    what = f"put {count} message{'s' * (count != 1)} of {total / 1e6:.4g} MB in all into every step"
    slots = 1 if ordered else in_flight
    lanes = [Lane(rank=rank, kind=LaneKind.LINK, label=label, ordered=ordered, slots=slots) for label in labels]
    change = Change(what=what, tasks=count * steps)
    return extend(waiting, columns, edges.columns(), names=tuple(names), lanes=lanes, change=change)[0]


def without_exchange(graph: TaskGraph) -> TaskGraph:
    """Return the graph without the messages and waits that `exchange` put into it; as it is where there are none."""
    links = np.array(
        [lane.kind == LaneKind.LINK and lane.label.split()[:1] == [LINK] for lane in graph.lanes], np.bool_
    )
    message = links[graph.lane]
    if not message.any():
        return graph
    kept = part_of(graph, ~message, ~links)
    count = int(message.sum())
    kept = kept.noted(Change(what=f"took {count} messages out", tasks=count))
    named = np.array([name in (WAIT, LAUNCH, COPIES) for name in kept.names], dtype=np.bool_)[kept.name]
    return remove(kept, named & ~kept.gone)


def beside(graph: TaskGraph, company: float, stretch: float, delay_us: float = 0.0) -> TaskGraph:
    """Return the graph of a worker that computes by `company` slower, and exchanges by `stretch`, while it does both.

    Every message that is wholly beside computing takes `delay_us` more, in which others may have the link: its thread
    waits for the processor.

    Its tasks last longer by the share of their time that messages are in flight, and messages by the share that the
    worker computes, which depends on how long both last: worked out in turns.
    """
    changed, delays = graph, 1e3 * delay_us / np.maximum(graph.dur, 1)
    for _ in range(_MEETINGS):
        changed = _times(graph, *_slower(changed, company, stretch, delays))
    return changed


def apart(graph: TaskGraph, company: float, stretch: float) -> TaskGraph:
    """Return the graph that `beside` was given, but for the rounding and for delays of messages, from the one that it
    made.
    """
    return _times(graph, *(1 / each for each in _slower(graph, company, stretch, np.zeros(len(graph)))))


def _times(graph: TaskGraph, factor: Float64, lags: Float64) -> TaskGraph:
    dur, lag = np.rint(graph.dur * factor).astype(np.int64), np.rint(graph.lag * lags).astype(np.int64)
    return graph.with_columns(dur=dur, lag=lag)


def _slower(graph: TaskGraph, company: float, stretch: float, delays: Float64) -> tuple[Float64, Float64]:
    """Return factors of tasks (n), and of the times (m, lags of edges) that messages keep the link for themselves.

    `delays` (n) are relative to durations.
    """
    message = (graph.kind == TaskKind.COLLECTIVE) & ~graph.gone
    work = ~graph.on_device & ~graph.gone & ~np.isin(graph.kind, (TaskKind.MARK, TaskKind.JOIN, TaskKind.COLLECTIVE))
    (start, end), factor, wire = replay(graph), np.ones(len(graph)), np.ones(len(graph))
    factor[work] = 1 / (1 - (1 - 1 / company) * _shared(start, end, work, message))
    computing = _shared(start, end, message, work)
    factor[message] = 1 / (1 - (1 - 1 / (stretch + delays[message])) * computing)
    wire[message] = 1 / (1 - (1 - 1 / stretch) * computing)
    queue = (graph.edge_kind == EdgeKind.STREAM) & graph.from_start & message[graph.src]
    return factor, np.where(queue, wire[graph.src], 1.0)


def _shared(start: Int64, end: Int64, mine: Mask, others: Mask) -> Float64:
    """Return the share of the time of each of `mine` in which one of `others` runs."""
    order = np.flatnonzero(others & (end > start))
    if not len(order):
        return np.zeros(int(mine.sum()))
    order = order[np.argsort(start[order], kind="stable")]
    begins, ends = start[order], np.maximum.accumulate(end[order])
    apart = begins[1:] > ends[:-1]
    begins, ends = begins[np.append(True, apart)], ends[np.append(apart, True)]
    moments = np.column_stack([begins, ends]).ravel().astype(np.float64)
    busy = np.cumsum(np.column_stack([np.zeros(len(ends)), ends - begins]).ravel())
    both = np.interp(end[mine], moments, busy) - np.interp(start[mine], moments, busy)
    return np.asarray(both / np.maximum(end[mine] - start[mine], 1), dtype=np.float64)


class _Launched:
    """What threads launch on the device, in their order."""

    def __init__(self, graph: TaskGraph) -> None:
        edges = np.flatnonzero((graph.edge_kind == EdgeKind.LAUNCH) & ~graph.gone[graph.dst])
        edges = edges[np.lexsort((graph.src[edges], graph.lane[graph.src[edges]]))]
        self._lane, self._src, self._dst = graph.lane, graph.src[edges], graph.dst[edges]
        self._lane_of = graph.lane[self._src]

    def next_behind(self, row: int) -> int:
        """Return the first device task launched behind a host row on its thread; −1 if there is none."""
        lane = self._lane[row]
        first, last = np.searchsorted(self._lane_of, [lane, lane + 1])
        place = first + np.searchsorted(self._src[first:last], row, side="right")
        return int(self._dst[place]) if place < last else -1
