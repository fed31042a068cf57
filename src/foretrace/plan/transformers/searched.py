"""`ParallelismProblem`: configurations of a transformer as a space that any strategy searches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from math import log
from random import Random

import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError
from foretrace.plan.transformers import kernels
from foretrace.plan.transformers.model import Parallelism
from foretrace.plan.transformers.space import ParallelismSpace, divisors
from foretrace.search.space import Infeasible, Problem, Space

_DEGREES = ("tensor", "context", "pipeline", "data")
_LATER = ("micro", "virtual", "expert", "sequence", "recompute", "zero", "overlap")  # each after those it depends on
_CODED = ("tensor", "context", "pipeline", *_LATER)
_FLAGS = {"sequence": 1, "recompute": 2, "zero": 3, "overlap": 1}
Pick = Callable[[str, Sequence[int]], int]


class Configurations(Space[Parallelism]):
    """Valid configurations, by coordinates that are logarithms of degrees; see `space.py` for what is valid."""

    def __init__(self, space: ParallelismSpace) -> None:
        self.of = space
        low, high = space.bounds()
        self._ends = {name: (int(low[i]), int(high[i])) for i, name in enumerate(kernels.FIELDS)}
        self._most = {"micro": space.batch, "virtual": space.model.layers, "expert": space.model.experts, **_FLAGS}

    def random(self, rng: Random) -> Parallelism:
        return self._built(rng.choice(self._splits), lambda _, options: rng.choice(options))

    def neighbour(self, point: Parallelism, rng: Random) -> Parallelism:
        """Return another value of one field, or another split, at random; the others as near as is valid."""
        field = rng.choice(("split", *_LATER))
        if field == "split":
            return self._built(rng.choice(self._splits), self._nearest(self.encode(point)))
        others = [each for each in self._options(field, point) if each != getattr(point, field)]
        return self._with(point, field, rng.choice(others)) if others else self.neighbour(point, rng)

    def moves(self, point: Parallelism) -> Iterator[Parallelism]:
        """Yield every other split over devices, and every other value of one other field."""
        now, pick = tuple(getattr(point, name) for name in _DEGREES), self._nearest(self.encode(point))
        yield from (self._built(split, pick) for split in self._splits if split != now)
        for field in _LATER:
            for value in self._options(field, point):
                if value != getattr(point, field):
                    yield self._with(point, field, value)

    def _with(self, point: Parallelism, field: str, value: int) -> Parallelism:
        changed = replace(point, **{field: value})
        return self._built(tuple(getattr(point, name) for name in _DEGREES), self._nearest(self.encode(changed)))

    def encode(self, point: Parallelism) -> tuple[float, ...]:
        return tuple(self._code(name, getattr(point, name)) for name in _CODED)

    def decode(self, code: Sequence[float]) -> Parallelism:
        nearest = int(np.argmin(((self._codes - code[:3]) ** 2).sum(axis=1)))
        return self._built(self._splits[nearest], self._nearest(code))

    @cached_property
    def _codes(self) -> Float64:
        names = _DEGREES[:3]  # the degree of data parallelism follows
        return np.array([[self._code(*pair) for pair in zip(names, each, strict=False)] for each in self._splits])

    @cached_property
    def _splits(self) -> list[tuple[int, ...]]:
        """Valid degrees of tensor, context, pipeline and data parallelism."""
        n, model, shape = self.of.devices, self.of.model, self.of.arrays[0]
        some = divisors(n)
        found: list[tuple[int, ...]] = [
            (tensor, context, n // (tensor * context * data), data)
            for tensor in some
            for context in divisors(n // tensor)
            if kernels.fits(shape, tensor, context)
            for data in divisors(n // (tensor * context))
            if self.of.batch % data == 0 and model.layers % (n // (tensor * context * data)) == 0
        ]
        inside: list[tuple[int, ...]] = [
            each for each in found if all(self._allowed(*pair) for pair in zip(_DEGREES, each, strict=True))
        ]
        if not inside:
            raise ForetraceError(f"no split over {n} devices is valid for `strategy=`; give other `devices=`.")
        return inside

    def _allowed(self, name: str, value: int) -> bool:
        low, high = self._ends[name]
        return low <= value <= high

    def _options(self, name: str, at: Parallelism) -> list[int]:
        """Return values of a field that are valid beside those of the fields before it."""
        model, share = self.of.model, self.of.batch // at.data
        if name in ("micro", "expert"):
            options = divisors(share) if name == "micro" else [
                each for each in divisors(at.data) if model.experts % each == 0
            ]  # fmt: skip
        elif name == "virtual":
            groups = at.pipeline > 1 and at.versions == 1 and share // at.micro % at.pipeline == 0
            options = divisors(model.layers // at.pipeline) if groups else [1]
        else:
            options = list(range(_FLAGS[name] + 1))
            if name == "sequence" and (at.tensor == 1 or model.length % (at.tensor * at.context)):
                options = [0]
            if name == "zero":
                options = [0] if at.data * at.context == 1 else options[: 2 if at.versions > 1 else None]
        return [each for each in options if self._allowed(name, each)]

    def _built(self, split: tuple[int, ...], pick: Pick) -> Parallelism:
        at = Parallelism(**dict(zip(_DEGREES, split, strict=True)), versions=self._ends["versions"][0])
        for name in _LATER:
            options = self._options(name, at)
            at = replace(at, **{name: pick(name, options) if options else self._ends[name][0]})
        return at

    def _code(self, name: str, value: int) -> float:
        if name in _FLAGS:
            return value / _FLAGS[name]
        return log(value) / max(log(self._most.get(name, self.of.devices)), 1e-9)

    def _nearest(self, code: Sequence[float]) -> Pick:
        wanted = dict(zip(_CODED, code, strict=True))
        return lambda name, options: min(options, key=lambda each: abs(self._code(name, each) - wanted[name]))


class ParallelismProblem(Problem[Parallelism]):
    """The logarithm of a step's seconds; a configuration whose fullest device is too small cannot be."""

    def __init__(self, space: ParallelismSpace) -> None:
        self.space: Configurations = Configurations(space)

    def costs(self, points: Sequence[Parallelism]) -> list[float]:
        return [self._cost(point) for point in points]

    def _cost(self, at: Parallelism) -> float:
        fields = {name: getattr(at, name) for name in kernels.FIELDS}
        found = replace(self.space.of, fixed=fields).sweep(1)
        if not found.fitting:
            return Infeasible("out of memory" if found.valid else "not valid")
        return log(self.space.of.cost(at).seconds)
