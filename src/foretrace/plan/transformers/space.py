"""`ParallelismSpace`: every valid configuration of a model on so many devices, and the quickest of them.

As a space that any strategy searches, its coordinates are logarithms of degrees.

Valid is: the degrees of tensor, context, pipeline and data multiply to the devices; the tensor degree divides heads and
feed-forward width, and divides the heads of keys and values or is divided by them; twice the context degree divides the
sequence; pipeline and virtual stages divide the layers, and micro-batches come in groups of the pipeline's size where
there are virtual stages; data degree and micro-batch divide the batch; the expert degree divides the data degree and
the experts; sequence parallelism needs a tensor degree above 1 that divides the sequence; ZeRO needs another device
with the same weights; two versions of the weights, where asked for, need a pipeline of at most one stage more than
micro-batches, without virtual stages, ZeRO 2 and 3. Stages are alike; `alpa.py` has those that are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import exp, gcd, log, prod
from random import Random

import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import TaskGraph
from foretrace.names import question
from foretrace.plan.pipelines.lower import StageCost, lower, simulated_batches
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
from foretrace.search.space import Infeasible, Problem, Space
from foretrace.training.pipeline.schedule import interleaved, one_f_one_b_flush, two_bw

DEGREES = ("tensor", "context", "pipeline", "data")  # multiply to the devices
_LATER = ("micro", "virtual", "expert", "sequence", "recompute", "zero", "overlap")  # each after those it depends on
_CODED = (*DEGREES[:3], *_LATER)  # the degree of data parallelism follows
_WORDS = {"micro": "a micro-batch of", "virtual": "a number of virtual stages of"}
_MOST = 1 << 40
_LARGEST = 1_000_000  # devices and samples of a batch: all divisors are tried
Pick = Callable[[str, Sequence[int]], int]


@dataclass(frozen=True, kw_only=True)
class ParallelismSpace(Space[Parallelism]):
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

    @cached_property
    def ends(self) -> dict[str, tuple[int, int]]:
        """The least and the largest value of each field."""
        fixed = {"versions": 1, **self.fixed}
        return {name: (fixed[name],) * 2 if name in fixed else ENDS.get(name, (1, _MOST)) for name in kernels.FIELDS}

    def allowed(self, name: str, value: int) -> bool:
        low, high = self.ends[name]
        return low <= value <= high

    def search(self, top: int = 10) -> SweptSpace:
        """Return the quickest configurations that fit and that do not, and by what all others lose to the best."""
        first = self.sweep(top)
        if not first.configurations:
            return first
        best = self.cost(first.configurations[0])
        return self.sweep(top, np.array([*best.parts.values(), best.seconds]))

    def sweep(self, top: int, best: Float64 | None = None) -> SweptSpace:
        """Return all configurations once; `best`: the parts of the step that reasons are counted against."""
        low, high = np.array([*self.ends.values()], dtype=np.int64).T.copy()
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

    def stage_cost(self, at: Parallelism, layers: float, *, last: bool) -> StageCost:
        """Return what a stage takes for a micro-batch, and its share of the update; no sizes.

        `layers`: of its device, which has `at.virtual` such stages; `last`: it computes the logits. Its device's passes
        take their layers' share of the step's parts, and the visible part of a hop; the hidden part is the hop's.
        Gradients are exchanged with the update; under ZeRO 2 and 3 with every pass, as the weights of ZeRO 3 are
        gathered.
        """
        share, count = at.virtual, self.batch // (at.data * at.micro)
        forward, backward, logits, seen, hidden, update = kernels.passes(
            *self.arrays, fields_of(at), float(layers), count
        )
        return StageCost(
            forward_s=forward / share + seen + (logits / 3 if last else 0.0),
            backward_s=backward / share + seen + (logits * 2 / 3 if last else 0.0), update_s=update / share,
            hop_s=hidden,
        )  # fmt: skip

    def stage_costs(self, at: Parallelism) -> list[StageCost]:
        """Return what each virtual stage of a configuration takes."""
        stages, layers = at.pipeline * at.virtual, self.model.layers / at.pipeline
        return [self.stage_cost(at, layers, last=each == stages - 1) for each in range(stages)]

    def expand(self, at: Parallelism) -> TaskGraph:
        """Return the step of a configuration; without a flush several, of which the first fill the pipeline.

        Devices of one stage do the same at the same time, so each stage is one lane. Without overlap that is the closed
        form of `kernels.step` to the rounding of tasks to nanoseconds. With overlap it is longer, at most by the hidden
        part of every hop: the closed form takes that to cost nothing once the pipeline is full, but a pass still waits
        for it where the schedule has no other work in between.
        """
        costs, count = self.stage_costs(at), self.batch // (at.data * at.micro)
        if at.virtual > 1:
            return lower(interleaved(len(costs), count, 1, chunks=at.virtual), costs)
        if at.versions > 1:
            return lower(two_bw(len(costs), count, simulated_batches(len(costs), count)), costs)
        return lower(one_f_one_b_flush(len(costs), count, 1), costs)

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
                    enough = alone and not any(each % degree for each, other in whole if other != things)
                    more = f" or {multiple(size, degree)} {alone}" if enough else ""
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
        if n % prod(given) or (prod(given) != n and self.fixed.keys() >= set(DEGREES)):
            raise ForetraceError(
                f"the degrees multiply to {prod(given)}, got {n} devices; give {multiple(n, prod(given))} devices."
            )

    # --- as a space that strategies search ---------------------------------------------------------------------------

    def random(self, rng: Random) -> Parallelism:
        return self._built(rng.choice(self._splits), lambda _, options: rng.choice(options))

    def neighbour(self, point: Parallelism, rng: Random) -> Parallelism:
        """Return another value of one field, or another split, at random; the others as near as is valid."""
        name = rng.choice(("split", *_LATER))
        if name == "split":
            return self._built(rng.choice(self._splits), self._nearest(self.encode(point)))
        others = [each for each in self._options(name, point) if each != getattr(point, name)]
        return self._with(point, name, rng.choice(others)) if others else self.neighbour(point, rng)

    def moves(self, point: Parallelism) -> Iterator[Parallelism]:
        """Yield every other split over devices, and every other value of one other field."""
        now, pick = tuple(getattr(point, name) for name in DEGREES), self._nearest(self.encode(point))
        yield from (self._built(split, pick) for split in self._splits if split != now)
        for name in _LATER:
            for value in self._options(name, point):
                if value != getattr(point, name):
                    yield self._with(point, name, value)

    def _with(self, point: Parallelism, name: str, value: int) -> Parallelism:
        changed = replace(point, **{name: value})
        return self._built(tuple(getattr(point, name) for name in DEGREES), self._nearest(self.encode(changed)))

    def points(self) -> Iterator[Parallelism]:
        for split in self._splits:
            yield from self.completed(self._split(split))

    def encode(self, point: Parallelism) -> tuple[float, ...]:
        return tuple(self._code(name, getattr(point, name)) for name in _CODED)

    def decode(self, code: Sequence[float]) -> Parallelism:
        nearest = int(np.argmin(((self._codes - code[:3]) ** 2).sum(axis=1)))
        return self._built(self._splits[nearest], self._nearest(code))

    @cached_property
    def _codes(self) -> Float64:
        return np.array([[self._code(*pair) for pair in zip(_CODED[:3], each, strict=False)] for each in self._splits])

    @cached_property
    def _splits(self) -> list[tuple[int, ...]]:
        """Valid degrees of tensor, context, pipeline and data parallelism."""
        n, shape = self.devices, self.arrays[0]
        found: list[tuple[int, ...]] = [
            split
            for tensor in divisors(n)
            for context in divisors(n // tensor)
            if kernels.fits(shape, tensor, context)
            for data in divisors(n // (tensor * context))
            for split in [(tensor, context, n // (tensor * context * data), data)]
            if self.batch % data == 0 and self.model.layers % split[2] == 0
            if all(self.allowed(*pair) for pair in zip(DEGREES, split, strict=True))
        ]
        if not found:
            raise ForetraceError(f"no split over {n} devices is valid for `strategy=`; give other `devices=`.")
        return found

    def completed(self, at: Parallelism, names: Sequence[str] = _LATER) -> Iterator[Parallelism]:
        """Yield a configuration with all valid values of these fields, the last one changing fastest."""
        if not names:
            yield at
            return
        for value in self._options(names[0], at):
            yield from self.completed(replace(at, **{names[0]: value}), names[1:])

    def _options(self, name: str, at: Parallelism) -> list[int]:
        """Return values of a field that are valid beside those of the fields before it."""
        model, share = self.model, self.batch // at.data
        if name in ("micro", "expert"):
            options = divisors(share) if name == "micro" else [
                each for each in divisors(at.data) if model.experts % each == 0
            ]  # fmt: skip
        elif name == "virtual":
            groups = at.pipeline > 1 and at.versions == 1 and share // at.micro % at.pipeline == 0
            options = divisors(model.layers // at.pipeline) if groups else [1]
        else:
            options = list(range(ENDS[name][1] + 1))
            if name == "sequence" and (at.tensor == 1 or model.length % (at.tensor * at.context)):
                options = [0]
            if name == "zero":
                options = [0] if at.data * at.context == 1 else options[: 2 if at.versions > 1 else None]
        return [each for each in options if self.allowed(name, each)]

    def _built(self, split: tuple[int, ...], pick: Pick) -> Parallelism:
        at = self._split(split)
        for name in _LATER:
            options = self._options(name, at)
            at = replace(at, **{name: pick(name, options) if options else self.ends[name][0]})
        return at

    def _split(self, split: tuple[int, ...]) -> Parallelism:
        return Parallelism(**dict(zip(DEGREES, split, strict=True)), versions=self.ends["versions"][0])

    def _code(self, name: str, value: int) -> float:
        if name in ENDS:
            return value / ENDS[name][1]
        most = {"micro": self.batch, "virtual": self.model.layers, "expert": self.model.experts}
        return log(value) / max(log(most.get(name, self.devices)), 1e-9)

    def _nearest(self, code: Sequence[float]) -> Pick:
        wanted = dict(zip(_CODED, code, strict=True))
        return lambda name, options: min(options, key=lambda each: abs(self._code(name, each) - wanted[name]))


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


class ParallelismProblem(Problem[Parallelism]):
    """The logarithm of a step's seconds; a configuration whose fullest device is too small cannot be."""

    def __init__(self, space: ParallelismSpace) -> None:
        self.space: ParallelismSpace = space

    def costs(self, points: Sequence[Parallelism]) -> list[float]:
        return [self._cost(point) for point in points]

    def _cost(self, at: Parallelism) -> float:
        fields = {name: getattr(at, name) for name in kernels.FIELDS}
        found = replace(self.space, fixed=fields).sweep(1)
        if not found.fitting:
            return Infeasible("out of memory" if found.valid else "not valid")
        return log(self.space.cost(at).seconds)
