"""Sia (Jayaram Subramanya et al., SOSP 2023): kind and number of GPUs of every job by an integer program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from foretrace.errors import ForetraceError, needing
from foretrace.fleet.policies import rounds
from foretrace.fleet.policies.rounds import Board, Given, Memory, RoundTable
from foretrace.fleet.policy import Policy
from foretrace.fleet.workload import Float64, Int64

if TYPE_CHECKING:
    from foretrace.fleet.stepping import View

_LEAST = 1e-3  # of what a change is worth, so that its power is finite


@dataclass(frozen=True, kw_only=True)
class Sia(rounds.Rounds):
    """Rounds by an integer program over job × (kind, GPUs).

    Smallest Σ (worth · speed)^power over those that run + λ_n for each that waits + λ_a for each that runs and is
    changed, speed relative to the job's slowest choice (times its fewest GPUs): for a power below 0.
    """

    power: float = -0.5
    no_gpus: float = 1.1
    change: float = 0.01
    restart_s: float = 30.0

    def validate(self) -> None:
        """See `Policy.validate`."""
        if not (np.isfinite(self.power) and self.power < 0):
            raise ForetraceError(f"policy {self.name!r}: power is a number below 0, not {self.power:g}.")
        if any(not (np.isfinite(each) and each >= 0) for each in (self.no_gpus, self.change, self.restart_s)):
            raise ForetraceError(f"policy {self.name!r}: no-gpus, change and restart-s are numbers from 0 up.")
        super().validate()

    def choose(self, view: View, memory: Memory, jobs: Int64) -> list[Given]:
        """See `Rounds.choose`."""
        table, board = memory.table, rounds.working(view, memory.table)
        if not board.workers().any():
            return []
        rows: list[Given] = []
        cost: list[float] = []
        for job in jobs.tolist():
            held = table.held(view, job)
            worth = max(rounds.worth_of_change(view, job, self.restart_s), _LEAST) if held is not None else 1.0
            speeds = self._choices(table, table.options(view, job), held and held[0])
            unit = min(speeds.values()) / min(size for _, size in speeds)
            for option, speed in speeds.items():
                same = held is not None and option == held[0]
                now = held[1] if held is not None and same else speed * worth
                rows.append(Given(job, *option))
                cost.append((now / unit) ** self.power - self.no_gpus + (self.change if held and not same else 0.0))
        asked = rows, cost, board.room.tolist()
        if memory.own is None or memory.own[0] != asked:  # from round to round the question is often the same
            memory.own = asked, _solved(table, board, rows, np.array(cost))
        picked: list[int] = memory.own[1]
        order = sorted(picked, key=lambda at: (cost[at], at))
        return [rows[at] for at in order]

    @staticmethod
    def _choices(
        table: RoundTable, options: dict[tuple[int, int], float], held: tuple[int, int] | None
    ) -> dict[tuple[int, int], float]:
        """Return powers of two inside a node and whole nodes, so that jobs fit together, and what it has; else all."""

        def regular(option: tuple[int, int]) -> bool:
            kind, size = option
            node = int(table.capacity[kind, 0])
            return option == held or (size & (size - 1) == 0 and size <= node) or size % node == 0

        return {option: speed for option, speed in options.items() if regular(option)} or options


def _solved(table: RoundTable, board: Board, rows: list[Given], cost: Float64) -> list[int]:
    """Return positions of the rows with the smallest sum: at most one per job, within GPUs of each kind and quotas."""
    with needing("this policy"):
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    kinds = len(table.cluster.types)
    tenants = list(board.quota)
    jobs = list(dict.fromkeys(each.job for each in rows))
    line = {job: at for at, job in enumerate(jobs)}
    used = np.array([each.gpus * table.share(each.job) for each in rows])
    at = np.arange(len(rows))
    tenant = [str(table.workload.tenant[each.job]) for each in rows]
    limited = np.array([i for i, name in enumerate(tenant) if name in board.quota], np.int64)
    row = np.concatenate(
        [
            [line[each.job] for each in rows],
            [len(jobs) + each.kind for each in rows],
            [len(jobs) + kinds + tenants.index(tenant[i]) for i in limited],
        ]
    ).astype(np.int64)
    column, value = np.concatenate([at, at, limited]), np.concatenate([np.ones(len(rows)), used, used[limited]])
    limits = np.array([*np.ones(len(jobs)), *board.by_kind(), *(board.quota[tenant] for tenant in tenants)])
    matrix = csr_array((value, (row, column)), shape=(len(limits), len(rows)))
    best: dict[int, int] = {}
    for each in np.argsort(cost, kind="stable").tolist():
        best.setdefault(rows[each].job, each)
    wish = np.zeros(len(rows))
    wish[[each for each in best.values() if cost[each] < 0]] = 1
    if (matrix @ wish <= limits + 1e-9).all():  # everybody can have the best
        return np.flatnonzero(wish).tolist()
    found: Any = milp(
        cost,
        constraints=LinearConstraint(matrix, ub=limits),
        integrality=np.ones(len(rows)),
        bounds=Bounds(0, 1),
    )
    if found.x is None:
        raise ForetraceError(f"the integer program of sia was not solved ({found.message}); check the speeds.")
    picked: list[int] = np.flatnonzero(found.x > 0.5).tolist()
    return picked


def sia(
    *,
    round_s: float = 60.0,
    power: float = -0.5,
    no_gpus: float = 1.1,
    change: float = 0.01,
    restart_s: float = 30.0,
    elastic: str = "",
) -> Policy:
    """Kind and number of GPUs per job every `round_s` so that Σ relative speed ^ power is least (p = −0.5).

    no_gpus (λ_n): what a job without GPUs counts; change (λ_a): what a job costs that is changed; restart_s: what the
    policy believes that to take; elastic: such as 1-16 lets all jobs of a log run on so
    many GPUs. Speeds are those of the model that is played with: goodput with `GoodputSpeeds`.
    """
    return Sia(
        name="sia", place_rule="greedy", round_s=round_s, power=power, no_gpus=no_gpus, change=change,
        restart_s=restart_s, elastic=rounds.gpu_range(elastic),
    )  # fmt: skip
