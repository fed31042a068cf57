"""Searches: what the room itself takes per call, what strategies find by calls, and how fast today's planners are.

    python benchmarks/search.py [room] [strategies] [planners]

CPU time of this process. *Strategies* are held against the known optimum of two spaces of 4,096 points: smooth (a
bowl that is turned, so that coordinates matter together) and rugged (NK landscape, N = 12, K = 3). *Planners* are the
search for messages that overtake on the shapes of `reproductions/dpro`, and the rewriting of models of the zoo by the
roofline of an H100.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from random import Random
from typing import Any

import numpy as np

from foretrace.search.constrained import ConstrainedBayes
from foretrace.search.minimise import minimise
from foretrace.search.space import Choices, Problem
from foretrace.search.strategies import CMAES, MCMC, BestFirst, Descent, Evolution, Exhaustive, RandomSearch
from foretrace.search.strategy import SearchStrategy
from tables import load, machine, table, today

SEEDS, CALLS = 10, (30, 100, 300, 1000)
COSTLY = {"ConstrainedBayes": 100}  # calls at most: its own time grows with the cube of them


@dataclass(frozen=True)
class Given(Problem[Any]):
    """A space and a function."""

    space: Choices
    cost: Callable[[Any], float]

    def costs(self, points: Sequence[Any]) -> list[float]:
        return list(map(self.cost, points))


def landscapes() -> Iterator[tuple[str, Given, float]]:
    """(name, problem, beta that suits it)."""
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(4, 4)))[0]
    scale, target = np.array([1.0, 3.0, 9.0, 27.0]), np.array([1.0, 5.0, 2.0, 6.0])

    def bowl(point: Any) -> float:
        return 1.0 + float((scale * (turn @ (np.array(point) - target)) ** 2).sum())

    yield "smooth", Given(Choices((tuple(range(8)),) * 4), bowl), 0.1
    share = [{bits: Random(f"{i} {bits}").random() for bits in range(16)} for i in range(12)]

    def rugged(point: Any) -> float:
        near = [sum(point[(i + k) % 12] << k for k in range(4)) for i in range(12)]
        return 1.0 + sum(share[i][bits] for i, bits in enumerate(near))

    yield "rugged", Given(Choices(((0, 1),) * 12), rugged), 5.0


def strategies(beta: float) -> list[SearchStrategy]:
    """All that need no solver."""
    found: list[SearchStrategy] = [
        Exhaustive(), RandomSearch(), MCMC(beta=beta), Descent(walk=50), BestFirst(alpha=1.5), Evolution(),
        ConstrainedBayes(),
    ]  # fmt: skip
    if find_spec("cma") is None:
        print("cma is not installed: no row for CMA-ES", file=sys.stderr)
        return found
    return [*found, CMAES()]


def room() -> str:
    """Microseconds per call beyond the cost function, which is a look-up here."""
    space = Choices((tuple(range(32)),) * 6)
    start, rows = (0,) * 6, []
    for strategy in (RandomSearch(), MCMC(beta=1e-3), Descent(), Evolution(population=64)):
        begin = time.process_time()
        found = minimise(
            Given(space, lambda point: 100.0 + sum(point)), strategy=strategy, starts=[start], calls=20_000
        )
        middle = time.process_time()
        minimise(Given(space, float), strategy=strategy, starts=[start], calls=found.calls, state=found.state)
        again = time.process_time() - middle
        each = 1e6 * (middle - begin) / found.calls
        rows.append((type(strategy).__name__, f"{found.calls:,}", f"{each:.1f}", f"{1e6 * again / found.calls:.1f}"))
    return table(("strategy", "calls", "µs per call", "µs per call, resuming"), rows)


def by_calls() -> str:
    """Median over seeds of how far the best point is above the optimum."""
    rows = []
    for name, problem, beta in landscapes():
        optimum = minimise(problem, strategy=Exhaustive()).cost
        for strategy in strategies(beta):
            kind = type(strategy).__name__
            cells = []
            for calls in CALLS:
                if calls > COSTLY.get(kind, calls):
                    cells.append("–")
                    continue
                costs = [
                    minimise(
                        problem, strategy=strategy, calls=calls, seed=seed, starts=[problem.space.random(Random(seed))]
                    ).cost
                    for seed in range(SEEDS)
                ]
                cells.append(f"{100 * (statistics.median(costs) / optimum - 1):.1f} %")
            rows.append((f"{name}, {kind}", *cells))
    return table(("landscape, strategy", *(f"{calls:,} calls" for calls in CALLS)), rows)


def planners() -> str:
    """Step found, calls and seconds."""
    from foretrace.cost.devices.roofline import Roofline
    from foretrace.hardware.devices import named
    from foretrace.plan.evaluate import Evaluator
    from foretrace.plan.rewrite import catalog
    from foretrace.plan.rewrite.capture import capture, of_training
    from foretrace.plan.rewrite.costs import ModelCosts
    from foretrace.plan.rewrite.substitute import substitute
    from foretrace.plan.search import overtaking
    from foretrace.zoo.registry import training
    from reproductions.dpro.protocol import problems

    rows = []
    for name, text, step in problems():
        evaluator = Evaluator.of(step)
        overtaking(evaluator, calls=10)
        for seed in (0, 1):
            begin = time.process_time()
            over = overtaking(evaluator, seed=seed)
            spent = time.process_time() - begin
            rows.append((f"{name}, {text}, {seed}", f"{over.cost / 1e6:.4f} ms", f"{over.calls:,}", f"{spent:.2f}"))
    rules, _ = catalog.usable()
    for name in ("inception-v3", "resnet50", "bert"):
        module, args, kwargs = of_training(training(name, "tiny"))
        model = capture(module, args, kwargs, name=name)
        begin = time.process_time()
        found = substitute(model.graph, rules, ModelCosts(Roofline(), named("h100")), budget=60)
        spent = time.process_time() - begin
        rows.append((f"rewrite {name}", f"{1e6 * found.after_s:.2f} µs", f"{found.seen:,}", f"{spent:.2f}"))
    return table(("planner", "best", "priced", "CPU s"), rows)


SECTIONS = {"room": room, "strategies": by_calls, "planners": planners}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[[], *SECTIONS], help="all by default")
    asked = parser.parse_args().sections or SECTIONS
    print(f"*{today()}, {machine()}; load averages {load()}.*")
    for name in asked:
        print(f"\n{SECTIONS[name].__doc__}\n\n{SECTIONS[name]()}", flush=True)


if __name__ == "__main__":
    main()
