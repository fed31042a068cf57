"""Job files of the Tiresias simulator (Gu et al., NSDI 2019): job_id, num_gpu, submit_time, duration, ..."""

from __future__ import annotations

import math

from foretrace.fleet.formats.jobs import Row, above_zero, collect_table, gpus_of, name_of, not_below_zero, optional
from foretrace.fleet.formats.source import Source
from foretrace.fleet.workload import Workload

COLUMNS = ("job_id", "num_gpu", "submit_time", "duration")
ALSO = ("iterations", "model_name", "interval")
RESULTS = {"start_time", "end_time", "JCT"}  # with these it is what a simulation returned, not its input


def matches(source: Source) -> bool:
    """Return whether its header names the columns, and it is no result of a run."""
    return set(COLUMNS) <= set(source.header) and not set(source.header) >= RESULTS


def read(source: Source, *, salvage: bool = False, ties: str = "file") -> Workload:
    """Return `interval`, seconds since the job before, is kept in details; nan where the file has none."""

    def known(cells: dict[str, str], key: str) -> float:
        return optional(cells[key], key) if key in cells else math.nan

    def job(cells: dict[str, str]) -> Row:
        return {
            "job": name_of(cells["job_id"].strip(), "job_id"),
            "submit": not_below_zero(cells["submit_time"], "submit_time"),
            "gpus": gpus_of(cells["num_gpu"], "num_gpu"),
            "work_s": above_zero(cells["duration"], "duration"),
            "model": cells["model_name"].strip() if "model_name" in cells else "",
            "iterations": known(cells, "iterations"),
            "interval": known(cells, "interval"),
        }

    return collect_table(
        source, "tiresias", job, COLUMNS, ALSO, salvage=salvage, ties=ties, details={"interval": math.nan}
    )
