"""Policies compared on the same jobs: repeated on jittered or partial workloads, paired, with bootstrap intervals.

One run says nothing about noise: moving every submission by up to a minute moves the makespan of 500 jobs by several
per cent. So each policy runs on the same repetitions of a workload, and what is judged is the ratio of their means,
resampled over repetitions in pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError
from foretrace.fleet import metrics
from foretrace.fleet.overtime import Only, chosen
from foretrace.fleet.result import FleetResult
from foretrace.fleet.workload import SECOND, Float64, Int64, Workload
from foretrace.simulate.noise import t_quantile

Run = Callable[[Workload], FleetResult]
LEVEL = 0.95
RESAMPLES = 4000
MOST_SEEDS = 10_000
FEW = 8  # below so many repetitions resampling them cannot reach the tails, and a t interval stands in
MORE_IS_BETTER = frozenset({"utilisation"})
FIGURES = (
    "mean_jct_s", "p50_jct_s", "p90_jct_s", "p99_jct_s", "mean_queue_s", "makespan_s", "utilisation", "comm_s",
    "mean_rho", "lost_gpu_h", "unfinished",
)  # fmt: skip


def figures(result: FleetResult, only: Only = None) -> dict[str, float]:
    """Return the figures that policies are compared by, of one run; nan where one is not known."""
    jct, queue = metrics.spread(result.jct_s[chosen(result, only)]), metrics.queueing(result, only)
    cover = metrics.coverage(result, only)
    return {
        "mean_jct_s": jct.mean,
        "p50_jct_s": jct.p50,
        "p90_jct_s": jct.p90,
        "p99_jct_s": jct.p99,
        "mean_queue_s": queue.of_finished.mean,
        "makespan_s": metrics.makespan_s(result, only),
        "utilisation": metrics.utilisation(result, only),
        "comm_s": metrics.communication(result, only).total_s,
        "mean_rho": metrics.spread(metrics.fairness(result)[chosen(result, only)]).mean,
        "lost_gpu_h": metrics.lost(result, only).gpu_h,
        "unfinished": float(cover.jobs - cover.finished),
    }


@dataclass(frozen=True, slots=True)
class ChangedFigure:
    """One figure before and after; `ratio` is after over before (None where before is 0 or unknown)."""

    name: str
    before: float | None
    after: float | None
    ratio: float | None


def changed_figures(before: FleetResult, after: FleetResult) -> tuple[ChangedFigure, ...]:
    """Return `figures` of two runs of the same jobs."""
    known, new = metrics.known, figures(after)
    return tuple(
        ChangedFigure(name, known(old), known(new[name]), known(new[name] / old) if old else None)
        for name, old in figures(before).items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanInterval:
    """A mean over repetitions with its bootstrap interval; low = high = None where one repetition says nothing."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """Mean of a policy over mean of the one it is compared with, on the same repetitions.

    verdict: "better", "worse", "within noise" (1 lies in the interval), "same" (equal in every repetition) or
    "unknown" (one repetition, or a figure that is not known or zero). Levels hold for one ratio each: of many
    ratios at 95 %, one in twenty leaves its interval by chance.
    """

    ratio: float
    low: float | None
    high: float | None
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of all policies. `best`: the policy with the best mean; `tied`: those that noise may put before it."""

    name: str
    estimates: Mapping[str, MeanInterval]
    against_baseline: Mapping[str, Contrast]
    best: str
    tied: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyComparison:
    """Policies on the same repetitions. samples: by policy and figure, (repetitions,); seeded, so repeatable."""

    policies: tuple[str, ...]
    baseline: str
    repetitions: int
    how: str  # what the repetitions are, for people
    level: float
    figures: Mapping[str, Figure]
    samples: Mapping[str, Mapping[str, Float64]]

    @property
    def rows(self) -> tuple[PolicyRow, ...]:
        """All figures by policy; the baseline is once itself."""
        itself = Contrast(ratio=1.0, low=1.0, high=1.0, verdict="baseline")
        return tuple(
            PolicyRow(
                policy,
                {
                    name: PolicyFigure.of(each.estimates[policy], each.against_baseline.get(policy, itself))
                    for name, each in self.figures.items()
                },
            )
            for policy in self.policies
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFigure:
    """One figure of one policy, and how it stands to the baseline on the same repetitions."""

    mean: float | None
    low: float | None
    high: float | None
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    verdict: str  # as of `Contrast`, or baseline

    @classmethod
    def of(cls, mean: MeanInterval, against: Contrast) -> PolicyFigure:
        """Return the figure; what is not known is None."""
        return cls(
            mean=metrics.known(mean.mean),
            low=mean.low,
            high=mean.high,
            ratio=metrics.known(against.ratio),
            ratio_low=against.low,
            ratio_high=against.high,
            verdict=against.verdict,
        )


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """One policy: its figures by name."""

    policy: str
    figures: dict[str, PolicyFigure]


@dataclass(frozen=True, slots=True)
class Best:
    """The policy with the best mean of a figure, and those that differ from it within noise."""

    figure: str
    best: str
    tied: tuple[str, ...]


def jitter(workload: Workload, seed: int, seconds: float = 60.0) -> Workload:
    """Return every submission later by 0 to `seconds`, uniform and independent; what was logged moves along.

    Deterministic for a seed. Raises ForetraceError for a negative time.
    """
    if not 0 <= seconds <= 1e9:
        raise ForetraceError(f"submissions cannot be moved by {seconds:g} s; give seconds from 0 to a billion.")
    by = np.random.default_rng([seed, 0x666C74]).integers(0, int(seconds * SECOND) + 1, len(workload))
    return _moved(workload, by)


def _moved(workload: Workload, by: Int64) -> Workload:
    """Return every submission and what was logged so many ns later; what was logged before time zero is not known."""
    logged = {
        key: np.where(getattr(workload, key) < 0, -1, np.maximum(getattr(workload, key) + by, -1))
        for key in ("logged_start_ns", "logged_end_ns")
    }
    return workload.with_columns(submit_ns=workload.submit_ns + by, **logged)


def subtraces(workload: Workload, count: int) -> tuple[Workload, ...]:
    """Return so many consecutive parts with equally many jobs (one more in the first ones), each from time zero.

    A part begins on an empty cluster, so its queues are shorter at first than in the whole. Raises ForetraceError
    where there are fewer jobs than parts.
    """
    if not 1 <= count <= len(workload):
        raise ForetraceError(f"{len(workload):,} jobs cannot be cut into {count} parts; ask for 1 to {len(workload)}.")
    found = []
    for i, at in enumerate(np.array_split(np.arange(len(workload)), count)):
        part = workload.take(at, name=f"{workload.name} part {i + 1} of {count}".strip())
        first = part.submit_ns[:1]
        found.append(replace(_moved(part, -first), epoch_s=part.epoch_s + int(first[0]) / SECOND))
    return tuple(found)


def jittered(workload: Workload, seeds: int, seconds: float = 60.0, *, seed: int = 0) -> tuple[Workload, ...]:
    """Return the workload under so many seeds, counted from `seed`; the workload itself where one is asked for."""
    if seeds < 1:
        raise ForetraceError(f"a comparison needs at least one run of each policy, not {seeds}; give `seeds=20`.")
    if seeds > MOST_SEEDS:
        raise ForetraceError(f"{seeds:,} runs of each policy are too many; {MOST_SEEDS:,} are enough for any interval.")
    return (workload,) if seeds == 1 else tuple(jitter(workload, seed + i, seconds) for i in range(seeds))


def repetitions(workload: Workload, seeds: int, jitter_s: float, parts: int) -> tuple[Sequence[Workload], str]:
    """Return the workloads that every policy plays, and what they are, for people: `parts` of it, else `jittered`."""
    if parts:
        return subtraces(workload, parts), f"{parts} parts of the log"
    how = f"submissions shifted by up to {jitter_s:g} s" if seeds > 1 else ""
    return jittered(workload, seeds, jitter_s), how


def compare(
    policies: Mapping[str, Run],
    workloads: Sequence[Workload],
    *,
    how: str = "",
    baseline: str | None = None,
    only: Collection[str] | None = None,
    level: float = LEVEL,
    seed: int = 0,
    seen: Callable[[str, int, FleetResult], None] | None = None,
) -> PolicyComparison:
    """Run every policy on every workload and judge the differences.

    policies: by name, what simulates a workload. workloads: repetitions, as of `jittered` or `subtraces`. baseline:
    the first policy where None. only: names of the jobs that are measured
    (positions change when submissions move). seen: is shown every result
    with its policy and repetition. To run elsewhere, take `figures` there and `judge` them here.
    """
    if not policies or not workloads:
        raise ForetraceError("a comparison needs at least one policy and one workload; name a policy.")

    samples: dict[str, dict[str, list[float]]] = {}
    only = None if only is None else frozenset(only)
    for policy, run in policies.items():
        for i, workload in enumerate(workloads):
            result = run(workload)
            if seen is not None:
                seen(policy, i, result)
            measured = None
            if only is not None:
                measured = np.fromiter((job in only for job in result.workload.job.tolist()), bool, len(workload))
            for name, value in figures(result, measured).items():
                samples.setdefault(policy, {}).setdefault(name, []).append(value)
    return judge(samples, how=how, baseline=baseline, level=level, seed=seed)


def judge(
    samples: Mapping[str, Mapping[str, npt.ArrayLike]],
    *,
    how: str = "",
    baseline: str | None = None,
    level: float = LEVEL,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> PolicyComparison:
    """Judge figures per policy and repetition, the same repetitions in the same order for every policy.

    Raises ForetraceError where the baseline is not among them or the repetitions differ in number.
    """
    taken = {
        policy: {name: np.asarray(values, np.float64) for name, values in rows.items()}
        for policy, rows in samples.items()
    }
    names = list(taken)
    base = names[0] if baseline is None else baseline
    if base not in taken:
        raise ForetraceError(f"there is no policy {base!r} to compare with; there are {', '.join(names)}.")
    lengths = {len(values) for rows in taken.values() for values in rows.values()}
    if len(lengths) != 1:
        raise ForetraceError("every policy must run on the same repetitions; some have more runs than others.")
    n = lengths.pop()
    draws = np.random.default_rng([seed, n]).integers(0, n, (resamples, n))  # one for all: paired by repetition
    tails = Tails.of(n, level)
    made = {}
    for name in taken[base]:
        columns = {policy: rows[name] for policy, rows in taken.items()}
        more = name in MORE_IS_BETTER
        known = {policy: float(values.mean()) for policy, values in columns.items() if not np.isnan(values).any()}
        best = (max if more else min)(known, key=lambda policy: known[policy]) if known else base
        tied = [
            policy
            for policy in names
            if policy != best and policy in known
            and contrast(columns[policy], columns[best], draws, tails, more=more).verdict not in ("worse", "better")
        ]  # fmt: skip
        made[name] = Figure(
            name=name,
            estimates={policy: estimate(values, draws, tails) for policy, values in columns.items()},
            against_baseline={
                policy: contrast(values, columns[base], draws, tails, more=more)
                for policy, values in columns.items()
                if policy != base
            },
            best=best,
            tied=tuple(tied),
        )
    return PolicyComparison(
        policies=tuple(names), baseline=base, repetitions=n, how=how, level=level, figures=made, samples=taken
    )


def estimate(values: Float64, draws: npt.NDArray[np.int64], tails: Tails) -> MeanInterval:
    """Return the mean of the repetitions; no interval from one of them or where one is not known."""
    low, high = _interval(values, np.ones(len(values)), draws, tails)
    return MeanInterval(mean=float(values.mean()), low=low, high=high)


def contrast(
    values: Float64, base: Float64, draws: npt.NDArray[np.int64], tails: Tails, *, more: bool = False
) -> Contrast:
    """Return the ratio of means with the interval over paired resamples; more: larger is better."""
    if np.array_equal(values, base):
        return Contrast(ratio=1.0, low=1.0, high=1.0, verdict="same")
    ratio = float(values.mean() / base.mean()) if base.mean() else float("nan")
    low, high = _interval(values, base, draws, tails)
    if low is None or high is None:
        return Contrast(ratio=ratio, low=None, high=None, verdict="unknown")
    verdict = "within noise" if low <= 1 <= high else "better" if (ratio > 1) == more else "worse"
    return Contrast(ratio=ratio, low=low, high=high, verdict=verdict)


def _interval(
    values: Float64, base: Float64, draws: npt.NDArray[np.int64], tails: Tails
) -> tuple[float, float] | tuple[None, None]:
    """Return the interval of the ratio of paired means; None from one repetition, or where one is not known or zero."""
    if len(values) < 2 or np.isnan(values).any() or np.isnan(base).any() or base.mean() == 0:
        return None, None
    if len(values) < FEW:  # the ratio of means, linearised
        ratio = float(values.mean() / base.mean())
        spread = float((values - ratio * base).std(ddof=1)) / abs(float(base.mean()))
        half = tails.t * spread / sqrt(len(values))
        return ratio - half, ratio + half
    below = base[draws].mean(axis=1)
    if not (below > 0).all():
        return None, None
    low, high = np.quantile(values[draws].mean(axis=1) / below, (tails.low, 1 - tails.low)).tolist()
    return low, high


@dataclass(frozen=True, slots=True)
class Tails:
    """t: quantile of Student's t for an interval of the level. low: quantile of the resampled means where it begins.

    The plain percentile interval is too narrow for few repetitions: by √((n−1)/n), and for using a normal in place of
    a t distribution. Both are made good in the quantile (Hesterberg 2015, "expanded percentile interval").
    """

    t: float
    low: float

    @classmethod
    def of(cls, n: int, level: float) -> Tails:
        """Return the tails for n repetitions."""
        if n < 2:
            return cls(float("inf"), 0.0)
        t = t_quantile(0.5 + level / 2, n - 1)
        return cls(t, NormalDist().cdf(-sqrt(n / (n - 1)) * t))
