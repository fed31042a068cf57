"""What it costs that every graph is verified before it is replayed, as a share of a what-if.

    python benchmarks/soundness.py [RECORDING ...]

CPU time of this process inside the check (`foretrace.graph.sound.first_fault`) and in all of a what-if, interval and
assumptions included; the least of several runs after one that compiles.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from build import recordings
from foretrace.errors import NotApplicableError
from foretrace.flow import read
from foretrace.graph import sound
from foretrace.graph.taskgraph import TaskGraph
from foretrace.techniques.arguments import parse
from foretrace.techniques.whatif import whatif

TECHNIQUES = ("scale kind=kernel by=0.5", "fused-optimizer", "cuda-graphs")
RUNS = 3
TARGET = 0.05  # share of a what-if


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One what-if."""

    recording: str
    technique: str
    tasks: int
    seconds: float  # CPU, the whole what-if
    checks: int
    checking: float  # CPU seconds in them

    @property
    def share(self) -> float:
        """Of the what-if."""
        return self.checking / self.seconds


def measure(paths: Sequence[Path]) -> list[Row]:
    """Every technique on every recording that it fits."""
    rows = []
    for path in paths:
        graph = read(path).graph().graph
        for technique in TECHNIQUES:
            try:
                whatif(graph, [parse(technique)])
            except NotApplicableError:
                continue
            runs = [_once(graph, technique) for _ in range(RUNS)]
            seconds, checks, checking = min(runs)
            rows.append(
                Row(recording=path.name, technique=technique, tasks=len(graph), seconds=seconds, checks=checks,
                    checking=checking)
            )  # fmt: skip
    return rows


def _once(graph: TaskGraph, technique: str) -> tuple[float, int, float]:
    """(seconds, checks, seconds in them) of one what-if."""
    check, spent = sound.first_fault, list[float]()

    def timed(graph: TaskGraph) -> sound.Fault | None:
        begin = time.process_time()
        found = check(graph)
        spent.append(time.process_time() - begin)
        return found

    sound.first_fault = timed
    try:
        begin = time.process_time()
        whatif(graph, [parse(technique)])
        return time.process_time() - begin, len(spent), sum(spent)
    finally:
        sound.first_fault = check


if __name__ == "__main__":
    for row in measure([Path(each) for each in sys.argv[1:]] or recordings()):
        print(
            f"{row.recording[:40]:40} {row.tasks:>7,} tasks  {row.technique:26} {1e3 * row.seconds:>6.0f} ms  "
            f"{row.checks:>3} checks {1e3 * row.checking:>6.2f} ms  {row.share:>5.1%}"
        )
