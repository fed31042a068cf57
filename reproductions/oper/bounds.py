"""How far plans are from the bound on drawn problems of a few tables, and from the best of all choices on tiny ones."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from itertools import product
from math import inf

import numpy as np

from foretrace.plan.rows.bound import bound
from foretrace.plan.rows.costs import RowChoice, RowCosts, profile
from foretrace.plan.rows.place import choose
from foretrace.training.rows.lookups import zipf
from tables import table

BATCHES, PROFILED = 12, 8
SEED = 17


def problems(count: int, seed: int = SEED) -> Iterator[tuple[RowCosts, float]]:
    """Draw tables, devices, pooling, skew and memory, between the least there can be and all tables or any."""
    random = np.random.default_rng(seed)
    for number in range(count):
        rows = np.exp(random.uniform(np.log(50), np.log(20_000), random.integers(2, 9))).astype(int).tolist()
        devices, width = int(random.choice([2, 3, 4, 8])), int(random.choice([16, 64]))
        lookups = zipf(
            exponent=float(random.choice([0.6, 0.8, 1.05, 1.2])), tables=len(rows), rows=rows,
            pooling=int(random.choice([1, 4, 20])), samples=int(random.choice([32, 128, 512])), batches=BATCHES,
            locality=float(random.choice([0, 0.6])), workers=devices, seed=1000 * seed + number,
        )  # fmt: skip
        costs = RowCosts(profile(lookups, devices, range(PROFILED)), width, training=bool(random.random() < 0.5))
        least = 4 * width * sum(-(-each // devices) for each in rows)
        room = float(random.choice([0.02, 0.1, 0.3, 0.6, 0.9, 0.99, inf]))
        yield costs, inf if room == inf else float(least + int(room * (costs.table_memory.sum() - least)))


def tiny(count: int, seed: int = SEED) -> Iterator[tuple[RowCosts, float]]:
    """Draw problems of two tables of three rows on two devices, every third one with little memory."""
    for number in range(count):
        lookups = zipf(exponent=1, tables=2, rows=3, pooling=2, samples=4, batches=BATCHES, seed=1000 * seed + number)
        costs = RowCosts(profile(lookups, 2, range(PROFILED)), 8, training=bool(number % 2))
        yield costs, inf if number % 3 else 0.75 * float(costs.table_memory.sum())


def best_of_all(costs: RowCosts, memory: float) -> float:
    """Bytes of the busiest device of the best of all choices."""
    devices, tables = costs.profile.devices, len(costs.table_rows)
    dealt = [each for each in product(range(costs.width + 1), repeat=devices) if sum(each) in (0, costs.width)]
    best = inf
    for shares in product(dealt, repeat=tables):
        own = range(0 if costs.training else -1, devices)
        for owners in product(*((0,) if any(shares[at]) else own for at in costs.table)):
            found = RowChoice(shares=np.array(shares), items=np.array(owners))
            if costs.memory(found).max() <= memory:
                best = min(best, float(costs.loads(found).max()))
    return best


def _planned(costs: RowCosts, memory: float) -> tuple[float, float]:
    """Bytes of the busiest device of the plan, and the bound."""
    lower, choice = bound(costs, memory, choose(costs, memory))
    return inf if choice is None else float(costs.loads(choice).max()), lower


def text(count: int) -> str:
    """The section of README.md; `count` problems of a few tables, a fourth of them tiny ones more."""
    found: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for costs, memory in problems(count):
        begin = time.perf_counter()
        plan, lower = _planned(costs, memory)
        ratio = plan / lower if lower else 1.0 if plan < 1e-6 else inf
        kind = f"{'training' if costs.training else 'inference'}, {costs.profile.devices} devices"
        found.setdefault(kind, []).append(ratio)
        seconds.setdefault(kind, []).append(time.perf_counter() - begin)
        print(f"{kind}: {ratio:.3f}, {seconds[kind][-1]:.1f} s", file=sys.stderr, flush=True)
    rows = [
        (kind, str(len(each)), *(f"{at:.3f}" for at in (np.median(each), np.quantile(each, 0.9), max(each))),
         f"{max(seconds[kind]):.0f}")
        for kind, each in sorted(found.items())
    ]  # fmt: skip
    every = np.concatenate(list(found.values()))
    ratios = [
        plan / best if best else 1.0 for costs, memory in tiny(max(count // 4, 1))
        for plan, best in ((_planned(costs, memory)[0], best_of_all(costs, memory)),)
    ]  # fmt: skip
    return (
        "## A few tables: how far from the bound\n\n"
        f"{count} problems, drawn: 2 to 8 tables of 50 to 20,000 rows, pooling 1, 4 or 20, zipf 0.6 to 1.2, 2 to 8 "
        "devices, memory from a fiftieth above the least to any. Plan ÷ bound, by the profile:\n\n"
        + table(("what", "problems", "median", "of nine in ten", "most", "seconds, most"), rows)
        + f"\n\nIn all: median {np.median(every):.3f}, {(every <= 1.1).sum()} of {count} at most 1.1, most "
        f"{every.max():.3f}. On {len(ratios)} problems of six rows the plan was at most {max(ratios):.3f} times the "
        "best of all choices.\n"
    )
