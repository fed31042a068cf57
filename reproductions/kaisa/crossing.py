"""The batch size from which on K-FAC is sooner at the target than SGD: predicted, and measured at other batch sizes.

Predicted from one recorded step at one batch size (K-FAC's own work hardly grows with the batch, forward and backward
pass do) and from the share of SGD's steps that K-FAC needs at two batch sizes, over seeds. That the share is the same
at other batch sizes is assumed; trainings at these then tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, hypot, inf, log
from statistics import median

import numpy as np

from foretrace.experiment.ledger import Row
from foretrace.experiment.statistics import LEVEL, RESAMPLES, Ratio
from foretrace.experiment.trial import figured
from reproductions.kaisa.runs import OFTEN, Runs
from reproductions.kaisa.tasks import TASKS, LearningTask
from reproductions.kept import Cell
from tables import table

RECORDED, GIVEN = 250, (250, 1000)  # batch sizes
SIZES = (32, 64, 125, 250, 500, 1000, 2000)
_MOST = log(4)  # of a logarithm of times: how far off the target a size without an end counts


def share_of(sgd: Sequence[Cell], kfac: Sequence[Cell], what: str) -> tuple[Ratio, np.ndarray]:
    """Median of K-FAC's steps or seconds over that of SGD, with its bootstrap interval and draws; inf: not reached."""
    first, second = (np.array([each[what] or inf for each in cells]) for cells in (sgd, kfac))
    random = np.random.default_rng(0)
    rows = [random.integers(0, len(each), (RESAMPLES, len(each))) for each in (first, second)]
    before, after = np.median(first[rows[0]], axis=1), np.median(second[rows[1]], axis=1)
    with np.errstate(invalid="ignore"):
        draws = np.where(np.isinf(before) & np.isinf(after), 1.0, after / before)
        value = float(np.nan_to_num(np.median(second) / np.median(first), nan=1.0, posinf=inf))
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="nearest").tolist()
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


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """One frequency of updates."""

    task: LearningTask
    method: str
    runs: dict[int, dict[str, list[Cell]]]  # by batch and method
    ratios: dict[int, Ratio]  # K-FAC's step over SGD's, predicted

    def measured(self, batch: int, what: str) -> tuple[Ratio, np.ndarray]:
        """K-FAC over SGD: steps, or seconds to the target."""
        cells = self.runs[batch]
        return share_of(cells["sgd"], cells[self.method], what)

    def step_s(self, batch: int, method: str) -> float:
        """Median step."""
        return float(median(each["step_s"] for each in self.runs[batch][method]))

    def step(self, batch: int) -> float:
        """K-FAC's step over SGD's, measured."""
        return self.step_s(batch, self.method) / self.step_s(batch, "sgd")

    def ratio(self, batch: int) -> Ratio:
        """K-FAC's step over SGD's: what the recording says that it adds, scaled to where it was trained.

        The range spans both given sizes.
        """
        more = [(self.step(each) - 1) / (self.ratios[each].value - 1) for each in GIVEN]
        said, middle = self.ratios[batch], exp(float(np.mean(np.log(more))))
        low, high = ((end - 1) * by + 1 for end, by in ((said.low, min(more)), (said.high, max(more))))
        return Ratio(value=1 + (said.value - 1) * middle, low=low, high=high)

    @property
    def share(self) -> Ratio:
        """Share of SGD's steps that K-FAC needs: the same at all batch sizes, so one of all that are given."""
        found = [self.measured(batch, "steps") for batch in GIVEN]
        values = [log(each.value) for each, _ in found]
        low, high = np.quantile(
            np.mean([np.log(draws) for _, draws in found], axis=0), [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
        )
        value = float(np.mean(values))
        return Ratio(value=exp(value), low=exp(min(low, *values)), high=exp(max(high, *values)))

    def predicted(self, batch: int) -> Ratio:
        """Time to the target over SGD's."""
        share, ratio = self.share, self.ratio(batch)
        value = share.value * ratio.value
        down = hypot(log(share.value / share.low), log(ratio.value / ratio.low))
        up = hypot(log(share.high / share.value), log(ratio.high / ratio.value))
        return Ratio(value=value, low=value * exp(-down), high=value * exp(up))

    @property
    def predicted_from(self) -> Ratio:
        """The batch size from which on K-FAC pays, predicted."""
        times = [self.predicted(batch) for batch in SIZES]
        value, low, high = (
            crossed(SIZES, [log(getattr(each, end)) for each in times]) for end in ("value", "low", "high")
        )
        return Ratio(value=value, low=low, high=high)

    @property
    def measured_from(self) -> Ratio:
        """The same as measured at all sizes, over seeds."""
        found = [self.measured(batch, "seconds") for batch in SIZES]
        with np.errstate(divide="ignore"):
            draws = np.log(np.array([each for _, each in found])).T
            value = crossed(SIZES, np.log([each.value for each, _ in found]).tolist())
        low, high = np.quantile(
            [crossed(SIZES, each) for each in draws.tolist()], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="nearest"
        ).tolist()
        return Ratio(value=value, low=min(low, value), high=max(high, value))

    def rows(self) -> Iterator[Row]:
        """Of batch sizes that were not given: the step, and the time to the target where all seeds reach it."""
        for batch in SIZES:
            if batch in GIVEN:
                continue
            kfac, sgd = self.runs[batch][self.method], self.runs[batch]["sgd"]
            told: dict[str, tuple[Ratio, float, list[float | None]]] = {
                "step": (self.ratio(batch), self.step_s(batch, "sgd"), [each["step_s"] for each in kfac])
            }
            if all(each["seconds"] for each in (*kfac, *sgd)):
                sgd_s, kfac_s = ([each["seconds"] for each in cells] for cells in (sgd, kfac))
                told["time to target"] = self.predicted(batch), median(sgd_s), kfac_s
            for what, (ratio, base_s, found_s) in told.items():
                predicted_s = ratio.value * base_s, ratio.low * base_s, ratio.high * base_s
                yield figured(predicted_s, [each for each in found_s if each], clock="cpu").row(
                    f"kfac {what}", model=self.task.name, size=f"batch {batch}, {self.method}, recorded at {RECORDED}",
                    parameters={"often": OFTEN[self.method]},
                    notes=(f"over that of SGD in the same runs; steps needed are of batches {GIVEN}",),
                )  # fmt: skip


def cross(runs: Runs, seeds: int) -> list[Crossing]:
    """Predict and train the auto-encoder at all sizes."""
    task = TASKS[0]
    ratios = {method: runs.predicted(task, RECORDED, SIZES, method) for method in OFTEN}
    found = {batch: runs.tuned(task, batch, ("sgd", *OFTEN), seeds) for batch in SIZES}
    return [
        Crossing(task=task, method=method, runs=found, ratios=dict(zip(SIZES, each, strict=True)))
        for method, each in ratios.items()
    ]


def said(ratio: Ratio, form: str = "{:.2f}") -> str:
    """Value (low – high)."""
    value, low, high = ("–" if each == inf else form.format(each) for each in (ratio.value, ratio.low, ratio.high))
    return f"{value} ({low} – {high})"


def pays(ratio: Ratio) -> str:
    """What a ratio of times tells."""
    return "yes" if ratio.high < 1 else "no" if ratio.low > 1 else "cannot tell"


def from_on(ratio: Ratio) -> str:
    """A batch size with its range."""
    ends = {0.0: f"below {SIZES[0]}", inf: f"above {SIZES[-1]}"}
    value, low, high = (ends.get(each, f"{each:.0f}") for each in (ratio.value, ratio.low, ratio.high))
    return f"{value} ({low} – {high})"


def crossing_section(crossings: Sequence[Crossing]) -> Iterator[str]:
    """Both frequencies."""
    if not crossings:
        return
    given = " and ".join(map(str, GIVEN))
    yield (
        f"## From which batch size on it pays\n\nOf the {crossings[0].task.name}, by two frequencies of "
        f"factors/inverses. Recorded: the ratio of steps at each batch size from one recording at {RECORDED} alone; it "
        "was made while other work ran, and is too low. Predicted: with what K-FAC adds scaled to the steps at "
        f"{given}, where it was trained, times the share of SGD's steps that it needs there (all other sizes are held "
        "out; that the share stays is assumed). Measured: "
        f"{len(crossings[0].runs[RECORDED]['sgd'])} seeds, arms in turns, CPU seconds, medians with bootstrap "
        "intervals; – is a target that half of the seeds do not reach within the limit.\n"
    )
    rows = []
    for each in crossings:
        for batch in SIZES:
            time, told = each.measured(batch, "seconds")[0], each.predicted(batch)
            often = "/".join(word.partition("=")[2] for word in OFTEN[each.method].split())
            rows.append([
                often, f"{batch}{' *given*' if batch in GIVEN else ''}", said(each.ratios[batch]),
                said(each.ratio(batch)), f"{each.step(batch):.2f}", said(each.measured(batch, "steps")[0]),
                said(told), said(time), pays(told), pays(time),
            ])  # fmt: skip
    yield table(["often", "batch", "K-FAC ÷ SGD step recorded", "predicted", "measured", "steps ÷ SGD's",
                 "time ÷ SGD's predicted", "measured", "pays, predicted", "measured"], rows) + "\n"  # fmt: skip
    for each in crossings:
        found, seen = each.predicted_from, each.measured_from
        held = [batch for batch in SIZES if batch not in GIVEN]
        answers = [(pays(each.predicted(batch)), pays(each.measured(batch, "seconds")[0])) for batch in held]
        clear = [(a, b) for a, b in answers if "cannot tell" not in (a, b)]
        yield (
            f"{OFTEN[each.method]}: K-FAC needs {said(each.share)} of SGD's steps at {given}, and is predicted to pay "
            f"from a batch of {from_on(found)} on; measured, from {from_on(seen)} on, "
            f"{'within' if found.holds(seen.value) else 'outside'} the predicted range. Of {len(held)} held-out batch "
            f"sizes, prediction and measurement both say yes or no at {len(clear)} and agree at "
            f"{sum(a == b for a, b in clear)}.\n"
        )
