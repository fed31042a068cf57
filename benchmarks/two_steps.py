"""How often the range from two recorded steps holds what all steps of that recording say.

    python benchmarks/two_steps.py [--pairs 12] [RECORDING ...]

Of every recording with three steps or more, neighbouring steps are taken at random and asked as if nothing else had
been recorded: for the step, whose range should hold the median of all steps in eight of ten cases, and for what
techniques save by noise alone, whose range should hold what they save of all steps. *Told*: cases in which something
is gained beyond doubt; *wrong*: such cases in which all steps say that nothing is. No setting was fitted to any of
them.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from foretrace import flow
from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.noise import FEWEST_STEPS, between
from foretrace.simulate.timeline import simulate
from foretrace.techniques.arguments import parse_all
from tables import ROOT, percent, shared_traces, table

ASKED = ("fused-optimizer", "compiled", "prefetch-data workers=1", "cuda-graphs", "channels-last",
         "scale kind=kernel by=0.8", "scale kind=cpu by=0.7", "scale phase=forward by=0.8",
         "scale phase=backward by=0.9")  # fmt: skip


def two_of(graph: TaskGraph, first: int) -> TaskGraph:
    """The graph with two neighbouring steps alone to ask about."""
    step = np.where((graph.step >= first) & (graph.step < first + 2), graph.step - first, -1).astype(graph.step.dtype)
    return replace(graph, marks=graph.marks[first : first + 3], step=step)


def row(path: Path, pairs: int, level: float = 0.8) -> list[str] | None:
    """A line of the table; None of a recording that is too short, or none."""
    try:
        graph = flow.read(path).graph().graph
    except ForetraceError:
        return None
    if graph.n_steps < FEWEST_STEPS:
        return None
    whole, techniques = simulate(graph), []
    for each in parse_all(ASKED):
        try:
            techniques.append((each, whole.step_time_s - simulate(each.predict(graph)).step_time_s))
        except ForetraceError:
            continue
    held, wide, saved = [], [], []
    for first in random.Random(7).sample(range(graph.n_steps - 1), min(pairs, graph.n_steps - 1)):
        cut = two_of(graph, first)
        before = simulate(cut)
        found = before.noise_s(level)
        held.append(found.low_s <= whole.step_time_s <= found.high_s)
        wide.append((found.high_s - found.low_s) / before.step_time_s)
        for each, truly_s in techniques:
            try:
                after = simulate(each.predict(cut))
            except ForetraceError:
                continue
            value = before.step_time_s - after.step_time_s
            below, above = between(before.draws, after.draws, np.subtract, level)
            told = value - below > 0
            saved.append((value - below <= truly_s <= value + above, told, told and truly_s <= 0))
    share = np.mean(saved, axis=0).tolist() if saved else [float("nan")] * 3
    return [path.name.partition(".")[0], str(graph.n_steps), str(len(held)), percent(float(np.mean(held))),
            percent(float(np.median(wide))), str(len(saved)), *map(percent, share)]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path, nargs="*", help="by default all that are here")
    parser.add_argument("--pairs", type=int, default=12, help="of steps, of each recording")
    given = parser.parse_args()
    traces = shared_traces()
    known: Iterable[Path] = [*(ROOT / "tests" / "data").glob("*.gz"), *(traces.rglob("*.json.gz") if traces else ())]
    rows = [found for path in given.recordings or sorted(known) if (found := row(path, given.pairs)) is not None]
    header = ("recording", "steps", "pairs", "step held %", "width % of step", "savings", "held %", "told %", "wrong %")
    print(table(header, rows))


if __name__ == "__main__":
    main()
