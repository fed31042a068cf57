"""Gavel (Narayanan et al., OSDI 2020) and AlloX (Le et al., EuroSys 2020): how much of each kind of GPU a job is due.

A linear program (`fleet.allocations`) says what part of the time every job is due on every kind of GPU; rounds see to
it that jobs get that: who had least of what he is due goes first (Gavel, section 5; fleet-scheduling.md 4.1).
Not as the authors have it: of several best answers of a program a vertex is taken, not the middle; and GPUs that nobody
is due go, once all kinds were offered to those who are due them, to whoever runs there fastest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet import allocations
from foretrace.fleet.policies.rounds import Board, Given, Memory, Rounds, RoundTable, working
from foretrace.fleet.policy import PlaceRule, Policy
from foretrace.fleet.workload import SECOND, Float64, Int64

if TYPE_CHECKING:
    from foretrace.fleet.stepping import View

Rule = Literal["max-min", "makespan", "ftf", "allox"]


@dataclass(slots=True)
class _Claims:
    """What jobs are due and had since the last allocation; all by job, (kinds,) each.

    rates: progress per second. had: seconds on each kind, and half a round that everybody is credited with.
    total: the same of all jobs. on: the kind a job ran on since the last round, and the seconds it had held until then.
    """

    total: Float64
    rates: dict[int, Float64] = field(default_factory=dict)
    due: dict[int, Float64] = field(default_factory=dict)
    had: dict[int, Float64] = field(default_factory=dict)
    deficit: dict[int, Float64] = field(default_factory=dict)
    on: dict[int, tuple[int, float]] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)  # AlloX: the kind that a job keeps until it ends
    isolated: dict[int, tuple[float, float]] = field(default_factory=dict)  # work left, progress per second if isolated
    alone: dict[int, float] = field(default_factory=dict)  # seconds that the work done would have taken in isolation
    jobs: frozenset[int] = frozenset()  # whom the last allocation counted
    reset: int = -1  # when (ns) it was


@dataclass(frozen=True, kw_only=True)
class Gavel(Rounds):
    """Rounds by what `rule` says that jobs are due; it is asked again when jobs came or left, after `reset_s`."""

    rule: Rule = "max-min"
    reset_s: float = 1920.0
    alpha: float = 1.0

    def validate(self) -> None:
        """See `Policy.validate`."""
        if not (np.isfinite(self.reset_s) and self.reset_s >= 0):
            raise ForetraceError(
                f"policy {self.name!r}: reset-s is a number of seconds from 0 up, not {self.reset_s:g}."
            )
        if not 0 < self.alpha <= 1:
            raise ForetraceError(f"policy {self.name!r}: alpha is a part of the jobs in (0, 1], not {self.alpha:g}.")
        super().validate()

    def choose(self, view: View, memory: Memory, jobs: Int64) -> list[Given]:
        """Choose as `Rounds.choose` does: per kind of GPU, the fastest first, by what is due over what was had."""
        table = memory.table
        if memory.own is None:
            memory.own = _Claims(total=np.zeros(len(table.cluster.types)))
        claims: _Claims = memory.own
        active = jobs.tolist()
        rates = _rates(view, table, claims, active)
        board = working(view, table)
        if not board.workers().any():
            return []  # all machines are broken
        self._count(view, claims, active)
        later = claims.reset < 0 or view.now_ns - claims.reset >= round(self.reset_s * SECOND)
        if later and frozenset(active) != claims.jobs:
            self._allocate(view, table, claims, active, rates, board)
        given = _served(table, claims, active, rates, board)
        claims.on = {each.job: (each.kind, view.held_s(each.job)) for each in given}
        return given

    def _count(self, view: View, claims: _Claims, active: list[int]) -> None:
        """Credit newcomers, and count what jobs had since the last round."""
        kinds, credit = len(claims.total), self.round_s / 2
        for job in active:
            if job not in claims.had:
                claims.had[job], claims.deficit[job] = np.full(kinds, credit), np.zeros(kinds)
                claims.total += credit
        for job, (kind, held) in claims.on.items():
            had = view.held_s(job) - held
            claims.had[job][kind] += had
            claims.total[kind] += had
        for job in set(claims.had) - set(active):
            del claims.had[job], claims.deficit[job]

    def _allocate(
        self, view: View, table: RoundTable, claims: _Claims, active: list[int], rates: Float64, board: Board
    ) -> None:
        """Settle what jobs were due, and ask the rule again."""
        kinds, credit = len(claims.total), self.round_s / 2
        elapsed = (view.now_ns - max(claims.reset, 0)) / SECOND
        for job in active:
            due = claims.due.get(job)
            claims.deficit[job] += (0 if due is None else due * elapsed) - (claims.had[job] - credit)
            claims.had[job] = np.full(kinds, credit)
        claims.total = np.full(kinds, credit * len(active))
        claims.reset, claims.jobs = view.now_ns, frozenset(active)
        size = np.array([table.rigid(job) * table.share(job) for job in active], np.float64)
        left = np.array([view.remaining_s(job) for job in active], np.float64)
        waited = (view.now_ns - view.workload.submit_ns[active]) / SECOND
        workers = board.workers()
        if self.rule == "max-min":
            due = allocations.max_min(rates, size, workers)
        elif self.rule == "makespan":
            due, _ = allocations.makespan(rates, size, workers, left)
        elif self.rule == "ftf":
            fair = _isolated(claims, active, rates, size, workers, left)
            due, _ = allocations.finish_time_fairness(rates, size, workers, elapsed=waited, remaining=left, alone=fair)
        else:
            due = self._matched(view, claims, active, rates, size, workers, left)
        claims.due = dict(zip(active, due, strict=True))

    def _matched(
        self,
        view: View,
        claims: _Claims,
        active: list[int],
        rates: Float64,
        size: Float64,
        workers: Int64,
        left: Float64,
    ) -> Float64:
        """Return alloX: who holds a GPU keeps it, the other jobs of one GPU are matched to free ones."""
        claims.kept = {job: kind for job, kind in claims.kept.items() if job in set(active)}
        free = np.maximum(workers - np.bincount(list(claims.kept.values()), minlength=len(workers)), 0)
        new = [at for at, job in enumerate(active) if size[at] == 1 and job not in claims.kept]
        waited = (view.now_ns - view.workload.submit_ns[active]) / SECOND
        found = allocations.allox(rates[new], left[new], waited[new], free, alpha=self.alpha)
        claims.kept |= {active[at]: kind for at, kind in zip(new, found.tolist(), strict=True) if kind >= 0}
        due = np.zeros_like(rates)
        for at, job in enumerate(active):
            if job in claims.kept:
                due[at, claims.kept[job]] = 1.0
        return due


def _rates(view: View, table: RoundTable, claims: _Claims, jobs: list[int]) -> Float64:
    """Return (jobs, kinds) progress per second on each kind with the GPUs close together; 0 where impossible."""
    for job in jobs:
        if job not in claims.rates:
            row = np.zeros(len(table.cluster.types))
            for kind in table.kinds(job):
                row[kind] = table.speed(view, job, kind, table.rigid(job))
            if not row.any():
                raise table.refused(job)
            claims.rates[job] = row
    return np.array([claims.rates[job] for job in jobs])


def _isolated(
    claims: _Claims, active: list[int], rates: Float64, size: Float64, workers: Int64, left: Float64
) -> Float64:
    """Return (jobs,) seconds that each would take in all with an equal part of the cluster."""
    own = (rates * allocations.isolated(size, workers)).sum(axis=1)
    own = np.where(own > 0, own, rates.max(axis=1))  # the kinds it runs on are broken: as on one that works
    fair = np.zeros(len(active))
    for at, job in enumerate(active):
        so_far = claims.alone.get(job, 0.0)
        if job in claims.isolated:
            before, progress = claims.isolated[job]
            so_far += (before - left[at]) / progress
        claims.alone[job] = so_far
        fair[at] = so_far + left[at] / own[at]
        claims.isolated[job] = float(left[at]), float(own[at])
    return fair


def _served(table: RoundTable, claims: _Claims, active: list[int], rates: Float64, board: Board) -> list[Given]:
    """Return who runs in this round: per kind by (priority, deficit, due) as long as they fit, then all others."""
    room = board.by_kind()
    none = np.zeros(len(claims.total))
    share = {job: claims.had[job] / claims.total for job in active}
    given: list[Given] = []
    at = {job: i for i, job in enumerate(active)}
    waiting = dict.fromkeys(active)

    def serve(job: int, kind: int) -> None:
        gpus = table.rigid(job)
        if gpus * table.share(job) <= room[kind] + 1e-9 and board.allows(job, gpus):
            room[kind] -= gpus * table.share(job)
            board.count(job, gpus)
            del waiting[job]
            given.append(Given(job, kind, gpus))

    order = np.argsort(-rates.sum(axis=0), kind="stable").tolist()
    for kind in order:
        line = []
        for job in waiting:
            due = float(claims.due.get(job, none)[kind])
            if due > 0 and rates[at[job], kind] > 0:
                had = float(share[job][kind])
                line.append((-(due / had if had > 0 else due * 1e9), -float(claims.deficit[job][kind]), -due, job))
        for *_, job in sorted(line):
            serve(job, kind)
    for job in sorted(waiting, key=lambda job: (-float(claims.deficit[job].max()), job)):
        for kind in np.argsort(-rates[at[job]], kind="stable").tolist():
            if rates[at[job], kind] > 0 and job in waiting:
                serve(job, kind)
    return given


def _gavel(name: str, rule: Rule, *, round_s: float, reset_s: float, consolidate: bool, alpha: float = 1.0) -> Gavel:
    place: PlaceRule = "strict" if consolidate else "greedy"
    return Gavel(name=name, rule=rule, round_s=round_s, reset_s=reset_s, alpha=alpha, place_rule=place)


def gavel_max_min(*, round_s: float = 360.0, reset_s: float = 1920.0, consolidate: bool = False) -> Policy:
    """The least progress, against an equal share of all kinds, as large as it can be (least attained service).

    round_s: GPUs change hands at its multiples only. reset_s: least time between two allocations. consolidate: a job
    waits until it can lie as close together as the cluster ever allows; else it prefers that.
    """
    return _gavel("gavel-max-min", "max-min", round_s=round_s, reset_s=reset_s, consolidate=consolidate)


def gavel_makespan(*, round_s: float = 360.0, reset_s: float = 1920.0, consolidate: bool = False) -> Policy:
    """The last of the jobs ends as early as it can; it knows how much work is left."""
    return _gavel("gavel-makespan", "makespan", round_s=round_s, reset_s=reset_s, consolidate=consolidate)


def gavel_ftf(*, round_s: float = 360.0, reset_s: float = 1920.0, consolidate: bool = False) -> Policy:
    """The worst finish time, against an equal part of the cluster for oneself, as good as it can be (Themis's ρ); it
    knows how much work is left.
    """
    return _gavel("gavel-ftf", "ftf", round_s=round_s, reset_s=reset_s, consolidate=consolidate)


def allox(*, round_s: float = 360.0, reset_s: float = 1920.0, alpha: float = 1.0, consolidate: bool = False) -> Policy:
    """Jobs of one GPU are matched to GPUs so that the sum of completion times is least, and keep what they got.

    alpha: part of the waiting jobs, oldest first, that take part. The method knows no gangs: jobs of several GPUs, and
    parts of one, have what the others leave. It knows how much work is left.
    """
    return _gavel("allox", "allox", round_s=round_s, reset_s=reset_s, consolidate=consolidate, alpha=alpha)
