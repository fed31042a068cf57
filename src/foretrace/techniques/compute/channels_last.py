"""`channels-last`: pictures with their channels innermost, the layout that convolutions compute in.

On a device, the kernels that convert between layouts around every convolution go. On a processor the conversions
happen inside the operators, so each four-dimensional operator is timed alone in both layouts; the gain shrinks with
the number of channels. The batch is converted once per step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foretrace.arrays import Mask
from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import CHANNELS_LAST, FLOATS, Operator
from foretrace.cost.operators.twins import Twins
from foretrace.graph.edit import remove, retime
from foretrace.graph.insert import HostTask, insert
from foretrace.graph.select import previous_on_lane, select
from foretrace.graph.taskgraph import Phase, TaskGraph, TaskKind
from foretrace.techniques.base import Prior, Technique, derived
from foretrace.techniques.compute.classes import WorkClass, classify
from foretrace.techniques.untimed import untimed
from foretrace.training.batches import mapped
from foretrace.training.training import Training

_CONVERSIONS = ("*nchwToNhwc*", "*nhwcToNchw*", "*nchw2nhwc*", "*nhwc2nchw*")
_COPY_GB_S = 4.0  # strided reads of one core, where the conversion was not timed


@dataclass(frozen=True, kw_only=True)
class ChannelsLast(Technique):
    """Weights and batches in `torch.channels_last`."""

    across = "each"
    summary = "channels innermost in memory: convolutions without layout conversions"
    source = "PyTorch, channels last memory format; operators timed in both layouts"
    effort = "two lines: model and inputs in another memory format"

    measured: float | None = derived(doc="operators in a step relative to operators timed alone")
    untimed: float | None = derived(doc="time of what was not timed itself, relative to what similar calls say")
    conv: float | None = derived(doc="time of convolutions, relative, where they were not timed")
    others: float | None = derived(doc="time of other four-dimensional operators, relative, where not timed")

    def wants(self, graph: TaskGraph) -> tuple[Operator, ...]:
        if graph.info.platform != "cpu":
            return ()
        found = _twins(graph).wanted(graph)
        return (*found, *(conversion(each) for _, each in _inputs(graph)))

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        if graph.info.platform != "cpu":
            return {"conv": _ON_DEVICE}
        twins = _twins(graph)
        if not len(twins.rows):
            return {}
        ratios, changed = twins.ratios(Calibration.of(graph)), _changed(twins)
        known = ratios.known
        convolution = (classify(graph).work == WorkClass.CONV)[twins.rows]
        found = {"measured": _CARRIED_OVER} if (known & ratios.timed).any() else {}
        guessed = graph.dur[twins.rows] * (changed & ~ratios.timed)
        parts = [(guessed * ratios.value, guessed * ratios.low, guessed * ratios.high)]
        found |= untimed(parts, float(guessed[known].sum()), float(graph.dur.sum()))
        for name, mine, stands_in in (("conv", convolution, _CONV), ("others", ~convolution, _OTHERS)):
            if (changed & ~known & mine).any():
                found[name] = stands_in
        return found

    def change(self, graph: TaskGraph) -> TaskGraph:
        convolution = (classify(graph).work == WorkClass.CONV) & ~graph.gone
        if graph.info.platform != "cpu":
            return self._on_device(graph, convolution)
        twins = _twins(graph)
        changed = _changed(twins)
        if not (convolution[twins.rows] & changed).any():
            raise self.refuse(
                "the recording shows no convolution of pictures (four dimensions) that is not in this layout already; "
                "it must hold the sizes of inputs (record with shapes)."
            )
        values = self.values(graph)
        ratios = twins.ratios(Calibration.of(graph))
        unknown = ~ratios.known
        carried = np.where(ratios.timed, values.get("measured", 1.0), values.get("untimed", 1.0))
        factor = np.where(unknown, 1.0, ratios.value * carried)
        for name, mine in (("conv", convolution[twins.rows]), ("others", ~convolution[twins.rows])):
            factor[unknown & mine] = values.get(name, 1.0)
        rows, factor = twins.rows[changed], factor[changed]
        mask = graph.mask(rows)
        dur = graph.dur.astype(np.float64)
        dur[rows] *= factor
        result = retime(graph, mask, dur[mask], what="ran {} with channels innermost")
        return insert(twins.rewritten(result), self._converted(graph))

    def realise(self, training: Training) -> Training:
        import torch

        if not any(each.ndim == 4 for each in training.model.parameters()):
            raise self.refuse("the model has no weights of four dimensions, thus no convolution of pictures.")
        training.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

        def convert(tensor: Any) -> Any:
            return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor

        return replace(training, on_batch=(*training.on_batch, lambda batch: mapped(batch, convert)))

    def _on_device(self, graph: TaskGraph, convolution: Mask) -> TaskGraph:
        convolution = convolution & (graph.kind == TaskKind.KERNEL)
        if not convolution.any():
            raise self.refuse("the recording shows no convolution.")
        shapes = {index for index in np.unique(graph.shape[convolution]).tolist() if index >= 0}
        if shapes and not any(_pictures(Operator("", graph.shapes[index])) for index in shapes):
            raise self.refuse("the recording shows no convolution of pictures (four dimensions).")
        dur = graph.dur[convolution].astype(np.float64) * self.values(graph)["conv"]
        faster = retime(graph, convolution, dur, what="ran {} with channels innermost")
        conversions = select(faster, kind="kernel", name=_CONVERSIONS)
        return remove(faster, conversions) if conversions.any() else faster

    def _converted(self, graph: TaskGraph) -> list[HostTask]:
        """Return the conversion of the batch, before the first convolution of every step."""
        calibration, previous = Calibration.of(graph), previous_on_lane(graph)
        new = []
        for row, operator in _inputs(graph):
            time_s = calibration.time_s(conversion(operator))
            time_ns = 8 * np.prod(operator.dims[0]) / _COPY_GB_S if time_s is None else 1e9 * time_s
            if previous[row] >= 0:
                new.append(
                    HostTask(
                        after=int(previous[row]),
                        like=row,
                        name="aten::contiguous",
                        dur_ns=round(time_ns),
                        kind=TaskKind.OPERATOR,
                    )
                )
        return new


def conversion(operator: Operator) -> Operator:
    """Return the first input of an operator, converted: something to be timed."""
    return Operator.of(f"{__name__}:prepared_conversion", operator.dims[:1], ["float"])


def prepared_conversion(operator: Operator) -> Callable[[], object]:
    """Return a batch converted to channels last."""
    import torch

    batch = torch.ones(operator.dims[0])
    return lambda: batch.contiguous(memory_format=torch.channels_last)


def _pictures(operator: Operator) -> bool:
    """Return whether an operator takes a four-dimensional tensor whose layout matters."""
    pairs = zip(operator.dims, operator.types, strict=False)
    sizes = [size for size, kind in pairs if kind in FLOATS and len(size) == 4 and isinstance(size[0], int)]
    return any(size[1] > 1 and size[2] * size[3] > 1 for size in sizes)


def _twin(operator: Operator) -> Operator | None:
    if operator.layout == CHANNELS_LAST or not _pictures(operator):
        return None
    return operator.with_layout(CHANNELS_LAST)


def _twins(graph: TaskGraph) -> Twins:
    """Return operators on pictures, forward and backward, beside themselves in the other layout.

    Attention has four dimensions, too: only what runs in a step with convolutions counts, and no matrix products.
    """
    work = classify(graph).work
    mask = np.isin(work, (WorkClass.CONV, WorkClass.MEMORY)) & np.isin(
        graph.phase, (Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE)
    )
    return Twins.of(graph, mask, _twin)


def _changed(twins: Twins) -> Mask:
    table = np.array([each is not None for each in twins.after], dtype=np.bool_)
    return np.asarray(table[twins.index]) if len(twins.rows) else np.zeros(0, dtype=np.bool_)


def _inputs(graph: TaskGraph) -> list[tuple[int, Operator]]:
    """Return the first convolution of every step: its task, and its operator."""
    twins = _twins(graph)
    first = select(graph, phase="forward") & (classify(graph).work == WorkClass.CONV) & (graph.step >= 0)
    mine = first[twins.rows] & _changed(twins)
    rows, index = twins.rows[mine], twins.index[mine]
    _, place = np.unique(graph.step[rows], return_index=True)
    return [(int(rows[i]), twins.before[index[i]]) for i in place.tolist()]


_CARRIED_OVER = Prior(
    1.0, 0.95, 1.05, why="operators timed alone find their inputs in caches and memory otherwise than in a step"
)
_CONV = Prior(0.88, 0.6, 1.05, why="measured on processors: 0.62 with 24 channels, 0.9 with 48, 1 from 192")
_OTHERS = Prior(1.0, 0.7, 1.3, why="the same bytes in another order")
_ON_DEVICE = Prior(
    0.95, 0.75, 1.1, why="kernels for this layout are as fast or faster in 16 bit, and not always in float32"
)
