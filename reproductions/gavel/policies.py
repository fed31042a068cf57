"""Gavel's policies: how much of each type every job, or pair of jobs, is due.

Source of the mechanism: stanford-futuredata/gavel, scheduler/policies, revision c4fa400 (OSDI'20, section 4; AlloX:
EuroSys'20). `_perf` policies know how fast a job is on each type; those without treat types as equal, by 1 step per
second (max_min_fairness) or by the speed on a v100. Types are in order of the alphabet everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet import allocations
from foretrace.fleet.workload import Float64
from reproductions.gavel.allocations import max_min_shared
from reproductions.gavel.centre import inside_centre, level_centre, total_centre
from reproductions.gavel.rounds import Allotter, Entry, Key, State

Allotment = Mapping[Key, Sequence[float]]


class _Policy:
    pairs = False
    in_order = False

    def __init__(self, knows_speeds: bool) -> None:
        self.knows_speeds = knows_speeds


def _rates(jobs: list[Entry]) -> Float64:
    return np.array([[each[0] for each in entry.rates] for entry in jobs], np.float64)


def _scales(jobs: list[Entry]) -> Float64:
    return np.array([entry.scale for entry in jobs], np.float64)


def _remaining(jobs: list[Entry]) -> Float64:
    return np.array([entry.members[0].remaining for entry in jobs], np.float64)


def _waited(jobs: list[Entry], now: float) -> Float64:
    return np.array([now - entry.members[0].arrival for entry in jobs], np.float64)


def _as_on_v100(rates: Float64, state: State) -> Float64:
    if "v100" not in state.types:
        raise ForetraceError("this policy goes by speeds on a v100, and the cluster has none; take its _perf form.")
    return np.repeat(rates[:, [state.types.index("v100")]], len(state.types), axis=1)


def _given(jobs: list[Entry], x: Float64) -> Allotment:
    return {entry.key: row for entry, row in zip(jobs, x.tolist(), strict=True)}


class _AlloX(_Policy):
    """Jobs that hold a GPU keep it; the rest are matched to free GPUs by `allocations.allox`."""

    def __init__(self, alpha: float) -> None:
        super().__init__(knows_speeds=True)
        self.alpha = alpha
        self.kept: dict[Key, int] = {}  # the type that a job holds

    def allot(self, state: State) -> Allotment:
        jobs = state.jobs
        self.kept = {entry.key: self.kept[entry.key] for entry in jobs if entry.key in self.kept}
        new = [entry for entry in jobs if entry.key not in self.kept]
        held = list(self.kept.values())
        free = [count - held.count(kind) for kind, count in enumerate(state.workers)]
        if new:
            kinds = allocations.allox(_rates(new), _remaining(new), _waited(new, state.now), free, alpha=self.alpha)
            self.kept |= {entry.key: kind for entry, kind in zip(new, kinds.tolist(), strict=True) if kind >= 0}
        everywhere = range(len(state.types))
        return {entry.key: [float(self.kept.get(entry.key) == kind) for kind in everywhere] for entry in jobs}


class _Isolated(_Policy):
    def allot(self, state: State) -> Allotment:
        return _given(state.jobs, allocations.isolated(_scales(state.jobs), state.workers))


class _MaxMin(_Policy):
    """Least attained service: the smallest progress as large as it can be."""

    def allot(self, state: State) -> Allotment:
        jobs = state.jobs
        if not jobs:
            return {}
        rates = _rates(jobs) if self.knows_speeds else np.ones((len(jobs), len(state.types)))
        weights = [entry.members[0].weight for entry in jobs]
        scale = _scales(jobs)
        return _given(
            jobs, level_centre(allocations.normalised(rates, scale, state.workers, weights), scale, state.workers)
        )


class _MaxMinPacked(_Policy):
    """The same where jobs may share GPUs. Solved by HiGHS, so a vertex is taken where the original takes the middle."""

    pairs = True

    def __init__(self) -> None:
        super().__init__(knows_speeds=True)

    def allot(self, state: State) -> Allotment:
        jobs = state.jobs
        if not jobs:
            return {}
        place = {entry.key: i for i, entry in enumerate(jobs)}
        entries = list(state.entries.values())
        members = [[*(place[job.at] for job in entry.members), -1][:2] for entry in entries]
        rates = [[[*each, 0.0][:2] for each in entry.rates] for entry in entries]
        weights = [entry.members[0].weight for entry in jobs]
        return _given(entries, max_min_shared(members, rates, _scales(jobs), state.workers, weights))


class _Makespan(_Policy):
    """All jobs within a time that a search has found to within 5 % of the shortest."""

    def allot(self, state: State) -> Allotment:
        jobs = state.jobs
        if not jobs:
            return {}
        rates = _rates(jobs) if self.knows_speeds else _as_on_v100(_rates(jobs), state)
        scale, left = _scales(jobs), _remaining(jobs)
        _, shortest = allocations.makespan(rates, scale, state.workers, left)
        low, high = 100.0, 1e6
        top = high
        found = None
        while found is None:
            while 1.05 * low < high:
                tried = (low + high) / 2.0
                if tried >= shortest:
                    found = high = tried
                else:
                    low = tried
            low, high, top = top, top * 10.0, top * 10.0
        return _given(jobs, inside_centre(rates * found / left[:, None], scale, state.workers))


class _FinishTime(_Policy):
    """Finish-time fairness (Themis): the worst slowdown against a cluster of one's own as small as it can be."""

    def __init__(self, knows_speeds: bool) -> None:
        super().__init__(knows_speeds)
        self.before: dict[Key, tuple[float, float]] = {}  # steps that remained, progress in isolation, last time
        self.alone: dict[Key, float] = {}  # seconds that what was done since would have taken in isolation

    def allot(self, state: State) -> Allotment:
        jobs = state.jobs
        rates = _rates(jobs) if self.knows_speeds or not jobs else _as_on_v100(_rates(jobs), state)
        scale, left = _scales(jobs), _remaining(jobs)
        if not jobs:
            self.before = {}
            return {}
        own = (rates * allocations.isolated(scale, state.workers)).sum(axis=1)
        fair = np.zeros(len(jobs))
        for i, entry in enumerate(jobs):
            so_far = self.alone.get(entry.key, 0.0)
            if entry.key in self.before:
                steps, progress = self.before[entry.key]
                so_far += (steps - left[i]) / progress
            self.alone[entry.key] = so_far
            fair[i] = so_far + left[i] / own[i]
        self.before = {entry.key: (float(left[i]), float(own[i])) for i, entry in enumerate(jobs)}
        past = _waited(jobs, state.now)
        _, rho = allocations.finish_time_fairness(rates, scale, state.workers, elapsed=past, remaining=left, alone=fair)
        wanted = left / (rho * fair - past)
        return _given(jobs, level_centre(rates / wanted[:, None], scale, state.workers))


class _Throughput(_Policy):
    """The largest sum of steps per second."""

    def allot(self, state: State) -> Allotment:
        jobs = state.jobs
        return _given(jobs, total_centre(_rates(jobs), _scales(jobs), state.workers)) if jobs else {}


class _Fifo(_Policy):
    """One type for each job in order of arrival, kept to its end (without speeds) or chosen anew each time (with)."""

    def __init__(self, knows_speeds: bool, seed: int) -> None:
        super().__init__(knows_speeds)
        self.in_order = True
        self.draws = random.Random(seed)
        self.on: dict[int, int] = {}
        self.queue: list[int] = []  # who is left; the one at whom the last pass stopped is not among them

    def allot(self, state: State) -> Allotment:
        jobs = {entry.members[0].at: entry for entry in state.jobs}
        free = list(state.workers)
        if self.knows_speeds:
            self.on = {}
        queue = sorted(at for at in jobs if at not in self.on)
        for at in sorted(self.on):
            kind = self.on[at]
            if at in jobs:
                free[kind] -= jobs[at].scale
                continue
            # who is first in the queue takes the place of a job that is done
            if queue and jobs[queue[0]].scale <= free[kind] and jobs[queue[0]].rates[kind][0] > 0.0:
                free[kind] -= jobs[queue[0]].scale
                self.on[queue.pop(0)] = kind
            del self.on[at]
        kinds = [kind for kind, count in enumerate(free) if count > 0]
        while queue and kinds:
            job = jobs[queue.pop(0)]
            fits = [i for i, kind in enumerate(kinds) if free[kind] >= job.scale]
            if not fits:
                break
            if self.knows_speeds:
                pick = max(range(len(fits)), key=lambda i: (job.rates[kinds[fits[i]]][0], -i))
                kind = kinds[fits[pick]]
            else:
                # the original draws a type, but then takes the last of all that have a GPU free, enough or not, and
                # strikes out the drawn one when that becomes full
                pick, kind = self.draws.randrange(len(fits)), kinds[-1]
            if job.rates[kind][0] > 0.0:
                self.on[job.members[0].at] = kind
                free[kind] -= job.scale
                if free[kind] == 0:
                    kinds.pop(fits[pick])
        self.queue = queue
        return {at: [float(self.on.get(at) == kind) for kind in range(len(free))] for at in jobs}


class _FifoPacked(_Fifo):
    """As with speeds; who is left over shares the GPUs of the job with which both together gain most, 1.5 at least."""

    pairs = True

    def __init__(self) -> None:
        super().__init__(knows_speeds=True, seed=0)

    def allot(self, state: State) -> Allotment:
        super().allot(state)
        on: dict[Key, int] = dict(self.on.items())
        for at in self.queue:
            gain, best = 1.5, None
            for other, kind in on.items():
                key = (min(at, other), max(at, other)) if isinstance(other, int) else None
                if key is None or key not in state.entries:
                    continue  # shared already, or another number of GPUs
                speeds = zip(key, state.entries[key].rates[kind], strict=True)
                together = sum(rate / state.entries[job].rates[kind][0] for job, rate in speeds if rate > 0.0)
                if together > gain:
                    gain, best = together, (other, key)
            if best is None:
                break
            on[best[1]] = on.pop(best[0])
        return {key: [float(on.get(key) == kind) for kind in range(len(state.workers))] for key in state.entries}


class _Gandiva(_Policy):
    """Equal parts of everything; where jobs ask for more than there is, random pairs share GPUs while that pays."""

    pairs = True

    def __init__(self, seed: int) -> None:
        super().__init__(knows_speeds=True)
        self.draws = random.Random(seed)
        self.partner: dict[int, int | None] = {}

    def allot(self, state: State) -> Allotment:
        jobs = {entry.members[0].at: entry for entry in state.jobs}
        drop: set[int | None] = set()
        for at, other in self.partner.items():
            if at not in jobs or (other is not None and other not in jobs) or self._gain(state, at, other) < 1.0:
                drop |= {at, other}
        self.partner = {at: other for at, other in self.partner.items() if at not in drop}
        run: set[Key] = set(jobs)
        if sum(entry.scale for entry in jobs.values()) > sum(state.workers):
            single = [at for at in sorted(jobs) if at not in self.partner]
            for _ in range(len(single)):
                if len(single) < 2:
                    break
                one, two = self.draws.sample(single, 2)
                if jobs[one].scale == jobs[two].scale:
                    single.remove(one)
                    single.remove(two)
                    self.partner[one], self.partner[two] = two, one
            self.partner |= dict.fromkeys(single)
            run = {at if other is None else (min(at, other), max(at, other)) for at, other in self.partner.items()}
        given: dict[Key, list[float]] = {}
        for key, entry in state.entries.items():
            if key not in run:
                given[key] = [0.0] * len(state.workers)
                continue
            part = [count / len(run) / entry.scale for count in state.workers]
            over = max(sum(part), 1.0)
            given[key] = [each / over for each in part]
        return given

    @staticmethod
    def _gain(state: State, at: int, other: int | None) -> float:
        """Speeds together over speeds alone, added up over types and both jobs; 0 where one stands still."""
        if other is None:
            return 0.0
        gain = 0.0
        key = (min(at, other), max(at, other))
        for kind, both in enumerate(state.entries[key].rates):
            for job, rate in zip(key, both, strict=True):
                if rate <= 0.0:
                    return 0.0
                gain += rate / state.entries[job].rates[kind][0]
        return gain


ALLOTTERS: dict[str, Callable[[int, float], Allotter]] = {
    "allox": lambda seed, alpha: _AlloX(alpha),
    "fifo": lambda seed, alpha: _Fifo(False, seed),
    "fifo_packed": lambda seed, alpha: _FifoPacked(),
    "fifo_perf": lambda seed, alpha: _Fifo(True, seed),
    "finish_time_fairness": lambda seed, alpha: _FinishTime(False),
    "finish_time_fairness_perf": lambda seed, alpha: _FinishTime(True),
    "gandiva": lambda seed, alpha: _Gandiva(seed),
    "isolated": lambda seed, alpha: _Isolated(False),
    "max_min_fairness": lambda seed, alpha: _MaxMin(False),
    "max_min_fairness_packed": lambda seed, alpha: _MaxMinPacked(),
    "max_min_fairness_perf": lambda seed, alpha: _MaxMin(True),
    "max_sum_throughput_perf": lambda seed, alpha: _Throughput(True),
    "min_total_duration": lambda seed, alpha: _Makespan(False),
    "min_total_duration_perf": lambda seed, alpha: _Makespan(True),
}
