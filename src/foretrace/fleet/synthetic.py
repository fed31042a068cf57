"""Workloads like a given one, of any length and load: `fit` a generator to a log, `generate` jobs from it.

Jobs fall into strata: the same tenant and the same kind (GPUs, model, type of GPU, ...). What is kept of the log:
- which strata there are, how many jobs each has, and their durations: the joint distribution of tenant, kind and
  duration is resampled within strata from smoothed quantiles of log durations, tails included;
- sweeps: jobs of a stratum that follow each other closely come as bursts with the sizes, gaps and likeness of
  durations that the log has;
- when bursts come: a rate profile over the week (or day), and per tenant a factor by day and one by hour that
  wander as much, and as slowly, as in the log.
Not kept: users, what happened to a job in the log, and how tenants react to queues or to each other.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from math import ceil, sqrt
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from foretrace import reading
from foretrace.errors import ForetraceError
from foretrace.files import write_bytes
from foretrace.fleet.arrivals import WEEK, Swing, burst_swing, factors, week_profile
from foretrace.fleet.cluster import MOST_GPUS
from foretrace.fleet.workload import SECOND, Float64, Int64, Origin, Workload, codes

VERSION = 1
BURST_S = 300.0  # jobs of a stratum closer than this, and than a fifth of their mean distance, belong together
KNOTS = 129  # quantiles kept of a distribution; all values where there are fewer
_LARGEST_LOG = 46.0  # e^46 is 1e20
MOST_JOBS, MOST_H = 20_000_000, 100 * 8766  # what is generated at once: so many jobs, and a hundred years
_Gpus = Annotated[int, msgspec.Meta(gt=0, le=MOST_GPUS)]
_Rate = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]
FEWEST = 8  # jobs of a stratum below which durations come from all tenants' jobs of that kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What jobs of a stratum have in common."""

    gpus: _Gpus
    min_gpus: _Gpus
    max_gpus: _Gpus
    model: str
    gpu_type: str
    priority: float
    share: Annotated[float, msgspec.Meta(gt=0, le=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stratum:
    """Jobs of one tenant and kind.

    bursts_per_h: how often a burst comes. sizes, counts: how many bursts had so many jobs. alike: correlation of the
    normal scores of durations within a burst. log_s: quantiles of log seconds at `levels(pool)`; pool: jobs behind
    them. smooth: standard deviation added to a drawn logarithm. iterations_per_s, batch: medians, None unknown.
    """

    kind: Annotated[int, msgspec.Meta(ge=0)]
    jobs: int
    bursts_per_h: Annotated[float, msgspec.Meta(gt=0, lt=1e9)]
    sizes: tuple[Annotated[int, msgspec.Meta(gt=0, le=MOST_JOBS)], ...]
    counts: tuple[Annotated[int, msgspec.Meta(gt=0, lt=2**53)], ...]
    alike: Annotated[float, msgspec.Meta(ge=0, lt=1)]
    pool: int
    log_s: Annotated[tuple[float, ...], msgspec.Meta(min_length=1)]
    smooth: Annotated[float, msgspec.Meta(ge=0, lt=10)]
    iterations_per_s: _Rate | None
    batch: _Rate | None

    @property
    def jobs_per_h(self) -> float:
        """At load 1."""
        return self.bursts_per_h * sum(a * b for a, b in zip(self.sizes, self.counts, strict=True)) / sum(self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantFit:
    """One tenant: how its rate wanders from day to day and hour to hour, and its strata."""

    name: str
    day: Swing
    hour: Swing
    strata: Annotated[tuple[Stratum, ...], msgspec.Meta(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """What a log was fitted to; small, names tenants and models but no jobs. profile: 168 factors by hour of the week,
    their mean 1, from the hour of `epoch_s`. gap_logs: quantiles of log(1 + seconds) between jobs of a burst.
    estimate_logs: quantiles of log(stated / real run time), empty where no user states one.
    """

    version: int
    name: str
    jobs: int  # of the log
    left_out: Annotated[int, msgspec.Meta(ge=0)]  # of them without a known duration, not fitted
    span_s: Annotated[float, msgspec.Meta(gt=0, lt=1e12)]
    epoch_s: Annotated[float, msgspec.Meta(gt=-1e12, lt=1e12)]
    profile: Annotated[
        tuple[Annotated[float, msgspec.Meta(ge=0, le=WEEK)], ...], msgspec.Meta(min_length=WEEK, max_length=WEEK)
    ]
    profile_of: str  # week, day, or flat where the log is too short
    gap_pool: int
    gap_logs: tuple[float, ...]
    estimate_pool: int
    estimate_logs: tuple[float, ...]
    kinds: tuple[Kind, ...]
    tenants: Annotated[tuple[TenantFit, ...], msgspec.Meta(min_length=1)]

    @property
    def jobs_per_day(self) -> float:
        """At load 1."""
        return (self.jobs - self.left_out) / self.span_s * 86400

    def save(self, path: Path) -> None:
        """Save it as JSON."""
        write_bytes(path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    def generate(
        self, *, jobs: int | None = None, days: float | None = None, load: float = 1.0, seed: int = 0
    ) -> Workload:
        """Generate so many jobs, or as many as come in so many days; `load` times as many per day as in the log.

        The same arguments give the same jobs. Raises ForetraceError unless exactly one of jobs and days is given.
        """
        if (jobs is None) == (days is None):
            raise ForetraceError("say how much to generate: either a number of jobs or of days.")
        if not 0 < load < float("inf"):
            raise ForetraceError(f"a load of {load:g} cannot be generated; 1 is that of the log, 2 twice as many jobs.")
        if (jobs is not None and jobs < 1) or (days is not None and not days > 0):
            raise ForetraceError("generate at least one job, or a number of days above zero.")
        wanted = jobs if jobs is not None else (days or 0) * self.jobs_per_day * load
        span_h = 1.1 * wanted / (self.jobs_per_day * load) * 24 + 24 if jobs is not None else (days or 0) * 24
        hours = ceil(min(span_h, 2 * MOST_H))
        while True:
            drawn = hours * load * sum(each.jobs_per_h for one in self.tenants for each in one.strata)
            if max(wanted, drawn / 4) > MOST_JOBS or hours > MOST_H:
                raise ForetraceError(
                    f"{wanted:.3g} jobs over {span_h / 24:.3g} days are too many; generate up to {MOST_JOBS:,} jobs "
                    f"and {MOST_H // 24:,} days."
                )
            rng = np.random.default_rng([seed, 0x73796E])
            time, tenant, stratum, burst = self._arrivals(rng, hours, load)
            if jobs is None or len(time) >= jobs:
                break
            hours *= 2  # the wandering rate stayed low
        keep = jobs if jobs is not None else int(np.searchsorted(time, (days or 0) * 86400))
        if not keep:
            raise ForetraceError("no job comes in so short a time; generate more days, or a number of jobs.")
        return self._jobs(rng, time[:keep], tenant[:keep], stratum[:keep], burst[:keep], load)

    def _arrivals(self, rng: np.random.Generator, hours: int, load: float) -> tuple[Float64, Int64, Int64, Int64]:
        """Return seconds, tenant, stratum (numbered through) and burst of every job, by time."""
        profile = np.asarray(self.profile)[np.arange(hours) % len(self.profile)]
        gaps = np.asarray(self.gap_logs)
        parts, first, bursts = [], 0, 0
        for number, tenant in enumerate(self.tenants):
            day = np.repeat(factors(rng, tenant.day, ceil(hours / 24)), 24)[:hours]
            wanders = day * factors(rng, tenant.hour, hours)
            rates = np.array([each.bursts_per_h for each in tenant.strata])
            count = rng.poisson(rates.sum() * load * profile * wanders)
            total = int(count.sum())
            begin = (np.repeat(np.arange(hours), count) + rng.random(total)) * 3600
            which = rng.choice(len(rates), total, p=rates / rates.sum())
            size = np.ones(total, np.int64)
            for i, each in enumerate(tenant.strata):
                mine = which == i
                weights = np.asarray(each.counts) / sum(each.counts)
                size[mine] = rng.choice(np.asarray(each.sizes), int(mine.sum()), p=weights)
            job_burst = np.repeat(np.arange(total), size)
            later = np.ones(len(job_burst), bool)
            later[np.cumsum(size) - size] = False  # the first of each burst
            steps = np.zeros(len(job_burst))
            if self.gap_logs:
                steps[later] = np.expm1(np.interp(rng.random(int(later.sum())), levels(self.gap_pool), gaps))
            upto = np.cumsum(steps)
            since = upto - np.repeat(upto[np.cumsum(size) - size], size)
            parts.append(
                (begin[job_burst] + since, np.full(len(since), number), first + which[job_burst], bursts + job_burst)
            )
            first, bursts = first + len(rates), bursts + total
        time, tenants, stratum, burst = (np.concatenate([part[i] for part in parts]) for i in range(4))
        order = np.argsort(time, kind="stable")
        order = order[time[order] < hours * 3600.0]
        return time[order], tenants[order], stratum[order], burst[order]

    def _jobs(
        self, rng: np.random.Generator, time: Float64, tenant: Int64, stratum: Int64, burst: Int64, load: float
    ) -> Workload:
        strata = [each for one in self.tenants for each in one.strata]
        n = len(time)
        alike = np.array([each.alike for each in strata])[stratum]
        _, place = np.unique(burst, return_inverse=True)
        common = rng.standard_normal(int(place.max(initial=-1)) + 1)[place]
        level = _normal_cdf(np.sqrt(alike) * common + np.sqrt(1 - alike) * rng.standard_normal(n))
        logs = rng.standard_normal(n) * np.array([each.smooth for each in strata])[stratum]
        order = np.argsort(stratum, kind="stable")
        bounds = np.searchsorted(stratum[order], np.arange(len(strata) + 1))
        for i, each in enumerate(strata):
            mine = order[bounds[i] : bounds[i + 1]]
            values = np.asarray(each.log_s)
            middle = values.mean()
            # what smoothing adds to the variance is taken off again, or else long jobs would get longer still
            narrower = float(values.std() / np.hypot(values.std(), each.smooth)) if each.smooth else 1.0
            drawn = np.interp(level[mine], levels(each.pool), values) + logs[mine]
            logs[mine] = middle + (drawn - middle) * narrower
        work = np.exp(logs)
        kind = np.array([each.kind for each in strata])[stratum]
        columns = {
            field.name: np.array([getattr(each, field.name) for each in self.kinds])[kind] for field in fields(Kind)
        }
        estimate = np.full(n, np.nan)
        if self.estimate_logs:
            ratio = np.interp(rng.random(n), levels(self.estimate_pool), np.asarray(self.estimate_logs))
            estimate = work * np.exp(ratio)
        speed, batch = (
            np.array([np.nan if value is None else value for value in values])[stratum]
            for values in ([each.iterations_per_s for each in strata], [each.batch for each in strata])
        )
        return Workload.of(
            submit_s=time,
            work_s=work,
            tenant=np.array([each.name for each in self.tenants], object)[tenant],
            iterations=work * speed,
            batch=batch,
            estimate_s=estimate,
            name=f"like {self.name}" if self.name else "generated",
            epoch_s=self.epoch_s,
            origin=Origin(format="generated", rows=n, notes=(f"generated after {self.jobs:,} jobs, load {load:g}",)),
            **columns,
        )


def fit(workload: Workload) -> Generator:
    """Return a generator after a log. Raises ForetraceError where it has no two jobs with known durations and times."""
    known = np.isfinite(workload.work_s)
    time = workload.submit_ns[known] / SECOND
    if known.sum() < 2 or time[-1] <= time[0]:
        raise ForetraceError(
            f"{workload.name or 'the workload'} has too few jobs with known duration to learn from; give a longer log."
        )
    load = workload.take(known)
    shift = time[0]
    time = time - shift
    span = max(float(time[-1]) * len(time) / (len(time) - 1), 3600.0)  # up to where the next job would come
    kinds, kind = _kinds(load)
    who, names = codes(load.tenant.tolist())
    logs = np.log(load.work_s)
    key = who * len(kinds) + kind
    profile, profile_of = week_profile(time, span)
    order = np.lexsort((time, key))
    edges = np.flatnonzero(np.diff(key[order], prepend=-1, append=-1))
    by_kind = np.argsort(kind, kind="stable")
    kind_edges = np.searchsorted(kind[by_kind], np.arange(len(kinds) + 1))
    gaps, found = [], {i: [] for i in range(len(names))}  # type: tuple[list[Float64], dict[int, list[Stratum]]]
    starts: dict[int, list[tuple[Float64, Float64]]] = {i: [] for i in range(len(names))}
    for a, b in pairwise(edges.tolist()):
        rows = order[a:b]
        gap = np.diff(time[rows])
        new = np.append(True, gap > min(BURST_S, 0.2 * span / len(rows)))
        gaps.append(gap[~new[1:]])
        size = np.diff(np.append(np.flatnonzero(new), len(rows)))
        sizes, counts = np.unique(size, return_counts=True)
        pool = rows if len(rows) >= FEWEST else by_kind[kind_edges[kind[rows[0]]] : kind_edges[kind[rows[0]] + 1]]
        values = np.sort(logs[pool])
        speed = load.iterations[rows] / load.work_s[rows]
        at = int(who[rows[0]])
        starts[at].append((time[rows][new], size.astype(np.float64)))
        found[at].append(
            Stratum(
                kind=int(kind[rows[0]]), jobs=len(rows), bursts_per_h=float(new.sum()) / span * 3600,
                sizes=tuple(sizes.tolist()), counts=tuple(counts.tolist()), alike=_alike(logs[rows], new),
                pool=len(values), log_s=knots(values), smooth=_bandwidth(values), iterations_per_s=_median(speed),
                batch=_median(load.batch[rows]),
            )
        )  # fmt: skip
    ratio = np.log(np.where(load.estimate_s > 0, load.estimate_s, np.nan) / load.work_s)
    ratio, inner = np.sort(ratio[np.isfinite(ratio)]), np.sort(np.log1p(np.concatenate(gaps)))
    tenants = []
    for i, name in enumerate(names):
        begin, many = (np.concatenate([each[k] for each in starts[i]]) for k in (0, 1))
        day, hour = burst_swing(begin, many, profile, span)
        tenants.append(TenantFit(name=name, day=day, hour=hour, strata=tuple(found[i])))
    return Generator(
        version=VERSION, name=workload.name, jobs=len(workload), left_out=int((~known).sum()), span_s=span,
        epoch_s=workload.epoch_s + float(shift), profile=tuple(profile.tolist()), profile_of=profile_of,
        gap_pool=len(inner), gap_logs=knots(inner), estimate_pool=len(ratio), estimate_logs=knots(ratio),
        kinds=tuple(kinds), tenants=tuple(tenants),
    )  # fmt: skip


def load_generator(path: Path) -> Generator:
    """Return what `save` wrote. Raises ForetraceError where the file is not that."""
    made = reading.read_struct(path, Generator, "generator of workloads", "make one from a log")
    if made.version != VERSION:
        raise ForetraceError(
            f"{path} is a generator of version {made.version}, this is version {VERSION}; fit it again."
        )
    wrong = _unsound(made)
    if wrong:
        raise ForetraceError(f"{path} is a damaged generator ({wrong}); make it again with foretrace fleet fit.")
    return made


def _unsound(made: Generator) -> str:
    """Return the first part of a generator that `fit` cannot have written; empty where all is well."""
    strata = [each for one in made.tenants for each in one.strata]
    tests = {
        "jobs": made.left_out < made.jobs,
        "profile": any(made.profile),
        "gap_logs": _quantiles(made.gap_logs, made.gap_pool, 0.0),
        "estimate_logs": _quantiles(made.estimate_logs, made.estimate_pool, -_LARGEST_LOG),
        "kinds": all(each.min_gpus <= each.max_gpus for each in made.kinds),
        "kind": all(each.kind < len(made.kinds) for each in strata),
        "counts": all(each.sizes and len(each.counts) == len(each.sizes) for each in strata),
        "log_s": all(_quantiles(each.log_s, each.pool, -_LARGEST_LOG) for each in strata),
    }
    return next((f"{name} cannot be" for name, fine in tests.items() if not fine), "")


def _quantiles(logs: tuple[float, ...], pool: int, low: float) -> bool:
    """Return whether these can be quantiles of that many logarithms."""
    kept = len(levels(pool)) if 0 <= pool < 2**53 else -1
    return len(logs) == kept and all(low <= each <= _LARGEST_LOG for each in logs) and list(logs) == sorted(logs)


def levels(pool: int) -> Float64:
    """Return probabilities at which quantiles of so many sorted values are kept: denser towards both tails."""
    if pool <= KNOTS:
        return (np.arange(pool) + 0.5) / max(pool, 1)
    tail = np.geomspace(0.5 / pool, 0.02, KNOTS // 5)
    body = np.linspace(0.02, 0.98, KNOTS - 2 * len(tail) + 2)[1:-1]
    return np.concatenate([tail, body, 1 - tail[::-1]])


def knots(values: Float64) -> tuple[float, ...]:
    """Return quantiles of sorted values at `levels`; the smallest and the largest are among them."""
    middle = (np.arange(len(values)) + 0.5) / max(len(values), 1)
    return tuple(np.interp(levels(len(values)), middle, values).round(6).tolist()) if len(values) else ()


def _kinds(load: Workload) -> tuple[list[Kind], Int64]:
    names = [field.name for field in fields(Kind)]
    code, table = codes(zip(*(getattr(load, name).tolist() for name in names), strict=True))
    return [msgspec.convert(dict(zip(names, row, strict=True)), Kind) for row in table], code


def _alike(logs: Float64, new: npt.NDArray[np.bool_]) -> float:
    """Return the correlation of normal scores of neighbours in a burst, by their ranks; 0 from fewer than 10."""
    pairs = np.flatnonzero(~new[1:])
    if len(pairs) < 10:
        return 0.0
    rank = np.empty(len(logs))
    rank[np.argsort(logs, kind="stable")] = (np.arange(len(logs)) + 0.5) / len(logs) - 0.5
    first, second = rank[pairs], rank[pairs + 1]
    scale = sqrt(float((first**2).mean() * (second**2).mean()))
    spearman = float((first * second).mean()) / scale if scale > 0 else 0.0
    return float(np.clip(2 * np.sin(np.pi * spearman / 6), 0.0, 0.99))


def _bandwidth(values: Float64) -> float:
    """Return Silverman's, of sorted logarithms; 0 where quantiles stand for many jobs, which smooths by itself."""
    n = len(values)
    if n > KNOTS or n < 2:
        return 0.0
    low, high = np.quantile(values, (0.25, 0.75)).tolist()
    wide = min(float(values.std()), (high - low) / 1.34)
    return round(float(0.9 * wide * n**-0.2), 6)


def _median(values: Float64) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else None


def _normal_cdf(z: Float64) -> Float64:
    """Return the cumulative normal distribution within 7.5e-8 (Abramowitz & Stegun 26.2.17), without scipy."""
    t = 1 / (1 + 0.2316419 * np.abs(z))
    poly = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    upper = np.exp(-0.5 * z * z) / sqrt(2 * np.pi) * poly
    return np.where(z > 0, 1 - upper, upper)
