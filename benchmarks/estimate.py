"""What `foretrace estimate` takes from the shell: wall and CPU time of the whole command, and its peak memory.

    python benchmarks/estimate.py

Each command runs in a process of its own with a warm cache of compiled loops; the median of several runs. The targets
are those of the largest one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

RUNS = 5
LARGEST, TARGET_S, TARGET_BYTES = "llama-2-70b", 5.0, 1e9
COMMANDS = (
    (LARGEST, "--device", "h100"),
    ("llama-2-7b", "--device", "a100"),
    ("resnet50", "--device", "h100", "--batch", "64", "--precision", "bf16"),
    ("bert", "--device", "l4", "--batch", "8", "--inference"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One command."""

    command: str
    operators: int
    parameters: int
    wall_s: float
    cpu_s: float
    peak_bytes: float

    @property
    def met(self) -> bool | None:
        """Whether it stays below the targets; None for commands that have none."""
        if not self.command.startswith(LARGEST):
            return None
        return self.wall_s < TARGET_S and self.peak_bytes < TARGET_BYTES


def measure() -> list[Row]:
    """All commands."""
    return [_measure(command) for command in COMMANDS]


def _measure(command: tuple[str, ...]) -> Row:
    runs = [_run(command) for _ in range(RUNS + 1)][1:]
    return Row(
        command=" ".join(command),
        operators=runs[0].operators,
        parameters=runs[0].parameters,
        wall_s=statistics.median(run.wall_s for run in runs),
        cpu_s=statistics.median(run.cpu_s for run in runs),
        peak_bytes=statistics.median(run.peak_bytes for run in runs),
    )


def _run(command: tuple[str, ...]) -> Row:
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "foretrace", "estimate", *command, "--json"], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        out = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"estimate: {' '.join(command)} ended with exit code {process.returncode}.")
    answer = json.loads(out)
    return Row(
        command=" ".join(command),
        operators=answer["operators"],
        parameters=answer["parameters"],
        wall_s=time.perf_counter() - begin,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * 1024.0,
    )


if __name__ == "__main__":
    for row in measure():
        print(
            f"{row.command:52} {row.operators:>7,} operators {row.parameters / 1e9:7.2f} G parameters "
            f"{row.wall_s:5.2f} s ({row.cpu_s:.2f} s CPU) {row.peak_bytes / 1e9:.2f} GB"
        )
