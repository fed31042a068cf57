"""Edits that add tasks. All end in `assemble`.

Rows are renumbered by these edits, so choose tasks again afterwards. Row numbers in the arguments are those
of the graph that is given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretrace.arrays import Array, Int64
from foretrace.errors import GraphError, NotApplicableError
from foretrace.graph.assemble import assemble, edges_with_dst, task_columns
from foretrace.graph.edit import queue_slots, requeue
from foretrace.graph.sound import sound_rows
from foretrace.graph.taskgraph import (
    EDGE_COLUMNS,
    TASK_COLUMNS,
    Change,
    EdgeKind,
    Lane,
    Phase,
    TaskGraph,
    TaskKind,
    per_graph,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTask:
    """A new task of a CPU thread, placed directly after the task in row `after`.

    Layer, step, phase and operator are those of row `like` (by default `after`) unless given; a task named like
    an ATen operator belongs to that operator.
    """

    after: int
    name: str
    dur_ns: int
    kind: TaskKind = TaskKind.CPU
    like: int | None = None
    phase: Phase | None = None
    op: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTask:
    """A new task of a stream, with the call that launches it.

    The task comes directly after the device task in row `after`, its call directly after the host task in row
    `launched_after`. `call_ns` and `call_name` describe that call; by default they are what the graph's own
    launches typically show.
    """

    after: int
    launched_after: int
    name: str
    dur_ns: int
    kind: TaskKind = TaskKind.KERNEL
    like: int | None = None
    phase: Phase | None = None
    op: str = ""
    nbytes: int = -1
    flops: float = 0.0
    call_ns: int | None = None
    call_name: str | None = None
    blocking: bool = False  # the call returns when the task is done, like a copy to the host


@dataclass(frozen=True, slots=True, kw_only=True)
class Typical:
    """What launching costs in a recording: constants for tasks that it does not contain."""

    call_name: str
    call_ns: int  # own cost of a kernel launch, median
    latency_ns: int  # start of the call -> start of the kernel on an idle stream
    gap_ns: int  # end of a kernel -> start of the next on a busy stream
    return_ns: int  # end of a device task -> return of the call that waits for it


@per_graph
def typical(graph: TaskGraph) -> Typical:
    """Return medians over the kernel launches of a graph. Raises NotApplicableError where there are none."""
    dst = graph.dst
    launch = (graph.edge_kind == EdgeKind.LAUNCH) & (graph.kind[dst] == TaskKind.KERNEL) & graph.from_start
    launch &= ~graph.gone[dst] & (graph.kind[graph.src] == TaskKind.CALL)
    if not launch.any():
        raise NotApplicableError("the recording has work of a device and launches no kernel; record both.")
    stream = (graph.edge_kind == EdgeKind.STREAM) & (graph.kind[dst] == TaskKind.KERNEL) & ~graph.from_start
    sync = (graph.edge_kind == EdgeKind.SYNC) & (graph.kind[dst] == TaskKind.RETURN) & (graph.typical >= 0)
    calls, count = np.unique(graph.src[launch], return_counts=True)
    calls = calls[count == 1]  # graph launches cost more
    calls = calls if len(calls) else graph.src[launch]
    common = np.bincount(graph.name[calls]).argmax()
    return Typical(
        call_name=graph.names[common],
        call_ns=int(np.median(graph.dur[calls])),
        latency_ns=int(np.median(graph.typical[launch])),
        gap_ns=int(np.median(graph.typical[stream])) if stream.any() else 0,
        return_ns=int(np.median(graph.typical[sync])) if sync.any() else 0,
    )


class EdgeList:
    """Edges collected one by one, for `extend`."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int, bool]] = []

    def add(self, src: int, dst: int, kind: EdgeKind, lag: int = 0, *, from_start: bool = False) -> None:
        self._rows.append((src, dst, int(kind), int(lag), from_start))

    def columns(self) -> dict[str, Array]:
        keys = ("src", "dst", "edge_kind", "lag", "from_start")
        return dict(zip(keys, np.array(self._rows, dtype=np.int64).reshape(-1, len(keys)).T, strict=True))


def extend(
    graph: TaskGraph,
    tasks: Mapping[str, Array],
    edges: Mapping[str, Array],
    *,
    names: Sequence[str] = (),
    lanes: Sequence[Lane] = (),
    old_edges: Mapping[str, Array] | None = None,
    change: Change,
) -> tuple[TaskGraph, Int64]:
    """Append tasks (rows n, n + 1, ...) and edges, then put everything in order again.

    Returns the new graph and, for every old and appended row, its number there. `names` and `lanes` are
    appended to the tables of the graph; new tasks refer to the tables so extended. Columns that `tasks` or
    `edges` lack take the defaults of `assemble`. `old_edges` (see `edge_columns`) replaces the edges of the
    graph. Raises GraphError where the edges form a cycle.
    """
    new, joined = task_columns(tasks), edges_with_dst(edges)
    columns = {key: np.concatenate([getattr(graph, key), new[key]]) for key in TASK_COLUMNS}
    kept = edge_columns(graph) if old_edges is None else old_edges
    joined = {key: np.concatenate([kept[key], column]) for key, column in joined.items()}
    own_op = columns["op"]
    columns["op"] = np.arange(len(own_op))  # carries the row numbers through the sort
    result = assemble(
        columns,
        joined,
        marks=graph.marks,
        names=graph.names + tuple(names),
        layers=graph.layers,
        lanes=graph.lanes + tuple(lanes),
        info=graph.info,
        shapes=graph.shapes,
        changes=(*graph.changes, change),
        assumptions=graph.assumptions,
    )
    rows = np.empty(len(result), dtype=np.int64)
    rows[result.op] = np.arange(len(result))
    result = replace(result, op=own_op[result.op])
    slots = np.full(len(result), -1, dtype=np.int64)
    slots[rows[: len(graph)]] = queue_slots(graph)
    # What now holds a slot came later on its stream than what held it, and may stand behind the launch in these rows.
    result, moved = sound_rows(requeue(result, slots))
    return result, moved[rows]


def edge_columns(graph: TaskGraph) -> dict[str, Array]:
    """Return copies of the edge columns with `dst` among them, to be changed and given to `extend`."""
    return {**{key: getattr(graph, key).copy() for key in EDGE_COLUMNS}, "dst": graph.dst}


def insert(graph: TaskGraph, new: Sequence[HostTask | DeviceTask], *, usual: Typical | None = None) -> TaskGraph:
    """Put new tasks into the order of threads and streams; several after one row keep the order given.

    A synchronising call that waited for the device task before a new one waits for the new one if that is
    launched first. Events keep the task that they were recorded after. `usual` says what a launch costs, by
    default `typical(graph)`. Raises GraphError where an anchor is on no thread or no stream.
    """
    return insert_at(graph, new, usual=usual)[0]


def insert_at(
    graph: TaskGraph, new: Sequence[HostTask | DeviceTask], *, usual: Typical | None = None
) -> tuple[TaskGraph, Int64]:
    """Insert as `insert` does, and return also the new row number of every old task, then of every new one.

    A `DeviceTask` makes its call first, then the task itself, then a RETURN if it is blocking.
    """
    if not new:
        return graph, np.arange(len(graph))
    if usual is None and any(isinstance(task, DeviceTask) for task in new):
        usual = typical(graph)
    return _Insertion(graph).put(new, usual)


_AS_LIKE = -2  # of a new row: what the row is that it is like
# kind, name, dur, anchor, like, phase, op, nbytes, flops, whose doubt
_NewRow = tuple[int, int, int, int, int, int, int, int, float, int]


class _Insertion:
    """Works out rows, edges and re-routed edges of new tasks."""

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self.edges = edge_columns(graph)
        self.added = EdgeList()
        self.index = {name: i for i, name in reversed(list(enumerate(graph.names)))}
        self.names: list[str] = []
        self.back = np.arange(len(graph))  # the RETURN of a blocking call, else the row itself
        returns = (graph.edge_kind == EdgeKind.PROGRAM) & (graph.kind[self.edges["dst"]] == TaskKind.RETURN)
        self.back[graph.src[returns]] = self.edges["dst"][returns]
        self.tasks: list[_NewRow] = []
        self.chains: dict[tuple[EdgeKind, int], list[int]] = defaultdict(list)  # (order, anchor) -> new rows
        self.waits: dict[int, list[tuple[int, int]]] = defaultdict(list)  # anchor -> (host anchor, new row)

    def put(self, new: Sequence[HostTask | DeviceTask], usual: Typical | None) -> tuple[TaskGraph, Int64]:
        on_device = self.graph.on_device
        for task in new:
            host = task.launched_after if isinstance(task, DeviceTask) else task.after
            if on_device[host] or (isinstance(task, DeviceTask) and not on_device[task.after]):
                raise GraphError(f"the new task {task.name} is anchored to a task of the wrong kind of lane.")
            like = task.like if task.like is not None else host
            if isinstance(task, HostTask):
                self._chain(EdgeKind.PROGRAM, int(self.back[host]), self._task(task, host, like))
            elif usual is not None:
                self._kernel(task, like, usual)
        self._reroute()
        self._move_waits()
        device = sum(isinstance(task, DeviceTask) for task in new)
        host = len(new) - device
        launched = "s with their launches" if device > 1 else " with its launch"
        parts = [f"{device:,} device task{launched}"] * bool(device)
        parts += [f"{host:,} host task{'s' * (host > 1)}"] * bool(host)
        return extend(
            self.graph,
            self._columns(),
            self.added.columns(),
            names=self.names,
            old_edges=self.edges,
            change=Change(what=f"inserted {' and '.join(parts)}", tasks=len(self.tasks)),
        )

    def _task(
        self,
        task: HostTask | DeviceTask,
        anchor: int,
        like: int,
        *,
        kind: TaskKind | None = None,
        name: int | None = None,
        dur_ns: int | None = None,
        work: tuple[int, float] = (-1, 0.0),
        doubt_of: int | None = None,
    ) -> int:
        """Note a new row on the lane of `anchor`, as `task` says where nothing else is given; its number."""
        own_name = self._name(task.name)
        phase = _AS_LIKE if task.phase is None else task.phase
        op = self._name(task.op or task.name) if task.op or task.name.startswith("aten::") else _AS_LIKE
        self.tasks.append(
            (
                int(task.kind if kind is None else kind),
                own_name if name is None else name,
                task.dur_ns if dur_ns is None else dur_ns,
                anchor,
                like,
                int(phase),
                op,
                *work,
                like if doubt_of is None else doubt_of,
            )
        )
        return len(self.graph) + len(self.tasks) - 1

    def _columns(self) -> dict[str, Array]:
        """Return columns of the new rows."""
        graph = self.graph
        kind, name, dur, anchor, like, phase, op, nbytes, flops, doubt_of = map(np.array, zip(*self.tasks, strict=True))
        return {
            "kind": kind,
            "name": name,
            "dur": dur,
            "nbytes": nbytes,
            "flops": flops,
            "lane": graph.lane[anchor],
            "recorded": graph.recorded[anchor] + graph.dur[anchor],
            "priority": graph.priority[anchor],
            "phase": np.where(phase == _AS_LIKE, graph.phase[like], phase),
            "op": np.where(op == _AS_LIKE, graph.op[like], op),
            "layer": graph.layer[like],
            "step": graph.step[like],
            "doubt": graph.doubt[doubt_of],
        }

    def _kernel(self, task: DeviceTask, like: int, usual: Typical) -> None:
        host = task.launched_after
        before = int(self.back[host])
        call_name = self._name(task.call_name or usual.call_name)
        call_ns = usual.call_ns if task.call_ns is None else task.call_ns
        call = self._task(task, host, like, kind=TaskKind.CALL, name=call_name, dur_ns=call_ns, doubt_of=host)
        kernel = self._task(task, task.after, like, work=(task.nbytes, task.flops))
        self._chain(EdgeKind.PROGRAM, before, call)
        self._chain(EdgeKind.STREAM, task.after, kernel, usual.gap_ns)
        if task.blocking:
            back = self._task(task, host, like, kind=TaskKind.RETURN, name=call_name, dur_ns=0)
            self._chain(EdgeKind.PROGRAM, before, back)
            self.added.add(kernel, back, EdgeKind.SYNC, usual.return_ns)
        self.added.add(call, kernel, EdgeKind.LAUNCH, usual.latency_ns, from_start=True)
        self.waits[task.after].append((before, kernel))

    def _chain(self, order: EdgeKind, anchor: int, row: int, lag: int = 0) -> None:
        chain = self.chains[order, anchor]
        self.added.add(chain[-1] if chain else anchor, row, order, lag)
        chain.append(row)

    def _reroute(self) -> None:
        """Let what followed an anchor on its lane follow the last new task; it cannot overlap with that one."""
        graph, edges = self.graph, self.edges
        for order in (EdgeKind.PROGRAM, EdgeKind.STREAM):
            last = np.full(len(graph), -1, dtype=np.int32)
            for (of, anchor), rows in self.chains.items():
                if of == order:
                    last[anchor] = rows[-1]
            follow = np.flatnonzero((graph.edge_kind == order) & ~graph.from_start & (last[graph.src] >= 0))
            edges["src"][follow] = last[graph.src[follow]]
            for column in (edges["lag"], edges["typical"]):
                column[follow] = np.maximum(column[follow], 0)

    def _move_waits(self) -> None:
        """Let synchronisation wait for the last task launched before it, in program order."""
        anchors = np.zeros(len(self.graph), dtype=np.bool_)
        anchors[list(self.waits)] = True
        for edge in np.flatnonzero((self.graph.edge_kind == EdgeKind.SYNC) & anchors[self.graph.src]).tolist():
            placed, waiting = self.waits[int(self.graph.src[edge])], self.edges["dst"][edge]
            earlier = [row for host, row in placed if host < waiting]
            if earlier:
                self.edges["src"][edge] = earlier[-1]

    def _name(self, text: str) -> int:
        if text not in self.index:
            self.index[text] = len(self.graph.names) + len(self.names)
            self.names.append(text)
        return self.index[text]
