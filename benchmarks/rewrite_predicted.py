"""Predict what graph substitution gains before anything of it runs, then run it: MetaFlow's claim, on this processor.

    python benchmarks/rewrite_predicted.py [--budget 20] [--rounds 11] [--page] [NAME ...]

Per model: the graphs that greedy (alpha 1) and relaxed search (1.05) find, and that with the rules alone that always
pay. Each is predicted from the times of its operators alone, taken again after the search; that row is written first,
to benchmarks/data/rewrites.jsonl, and gets what the run says when it is there. What is measured is each graph against
the one as captured, in turns: both are without the original's Python code, so operators alone decide. Rows of an arm
that spreads are `inconclusive`. Writes the section "Predicted before it ran" of docs/rewrite.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import combinations
from statistics import median

import msgspec
import torch

from foretrace.files import write_bytes
from foretrace.plan.rewrite import catalog, measure, session
from foretrace.plan.rewrite.emit import emit
from foretrace.plan.rewrite.rules import Rule
from foretrace.plan.rewrite.substitute import substitute
from foretrace.plan.rewrite.terms import Graph
from rewrite import ALPHAS, HEAD, MODELS, PAGE, captured
from rewrite import SECTION as GAINS
from tables import ROOT, load, machine, percent, table, today, update

ROWS = ROOT / "benchmarks" / "data" / "rewrites.jsonl"
SECTION = "Predicted before it ran"
ASKED, SPREAD = 0.10, 0.05


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A graph of a model: times faster than the graph as captured."""

    time: str
    machine: str
    model: str
    way: str
    operators: int
    same: bool  # the graph is another way's: it runs once
    predicted: float
    measured: tuple[float, float, float] | None = None  # value, 80 % range

    @property
    def error(self) -> float:
        assert self.measured is not None
        return self.predicted / self.measured[0] - 1

    @property
    def verdict(self) -> str:
        assert self.measured is not None
        value, low, high = self.measured
        if (high - low) / 2 > SPREAD * value:
            return "inconclusive"
        return "met" if abs(self.error) <= ASKED else "missed"


def kept() -> list[Row]:
    return [msgspec.json.decode(each, type=Row) for each in ROWS.read_bytes().splitlines()] if ROWS.exists() else []


def write(rows: Sequence[Row]) -> None:
    write_bytes(ROWS, b"".join(msgspec.json.encode(each) + b"\n" for each in rows))


def rows_of(name: str, rules: tuple[Rule, ...], before: list[Row], *, budget: int, rounds: int) -> list[Row]:
    """The rows of one model; its predictions are written before its graphs run."""
    model, costs = captured(name)
    graphs: dict[str, Graph] = {}
    for way, alpha in ALPHAS.items():
        found = substitute(model.graph, rules, costs, alpha=alpha, budget=budget)
        graphs |= {"folded": found.folded, way: found.after}
    fresh = session.fresh(model, costs, graphs.values())
    whole, rows, seen = fresh.of(model.graph), list[Row](), set[object]()
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    for way, graph in graphs.items():
        key = frozenset(map(id, graph.order()))
        rows.append(
            Row(
                time=now, machine=machine(), model=name, way=way,
                operators=len(graph.order()), same=key in seen, predicted=whole / fresh.of(graph),
            )
        )  # fmt: skip
        seen.add(key)
    write([*before, *rows])
    arms = {row.way: emit(model, graphs[row.way], way=fresh.way) for row in rows if not row.same}
    for way, emitted in arms.items():
        if not measure.check(model, graphs[way], emitted).equal:
            raise RuntimeError(f"{name}, {way}: the rewritten graph computes something else")
    arms = {"captured": emit(model, model.graph), **arms}
    gain = measure.gain({way: session.running(each, model) for way, each in arms.items()}, rounds=rounds)
    ratios = {way: (each.value, each.low, each.high) for way, each in gain.gains.items()}
    return [msgspec.structs.replace(row, measured=ratios[row.way]) for row in rows if not row.same]


def page(rows: Sequence[Row]) -> str:
    """The section."""
    newest = {each.model: each.time for each in rows if each.measured is not None}  # the last run of each model
    shown = [each for each in rows if each.measured is not None and each.time == newest[each.model]]
    off = [abs(each.error) for each in shown if each.verdict != "inconclusive"]
    pairs = []
    for one, other in combinations(shown, 2):
        assert one.measured is not None and other.measured is not None
        apart = one.measured[1] > other.measured[2] or other.measured[1] > one.measured[2]
        if one.model == other.model and apart:
            pairs.append((one.predicted > other.predicted) == (one.measured[0] > other.measured[0]))
    inside = f"median {percent(median(off))} %, worst {percent(max(off))} %" if off else "none concluded"

    def line(each: Row) -> tuple[str, ...]:
        assert each.measured is not None
        value, low, high = each.measured
        return (
            f"{each.model}, {each.way}", str(each.operators), f"{each.predicted:.2f}",
            f"{value:.2f} ({low:.2f} – {high:.2f})", percent(each.error, signed=True), each.verdict,
        )  # fmt: skip

    return (
        f"*{today()}, {machine()}; one thread; load averages {load()}.*\n\n"
        "Times faster than the graph as captured, without the Python code of the original on either side (`python "
        "benchmarks/rewrite_predicted.py`). *Predicted*: sums of operators timed alone, again after the search, "
        f"written down before a graph ran. *Measured*: in turns, median, 80 % interval. Asked: {100 * ASKED:.0f} %; "
        f"*inconclusive*: known to no better than ± {100 * SPREAD:.0f} %.\n\n"
        f"{len(shown)} graphs of {len({each.model for each in shown})} models, {len(off)} conclusive: {inside}; within "
        f"10 %: {sum(each <= ASKED for each in off)}. Pairs of graphs of a model that measurements tell apart and the "
        f"prediction orders alike: {sum(pairs)} of {len(pairs)}.\n\n"
        + table(("model, graph", "operators", "predicted", "measured", "error, %", "verdict"), map(line, shown))
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--budget", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--page", action="store_true", help="run nothing; write the section from the rows kept")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rules, _ = catalog.verified(catalog.RULES)
    rows = kept()
    for name in () if given.page else given.names or list(MODELS):
        rows += rows_of(name, rules, rows, budget=given.budget, rounds=given.rounds)
        write(rows)
        for each in rows:
            if each.model == name and each.measured:
                print(f"{name}, {each.way}: predicted {each.predicted:.3f}, measured {each.measured}, "
                      f"{100 * each.error:+.1f} %, {each.verdict}", flush=True)  # fmt: skip
    if any(each.measured for each in rows):
        update(PAGE, HEAD, {SECTION: page(rows)}, (GAINS, SECTION))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
