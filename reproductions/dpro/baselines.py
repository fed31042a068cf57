"""Plain searches over the same moves, to compare with: greedy, and Markov chain Monte Carlo.

Neither uses the critical path, symmetry or bounds. Both evaluate plans with the same simulation as ours. Seconds are
CPU time of this process.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import exp, log
from random import Random

from foretrace.plan.evaluate import Evaluator
from foretrace.plan.problem import Plan
from foretrace.plan.search import all_moves, random_move


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What a plain search came to."""

    plan: Plan
    step_ns: float
    evaluations: int
    seconds: float


def greedy(evaluator: Evaluator, begin: Plan, *, seconds: float) -> Reached:
    """The best of all single moves, again and again, until none helps or time is up."""
    started = time.process_time()
    plan, ns, made = begin, evaluator.step_ns(begin), 1
    while True:
        best, best_ns = plan, ns
        for other in all_moves(plan):
            if time.process_time() - started > seconds:
                break
            other_ns, made = evaluator.step_ns(other), made + 1
            if other_ns < best_ns:
                best, best_ns = other, other_ns
        if best_ns >= ns:
            return Reached(plan=plan, step_ns=ns, evaluations=made, seconds=time.process_time() - started)
        plan, ns = best, best_ns


def mcmc(evaluator: Evaluator, begin: Plan, *, seconds: float, seed: int = 0) -> Reached:
    """Random moves, worse ones accepted with exp(−loss / temperature); it falls from 2 % of the step to 0.01 %."""
    started, random = time.process_time(), Random(seed)
    plan, ns, made = begin, evaluator.step_ns(begin), 1
    best, best_ns, scale = plan, ns, ns
    while (spent := time.process_time() - started) < seconds:
        temperature = scale * exp(log(0.02) + (log(1e-4) - log(0.02)) * spent / seconds)
        other = random_move(plan, random)
        other_ns, made = evaluator.step_ns(other), made + 1
        if other_ns <= ns or random.random() < exp(-(other_ns - ns) / temperature):
            plan, ns = other, other_ns
            if ns < best_ns:
                best, best_ns = plan, ns
    return Reached(plan=best, step_ns=best_ns, evaluations=made, seconds=time.process_time() - started)
