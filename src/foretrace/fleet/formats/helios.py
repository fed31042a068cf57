"""Helios `cluster_log.csv` (Hu et al., SC 2021): a Slurm accounting log with queue times, as SenseTime published it."""

from __future__ import annotations

from foretrace.fleet.formats.jobs import (
    Aside,
    Clock,
    Row,
    collect,
    cut,
    gpus_of,
    name_of,
    not_below_zero,
    placed,
    table_notes,
    whole,
    with_columns,
)  # fmt: skip
from foretrace.fleet.formats.source import Source, table
from foretrace.fleet.workload import Workload

COLUMNS = ("job_id", "user", "vc", "gpu_num", "node_num", "state", "submit_time", "start_time", "end_time", "duration")
UNKNOWN = {"", "None", "NaN", "nan", "Unknown", "NULL"}


def matches(source: Source) -> bool:
    """Its header names the columns."""
    return set(COLUMNS) <= set(source.header)


def read(source: Source, *, salvage: bool = False, ties: str = "file", timezone: str | None = None) -> Workload:
    """`state` and `nodes` are kept in details. Jobs without GPUs, and jobs that never ran, are set aside."""
    taken = table(source)
    at = with_columns(source, taken, COLUMNS)
    width, clock = len(taken.header), Clock.of(timezone)

    def job(cells: list[str] | None) -> Row:
        cells = cut(cells, width)
        submit = clock.read(cells[at["submit_time"]], "submit_time")
        if whole(cells[at["gpu_num"]], "gpu_num") == 0:
            raise Aside("jobs without GPUs")
        gpus = gpus_of(cells[at["gpu_num"]], "gpu_num")
        if cells[at["start_time"]].strip() in UNKNOWN:
            raise Aside("jobs that never started")
        seconds = not_below_zero(cells[at["duration"]], "duration")
        if seconds == 0:
            raise Aside("jobs that ran for less than a second")
        start = clock.read(cells[at["start_time"]], "start_time", after=submit)
        return {
            "job": name_of(cells[at["job_id"]].strip(), "job_id"),
            "submit": submit,
            "start": start,
            "end": clock.read(cells[at["end_time"]], "end_time", after=start),
            "gpus": gpus,
            "work_s": seconds,
            "tenant": cells[at["vc"]],
            "user": cells[at["user"]],
            "state": cells[at["state"]],
            "nodes": float(whole(cells[at["node_num"]], "node_num")),
        }

    return collect(
        source, "helios", placed(taken.rows), job, salvage=salvage, dated=True, ties=ties,
        details={"state": "", "nodes": 1.0}, notes=lambda: [*table_notes(taken, COLUMNS), *clock.note],
    )  # fmt: skip
