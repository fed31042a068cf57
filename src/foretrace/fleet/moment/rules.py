"""The rules of `Policy` in plain Python: order, who has to make room, who may be tried, where a job may go.

What is written here is what the compiled loops of `engine` compute, bit for bit; tests hold one against the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from math import ceil, sqrt

from foretrace.fleet import reasons, setup
from foretrace.fleet.moment.state import RUNNING, JobState, SteppingState
from foretrace.fleet.policy_rules import Wait
from foretrace.fleet.result import Cause
from foretrace.fleet.setup import NEVER
from foretrace.fleet.speeds import ROUNDING

Key = tuple[float, float, int]


class Rules:
    """The rules and what they remember: timers over the whole run, a reservation within one decision."""

    def __init__(self, state: SteppingState) -> None:
        self.state, self.policy = state, state.policy
        self.timers = Timers(state)
        self.places = state.policy.overrides("place")  # elsewhere
        index = self.policy.index or {}
        self.services = [float(each) * 1e9 for each in index.get("service_gpu_s", ())]
        self.values = [float(each) for each in index.get("value", ())]
        self.final = setup.alike(state.policy, state.cluster) and not state.sharing
        self.begin()

    def begin(self) -> None:
        """Begin a new decision: nobody is blocked, nothing is reserved, nothing is known not to fit."""
        self.blocked: JobState | None = None
        self.shadow: int | None = None  # when the first in line can start by stated run times
        self.reserved = 0  # on which kind of GPU
        self.tried = 0  # the widest level that the last job was tried at
        self.spare = 0.0  # GPUs that are free even then
        self.hopeless: dict[int, tuple[Cause, int]] = {}  # classes of jobs that do not fit now: why, how wide tried
        self.line = Counter[int]()  # waiting jobs by class

    # ---- order
    def key(self, job: JobState) -> Key:
        """Return what a job is served by, smallest first."""
        rule, now = self.policy.order_rule, self.state.now
        first, second = 0.0, 0.0
        if rule == "key":
            first = job.key
        elif rule == "remaining":
            first = job.remaining
        elif rule == "service":
            first = job.gpu_ns
        elif rule == "queues":
            first = float(job.band)
            if self.values and job.band < len(self.state.thresholds):
                second = -self._index(job.gpu_ns)
        elif rule == "network":
            # W / (R / ideal): the share of the work that is done over the share of the ideal time that it took
            first = (1.0 - job.remaining / job.work) / (job.held / job.work) if job.held > 0 else 0.0
            second = float(job.last)
        elif rule == "last":
            first = float(job.last)
        else:
            first = -(now - job.submit + job.remaining) / job.work
        return first, second, job.at

    def _index(self, attained: float) -> float:
        """Return value at an attained service: that of the last grid point not above it."""
        return self.values[max(bisect_right(self.services, attained) - 1, 0)]

    def ordered(self, waiting: Iterable[int]) -> list[int]:
        """Return the waiting jobs, first served first."""
        jobs = self.state.jobs
        line = [at for _, _, at in sorted(self.key(jobs[at]) for at in waiting)]
        if self.policy.order_rule == "fairness":
            # the worst treated part first, largest first among them; then all others
            front = ceil(round(self.policy.share * 1e6) * len(line) / 1e6)
            line[:front] = sorted(line[:front], key=lambda at: -jobs[at].wanted)
        return line

    def outranked(self) -> list[int]:
        """Return running jobs that have to make room: by kind of GPU, those outside of the first that fit by number."""
        state, kinds, losers = self.state, len(self.state.free), list[int]()
        fit = kinds == 1 and state.wanting <= state.free_gpus
        if self.policy.preempt_rule != "always" or fit or not state.running:
            return []
        for at in state.running:
            state.settle(state.jobs[at])
        line = [self.key(state.jobs[at]) for at in state.waiting]
        for kind in range(kinds):
            running = [at for at in state.running if state.kind_of[state.jobs[at].gpus[0]] == kind]
            left = state.free[kind] + sum(state.claim(state.jobs[at], len(state.jobs[at].gpus)) for at in running)
            rivals = [each for each in line if self._competes(state.jobs[each[2]], kind)]
            for _, _, at in sorted(rivals + [self.key(state.jobs[at]) for at in running]):
                job = state.jobs[at]
                runs = job.status == RUNNING
                wanted = state.claim(job, len(job.gpus) if runs else job.wanted)
                if wanted <= left:
                    left -= wanted
                elif runs:
                    losers.append(at)
                elif self.policy.admit_rule == "block":
                    left = 0
        return losers

    def _competes(self, job: JobState, kind: int) -> bool:
        """Return whether a waiting job may use this kind of GPU and fits on no other one by number."""
        may, free = self.state.allowed[job.demand], self.state.free
        return may[kind] and not any(
            may[other] and free[other] >= job.wanted for other in range(len(free)) if other != kind
        )

    # ---- admission
    def admitted(self, job: JobState) -> Wait | None:
        """Return none if the job may be tried now, else why not."""
        state, rule = self.state, self.policy.admit_rule
        if self.blocked is not None and rule == "block":
            return Wait(Cause.BEHIND)
        if not self.places and not state.sharing and job.wanted > state.free_gpus:
            return self._wait(job, Cause.FULL, value=state.free_gpus)
        if job.demand in self.hopeless:
            cause, widest = self.hopeless[job.demand]
            return self._wait(job, cause, widest=widest if cause == Cause.SCATTERED else 0, value=state.free_gpus)
        if self.blocked is None or rule == "skip":
            return None
        if self.shadow is None:
            self._reserve(self.blocked)
        return Wait(Cause.RESERVED) if self._delays(job) and job.wanted > self.spare else None

    def line_up(self) -> None:
        """Prepare a decision before the first waiting job is looked at."""
        if self.final:
            self.line = Counter(self.state.jobs[at].demand for at in self.state.waiting)

    def nobody_fits(self) -> bool:
        """Return whether no class of waiting jobs can still find room in this decision."""
        jobs = self.state.facts.demands.tolist()
        return self.final and not any(
            count > 0 and demand not in self.hopeless and self.state.jobs[jobs[demand]].wanted <= self.state.free_gpus
            for demand, count in self.line.items()
        )

    def refused(self, job: JobState, why: Wait) -> None:
        """Note that a job was tried and does not fit: others like it do not, either."""
        if self.final and why.cause in (Cause.SCATTERED, Cause.TYPE, Cause.FULL):
            self.hopeless.setdefault(job.demand, (Cause(why.cause), self.tried))

    def started(self, job: JobState) -> None:
        """Note that a job was placed, and what it takes of a reservation while another one is blocked."""
        self.line[job.demand] -= 1
        if self._delays(job) and self.state.kind_of[job.gpus[0]] == self.reserved:
            self.spare -= job.wanted

    def _delays(self, job: JobState) -> bool:
        """Return whether a job may take GPUs of the reserved kind, and would still run when they are needed."""
        late = self.shadow is not None and self.state.now + job.estimate > float(self.shadow)
        return late and bool(self.state.allowed[job.demand][self.reserved])

    def _reserve(self, blocked: JobState) -> None:
        """Find when by stated run times a kind of GPU has enough for a job, which kind, and how many are left then."""
        state = self.state
        self.shadow, self.spare = NEVER, 0.0
        ends = []
        for at in state.running:
            job = state.jobs[at]
            ends.append((max(job.stretch + job.stretch_dead + job.estimate / job.rate, float(state.now)), at))
        ends.sort()
        for kind in (kind for kind, may in enumerate(state.allowed[blocked.demand]) if may):
            free: float = state.free[kind]
            for end, at in ends:
                if end >= self.shadow:
                    break
                job = state.jobs[at]
                if state.kind_of[job.gpus[0]] == kind:
                    free += state.claim(job, len(job.gpus))
                    if free >= blocked.wanted:
                        self.shadow, self.spare, self.reserved = ceil(end), free - blocked.wanted, kind
                        break

    # ---- placement
    def placed(self, job: JobState) -> list[int] | Wait:
        """Return GPUs for as many as the job requests, or why it has to wait."""
        state = self.state
        if job.share < 1:
            shared = self._beside(job)
            if shared:
                return shared
        kinds = [kind for kind, may in enumerate(state.allowed[job.demand]) if may]
        if not any(state.free[kind] >= job.wanted for kind in kinds):
            other = state.free_gpus >= job.wanted and len(state.free) > 1
            return self._wait(job, Cause.TYPE if other else Cause.FULL, value=state.free_gpus)
        widest, opens = self.timers.widest(job)
        self.tried = widest
        level, gpus = self.find(kinds, range(widest + 1), job.wanted)
        if job.reclaims and job.level <= widest and (not gpus or job.level <= level) and self._still_free(job):
            return job.gpus
        if gpus:
            return gpus
        if opens < NEVER:
            return self._wait(job, Cause.TIMER, widest=widest, value=opens, until=opens)
        return self._wait(job, Cause.SCATTERED, widest=widest, value=state.free_gpus)

    def _wait(self, job: JobState, cause: Cause, *, widest: int = 0, value: int = 0, until: int | None = None) -> Wait:
        words = ""
        if self.state.is_watched(job):
            words = reasons.waiting(
                cause, job.wanted, self.state.cluster, widest=widest, value=value, now=self.state.now, last=job.last
            )
        return Wait(cause, until, words)

    def _still_free(self, claimant: JobState) -> bool:
        return all(self.state.has_room(gpu, claimant) for gpu in claimant.gpus)

    def _beside(self, job: JobState) -> list[int]:
        """Return GPUs that are shared and have room for a part of one, the fullest first; [] where there are too few.

        A job of several GPUs takes the tightest unit that has them.
        """
        state = self.state
        room = [
            (-state.load(gpu), gpu)
            for gpu, owners in enumerate(state.owners)
            if owners and not state.broken[gpu] and state.allowed[job.demand][state.kind_of[gpu]]
            and state.load(gpu) + job.share <= 1 + ROUNDING
        ]  # fmt: skip
        if job.wanted == 1:
            return [min(room)[1]] if room else []
        widest, _ = self.timers.widest(job)
        for level in range(widest + 1):
            groups: dict[tuple[int, int], list[tuple[float, int]]] = {}
            for each in sorted(room):
                groups.setdefault((state.unit_at[level][each[1]], state.kind_of[each[1]]), []).append(each)
            fitting = [(len(group), key) for key, group in groups.items() if len(group) >= job.wanted]
            if fitting:
                return [gpu for _, gpu in groups[min(fitting)[1]][: job.wanted]]
        return []

    def find(self, kinds: Iterable[int], levels: Iterable[int], wanted: int) -> tuple[int, list[int]]:
        """Return so many free GPUs of one kind in one unit of the first level that has them; −1, [] where none has."""
        state = self.state
        for level, kind in product(levels, kinds):
            able = state.open & state.of_kind[kind]
            unit = state.cluster.tightest(able, level, wanted)
            if unit >= 0:
                return level, state.cluster.packed(able, level, unit, wanted)
        return -1, []


@dataclass(slots=True)
class Window:
    """Waits in leases that led to a unit of one level, for jobs of one size."""

    samples: deque[tuple[int, float]] = field(default_factory=deque)
    sum: float = 0.0
    squares: float = 0.0


class Timers:
    """How long a job has to wait before it may spread wider; with place_rule "auto", tuned from the past (Dally)."""

    def __init__(self, state: SteppingState) -> None:
        self.state = state
        waits, self.machine = setup.waits_ns(state.policy, state.cluster)
        self.waits = waits.tolist()
        self.least, self.most = (each.tolist() for each in setup.tuned_leases(state.policy, state.cluster))
        self.auto = state.policy.place_rule == "auto"
        self.windows: dict[tuple[int, int], Window] = {}

    def widest(self, job: JobState) -> tuple[int, int]:
        """Return the widest level that the job may spread over now, and when (ns) the next wider one opens."""
        state, widest, opens = self.state, self.machine, NEVER
        for level in range(self.machine + 1, state.levels):
            if job.wanted > state.capacity[job.demand][level - 1] or job.eager:
                widest = level
                continue
            patience = self.patience(job, level)
            if patience < NEVER:
                if state.now - job.last >= patience:
                    widest = level
                else:
                    opens = min(opens, job.last + patience)
        return widest, opens

    def patience(self, job: JobState, level: int) -> int:
        """Return how long (ns) before it may spread over a unit of this level."""
        if not self.auto:
            return int(self.waits[level])
        policy, lease = self.state.policy, self.state.lease
        window = self.windows.setdefault((job.size, level - 1), Window())
        oldest = self.state.now - lease * policy.history_leases
        while window.samples and window.samples[0][0] < oldest:
            _, leases = window.samples.popleft()
            window.sum -= leases
            window.squares -= leases * leases
        wait, n = 1.0, len(window.samples)
        if n:
            mean = window.sum / n
            wait = mean + 2 * sqrt(max(window.squares / n - mean * mean, 0.0))
        else:
            window.sum = window.squares = 0.0
        return int(min(self.most[level], max(self.least[level], float(ceil(wait)))) * lease)

    def remember(self, job: JobState, level: int) -> None:
        """Remember how many leases a job starved before a unit of this level took it (at least one)."""
        if not self.auto:
            return
        leases = float(self.state.now - job.last) / float(self.state.lease)
        if leases >= 1.0:
            window = self.windows.setdefault((job.size, max(level, self.machine)), Window())
            window.samples.append((self.state.now, leases))
            window.sum += leases
            window.squares += leases * leases
