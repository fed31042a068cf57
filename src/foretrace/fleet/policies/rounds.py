"""Policies that give out all GPUs again at fixed times: what Gavel, AlloX, Pollux and Sia have in common.

A subclass says who gets how many GPUs of which kind (`choose`); here is when that happens, where the GPUs lie, and what
the others are told. A job that is given what it holds keeps it, so that it pays no restart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from foretrace.arrays import Mask
from foretrace.errors import ForetraceError
from foretrace.fleet.policy import Policy, Wait
from foretrace.fleet.result import Cause
from foretrace.fleet.speeds import ROUNDING
from foretrace.fleet.speeds.closed_form import ConstantSpeeds
from foretrace.fleet.workload import SECOND, Float64, Int64, Workload, nanoseconds

if TYPE_CHECKING:
    from foretrace.fleet.stepping import View

_EVERY_SIZE = 16  # up to so many GPUs each number is tried for an elastic job, above it whole nodes


class Given(NamedTuple):
    """What a job is to have until the next round."""

    job: int
    kind: int  # position in the cluster's `types`
    gpus: int
    moves: bool = False  # to GPUs that lie closer together, if there are any


class Board:
    """GPUs to be given out: room (GPUs,) is the part of each that is left, 0 where it is broken."""

    def __init__(self, table: RoundTable, room: Float64) -> None:
        self.table, self.room = table, room
        self.kind = table.cluster.gpu_type
        self.quota = {tenant: float(most) for tenant, most in (table.cluster.quotas or {}).items()}

    def workers(self) -> Int64:
        """Return (kinds,) GPUs that are wholly free."""
        return np.bincount(self.kind[self.room >= 1 - ROUNDING], minlength=len(self.table.cluster.types))

    def by_kind(self) -> Float64:
        """Return (kinds,) GPUs that are left, parts of them counted as such."""
        return np.array([self.room[self.kind == kind].sum() for kind in range(len(self.table.cluster.types))])

    def allows(self, job: int, gpus: int) -> bool:
        """Return whether the quota of the job's tenant allows it so many."""
        tenant = str(self.table.workload.tenant[job])
        return gpus * self.table.share(job) <= self.quota.get(tenant, np.inf) + ROUNDING

    def fits(self, job: int, gpus: Sequence[int]) -> bool:
        """Return whether the job can have these."""
        enough = self.room[list(gpus)] >= self.table.share(job) - ROUNDING
        return bool(enough.all()) and self.allows(job, len(gpus))

    def take(self, job: int, gpus: Sequence[int]) -> None:
        """Give the job these GPUs."""
        self.room[list(gpus)] -= self.table.share(job)
        self.count(job, len(gpus))

    def count(self, job: int, gpus: int) -> None:
        """Count so many GPUs against the quota of the job's tenant."""
        tenant = str(self.table.workload.tenant[job])
        if tenant in self.quota:
            self.quota[tenant] -= gpus * self.table.share(job)

    def find(self, given: Given, *, strict: bool) -> list[int]:
        """Return GPUs in the tightest unit that has enough, of equal ones the fullest; with `strict` in none that is
        wider than the job needs; [] where there are too few. A part of a GPU goes beside others if it can.
        """
        share = self.table.share(given.job)
        if not self.allows(given.job, given.gpus):
            return []
        able = (self.kind == given.kind) & (self.room >= share - ROUNDING)
        if share < 1:
            begun = self._together(able & (self.room < 1 - ROUNDING), given, strict=strict)
            if begun:
                return begun
        return self._together(able, given, strict=strict)

    def _together(self, able: Mask, given: Given, *, strict: bool) -> list[int]:
        cluster = self.table.cluster
        for level, most in enumerate(self.table.capacity[given.kind].tolist()):
            if most >= given.gpus:
                unit = cluster.tightest(able, level, given.gpus)
                if unit >= 0:
                    return cluster.packed(able, level, unit, given.gpus)
                if strict:
                    break
        return []


class RoundTable:
    """What does not change while a workload is played: sizes of units, kinds that jobs may use, how fast they are."""

    def __init__(self, view: View) -> None:
        self.workload, self.cluster = view.workload, view.cluster
        self.capacity = self.cluster.largest()
        self._kinds: dict[int, list[int]] = {}
        self._rigid: dict[int, int] = {}
        self._options: dict[int, dict[tuple[int, int], float]] = {}
        self._speed: dict[tuple[int, int, int], float | ForetraceError] = {}

    def share(self, job: int) -> float:
        """Return the part of each of its GPUs that a job needs."""
        return float(self.workload.share[job])

    def limits(self, job: int) -> tuple[int, int]:
        """Return fewest and most GPUs of a job."""
        work = self.workload
        return int(min(work.min_gpus[job], work.gpus[job])), int(max(work.max_gpus[job], work.gpus[job]))

    def kinds(self, job: int) -> list[int]:
        """Return kinds of GPU that a job may use and that can hold it."""
        if job not in self._kinds:
            fewest, _ = self.limits(job)
            may = self.cluster.usable(str(self.workload.gpu_type[job]))
            self._kinds[job] = [kind for kind in np.flatnonzero(may).tolist() if self.capacity[kind, -1] >= fewest]
        return self._kinds[job]

    def rigid(self, job: int) -> int:
        """Return the GPUs of a rigid job: what it requests, or fewer where cluster or quota never give it so many."""
        if job not in self._rigid:
            most = max(int(self.capacity[kind, -1]) for kind in self.kinds(job))
            quota = (self.cluster.quotas or {}).get(str(self.workload.tenant[job]), most)
            asked = min(int(self.workload.gpus[job]), most, int(quota / self.share(job) + ROUNDING))
            self._rigid[job] = max(asked, self.limits(job)[0])
        return self._rigid[job]

    def sizes(self, job: int, kind: int) -> list[int]:
        """Return numbers of GPUs of a kind that are worth a try, ascending."""
        fewest, most = self.limits(job)
        most = min(most, int(self.capacity[kind, -1]))
        if self.share(job) < 1:  # a part of a GPU for each of its workers, no choice
            return [count for count in (int(self.workload.gpus[job]),) if count <= most]
        node = int(self.capacity[kind, 0])
        asked = int(self.workload.gpus[job])
        return [
            count
            for count in range(fewest, most + 1)
            if count <= _EVERY_SIZE or count % node == 0 or count in (fewest, asked, most)
        ]

    def speed(self, view: View, job: int, kind: int, gpus: int) -> float:
        """Return progress of a job on so many GPUs of a kind in the tightest unit that can hold them.

        0 where the model of speed does not know that or says that it does not run.
        """
        key = job, kind, gpus
        if key not in self._speed:
            whole = Board(self, np.ones(self.cluster.gpus))
            whole.quota = {}
            where = whole.find(Given(job, kind, gpus), strict=True)
            try:
                self._speed[key] = view.speed_of(job, where).progress if where else 0.0
            except ForetraceError as error:
                self._speed[key] = error
        found = self._speed[key]
        return 0.0 if isinstance(found, ForetraceError) else found

    def options(self, view: View, job: int) -> dict[tuple[int, int], float]:
        """Return progress of a job by (kind, GPUs), for all that are worth a try and at which it runs.

        Raises ForetraceError where there is none.
        """
        if job not in self._options:
            if isinstance(view.speeds, ConstantSpeeds) and len(set(self.limits(job))) > 1:
                raise ForetraceError(
                    f"job {self.workload.job[job]!r} may run on several numbers of GPUs, and constant speeds say that "
                    "it is equally fast on all; give a model of speed that knows them, such as goodput=FOLDER."
                )
            found = {
                (kind, size): self.speed(view, job, kind, size)
                for kind in self.kinds(job)
                for size in self.sizes(job, kind)
            }
            self._options[job] = {key: speed for key, speed in found.items() if speed > 0}
            if not self._options[job]:
                raise self.refused(job)
        return self._options[job]

    def held(self, view: View, job: int) -> tuple[tuple[int, int], float] | None:
        """Return what a running job has, (kind, GPUs), and its progress where it lies; None for one that waits."""
        if view.status(job) != "running":
            return None
        gpus = view.gpus_of(job)
        return (int(self.cluster.gpu_type[gpus[0]]), len(gpus)), view.speed_of(job, gpus).progress

    def refused(self, job: int) -> ForetraceError:
        """Return why a job runs nowhere, in the model's own words."""
        for (at, _, _), found in self._speed.items():
            if at == job and isinstance(found, ForetraceError):
                return found
        return ForetraceError(f"no kind of GPU of {self.cluster.name!r} can run job {self.workload.job[job]!r}.")


def worth_of_change(view: View, job: int, restart_s: float) -> float:
    """Return the part of its speed that a job keeps if moved: (age − restarts · restart_s) / (age + restart_s) > 0.

    Who was stopped often for its age is left alone (Pollux, section 4.1; Sia has the same).
    """
    age = (view.now_ns - int(view.workload.submit_ns[job])) / SECOND
    return max(age - max(view.starts(job) - 1, 0) * restart_s, 0.0) / (age + restart_s) if age > 0 else 0.0


@dataclass(slots=True)
class Memory:
    """What a policy remembers of one simulation. own: whatever a subclass keeps there."""

    table: RoundTable
    at: int = -1  # the last round
    plan: dict[int, list[int]] = field(default_factory=dict)
    scattered: set[int] = field(default_factory=set)  # those chosen for whom no unit had enough GPUs together
    own: Any = None


@dataclass(frozen=True, kw_only=True)
class Rounds(Policy, ABC):
    """Decides every `round_s` seconds counted from the workload's zero, and at no other time."""

    round_s: float = 60.0
    elastic: tuple[int, int] | None = None  # GPUs that all jobs may run on, whatever they ask for

    def takes(self, workload: Workload) -> Workload:
        """See `Policy.takes`."""
        return workload if self.elastic is None else stretched(workload, *self.elastic)

    @abstractmethod
    def choose(self, view: View, memory: Memory, jobs: Int64) -> list[Given]:
        """Return what each of the waiting and running `jobs` is to have, the most important first; the rest waits."""

    def validate(self) -> None:
        """See `Policy.validate`."""
        if not (np.isfinite(self.round_s) and self.round_s >= 1):
            raise ForetraceError(
                f"policy {self.name!r}: a round takes 1 s or more, not {self.round_s:g}; give round-s=60 or so."
            )
        if self.elastic is not None:
            _check_range(*self.elastic)
        Policy.validate(self)

    def memory(self, view: View) -> Memory:
        """Return what this policy remembers of the simulation that is looked at."""
        return view.memory(lambda view: Memory(RoundTable(view)))

    def preempt(self, view: View) -> list[int]:
        """Return, at a round, those that are to have other GPUs or none."""
        if not self._is_round(view):
            return []
        memory = self.memory(view)
        jobs = np.union1d(view.waiting, view.running)
        memory.at = view.now_ns
        given = self.choose(view, memory, jobs)
        memory.plan, memory.scattered = laid_out(view, memory.table, given, strict=self.place_rule == "strict")
        return [job for job in view.running.tolist() if sorted(memory.plan.get(job, [])) != list(view.gpus_of(job))]

    def order(self, view: View, waiting: Int64) -> list[int]:
        """Return those that are to have GPUs, then the others, who learn why they wait."""
        plan = self.memory(view).plan if self._is_round(view) else {}
        return sorted(waiting.tolist(), key=lambda job: (job not in plan, job))

    def admit(self, view: View, job: int) -> Wait | None:
        """Admit those with GPUs in the plan."""
        if not self._is_round(view):
            return Wait(Cause.ROUND)
        memory = self.memory(view)
        if job in memory.plan:
            return None
        if job in memory.scattered:
            return Wait(Cause.SCATTERED)
        return Wait(Cause.QUOTA if view.quota_left(job) < memory.table.limits(job)[0] else Cause.OUTRANKED)

    def place(self, view: View, job: int) -> list[int]:
        """Place a job as planned."""
        return self.memory(view).plan[job]

    def review(self, view: View) -> int | None:
        """Return the next round, as long as anybody is there."""
        if not len(view.waiting) and not len(view.running):
            return None
        return (view.now_ns // self._round_ns + 1) * self._round_ns

    @property
    def _round_ns(self) -> int:
        return max(int(nanoseconds(self.round_s)), 1)

    def _is_round(self, view: View) -> bool:
        return view.now_ns % self._round_ns == 0


def working(view: View, table: RoundTable) -> Board:
    """Return all GPUs that are not broken, as if nobody held any."""
    room = np.zeros(table.cluster.gpus)
    room[view.free_in(0)] = 1.0
    for job in view.running.tolist():
        room[list(view.gpus_of(job))] = 1.0
    return Board(table, room)


def laid_out(
    view: View, table: RoundTable, given: Iterable[Given], *, strict: bool
) -> tuple[dict[int, list[int]], set[int]]:
    """Return GPUs of each job, and those for whom there were none.

    Who holds what he is to have keeps it; the others go into what is left, largest first. Where that leaves somebody
    out, all are placed again, largest first, and if that does not help in the order of importance.
    """
    wanted = list(given)
    large = sorted(wanted, key=lambda each: -each.gpus)
    start = working(view, table)
    plan, out = _laid(view, Board(table, start.room.copy()), large, strict=strict, keep=True)
    for line in (large, wanted):
        if not out:
            break
        again, left = _laid(view, Board(table, start.room.copy()), line, strict=strict, keep=False)
        if len(left) < len(out) or line is wanted:
            plan, out = again, left
    return plan, out


def _laid(
    view: View, board: Board, line: list[Given], *, strict: bool, keep: bool
) -> tuple[dict[int, list[int]], set[int]]:
    plan: dict[int, list[int]] = {}

    def held(each: Given) -> list[int]:
        gpus = list(view.gpus_of(each.job))
        same = len(gpus) == each.gpus and bool(gpus) and int(board.kind[gpus[0]]) == each.kind
        return gpus if same and board.fits(each.job, gpus) else []

    def put(each: Given, gpus: list[int]) -> None:
        if gpus:
            board.take(each.job, gpus)
            plan[each.job] = gpus

    if keep:
        for each in line:
            if not each.moves:
                put(each, held(each))
    for each in line:
        if each.job in plan:
            continue
        mine = held(each)
        put(each, (not each.moves and mine) or board.find(each, strict=strict or each.moves) or mine)
    return plan, {each.job for each in line if each.job not in plan}


def stretched(workload: Workload, fewest: int, most: int) -> Workload:
    """Return a copy whose jobs may also run on `fewest` to `most` GPUs; not those of parts of a GPU."""
    _check_range(fewest, most)
    part = workload.share < 1
    return workload.with_columns(
        min_gpus=np.where(part, workload.min_gpus, np.minimum(fewest, workload.gpus)),
        max_gpus=np.where(part, workload.max_gpus, np.maximum(most, workload.gpus)),
    )


def gpu_range(text: str) -> tuple[int, int] | None:
    """Return `1-16` as numbers; None for an empty text."""
    if not text:
        return None
    low, dash, high = text.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal()):
        raise ForetraceError(f"elastic={text} is no range of GPUs; write elastic=1-16.")
    return int(low), int(high)


def _check_range(fewest: int, most: int) -> None:
    if not 1 <= fewest <= most:
        raise ForetraceError(f"jobs cannot run on {fewest} to {most} GPUs; give a range from 1 up, e.g. elastic=1-16.")
