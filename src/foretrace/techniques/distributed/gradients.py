"""The gradients of a recorded step: how large each one is, and the task at whose end it is ready."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.cost.operators.operator import Operator
from foretrace.graph.select import previous_on_lane
from foretrace.graph.taskgraph import EdgeKind, Phase, TaskGraph, TaskKind, per_graph
from foretrace.graph.work import element_bytes
from foretrace.simulate.replay import replay
from foretrace.techniques.compute.batching import micro_batches
from foretrace.techniques.memory.blocks import layer_prefixes, recorded_modules

_ACCUMULATE = "torch::autograd::AccumulateGrad"
_EVALUATE = f"autograd::engine::evaluate_function: {_ACCUMULATE}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Gradient:
    """The gradient of one parameter."""

    name: str  # of the parameter, "" if unknown
    parameter: int  # index in the order of registration, −1 if unknown
    shape: tuple[int, ...]
    itemsize: int  # bytes
    ready: Int64  # host row per step (n_steps), at whose end it is ready
    device: Int64  # device row per step at whose end it is ready; −1 on a processor

    @property
    def elements(self) -> int:
        """Numbers in it."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return self.elements * self.itemsize


@per_graph
def find_gradients(graph: TaskGraph) -> tuple[Gradient, ...]:
    """Return gradients in the order in which they become ready; empty where the recording does not show them.

    A recording with operators of the host shows when autograd hands a gradient over; else the times that foretrace's
    recorder observed in one step are laid over the backward pass. With micro-batches the last one counts.
    """
    if graph.info.platform == "cpu":
        found = _accumulated(graph)
        if found:
            return found
    return _observed(graph)


def _accumulated(graph: TaskGraph) -> tuple[Gradient, ...]:
    """Find gradients by the operator that accumulates them: a run of its tasks between two of the engine's
    around it.
    """
    table = {name: i for i, name in enumerate(graph.names)}
    inner, outer = table.get(_ACCUMULATE, -2), table.get(_EVALUATE, -2)
    rows = np.flatnonzero(np.isin(graph.name, (inner, outer)) & ~graph.gone)
    rows = rows[np.argsort(graph.lane[rows], kind="stable")]
    own = graph.name[rows] == inner
    first = own & ~np.concatenate([[False], own[:-1] & (outer >= 0)])
    last = own & ~np.concatenate([own[1:] & (outer >= 0), [False]])
    begin, end = rows[first], rows[last]
    steps, micro = graph.n_steps, micro_batches(graph)
    by_step = [np.flatnonzero(graph.step[begin] == step) for step in range(steps)]
    counts = {len(each) for each in by_step}
    if len(counts) != 1 or not (count := counts.pop()) or count % micro:
        return ()
    kept = count // micro
    ready = np.stack([end[each][-kept:] for each in by_step], axis=1)
    shown = begin[by_step[-1]][-kept:]
    shapes, sizes = [], []
    for row in shown.tolist():
        if graph.shape[row] < 0:
            return ()
        operator = Operator(_ACCUMULATE, graph.shapes[graph.shape[row]])
        if not operator.tensor(0):
            return ()
        shapes.append(operator.tensor(0))
        sizes.append(element_bytes(operator.type(0)) or 4)
    known = _order(graph, shapes)
    parameters = graph.info.recording.get("parameters", [])
    return tuple(
        Gradient(
            name=parameters[known[i]]["name"] if known else "",
            parameter=known[i] if known else -1,
            shape=shapes[i],
            itemsize=sizes[i],
            ready=ready[i].astype(np.int64),
            device=np.full(steps, -1, dtype=np.int64),
        )
        for i in range(kept)
    )


def _order(graph: TaskGraph, shapes: list[tuple[int, ...]]) -> list[int]:
    """Return the index of the parameter of every gradient, where the observed order has the same shapes; else empty."""
    parameters: list[dict[str, Any]] = graph.info.recording.get("parameters", [])
    order = [int(each[0]) for each in graph.info.recording.get("gradient_order", [])][-len(shapes) :]
    same = len(order) == len(shapes) and all(
        index < len(parameters) and tuple(parameters[index]["shape"]) == shape
        for index, shape in zip(order, shapes, strict=True)
    )
    return order if same else []


def _observed(graph: TaskGraph) -> tuple[Gradient, ...]:
    """Find gradients from the times at which they became ready in one observed step, laid over every recorded backward
    pass.
    """
    parameters: list[dict[str, Any]] = graph.info.recording.get("parameters", [])
    observed = graph.info.recording.get("gradient_order", [])
    if not observed or not parameters:
        return ()
    observed = list({int(index): (int(index), float(time)) for index, time in observed}.values())
    times = np.array([time for _, time in observed])
    share = (times - times.min()) / max(float(np.ptp(times)), 1.0)
    places = _places(graph, Phase.BACKWARD, share)
    if places is None:
        return ()
    ready, device = places
    found = [
        Gradient(
            name=str(parameters[index]["name"]),
            parameter=index,
            shape=tuple(int(n) for n in parameters[index]["shape"]),
            itemsize=element_bytes(parameters[index]["dtype"]) or 4,
            ready=ready[i],
            device=device[i],
        )
        for i, (index, _) in enumerate(observed)
    ]
    return tuple(found[i] for i in np.argsort(times, kind="stable"))


PIECES = 64  # of the gradients of a recording that does not show them


def spread_gradients(graph: TaskGraph, nbytes: float, *, skew: float = 1.0) -> tuple[Gradient, ...]:
    """Return gradients of `nbytes` in all for a recording that does not show them; empty where it has no backward pass.

    They come in 64 equal pieces of float32; a share x of them is ready after the share x ** skew of the pass.
    """
    share = (np.arange(1, PIECES + 1) / PIECES) ** skew
    places = _places(graph, Phase.BACKWARD, share)
    if places is None:
        return ()
    ready, device = places
    elements = max(round(nbytes / 4 / PIECES), 1)
    return tuple(
        Gradient(name="", parameter=-1, shape=(elements,), itemsize=4, ready=ready[i], device=device[i])
        for i in range(PIECES)
    )


def first_uses(graph: TaskGraph, gradients: Sequence[Gradient]) -> Int64:
    """Return per gradient (rows) and step (columns) the host row that first uses its parameter in the forward pass.

    Where the recording names the layers of modules, those tell; else the forward pass is taken to use parameters in
    the order opposite to that of the gradients, at mirrored times. −1 where a step shows no forward pass.
    """
    steps = graph.n_steps
    found = np.full((len(gradients), steps), -1, dtype=np.int64)
    forward = (graph.phase == Phase.FORWARD) & ~graph.on_device & ~graph.gone
    layers = _layer_of_parameters(graph, gradients)
    for i, mine in enumerate(layers):
        rows = np.flatnonzero(forward & np.isin(graph.layer, mine)) if mine else ()
        for row in reversed(list(rows)):
            if graph.step[row] >= 0:
                found[i, graph.step[row]] = row
    start, end = replay(graph)
    backward = (graph.phase == Phase.BACKWARD) & ~graph.on_device & ~graph.gone
    for step in range(steps):
        host = np.flatnonzero(forward & (graph.step == step))
        back = np.flatnonzero(backward & (graph.step == step))
        missing = np.flatnonzero(found[:, step] < 0)
        if not len(host) or not len(back) or not len(missing):
            continue
        ready = np.array([end[gradients[i].ready[step]] for i in missing.tolist()])
        late = (ready - start[back].min()) / max(int(end[back].max() - start[back].min()), 1)
        at = start[host].min() + (1 - np.clip(late, 0, 1)) * (end[host].max() - start[host].min())
        found[missing, step] = host[np.clip(np.searchsorted(start[host], at, side="right") - 1, 0, len(host) - 1)]
    return found


def _layer_of_parameters(graph: TaskGraph, gradients: Sequence[Gradient]) -> list[list[int]]:
    """Return per gradient the indices of the layers of the module that holds its parameter; empty where unknown."""
    facts = graph.info.recording
    modules = {(each.root, each.path): each for each in recorded_modules(facts.get("modules", []))}
    paths = [each.name.rpartition(".")[0] for each in gradients]
    held = {path: modules[0, path] for path in set(paths) if (0, path) in modules}
    chosen = list(held.values())
    layers = dict(zip(held, layer_prefixes(chosen, facts, graph.layers), strict=True)) if chosen else {}
    return [layers.get(path, []) if each.name else [] for path, each in zip(paths, gradients, strict=True)]


def row_before(graph: TaskGraph, rows: Int64) -> Int64:
    """Return the task ahead of each of these on its lane, that it starts behind; −1 for the first one."""
    return np.where(rows >= 0, previous_on_lane(graph)[rows], -1)


def ahead_of(graph: TaskGraph, phase: Phase, layers: Sequence[int] | None = None) -> Int64 | None:
    """Return per step the host row ahead of the first work of a phase, or of its `layers`; None where a step
    has none.
    """
    mine = (graph.phase == phase) & ~graph.on_device & ~graph.gone
    mine &= np.isin(graph.layer, layers) if layers is not None else True
    rows = [np.flatnonzero(mine & (graph.step == step))[:1] for step in range(graph.n_steps)]
    if not all(len(each) for each in rows):
        return None
    found = row_before(graph, np.array([each[0] for each in rows]))
    return found if np.all(found >= 0) else None


def _places(graph: TaskGraph, phase: Phase, share: Float64) -> tuple[Int64, Int64] | None:
    """Return host and device rows (shares x steps) at whose end these shares of a phase are over; None where it is
    missing.

    With micro-batches it is the last run of that phase in a step.
    """
    start, end = replay(graph)
    ready, device = (np.full((len(share), graph.n_steps), -1, dtype=np.int64) for _ in range(2))
    host_rows = ~graph.on_device & ~graph.gone & ~np.isin(graph.kind, (TaskKind.MARK, TaskKind.JOIN))
    launch = np.flatnonzero((graph.edge_kind == EdgeKind.LAUNCH) & (graph.phase[graph.dst] == phase))
    launch = launch[~graph.gone[graph.dst[launch]]]
    micro = micro_batches(graph)
    for step in range(graph.n_steps):
        host = np.flatnonzero(host_rows & (graph.phase == phase) & (graph.step == step))
        host = host[len(host) - len(host) // micro :]
        if not len(host):
            return None
        at = start[host].min() + share * (end[host].max() - start[host].min())
        order = np.argsort(end[host], kind="stable")
        place = np.searchsorted(end[host][order], at.astype(np.int64))
        ready[:, step] = host[order[np.clip(place, 0, len(host) - 1)]]
        mine = launch[np.isin(graph.src[launch], host)]
        if len(mine):
            called = start[graph.src[mine]]
            by_call = np.argsort(called, kind="stable")
            place = np.clip(np.searchsorted(called[by_call], at, side="right") - 1, 0, None)
            device[:, step] = graph.dst[mine[by_call]][place]
    return ready, device
