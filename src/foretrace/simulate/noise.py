"""How sure a step time is: an interval from the noise between the recorded steps, by class of work.

Computing on a device hardly varies from step to step, hosts and collectives do, so
that noise is kept per class. A bootstrap over whole steps: in each of 32 variants of the graph every step i draws a
donor step j, and the durations of class c in step i are scaled by S[j, c] / S[i, c], S being the total duration of a
class in a step. The variants are replayed side by side. Scaled steps are longer than the donors were, as waits that met
no longer meet: by how much, their median steps are longer than those of the donors themselves says, and the interval
goes back by it.

One step says nothing about noise and two say little: the classes are then scaled by random factors with the spread
that other recordings showed (`PRIOR_CV`), or that of the two steps where it is wider, and the interval says so. How far
the two steps are apart as wholes counts beside that, by Student's t with one degree of freedom, as what differs may be
waiting and no work.

What a change gains is known better than either step: `between` takes the figure (seconds saved, a ratio) in every
variant and every step, before and after with the same donors and the same factors, and how far it differs between all
recorded steps, by Student's t. Draws belong to classes and steps, not to tasks, so tasks may be inserted, removed or
moved between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import atan, cos, erf, hypot, pi, sin, sqrt
from typing import Any

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.simulate.replay import effective, replay_variants

VARIANTS = 32
FEWEST_STEPS = 3

# Coefficient of variation between steps: medians over public traces, rounded up. Copies are not
# in the table and are staged by the host; operators are host work.
PRIOR_CV = {
    "device compute": 0.005,
    "device copies": 0.03,
    "collectives": 0.24,
    "host": 0.03,
    "operators": 0.03,
    "python": 0.03,
    "data loading": 0.05,
}
_CLASSES = tuple(PRIOR_CV)
_ON_HOST = {TaskKind.CPU, TaskKind.CALL, TaskKind.OPERATOR, TaskKind.PYTHON}


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Where the median step lies with probability `level`, as far as noise decides; `source` says how it is known."""

    low_s: float
    high_s: float
    level: float
    steps: int
    source: str


def noise_classes(graph: TaskGraph) -> Int64:
    """Return index into PRIOR_CV of every task (n), −1 for tasks without a duration of their own."""
    has_device = bool(graph.on_device.any())
    names = {
        TaskKind.KERNEL: "device compute",
        TaskKind.MEMSET: "device compute",
        TaskKind.COPY: "device copies",
        TaskKind.COLLECTIVE: "collectives",
        TaskKind.DATA: "data loading",
    }
    for kind in _ON_HOST:
        names[kind] = "host" if has_device else "operators" if kind == TaskKind.OPERATOR else "python"
    table = np.array([_CLASSES.index(names[kind]) if kind in names else -1 for kind in TaskKind])
    return table[graph.kind]


Figure = Callable[[Any, Any], Float64]  # of the step before and the step after, numbers or arrays that broadcast


@dataclass(frozen=True, kw_only=True, eq=False)
class Draws:
    """What noise makes of a graph: `medians_s` (variants), the median step of each; `steps_s` (steps), as replayed.

    `donors_s` (variants) is the median of the replayed steps that a variant was made of.
    """

    medians_s: Float64
    donors_s: Float64
    steps_s: Float64
    ranks: tuple[int, ...]
    recorded: bool  # whether any of its durations was
    source: str

    @property
    def few(self) -> bool:
        """Whether two recorded steps are all that is known: too few to be drawn from, and one more than none."""
        return self.recorded and len(self.steps_s) == 2

    def interval(self, step_time_s: float, level: float) -> Interval:
        """Return interval around `step_time_s`, the median step of the graph's replay; it always contains it."""
        apart = _apart(self.steps_s, level) if self.few else 0.0
        below, above = _spread(self.medians_s, self.donors_s, step_time_s, apart, level)
        return Interval(
            low_s=max(step_time_s - below, 0.0),
            high_s=step_time_s + above,
            level=level,
            steps=len(self.steps_s),
            source=self.source,
        )


def between(before: Draws, after: Draws, figure: Figure, level: float) -> tuple[float, float]:
    """Return how far noise may move a figure of both steps below and above its value, in the figure's unit.

    Both were drawn alike, so what moves both alike cancels. Where a change makes other steps or ranks of the recorded
    ones, draws do not belong together, and every one before is held against every one after.
    """
    paired = len(before.steps_s) == len(after.steps_s) and before.ranks == after.ranks
    pairs = ((before.medians_s, after.medians_s), (before.donors_s, after.donors_s))
    drawn, donors = (figure(b, a) if paired else np.ravel(figure(b[:, None], a[None, :])) for b, a in pairs)
    b, a = before.steps_s, after.steps_s
    apart, value = 0.0, float(figure(np.median(b, keepdims=True), np.median(a, keepdims=True))[0])
    if before.recorded or after.recorded:
        ways = [figure(b, a)] if paired else [figure(b, np.median(a)), figure(np.median(b), a)]
        apart = hypot(*(_apart(each, level) for each in ways))
    return _spread(drawn, donors, value, apart, level)


def _spread(drawn: Float64, donors: Float64, value: float, apart: float, level: float) -> tuple[float, float]:
    """Return how far a figure may lie below and above its value, by all variants and by what its steps are apart."""
    drawn = drawn - np.median(drawn - donors)
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2]).tolist()
    return hypot(max(value - low, 0.0), apart), hypot(max(high - value, 0.0), apart)


def _apart(each: Float64, level: float) -> float:
    """Return how far the mean of a figure that was seen in some steps may be off; 0 of a single one."""
    n = len(each)
    return t_quantile(0.5 + level / 2, n - 1) * float(np.std(each, ddof=1)) / sqrt(n) if n > 1 else 0.0


def draw(graph: TaskGraph, steps_s: Float64, *, seed: int = 0) -> Draws:
    """Draw what noise makes of a graph, whose steps take `steps_s` (steps) in its replay."""
    random = np.random.default_rng(seed)
    ranks = graph.ranks
    steps, n_classes = graph.n_steps, len(_CLASSES) * max(len(ranks), 1)
    classes = noise_classes(graph)
    # Every rank has noise of its own; a step that is drawn is drawn for all of them.
    place = np.searchsorted(ranks, np.maximum(graph.rank, 0)) if len(ranks) > 1 else np.zeros(len(graph), np.int64)
    # What was estimated was not recorded: its range is its own (see `doubt`), not the noise of recordings.
    recorded = np.array([*(each.recorded for each in graph.info.doubts), True], dtype=np.bool_)[graph.doubt]
    classes = np.where((classes >= 0) & recorded, place * len(_CLASSES) + classes, -1)
    inside = (graph.step >= 0) & (graph.step < steps) & (classes >= 0)
    group = np.where(inside, graph.step * n_classes + classes, -1).astype(np.int32)
    total = np.zeros(steps * n_classes)
    np.add.at(total, group[inside], effective(graph).dur[inside])
    scale, donor, source = factors(total.reshape(steps, n_classes), random, VARIANTS)
    if not recorded.all() and not inside.any():
        source = ""  # nothing was recorded
    ends = replay_variants(graph, group, scale)
    medians = np.median(np.diff(ends, axis=0), axis=0) / 1e9
    donors = np.median(steps_s[donor], axis=0)
    return Draws(
        medians_s=medians, donors_s=donors, steps_s=steps_s, ranks=tuple(ranks), recorded=bool(inside.any()),
        source=source,
    )  # fmt: skip


def factors(total: Float64, random: np.random.Generator, variants: int) -> tuple[Float64, Int64, str]:
    """Return factors of the durations by (step, class) (steps · classes x variants), the step that each step is made
    like (steps x variants), and how they are known.

    `total` (steps x classes, of one rank or of several after each other) is how much time the classes take in the
    recorded steps. Two steps say how far a class is apart at least: the standard deviation of both over their mean.
    """
    steps, n_classes = total.shape
    if steps >= FEWEST_STEPS:
        how = f"noise between {steps} steps, by class of work ({variants} resampled replays)"
        donor = random.integers(0, steps, size=(steps, variants))
        return _like(total, donor), donor, how
    ranks = n_classes // len(_CLASSES)
    used = [_CLASSES[c] for c in np.flatnonzero(total.sum(axis=0).reshape(ranks, -1).sum(axis=0))]
    spread = np.tile(list(PRIOR_CV.values()), ranks)
    if steps == 2:
        mean = total.mean(axis=0)
        spread = np.maximum(spread, np.divide(total.std(axis=0, ddof=1), mean, out=np.zeros_like(mean), where=mean > 0))
    drawn = 1.0 + spread[:, None] * random.standard_normal((n_classes, variants))
    spreads = ", ".join(f"{name} {100 * PRIOR_CV[name]:g} %" for name in used)
    how = f"{steps} step{'s' if steps > 1 else ''} recorded: noise of other recordings ({spreads})"
    how += ", and how far the two are apart" if steps == 2 else ""
    donor = np.repeat(np.arange(steps)[:, None], variants, axis=1)
    return np.tile(np.maximum(drawn, 0.0), (steps, 1)), donor, how


def _like(total: Float64, donor: Int64) -> Float64:
    """Return factors that give every step the class totals of its donor."""
    (steps, n_classes), variants = total.shape, donor.shape[1]
    own = np.repeat(total[:, :, None], variants, axis=2)
    theirs = total[donor].transpose(0, 2, 1)
    factor = np.divide(theirs, own, out=np.ones_like(own), where=own > 0)
    return factor.reshape(steps * n_classes, variants)


@lru_cache
def t_quantile(p: float, freedom: int) -> float:
    """Return the quantile p > ½ of Student's t, by bisection of its distribution (finite sums: whole degrees)."""

    def upto(t: float) -> float:
        angle = atan(t / sqrt(freedom))
        cosine = cos(angle)
        if freedom % 2:  # Abramowitz & Stegun 26.7.3
            total, term = 0.0, cosine
            for k in range(1, freedom - 1, 2):
                total += term
                term *= cosine**2 * (k + 1) / (k + 2)
            return 0.5 + (angle + sin(angle) * total) / pi
        total, term = 0.0, 1.0  # 26.7.4
        for k in range(0, freedom, 2):
            total += term
            term *= cosine**2 * (k + 1) / (k + 2)
        return 0.5 + sin(angle) * total / 2

    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if upto(middle) < p else (low, middle)
    return (low + high) / 2


@lru_cache
def expected_max(count: int) -> float:
    """Return the expected largest of so many standard normal numbers (David & Nagaraja, Order Statistics, 2003)."""
    x = np.linspace(-9.0, 9.0, 3601)
    below = np.array([0.5 * (1 + erf(each / sqrt(2))) for each in x.tolist()])
    return float(np.sum((x[1:] + x[:-1]) / 2 * np.diff(below**count)))
