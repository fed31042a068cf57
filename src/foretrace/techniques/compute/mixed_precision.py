"""`mixed-precision`: automatic mixed precision (autocast), with a gradient scaler where float16 needs one.

Matrix products, convolutions and attention run on the units for 16-bit numbers, no faster than their bytes
allow; what moves data moves half of it, unless autocast keeps it in float32; weights and gradients are cast,
which costs kernels and host time; the optimizer keeps its float32 parameters. Work that is in 16 bit already
stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log

import numpy as np

from foretrace.arrays import Float64, Mask
from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.errors import NotApplicableError
from foretrace.graph import edit
from foretrace.graph.insert import insert
from foretrace.graph.select import select, trained
from foretrace.graph.taskgraph import EdgeKind, Phase, TaskGraph
from foretrace.hardware.devices import Device, find
from foretrace.hardware.processor import named, recorded_sets
from foretrace.techniques.base import Prior, Technique, derived, parameter
from foretrace.techniques.compute.autocast import stays_single
from foretrace.techniques.compute.casting import HALF, Casts, NewTimes, wanted
from foretrace.techniques.compute.casts import cast_tasks, scaler_tasks
from foretrace.techniques.compute.classes import MATRIX, Classes, TaskPrecision, WorkClass, classify
from foretrace.techniques.compute.half_prices import half_prices, lacks_recurrent
from foretrace.techniques.compute.reduced import reduce
from foretrace.training.training import Training

_SHORTEST_NS = 2_000  # kernels do not get shorter than this
_DISPATCH_NS = 5_000  # operators below this are dispatch, whatever their data
_STREAMS_AT = 0.85  # share of the peak bandwidth that kernels reach


@dataclass(frozen=True, kw_only=True)
class MixedPrecision(Technique):
    """Autocast to 16 bit around forward and loss."""

    across = "each"
    summary = "automatic mixed precision: 16-bit matrix units, half the bytes, casts"
    source = "Daydream (ATC 2020), AMP; Micikevicius et al. (ICLR 2018); autocast's operator lists"
    effort = "two lines (autocast); results change within 16-bit rounding"

    dtype: str = parameter(
        "auto", doc="bfloat16, float16, or what suits the device", choices=("auto", "bfloat16", "float16")
    )
    measured: float | None = derived(doc="operators in a step relative to operators timed alone, both in 16 bit")
    untimed: float | None = derived(doc="time of what was not timed itself, relative to what similar calls say")
    gemm: float | None = derived(doc="how many times faster matrix products run", larger_is="faster")
    conv: float | None = derived(doc="how many times faster convolutions run", larger_is="faster")
    attention: float | None = derived(doc="how many times faster attention runs", larger_is="faster")
    elementwise: float | None = derived(doc="time of elementwise and other memory-bound work, relative")
    norm: float | None = derived(doc="time of batch normalisation, relative")
    casts: float | None = derived(unit="", doc="casts per matrix operator, forward and backward each")
    cast_us: float | None = derived(unit="µs", doc="host time of one cast")
    overhead_us: float | None = derived(unit="µs", doc="time that a 16-bit matrix product adds on a processor")

    def wants(self, graph: TaskGraph) -> tuple[Operator, ...]:
        if graph.info.platform != "cpu" or not _matrix(graph, classify(graph)).any():
            return ()
        half = HALF[self.type_name(graph)]
        return tuple(dict.fromkeys(wanted(graph, reduce(graph, half), half)))

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        times = self._times(graph)
        if times is None:
            return self._unmeasured(graph)
        found = {"measured": _CARRIED_OVER} | times.untimed
        if np.isnan(times.ratio).any():
            found |= {name: each for name, each in self._unmeasured(graph).items() if name in _KINDS}
        return found

    def _unmeasured(self, graph: TaskGraph) -> dict[str, Prior]:
        """Return priors of classes of work."""
        cpu = graph.info.platform == "cpu"
        found = half_prices(graph, self.type_name(graph)) if cpu else dict(_ON_DEVICE)
        device = _device(graph)
        rate = _rate(device, bfloat16=self._bfloat16(device))
        if device is not None and rate > device.fp32_tflops and not cpu:
            peak = rate / device.fp32_tflops
            for name, powers, measured in _GAINS:
                low, value, high = (peak**power for power in powers)
                why = f"peak of {device.name}: {peak:.2g}; {measured}"
                found[name] = Prior(value, low, high, why=why)
        present = _present(graph, classify(graph))
        unused = {kind.name.lower() for kind in MATRIX} - {kind.name.lower() for kind in present}
        unused |= {"overhead_us"} if WorkClass.GEMM not in present else set()
        return {name: each for name, each in found.items() if name not in unused}

    def _lacking(self, graph: TaskGraph, kinds: list[WorkClass], values: dict[str, float]) -> NotApplicableError | None:
        """Return why there is no number for some kinds of matrix work; None if there are all."""
        lacking = [kind.name.lower() for kind in kinds if kind.name.lower() not in values]
        if not lacking:
            return None
        given = " ".join(f"{name}=3" for name in lacking)
        if graph.info.platform == "cpu":
            sets = recorded_sets(graph.info.recording)
            what = "does not say what its processor can do" if sets is None else f"is of a processor with {named(sets)}"
            return self.refuse(
                f"the recording {what}, and by that {self.type_name(graph)} is 6 times faster or 100 times slower; run "
                f"foretrace calibrate run on it where it was made, record it again, or say how many times faster, e.g. "
                f"{given}."
            )
        device = graph.info.devices[0] if graph.info.devices else "unknown"
        return self.refuse(
            f"the catalog knows no {self.type_name(graph)} units of the device {device!r}; say how many times "
            f"faster such work runs, e.g. {given}."
        )

    def change(self, graph: TaskGraph) -> TaskGraph:
        classes = classify(graph)
        matrix = _matrix(graph, classes)
        if not matrix.any():
            raise self.refuse("the recording shows no matrix products, convolutions or attention in a step.")
        share = graph.dur[matrix & (classes.precision == TaskPrecision.HALF)].sum() / max(graph.dur[matrix].sum(), 1)
        if share > 0.5:
            raise self.refuse(f"{100 * share:.0f} % of the matrix work runs in 16 bit already.")
        if graph.info.platform == "cpu" and _casts_already(graph, matrix):
            raise self.refuse("the forward pass casts the inputs of its matrix work, as under autocast already.")
        if _in_graphs(graph, matrix):
            raise self.refuse("the matrix work is launched as graphs; put mixed-precision before cuda-graphs.")
        recurrent = graph.info.platform == "cpu" and select(graph, op="aten::mkldnn_rnn_layer").any()
        if recurrent and (why := lacks_recurrent(graph, self.type_name(graph))):
            raise self.refuse(f"{why}.")
        values = self.values(graph)
        work = matrix & (classes.precision != TaskPrecision.HALF)
        times = self._times(graph)
        if times is not None:
            return self._by_measured(graph, times, classes, work, values)
        if (lacking := self._lacking(graph, _present(graph, classes), values)) is not None:
            raise lacking
        dur = self._durations(graph, classes, work, values)
        faster = edit.retime(graph, work, dur[work], what=f"ran {{}} in {self.type_name(graph)}")
        moving = _moving(graph, classes)
        faster = edit.retime(faster, moving, dur[moving], what="moved 16-bit data in {}")
        new = cast_tasks(faster, work, casts=values["casts"], cast_us=values["cast_us"])
        if graph.info.platform != "cpu" and self.type_name(graph) == "float16":
            new += scaler_tasks(faster)
        return insert(faster, new)

    def realise(self, training: Training) -> Training:
        import torch

        kind = torch.device(training.device).type
        name = self.dtype
        if name == "auto":
            name = "bfloat16" if kind != "cuda" or torch.cuda.is_bf16_supported() else "float16"
        dtype = getattr(torch, name)

        def context() -> torch.autocast:
            return torch.autocast(kind, dtype)

        scaler = torch.amp.GradScaler(kind) if kind == "cuda" and name == "float16" else training.scaler
        return replace(training, around_forward=(*training.around_forward, context), scaler=scaler)

    def _times(self, graph: TaskGraph) -> NewTimes | None:
        """Return new times from measured operators; None where the graph carries too few of them."""
        if graph.info.platform != "cpu" or not Calibration.of(graph):
            return None
        half = HALF[self.type_name(graph)]
        times = NewTimes.of(graph, reduce(graph, half), half)
        return times if len(times.rows) and times.share >= _ENOUGH_MEASURED else None

    def _by_measured(
        self, graph: TaskGraph, times: NewTimes, classes: Classes, work: Mask, values: dict[str, float]
    ) -> TaskGraph:
        half = HALF[self.type_name(graph)]
        reduced = reduce(graph, half)
        unknown = graph.mask(times.rows[np.isnan(times.ratio)])
        fallback = graph.dur.astype(np.float64)
        if unknown.any():
            kinds = [kind for kind in _present(graph, classes) if (unknown & work & (classes.work == kind)).any()]
            if (lacking := self._lacking(graph, kinds, values)) is not None:
                raise lacking
            fallback = self._durations(graph, classes, work & unknown, values)
        faster = reduced.twins.rewritten(times.on(graph, fallback, values))
        return Casts.of(graph, reduced, half).into(faster, values)

    def _durations(self, graph: TaskGraph, classes: Classes, work: Mask, values: dict[str, float]) -> Float64:
        """Return new durations of matrix work and of memory-bound work, ns."""
        cpu, device = graph.info.platform == "cpu", _device(graph)
        dur = graph.dur.astype(np.float64)
        for kind in _present(graph, classes):
            mine, slow = work & (classes.work == kind), classes.precision == TaskPrecision.TF32
            if not mine.any():
                continue
            gain = values[kind.name.lower()]
            dur[mine & ~slow] /= gain
            dur[mine & slow] /= _beyond_tf32(gain, device, _rate(device, bfloat16=self._bfloat16(device)))
        if cpu:
            products = work & (classes.work == WorkClass.GEMM)
            known = products & (graph.flops > 0)
            if products.any():
                dur[known if known.any() else products] += 1e3 * values["overhead_us"]
        elif device is not None:
            least = np.minimum(graph.nbytes / 2 / (_STREAMS_AT * device.memory_gb_s), graph.dur)
            dur[work] = np.maximum(dur, least)[work]
        moving = _moving(graph, classes)
        norm = moving & select(graph, op="*batch_norm*")
        dur[norm] *= values["norm"]
        dur[moving & ~norm] *= values["elementwise"]
        return dur if cpu else np.maximum(dur, np.minimum(graph.dur, _SHORTEST_NS))

    def _bfloat16(self, device: Device | None) -> bool:
        if self.dtype == "auto":
            return device is not None and device.bf16_tflops > 0
        return self.dtype == "bfloat16"

    def type_name(self, graph: TaskGraph) -> str:
        """Return the type that autocast takes on the recorded device."""
        if graph.info.platform == "cpu":
            return "bfloat16" if self.dtype == "auto" else self.dtype
        return "bfloat16" if self._bfloat16(_device(graph)) else "float16"


def _device(graph: TaskGraph) -> Device | None:
    return find(graph.info.devices[0]) if graph.info.devices else None


def _rate(device: Device | None, *, bfloat16: bool) -> float:
    """Return the peak of 16-bit matrix units, TFLOP/s; 0 if unknown."""
    return 0.0 if device is None else device.bf16_tflops if bfloat16 else device.fp16_tflops


def _beyond_tf32(gain: float, device: Device | None, rate: float) -> float:
    """Return what is left of a gain over float32 for work that uses tensor cores in TF32 (half the 16-bit rate)."""
    if device is None or not device.tf32_tflops or rate <= device.fp32_tflops:
        return min(gain, 2.0)
    return float(gain ** (log(rate / device.tf32_tflops) / log(rate / device.fp32_tflops)))


def _matrix(graph: TaskGraph, classes: Classes) -> Mask:
    """Return matrix work of forward and backward."""
    return np.asarray(np.isin(classes.work, MATRIX) & trained(graph))


def _in_graphs(graph: TaskGraph, matrix: Mask) -> bool:
    """Return whether most of the matrix work comes from calls that launch several device tasks."""
    launch = (graph.edge_kind == EdgeKind.LAUNCH) & ~graph.gone[graph.dst]
    many = np.bincount(graph.src[launch], minlength=len(graph)) > 1
    return bool(2 * (launch & matrix[graph.dst] & many[graph.src]).sum() > matrix.sum())


def _casts_already(graph: TaskGraph, matrix: Mask) -> bool:
    """Return whether a recording without kernels looks like autocast: as many casts as matrix operators, forward."""
    forward = graph.phase == Phase.FORWARD
    casts = select(graph, kind="operator", name="aten::_to_copy") & forward
    for index in np.unique(graph.shape[casts & (graph.shape >= 0)]).tolist():
        if Operator("aten::_to_copy", graph.shapes[index]).concrete[1:2] not in (["15"], ["5"]):  # to another type
            casts &= graph.shape != index
    operators = matrix & forward
    counted = operators & (graph.flops > 0)
    return bool(casts.sum() >= (counted if counted.any() else operators).sum() > 0)


def _present(graph: TaskGraph, classes: Classes) -> list[WorkClass]:
    """Return kinds of matrix work that a graph has outside 16 bit."""
    single = _matrix(graph, classes) & (classes.precision != TaskPrecision.HALF)
    return [kind for kind in MATRIX if (single & (classes.work == kind)).any()]


def _moving(graph: TaskGraph, classes: Classes) -> Mask:
    """Return memory-bound work whose data becomes 16 bit wide."""
    moving = (classes.work == WorkClass.MEMORY) & (classes.precision == TaskPrecision.SINGLE) & ~graph.gone
    if graph.info.platform == "cpu":
        moving &= graph.dur >= _DISPATCH_NS
    return np.asarray(moving & ~stays_single(graph))


_ENOUGH_MEASURED = 0.5  # of the time of operators that change
_KINDS = ("gemm", "conv", "attention", "norm", "elementwise", "overhead_us")
_CARRIED_OVER = Prior(
    1.0, 0.93, 1.07, why="operators timed alone find their inputs in caches and memory otherwise than in a step"
)
_GAINS = (
    (
        "gemm",
        (0.4, 0.8, 0.97),
        "DeepBench on V100 and T4 (peak 8): matrix products 1.7 to 10 times faster in 16 bit, those that fill the "
        "device 7 to 10 times",
    ),
    (
        "conv",
        (0.35, 0.6, 0.85),
        "DeepBench on V100 and T4 (peak 8): most convolutions 2 to 6 times faster, median 3 to 4",
    ),
    ("attention", (0.4, 0.8, 0.97), "as matrix products"),
)
_ON_DEVICE = {
    "elementwise": Prior(0.55, 0.5, 0.85, why="half the bytes; where float32 joins in, float32 it stays"),
    "norm": Prior(0.6, 0.5, 0.9, why="half the bytes, statistics in float32"),
    "casts": Prior(2.0, 1.0, 4.0, unit="", why="weight and bias, or an input after float32 work"),
    "cast_us": Prior(12.0, 6.0, 25.0, unit="µs", why="two operators through the dispatcher"),
}
