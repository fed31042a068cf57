"""The gradients of a recorded step: how large each one is, and the task at whose end it is ready."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.cost.operator import Operator
from foretrace.graph.taskgraph import EdgeKind, Phase, TaskGraph
from foretrace.techniques.batching import micro_batches

Int64 = npt.NDArray[np.int64]

_ACCUMULATE = "torch::autograd::AccumulateGrad"
_EVALUATE = f"autograd::engine::evaluate_function: {_ACCUMULATE}"
BYTES = {
    "float": 4, "float32": 4, "double": 8, "float64": 8, "c10::bfloat16": 2, "bfloat16": 2, "c10::half": 2,
    "float16": 2,
}  # fmt: skip


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


def find_gradients(graph: TaskGraph) -> tuple[Gradient, ...]:
    """Gradients in the order in which they become ready; empty where the recording does not show them.

    A recording with operators of the host shows when autograd hands a gradient over; else the times that foretrace's
    recorder observed in one step are laid over the backward pass. With micro-batches the last one counts.
    """
    if graph.info.platform == "cpu":
        found = _accumulated(graph)
        if found:
            return found
    return _observed(graph)


def _accumulated(graph: TaskGraph) -> tuple[Gradient, ...]:
    """From the operator that accumulates a gradient: a run of its tasks between two of the engine's around it."""
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
        shapes.append(tuple(int(n) for n in operator.dims[0]))
        sizes.append(BYTES.get(operator.types[0], 4))
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
    """Index of the parameter of every gradient, where the observed order has the same shapes; else empty."""
    parameters: list[dict[str, Any]] = graph.info.recording.get("parameters", [])
    order = [int(each[0]) for each in graph.info.recording.get("gradient_order", [])][-len(shapes) :]
    same = len(order) == len(shapes) and all(
        index < len(parameters) and tuple(parameters[index]["shape"]) == shape
        for index, shape in zip(order, shapes, strict=True)
    )
    return order if same else []


def _observed(graph: TaskGraph) -> tuple[Gradient, ...]:
    """From the times at which gradients became ready in one observed step, laid over every recorded backward pass."""
    parameters: list[dict[str, Any]] = graph.info.recording.get("parameters", [])
    observed = graph.info.recording.get("gradient_order", [])
    if not observed or not parameters:
        return ()
    observed = list({int(index): (int(index), float(time)) for index, time in observed}.values())
    times = np.array([time for _, time in observed])
    share = (times - times.min()) / max(float(np.ptp(times)), 1.0)
    ready, device = (np.full((len(observed), graph.n_steps), -1, dtype=np.int64) for _ in range(2))
    host_rows = (graph.phase == Phase.BACKWARD) & ~graph.on_device & ~graph.gone
    launch = np.flatnonzero((graph.edge_kind == EdgeKind.LAUNCH) & (graph.phase[graph.dst] == Phase.BACKWARD))
    for step in range(graph.n_steps):
        host = np.flatnonzero(host_rows & (graph.step == step))
        if not len(host):
            return ()
        begin, end = graph.recorded[host], graph.recorded[host] + graph.dur[host]
        at = begin.min() + share * (end.max() - begin.min())
        order = np.argsort(end, kind="stable")
        ready[:, step] = host[order[np.clip(np.searchsorted(end[order], at), 0, len(host) - 1)]]
        mine = launch[np.isin(graph.src[launch], host)]
        if len(mine):
            called = graph.recorded[graph.src[mine]]
            by_call = np.argsort(called, kind="stable")
            place = np.clip(np.searchsorted(called[by_call], at, side="right") - 1, 0, None)
            device[:, step] = graph.dst[mine[by_call]][place]
    found = [
        Gradient(
            name=str(parameters[index]["name"]),
            parameter=index,
            shape=tuple(int(n) for n in parameters[index]["shape"]),
            itemsize=BYTES.get(str(parameters[index]["dtype"]), 4),
            ready=ready[i],
            device=device[i],
        )
        for i, (index, _) in enumerate(observed)
    ]
    return tuple(found[i] for i in np.argsort(times, kind="stable"))
