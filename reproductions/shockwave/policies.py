"""What share of the time each job should run: the policies of the Shockwave study on GPUs of one kind.

Sources: uw-mad-dash/shockwave 8a44f4a, scheduler/policies and the factory in scheduler/utils.py (MIT); fleet-lessons.md
5.1. Where the published linear programs leave the answer open, the choice made here is stated with the policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from foretrace.errors import MissingExtraError
from foretrace.fleet.workload import Float64, Int64

STEPS = 100  # of a bisection; beyond the precision of a double
NEWTON = 200  # steps at most; some twenty are usual


@dataclass(frozen=True, slots=True, eq=False)
class Active:
    """m jobs that are there, in order of submission.

    job: (m,) int64 position in the workload; gpus: (m,) float64; elapsed_s: (m,) since submission; steps: (m,) left at
    the present batch size, as if it stayed; speed: (m,) steps per second at the present batch size. total: GPUs.
    """

    job: Int64
    gpus: Float64
    elapsed_s: Float64
    steps: Float64
    speed: Float64
    total: int

    @property
    def left_s(self) -> Float64:
        """(m,) seconds of running that are left if the batch size stays."""
        return self.steps / self.speed


class Policy(Protocol):
    """Keeps what it needs to remember between calls."""

    def share(self, active: Active) -> Float64:
        """(m,) fraction of the time, in [0, 1], that each job should run."""
        ...


def _largest(low: float, high: float, fits: Callable[[float], bool]) -> float:
    """The largest value in [low, high] that fits, where everything below one that fits does too."""
    if fits(high):
        return high
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class MaxMin:
    """Least attained service: the smallest share x GPUs is as large as can be, at most the GPUs of the smallest job.

    Where that job's share ends at 1 the others may have more, how much is open: see `settled`.
    """

    def __init__(self, leftover: str = "centre") -> None:
        self.leftover = leftover

    def share(self, active: Active) -> Float64:
        """See Policy."""
        level = min(active.total / len(active.job), float(active.gpus.min()))
        return settled(level / active.gpus, active.gpus, active.total, self.leftover)


class Equal:
    """Everybody the same share, GPUs over jobs; or the same GPU time, which divides it by the GPUs of the job."""

    def __init__(self, *, per_gpu: bool) -> None:
        self.per_gpu = per_gpu

    def share(self, active: Active) -> Float64:
        """See Policy."""
        even = active.total / len(active.job)
        return np.minimum(1.0, even / active.gpus if self.per_gpu else np.full(len(active.job), even))


class FinishTime:
    """Themis as the study runs it: the largest (elapsed + left / X) / (time on an equal part) is as small as can be.

    The time on an equal part adds up what was done at the part of its day and what is left at today's. Steps count as
    they did when they were done, so that a batch twice as large, which halves the steps left, counts half of them as
    done: so the published code. GPUs that the smallest ratio leaves over are given out as `settled` says.
    """

    def __init__(self, leftover: str = "centre") -> None:
        self.leftover = leftover
        self.alone: dict[int, float] = {}  # seconds on an equal part, for what is done
        self.before: dict[int, tuple[float, float]] = {}  # steps left and steps per second on an equal part, last time

    def share(self, active: Active) -> Float64:
        """See Policy."""
        part = np.minimum(1.0, active.total / (len(active.job) * active.gpus))
        rate = active.speed * part
        for i, job in enumerate(active.job.tolist()):
            steps, speed = self.before.get(job, (active.steps[i], 1.0))
            self.alone[job] = self.alone.get(job, 0.0) + float(steps - active.steps[i]) / speed
        self.before = {job: (float(active.steps[i]), float(rate[i])) for i, job in enumerate(active.job.tolist())}
        even = np.array([self.alone[job] for job in active.job.tolist()]) + active.steps / rate
        left = active.left_s

        def shares(ratio: float) -> Float64:
            spare = np.maximum(ratio * even - active.elapsed_s, left)
            return left / spare

        best = float(((active.elapsed_s + left) / even).max())
        if active.gpus @ shares(best) > active.total:
            high = 2 * best
            while active.gpus @ shares(high) > active.total:
                high *= 2
            low = best
            for _ in range(STEPS):
                middle = (low + high) / 2
                low, high = (low, middle) if active.gpus @ shares(middle) <= active.total else (middle, high)
            best = high
        return settled(shares(best), active.gpus, active.total, self.leftover, squared=True)


class AlloX:
    """Assignment of the oldest waiting jobs to free workers and places in line, smallest sum of completion times.

    Only the oldest max(alpha x waiting, free workers) take part; the first in line on each worker gets X = 1 / GPUs.
    X = 1 is kept to completion, so that jobs of several GPUs are assigned again and again; alpha = 0.2 is what the
    study's factory sets. Raises MissingExtraError without scipy, whose assignment decides ties here as there.
    """

    def __init__(self, alpha: float = 0.2) -> None:
        self.alpha = alpha
        self.given: dict[int, float] = {}

    def share(self, active: Active) -> Float64:
        """See Policy."""
        jobs = active.job.tolist()
        waiting = np.array([i for i, job in enumerate(jobs) if self.given.get(job) != 1.0], np.int64)
        workers = active.total - (len(jobs) - len(waiting))
        order = waiting[np.argsort(-active.elapsed_s[waiting], kind="stable")]
        order = order[: max(int(self.alpha * len(waiting)), workers)]
        self.given = {job: self.given.get(job, 0.0) for job in jobs}
        for i in _first_in_line(active.left_s[order], active.elapsed_s[order], workers).tolist():
            at = int(order[i])
            self.given[jobs[at]] = 1.0 / float(active.gpus[at])
        return np.array([self.given[job] for job in jobs])


def _first_in_line(left_s: Float64, waited_s: Float64, workers: int) -> Int64:
    """Positions of the jobs that run first on their worker; with no more jobs than workers, all of them."""
    m = len(left_s)
    if m <= workers:
        return np.arange(m)
    if workers == 0:
        return np.zeros(0, np.int64)
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        raise MissingExtraError("the policy allox needs scipy: pip install 'foretrace[fleet]'.") from None
    # Column k * workers + w: place k (counted from the end of the line) on worker w.
    place = np.repeat(np.arange(1, m + 1), workers)
    rows, columns = linear_sum_assignment(left_s[:, None] * place[None, :] + waited_s[:, None])
    last: dict[int, tuple[int, int]] = {}
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        worker, back = column % workers, column // workers
        if worker not in last or back > last[worker][0]:
            last[worker] = (back, row)
    return np.array(sorted(row for _, row in last.values()), np.int64)


class MaxSum:
    """The largest sum of steps per second: whole shares by steps per second and GPU; ties share what is left evenly."""

    def share(self, active: Active) -> Float64:
        """See Policy."""
        worth = active.speed / active.gpus
        found, left = np.zeros(len(worth)), float(active.total)
        for each in np.unique(-np.round(worth, 9)):
            alike = np.flatnonzero(-np.round(worth, 9) == each)
            found[alike] = min(1.0, left / float(active.gpus[alike].sum()))
            left -= float(active.gpus[alike] @ found[alike])
            if left <= 1e-9:
                break
        return found


class MinTotal:
    """OSSP: the shortest time in which all jobs present can end, to 5 %, then any shares that keep it: see `settled`.

    The published program bisects that time from 100 to 1,000,000 s and asks for any point that keeps it.
    """

    def __init__(self, leftover: str = "centre") -> None:
        self.leftover = leftover

    def share(self, active: Active) -> Float64:
        """See Policy."""
        need = active.left_s
        low, high, found = 100.0, 1_000_000.0, float("nan")
        last = high
        while not found > 0:
            while 1.05 * low < high:
                middle = (low + high) / 2
                least = need / middle
                if least.max() <= 1 and active.gpus @ least <= active.total:
                    found = high = middle
                else:
                    low = middle
            low, high, last = last, last * 10, last * 10
        return settled(need / found, active.gpus, active.total, self.leftover)


def settled(least: Float64, gpus: Float64, total: float, leftover: str, *, squared: bool = False) -> Float64:
    """(m,) shares where a program asks for no more than x >= least, x <= 1, gpus . x <= total.

    centre: the analytic centre of what is allowed, where an interior-point solver goes, and the study's programs are
    given to such (ECOS; Gurobi's barrier for finish_time_fairness). On random programs of this kind that those two
    solved it is off by 0.03 to 0.1 on average, raising all by one factor by 0.07 to 0.3. `squared`: least came
    from elapsed + left / x <= ..., whose cone counts the distance twice and the sign of x not at all.
    raise: all by one factor at most to 1 (fleet-lessons.md 5.1).
    """
    least = np.clip(least, 0.0, 1.0)
    if leftover == "raise":
        top = float(1 / least.min())
        factor = _largest(1.0, top, lambda f: float(gpus @ np.minimum(1.0, f * least)) <= total)
        return np.minimum(1.0, factor * least)
    return centre(least, gpus, total, sign=0.0 if squared else 1.0, floor=2.0 if squared else 1.0)


def centre(least: Float64, gpus: Float64, total: float, *, sign: float = 1.0, floor: float = 1.0) -> Float64:
    """Analytic centre of {x : x >= 0, x >= least, x <= 1, gpus . x <= total}; (m,) float64.

    The minimum of -(sign log x + floor log(x - least) + log(1 - x)) summed - log(total - gpus . x), by damped Newton
    steps, which stay inside and arrive whatever the start (the function is self-concordant). Where nothing is left
    to give, `least` itself.
    """
    found = least.copy()
    open_ = np.flatnonzero(least < 1 - 1e-9)
    low, width = least[open_], gpus[open_]
    room = total - float(gpus @ least)
    if room <= 1e-9 * total or not len(open_):
        return found
    x = low + (1 - low) * 0.5 * min(1.0, room / float(width @ (1 - low)))
    room += float(width @ low)
    for _ in range(NEWTON):
        free = room - float(width @ x)
        slope = -sign / x - floor / (x - low) + 1 / (1 - x) + width / free
        bend = sign / x**2 + floor / (x - low) ** 2 + 1 / (1 - x) ** 2
        across = width / bend
        move = -slope / bend
        move -= across * float(width @ move) / (free**2 + float(width @ across))
        size = math.sqrt(max(-float(slope @ move), 0.0))
        x = x + move / (1 + size if size > 0.25 else 1.0)
        if size < 1e-10:
            break
    found[open_] = x
    return found


def make(name: str, alpha: float, leftover: str) -> Policy:
    """A fresh policy by the study's name."""
    makers: dict[str, Callable[[], Policy]] = {
        "allox": lambda: AlloX(alpha),
        "finish_time_fairness": lambda: FinishTime(leftover),
        "max_min_fairness": lambda: MaxMin(leftover),
        "max_sum_throughput_perf": MaxSum,
        "min_total_duration": lambda: MinTotal(leftover),
        "gandiva_fair": lambda: Equal(per_gpu=False),
        "isolated": lambda: Equal(per_gpu=True),
        "isolated_plus": lambda: Equal(per_gpu=False),
    }
    return makers[name]()


#: Other names: those of the study's figures, and variants that differ on several kinds of GPU only.
ALIASES: Mapping[str, str] = {
    "themis": "finish_time_fairness", "gavel": "max_min_fairness", "ossp": "min_total_duration",
    "mst": "max_sum_throughput_perf", "max_sum_throughput": "max_sum_throughput_perf",
    "gandiva-fair": "gandiva_fair", "finish_time_fairness_perf": "finish_time_fairness",
    "max_min_fairness_perf": "max_min_fairness", "min_total_duration_perf": "min_total_duration",
}  # fmt: skip
