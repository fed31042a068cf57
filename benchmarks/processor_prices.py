"""Fit the prices of `foretrace.cost.operators.local` to this machine's times of a random pool of operators.

    python benchmarks/processor_prices.py measure       # the pool, one thread: benchmarks/data/pool_times.json
    python benchmarks/processor_prices.py fit           # src/foretrace/cost/operators/prices.json
    python benchmarks/processor_prices.py check         # fitted to four fifths of the pool, told of the last fifth
    python benchmarks/processor_prices.py choose        # which k operators of the pool say most of the others

The pool is drawn from a seed; no model of the zoo is looked at. Per family, the logarithm of every time is explained
by prices that are never negative: those of the family, and of every operator in it, which are taken to be near the
family's beforehand (standard deviation 0.6 of the logarithm). Large errors count as if they were smaller (Huber).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from foretrace.cost.calls import Calls, Family
from foretrace.cost.operators.local import CLOCKED, Local, Prices, RegressionRows, rows_of
from foretrace.cost.operators.operator import Operator, call
from foretrace.cost.operators.work_terms import NAMES, amounts
from foretrace.files import write_bytes
from operator_calls import choose_designed
from operator_pool import Draw, Kinds, random_pool
from reproductions.cdmpp.sampling import choose_tasks
from tables import ROOT, machine

TIMES = ROOT / "benchmarks" / "data" / "pool_times.json"
PRICES = ROOT / "src" / "foretrace" / "cost" / "operators" / "prices.json"
COUNT, RARE, SEED, TURNS = 3000, 200, 0, 4

# What a price might be, to begin with: seconds, and how far the logarithm may stray. Terms that explain little end low.
START = {
    "dispatch": 3e-6, "pieces": 1e-7, "flops": 1e-11, "padded": 1e-12, "left": 3e-11, "right": 3e-11, "out": 3e-11,
    "elements": 1e-10, "rows": 1e-9, "near": 1e-11, "stream": 1e-11, "again": 1e-11, "far": 5e-11,
}  # fmt: skip
_STRAYS, _APART, _HUBER, _ROUNDS = 1.5, 0.6, 0.15, 60
Floats = npt.NDArray[np.float64]


def samples(rows: Sequence[Sequence[Any]]) -> tuple[Calls, Floats, Floats]:
    """Calls, whether their data was far, and log seconds, from (operator, text, far seconds, near seconds)."""
    calls: list[tuple[str, str]] = []
    place: list[float] = []
    times: list[float] = []
    for op, text, far, near in rows:
        if far is None:
            continue
        calls.append((op, text))
        place.append(0.0 if near is None else 1.0)
        times.append(far)
        if near is not None:
            calls.append((op, text))
            place.append(0.0)
            times.append(near)
    return Calls.of(calls), np.array(place), np.log(np.array(times))


def fit(calls: Calls, place: Floats, log_s: Floats) -> Prices:
    """The most probable prices."""
    found = amounts(calls)
    terms = found.terms.copy()
    terms[:, NAMES.index("far")] *= place
    of: dict[str, dict[str, dict[str, float]]] = {}
    spread: dict[str, float] = {}
    most: dict[str, tuple[float, float]] = {}
    for family in sorted(set(found.family.tolist())):
        rows = np.flatnonzero(found.family == family)
        ops = [found.op[i] for i in rows]
        prices, left = _family(terms[rows], ops, log_s[rows])
        of[Family(family).name] = prices
        most[Family(family).name] = _short(calls.flops[rows].max()), _short(calls.nbytes[rows].max())
        spread[Family(family).name] = float(np.clip(1.4826 * np.median(np.abs(left)), 0.05, 0.5))
    count = len(set(zip(calls.op, calls.text, strict=True)))
    return Prices(of=of, spread=spread, most=most, machine=machine(), calls=count)


def _family(terms: Floats, ops: list[str], log_s: Floats) -> tuple[dict[str, dict[str, float]], Floats]:
    used = np.flatnonzero(terms.max(axis=0) > 0)
    names = sorted(set(ops))
    number = np.array([names.index(each) for each in ops])
    x = terms[:, used]
    start = np.log([START[NAMES[i]] for i in used])
    t, k = len(used), len(names)
    params = np.concatenate([start, np.zeros(k * t)])
    precision = np.concatenate([np.full(t, _STRAYS**-2), np.full(k * t, _APART**-2)])
    prior = params.copy()
    own = t + number[:, None] * t + np.arange(t)[None, :]
    step, last = 1e-2, np.inf

    def evaluate(at: Floats) -> tuple[Floats, Floats]:
        cost = x * np.exp(at[:t][None, :] + at[own])
        return cost, np.log(cost.sum(axis=1)) - log_s

    def loss(at: Floats, left: Floats) -> float:
        a = np.abs(left)
        huber = np.where(a < _HUBER, a**2, 2 * _HUBER * a - _HUBER**2) / 0.1**2
        return float(huber.sum() + (precision * (at - prior) ** 2).sum())

    cost, left = evaluate(params)
    last = loss(params, left)
    for _ in range(_ROUNDS):
        share = cost / cost.sum(axis=1)[:, None]
        weight = np.minimum(_HUBER / np.maximum(np.abs(left), 1e-9), 1.0) / 0.1**2
        jacobian = np.zeros((len(x), len(params)))
        jacobian[:, :t] = share
        np.put_along_axis(jacobian, own, share, axis=1)
        hessian = (jacobian * weight[:, None]).T @ jacobian + np.diag(precision)
        gradient = (jacobian * weight[:, None]).T @ left + precision * (params - prior)
        while step < 1e8:
            moved = params - np.linalg.solve(hessian + step * np.diag(np.diag(hessian)), gradient)
            then, other = evaluate(moved)
            if loss(moved, other) < last:
                gained = last - loss(moved, other)
                params, cost, left, last, step = moved, then, other, last - gained, max(step / 4, 1e-6)
                break
            step *= 4
        else:
            break
        if gained < 1e-4 * last:
            break
    family = np.exp(params[:t])
    found = {"": {NAMES[i]: _short(v) for i, v in zip(used, family, strict=True)}}
    for j, name in enumerate(names):
        mine = family * np.exp(params[t + j * t : t + (j + 1) * t])
        found[name] = {NAMES[i]: _short(v) for i, v in zip(used, mine, strict=True)}
    return found, left


def _short(value: float) -> float:
    return float(f"{value:.3g}")


def errors(prices: Prices, calls: Calls, place: Floats, log_s: Floats) -> Floats:
    """Log of predicted over measured, at these prices."""
    found = amounts(calls)
    terms = found.terms.copy()
    terms[:, NAMES.index("far")] *= place
    return np.asarray(np.log((terms * prices.table(found)).sum(axis=1)) - log_s)


def read(path: Path = TIMES) -> list[list[Any]]:
    """(operator, text, far, near) of the measured pool."""
    stored = json.loads(path.read_text())
    pool = drawn(stored["count"], stored["rare"], stored["seed"])
    return [[each.name, each.text, *times] for each, times in zip(pool, stored["times"], strict=True)]


def _safe_softmax(draw: Draw) -> Operator:
    return call("_safe_softmax", draw.tensor(64, 1 << 20), "-1", None)


def _part_gradient(draw: Draw) -> Operator:
    x = [draw.size(2, 64), draw.size(2, 256), draw.size(4, 256)]
    if draw.of(True, False):
        return call("select_backward", x[1:], str(x), "0", "0")
    return call("slice_backward", [max(x[0] // 2, 1), *x[1:]], str(x), "0", "0", str(max(x[0] // 2, 1)), "1")


def _rare_view(draw: Draw) -> Operator:
    x = draw.tensor(64, 1 << 16)
    name = draw.of("unsafe_split", "_unsafe_view", "unbind", "squeeze", "empty_like", "split", "alias")
    x = [max(x[0] % 64, 1), x[1]]
    more: dict[str, tuple[str | None, ...]] = {
        "unsafe_split": (str(max(x[0] // 4, 1)), "0"), "_unsafe_view": (str([x[0] * x[1]]),), "unbind": ("0",),
        "squeeze": ("0",), "split": (str(max(x[0] // 4, 1)), "0"),
    }  # fmt: skip
    return call(name, x, *more.get(name, ()))


def _rare_one(draw: Draw) -> Operator:
    x = draw.tensor()
    name = draw.of("clamp", "rsub", "ones_like", "zeros_like", "lt", "ne", "tril", "zeros")
    if name == "zeros":
        return call(name, str(x), "6", None, None, None)
    more: dict[str, tuple[str | None, ...]] = {
        "clamp": ("0.1", "0.9"), "rsub": ("1", "1"), "lt": ("0.5",), "ne": ("0.5",), "tril": ("0",),
    }  # fmt: skip
    return call(name, x, *more.get(name, ()))


def _rare_lookup(draw: Draw) -> Operator:
    rows, width, words = draw.size(8, 4096), draw.size(4, 256), draw.size(4, 2048)
    if draw.of(True, False):
        return call("scatter_add", [rows, width], "1", ("long int", [rows, width]), [rows, width])
    return call("index_add", [rows, width], "0", ("long int", [words]), [words, width], "1")


# Kinds of calls that are found in few models, or take little of their time.
RARE_KINDS: Kinds = (
    (2, _safe_softmax), (2, _part_gradient), (3, _rare_view), (4, _rare_one), (1, _rare_lookup),
)  # fmt: skip


def drawn(count: int, rare: int, seed: int) -> list[Operator]:
    """The pool: common kinds of calls, then rare ones."""
    return [*random_pool(count, seed), *random_pool(rare, seed, RARE_KINDS)]


def measure_pool(path: Path = TIMES) -> None:
    """Time the pool with one thread, several times with minutes between; of every call the smallest time counts.

    A machine that is shared has slow seconds in which everything takes twice as long.
    """
    import torch

    from foretrace.cost.operators.bench import measure

    torch.set_num_threads(1)
    pool = drawn(COUNT, RARE, SEED)
    rounds = [measure(pool, target_s=0.004).seconds for _ in range(TURNS)]
    best = {key: min(each.get(key, np.inf) for each in rounds) for key in rounds[0]}
    times = [[_rounded(best.get(each.key)), _rounded(best.get(each.near_key))] for each in pool]
    stored = {"count": COUNT, "rare": RARE, "seed": SEED, "machine": machine(), "threads": 1, "times": times}
    write_bytes(path, json.dumps(stored, separators=(",", ":")).encode())


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.4g}")


def check(rows: list[list[Any]]) -> str:
    """Errors on a fifth of the pool that the prices were not fitted to, by family."""
    held = np.random.default_rng(0).random(len(rows)) < 0.2
    known = fit(*samples([row for row, out in zip(rows, held, strict=True) if not out]))
    calls, place, log_s = samples([row for row, out in zip(rows, held, strict=True) if out])
    found = errors(known, calls, place, log_s)
    lines = [f"{'family':<12} {'rows':>5} {'median':>7} {'p90':>7}"]
    for family in [*sorted(set(calls.family.tolist())), -1]:
        mine = np.abs(np.expm1(found[calls.family == family] if family >= 0 else found))
        name = Family(family).name if family >= 0 else "all"
        lines.append(f"{name:<12} {len(mine):>5} {np.median(mine):>7.1%} {np.quantile(mine, 0.9):>7.1%}")
    return "\n".join(lines)


def another(rows: list[list[Any]], prices: Prices, seed: int) -> list[list[Any]]:
    """The same calls on a made-up processor: its clock, its resources and those of its families cost other times."""
    if not seed:
        return rows
    rng = np.random.default_rng(seed)
    clock, resource, family = rng.normal(0, 0.5), rng.normal(0, 0.5, 5), rng.normal(0, 0.2, (len(Family), 5))
    calls = Calls.of([(row[0], row[1]) for row in rows])
    moved = []
    for place in (np.array([float(row[3] is not None) for row in rows]), np.zeros(len(rows))):
        cost = rows_of(calls, prices, place)[0].cost
        change = np.exp(clock * CLOCKED + resource + family[calls.family])
        moved.append((cost * change).sum(axis=1) / cost.sum(axis=1))
    return [
        [row[0], row[1], row[2] * far, None if row[3] is None else row[3] * near]
        for row, far, near in zip(rows, *moved, strict=True)
    ]


def seconds_of(rows: list[list[Any]]) -> dict[str, float]:
    """As a calibration stores them."""
    found = {f"{row[0]} {row[1]}": row[2] for row in rows}
    return found | {f"near {row[0]} {row[1]}": row[3] for row in rows if row[3] is not None}


def choose(rows: RegressionRows, k: int) -> npt.NDArray[np.int64]:
    """The k calls that KMeans task sampling takes, by what a call spends and how large it is."""
    total = rows.cost.sum(axis=1)
    family = rows.family[:, None] == np.unique(rows.family)[None, :]
    share = rows.cost / total[:, None]
    return choose_tasks(np.concatenate([np.log2(total)[:, None], rows.size, 3 * share, 3 * family], axis=1), k,
                        standardise=False)  # fmt: skip


def choose_check(rows: list[list[Any]]) -> str:
    """How to choose k operators: prices from half of the pool, candidates a quarter, told of the last quarter.

    Median error of a call, and of sums of 60 calls in which all count alike, over this machine and six made-up ones.
    """
    rows = [row for row in rows if row[2] is not None]
    part = np.random.default_rng(1).random(len(rows))
    first, second, third = ([r for r, p in zip(rows, part, strict=True) if low <= p < high]
                            for low, high in ((0, 0.5), (0.5, 0.75), (0.75, 1)))  # fmt: skip
    prices = fit(*samples(first))
    pool, known = rows_of(Calls.of([(row[0], row[1]) for row in second]), prices, 0.5)
    at = np.flatnonzero(known)
    pool = pool.take(at)
    designed = choose_designed(pool, 50)
    ways: dict[str, Callable[[int], list[npt.NDArray[np.int64]]]] = {
        "random": lambda k: [np.random.default_rng(seed).permutation(len(at))[:k] for seed in range(3)],
        "KMeans": lambda k: [choose(pool, k)],
        "designed": lambda k: [designed[:k]],
    }
    target, said = rows_of(Calls.of([(r[0], r[1]) for r in third]), prices,
                           np.array([float(r[3] is not None) for r in third]))  # fmt: skip
    lines = [f"{'k':>3} {'chosen':<9} {'call':>6} {'sum':>6} {'held':>6}"]
    for k in (0, 10, 20, 50):
        for way, picks in ways.items():
            found = []
            for seed in range(7):
                here, there = another(second, prices, seed), another(third, prices, seed)
                truth = np.log([row[2] for row in there])[said]
                for few in picks(k):
                    local = Local.of(seconds_of([here[at[i]] for i in few]), prices)
                    mean, variance = local.fit.predict(target.take(np.flatnonzero(said)))
                    found.append(_told(mean - truth, truth, local.widened * np.sqrt(variance)))
            lines.append(f"{k:>3} {way:<9} " + " ".join(f"{value:>6.1%}" for value in np.mean(found, axis=0)))
    return "\n".join(lines)


def _told(error: Floats, truth: Floats, deviation: Floats) -> tuple[float, float, float]:
    rng = np.random.default_rng(5)
    sums = []
    for _ in range(60):
        some = rng.integers(0, len(truth), 60)
        weight = np.exp(truth[some] / 2)
        sums.append(abs((np.exp(error[some]) * weight).sum() / weight.sum() - 1))
    return (
        float(np.median(np.abs(np.expm1(error)))),
        float(np.median(sums)),
        float(np.mean(np.abs(error) < 1.2816 * deviation)),
    )


def main(words: Sequence[str]) -> int:
    if not words or words[0] not in ("measure", "fit", "check", "choose"):
        print("say measure, fit, check or choose", file=sys.stderr)
        return 2
    if words[0] == "measure":
        measure_pool()
    elif words[0] == "check":
        print(check(read()))
    elif words[0] == "choose":
        print(choose_check(read()))
    else:
        prices = fit(*samples(read()))
        write_bytes(PRICES, msgspec.json.format(msgspec.json.encode(prices), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
