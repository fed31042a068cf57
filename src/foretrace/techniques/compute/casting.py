"""`mixed-precision` on a CPU recording whose operators were timed: new times, and what autocast adds to a step.

That are casts by their sizes, autograd nodes that undo them, and its dispatch. `prepared_casts` and `prepared_layers`
are calls to be timed alone (`cost.bench`): PyTorch's own casts and layers on tensors so small that only their overhead
is left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import BFLOAT16, Operator
from foretrace.graph.edit import retime
from foretrace.graph.insert import HostTask, insert
from foretrace.graph.select import previous_on_lane
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.techniques.base import Prior
from foretrace.techniques.compute.reduced import SINGLE, Reduced
from foretrace.techniques.untimed import by_name, untimed

HALF = {"bfloat16": BFLOAT16, "float16": "c10::Half"}
_DTYPES = {recorded: name for name, recorded in HALF.items()}
_CODES = {SINGLE: "6", BFLOAT16: "15", "c10::Half": "5"}  # c10::ScalarType, as recorded
_OVERHEAD_S = 2.5e-6  # where it was not timed: two operators through the dispatcher
_AT_ONCE = 16  # per timed call, so that what surrounds them hardly counts
_CAST_BYTES, _CAST_GB_S = 6.0, 10.0  # per element: read and written; one core
_CASTS_STRAY = 2.5  # a cast that was not timed may take so many times as long or as short


def cast_operator(dims: tuple[int, ...], source: str, target: str) -> Operator:
    """Return one cast, as autocast makes it."""
    sizes: list[list[int]] = [list(dims), *([] for _ in range(6))]
    concrete = ["", _CODES[target], "", "", "", "False", ""]
    return Operator.of("aten::_to_copy", sizes, [source, "Scalar", "", "", "", "Scalar", ""], concrete)


def overhead_operators(half: str) -> tuple[Operator, ...]:
    """Return what is timed of casts and layers to know their overhead, beside a small cast."""
    calls = {"prepared_casts": ("forward", "both"), "prepared_layers": ("plain", "autocast")}
    return tuple(
        Operator.of(f"{__name__}:{function}", [[], []], ["", ""], [half, kind])
        for function, kinds in calls.items()
        for kind in kinds
    )


def wanted(graph: TaskGraph, reduced: Reduced, half: str) -> Iterator[Operator]:
    """Yield operators to be timed: overheads, which are few; changed ones beside what they become, casts."""
    yield from overhead_operators(half)
    yield cast_operator((8,), SINGLE, half)
    yield from reduced.twins.wanted(graph)
    yield from dict.fromkeys(cast_operator(each.dims, each.source, each.target) for each in reduced.casts)


def prepared_casts(operator: Operator) -> Callable[[], object]:
    """Return casts of small tensors that need gradients; "both": and their way back through autograd."""
    import torch

    half, kind = operator.concrete
    dtype = getattr(torch, _DTYPES[half])
    tensors = [torch.ones(8, requires_grad=True) for _ in range(_AT_ONCE)]
    gradients = [torch.ones(8, dtype=dtype) for _ in tensors]

    def call() -> None:
        with torch.enable_grad():
            made = [each.to(dtype) for each in tensors]
            if kind == "both":
                torch.autograd.grad(made, tensors, gradients)

    return call


def prepared_layers(operator: Operator) -> Callable[[], object]:
    """Return small 16-bit linear layers; "autocast": through autocast, which finds their weights in its cache."""
    import torch

    half, kind = operator.concrete
    dtype = getattr(torch, _DTYPES[half])
    of_weights = dtype if kind == "plain" else torch.float32
    x = torch.ones(4, 8, dtype=dtype)
    weight, bias = (torch.ones(size, dtype=of_weights, requires_grad=True) for size in ((8, 8), (8,)))
    context = torch.autocast("cpu", dtype, enabled=kind == "autocast")

    def call() -> None:
        with torch.enable_grad(), context:
            for _ in range(_AT_ONCE):
                torch.nn.functional.linear(x, weight, bias)

    return call


@dataclass(frozen=True, kw_only=True, eq=False)
class NewTimes:
    """New durations per row of `Reduced.twins`, in ns, without what the measurements' prior adds."""

    rows: Int64
    ratio: Float64  # time after relative to before; NaN where no operator of that name was measured
    timed: Mask  # these very calls were timed
    share: float  # of the changed tasks' time that is measured
    untimed: dict[str, Prior]  # "untimed", where something was not timed itself

    @classmethod
    def of(cls, graph: TaskGraph, reduced: Reduced, half: str) -> NewTimes:
        """Return measured ratios; where an operator was not measured, the mean of those with its name."""
        twins = reduced.twins
        changed = np.array([each is not None for each in twins.after], dtype=np.bool_)[twins.index]
        measured = twins.ratios(Calibration.of(graph)).take(changed)
        rows = twins.rows[changed]
        dur = graph.dur[rows].astype(np.float64)
        found = by_name(measured, [twins.before[i].name for i in twins.index[changed].tolist()], dur)
        casts_ns = Casts.of(graph, reduced, half).guessed_ns
        guessed = dur * ~found.timed
        parts: list[tuple[Float64 | float, Float64 | float, Float64 | float]] = [
            (guessed * found.value, guessed * found.low, guessed * found.high),
            (casts_ns, casts_ns / _CASTS_STRAY, casts_ns * _CASTS_STRAY),
        ]
        total = dur.sum()
        return cls(
            rows=rows,
            ratio=found.value,
            timed=found.timed,
            share=float(dur[measured.known].sum() / total) if total else 1.0,
            untimed=untimed(parts, float(guessed[found.known].sum()), float(graph.dur.sum())),
        )

    def on(self, graph: TaskGraph, fallback: Float64, values: Mapping[str, float]) -> TaskGraph:
        """Return the graph with new durations; `fallback` are those of tasks of which no measurement tells (n rows,
        ns).
        """
        dur = graph.dur.astype(np.float64)
        ratio = self.ratio * np.where(self.timed, values["measured"], values.get("untimed", 1.0))
        dur[self.rows] = np.where(np.isnan(ratio), fallback[self.rows], dur[self.rows] * ratio)
        mask = graph.mask(self.rows)
        return retime(graph, mask, dur[mask], what="ran {} on 16-bit inputs, by measured times")


@dataclass(frozen=True, kw_only=True, eq=False)
class Casts:
    """Times of the casts that autocast adds, ns per cast of `Reduced.casts`, and of entering its operators, ns each."""

    reduced: Reduced
    ns: Float64
    timed: Mask
    entry_ns: float
    entry_timed: bool

    @classmethod
    def of(cls, graph: TaskGraph, reduced: Reduced, half: str) -> Casts:
        """Return casts of sizes that were not timed take the time per element of the others, else bytes at
        _CAST_GB_S.
        """
        calibration = Calibration.of(graph)
        asked = (*overhead_operators(half), cast_operator((8,), SINGLE, half))
        overheads = [time_s for each in asked if (time_s := calibration.time_s(each))]
        complete = len(overheads) == len(asked)
        forward_s = backward_s = entry_s = _OVERHEAD_S
        if complete:
            forward, both, plain, autocast, small = overheads
            forward_s = max(forward / _AT_ONCE - small, 0.0)  # a cast that autograd remembers, beyond the cast
            backward_s = max((both - forward) / _AT_ONCE - small, 0.0)  # its node in the backward pass, likewise
            entry_s = max(autocast - plain, 0.0) / _AT_ONCE  # a lower-precision operator whose weights are cast
        times = [calibration.time_s(cast_operator(each.dims, each.source, each.target)) for each in reduced.casts]
        timed = np.array([time is not None for time in times], dtype=np.bool_)
        extra = [backward_s if each.backward else forward_s for each in reduced.casts]
        ns = np.array([0.0 if s is None else 1e9 * (s + more) for s, more in zip(times, extra, strict=True)])
        size = np.array([float(np.prod(cast.dims)) for cast in reduced.casts])
        per_element = ns[timed].sum() / max(size[timed].sum(), 1.0) if timed.any() else _CAST_BYTES / _CAST_GB_S
        return cls(
            reduced=reduced,
            ns=np.where(timed, ns, size * per_element),
            timed=timed & complete,
            entry_ns=1e9 * entry_s,
            entry_timed=complete,
        )

    @property
    def guessed_ns(self) -> float:
        """Of what was not timed, in all."""
        entries_ns = 0.0 if self.entry_timed else self.entry_ns * len(self.reduced.entered)
        return float(self.ns[~self.timed].sum()) + entries_ns

    def into(self, graph: TaskGraph, values: Mapping[str, float]) -> TaskGraph:
        """Return the graph with a task for all casts of an operator, and autocast's dispatch."""
        measured, guess = values["measured"], values.get("untimed", 1.0)
        total: dict[tuple[int, bool], float] = defaultdict(float)
        for cast, ns in zip(
            self.reduced.casts, (self.ns * np.where(self.timed, measured, guess)).tolist(), strict=True
        ):
            total[cast.row, cast.backward] += ns
        for row in self.reduced.entered.tolist():
            total[row, False] += self.entry_ns * (measured if self.entry_timed else guess)
        previous = previous_on_lane(graph)
        new = []
        for (row, backward), ns in total.items():
            after = row if backward else int(previous[row])
            if after >= 0 and ns > 0:
                new.append(
                    HostTask(after=after, like=row, name="aten::_to_copy", dur_ns=round(ns), kind=TaskKind.OPERATOR)
                )
        return insert(graph, new)
