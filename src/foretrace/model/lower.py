"""`lower`: an operator graph on devices, with the time of every operator, as a TaskGraph that the engines run.

On an accelerator, a host thread calls one operator after another and launches its kernel on the stream of its device; a
step ends when the host has waited for all of them. So a step of many small operators is as long as its launches, and
one of large operators as long as its kernels, by simulation. On a processor, operators run one after another.

What an operator of one device reads from another is sent once, as a copy on the link between both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from foretrace.cost.calls import Family
from foretrace.cost.model import CostModel, Prediction
from foretrace.errors import ForetraceError
from foretrace.graph.assemble import assemble
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, GraphInfo, Lane, Phase, TaskGraph, TaskKind
from foretrace.hardware.cluster import Cluster
from foretrace.hardware.devices import Device
from foretrace.model.operator_graph import OperatorGraph
from foretrace.model.strategy import Strategy
from foretrace.simulate.timeline import simulate
from foretrace.trace.trace import LaneKind

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

    def scaled(self, factor: float) -> HostCosts:
        """With what the host does (not the device's gap and latency) taking so many times as long."""
        names = ("forward_ns", "backward_ns", "optimizer_ns", "view_ns", "call_ns")
        return replace(self, **{name: round(getattr(self, name) * factor) for name in names})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lowered:
    """The task graph of a step, the prediction for every node, and the task that runs each (−1: none does)."""

    graph: TaskGraph
    costs: Prediction
    task: Int64


def lower(
    operators: OperatorGraph,
    *,
    device: Device,
    costs: CostModel,
    strategy: Strategy | None = None,
    cluster: Cluster | None = None,
    host: HostCosts | None = None,
    own_processor: bool = False,
) -> Lowered:
    """The task graph of one step of `operators`.

    `strategy` places operators on devices of `cluster`, all alike; without one, device 0 runs all. `own_processor`:
    the device is the processor itself, operators run on the thread that calls them. Raises ForetraceError where an
    operator's cost is not known to any model, where the strategy needs more devices than there are, or has no links.
    """
    place = (strategy or Strategy()).devices_of(operators)
    workers = cluster.workers if cluster is not None else 1
    if place.size and place.max() >= workers:
        have = f"the cluster has {workers}" if cluster is not None else "no cluster was given"
        raise ForetraceError(f"the strategy uses device {place.max()}, but {have}; name a cluster with enough devices.")
    found = costs.predict(operators.calls, device)
    missing = np.flatnonzero(np.isnan(found.seconds))
    if len(missing):
        node = operators.nodes[int(missing[0])]
        where = f" in {node.layer}" if node.layer else ""
        raise ForetraceError(f"no cost model knows what {node.op}{where} takes; add roofline to the chain.")
    if own_processor:
        return _on_processor(operators, found)
    return _on_devices(operators, found, device, place, cluster, host or HostCosts())


def _on_processor(operators: OperatorGraph, found: Prediction) -> Lowered:
    n = len(operators)
    table = _Table(operators)
    table.lanes = [Lane(rank=0, kind=LaneKind.CPU, label="main thread")]
    begin = table.task(kind=TaskKind.MARK, lane=0, name="step", release=0)
    rows = np.array(
        [
            table.task(kind=TaskKind.OPERATOR, lane=0, name=node.op, dur=_ns(found.seconds[i]), node=i)
            for i, node in enumerate(operators.nodes)
        ],
        dtype=np.int64,
    )
    end = table.task(kind=TaskKind.MARK, lane=0, name="step")
    table.chain([begin, *rows.tolist(), end], EdgeKind.PROGRAM)
    graph, order = table.graph((begin, end), platform="cpu", devices=())
    return Lowered(graph=graph, costs=found, task=order[rows] if n else rows)


def _on_devices(
    operators: OperatorGraph, found: Prediction, device: Device, place: Int64, cluster: Cluster | None, host: HostCosts
) -> Lowered:
    used = sorted(set(place.tolist())) or [0]
    table = _Table(operators)
    table.lanes = [Lane(rank=0, kind=LaneKind.CPU, label="main thread")]
    stream = {}
    for each in used:
        stream[each] = len(table.lanes)
        table.lanes.append(Lane(rank=0, kind=LaneKind.GPU, device=each, stream=7, label=f"device {each}"))
    calls = {Phase.BACKWARD: host.backward_ns, Phase.OPTIMIZER: host.optimizer_ns}
    begin = table.task(kind=TaskKind.MARK, lane=0, name="step", release=0)
    last_host, last_kernel = begin, dict.fromkeys(used, -1)
    rows = np.full(len(operators), -1, dtype=np.int64)
    idle = operators.calls.family == Family.NONE
    for i, node in enumerate(operators.nodes):
        own = host.view_ns if idle[i] else calls.get(node.phase, host.forward_ns)
        task = table.task(kind=TaskKind.CPU, lane=0, name=node.op, dur=own, node=i)
        table.edge(last_host, task, EdgeKind.PROGRAM)
        last_host = task
        if idle[i]:
            continue
        call = table.task(kind=TaskKind.CALL, lane=0, name="cudaLaunchKernel", dur=host.call_ns, node=i)
        table.edge(last_host, call, EdgeKind.PROGRAM)
        at = int(place[i])
        kernel = table.task(kind=TaskKind.KERNEL, lane=stream[at], name=node.op, dur=_ns(found.seconds[i]), node=i)
        table.edge(call, kernel, EdgeKind.LAUNCH, host.latency_ns, from_start=True)
        if last_kernel[at] >= 0:
            table.edge(last_kernel[at], kernel, EdgeKind.STREAM, host.gap_ns)
        last_host, last_kernel[at], rows[i] = call, kernel, kernel
    if cluster is not None:
        _send(table, operators, rows, place, cluster)
    back = table.task(kind=TaskKind.RETURN, lane=0, name="cudaDeviceSynchronize")
    table.edge(last_host, back, EdgeKind.PROGRAM)
    for kernel in last_kernel.values():
        if kernel >= 0:
            table.edge(kernel, back, EdgeKind.SYNC, host.return_ns)
    end = table.task(kind=TaskKind.MARK, lane=0, name="step")
    table.edge(back, end, EdgeKind.PROGRAM)
    platform = "rocm" if device.vendor == "AMD" else "cuda"
    graph, order = table.graph((begin, end), platform=platform, devices=(device.name,))
    return Lowered(graph=graph, costs=found, task=np.where(rows >= 0, order[rows], -1))


def _send(table: _Table, operators: OperatorGraph, rows: Int64, place: Int64, cluster: Cluster) -> None:
    """Copies of what one device makes and another reads: each value once per device that reads it."""
    maker = _work_behind(operators, rows)
    links: dict[tuple[int, int], int] = {}
    sent: dict[tuple[int, int], int] = {}
    for source, target, value in zip(*(column.tolist() for column in operators.edges), strict=True):
        made = maker[source]
        if made < 0 or rows[target] < 0 or place[made] == place[target]:
            continue
        way = (int(place[made]), int(place[target]))
        if (value, way[1]) not in sent:
            if way not in links:
                links[way] = len(table.lanes)
                label = f"device {way[0]} to {way[1]}"
                table.lanes.append(Lane(rank=0, kind=LaneKind.GPU, device=way[0], label=label, ordered=False))
            nbytes = operators.tensors[value].nbytes
            link = cluster.link_of(*way)
            seconds = link.latency_s + nbytes / link.bytes_per_s
            copy = table.task(
                kind=TaskKind.COPY, lane=links[way], name="send", dur=_ns(seconds), node=target, nbytes=nbytes
            )
            table.edge(int(rows[made]), copy, EdgeKind.DATA)
            sent[value, way[1]] = copy
        table.edge(sent[value, way[1]], int(rows[target]), EdgeKind.DATA)


def _work_behind(operators: OperatorGraph, rows: Int64) -> Int64:
    """For every node the nearest node with work whose result it hands on: itself, or what a view looks at; −1: none."""
    found = np.where(rows >= 0, np.arange(len(rows)), -1)
    for i, node in enumerate(operators.nodes):
        if found[i] < 0 and node.inputs:
            before = operators.producer[node.inputs[0]]
            found[i] = found[before] if before >= 0 else -1
    return found


class _Table:
    """Tasks and edges, added one by one."""

    def __init__(self, operators: OperatorGraph) -> None:
        self.operators = operators
        self.lanes: list[Lane] = []
        self.columns: dict[str, list[float]] = {
            key: [] for key in ("kind", "lane", "name", "dur", "phase", "layer", "op", "shape", "flops", "nbytes",
                                "release")
        }  # fmt: skip
        self.edges: list[tuple[int, int, int, int, bool]] = []
        self.names, self.layers, self.shapes = _Interned(), _Interned(), _Interned()

    def task(
        self,
        *,
        kind: TaskKind,
        lane: int,
        name: str,
        dur: int = 0,
        node: int = -1,
        nbytes: int = -1,
        release: int = NO_RELEASE,
    ) -> int:
        columns = self.columns
        of = self.operators.nodes[node] if node >= 0 else None
        work = of is not None and kind in (TaskKind.KERNEL, TaskKind.OPERATOR)
        columns["kind"].append(kind)
        columns["lane"].append(lane)
        columns["name"].append(self.names.index(name))
        columns["dur"].append(dur)
        columns["phase"].append(of.phase if of is not None else Phase.NONE)
        columns["layer"].append(self.layers.index(of.layer) if of is not None and of.layer else -1)
        columns["op"].append(self.names.index(of.op) if of is not None else -1)
        columns["shape"].append(self.shapes.index(of.text) if of is not None and of.text else -1)
        columns["flops"].append(of.flops if of is not None and work else 0.0)
        columns["nbytes"].append(round(of.read_bytes + of.written_bytes) if of is not None and work else nbytes)
        columns["release"].append(release)
        return len(columns["kind"]) - 1

    def edge(self, src: int, dst: int, kind: EdgeKind, lag: int = 0, *, from_start: bool = False) -> None:
        self.edges.append((src, dst, kind, lag, from_start))

    def chain(self, rows: list[int], kind: EdgeKind) -> None:
        for before, after in pairwise(rows):
            self.edge(before, after, kind)

    def graph(self, marks: tuple[int, int], *, platform: str, devices: tuple[str, ...]) -> tuple[TaskGraph, Int64]:
        """The graph, and the row in it of every task that was added."""
        src, dst, kind, lag, from_start = (np.array(column) for column in zip(*self.edges, strict=True))
        n = len(self.columns["kind"])
        tasks = {key: np.array(values) for key, values in self.columns.items()}
        made = assemble(
            {**tasks, "step": np.zeros(n, dtype=np.int64), "recorded": np.arange(n)},
            {"src": src, "dst": dst, "edge_kind": kind, "lag": lag, "from_start": from_start},
            marks=np.array(marks),
            names=self.names.table(),
            layers=self.layers.table(),
            lanes=tuple(self.lanes),
            info=GraphInfo(
                source=self.operators.name, platform=platform, devices=devices, steps=(0,), step_source="operators"
            ),
            shapes=self.shapes.table(),
        )
        order = np.empty(n, dtype=np.int64)
        order[made.recorded] = np.arange(n)
        return made.with_columns(recorded=simulate(made).start), order  # edits go by recorded time


class _Interned:
    """Texts and their numbers."""

    def __init__(self) -> None:
        self._found: dict[str, int] = {}

    def index(self, text: str) -> int:
        return self._found.setdefault(text, len(self._found))

    def table(self) -> tuple[str, ...]:
        return tuple(self._found)


def _ns(seconds: float) -> int:
    return round(float(seconds) * 1e9)
