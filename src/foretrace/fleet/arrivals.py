"""When jobs come: the profile of a week, and how a rate wanders around it, learnt from times and drawn again."""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt
from typing import Annotated

import msgspec
import numpy as np

from foretrace.fleet.workload import Float64

WEEK, DAY = 168, 24  # hours
_MOST = 4.0  # largest variance of a factor with mean 1 that is believed; a tenant that is mostly away has more


@dataclass(frozen=True, slots=True, kw_only=True)
class Swing:
    """A log-normal factor with mean 1 by step: variance of its logarithm, part of a deviation kept after a step."""

    variance: Annotated[float, msgspec.Meta(ge=0, lt=10)]
    keeps: Annotated[float, msgspec.Meta(ge=0, lt=1)]


def week_profile(time: Float64, span_s: float) -> tuple[Float64, str]:
    """Return (168,) relative rate by hour of the week counted from time 0, mean 1, and what it rests on.

    A week where the log has two or more, else a day where it has two or more, else flat. Neighbouring hours are
    averaged with weights 1, 2, 1.
    """
    hours = int(span_s // 3600)
    for period, word in ((WEEK, "week"), (DAY, "day")):
        whole = hours // period
        if whole >= 2:
            inside = (time[time < whole * period * 3600] // 3600).astype(np.int64)
            counts = np.bincount(inside % period, minlength=period).astype(np.float64)
            smooth = (np.roll(counts, 1) + 2 * counts + np.roll(counts, -1)) / 4
            if smooth.sum() > 0:
                return np.tile(smooth / smooth.mean(), WEEK // period), word
    return np.ones(WEEK), "flat"


def burst_swing(time: Float64, size: Float64, profile: Float64, span_s: float) -> tuple[Swing, Swing]:
    """Return how the rate of bursts wanders by day, and by hour within the day, beyond the profile and chance.

    time, size: (bursts,) seconds and jobs of each. Moments of job counts: what their variance exceeds that of a
    compound Poisson process with the profile's rate is the variance of the factor; the covariance of neighbours, over
    it, is what a step keeps.
    """
    hours = max(int(span_s // 3600), 1)
    hour = (time // 3600).astype(np.int64).clip(0, hours - 1)
    counts = np.bincount(hour, size, minlength=hours).astype(np.float64)
    lumps = float((size**2).sum() / size.sum())  # variance of a compound Poisson count over its mean
    expected = profile[np.arange(hours) % len(profile)]
    expected = expected * counts.sum() / max(expected.sum(), 1e-12)
    whole = hours // DAY
    if whole < 4:
        return Swing(variance=0.0, keeps=0.0), _swing(counts, expected, lumps)
    per_day = counts[: whole * DAY].reshape(whole, DAY).sum(1)
    by_profile = expected[: whole * DAY].reshape(whole, DAY).sum(1)
    # The hour's factor is what is left when each day has the number of jobs that it had.
    scale = np.repeat(per_day / np.maximum(by_profile, 1e-12), DAY)
    return _swing(per_day, by_profile, lumps), _swing(counts[: whole * DAY], expected[: whole * DAY] * scale, lumps)


def _swing(counts: Float64, expected: Float64, lumps: float) -> Swing:
    if len(counts) < 4 or counts.sum() < 10:
        return Swing(variance=0.0, keeps=0.0)
    off = counts - expected
    variance = float((off**2 - lumps * expected).sum() / max((expected**2).sum(), 1e-12))
    neighbours = float((off[1:] * off[:-1]).sum() / max((expected[1:] * expected[:-1]).sum(), 1e-12))
    if variance <= 0:
        return Swing(variance=0.0, keeps=0.0)
    of_log = log(1 + min(variance, _MOST))
    keeps = log(1 + min(max(neighbours, 0.0), _MOST)) / of_log
    return Swing(variance=round(of_log, 6), keeps=round(min(keeps, 0.98), 6))


def factors(rng: np.random.Generator, swing: Swing, steps: int) -> Float64:
    """Return (steps,) factors with mean 1, from the stationary distribution on."""
    if not swing.variance:
        return np.ones(steps)
    noise = rng.standard_normal(steps) * sqrt(1 - swing.keeps**2)
    state = float(rng.standard_normal())
    walk = np.empty(steps)
    for i, each in enumerate(noise.tolist()):
        state = swing.keeps * state + each
        walk[i] = state
    return np.exp(sqrt(swing.variance) * walk - swing.variance / 2)
