"""ADSP: workers of unlike speed that never wait, and commit equally often (Hu, Wang and Wu, AAAI 2020).

Between two commits a worker trains as many steps as fit, so that all workers have made as many commits at any time. How
many commits a period has is searched while training runs: a period each with more and more commits, until the loss
falls no faster.

The loss of a period is fitted by 1 / (a t + b) + c; the paper rewards 1 / (the time until a common loss l is
reached from the period's beginning). Periods begin at ever lower losses, so the later ones would always win; here the
reward is the slope at a common loss, a (l - c)^2 with a common c, which is larger exactly where a is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import ClassVar

import numpy as np

from foretrace.training.workers.policy import Commit, Pace, SyncPolicy

_FLOORS = np.linspace(0.0, 0.95, 20)  # c over the least loss


@dataclass(frozen=True, kw_only=True)
class Adsp(SyncPolicy):
    """Nobody waits; all commit equally often, as often as a search finds best (algorithms 1 and 2)."""

    name: ClassVar[str] = "adsp"
    lag: ClassVar[float] = inf
    knob: ClassVar[str] = "commits"
    commits: float = 0  # of a worker in a period; 0: searched
    period_s: float = 10.0
    epoch: int = 60  # periods from one search to the next

    def __post_init__(self) -> None:
        self.need("commits", 0, 1e6)
        self.need("period_s", 1e-6, 1e9)
        self.need("epoch", 1, 1_000_000)

    def pace(self, workers: int) -> Pace:
        return AdspPace(self, workers)


class AdspPace(Pace):
    """Commits are due on one line of time, the same for all; a worker trains until its next one is."""

    def __init__(self, policy: Adsp, workers: int) -> None:
        self.policy = policy
        self.made = [0] * workers
        self.step_s, self.exchange_s = [0.0] * workers, [0.0] * workers
        self.rate = policy.commits or 1.0  # commits of a period
        self.since_s, self.base = 0.0, 0  # from when, and from how many commits on, the rate holds
        self.tried: dict[float, float] = {}  # reward by rate, of this search
        self.searching = not policy.commits
        self.next_s = policy.period_s
        self.seen: list[tuple[float, float, int]] = []  # time in this period, loss, steps
        self.history: list[tuple[float, float]] = [(0.0, self.rate)]

    def steps(self, worker: int, now_s: float) -> int:
        if not self.policy.commits and now_s >= self.next_s:
            self._turn(now_s)
        step_s = self.step_s[worker]
        if not step_s:
            return 1  # which shows how long a step takes
        due_s = self.since_s + (self.made[worker] + 1 - self.base) * self.policy.period_s / self.rate
        return max(round((due_s - now_s - self.exchange_s[worker]) / step_s), 1)

    def saw(self, commit: Commit, now_s: float) -> None:
        self.made[commit.worker] += 1
        self.step_s[commit.worker] = commit.compute_s / commit.steps
        self.exchange_s[commit.worker] = commit.exchange_s
        if isfinite(commit.loss):
            self.seen.append((now_s - self.since_s, commit.loss, commit.steps))

    def _turn(self, now_s: float) -> None:
        """End a period of the search, or begin a search."""
        policy = self.policy
        if self.searching:
            self.tried[self.rate] = reward(self.seen)
            best = max(self.tried, key=lambda each: self.tried[each])
            worse = self.rate != best
            rate = best if worse else self.rate + 1
            self.searching = not worse
            self.next_s = now_s + policy.period_s * (policy.epoch if worse else 1)
        else:
            self.tried, self.searching, rate = {}, True, 1.0
            self.next_s = now_s + policy.period_s
        self.rate, self.since_s, self.base = rate, now_s, max(self.made)
        self.seen.clear()
        self.history.append((now_s, rate))


def reward(seen: Sequence[tuple[float, float, int]]) -> float:
    """Return how fast a loss falls: a of the best fit 1 / (a t + b) + c to (time, loss, weight); 0 where it does not
    fall.
    """
    if len(seen) < 3:
        return 0.0
    times, losses, weights = (np.array(column, dtype=np.float64) for column in zip(*seen, strict=True))
    best, found = inf, 0.0
    for floor in _FLOORS * max(float(losses.min()), 0.0):
        inverse = 1 / np.maximum(losses - floor, 1e-9)
        # An error of the loss counts as much wherever it is: d(1 / x) = -dx / x^2.
        slope, start = np.polyfit(times, inverse, 1, w=np.sqrt(weights) / inverse**2)
        fitted = slope * times + start
        if slope <= 0 or np.any(fitted <= 0):
            continue
        error = float(np.average((losses - floor - 1 / fitted) ** 2, weights=weights))
        if error < best:
            best, found = error, float(slope)
    return found
