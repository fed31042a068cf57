"""Philly, one row per job: timestamp, duration (s), num_gpus, gpu_time (s), cluster (virtual cluster).

The per-job form of the Microsoft Philly trace (Jeon et al., USENIX ATC 2019) that the Pollux artifact ships.
"""

from __future__ import annotations

from foretrace.fleet.formats.jobs import (
    Clock,
    Row,
    above_zero,
    collect,
    cut,
    gpus_of,
    placed,
    table_notes,
    with_columns,
)  # fmt: skip
from foretrace.fleet.formats.source import Source, table
from foretrace.fleet.workload import Workload

COLUMNS = ("timestamp", "duration", "num_gpus", "gpu_time", "cluster")


def matches(source: Source) -> bool:
    """Its header names the columns."""
    return {"timestamp", "duration", "num_gpus", "cluster"} <= set(source.header)


def read(source: Source, *, salvage: bool = False, ties: str = "file", timezone: str | None = None) -> Workload:
    """Jobs are called by the number of their row, from 0. The file is not sorted; the workload is."""
    taken = table(source)
    at = with_columns(source, taken, ("timestamp", "duration", "num_gpus", "cluster"))
    when, long, many, whose = at["timestamp"], at["duration"], at["num_gpus"], at["cluster"]
    width, clock, row = len(taken.header), Clock.of(timezone), -1

    def job(cells: list[str] | None) -> Row:
        nonlocal row
        row += 1
        cells = cut(cells, width)
        return {
            "job": str(row),
            "submit": clock.read(cells[when], "timestamp"),
            "gpus": gpus_of(cells[many], "num_gpus"),
            "work_s": above_zero(cells[long], "duration"),
            "tenant": cells[whose],
        }

    return collect(
        source, "philly", placed(taken.rows), job, salvage=salvage, dated=True, ties=ties,
        notes=lambda: [*table_notes(taken, COLUMNS), *clock.note],
    )  # fmt: skip
