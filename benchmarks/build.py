"""How fast recordings become task graphs.

    python benchmarks/build.py [RECORDING ...]

Rates are tasks of the finished graph per second of CPU time of this process, for `build` alone (the recording is
already in memory); the best of several runs after one that compiles.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foretrace.graph.builder import build
from foretrace.trace.read import read
from tables import shared_traces

RECORDINGS = (
    "hta/df_index_resolver.json.gz",
    "hta/trace_diff_control.json.gz",
    "kineto/resnet50_num_workers_0.worker0.1623143089861.pt.trace.json.gz",
    "tracelens/h100_google_owlv2-large-patch14-ensemble__1016001.json.gz",
)
RUNS = 7
TARGET = 300_000  # tasks per CPU-second on the largest recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One recording."""

    recording: str
    events: int
    tasks: int
    edges: int
    seconds: float  # CPU

    @property
    def rate(self) -> float:
        """Tasks per CPU-second."""
        return self.tasks / self.seconds


def measure(recordings: Sequence[Path]) -> list[Row]:
    """Build every recording's lowest rank."""
    rows = []
    for path in recordings:
        trace = read(path)
        graph = build(trace)
        times = []
        for _ in range(RUNS):
            begin = time.process_time()
            build(trace)
            times.append(time.process_time() - begin)
        rows.append(
            Row(recording=path.name, events=len(trace), tasks=len(graph), edges=graph.edges, seconds=min(times))
        )
    return rows


def recordings() -> list[Path]:
    """Those of other machines where they are at hand, else the project's own."""
    traces = shared_traces()
    if traces is None:
        return sorted((Path(__file__).resolve().parents[1] / "tests" / "data").glob("*.json.gz"))
    return [traces / name for name in RECORDINGS]


if __name__ == "__main__":
    for row in measure([Path(each) for each in sys.argv[1:]] or recordings()):
        print(f"{row.recording[:50]:50} {row.tasks:>7,} tasks {1e3 * row.seconds:>6.0f} ms {row.rate:>10,.0f} tasks/s")
