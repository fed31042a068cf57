"""Helios `cluster_log.csv` (Hu et al., SC 2021): a Slurm accounting log with queue times, as SenseTime published it."""

from __future__ import annotations

from foretrace.fleet.formats.jobs import Aside, Clock, Row, collect_table, gpus_of, name_of, not_below_zero, whole
from foretrace.fleet.formats.source import Source
from foretrace.fleet.workload import Workload

COLUMNS = ("job_id", "user", "vc", "gpu_num", "node_num", "state", "submit_time", "start_time", "end_time", "duration")
UNKNOWN = {"", "None", "NaN", "nan", "Unknown", "NULL"}


def matches(source: Source) -> bool:
    """Return whether its header names the columns."""
    return set(COLUMNS) <= set(source.header)


def read(source: Source, *, salvage: bool = False, ties: str = "file", timezone: str | None = None) -> Workload:
    """Return `state` and `nodes` are kept in details. Jobs without GPUs, and jobs that never ran, are set aside."""
    clock = Clock.of(timezone)

    def job(cells: dict[str, str]) -> Row:
        submit = clock.read(cells["submit_time"], "submit_time")
        if whole(cells["gpu_num"], "gpu_num") == 0:
            raise Aside("jobs without GPUs")
        gpus = gpus_of(cells["gpu_num"], "gpu_num")
        if cells["start_time"].strip() in UNKNOWN:
            raise Aside("jobs that never started")
        seconds = not_below_zero(cells["duration"], "duration")
        if seconds == 0:
            raise Aside("jobs that ran for less than a second")
        start = clock.read(cells["start_time"], "start_time", after=submit)
        return {
            "job": name_of(cells["job_id"].strip(), "job_id"),
            "submit": submit,
            "start": start,
            "end": clock.read(cells["end_time"], "end_time", after=start),
            "gpus": gpus,
            "work_s": seconds,
            "tenant": cells["vc"],
            "user": cells["user"],
            "state": cells["state"],
            "nodes": float(whole(cells["node_num"], "node_num")),
        }

    return collect_table(
        source, "helios", job, COLUMNS, salvage=salvage, dated=True, ties=ties,
        details={"state": "", "nodes": 1.0}, notes=lambda: clock.note,
    )  # fmt: skip
