"""The batch size from which on K-FAC is sooner at the target than SGD: predicted, and measured on both sides of it.

K-FAC pays where its step takes fewer times as long as SGD's than SGD needs more steps. How much longer a step takes is
predicted at every batch size from one recording of SGD's at one size: K-FAC's own work hardly grows with the batch,
forward and backward pass do. How many steps it needs no recording tells: runs at two batch sizes do, as a range over
seeds that is continued to other sizes by the trend of both. Trainings at all other sizes are held out and judge.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, hypot, inf, log
from statistics import median

import numpy as np

from foretrace.arrays import Float64
from foretrace.experiment.ledger import Row
from foretrace.experiment.statistics import LEVEL, RESAMPLES, Ratio, paired_ratio
from foretrace.experiment.trial import figured
from reproductions.kaisa.runs import OFTEN, Runs
from reproductions.kaisa.tasks import AUTO_ENCODER, LearningTask
from reproductions.kept import Cell

RECORDED, GIVEN = 250, (250, 1000)  # batch sizes
CROSSED = {AUTO_ENCODER: ("kfac", "kfac 1/10"), "deep-tanh": ("kfac 2/10", "kfac 1/10")}  # frequencies by task
SIZES = {AUTO_ENCODER: (32, 64, 125, 250, 500, 1000, 2000, 4000), "deep-tanh": (64, 125, 250, 1000, 2000)}
_MOST = log(4)  # of a logarithm of times: how far off the target a size without an end counts
_ENDS = (1 - LEVEL) / 2, (1 + LEVEL) / 2  # quantiles of an interval


def share_of(sgd: Sequence[Cell], kfac: Sequence[Cell]) -> tuple[Ratio, Float64]:
    """Median of K-FAC's steps over that of SGD's, with its bootstrap interval and draws; inf: not reached."""
    first, second = (np.array([each["steps"] or inf for each in cells]) for cells in (sgd, kfac))
    random = np.random.default_rng(0)
    rows = [random.integers(0, len(each), (RESAMPLES, len(each))) for each in (first, second)]
    before, after = np.median(first[rows[0]], axis=1), np.median(second[rows[1]], axis=1)
    with np.errstate(invalid="ignore"):
        draws = np.where(np.isinf(before) & np.isinf(after), 1.0, after / before)
        value = float(np.nan_to_num(np.median(second) / np.median(first), nan=1.0, posinf=inf))
    low, high = np.quantile(draws, _ENDS, method="nearest").tolist()
    return Ratio(value=value, low=min(low, value), high=max(high, value)), draws


def crossed(sizes: Sequence[int], times: Sequence[float]) -> float:
    """The size from which on logarithms of times are below 0, between sizes by their logarithm; 0 always, inf never.

    Times that rise with the size between are levelled (pool adjacent violators): more samples do not favour SGD.
    """
    pools: list[list[float]] = []
    for each in times:
        pools.append([min(max(each, -_MOST), _MOST), 1])
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [[(a * m + b * n) / (m + n), m + n]]
    level = [value for value, count in pools for _ in range(int(count))]
    over = [i for i, each in enumerate(level) if each >= 0]
    if not over or over[-1] == len(level) - 1:
        return inf if over else 0.0
    i = over[-1]
    way = level[i] / (level[i] - level[i + 1])
    return exp((1 - way) * log(sizes[i]) + way * log(sizes[i + 1]))


def continued(given: dict[int, Ratio], batch: int, *, falling: bool = False) -> Ratio:
    """What a number measured at two batch sizes, or one, may be at another.

    The range holds that of the nearest given size and what continues the trend of both, a power of the batch; the
    value is halfway. `falling`: a trend that rises with the batch is none.
    """
    first, last = min(given), max(given)
    slope = log(given[first].value / given[last].value) / log(last / first) if first < last else 0.0
    slope = max(slope, 0.0) if falling else slope
    near = [first] if batch <= first else [last] if batch >= last else [first, last]
    ends = [(given[each], (each / batch) ** slope) for each in near]
    value = exp(float(np.mean([log(each.value) + log(trend) / 2 for each, trend in ends])))
    low = min(each.low * min(trend, 1.0) for each, trend in ends)
    high = max(each.high * max(trend, 1.0) for each, trend in ends)
    return Ratio(value=value, low=min(low, value), high=max(high, value))


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """A task at one frequency of updates."""

    task: LearningTask
    method: str
    runs: dict[int, dict[str, list[Cell]]]  # by batch and method
    step_s: dict[int, dict[str, list[float]]]  # likewise, by round
    ratios: dict[int, Ratio]  # K-FAC's step over SGD's, predicted

    @property
    def held_out(self) -> list[int]:
        """Batch sizes whose trainings the prediction does not know."""
        return [each for each in self.runs if each not in GIVEN]

    def steps(self, batch: int) -> tuple[Ratio, Float64]:
        """Share of SGD's steps that K-FAC needs, measured."""
        return share_of(self.runs[batch]["sgd"], self.runs[batch][self.method])

    def step(self, batch: int) -> Ratio:
        """K-FAC's step over SGD's, measured."""
        return paired_ratio(self.step_s[batch]["sgd"], self.step_s[batch][self.method])

    def share(self, batch: int) -> Ratio:
        """Share of SGD's steps that K-FAC needs, predicted from those at the given sizes.

        Only a trend in which K-FAC gains with the batch is taken for one (Zhang et al., NeurIPS 2019).
        """
        return continued({each: self.steps(each)[0] for each in GIVEN}, batch, falling=True)

    def ratio(self, batch: int) -> Ratio:
        """K-FAC's step over SGD's: what the recording says that it adds, scaled to the steps at the given sizes."""
        found = {each: (self.step(each).value - 1) / (self.ratios[each].value - 1) for each in GIVEN}
        scale = continued({size: Ratio(value=each, low=each, high=each) for size, each in found.items()}, batch)
        said = self.ratios[batch]
        return Ratio(
            value=1 + (said.value - 1) * scale.value, low=1 + (said.low - 1) * scale.low,
            high=1 + (said.high - 1) * scale.high,
        )  # fmt: skip

    def predicted(self, batch: int) -> Ratio:
        """Time to the target over SGD's."""
        return _product(self.share(batch), self.ratio(batch))

    def measured(self, batch: int) -> Ratio:
        """The same from steps and seconds of this size; both intervals count."""
        return _product(self.steps(batch)[0], self.step(batch))

    @property
    def predicted_from(self) -> Ratio:
        """The batch size from which on K-FAC pays, predicted."""
        times = [self.predicted(batch) for batch in self.runs]
        value, low, high = (
            crossed([*self.runs], [log(getattr(each, end)) for each in times]) for end in ("value", "low", "high")
        )
        return Ratio(value=value, low=low, high=high)

    @property
    def measured_from(self) -> Ratio:
        """The same as measured at all sizes, over seeds."""
        with np.errstate(divide="ignore"):
            draws = np.log(np.array([self.steps(batch)[1] * self.step(batch).value for batch in self.runs])).T
            value = crossed([*self.runs], np.log([self.measured(batch).value for batch in self.runs]).tolist())
        found = [crossed([*self.runs], each) for each in draws.tolist()]
        low, high = np.quantile(found, _ENDS, method="nearest").tolist()
        return Ratio(value=value, low=min(low, value), high=max(high, value))

    def verdict(self) -> str:
        """What held-out sizes say of the predicted crossing."""
        told = {batch: (pays(self.predicted(batch)), pays(self.measured(batch))) for batch in self.held_out}
        right = [batch for batch, (said, found) in told.items() if said == found != UNCLEAR]
        wrong = [batch for batch, (said, found) in told.items() if UNCLEAR not in (said, found) and said != found]
        sides = {told[batch][0] for batch in right}
        both = "the crossing is verified on both sides" if len(sides) == 2 and not wrong else (
            f"the prediction is wrong at {listed(wrong)}" if wrong else "it is verified on one side at most"
        )  # fmt: skip
        open_ = [batch for batch in told if batch not in (*right, *wrong)]
        return f"right at {listed(right)}: {both}. Not resolved: {listed(open_)}."

    def rows(self) -> Iterator[Row]:
        """Of held-out batch sizes: the step, and the time to the target where most seeds reach it."""
        for batch in self.held_out:
            cells, step_s = self.runs[batch], self.step_s[batch]
            sgd_s, kfac_s = median(step_s["sgd"]), step_s[self.method]
            told: dict[str, tuple[Ratio, float, list[float]]] = {"step": (self.ratio(batch), sgd_s, kfac_s)}
            steps = {name: [each["steps"] for each in cells[name]] for name in ("sgd", self.method)}
            if all(all(each) for each in steps.values()):
                found_s = [median(kfac_s) * each for each in steps[self.method]]
                told["time to target"] = self.predicted(batch), sgd_s * median(steps["sgd"]), found_s
            for what, (ratio, base_s, rounds_s) in told.items():
                predicted_s = ratio.value * base_s, ratio.low * base_s, ratio.high * base_s
                yield figured(predicted_s, rounds_s, clock="cpu").row(
                    f"kfac {what}", model=self.task.name, size=f"batch {batch}, {self.method}, recorded at {RECORDED}",
                    parameters={"often": OFTEN[self.method]},
                    notes=(f"over that of SGD in the same runs; steps needed are of batches {GIVEN}",),
                )  # fmt: skip


def timed_methods(task: LearningTask) -> tuple[str, ...]:
    """Methods whose steps are timed together."""
    return tuple(dict.fromkeys(("sgd", "adam", "kfac", *CROSSED.get(task.name, ()))))


def _product(share: Ratio, step: Ratio) -> Ratio:
    """The product of two ratios whose errors have nothing to do with each other."""
    value = share.value * step.value
    if value == inf:
        return Ratio(value=inf, low=share.low * step.low, high=inf)
    down = hypot(log(share.value / share.low), log(step.value / step.low))
    up = hypot(log(share.high / share.value), log(step.high / step.value))
    return Ratio(value=value, low=value * exp(-down), high=value * exp(up))


def cross(runs: Runs, task: LearningTask, seeds: int) -> list[Crossing]:
    """Predict and train a task at all its sizes and frequencies."""
    methods, sizes = CROSSED[task.name], SIZES[task.name]
    ratios = {method: runs.predicted(task, RECORDED, sizes, method) for method in methods}
    step_s = {batch: runs.timed(task, batch, timed_methods(task)) for batch in sizes}
    found = {batch: runs.tuned(task, batch, ("sgd", *methods), seeds) for batch in sizes}
    return [
        Crossing(task=task, method=method, runs=found, step_s=step_s, ratios=dict(zip(sizes, each, strict=True)))
        for method, each in ratios.items()
    ]


UNCLEAR = "cannot tell"


def said(ratio: Ratio, form: str = "{:.2f}") -> str:
    """Value (low – high)."""
    value, low, high = ("–" if each == inf else form.format(each) for each in (ratio.value, ratio.low, ratio.high))
    return f"{value} ({low} – {high})"


def pays(ratio: Ratio) -> str:
    """What a ratio of times tells."""
    return "yes" if ratio.high < 1 else "no" if ratio.low > 1 else UNCLEAR


def listed(sizes: Sequence[int]) -> str:
    """Batch sizes."""
    return ", ".join(map(str, sizes)) or "none"


def often(method: str) -> str:
    """Steps between factors and between inverses, as 5/20."""
    return "/".join(word.partition("=")[2] for word in OFTEN[method].split())


def from_on(crossing: Crossing, ratio: Ratio) -> str:
    """A batch size with its range."""
    sizes = [*crossing.runs]
    ends = {0.0: f"below {sizes[0]}", inf: f"above {sizes[-1]}"}
    value, low, high = (ends.get(each, f"{each:.0f}") for each in (ratio.value, ratio.low, ratio.high))
    return f"{value} ({low} – {high})"
