"""Messages between workers in the graph of one of them: symmetric ranks are folded into the one that was recorded.

A message is a task on a link. It starts when its worker is there (and the others, `lag_ns` later), may share the link
with others in flight, and the worker waits for it where it needs the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.cost.network import Cost
from foretrace.graph.edit import remove
from foretrace.graph.insert import HostTask, extend, insert_at
from foretrace.graph.taskgraph import Change, EdgeKind, Lane, Phase, TaskGraph, TaskKind
from foretrace.trace.trace import LaneKind

Int64 = npt.NDArray[np.int64]

WAIT = "wait for other workers"
LINK = "exchange"  # label of the lane of messages that a technique put into a graph


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
    waits: Int64  # the worker waits for this message behind this host row
    device: Int64 | None = None
    lag_ns: int = 0  # from its worker's arrival to that of the last one, and handing over


@dataclass(frozen=True, kw_only=True, eq=False)
class Stop:
    """Where the worker waits for messages, and what it does afterwards (copies results out of buffers)."""

    waits: Int64  # host row per step
    then_ns: int = 0
    name: str = "gradients out of buckets"


def timed(cost: Cost, *, scale: float = 1.0) -> int:
    """Nanoseconds of a transfer."""
    return round(cost.seconds * scale * 1e9)


def exchange(
    graph: TaskGraph, messages: Sequence[Message], stops: Sequence[Stop], *, in_flight: int, technique: str
) -> TaskGraph:
    """The graph with these messages, in their order, at most `in_flight` at a time.

    Every message must wait at one of the `stops` (the same rows). On a device the first device task behind the stop
    waits as well. Raises GraphError where a wait would come before its message.
    """
    steps = graph.n_steps
    tasks, place = list[HostTask](), dict[tuple[int, int], int]()
    for i, stop in enumerate(stops):
        for step in range(steps):
            row = int(stop.waits[step])
            place[i, step] = len(tasks)
            tasks.append(HostTask(after=row, name=WAIT, dur_ns=0, kind=TaskKind.JOIN))
            if stop.then_ns:
                tasks.append(HostTask(after=row, name=stop.name, dur_ns=stop.then_ns, phase=Phase.BACKWARD))
    waiting, new = insert_at(graph, tasks, technique=technique)
    old = len(graph)
    stop_of = {tuple(stop.waits.tolist()): i for i, stop in enumerate(stops)}
    lane = len(waiting.lanes)
    rank = graph.lanes[graph.lane[graph.marks[0]]].rank
    count = len(messages)
    n = len(waiting)
    at = np.arange(count * steps).reshape(steps, count) + n  # message j of step i
    names = {message.name: len(waiting.names) + i for i, message in enumerate(messages)}
    src, dst, kind, lag, from_start = list[int](), list[int](), list[int](), list[int](), list[bool]()

    def edge(u: int, v: int, why: EdgeKind, wait: int = 0, *, start: bool = False) -> None:
        src.append(u)
        dst.append(v)
        kind.append(int(why))
        lag.append(wait)
        from_start.append(start)

    recorded = np.zeros((steps, count), dtype=np.int64)
    for step in range(steps):
        for j, message in enumerate(messages):
            here, host = int(at[step, j]), int(new[message.after[step]])
            edge(host, here, EdgeKind.LAUNCH, message.lag_ns)
            recorded[step, j] = waiting.recorded[host] + waiting.dur[host]
            if message.device is not None and message.device[step] >= 0:
                edge(int(new[message.device[step]]), here, EdgeKind.EVENT, message.lag_ns)
            join = int(new[old + place[stop_of[tuple(message.waits.tolist())], step]])
            edge(here, join, EdgeKind.COLLECTIVE)
            if message.device is not None and (behind := _next_on_device(waiting, join)) >= 0:
                edge(here, behind, EdgeKind.COLLECTIVE)
    order = at.ravel().tolist()
    wire = [message.wire_ns for message in messages] * steps
    for (u, v), taken in zip(pairwise(order), wire, strict=False):
        edge(u, v, EdgeKind.STREAM, taken, start=True)
    for u, v in zip(order, order[in_flight:], strict=False):
        edge(u, v, EdgeKind.STREAM)
    size = count * steps
    columns: dict[str, npt.NDArray[Any]] = {
        "kind": np.full(size, TaskKind.COLLECTIVE, dtype=np.uint8),
        "phase": np.full(size, Phase.BACKWARD, dtype=np.uint8),
        "lane": np.full(size, lane, dtype=np.int32),
        "name": np.tile([names[message.name] for message in messages], steps),
        "step": np.repeat(np.arange(steps), count),
        "dur": np.tile([message.dur_ns for message in messages], steps),
        "recorded": np.maximum.accumulate(recorded.ravel()),
        "nbytes": np.tile([message.nbytes for message in messages], steps),
    }
    total = sum(message.nbytes for message in messages)
    what = f"put {count} message{'s' * (count != 1)} of {total / 1e6:.4g} MB in all into every step"
    edges: dict[str, npt.NDArray[Any]] = {
        "src": np.array(src),
        "dst": np.array(dst),
        "edge_kind": np.array(kind),
        "lag": np.array(lag),
        "from_start": np.array(from_start),
    }
    added = Lane(rank=rank, kind=LaneKind.LINK, label=LINK)
    change = Change(technique=technique, what=what, tasks=size)
    return extend(waiting, columns, edges, names=tuple(names), lanes=(added,), change=change)[0]


def without_exchange(graph: TaskGraph, technique: str) -> TaskGraph:
    """The graph without the messages and waits that `exchange` put into it; as it is where there are none."""
    lanes = [i for i, lane in enumerate(graph.lanes) if lane.kind == LaneKind.LINK and lane.label == LINK]
    added = {WAIT, Stop.__dataclass_fields__["name"].default}
    named = np.array([name in added for name in graph.names], dtype=np.bool_)[graph.name]
    mask = (np.isin(graph.lane, lanes) | named) & ~graph.gone
    if not mask.any():
        return graph
    gone = remove(graph, mask, technique=technique)
    freed = tuple(replace(lane, label="") if i in lanes else lane for i, lane in enumerate(gone.lanes))
    return replace(gone, lanes=freed)


def _next_on_device(graph: TaskGraph, row: int) -> int:
    """The first device task launched behind a host row on its thread; −1 if there is none."""
    edges = np.flatnonzero((graph.edge_kind == EdgeKind.LAUNCH) & (graph.lane[graph.src] == graph.lane[row]))
    later = edges[graph.src[edges] > row]
    return int(graph.dst[later[np.argmin(graph.src[later])]]) if len(later) else -1
