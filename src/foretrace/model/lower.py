"""`lower`: an operator graph on devices, with the time of every operator, as a TaskGraph that the engines run.

On an accelerator, a host thread calls one operator after another and launches its kernel on the stream of its device; a
step ends when the host has waited for all of them. So a step of many small operators is as long as its launches, and
one of large operators as long as its kernels, by simulation. Every device has a thread of its own, as processes that
torchrun starts have. On a processor, operators run one after another.

What an operator of one device reads from another is sent once, as a copy on the link between both; what leaves a
machine goes through its network interface, one copy at a time. Receiving is not a limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.cost.calls import Family
from foretrace.cost.model import CostModel, Prediction
from foretrace.cost.network.network import Cost, Network
from foretrace.errors import ForetraceError
from foretrace.graph.assemble import assemble
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, GraphInfo, Lane, Phase, TaskGraph, TaskKind
from foretrace.hardware.cluster import Cluster
from foretrace.hardware.devices import Device
from foretrace.model.messages import ModelCollective
from foretrace.model.operator_graph import OperatorGraph, Role
from foretrace.model.texts import LARGEST
from foretrace.simulate.timeline import simulate
from foretrace.trace.tables import Interner
from foretrace.trace.trace import LaneKind

_LONGEST_S = 86_400.0  # of one operator: an operator of a day is none

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """What a host spends to have an operator run on a device, ns: eager PyTorch on a server processor.

    Assumed, with a range of a factor of two. Public recordings show 28 to 140 us of host time per kernel in the forward
    pass (median 81), 17 to 122 in the backward pass (43) and 22 to 76 in updates (30), much of it the profiler's own,
    launches of 3 to 9 us, 6 to 11 us from a launch to an idle stream of an NVIDIA GPU and 1 to 2 us between kernels:
    `benchmarks/host_costs.py` prints them. Without a profiler about a third of it is left.
    """

    forward_ns: int = 18_000
    backward_ns: int = 10_000
    optimizer_ns: int = 15_000
    view_ns: int = 3_000  # an operator that launches nothing
    call_ns: int = 4_500
    latency_ns: int = 7_000
    gap_ns: int = 1_200
    return_ns: int = 8_000
    low: float = 0.5
    high: float = 2.0

    def own_ns(self, operators: OperatorGraph) -> Int64:
        """Return what the host spends on every operator (n), its launch aside."""
        phase = np.array([node.phase for node in operators.nodes], dtype=np.int64)
        own = np.where(phase == Phase.BACKWARD, self.backward_ns, self.forward_ns)
        own = np.where(phase == Phase.OPTIMIZER, self.optimizer_ns, own)
        return np.where(operators.calls.family != Family.NONE, own, self.view_ns)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lowered:
    """The task graph of a step, the prediction for every node, the task that runs each (−1: none does), messages."""

    graph: TaskGraph
    costs: Prediction
    task: Int64
    messages: Int64 = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # their tasks
    sent: tuple[Cost, ...] = ()  # what each takes


def lower(
    operators: OperatorGraph,
    *,
    device: Device,
    costs: CostModel,
    placement: Sequence[int] = (),
    cluster: Cluster | None = None,
    host: HostCosts | None = None,
    own_processor: bool = False,
    messages: Sequence[ModelCollective] = (),
    network: Mapping[str, Network] | None = None,
) -> Lowered:
    """Return the task graph of a step of `operators` with its `messages`, timed by the network of their lane.

    `placement` is the device of `cluster` (counted from 0, all alike) of every operator; device 0 runs all where it is
    empty. What is split over several devices is several operators of a graph that was split before. `own_processor`:
    the device is the processor itself, operators run on the thread that calls them. Raises ForetraceError where an
    operator's cost is not known to any model, where the placement is not of this graph or needs more devices than there
    are.
    """
    if placement and len(placement) != len(operators):
        what = f"{len(placement)} devices for the {len(operators)} operators of {operators.name}"
        raise ForetraceError(f"`placement=` names {what}; give one for each.")
    place = np.array(placement or [0] * len(operators), dtype=np.int64)
    if place.size and place.min() < 0:
        raise ForetraceError(f"`placement=` names device {place.min()}; devices are counted from 0.")
    workers = cluster.workers if cluster is not None else 1
    if place.size and place.max() >= workers:
        have = f"the cluster has {workers}" if cluster is not None else "no cluster was given"
        raise ForetraceError(f"`placement=` uses device {place.max()}, but {have}; name a cluster with enough devices.")
    found = costs.predict(operators.calls, device)
    missing = np.flatnonzero(np.isnan(found.seconds))
    if len(missing):
        node = operators.nodes[int(missing[0])]
        where = f" in {node.layer}" if node.layer else ""
        raise ForetraceError(f"no cost model knows what {node.op}{where} takes; add roofline to the chain.")
    if own_processor:
        return _on_processor(operators, found)
    sent = [network[each.lane].cost(each.kind, each.nbytes) for each in messages] if network else []
    return _on_devices(operators, found, device, place, cluster, host or HostCosts(), messages[: len(sent)], sent)


def _on_processor(operators: OperatorGraph, found: Prediction) -> Lowered:
    n = len(operators)
    draft = _Draft(operators, [Lane(rank=0, kind=LaneKind.CPU, label="main thread")])
    begin = draft.tasks("step", 1, kind=TaskKind.MARK, lane=0, release=0)
    rows = draft.tasks("", n, kind=TaskKind.OPERATOR, lane=0, dur=_ns(found.seconds), node=np.arange(n), work=True)
    end = draft.tasks("step", 1, kind=TaskKind.MARK, lane=0)
    thread = np.concatenate([begin, rows, end])
    draft.edges(thread[:-1], thread[1:], EdgeKind.PROGRAM)
    graph, order = draft.graph((begin[0], end[0]), platform="cpu", devices=())
    facts = _facts(operators, graph.recorded[order[rows]])
    graph = replace(graph, info=replace(graph.info, recording=facts))
    return Lowered(graph=graph, costs=found, task=order[rows])


def _on_devices(
    operators: OperatorGraph, found: Prediction, device: Device, place: Int64, cluster: Cluster | None, host: HostCosts,
    messages: Sequence[ModelCollective], sent: Sequence[Cost],
) -> Lowered:  # fmt: skip
    n = len(operators)
    used, stream = np.unique(place, return_inverse=True) if n else (np.zeros(1, np.int64), place)
    rank = used.tolist() if len(used) > 1 else [0]  # a process per device
    lanes = [Lane(rank=each, kind=LaneKind.CPU, label="main thread") for each in rank]
    lanes += [
        Lane(rank=each, kind=LaneKind.GPU, device=device, stream=7, label=f"device {device}")
        for each, device in zip(rank, used.tolist(), strict=True)
    ]
    draft = _Draft(operators, lanes)
    works = operators.calls.family != Family.NONE
    own = host.own_ns(operators)
    at = np.flatnonzero(works)
    begin = draft.tasks("step", 1, kind=TaskKind.MARK, lane=0, release=0)
    hosts = draft.tasks("", n, kind=TaskKind.CPU, lane=stream, dur=own, node=np.arange(n))
    calls = draft.tasks("cudaLaunchKernel", len(at), kind=TaskKind.CALL, lane=stream[at], dur=host.call_ns, node=at)
    kernels = draft.tasks(
        "", len(at), kind=TaskKind.KERNEL, lane=len(used) + stream[at], dur=_ns(found.seconds[at]), node=at, work=True
    )
    # A call of its own, so that its return is not taken for that of the last launch, which may go with its kernel.
    threads = np.arange(len(used))
    sync = draft.tasks("cudaDeviceSynchronize", len(used), kind=TaskKind.CALL, lane=threads)
    back = draft.tasks("cudaDeviceSynchronize", len(used), kind=TaskKind.RETURN, lane=threads)
    end = draft.tasks("step", 1, kind=TaskKind.MARK, lane=0)
    # A thread: each operator's own time, then its launch.
    last = hosts.copy()
    last[at] = calls
    for each in range(len(used)):
        mine, ends = stream == each, slice(each, each + 1)
        draft.edges(
            np.concatenate([begin, last[mine], sync[ends]]), np.concatenate([hosts[mine], sync[ends], back[ends]]),
            EdgeKind.PROGRAM,
        )  # fmt: skip
    draft.edges(hosts[at], calls, EdgeKind.PROGRAM)
    draft.edges(calls, kernels, EdgeKind.LAUNCH, host.latency_ns, from_start=True)
    for each in range(len(used)):
        mine = kernels[stream[at] == each]
        draft.edges(mine[:-1], mine[1:], EdgeKind.STREAM, host.gap_ns)
        draft.edges(mine[-1:], back[each : each + len(mine[-1:])], EdgeKind.SYNC, host.return_ns)
    draft.edges(back, np.repeat(end, len(back)), EdgeKind.PROGRAM)
    rows = np.full(n, -1, dtype=np.int64)
    rows[at] = kernels
    if cluster is not None:
        _send(draft, operators, rows, place, cluster)
    exchanged = _exchange(draft, messages, sent, rows, np.concatenate([hosts, begin]), back[:1], device)
    platform = "rocm" if device.vendor == "AMD" else "cuda"
    graph, order = draft.graph((begin[0], end[0]), platform=platform, devices=(device.name,))
    facts = _facts(operators, graph.recorded[order[hosts]])
    if sent:
        facts["distributed"] = {"backend": "nccl", "messages": len(sent)}
    graph = replace(graph, info=replace(graph.info, recording=facts, world_size=rank[-1] + 1))
    return Lowered(
        graph=graph, costs=found, task=np.where(rows >= 0, order[rows], -1), messages=order[exchanged], sent=tuple(sent)
    )


def _exchange(
    draft: _Draft, messages: Sequence[ModelCollective], sent: Sequence[Cost], rows: Int64, hosts: Int64, back: Int64,
    device: Device,
) -> Int64:  # fmt: skip
    """Return messages on lanes of their own, in the order in which they are issued, and their rows.

    `rows` (n nodes) are kernels, −1 where there is none; `hosts` (n + 1) the host's tasks and what begins the step.
    """
    n = len(rows)
    # The nearest kernel at or ahead of a node, and at or behind it (the end of the step where none is).
    former = np.maximum.accumulate(np.where(rows >= 0, np.arange(n), -1)) if n else rows
    latter = np.minimum.accumulate(np.where(rows >= 0, np.arange(n), n)[::-1])[::-1] if n else rows
    lanes: dict[str, int] = {}
    found: list[Int64] = []
    before: dict[str, Int64] = {}
    for message, cost in zip(messages, sent, strict=True):
        if message.lane not in lanes:
            lanes[message.lane] = len(draft.lanes)
            draft.lanes.append(Lane(rank=0, kind=LaneKind.LINK, label=message.lane))
        at = np.array([max(message.issued, 0)])
        row = draft.tasks(message.name, 1, kind=TaskKind.COLLECTIVE, lane=lanes[message.lane],
                          dur=_ns(np.array([cost.seconds])), node=at, nbytes=round(message.nbytes))  # fmt: skip
        draft.edges(hosts[message.issued : message.issued + 1] if message.issued >= 0 else hosts[-1:], row,
                    EdgeKind.COLLECTIVE)  # fmt: skip
        if message.after >= 0 and former[message.after] >= 0:
            made = rows[former[message.after : message.after + 1]]
            if message.copied:
                seconds = np.array([message.copied / (_COPIED * device.memory_gb_s * 1e9)])
                copy = draft.tasks("gradients into what is sent", 1, kind=TaskKind.KERNEL, lane=1, dur=_ns(seconds),
                                   node=at, nbytes=round(message.copied))  # fmt: skip
                draft.edges(made, copy, EdgeKind.STREAM)
                following = int(latter[message.after + 1]) if message.after + 1 < n else n
                draft.edges(copy, rows[following : following + 1] if following < n else back, EdgeKind.STREAM)
                made = copy
            draft.edges(made, row, EdgeKind.EVENT)
        until = int(latter[message.before]) if message.before < n else n
        draft.edges(row, rows[until : until + 1] if until < n else back, EdgeKind.COLLECTIVE)
        if message.lane in before:
            draft.edges(before[message.lane], row, EdgeKind.STREAM)
        before[message.lane] = row
        found.append(row)
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def _facts(operators: OperatorGraph, called: Int64) -> dict[str, Any]:
    """Return what a recorder says of parameters and of when each gradient is ready, for techniques that ask.

    `called` (n nodes) is when the host calls each operator, ns.
    """
    weights: dict[str, tuple[int, dict[str, Any]]] = {}
    for tensor in operators.tensors:
        storage = operators.storages[tensor.storage]
        if storage.role == Role.WEIGHT and storage.name and tensor.nbytes == storage.nbytes:
            fact = {
                "name": storage.name, "shape": list(tensor.dims), "dtype": tensor.dtype, "numel": prod(tensor.dims),
                "trained": True, "optimizer": -1,
            }  # fmt: skip
            weights.setdefault(storage.name, (len(weights), fact))
    made = [
        (weights[each.name][0], int(called[each.born]))
        for each in operators.storages
        if each.role == Role.GRADIENT and each.name in weights and each.born >= 0
    ]
    # Every gradient or none: a technique that sends some of them only would promise too much.
    if {index for index, _ in made} != set(range(len(weights))):
        return {}
    return {"parameters": [fact for _, fact in weights.values()], "gradient_order": made}


def _send(draft: _Draft, operators: OperatorGraph, rows: Int64, place: Int64, cluster: Cluster) -> None:
    """Add copies of what one device makes and another reads: each value once per device that reads it."""
    maker = _work_behind(operators, rows)
    links: dict[tuple[int, ...], int] = {}
    sent: dict[tuple[int, int], Int64] = {}
    for source, target, value in zip(*(column.tolist() for column in operators.edges), strict=True):
        made = maker[source]
        if made < 0 or rows[target] < 0 or place[made] == place[target]:
            continue
        way = (int(place[made]), int(place[target]))
        if (value, way[1]) not in sent:
            machine, other = (cluster.machine_of[each] for each in way)
            over: tuple[int, ...] = way
            label = f"device {way[0]} to {way[1]}"
            if machine != other and cluster.nics > 1:
                over, label = way[:1], f"network card of device {way[0]}"
            elif machine != other:
                over, label = (machine,), f"network interface of machine {machine}"
            if over not in links:
                links[over] = len(draft.lanes)
                draft.lanes.append(Lane(rank=way[0], kind=LaneKind.GPU, device=way[0], label=label, ordered=False))
            nbytes, link = operators.tensors[value].nbytes, cluster.link_of(*way)
            seconds = np.array([link.latency_s + nbytes / link.bytes_per_s])
            copy = draft.tasks(
                "send",
                1,
                kind=TaskKind.COPY,
                lane=links[over],
                dur=_ns(seconds),
                node=np.array([target]),
                nbytes=nbytes,
            )
            draft.edges(rows[made : made + 1], copy, EdgeKind.DATA)
            sent[value, way[1]] = copy
        draft.edges(sent[value, way[1]], rows[target : target + 1], EdgeKind.DATA)


def _work_behind(operators: OperatorGraph, rows: Int64) -> Int64:
    """Return for every node the nearest one with work whose result it hands on: itself or a view's base; −1: none."""
    found = np.where(rows >= 0, np.arange(len(rows)), -1)
    for i, node in enumerate(operators.nodes):
        if found[i] < 0 and node.inputs:
            before = operators.producer[node.inputs[0]]
            found[i] = found[before] if before >= 0 else -1
    return found


_COPIED = 0.8  # of the bandwidth, that copies reach
_PLACE = {
    TaskKind.CALL: 1,
    TaskKind.COPY: 2,
    TaskKind.COLLECTIVE: 2,
    TaskKind.KERNEL: 3,
    TaskKind.RETURN: 1,
    TaskKind.MARK: 2,
}


class _Draft:
    """Tasks and edges, many of a kind at a time."""

    def __init__(self, operators: OperatorGraph, lanes: list[Lane]) -> None:
        self.lanes = lanes
        self.names, self.layers, self.shapes = Interner(), Interner(), Interner()
        nodes = operators.nodes
        self._name = operators.name
        columns: dict[str, list[float]] = {
            "phase": [node.phase for node in nodes],
            "layer": [self.layers[node.layer] if node.layer else -1 for node in nodes],
            "op": [self.names[node.op] for node in nodes],
            "shape": [self.shapes[node.text] if node.text else -1 for node in nodes],
            "flops": [node.flops for node in nodes],
            "nbytes": [min(node.read_bytes + node.written_bytes, LARGEST) for node in nodes],
        }
        self._of = {key: np.array(values, dtype=np.float64) for key, values in columns.items()}
        self._columns: dict[str, list[npt.NDArray[np.float64]]] = {}
        self._edges: list[tuple[Int64, Int64, EdgeKind, int, bool]] = []
        self._count = 0

    def tasks(
        self,
        name: str,
        count: int,
        *,
        kind: TaskKind,
        lane: int | Int64,
        dur: int | Int64 = 0,
        node: Int64 | None = None,
        work: bool = False,
        nbytes: int = -1,
        release: int = NO_RELEASE,
    ) -> Int64:
        """Return `count` tasks and their rows; of nodes with layer and phase, and if they `work` FLOPs and bytes.

        Without a name, each is called as the operator of its node.
        """
        of = {key: column[node] for key, column in self._of.items()} if node is not None else {}
        if not work:
            of.pop("flops", None)
            of.pop("nbytes", None)
        given = {"kind": kind, "lane": lane, "dur": dur, "release": release, "nbytes": nbytes, "flops": 0.0,
                 "phase": Phase.NONE, "layer": -1, "op": -1, "shape": -1,
                 "name": self.names[name] if name else of.get("op", -1)} | of  # fmt: skip
        # In the order of the program, so that it need not be found: own time, launch, what is waited for, the kernel.
        place = _PLACE.get(kind, 0)
        given["recorded"] = (
            4 * node + place if node is not None else 4 * len(self._of["op"]) + place if self._count else -1
        )
        for key, value in given.items():
            self._columns.setdefault(key, []).append(np.broadcast_to(np.asarray(value), (count,)))
        rows = np.arange(self._count, self._count + count)
        self._count += count
        return rows

    def edges(self, src: Int64, dst: Int64, kind: EdgeKind, lag: int = 0, *, from_start: bool = False) -> None:
        """Add edges of a kind, one per pair."""
        self._edges.append((src, dst, kind, lag, from_start))

    def graph(self, marks: tuple[int, int], *, platform: str, devices: tuple[str, ...]) -> tuple[TaskGraph, Int64]:
        """Return the graph, and the row in it of every task that was added."""
        counts = [len(src) for src, *_ in self._edges]
        src, dst = (np.concatenate([each[i] for each in self._edges]) for i in (0, 1))
        kind, lag, from_start = (np.repeat([each[i] for each in self._edges], counts) for i in (2, 3, 4))
        n = self._count
        made = assemble(
            {
                **{key: np.concatenate(parts) for key, parts in self._columns.items()},
                "step": np.zeros(n, dtype=np.int64),
                "priority": np.arange(n),  # carries the row numbers through the sort
            },
            {"src": src, "dst": dst, "edge_kind": kind, "lag": lag, "from_start": from_start},
            marks=np.array(marks),
            names=tuple(self.names),
            layers=tuple(self.layers),
            lanes=tuple(self.lanes),
            info=GraphInfo(source=self._name, platform=platform, devices=devices, steps=(0,), step_source="operators"),
            shapes=tuple(self.shapes),
        )
        order = np.empty(n, dtype=np.int64)
        order[made.priority] = np.arange(n)
        made = made.with_columns(priority=np.zeros(n, dtype=np.int32))
        return made.with_columns(recorded=simulate(made).start), order  # edits go by recorded time


def _ns(seconds: npt.NDArray[np.float64]) -> Int64:
    longest = float(seconds.max(initial=0.0))
    if not longest <= _LONGEST_S:
        raise ForetraceError(f"one operator would take {longest:.3g} s, more than a day; give sizes of a real model.")
    return np.rint(seconds * 1e9).astype(np.int64)
