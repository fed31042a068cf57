"""The three problems: films, an accelerator and a plan for a training; each inside and outside of the lessons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, log
from random import Random
from typing import Any

import numpy as np

from foretrace.hardware.accelerators import TPU_LIKE
from foretrace.plan.codesign.search import CodesignSpace, DesignProblem, design_columns
from foretrace.plan.transformers.model import machine, softwares
from foretrace.plan.transformers.shape import TransformerSizes, transformer
from foretrace.plan.transformers.space import ParallelismProblem, ParallelismSpace
from foretrace.search.space import Problem, Responded, Space
from reproductions.nanophotonic.films import LAYERS, LEARNED, THICKNESS, WAVELENGTHS, Film, indices, reflectance

LINK_GB_S = 50.0
DEVICE = "a100-80gb"


@dataclass(frozen=True, kw_only=True)
class Target:
    """Something to search, and the cost of the best there is (0 for films, whose cost is the error itself)."""

    group: str
    problem: Problem[Any]
    optimum: float


def films(seed: int, each: int) -> Iterator[Target]:
    """Spectra of films of the thicknesses that lessons have, of thicker ones, and filters that none may reach."""
    rng = np.random.default_rng([7, seed])
    for group, low, high in (("inside", *LEARNED), ("outside", LEARNED[1], THICKNESS[-1])):
        for thickness in rng.uniform(low, high, (each, 1, LAYERS)):
            yield Target(
                group=group, problem=Film(reflectance(thickness, WAVELENGTHS, indices(LAYERS))[0].tolist()), optimum=0.0
            )
    for edge in rng.uniform(500, 700, each):
        yield Target(group="ideal filters", problem=Film((edge < WAVELENGTHS).astype(float).tolist()), optimum=0.0)


@dataclass(frozen=True)
class Work:
    """A training: what is given about it."""

    model: str
    devices: int
    batch: int

    @property
    def sizes(self) -> TransformerSizes:
        """Of its model."""
        return transformer(self.model)

    @property
    def ideal(self) -> float:
        """Logarithm of the operations of each device: what it is worth counts from there."""
        m = self.sizes
        return log(6 * m.parameters * m.length * self.batch / self.devices)

    @property
    def features(self) -> tuple[float, ...]:
        """Logarithms of sizes."""
        m = self.sizes
        return tuple(map(log, (m.layers, m.hidden, m.length, self.devices, self.batch / self.devices)))


INSIDE = (Work("megatron-bert-1.3b", 512, 2048), Work("opt-6.7b", 256, 1024), Work("llama-2-7b", 512, 4096))
OUTSIDE = (Work("opt-175b", 1024, 4096), Work("llama-2-70b", 1024, 1024), Work("llama-3-70b", 2048, 2048))
OTHERS = tuple(
    Work(model, devices, batch * devices)
    for model, devices, batch in (
        ("gpt2-xl", 256, 4), ("gpt2-2.5b", 512, 4), ("opt-2.7b", 256, 4), ("opt-13b", 512, 4), ("llama-7b", 256, 4),
        ("megatron-bert-3.9b", 512, 8), ("gpt3-6.7b", 256, 8), ("gpt3-1.3b", 512, 8),
    )
)  # fmt: skip


class Among(Space[tuple[int, Any]]):
    """Points of the first of several spaces, as (0, point); those of others are for lessons alone."""

    def __init__(self, spaces: Sequence[Space[Any]]) -> None:
        self.spaces, self.first = spaces, spaces[0]

    def random(self, rng: Random) -> tuple[int, Any]:
        return 0, self.first.random(rng)

    def neighbour(self, point: tuple[int, Any], rng: Random) -> tuple[int, Any]:
        return 0, self.first.neighbour(point[1], rng)

    def encode(self, point: tuple[int, Any]) -> tuple[float, ...]:
        return self.spaces[point[0]].encode(point[1])

    def decode(self, code: Sequence[float]) -> tuple[int, Any]:
        return 0, self.first.decode(code)


class Learned(Problem[tuple[int, Any]]):
    """A problem whose lessons are points of problems like it; costs are logarithms of seconds."""

    def __init__(self, works: Sequence[Work], problem: Callable[[Work], Problem[Any]]) -> None:
        """The first of the works is what is searched."""
        self.works, self.problems = works, [problem(work) for work in works]
        self.space = Among([each.space for each in self.problems])

    def lesson(self, rng: Random) -> tuple[int, Any]:
        task = rng.randrange(1, len(self.works))
        return task, self.problems[task].space.random(rng)

    def given(self, point: tuple[int, Any] | None) -> tuple[float, ...]:
        return self.works[point[0] if point else 0].features

    def costs(self, points: Sequence[tuple[int, Any]]) -> list[float]:
        return [self._cost(*point) for point in points]

    def _cost(self, task: int, point: Any) -> float:
        (cost,) = self.problems[task].costs([point])
        if cost == inf:
            return cost
        return Responded(inf if task else cost, (cost - self.works[task].ideal,))


@cache
def _design(work: Work) -> DesignProblem:
    """The accelerator for a training, of the published designs, each with its best plan."""
    space = CodesignSpace(
        model=work.sizes, devices=work.devices, batch=work.batch, training=True, like=TPU_LIKE, designs=design_columns()
    )
    return DesignProblem(space, LINK_GB_S)


def _plan(work: Work) -> ParallelismProblem:
    return ParallelismProblem(
        ParallelismSpace(
            model=work.sizes,
            on=machine(DEVICE),
            software=softwares()["megatron"],
            devices=work.devices,
            batch=work.batch,
        )
    )


def _works(seed: int, each: int) -> Iterator[tuple[str, Work]]:
    for group, works in (("inside", INSIDE), ("outside", OUTSIDE)):
        for work in Random(seed).sample(works, min(each, len(works))):
            yield group, work


def accelerators(seed: int, each: int) -> Iterator[Target]:
    """Designs for trainings as large as those of the lessons, and for larger ones."""
    for group, work in _works(seed, each):
        problem = Learned((work, *OTHERS), _design)
        yield Target(group=group, problem=problem, optimum=_design(work).optimum)


def plans(seed: int, each: int) -> Iterator[Target]:
    """Parallel strategies for the same trainings on given devices."""
    for group, work in _works(seed, each):
        problem = Learned((work, *OTHERS), _plan)
        swept = problem.problems[0]
        assert isinstance(swept, ParallelismProblem)
        of = swept.space
        yield Target(group=group, problem=problem, optimum=log(of.cost(of.search(1).configurations[0]).seconds))


PROBLEMS: dict[str, tuple[Callable[[int, int], Iterator[Target]], int, str]] = {
    "films": (films, 1000, "root mean square error of reflectance"),
    "accelerators": (accelerators, 500, "iteration over the best one's"),
    "plans": (plans, 500, "step over the best one's"),
}  # targets, lessons, what is counted
EACH = 1  # targets of a group and a seed
