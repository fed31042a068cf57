"""A `PlacementProblem` from a model: operators with predicted times, what they keep in memory, what they send."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from foretrace.cost.model import Prediction
from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import Phase
from foretrace.hardware.cluster import parse_link
from foretrace.model.operator_graph import OperatorGraph, Role
from foretrace.model.target import target
from foretrace.plan.placement.problem import PlacementProblem
from foretrace.zoo.operators import operators_of

_KEPT = (Role.WEIGHT, Role.BUFFER, Role.GRADIENT, Role.OPTIMIZER)


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
) -> PlacementProblem:
    """The problem of a model on `devices` devices alike; memory and link as the catalog has them where not given.

    Raises ForetraceError for what is not known of the device, and as `operators_of` does.
    """
    if not device or devices is None:
        missing = "`device=NAME`" if not device else "`devices=N`"
        raise ForetraceError(f"{source} is to be placed on devices; name them: {missing}.")
    on = target(device)
    rate = parse_link(link).bytes_per_s if link else (on.device.scaleup_gb_s / 2 or on.device.pcie_gb_s) * 1e9
    room = on.device.memory_gb * 1e9 if memory_limit is None else memory_limit
    if not rate or not room:
        what, mend = ("link", "link=200gbit") if not rate else ("memory", "memory_limit=80GB")
        raise ForetraceError(f"the catalog has no {what} of {on.device.short}; give it: `{mend}`.")
    graph = operators_of(source, size=size, batch=batch, precision=precision, training=training, progress=progress)
    costs = on.costs(graph).predict(graph.calls, on.device)
    return problem_of(graph, costs, accelerators=devices, memory_limit=room, bytes_per_s=rate)


def problem_of(
    graph: OperatorGraph, costs: Prediction, *, accelerators: int, memory_limit: float, bytes_per_s: float
) -> PlacementProblem:
    """Operators of a layer stay together, with those of its backward pass; times in seconds.

    `costs` has a time for every node. An update runs where its weights are: its time is shared out by their bytes.
    Memory is what a layer keeps (weights, gradients, optimizer state) and, in training, what its forward pass saves,
    for as many samples as there are devices: as many are on their way in a pipeline. Raises ForetraceError where an
    operator has no time.
    """
    if missing := np.flatnonzero(np.isnan(costs.seconds)).tolist():
        raise ForetraceError(f"no cost model knows what {graph.nodes[missing[0]].op} takes; choose another device.")
    updates = np.array([node.phase == Phase.OPTIMIZER for node in graph.nodes], dtype=np.bool_)
    if updates.all():
        raise ForetraceError(f"{graph.name} has no operators to place; give a model that computes something.")
    holder: dict[int, int] = {}  # of a storage: the first node that touches it
    for at, node in enumerate(graph.nodes):
        for tensor in () if updates[at] else (*node.inputs, *node.outputs):
            holder.setdefault(graph.tensors[tensor].storage, at)
    times = np.stack([costs.seconds, costs.low_s, costs.high_s])
    for at in np.flatnonzero(updates).tolist():
        node = graph.nodes[at]
        touched = {graph.tensors[each].storage for each in (*node.inputs, *node.outputs)} & holder.keys()
        weights = {each: float(graph.storages[each].nbytes) for each in touched}
        for storage, size in weights.items():
            times[:, holder[storage]] += times[:, at] * size / max(sum(weights.values()), 1.0)
        if not touched:
            times[:, 0] += times[:, at]
    rows = np.flatnonzero(~updates)
    row_of = np.cumsum(~updates) - 1
    backward = np.array([node.phase == Phase.BACKWARD for node in graph.nodes], dtype=np.bool_)
    nbytes = np.zeros(len(graph))
    in_flight = accelerators if backward.any() else 1
    for number, held in enumerate(graph.storages):
        copies = 1 if held.role in _KEPT else in_flight if held.role == Role.ACTIVATION else 0
        nbytes[holder.get(number, rows[0])] += copies * held.nbytes
    starts, ends, tensors = graph.edges
    among = ~updates[starts] & ~updates[ends]
    starts, ends, tensors = starts[among], ends[among], tensors[among]
    sent = np.zeros(len(graph))
    for tensor, start in {(int(tensor), int(start)) for tensor, start in zip(tensors, starts, strict=True)}:
        sent[start] += graph.tensors[tensor].nbytes
    return PlacementProblem(
        name=graph.name, ids=tuple(rows.tolist()),
        labels=tuple(graph.nodes[row].layer or graph.nodes[row].op for row in rows),
        accelerator_time=times[0, rows], accelerator_range=(times[1, rows], times[2, rows]),
        cpu_time=np.zeros(len(rows)), nbytes=nbytes[rows], transfer=sent[rows] / bytes_per_s, backward=backward[rows],
        colour=_colours(graph, backward)[rows], edges=np.unique(row_of[np.stack([starts, ends], axis=1)], axis=0),
        accelerators=accelerators, cpus=0, memory_limit=memory_limit,
    )  # fmt: skip


def _colours(graph: OperatorGraph, backward: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """A number per run of forward operators of one layer; backward operators go with what they read of such a run.

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
