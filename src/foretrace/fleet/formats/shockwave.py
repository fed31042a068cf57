"""Job lists of Shockwave (Zheng et al., NSDI 2023): Gavel's lines with two more columns, 12 apart by tabs.

Job type, command, directory, steps flag, needs data, total steps, scale factor, mode (static, accordion, gns),
priority weight, SLO, duration in seconds, arrival in seconds.
"""

from __future__ import annotations

import math

from foretrace.fleet.formats.gavel import common, slo_of
from foretrace.fleet.formats.jobs import Bad, Row, above_zero, collect, cut, number, placed, table_notes
from foretrace.fleet.formats.source import Source, table
from foretrace.fleet.workload import Workload

MODES = ("static", "accordion", "gns")


def matches(source: Source) -> bool:
    """Return whether twelve columns apart by tabs."""
    return source.first.count("\t") == 11


def read(source: Source, *, salvage: bool = False, ties: str = "file") -> Workload:
    """Return jobs are called by the number of their row, from 0; `work_s` is the duration as the file states it."""
    taken = table(source, "\t", header=False)

    def job(cells: list[str] | None) -> Row:
        cells = cut(cells, 12)
        if cells[7] not in MODES:
            raise Bad(f"mode is {cells[7][:40]!r}, not one of {', '.join(MODES)}")
        return common(cells[0], cells[5], cells[6], cells[11]) | {
            "mode": cells[7],
            "priority": number(cells[8], "priority weight"),
            "slo": slo_of(cells[9]),
            "work_s": above_zero(cells[10], "duration"),
        }

    return collect(
        source, "shockwave", placed(taken.rows), job, salvage=salvage, ties=ties,
        details={"slo": math.nan, "mode": "static"}, notes=lambda: table_notes(taken),
    )  # fmt: skip
