"""Search for plans that let the next forward pass begin early: any-time, driven by what compute waits for, resumable.

Where the update waits for all messages, `buckets.best_buckets` has the answer with its proof, and no search is needed.
Where messages may overtake each other across steps, a plan is improved in rounds: descend from the current plan by
moves of the buckets that compute waits for (the critical path leads through them alone), of their neighbours, and of
all boundaries that are alike in repeated blocks, at last by any move; once by the steepest of all moves. Where nothing
improves, shake the best plan, or walk from it at random, and descend again. Ends when the bound is met, when `PATIENCE`
rounds in a row gain less than 0.01 % (dPRO stops at 0.1 %), or when time is up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import exp
from random import Random
from typing import Any

import numpy as np

from foretrace.deadline import Deadline, never
from foretrace.plan.buckets import best_buckets, default, least_step, seeds
from foretrace.plan.evaluate import Evaluator
from foretrace.plan.moves import alike, all_moves, around, random_move, together
from foretrace.plan.problem import CHUNKS, Plan

NEVER = never()
PATIENCE = 12  # rounds without a gain of 0.01 %
_GAIN = 1e-4
_MET = 1e-4  # a step this near to its bound needs no better plan
_KICKS = 4  # moves that shake a plan
_WALK, _HOT, _COLD = 1000, 3e-3, 1e-5  # moves of a random walk; its temperatures, of the step
STARTS = 5  # simple plans that are descended from


@dataclass(kw_only=True)
class RoundsState:
    """Where a search stands; all of it is written to a file and read back."""

    best: Plan
    best_ns: float
    rounds: int = 0
    idle: int = 0  # rounds since the last gain
    evaluations: int = 0
    random: Any = None  # state of the random numbers

    def to_json(self) -> dict[str, Any]:
        """As JSON holds it."""
        version, words, gauss = self.random
        return {
            "best": plan_to_json(self.best),
            "best_ns": self.best_ns,
            "rounds": self.rounds,
            "idle": self.idle,
            "evaluations": self.evaluations,
            "random": [version, list(words), gauss],
        }

    @classmethod
    def of_json(cls, held: dict[str, Any]) -> RoundsState:
        """The state in the text that `to_json` made."""
        version, words, gauss = held["random"]
        return cls(
            best=plan_of_json(held["best"]),
            best_ns=float(held["best_ns"]),
            rounds=int(held["rounds"]),
            idle=int(held["idle"]),
            evaluations=int(held["evaluations"]),
            random=(version, tuple(words), gauss),
        )


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """A plan as JSON holds it."""
    return {"ends": list(plan.ends), "chunks": list(plan.chunks), "ahead": plan.ahead}


def plan_of_json(held: dict[str, Any]) -> Plan:
    """The plan in the text that `plan_to_json` made."""
    return Plan(ends=tuple(held["ends"]), chunks=tuple(held["chunks"]), ahead=bool(held["ahead"]))


@dataclass(kw_only=True)
class Search:
    """A search over plans with `ahead`, one round at a time."""

    evaluator: Evaluator
    state: RoundsState
    bound_ns: float
    groups: list[list[int]] = field(default_factory=list)
    starts: list[Plan] = field(default_factory=list)
    reached: tuple[Plan, float] = (Plan(ends=(0,), chunks=(1,)), float("inf"))  # in a round that time cut short

    @classmethod
    def begin(cls, evaluator: Evaluator, *, seed: int = 0) -> Search:
        """From the best of the simple plans, each in every number of parts."""
        found, tried = _starts(evaluator)
        state = RoundsState(best=found[0][1], best_ns=found[0][0], evaluations=tried, random=Random(seed).getstate())
        return cls._at(evaluator, state, found)

    @classmethod
    def resume(cls, evaluator: Evaluator, state: RoundsState) -> Search:
        """Continues where `state` stands."""
        return cls._at(evaluator, state, _starts(evaluator)[0])

    @classmethod
    def _at(cls, evaluator: Evaluator, state: RoundsState, found: list[tuple[float, Plan]]) -> Search:
        usual = replace(default(evaluator.problem), ahead=True)
        return cls(
            evaluator=evaluator,
            state=state,
            bound_ns=least_step(evaluator),
            groups=alike(evaluator.problem),
            starts=list(dict.fromkeys([*(plan for _, plan in found[:STARTS]), usual])),
        )

    @property
    def best(self) -> tuple[Plan, float]:
        """The best plan so far and its step (ns)."""
        held = self.state.best, self.state.best_ns
        return min(held, self.reached, key=lambda each: each[1])

    @property
    def proven(self) -> bool:
        """Whether the best plan is as good as any can be."""
        return self.best[1] <= self.bound_ns * (1 + _MET)

    @property
    def done(self) -> bool:
        """Whether another round is not worth its time."""
        return self.proven or self.state.idle >= PATIENCE

    def round(self, until: Deadline = NEVER) -> bool:
        """One descent: from the simple plans in the first rounds, later from the best one, shaken or walked from.

        Returns False, with the state as it was, where `until` was over first; what was found by then
        is in `reached`, and the round is done again by whoever continues.
        """
        state = self.state
        random = Random()
        random.setstate(state.random)
        walked = 1
        if state.rounds < len(self.starts):
            plan = self.starts[state.rounds]
            ns = self.evaluator.step_ns(plan)
        elif state.rounds % 2:
            plan, ns, walked = self._walk(state.best, state.best_ns, random, until)
        else:
            plan = state.best
            for _ in range(random.randint(1, _KICKS)):
                plan = random_move(plan, random)
            ns = self.evaluator.step_ns(plan)
        steepest = state.rounds == len(self.starts) - 1
        plan, ns, tried = (self._steepest if steepest else self._descend)(plan, ns, random, until)
        if until.over:
            if ns < self.reached[1]:
                self.reached = plan, ns
            return False
        gained = ns < state.best_ns * (1 - _GAIN)
        better = ns < state.best_ns
        self.state = RoundsState(
            best=plan if better else state.best,
            best_ns=min(ns, state.best_ns),
            rounds=state.rounds + 1,
            idle=0 if gained else state.idle + 1,
            evaluations=state.evaluations + walked + tried,
            random=random.getstate(),
        )
        return True

    def run(
        self, *, until: Deadline = NEVER, rounds: int | None = None, tell: Callable[[Search], None] | None = None
    ) -> RoundsState:
        """Rounds until done, `until` or so many rounds; `tell` hears of every one."""
        while not self.done and (rounds is None or self.state.rounds < rounds) and not until.over:
            if not self.round(until):
                break
            if tell is not None:
                tell(self)
        return self.state

    def _walk(self, plan: Plan, ns: float, random: Random, until: Deadline) -> tuple[Plan, float, int]:
        """The best plan on a random walk that accepts worse ones less and less (simulated annealing)."""
        best, best_ns, scale = plan, ns, ns
        for i in range(_WALK):
            if not i % 64 and until.over:
                break
            temperature = scale * _HOT * (_COLD / _HOT) ** (i / _WALK)
            other = random_move(plan, random)
            other_ns = self.evaluator.step_ns(other)
            if other_ns <= ns or random.random() < exp(-(other_ns - ns) / temperature):
                plan, ns = other, other_ns
                if ns < best_ns:
                    best, best_ns = plan, ns
        return best, best_ns, _WALK

    def _descend(self, plan: Plan, ns: float, random: Random, until: Deadline) -> tuple[Plan, float, int]:
        """First better neighbour again and again; (plan, its step, plans tried)."""
        tried = 0
        improved = True
        while improved and not until.over:
            improved = False
            for other in self._neighbours(plan, random):
                tried += 1
                other_ns = self.evaluator.step_ns(other)
                if other_ns < ns:
                    plan, ns, improved = other, other_ns, True
                    break
                if not tried % 64 and until.over:
                    return plan, ns, tried
        return plan, ns, tried

    def _steepest(self, plan: Plan, ns: float, _: Random, until: Deadline) -> tuple[Plan, float, int]:
        """The best of all moves again and again, as plain greedy search does it."""
        tried = 0
        while True:
            best, best_ns = plan, ns
            for other in all_moves(plan):
                tried += 1
                other_ns = self.evaluator.step_ns(other)
                if other_ns < best_ns:
                    best, best_ns = other, other_ns
                if not tried % 64 and until.over:
                    return best, best_ns, tried
            if best_ns >= ns:
                return plan, ns, tried
            plan, ns = best, best_ns

    def _neighbours(self, plan: Plan, random: Random) -> Iterator[Plan]:
        """Moves on what compute waits for, most first; then of all that is alike; then some others."""
        _, waited = self.evaluator.ahead(plan)
        critical = [int(b) for b in np.argsort(-waited, kind="stable") if waited[b] > 0]
        if not critical:
            return  # compute alone decides
        yield from around(plan, critical[:8])
        # What is on the wire when a message that compute waits for becomes ready: those ready before it.
        blocking = sorted({b for c in critical[:4] for b in range(max(c - 3, 0), c)} - set(critical[:8]))
        yield from around(plan, blocking)
        for group in self.groups:
            yield together(plan, group, apart=True)
            yield together(plan, group, apart=False)
        others = list(all_moves(plan))
        random.shuffle(others)
        yield from others


def _starts(evaluator: Evaluator) -> tuple[list[tuple[float, Plan]], int]:
    """Simple plans in every number of parts, best first, with their steps; and how many were tried."""
    first = [best_buckets(evaluator).plan, *seeds(evaluator.problem, evaluator.costs)]
    plans = [
        Plan(ends=plan.ends, chunks=(count,) * len(plan.ends), ahead=True)
        for plan in dict.fromkeys(replace(plan, chunks=(1,) * len(plan.ends)) for plan in first)
        for count in CHUNKS
    ]
    times = [evaluator.step_ns(plan) for plan in plans]
    order = sorted(range(len(plans)), key=lambda i: times[i])
    return [(times[i], plans[i]) for i in order], len(plans)
