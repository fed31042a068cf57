"""`ParallelismSpace`: every valid configuration of a model on so many devices, and the quickest of them.

Valid is: the degrees of tensor, context, pipeline and data multiply to the devices; the tensor degree divides heads and
feed-forward width, and divides the heads of keys and values or is divided by them; twice the context degree divides the
sequence; pipeline and virtual stages divide the layers, and micro-batches come in groups of the pipeline's size where
there are virtual stages; data degree and micro-batch divide the batch; the expert degree divides the data degree and
the experts; sequence parallelism needs a tensor degree above 1 that divides the sequence; ZeRO needs another device
with the same weights; two versions of the weights, where asked for, need a pipeline of at most one stage more than
micro-batches, without virtual stages, ZeRO 2 and 3. Stages are alike; `alpa.py` has those that are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import exp, gcd, prod

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.errors import ForetraceError
from foretrace.names import question
from foretrace.plan.transformers import kernels
from foretrace.plan.transformers.model import (
    ENDS,
    KINDS,
    DeviceRates,
    Parallelism,
    Software,
    StepCost,
    configuration_of,
    constant_vector,
    fields_of,
    vector,
)  # fmt: skip
from foretrace.plan.transformers.shape import TransformerSizes

DEGREES = {"tensor", "context", "pipeline", "data"}  # multiply to the devices
_WORDS = {"micro": "a micro-batch of", "virtual": "a number of virtual stages of"}
_MOST = 1 << 40
_LARGEST = 1_000_000  # devices and samples of a batch: all divisors are tried


@dataclass(frozen=True, kw_only=True)
class ParallelismSpace:
    """What there is to choose from; `fixed` fields have one value. Raises ForetraceError where nothing is valid."""

    model: TransformerSizes
    on: DeviceRates
    software: Software
    devices: int
    batch: int
    fixed: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (("devices", self.devices), ("batch", self.batch)):
            if not 1 <= value <= _LARGEST:
                near = 1 if value < 1 else _LARGEST
                raise ForetraceError(f"`{name}=` must be 1 to {_LARGEST}, got {value}; give {near}.")
        for name, value in self.fixed.items():
            if name not in kernels.FIELDS:
                raise ForetraceError(f"a plan has no degree {name!r} to be given; {question(name, kernels.FIELDS)}")
            low, high = ENDS.get(name, (1, _MOST))
            if not low <= value <= high:
                ends = f"{low} to {high}" if high < _MOST else "a whole number above 0"
                raise ForetraceError(
                    f"a given {name} must be {ends}, got {value}; give {low if value < low else high}."
                )
        self._check_fixed()

    @cached_property
    def arrays(self) -> tuple[Float64, Float64, Float64]:
        """Model, machine and constants as `kernels` takes them."""
        return vector(self.model, self.software), self.on.array(), constant_vector(self.software)

    def bounds(self) -> tuple[Int64, Int64]:
        """Return the least and the largest value of each field."""
        fixed = {"versions": 1, **self.fixed}
        pairs = [(fixed[name],) * 2 if name in fixed else ENDS.get(name, (1, _MOST)) for name in kernels.FIELDS]
        low, high = np.array(pairs, dtype=np.int64).T.copy()
        return low, high

    def search(self, top: int = 10) -> SweptSpace:
        """Return the quickest configurations that fit and that do not, and by what all others lose to the best."""
        first = self.sweep(top)
        if not first.configurations:
            return first
        best = self.cost(first.configurations[0])
        return self.sweep(top, np.array([*best.parts.values(), best.seconds]))

    def sweep(self, top: int, best: Float64 | None = None) -> SweptSpace:
        """Return all configurations once; `best`: the parts of the step that reasons are counted against."""
        low, high = self.bounds()
        rows, spill = (np.zeros((top, len(kernels.FIELDS)), dtype=np.int64) for _ in range(2))
        times, spill_times = (np.full(top, np.inf) for _ in range(2))
        lost = np.zeros(len(kernels.PARTS), dtype=np.int64)
        valid, fitting = kernels.sweep(
            *self.arrays, self.devices, self.batch, low, high, np.zeros(kernels.TIME + 1) if best is None else best,
            rows, times, spill, spill_times, lost,
        )  # fmt: skip
        return SweptSpace(
            valid=valid, fitting=fitting, configurations=tuple(map(configuration_of, rows[np.isfinite(times)])),
            spilled=tuple(map(configuration_of, spill[np.isfinite(spill_times)])),
            lost=dict(zip(kernels.PARTS, lost.tolist(), strict=True)),
        )  # fmt: skip

    def cost(self, at: Parallelism) -> StepCost:
        out, stages = np.zeros(len(kernels.PARTS) + 2), np.zeros((at.pipeline, len(KINDS)))
        kernels.evaluate(*self.arrays, fields_of(at), self.batch, out, stages)
        seconds = float(out[kernels.TIME])
        # Measured rows are of one kind: no mixture of experts, no ZeRO 2 and 3, a flush.
        scored = self.model.experts == 1 and at.zero < 2 and at.versions == 1
        low, high = self.software.range_on(self.on.device, scored=scored)
        return StepCost(
            configuration=at, seconds=seconds, interval_s=(seconds * exp(low), seconds * exp(high)),
            parts=dict(zip(kernels.PARTS, out.tolist(), strict=False)),
            memory=tuple(dict(zip(KINDS, row, strict=True)) for row in stages.tolist()),
        )  # fmt: skip

    def _check_fixed(self) -> None:
        """Raise one sentence for each constraint that fixed degrees break, with the nearest change that keeps it."""
        m, n = self.model, self.devices
        layers, batch = (m.layers, "layers"), (self.batch, "samples of a batch")
        rules = {
            "tensor": ((m.heads, "heads"), (m.inner, "columns of the feed-forward part")), "context": (),
            "pipeline": (layers,), "virtual": (layers,), "data": (batch,), "micro": (batch,),
            "expert": ((m.experts, "experts of a layer"),),
        }  # fmt: skip
        for name, sizes in rules.items():
            degree, what = self.fixed.get(name, 1), _WORDS.get(name, f"{name} degree")
            whole = sizes if name in ("virtual", "micro") else ((n, "devices"), *sizes)
            for size, things in whole:
                if size % degree:
                    near = min(divisors(gcd(*(each for each, _ in whole))), key=lambda each: abs(each - degree))
                    alone = {"devices": "devices", "samples of a batch": "samples"}.get(things)
                    more = f" or {multiple(size, degree)} {alone}" if alone else ""
                    raise ForetraceError(
                        f"{size} {things} cannot be cut by {what} {degree}; the nearest that can be is {near}{more}."
                    )
        if self.fixed.get("versions", 1) > 1:
            for name, low, high in (("pipeline", 2, _MOST), ("virtual", 1, 1), ("zero", 0, 1)):
                if not low <= self.fixed.get(name, low) <= high:
                    raise ForetraceError(
                        f"two versions of the weights must have {name} {low}, got {self.fixed[name]}; leave one out."
                    )
        given = [self.fixed.get(name, 1) for name in DEGREES]
        if n % prod(given) or (prod(given) != n and self.fixed.keys() >= DEGREES):
            raise ForetraceError(
                f"the degrees multiply to {prod(given)}, got {n} devices; give {multiple(n, prod(given))} devices."
            )


@cache
def divisors(number: int) -> list[int]:
    """Return the divisors of a whole number, in order."""
    return [int(each) for each in np.flatnonzero(number % np.arange(1, number + 1) == 0) + 1]


def multiple(number: int, of: int) -> int:
    """Return the multiple of `of` that is nearest, at least one of it."""
    return max(round(number / of), 1) * of


@dataclass(frozen=True, kw_only=True)
class SweptSpace:
    """What a sweep found, the quickest first."""

    valid: int = 0
    fitting: int = 0
    configurations: tuple[Parallelism, ...] = ()  # that fit
    spilled: tuple[Parallelism, ...] = ()  # that do not
    lost: Mapping[str, int] = field(default_factory=dict)  # part of the step -> configurations that lose most by it
