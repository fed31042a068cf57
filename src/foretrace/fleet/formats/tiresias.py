"""Job files of the Tiresias simulator (Gu et al., NSDI 2019): job_id, num_gpu, submit_time, duration, ..."""

from __future__ import annotations

import math

from foretrace.fleet.formats.jobs import (
    Row,
    above_zero,
    collect,
    cut,
    gpus_of,
    name_of,
    not_below_zero,
    optional,
    placed,
    table_notes,
    with_columns,
)  # fmt: skip
from foretrace.fleet.formats.source import Source, table
from foretrace.fleet.workload import Workload

COLUMNS = ("job_id", "num_gpu", "submit_time", "duration")
ALSO = ("iterations", "model_name", "interval")
RESULTS = {"start_time", "end_time", "JCT"}  # with these it is what a simulation returned, not its input


def matches(source: Source) -> bool:
    """Its header names the columns, and it is no result of a run."""
    return set(COLUMNS) <= set(source.header) and not set(source.header) >= RESULTS


def read(source: Source, *, salvage: bool = False, ties: str = "file") -> Workload:
    """`interval`, seconds since the job before, is kept in details; nan where the file has none."""
    taken = table(source)
    at = with_columns(source, taken, COLUMNS, ALSO)
    width = len(taken.header)

    def known(cells: list[str], key: str) -> float:
        return optional(cells[at[key]], key) if key in at else math.nan

    def job(cells: list[str] | None) -> Row:
        cells = cut(cells, width)
        return {
            "job": name_of(cells[at["job_id"]].strip(), "job_id"),
            "submit": not_below_zero(cells[at["submit_time"]], "submit_time"),
            "gpus": gpus_of(cells[at["num_gpu"]], "num_gpu"),
            "work_s": above_zero(cells[at["duration"]], "duration"),
            "model": cells[at["model_name"]].strip() if "model_name" in at else "",
            "iterations": known(cells, "iterations"),
            "interval": known(cells, "interval"),
        }

    return collect(
        source, "tiresias", placed(taken.rows), job, salvage=salvage, ties=ties, details={"interval": math.nan},
        notes=lambda: table_notes(taken, (*COLUMNS, *ALSO)),
    )  # fmt: skip
