"""`batch-size`: the step on a batch of another size.

Whatever works on samples takes longer with more of them, though not in proportion: a call has a cost of its own, and
kernels that do not fill a device cost the same until they do. The processor time of Python, the optimizer and all work
on parameters stays. An operator's time on the other batch is measured where it can be, else T(B) = T (f + (1 - f) B/B0)
with a fixed share f by class.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from foretrace.arrays import Float64, Mask
from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.cost.operators.twins import Twins
from foretrace.graph import edit
from foretrace.graph.select import trained
from foretrace.graph.taskgraph import Change, Phase, TaskGraph, TaskKind
from foretrace.techniques.base import Prior, Technique, derived, parameter
from foretrace.techniques.compute import batching
from foretrace.techniques.compute.classes import WorkClass, operator_class
from foretrace.trace.trace import LaneKind
from foretrace.training.batches import resized
from foretrace.training.training import Training

_MATTERS = 0.005  # share of the step below which a prior is not worth mentioning
_COPY_BYTES = 4096  # shorter copies are scalars, not batches
_ENTERING_S = 4e-6  # at most, to call an operator from Python
_WRAPPER = 3.0  # a call that takes so much longer alone than its own time hands its work on to others


@dataclass(frozen=True, kw_only=True)
class OnSamples(Technique):
    """Techniques that let calls work on another number of samples: what the new times rest on."""

    repeats = True
    measured: float | None = derived(doc="time ratio in a step relative to the ratio of operators timed alone")
    conv_fixed: float | None = derived(unit="share", doc="share of a convolution that does not depend on the batch")
    recurrent_fixed: float | None = derived(unit="share", doc="share of a recurrent layer that depends on no batch")
    gemm_fixed: float | None = derived(unit="share", doc="share of a matrix product that does not depend on the batch")
    other_fixed: float | None = derived(unit="share", doc="share of other operators that does not depend on the batch")
    dispatch_us: float | None = derived(unit="µs", doc="time of a call without data")
    latency_us: float | None = derived(unit="µs", doc="time of a kernel that does not depend on the batch")
    filling: float | None = derived(unit="", doc="time of a kernel's data grows with (new batch / old batch) to this")

    def planned(self, graph: TaskGraph, plan: Rescaling) -> Rescaling:
        """Return the plan; refuses one that no work of forward and backward is in."""
        if not (plan.samples & (graph.kind != TaskKind.COPY)).any():
            raise self.refuse("the recording shows no forward or backward work on samples.")
        return plan


@dataclass(frozen=True, kw_only=True)
class BatchSize(OnSamples):
    """More or fewer samples per step."""

    summary = "more or fewer samples per step: work on samples grows, the rest stays"
    source = "TBD (IISWC 2018), section 4; Habitat (USENIX ATC 2021), wave scaling; affine in the batch"
    effort = "one number; more memory, and convergence to check"

    to: int | None = parameter(None, doc="samples per step", unit="samples", least=1)
    by: float | None = parameter(None, doc="samples per step relative to now", unit="×", above=0, most=1e6)
    recorded: int | None = parameter(
        None, doc="samples per step of the recording, if it does not say", unit="samples", least=1
    )
    loading: float | None = derived(doc="time to load a sample relative to now")

    def wants(self, graph: TaskGraph) -> tuple[Operator, ...]:
        resize = self._resize(graph)
        if graph.info.platform != "cpu" or resize is None:
            return ()
        return sample_twins(graph, resize).wanted(graph)

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        return Rescaling.of(graph, self._resize(graph), self._factor(graph)).priors(graph)

    def change(self, graph: TaskGraph) -> TaskGraph:
        factor, resize = self._factor(graph), self._resize(graph)
        if factor == 1.0:
            raise self.refuse("the batch has that size already; ask for another one.")
        plan = self.planned(graph, Rescaling.of(graph, resize, factor))
        result = plan.on(graph, self.values(graph))
        parts = batching.micro_batches(graph)
        now = (
            f"{resize.after * parts} samples instead of {resize.before * parts}"
            if resize
            else f"{factor:g} times as many samples"
        )
        what = f"a step takes {now}: compare the time per sample, and mind that training itself changes"
        if resize is not None:
            size, facts = resize.after * parts, graph.info.recording
            result = batching.with_facts(
                result,
                loaders=[{**each, "batch_size": size} for each in facts.get("loaders", [])],
                options={**facts.get("options", {}), "samples": size},
            )
        return result.noted(Change(what=what, tasks=int(plan.samples.sum())))

    def realise(self, training: Training) -> Training:
        if not training.batch_size:
            raise self.refuse("the loader does not say how many samples a batch has; give it a batch_size.")
        loader = resized(training.loader, self._new_size(training.batch_size))
        return replace(training, loader=loader)

    def _resize(self, graph: TaskGraph) -> batching.Resize | None:
        """Return the sizes before and after; None where the recording does not tell and only a factor is asked for."""
        self._check()
        before = self.recorded or batching.recorded_size(graph)
        if before > 0:
            after, parts = self._new_size(before), batching.micro_batches(graph)
            if before % parts or after % parts:
                raise self.refuse(f"a batch of {after} samples cannot be cut into its {parts} equal parts.")
            return batching.Resize(before=before // parts, after=after // parts, fixed=batching.parameter_shapes(graph))
        if self.to is not None:
            raise self.refuse("the recording does not say how many samples a batch has; give recorded= or by=.")
        return None

    def _factor(self, graph: TaskGraph) -> float:
        resize = self._resize(graph)
        if resize is not None:
            return resize.factor
        assert self.by is not None  # checked, and `to` needs sizes
        return self.by

    def _new_size(self, before: int) -> int:
        self._check()
        if self.to is not None:
            return self.to
        assert self.by is not None  # checked
        after = round(before * self.by)
        if after < 1 or abs(after - before * self.by) > 1e-6 * before:
            raise self.refuse(f"{self.by:g} times {before} samples is no whole number of samples.")
        return after

    def _check(self) -> None:
        if (self.to is None) == (self.by is None):
            raise self.refuse("give either to= (samples per step) or by= (relative to now).")


def _loading(graph: TaskGraph) -> Mask:
    """Return tasks that prepare samples: where workers were predicted theirs alone, as taking a batch over does not."""
    loading = (graph.kind == TaskKind.DATA) & ~graph.gone
    by_workers = loading & (graph.lane_kinds[graph.lane] == LaneKind.MODEL)
    return np.asarray(by_workers if by_workers.any() else loading)


def sample_twins(graph: TaskGraph, resize: batching.Resize) -> Twins:
    """Return operators of forward and backward that count samples, beside the same calls on the other batch."""
    return Twins.of(graph, _operators(graph), resize.twin)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rescaling:
    """Which tasks of a graph work on samples, and what is known about each (n rows)."""

    resize: batching.Resize | None
    factor: float  # new samples per step relative to the old ones
    ratio: Float64  # time after relative to before where it was measured, else NaN
    operators: dict[str, Mask]  # unmeasured operators by the name of their fixed share
    kernels: Mask
    loading: Mask

    @classmethod
    def of(cls, graph: TaskGraph, resize: batching.Resize | None, factor: float) -> Rescaling:
        kernels = trained(graph) & (graph.kind == TaskKind.KERNEL)
        copies = graph.on_device & ~graph.gone & (graph.kind == TaskKind.COPY) & (graph.phase != Phase.OPTIMIZER)
        kernels |= copies & (graph.nbytes >= _COPY_BYTES)
        operators = _operators(graph)
        ratio = np.full(len(graph), np.nan)
        if resize is not None:
            everything = Twins.of(graph, operators | kernels, resize.twin)
            alike = np.ones(len(graph), dtype=np.bool_)  # without recorded inputs, assumed to work on samples
            changes = np.array([after is not None for after in everything.after] or [False])
            alike[everything.rows] = changes[everything.index] if len(everything.rows) else True
            operators, kernels = operators & alike, kernels & alike
            if graph.info.platform == "cpu":
                twins = sample_twins(graph, resize)
                ratio[twins.rows] = _measured(graph, twins)
        unmeasured = operators & np.isnan(ratio)
        classes = _fixed_classes(graph, unmeasured)
        return cls(
            resize=resize,
            factor=factor,
            ratio=ratio,
            operators=classes,
            kernels=kernels,
            loading=_loading(graph),
        )

    @property
    def samples(self) -> Mask:
        """Everything that works on samples, loading left out."""
        found = ~np.isnan(self.ratio) | self.kernels
        for mask in self.operators.values():
            found |= mask
        return np.asarray(found)

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        """Return the numbers that matter for this graph."""
        step = max(float(graph.dur.sum()), 1.0)

        def share(mask: Mask) -> float:
            return float(graph.dur[mask].sum()) / step

        found = {name: _PRIORS[name] for name, mask in self.operators.items() if share(mask) > _MATTERS}
        if any(share(mask) > _MATTERS for mask in self.operators.values()):
            found["dispatch_us"] = _PRIORS["dispatch_us"]
        if share(~np.isnan(self.ratio)) > 0:
            found["measured"] = _PRIORS["measured"]
        if self.kernels.any():
            found |= {name: _PRIORS[name] for name in ("latency_us", "filling")}
        if share(self.loading) > _MATTERS:
            found["loading"] = _PRIORS["loading"]
        return found

    def durations(self, graph: TaskGraph, values: dict[str, float]) -> Float64:
        """Return the time of every task on the other batch, ns."""
        values = {name: each.value for name, each in _PRIORS.items()} | values
        old = graph.dur.astype(np.float64)
        dur = old.copy()
        known = ~np.isnan(self.ratio)
        dur[known] *= self.ratio[known] * values["measured"]
        for name, mask in self.operators.items():
            fixed = np.maximum(values[name] * old[mask], np.minimum(old[mask], 1e3 * values["dispatch_us"]))
            dur[mask] = fixed + (old[mask] - fixed) * self.factor
        fixed = np.minimum(old[self.kernels], 1e3 * values["latency_us"])
        dur[self.kernels] = fixed + (old[self.kernels] - fixed) * self.factor ** values["filling"]
        dur[self.loading] *= self.factor * values["loading"]
        return dur

    def on(self, graph: TaskGraph, values: dict[str, float]) -> TaskGraph:
        """Return the graph on the other batch."""
        dur = self.durations(graph, values)
        touched = (self.samples | self.loading) & ~graph.gone
        what = f"let {{}} work on {self.factor:.4g} times as many samples"
        result = edit.retime(graph, touched, dur[touched], what=what)
        if self.resize is None:
            return result
        # Calls that hand on or belong to autograd keep their time, yet their inputs are other ones now.
        return Twins.of(graph, trained(graph), self.resize.twin).rewritten(result)


def _operators(graph: TaskGraph) -> Mask:
    """Return ATen operators of forward and backward in a recording without kernels, those left out that hand on."""
    own = np.array([name.startswith("aten::") and name not in batching.HAND_ON for name in graph.names], dtype=np.bool_)
    return np.asarray(trained(graph) & (graph.kind == TaskKind.OPERATOR) & (graph.op >= 0) & own[graph.op])


def _measured(graph: TaskGraph, twins: Twins) -> Float64:
    """Return ratios of `twins.rows`; NaN where a call was not measured, or measures work that other tasks do.

    Only pairs that were both timed count: what similar calls tell is about a type or a layout, not about a batch.
    """
    calibration = Calibration.of(graph)
    first, second = np.full((2, len(twins.before)), np.nan)
    for i, (before, after, own_s) in enumerate(zip(twins.before, twins.after, twins.own_s.tolist(), strict=True)):
        found = calibration.times_s(before, after, own_s) if after is not None else None
        if found is not None:
            first[i], second[i] = found
    own = twins.own_s
    # Timed alone, a call comes from Python, which a recording does not count as its time.
    entering = np.clip(first - own, 0, _ENTERING_S)
    ratio = np.maximum(second - entering, 0) / np.maximum(first - entering, 1e-9)
    ratio[first > _WRAPPER * own + _ENTERING_S] = np.nan
    return ratio[twins.index]


def _fixed_classes(graph: TaskGraph, mask: Mask) -> dict[str, Mask]:
    """Return the operators of `mask` by the name of their fixed share."""
    table = np.array([_FIXED[_class(name)] for name in graph.names] or [""], dtype=object)
    kind = table[np.maximum(graph.op, 0)]
    return {name: np.asarray(mask & (kind == name)) for name in dict.fromkeys(_FIXED.values())}


def _class(name: str) -> str:
    if any(word in name for word in ("rnn", "lstm", "gru")):
        return "recurrent"
    return {WorkClass.CONV: "conv", WorkClass.GEMM: "gemm", WorkClass.ATTENTION: "gemm"}.get(
        operator_class(name)[0], "other"
    )


_FIXED = {"conv": "conv_fixed", "recurrent": "recurrent_fixed", "gemm": "gemm_fixed", "other": "other_fixed"}
_CPU = "measured with PyTorch 2 on a server core, two batch sizes per class"
_PRIORS = {
    "measured": Prior(1.0, 0.96, 1.04, why="operators timed alone find other data in the caches than in a step"),
    "conv_fixed": Prior(0.11, 0.05, 0.2, unit="share", why=f"{_CPU}: 0.07 to 0.24, more with more channels"),
    "recurrent_fixed": Prior(0.135, 0.05, 0.3, unit="share", why=f"{_CPU}: weights are read once per time step"),
    "gemm_fixed": Prior(0.045, 0.0, 0.12, unit="share", why=f"{_CPU}: 0.03 to 0.06"),
    "other_fixed": Prior(0.02, 0.0, 0.1, unit="share", why="bytes over bandwidth, beside the call itself"),
    "dispatch_us": Prior(2.0, 1.0, 5.0, unit="µs", why="an operator through the dispatcher, outputs allocated"),
    "latency_us": Prior(4.0, 2.0, 12.0, unit="µs", why="start, ramp and tail of a kernel on recent devices"),
    "filling": Prior(
        0.95, 0.8, 1.0, unit="", why="more samples fill a device better; kernels that fill it grow in step"
    ),
    "loading": Prior(1.0, 0.85, 1.1, why="samples are loaded one by one; collecting grows with them"),
}
