"""Ray: the JSON of `GET /api/jobs/`, `ray list jobs --format json`, or of stored `JobInfo` objects.

`start_time` and `end_time` are milliseconds of Unix time; Ray stamps `start_time` when a job is submitted, so how long
it waited is not known. The public list tells no GPUs: they are taken from `entrypoint_num_gpus` where it is there
(JobInfo has it, JobDetails has not), else from the metadata that the job was submitted with.
"""

from __future__ import annotations

import math
from typing import Any

from foretrace.fleet.formats.jobs import Aside, Bad, LogRows, Row, gpus_of, name_of
from foretrace.fleet.formats.kubernetes import inside
from foretrace.fleet.formats.source import Source

STATES = {"PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"}
_MILLISECOND = 1_000_000


def _jobs(source: Source) -> list[tuple[str, str, Any]]:
    """Return (where, name by the key of an object, job): a list of jobs, or jobs by their name."""
    top = source.json
    if isinstance(top, dict) and isinstance(top.get("result"), dict):  # the state API wraps its answer
        top = top["result"].get("result", top["result"])
    if isinstance(top, dict) and top and all(isinstance(each, dict) for each in top.values()):
        return [(f"job {name[:40]!r}", name, job) for name, job in top.items()]
    if isinstance(top, list):
        return [(f"entry {at}", "", job) for at, job in enumerate(top, 1)]
    return []


def matches(source: Source) -> bool:
    """Return whether its jobs have an entry point and a state."""
    if source.first.lstrip()[:1] not in ("[", "{"):
        return False
    jobs = _jobs(source)
    return bool(jobs) and any(isinstance(job, dict) and {"entrypoint", "status"} <= set(job) for _, _, job in jobs)


def rows(source: Source, *, gpus_key: str = "gpus") -> LogRows:
    """Keep `entrypoint` and `status` in details; take metadata `queue`, `user` and `model` where they stand.

    gpus_key: the key of the metadata that says how many GPUs a job holds. Jobs without an end are set aside.
    """

    def job(item: tuple[str, Any]) -> Row:
        key, told = item
        if not isinstance(told, dict):
            raise Bad("it is no object")
        name = name_of(inside(told, "submission_id", of=str) or inside(told, "job_id", of=str) or key, "submission_id")
        status = inside(told, "status", of=str)
        if status not in STATES:
            raise Bad(f"status is {status[:40]!r}, not one of {', '.join(sorted(STATES))}")
        metadata = inside(told, "metadata")
        gpus, share = _gpus(told.get("entrypoint_num_gpus"), metadata.get(gpus_key), gpus_key)
        submit, end = _time(told.get("start_time"), "start_time"), _time(told.get("end_time"), "end_time")
        if submit is None:
            raise Aside("jobs that never started")
        if end is None:
            raise Aside("jobs that have not ended")
        if end < submit:
            raise Bad("it ended before it started")
        if end == submit:
            raise Aside("jobs that ended in the millisecond in which they began")
        return {
            "job": name,
            "submit": submit,
            "end": end,
            "gpus": gpus,
            "share": share,
            "work_s": (end - submit) / 1e9,
            "model": str(metadata.get("model", "")),
            "user": str(metadata.get("user", "")),
            "tenant": str(metadata.get("queue", "")),
            "entrypoint": inside(told, "entrypoint", of=str),
            "status": status,
        }

    return LogRows(
        rows=((where, (name, each)) for where, name, each in _jobs(source)), parse=job, dated=True,
        details={"entrypoint": "", "status": ""},
        notes=lambda: ["Ray stamps start_time at submission, so run times contain what the jobs waited"],
    )  # fmt: skip


def _gpus(entrypoint: Any, metadata: Any, key: str) -> tuple[int, float]:
    """Return (GPUs, share of one): metadata goes before what the entry point alone reserves; raises Bad or Aside."""
    if metadata is not None:
        if not isinstance(metadata, str | int) or isinstance(metadata, bool):
            raise Bad(f"metadata {key} is {str(metadata)[:40]!r}, not a number of GPUs")
        if str(metadata).strip() == "0":
            raise Aside("jobs without GPUs")
        return gpus_of(str(metadata), f"metadata {key}"), 1.0
    if entrypoint is None:
        raise Bad(f"it tells no GPUs, neither entrypoint_num_gpus nor metadata {key}")
    if not isinstance(entrypoint, int | float) or isinstance(entrypoint, bool) or not 0 <= entrypoint < 1e9:
        raise Bad(f"entrypoint_num_gpus is {str(entrypoint)[:40]!r}, not a number of GPUs")
    if entrypoint == 0:
        raise Aside("jobs without GPUs")
    if entrypoint < 1:
        return 1, float(entrypoint)
    if entrypoint != math.floor(entrypoint):
        raise Bad(f"entrypoint_num_gpus is {entrypoint}, neither whole nor below one")
    return int(entrypoint), 1.0


def _time(value: Any, what: str) -> int | None:
    """Return milliseconds as nanoseconds; raises Bad."""
    if value is None or value == 0:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 9e12:
        raise Bad(f"{what} is {str(value)[:40]!r}, not milliseconds of Unix time")
    return int(value) * _MILLISECOND
