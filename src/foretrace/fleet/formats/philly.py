"""Philly, one row per job: timestamp, duration (s), num_gpus, gpu_time (s), cluster (virtual cluster).

The per-job form of the Microsoft Philly trace (Jeon et al., USENIX ATC 2019) that the Pollux artifact ships.
"""

from __future__ import annotations

from foretrace.fleet.formats.jobs import Clock, Row, above_zero, collect_table, gpus_of
from foretrace.fleet.formats.source import Source
from foretrace.fleet.workload import Workload

COLUMNS = ("timestamp", "duration", "num_gpus", "cluster")


def matches(source: Source) -> bool:
    """Return whether its header names the columns."""
    return set(COLUMNS) <= set(source.header)


def read(source: Source, *, salvage: bool = False, ties: str = "file", timezone: str | None = None) -> Workload:
    """Return jobs are called by the number of their row, from 0. The file is not sorted; the workload is."""
    clock = Clock.of(timezone)

    def job(cells: dict[str, str]) -> Row:
        return {
            "submit": clock.read(cells["timestamp"], "timestamp"),
            "gpus": gpus_of(cells["num_gpus"], "num_gpus"),
            "work_s": above_zero(cells["duration"], "duration"),
            "tenant": cells["cluster"],
        }

    return collect_table(
        source, "philly", job, COLUMNS, ("gpu_time",), salvage=salvage, dated=True, ties=ties, notes=lambda: clock.note
    )
