"""Pollux (Qiao et al., OSDI 2021): elastic jobs get as many GPUs as make the cluster's speed-ups best.

Every round the numbers of GPUs are chosen that maximise the power mean with exponent −1 of the jobs' speed-ups over a
fair share (fleet-scheduling.md 4.2). Speed-ups come from the model of speed that is played with; with
`GoodputSpeeds(adapt=True)` they are goodput at the best batch size. A rigid job has one number to choose.
Not as the authors have it: GPUs go where they take most off Σ 1 / speed-up instead of by a genetic search
(reproductions/pollux has that), jobs need not learn how fast they are, and several jobs may spread over one node.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.policies import rounds
from foretrace.fleet.policies.rounds import Board, Given, Memory, RoundTable
from foretrace.fleet.policy import Policy
from foretrace.fleet.speeds import ROUNDING
from foretrace.fleet.workload import Int64

if TYPE_CHECKING:
    from foretrace.fleet.stepping import View

Option = tuple[int, int]  # kind, GPUs
_LEAST = 1e-3  # added to a speed-up, so that nothing is not infinitely bad, as published
_CLOSER = 1.1  # a job with the GPUs it has moves if it runs so many times as fast elsewhere, restart included


@dataclass(slots=True)
class _Hopes:
    """One job: speed-ups by what it may have, and what it has."""

    job: int
    share: float
    values: dict[Option, float]
    held: Option | None
    moves: bool

    def loss(self, option: Option | None) -> float:
        """Return what the mean makes small: 1 / speed-up."""
        return 1 / ((self.values[option] if option is not None else 0.0) + _LEAST)


@dataclass(frozen=True, kw_only=True)
class Pollux(rounds.Rounds):
    """Rounds by speed-ups."""

    restart_s: float = 30.0

    def validate(self) -> None:
        """See `Policy.validate`."""
        if not (np.isfinite(self.restart_s) and self.restart_s >= 0):
            raise ForetraceError(f"policy {self.name!r}: restart-s is a number from 0 up, not {self.restart_s:g}.")
        super().validate()

    def choose(self, view: View, memory: Memory, jobs: Int64) -> list[Given]:
        """See `Rounds.choose`."""
        board = rounds.working(view, memory.table)
        hopes = self._hopes(view, memory.table, board, jobs)
        # starting over can be worse than to leave everybody alone and give away what is free
        kept = {each.job: each.held for each in hopes if each.held is not None}
        tried = [_gained(memory.table, board, hopes, kept), _gained(memory.table, board, hopes, {})]
        chosen = min(tried, key=lambda way: sum(each.loss(way.get(each.job)) for each in hopes))
        return [
            Given(each.job, *chosen[each.job], each.moves and chosen[each.job] == each.held)
            for each in hopes
            if each.job in chosen
        ]

    def _hopes(self, view: View, table: RoundTable, board: Board, jobs: Int64) -> list[_Hopes]:
        """Return jobs with the least service first."""
        fair = max(-(-int(board.workers().sum()) // len(jobs)), 1)
        made = []
        for job in sorted(jobs.tolist(), key=lambda job: (view.attained_gpu_s(job), job)):
            options = table.options(view, job)
            near = [speed for (_, size), speed in options.items() if size <= fair]
            base = max(near) if near else min(options.values())
            held = table.held(view, job)
            worth = rounds.worth_of_change(view, job, self.restart_s) if held is not None else 1.0
            values = {option: speed / base * worth for option, speed in options.items()}
            moves = False
            if held is not None:
                option, speed = held
                moves = values.get(option, 0.0) > _CLOSER * speed / base
                values[option] = max(values.get(option, 0.0) if moves else 0.0, speed / base)
            made.append(_Hopes(job, table.share(job), values, held and held[0], moves))
        return made


def _gained(table: RoundTable, board: Board, hopes: list[_Hopes], fixed: dict[int, Option]) -> dict[int, Option]:
    """Return what everybody gets if each GPU goes where it gains most; `fixed` jobs have what they have.

    A step may be of several GPUs, so that one that gains nothing by itself (across nodes) does not end the search.
    """
    board = Board(table, board.room)
    room = board.by_kind()
    chosen = dict(fixed)
    for each in hopes:
        if each.job in fixed:
            kind, size = fixed[each.job]
            room[kind] -= size * each.share
            board.count(each.job, size)

    def fits(each: _Hopes, kind: int, more: int) -> bool:
        return bool(more * each.share <= room[kind] + ROUNDING) and board.allows(each.job, more)

    def step(each: _Hopes) -> tuple[float, Option, int] | None:
        """Return the best step: loss taken off per GPU, what the job has then, how many GPUs more these are."""
        has = chosen.get(each.job)
        before, size = each.loss(has), 0 if has is None else has[1]
        best = None
        for option, value in each.values.items():
            if (has is not None and option[0] != has[0]) or option[1] <= size:
                continue
            more = option[1] - size
            if not fits(each, option[0], more):
                continue
            gain = (before - 1 / (value + _LEAST)) / (more * each.share)
            if gain > 1e-12 and (best is None or gain > best[0]):
                best = gain, option, more
        return best

    line = []
    for rank, each in enumerate(hopes):
        found = step(each) if each.job not in fixed else None
        if found:
            line.append((-found[0], rank, found))
    heapify(line)
    while line:
        _, rank, (_, option, more) = heappop(line)
        each = hopes[rank]
        if fits(each, option[0], more):
            room[option[0]] -= more * each.share
            board.count(each.job, more)
            chosen[each.job] = option
        found = step(each)
        if found:
            heappush(line, (-found[0], rank, found))
    return chosen


def pollux(*, round_s: float = 60.0, restart_s: float = 30.0, elastic: str = "") -> Policy:
    """GPUs by marginal speed-up, every `round_s`, for jobs between their fewest and most GPUs.

    elastic: such as 1-16 lets all jobs of a log run on so many GPUs, whatever they ask for. restart_s: what the policy
    believes a move to cost.
    """
    return Pollux(
        name="pollux", place_rule="greedy", round_s=round_s, restart_s=restart_s, elastic=rounds.gpu_range(elastic)
    )
