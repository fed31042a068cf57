"""How long a command takes from the shell, the first time ever and after that.

    python benchmarks/startup.py

*First* has an empty cache of compiled loops, as after an installation (pip has compiled the Python files by then);
*after* is the median of several runs with a warm one.
Wall time, as a user waits for it; CPU time beside it, since it does not depend on what else runs.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tables import ROOT, shared_traces

RUNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One command; targets are CPU seconds where they are given."""

    what: str
    first_wall_s: float
    first_cpu_s: float
    wall_s: float
    cpu_s: float
    first_target: float | None
    target: float | None

    @property
    def met(self) -> bool:
        """Whether both times are below their targets."""
        first = self.first_target is None or self.first_cpu_s < self.first_target
        return first and (self.target is None or self.cpu_s < self.target)


def measure() -> list[Row]:
    """Import, help, and `show` on a small and on a real recording."""
    show = ["-m", "foretrace", "show"]
    traces = shared_traces()
    commands: list[tuple[str, list[str], float | None, float | None]] = [
        ("python -c pass", ["-c", "pass"], None, None),
        ("import foretrace", ["-c", "import foretrace"], None, 0.150),
        ("foretrace --help", ["-m", "foretrace", "--help"], None, 0.300),
        ("foretrace show, 3 k events", [*show, str(ROOT / "tests/data/recommender.json.gz")], 5.0, 1.0),
    ]
    if traces is not None:
        trace = next((traces / "kineto").glob("resnet50_num_workers_0*"))
        commands.append(("foretrace show, 76 k events", [*show, str(trace)], 5.0, 2.0))
    return [_measure(what, command, first, target) for what, command, first, target in commands]


def _measure(what: str, command: Sequence[str], first_target: float | None, target: float | None) -> Row:
    with tempfile.TemporaryDirectory() as caches:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {
            "NUMBA_CACHE_DIR": caches
        }
        first_wall, first_cpu = _run(command, environment)
        times = [_run(command, environment) for _ in range(RUNS)]
    return Row(
        what=what,
        first_wall_s=first_wall,
        first_cpu_s=first_cpu,
        wall_s=statistics.median(wall for wall, _ in times),
        cpu_s=statistics.median(cpu for _, cpu in times),
        first_target=first_target,
        target=target,
    )


def _run(command: Sequence[str], environment: dict[str, str]) -> tuple[float, float]:
    """Wall and CPU seconds of one process."""

    def used() -> float:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return children.ru_utime + children.ru_stime

    wall, cpu = time.perf_counter(), used()
    subprocess.run([sys.executable, *command], env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - wall, used() - cpu


if __name__ == "__main__":
    for row in measure():
        print(
            f"{row.what:32} first {row.first_wall_s:.2f} s ({row.first_cpu_s:.2f} s CPU), after {row.wall_s:.3f} "
            f"s ({row.cpu_s:.3f} s CPU)"
        )
