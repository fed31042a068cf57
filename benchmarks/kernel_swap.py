"""Kernel times of one GPU on the graph that another GPU recorded, for the same model and input.

    python benchmarks/kernel_swap.py H100.json.gz MI300X.json.gz

Predicts each machine's step from the other's recording: operators are matched in order, a matched operator's device
tasks take the other machine's time, and host work is scaled by a factor that is given (the ratio of the two hosts'
own cost, data loading apart). It is the best case of what is knowable from one machine: the factor uses the target.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrace.graph.builder import build
from foretrace.graph.kernels import longest_common
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.simulate.replay import replay
from foretrace.trace.read import read

Int64 = npt.NDArray[np.int64]

_HOST = (TaskKind.CPU, TaskKind.CALL)
_MOST_EDITS = 4_000


@dataclass(frozen=True, kw_only=True)
class Swapped:
    """One direction; errors relative to the measured window of the target."""

    measured_s: float
    kernels_only: float  # error with the other machine's kernels and this machine's host
    with_host: float  # error when host work is scaled as well
    host_factor: float
    data_factor: float
    matched: float  # share of device time whose operator found its counterpart


def swap(graph: TaskGraph, target: TaskGraph) -> Swapped:
    """Predict `target`'s window from `graph` with the target's kernel times and host factor."""
    measured = _window(target)
    mine, theirs = _runs(graph), _runs(target)
    pairs = longest_common(*_codes(graph, mine, target, theirs), _MOST_EDITS)
    dur = graph.dur.astype(np.float64)
    covered = 0
    for a, b in pairs.tolist():
        rows, other = mine[a], theirs[b]
        before, after = int(graph.dur[rows].sum()), int(target.dur[other].sum())
        covered += after
        dur[rows] *= after / before if before else 1.0
    total = int(target.dur[np.concatenate(theirs)].sum())
    swapped = graph.with_columns(dur=np.rint(dur).astype(np.int64))
    host = _ratio(graph, target, np.isin(graph.kind, _HOST), np.isin(target.kind, _HOST))
    data = _ratio(graph, target, graph.kind == TaskKind.DATA, target.kind == TaskKind.DATA)
    dur[np.isin(graph.kind, _HOST)] *= host
    dur[graph.kind == TaskKind.DATA] *= data
    scaled = graph.with_columns(dur=np.rint(dur).astype(np.int64))
    return Swapped(
        measured_s=measured / 1e9,
        kernels_only=_window(swapped) / measured - 1,
        with_host=_window(scaled) / measured - 1,
        host_factor=host,
        data_factor=data,
        matched=covered / max(total, 1),
    )


def _window(graph: TaskGraph) -> int:
    _, end = replay(graph)
    return int(end[graph.marks[-1]] - end[graph.marks[0]])


def _ratio(graph: TaskGraph, target: TaskGraph, a: npt.NDArray[np.bool_], b: npt.NDArray[np.bool_]) -> float:
    inside_a, inside_b = graph.step >= 0, target.step >= 0
    before, after = int(graph.dur[a & inside_a].sum()), int(target.dur[b & inside_b].sum())
    return after / before if before and after else 1.0


def _runs(graph: TaskGraph) -> list[Int64]:
    """Device tasks of each operator call, in order: neighbours on a stream that one operator launched."""
    rows = np.flatnonzero(graph.on_device & (graph.op >= 0))
    rows = rows[np.lexsort((rows, graph.lane[rows]))]
    new = np.ones(len(rows), dtype=np.bool_)
    new[1:] = (graph.op[rows][1:] != graph.op[rows][:-1]) | (graph.lane[rows][1:] != graph.lane[rows][:-1])
    return np.split(rows, np.flatnonzero(new)[1:]) if len(rows) else []


def _codes(a: TaskGraph, runs_a: list[Int64], b: TaskGraph, runs_b: list[Int64]) -> tuple[Int64, Int64]:
    """Operator names of the runs as integers that agree between the two graphs."""
    number: dict[str, int] = {}
    sides = []
    for graph, runs in ((a, runs_a), (b, runs_b)):
        names = [graph.names[graph.op[rows[0]]] for rows in runs]
        sides.append(np.array([number.setdefault(n, len(number)) for n in names], dtype=np.int64))
    return sides[0], sides[1]


def main(paths: list[str]) -> None:
    first, second = (build(read(path)) for path in paths)
    for graph, target in ((first, second), (second, first)):
        result = swap(graph, target)
        print(
            f"{graph.info.devices[0]} -> {target.info.devices[0]}: measured {result.measured_s * 1e3:.1f} ms, "
            f"error {result.kernels_only:+.1%} with kernels alone, {result.with_host:+.1%} with host factor "
            f"{result.host_factor:.2f} (data {result.data_factor:.2f}); {result.matched:.1%} matched"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
