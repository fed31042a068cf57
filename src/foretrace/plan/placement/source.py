"""A `PlacementProblem` from a model: operators with predicted times, what they keep in memory, what they send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from foretrace.arrays import Float64
from foretrace.cost.calls import Family
from foretrace.cost.model import Prediction
from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import Phase
from foretrace.hardware.cluster import parse_link
from foretrace.model.lower import HostCosts
from foretrace.model.operator_graph import OperatorGraph, Role
from foretrace.model.target import target
from foretrace.plan.placement.problem import PlacementProblem
from foretrace.zoo.operators import operators_of

MOST_DEVICES = 4_096
_HOST = HostCosts()
KEPT = (Role.WEIGHT, Role.BUFFER, Role.GRADIENT, Role.OPTIMIZER)


@dataclass(frozen=True, kw_only=True, eq=False)
class PlaceableModel:
    """A model's operators with their predicted times, and the devices, all alike, that it is to run on."""

    graph: OperatorGraph
    costs: Prediction  # a row per node
    devices: int
    memory_limit: float  # bytes of a device
    bytes_per_s: float  # of its link, each way

    @cached_property
    def updates(self) -> npt.NDArray[np.bool_]:
        return np.array([node.phase == Phase.OPTIMIZER for node in self.graph.nodes], dtype=np.bool_)

    @cached_property
    def backward(self) -> npt.NDArray[np.bool_]:
        return np.array([node.phase == Phase.BACKWARD for node in self.graph.nodes], dtype=np.bool_)

    @cached_property
    def holder(self) -> dict[int, int]:
        """Of a storage: the first node that touches it, updates aside."""
        found: dict[int, int] = {}
        for at, node in enumerate(self.graph.nodes):
            for tensor in () if self.updates[at] else (*node.inputs, *node.outputs):
                found.setdefault(self.graph.tensors[tensor].storage, at)
        return found

    @cached_property
    def trained(self) -> Float64:
        """Share of each node (n) in the bytes of the weights that updates change."""
        found = self._changed(*np.flatnonzero(self.updates).tolist())
        if not found.any():
            found[np.argmin(self.updates)] = 1.0
        shares: Float64 = found / found.sum()
        return shares

    def _changed(self, *updates: int) -> Float64:
        """Return bytes of the weights that updates touch, by the node that holds them (n).

        A recording names no weights: of all that is touched then.
        """
        tensors = (each for at in updates for each in (*self.graph.nodes[at].inputs, *self.graph.nodes[at].outputs))
        touched = {self.graph.tensors[each].storage for each in tensors} & self.holder.keys()
        weights = {each for each in touched if self.graph.storages[each].role == Role.WEIGHT}
        found = np.zeros(len(self.graph))
        for each in weights or touched:
            found[self.holder[each]] += self.graph.storages[each].nbytes
        return found

    def held(self, *roles: Role) -> Float64:
        """Return bytes of storages of these roles by the node that holds them (n).

        What updates alone touch, as the optimizer's state, is where the weights are that they change, by their bytes.
        """
        found = np.zeros(len(self.graph))
        for number, storage in enumerate(self.graph.storages):
            if storage.role in roles and number in self.holder:
                found[self.holder[number]] += storage.nbytes
            elif storage.role in roles:
                found += storage.nbytes * self.trained
        return found

    def update_times(self, seconds: Float64) -> Float64:
        """Return what the updates of the weights that a node holds take (n): updates shared out by bytes."""
        found = np.zeros(len(self.graph))
        for at in np.flatnonzero(self.updates).tolist():
            changed = self._changed(at)
            found += seconds[at] * (changed / changed.sum() if changed.any() else self.trained)
        return found

    @cached_property
    def host_s(self) -> Float64:
        """What the host of a device spends to have every operator run (n); `HostCosts` has its range."""
        launches = self.graph.calls.family != Family.NONE
        found: Float64 = (_HOST.own_ns(self.graph) + _HOST.call_ns * launches) / 1e9
        return found

    @property
    def ends(self) -> tuple[tuple[Float64, Float64], ...]:
        """Times of kernels and of the host (n each): as fast, and as slow, as they may be."""
        return (self.costs.low_s, _HOST.low * self.host_s), (self.costs.high_s, _HOST.high * self.host_s)

    def problem(self) -> PlacementProblem:
        """Return the placement of one batch, in seconds: operators of a layer stay together, backward ones, too.

        An update runs where its weights are. Memory is what a layer keeps (weights, gradients, optimizer state) and, in
        training, what its forward pass saves, for as many batches as there are devices: as many are on their way in a
        pipeline.
        """
        graph, costs = self.graph, self.costs
        # A device waits for its host where that is slower; the sum of the slower one per operator is an upper bound.
        slowest = np.maximum(*self.ends[1])
        times = [each * ~self.updates + self.update_times(each) for each in (costs.seconds, costs.low_s, slowest)]
        rows = np.flatnonzero(~self.updates)
        row_of = np.cumsum(~self.updates) - 1
        named = bool(graph.parameters)  # a recording names no weights
        kept, saved = (named * self.held(*roles) for roles in (KEPT, (Role.ACTIVATION,)))
        saved *= self.devices if self.backward.any() else 1
        starts, ends, tensors = graph.edges
        among = ~self.updates[starts] & ~self.updates[ends]
        starts, ends, tensors = starts[among], ends[among], tensors[among]
        sent = np.zeros(len(graph))
        for tensor, start in {(int(tensor), int(start)) for tensor, start in zip(tensors, starts, strict=True)}:
            sent[start] += graph.tensors[tensor].nbytes
        return PlacementProblem(
            name=graph.name, ids=tuple(rows.tolist()),
            labels=tuple(graph.nodes[row].layer or graph.nodes[row].op for row in rows),
            accelerator_time=times[0][rows], accelerator_range=(times[1][rows], times[2][rows]),
            cpu_time=np.zeros(len(rows)), nbytes=(kept + saved)[rows],
            saved=saved[rows] if self.backward.any() else None, transfer=sent[rows] / self.bytes_per_s,
            backward=self.backward[rows], colour=_colours(graph, self.backward)[rows],
            edges=np.unique(row_of[np.stack([starts, ends], axis=1)], axis=0), accelerators=self.devices, cpus=0,
            memory_limit=self.memory_limit, host_time=(self.host_s * ~self.updates)[rows],
        )  # fmt: skip


def of_model(
    source: str,
    *,
    device: str,
    devices: int | None,
    memory_limit: float | None = None,
    link: str = "",
    batch: int | None = None,
    precision: str = "",
    training: bool = True,
    size: str = "full",
    progress: Callable[[float], None] | None = None,
) -> PlaceableModel:
    """Return a model for `devices` devices alike; memory and link as the catalog has them where not given.

    Raises ForetraceError for what is not known of the device, where an operator has no time, and as `operators_of`.
    """
    if not device or devices is None:
        missing = "`device=NAME`" if not device else "`devices=N`"
        raise ForetraceError(f"{source} is to be placed on devices; name them: {missing}.")
    if devices > MOST_DEVICES:
        raise ForetraceError(f"`devices={devices:,}` must be at most {MOST_DEVICES:,}: each takes layers of its own.")
    on = target(device)
    rate = parse_link(link).bytes_per_s if link else (on.device.scaleup_gb_s / 2 or on.device.pcie_gb_s) * 1e9
    room = on.device.memory_gb * 1e9 if memory_limit is None else memory_limit
    if not rate or not room:
        what, how = ("link", "link=200gbit") if not rate else ("memory", "memory_limit=80GB")
        raise ForetraceError(f"the catalog has no {what} of {on.device.short}; give it: `{how}`.")
    graph = operators_of(source, size=size, batch=batch, precision=precision, training=training, progress=progress)
    if devices > len(graph):
        raise ForetraceError(f"{graph.name} has {len(graph):,} operators, fewer than `devices={devices:,}`; give less.")
    costs = on.costs(graph).predict(graph.calls, on.device)
    if unknown := np.flatnonzero(np.isnan(costs.seconds)).tolist():
        raise ForetraceError(f"no cost model knows what {graph.nodes[unknown[0]].op} takes; choose another device.")
    found = PlaceableModel(graph=graph, costs=costs, devices=devices, memory_limit=room, bytes_per_s=rate)
    if found.updates.all():
        raise ForetraceError(f"{graph.name} has no operators to place; give a model that computes something.")
    return found


def _colours(graph: OperatorGraph, backward: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return a number per run of forward operators of one layer; backward ones go with what they read of one.

    One that reads nothing of its layer goes with the layer's last run, and without a layer with its last input.
    """
    found = np.zeros(len(graph), dtype=np.int64)
    last: dict[str, int] = {}  # run of a layer
    number, before = -1, None
    for at, node in enumerate(graph.nodes):
        makers = [int(graph.producer[tensor]) for tensor in node.inputs if graph.producer[tensor] >= 0]
        if backward[at]:
            same = [each for each in makers if node.layer and graph.nodes[each].layer == node.layer]
            found[at] = found[max(same)] if same else last.get(node.layer, found[max(makers, default=max(at - 1, 0))])
            continue
        if node.layer != before or not node.layer:
            number += 1
        found[at] = last[node.layer] = number
        before = node.layer
    return found
