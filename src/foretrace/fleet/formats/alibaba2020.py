"""Alibaba's PAI cluster of 2020 (Weng et al., NSDI 2022): `pai_task_table`, with `pai_job_table` beside it.

Both come without a header line (the names stand in `.header` files); a header line is taken where it is there.
Tasks: job_name, task_name, inst_num, status, start_time, end_time, plan_cpu, plan_mem, plan_gpu (percent of one GPU,
per instance), gpu_type (the kind the task was given). Jobs: job_name, inst_id, user, status, start_time (submission),
end_time. Times are seconds of a shifted clock.
"""

from __future__ import annotations

import math
from pathlib import Path

from foretrace.fleet.formats.jobs import (
    Aside,
    Bad,
    LogRows,
    Row,
    RowAccount,
    cut,
    name_of,
    not_below_zero,
    optional,
    placed,
    table_notes,
)  # fmt: skip
from foretrace.fleet.formats.source import Source, load, table

TASKS = (
    "job_name", "task_name", "inst_num", "status", "start_time", "end_time", "plan_cpu", "plan_mem", "plan_gpu",
    "gpu_type",
)  # fmt: skip
JOBS = ("job_name", "inst_id", "user", "status", "start_time", "end_time")
STATES = {"Running", "Terminated", "Failed", "Waiting", "Interrupted"}


def matches(source: Source) -> bool:
    """Return whether the first line has ten or six columns with a PAI state in the fourth, or their header."""
    cells = source.header
    return cells in (TASKS, JOBS) or (len(cells) in (len(TASKS), len(JOBS)) and cells[3] in STATES)


def rows(source: Source, *, jobs: str | Path | None = None, bind_types: bool = False) -> LogRows:
    """Read jobs; tasks of one name make one job, all or nothing: the sum of their instances.

    jobs: `pai_job_table`, which tells submission and user; without it a job is submitted when its first task starts.
    bind_types: take the kind of GPU a job was given for the only kind it may use; else it stands in
    `details["given_type"]` alone.
    """
    if len(source.header) == len(JOBS):
        raise source.fail("tells no GPUs; name pai_task_table and give this file as the option jobs.")
    taken = table(source, header=source.header == TASKS)
    known = _jobs(Path(jobs)) if jobs is not None else {}
    parts: dict[str, tuple[str, Row]] = {}

    def task(cells: list[str] | None) -> Row:
        cells = cut(cells, len(TASKS))
        name = name_of(cells[0], "job_name")
        instances = optional(cells[2], "inst_num")
        percent = optional(cells[8], "plan_gpu")
        if math.isnan(percent) or percent == 0:
            raise Aside("tasks without GPUs")
        if percent < 0 or percent > 1e6:
            raise Bad(f"plan_gpu is {cells[8][:40]!r}, not a percentage of GPUs")
        if cells[3] not in STATES:
            raise Bad(f"status is {cells[3][:40]!r}, not one of {', '.join(sorted(STATES))}")
        if math.isnan(instances) or instances < 1 or instances != int(instances) or instances > 1e6:
            raise Bad(f"inst_num is {cells[2][:40]!r}, not a whole number from 1 on")
        if not cells[4].strip() or not cells[5].strip():
            raise Aside("tasks that did not start or end within the trace")
        start, end = not_below_zero(cells[4], "start_time"), not_below_zero(cells[5], "end_time")
        if end < start:
            raise Bad("it ended before it started")
        each = math.ceil(percent / 100)
        return {
            "job": name, "submit": start, "start": start, "end": end, "gpus": int(instances) * each,
            "work_s": end - start, "share": min(1.0, percent / 100), "given_type": cells[9].strip(), "status": cells[3],
            "rounded": percent > 100 and percent % 100 != 0,
        }  # fmt: skip

    def join(ledger: RowAccount, rows: list[tuple[str, Row]]) -> list[tuple[str, Row]]:
        mixed = rounded = 0
        for where, row in rows:
            rounded += bool(row.pop("rounded"))
            first = parts.get(row["job"])
            if first is None:
                parts[row["job"]] = (where, row)
                continue
            ledger.joined["further tasks of a job"] = ledger.joined.get("further tasks of a job", 0) + 1
            whole = first[1]
            if row["share"] != whole["share"]:
                mixed += 1
                whole["share"] = max(row["share"], whole["share"])
            whole["gpus"] += row["gpus"]
            whole["start"] = whole["submit"] = min(whole["start"], row["start"])
            whole["end"] = max(whole["end"], row["end"])
            kinds = {*whole["given_type"].split("|"), row["given_type"]} - {""}
            whole["given_type"] = "|".join(sorted(kinds))
            whole["status"] = row["status"] if whole["status"] == "Terminated" else whole["status"]
        made, stray, short = [], 0, 0
        for where, row in parts.values():
            row["work_s"] = row["end"] - row["start"]
            if bind_types:
                row["gpu_type"] = row["given_type"]
            submitted, row["user"] = known.get(row["job"], (row["start"], ""))
            stray += bool(known) and row["job"] not in known
            row["submit"] = min(submitted, row["start"])
            if row["work_s"] == 0:
                short += 1
                continue
            made.append((where, row))
        if short:
            ledger.aside["jobs that ran for less than a second"] = short
        if mixed:
            ledger.notes.append(
                f"{mixed} tasks need another share of a GPU than their job's others; the largest is taken"
            )
        if rounded:
            ledger.notes.append(f"{rounded} tasks ask for a broken number of GPUs above one, which was rounded up")
        if stray:
            ledger.notes.append(f"{stray} jobs are not in the job table and are submitted when their first task starts")
        if not known:
            ledger.notes.append("without the job table a job is submitted when its first task starts")
        return made

    return LogRows(
        rows=placed(taken.rows), parse=task, finish=join, details={"given_type": "", "status": ""},
        notes=lambda: table_notes(taken, TASKS),
    )  # fmt: skip


def _jobs(path: Path) -> dict[str, tuple[float, str]]:
    """Return submission and user by job name; raises ForetraceError where a line is not of the job table."""
    source = load(path)
    taken = table(source, header=source.header == JOBS)
    known = {}
    for number, found in taken.rows:
        try:
            cells = cut(found, len(JOBS))
            if cells[4].strip():
                known[cells[0]] = (not_below_zero(cells[4], "start_time"), cells[2])
        except Bad as why:
            raise source.fail(f"is no pai_job_table: line {number} cannot be read ({why}); name that table.") from None
    return known
