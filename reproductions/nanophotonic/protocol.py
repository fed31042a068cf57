"""Hybrid search: error against simulator calls, with learned, nearest and random starts, inside and outside of lessons.

    python -m reproductions nanophotonic [--problem NAME] [--seeds N] [--quick] [--speed] [--write]
    python -m reproductions nanophotonic --spectrum FILE [--strategy NAME] [--calls N]

Cells are kept beside this file, in a file of each problem, and not run again; refiners of `MORE` have cells of their
own, so that one can be added, or go on to more calls, without the others. `--spectrum`: 81 shares of light that a film
shall reflect from 400 to 800 nm, one a line; its thicknesses are printed. `--speed` times the transfer matrix beside
`tmm`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from math import exp, inf
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.reading import read_text
from foretrace.search.constrained import ConstrainedBayes
from foretrace.search.hybrid import Hybrid
from foretrace.search.minimise import Found, minimise
from foretrace.search.named import strategy_named
from foretrace.search.reinforcement import DQN, REINFORCE
from foretrace.search.strategies import CMAES, MCMC, Evolution, RandomSearch
from foretrace.search.strategy import SearchStrategy
from reproductions import parser_of
from reproductions.kept import Cell, measured
from reproductions.nanophotonic.films import WAVELENGTHS, Film, indices, reflectance
from reproductions.nanophotonic.problems import EACH, PROBLEMS
from reproductions.systems import front, put
from tables import machine, table, today

HERE = Path(__file__).parent
AT = (10, 50, 200, 1000)  # calls after the lessons
CALLS = 200  # of all arms but those of MORE
# As they come: nothing was tuned. Steps from a start that is near are a quarter as long where there is such a setting.
COLD: dict[str, SearchStrategy] = {
    "CMA-ES": CMAES(), "MCMC": MCMC(beta=100.0), "DQN": DQN(), "REINFORCE": REINFORCE(),
}  # fmt: skip
FIRST = tuple(COLD)  # whose cells are one
COLD |= {"evolution": Evolution(), "Bayes": ConstrainedBayes()}
# Problem, refiner and calls of cells of their own. A call of Bayes takes a hundred times as long as one of a film.
MORE = (
    ("films", "evolution", 1000),
    *((each, "evolution", 200) for each in ("accelerators", "plans")),
    *((each, "Bayes", 50) for each in ("films", "accelerators", "plans")),
    *(("films", each, 1000) for each in ("MCMC", "REINFORCE", "CMA-ES", "DQN")),
)
NEAR: dict[str, SearchStrategy] = {"CMA-ES": CMAES(sigma=0.075), "REINFORCE": REINFORCE(sigma=0.05)}
WIDE = {"nearest start": ("CMA-ES",), "hybrid": ("CMA-ES", "DQN")}  # refiners that have these arms, too
SEEDS, ROUNDS = 5, 1500

MARK = "<!-- tables -->\n"  # what is below it on the page is written here


def measure(key: Cell) -> Cell:
    """All arms on the targets of a seed, or of one refiner: group -> arm -> errors by target and count of calls."""
    targets, lessons, _ = PROBLEMS[key["problem"]]
    lessons, rounds = (30, 20) if key["quick"] else (lessons, ROUNDS)
    only, most = key.get("refiner"), key.get("calls", AT[1] if key["quick"] else CALLS)
    at = tuple(each for each in AT if each <= most)
    found: Cell = {}
    for target in targets(key["seed"], 1 if key["quick"] else EACH):
        group = found.setdefault(target.group, {})

        def error(cost: float, best: float = target.optimum, film: bool = key["problem"] == "films") -> float | None:
            return None if cost == inf else cost if film else exp(cost - best)

        def add(arm: str, run: Found[Any], skip: int, into: dict[str, Any] = group) -> None:
            costs = [min((cost for calls, cost in run.curve if calls <= skip + each), default=inf) for each in at]
            into.setdefault(arm, []).append([error(cost) for cost in costs])

        def search(strategy: SearchStrategy, calls: int, on: Any = target.problem) -> Found[Any]:
            return minimise(on, strategy=strategy, calls=calls, seed=key["seed"])

        if not only:
            add("random", search(RandomSearch(), at[-1]), 0)
        for name in (only,) if only else FIRST:
            refiner = COLD[name]
            near = NEAR.get(name, refiner)
            add(f"{name}, random start", search(refiner, at[-1]), 0)
            for words, given in (
                ("nearest start", (0, 0.0)), ("learned start", (4, 0.0)), ("hybrid", (4, 0.5)),
            ):  # fmt: skip
                if words != "learned start" and (only or name not in WIDE[words]):
                    continue
                strategy = Hybrid(
                    refiner=refiner, near=near, lessons=lessons, rounds=rounds, answers=given[0], blind=given[1]
                )
                run = search(strategy, lessons + at[-1])
                assert run.learned is not None
                add(f"{name}, {words}", run, run.learned.lessons)
                if (name, words, only) == ("CMA-ES", "learned start", None):
                    alone = [error(run.learned.nearest), error(run.learned.cost)]
                    group.setdefault("starts", []).append(alone)
        if not only:
            late = search(CMAES(), lessons + at[-1])
            group.setdefault("CMA-ES, random start, as many calls in all", []).append([error(late.cost)])
    return found


def tables(cells: Sequence[Cell], name: str) -> str:
    """Medians over targets and seeds, by group."""
    lines = []
    for group in [each for each in cells[0] if isinstance(cells[0][each], dict)]:
        arms = _arms([each for each in cells if "refiner" not in each], group)
        for calls in sorted({each["calls"] for each in cells if "refiner" in each}):
            arms |= _arms([each for each in cells if each.get("calls") == calls], group)
        nearest, learned = zip(*arms.pop("starts"), strict=True)
        many = len(nearest)
        late = arms.pop("CMA-ES, random start, as many calls in all")
        body = [[arm, *(_middle(column) for column in zip(*rows, strict=True))] for arm, rows in arms.items()]
        wide = max(map(len, body))
        body = sorted((each + ["–"] * (wide - len(each)) for each in body), key=lambda each: _place(each[0]))
        head = ["start and refiner", *(f"{each} calls" for each in AT[: wide - 1])]
        lines += [
            f"### {name}, {group} ({many} targets)", "", table(head, body), "",
            f"The starts alone: nearest lesson {_middle(nearest)}, learned answer {_middle(learned)}. CMA-ES with all "
            f"calls, those of the lessons and {CALLS}: {_middle([row[0] for row in late])}.", "",
        ]  # fmt: skip
    return "\n".join(lines)


def _arms(cells: Sequence[Cell], group: str) -> dict[str, list[list[float | None]]]:
    """Errors by target and count of calls, of every arm."""
    found: dict[str, list[list[float | None]]] = {}
    for cell in cells:
        for arm, rows in cell[group].items():
            found.setdefault(arm, []).extend(rows)
    return found


def _place(arm: str) -> int:
    """Of an arm in the table: those of a refiner stand together."""
    return ["", *COLD].index(arm.partition(",")[0] if "," in arm else "")


def _middle(errors: Sequence[float | None]) -> str:
    found = median(inf if each is None else each for each in errors)
    return f"{found:.3f}" if found < inf else "none fits"


def speed() -> str:
    """Designs per second of the transfer matrix and of `tmm`, in the same run, and by how much they differ."""
    if find_spec("tmm") is None:
        raise ForetraceError("--speed and --write need tmm to compare with; pip install tmm.")
    tmm, stack = import_module("tmm"), indices(10)
    designs = np.random.default_rng(0).uniform(20, 220, (2000, 10))
    reflectance(designs[:1], WAVELENGTHS, stack)
    ours, theirs = [], []
    for _ in range(5):
        begin = time.process_time()
        found = reflectance(designs, WAVELENGTHS, stack)
        middle = time.process_time()
        known = [
            [tmm.coh_tmm("s", list(stack), [inf, *each, inf], 0, w)["R"] for w in WAVELENGTHS] for each in designs[:2]
        ]
        ours.append((middle - begin) / len(designs))
        theirs.append((time.process_time() - middle) / 2)
    apart = float(np.abs(found[:2] - known).max())
    return (
        f"10 layers, {len(WAVELENGTHS)} wavelengths, CPU time: {1 / median(ours):,.0f} designs/s here, "
        f"{1 / median(theirs):.1f} by tmm, {median(theirs) / median(ours):,.0f} times as fast; largest difference "
        f"{apart:.1e}."
    )


def designed(path: Path, strategy: str, calls: int) -> str:
    """The film for a spectrum in a file. Raises ForetraceError for one of another length."""
    try:
        target = [float(line) for line in read_text(path, mend="give a number a line").split()]
    except ValueError as error:
        raise ForetraceError(f"{path} must hold numbers, one a line; {error}.") from None
    found = minimise(Film(target), strategy=strategy_named(strategy, calls), calls=calls)
    learned = f" Nearest lesson {found.learned.nearest:.4f}." if found.learned else ""
    return f"{found.best} nm: error {found.cost:.4f} after {found.calls} calls.{learned}"


def main(arguments: Sequence[str]) -> int:
    """Run what is not kept yet and print the tables."""
    parser = parser_of("nanophotonic", __doc__ or "")
    parser.add_argument("--problem", choices=[*PROBLEMS], help="only this one")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--quick", action="store_true", help="in small; kept nowhere")
    parser.add_argument("--speed", action="store_true", help="time the transfer matrix beside tmm")
    parser.add_argument("--write", action="store_true", help="write README.md")
    parser.add_argument("--spectrum", type=Path, help="design a film for it")
    parser.add_argument("--strategy", default="hybrid:cmaes")
    parser.add_argument("--calls", type=int, default=4000)
    asked = parser.parse_args(arguments)
    if asked.spectrum:
        print(designed(asked.spectrum, asked.strategy, asked.calls))
        return 0
    parts = [f"*{today()}, {machine()}; `python -m reproductions nanophotonic --write`.*\n"]
    if asked.speed or asked.write:
        parts.append(f"## The simulator\n\n{speed()}\n")
    for name in [asked.problem] if asked.problem else ([] if asked.speed else PROBLEMS):
        keys = [{"problem": name, "seed": seed, "quick": asked.quick} for seed in range(asked.seeds)]
        keys += [
            {**key, "refiner": refiner, "calls": min(calls, 10) if asked.quick else calls}
            for problem, refiner, calls in MORE
            if problem == name and not (asked.quick and refiner in FIRST) for key in keys[: asked.seeds]
        ]  # fmt: skip
        cells = [{**key, **measure(key)} for key in keys] if asked.quick else measured(
            HERE / f"{name}.jsonl", keys, measure
        )  # fmt: skip
        parts.append(f"## {name.capitalize()}: {PROBLEMS[name][2]}\n\n{tables(cells, name)}")
    text = "\n".join(parts)
    print(text)
    if asked.write:
        _, page = front((HERE / "README.md").read_text(encoding="utf-8"))
        put(HERE / "README.md", f"{page.partition(MARK)[0]}{MARK}{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
