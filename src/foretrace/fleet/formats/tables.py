"""Logs with a header and a row per job, of which each column says one thing.

philly: the per-job form of the Microsoft Philly trace (Jeon et al., USENIX ATC 2019) that the Pollux artifact ships.
tiresias: job files of the Tiresias simulator (Gu et al., NSDI 2019). pollux: workloads of the simulators of Pollux and
Sia (Qiao et al., OSDI 2021; Jayaram Subramanya et al., SOSP 2023). helios: `cluster_log.csv` (Hu et al., SC 2021), a
Slurm accounting log with queue times, as SenseTime published it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from foretrace.fleet.formats import jobs
from foretrace.fleet.formats.source import Source

PHILLY = ("timestamp", "duration", "num_gpus", "cluster")  # seconds, virtual cluster
TIRESIAS = ("job_id", "num_gpu", "submit_time", "duration")
POLLUX = ("name", "time", "application", "num_replicas", "batch_size")
HELIOS = ("job_id", "user", "vc", "gpu_num", "node_num", "state", "submit_time", "start_time", "end_time", "duration")
RESULTS = {"start_time", "end_time", "JCT"}  # with these a file of Tiresias is what a simulation returned
UNKNOWN = {"", "None", "NaN", "nan", "Unknown", "NULL"}
Meaning = tuple[str, Callable[[str, str], Any]]  # key of a job, and what reads (text, name of the column)


def is_tiresias(source: Source) -> bool:
    """Return whether its header names the columns, and it is no result of a run."""
    return source.has(*TIRESIAS) and not source.has(*RESULTS)


def philly(source: Source, *, timezone: str | None = None) -> jobs.LogRows:
    """Read jobs, called by the number of their row, from 0. The file is not sorted; the workload is."""
    clock = jobs.Clock.of(timezone)
    meanings: dict[str, Meaning] = {
        "timestamp": ("submit", clock.read), "num_gpus": ("gpus", jobs.gpus_of),
        "duration": ("work_s", jobs.above_zero), "cluster": ("tenant", _text),
    }  # fmt: skip
    return jobs.table_rows(source, _job(meanings), PHILLY, ("gpu_time",), dated=True, notes=lambda: clock.note)


def tiresias(source: Source) -> jobs.LogRows:
    """Read jobs; `interval`, seconds since the job before, is kept in details, nan where the file has none."""
    also: dict[str, Meaning] = {
        "iterations": ("iterations", jobs.optional), "model_name": ("model", _stripped),
        "interval": ("interval", jobs.optional),
    }  # fmt: skip
    meanings: dict[str, Meaning] = {
        "job_id": ("job", lambda text, what: jobs.name_of(text.strip(), what)),
        "submit_time": ("submit", jobs.not_below_zero), "num_gpu": ("gpus", jobs.gpus_of),
        "duration": ("work_s", jobs.above_zero),
    }  # fmt: skip
    return jobs.table_rows(source, _job(meanings | also), TIRESIAS, tuple(also), details={"interval": math.nan})


def pollux(source: Source) -> jobs.LogRows:
    """Read jobs. `work_s` is nan: how much is to be trained, the file says only by the name of the application."""
    meanings: dict[str, Meaning] = {
        "name": ("job", jobs.name_of), "time": ("submit", jobs.not_below_zero), "num_replicas": ("gpus", jobs.gpus_of),
        "application": ("model", jobs.name_of), "batch_size": ("batch", jobs.above_zero),
    }  # fmt: skip
    return jobs.table_rows(source, _job(meanings, work_s=math.nan), POLLUX)


def helios(source: Source, *, timezone: str | None = None) -> jobs.LogRows:
    """Read jobs; `state` and `nodes` are kept in details. Jobs without GPUs, and jobs that never ran, are set aside."""
    clock = jobs.Clock.of(timezone)

    def job(cells: dict[str, str]) -> jobs.Row:
        submit = clock.read(cells["submit_time"], "submit_time")
        if jobs.whole(cells["gpu_num"], "gpu_num") == 0:
            raise jobs.Aside("jobs without GPUs")
        gpus = jobs.gpus_of(cells["gpu_num"], "gpu_num")
        if cells["start_time"].strip() in UNKNOWN:
            raise jobs.Aside("jobs that never started")
        seconds = jobs.not_below_zero(cells["duration"], "duration")
        if seconds == 0:
            raise jobs.Aside("jobs that ran for less than a second")
        start = clock.read(cells["start_time"], "start_time", after=submit)
        return {
            "job": jobs.name_of(cells["job_id"].strip(), "job_id"),
            "submit": submit,
            "start": start,
            "end": clock.read(cells["end_time"], "end_time", after=start),
            "gpus": gpus,
            "work_s": seconds,
            "tenant": cells["vc"],
            "user": cells["user"],
            "state": cells["state"],
            "nodes": float(jobs.whole(cells["node_num"], "node_num")),
        }

    details = {"state": "", "nodes": 1.0}
    return jobs.table_rows(source, job, HELIOS, dated=True, details=details, notes=lambda: clock.note)


def _job(meanings: Mapping[str, Meaning], **same: Any) -> Callable[[dict[str, str]], jobs.Row]:
    """Return what reads a row by the meaning of each column; `same`: what all jobs have."""
    return lambda cells: (
        same | {key: read(cells[column], column) for column, (key, read) in meanings.items() if column in cells}
    )


def _text(text: str, what: str) -> str:
    return text


def _stripped(text: str, what: str) -> str:
    return text.strip()
