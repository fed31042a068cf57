"""Slurm accounting: `sacct -a -X -P --format=JobID,User,Partition,State,Submit,Eligible,Start,End,ElapsedRaw,...`.

Columns are found by name, in any order and case. Needed: JobID or JobIDRaw, Submit, Start, End, State, and ReqTRES or
AllocTRES (`gres/gpu=8`, `gres/gpu:h100=8`). Taken where they are there: Eligible, ElapsedRaw, TimelimitRaw (minutes) or
Timelimit, User, Partition, Account, QOS, Priority, NNodes.
"""

from __future__ import annotations

import math
import re

from foretrace.errors import ForetraceError
from foretrace.fleet.formats import jobs
from foretrace.fleet.formats.source import Source, table
from foretrace.fleet.workload import SECOND

UNKNOWN = {"", "Unknown", "None", "N/A", "NULL"}
NO_LIMIT = {"", "UNLIMITED", "PARTITION_LIMIT", "NONE", "UNKNOWN", "INVALID"}
# States of squeue(1) and sacct(1), with the short forms of squeue.
RUNNING = {"RUNNING": "R", "SUSPENDED": "S", "COMPLETING": "CG", "CONFIGURING": "CF", "RESIZING": "RS", "STOPPED": "ST",
           "SIGNALING": "SI", "STAGE_OUT": "SO"}  # fmt: skip
WAITING = {"PENDING": "PD", "REQUEUED": "RQ", "REQUEUE_HOLD": "RH", "REQUEUE_FED": "RF", "SPECIAL_EXIT": "SE",
           "RESV_DEL_HOLD": "RD"}  # fmt: skip
ENDED = {"COMPLETED": "CD", "CANCELLED": "CA", "FAILED": "F", "TIMEOUT": "TO", "NODE_FAIL": "NF", "PREEMPTED": "PR",
         "OUT_OF_MEMORY": "OOM", "BOOT_FAIL": "BF", "DEADLINE": "DL", "REVOKED": "RV", "LAUNCH_FAILED": "LF",
         "RECONFIG_FAIL": "RC"}  # fmt: skip
_STATES = {short: state for states in (RUNNING, WAITING, ENDED) for state, short in states.items()}
_TAKEN = {
    "jobid", "jobidraw", "submit", "start", "end", "state", "reqtres", "alloctres", "eligible", "elapsedraw",
    "timelimitraw", "timelimit", "user", "partition", "account", "qos", "priority", "nnodes",
}  # fmt: skip
_GPU = re.compile(r"(?:^|[,\s])(?:gres[:/])?gpu(?::(?!\d+(?:[,\s]|$))([^:=,\s]+))?(?:[:=](\d{1,9}))?(?=[,\s]|$)")
_TIME = re.compile(r"(?:(\d{1,6})-)?(\d{1,7})(?::(\d{1,2}))?(?::(\d{1,2}))?(?:\.\d*)?")


def matches(source: Source) -> bool:
    """Return whether columns apart by bars, among them a job and its submission."""
    names = {name.strip().lower() for name in source.first.split("|")}
    return bool({"jobid", "jobidraw"} & names) and "submit" in names


def rows(
    source: Source,
    *,
    timezone: str | None = None,
    since: str = "submit",
    gpus: str = "requested",
    unfinished: bool = False,
) -> jobs.LogRows:
    """Read jobs; `state`, `account`, `qos` and `nodes` are kept in details.

    timezone: where the cluster stands (sacct prints local times without a zone), else UTC. since: `submit`, or
    `eligible` for waiting that counts from when dependencies and holds were over. gpus: `requested` (what was
    allocated only where a row requests none) or `allocated`. unfinished: take jobs that still run with what they
    have run so far. Steps, jobs without GPUs and jobs that never ran are set aside; of a job that ran several times
    (sacct -D) the last run counts.
    """
    if since not in ("submit", "eligible") or gpus not in ("requested", "allocated"):
        raise ForetraceError(
            f"{source.path}: since is submit or eligible, gpus is requested or allocated; say one of these."
        )
    taken = table(source, "|")
    names = tuple(name.lower() for name in taken.header)
    ends_with_bar = names[-1:] == ("",)  # sacct -p instead of -P
    if len(names) < 2:
        raise source.fail("has no header with columns apart by bars; print it with sacct -P, without -n.")
    lower = type(taken)(names, taken.rows, taken.blank)
    at = jobs.with_columns(source, lower, ("submit", "start", "end", "state"), tuple(_TAKEN))
    key = "jobid" if "jobid" in at else "jobidraw"
    if key not in at:
        raise source.fail("has no column JobID; add it to --format.")
    if not {"reqtres", "alloctres"} & set(at):
        raise source.fail("has no column ReqTRES or AllocTRES, which tell the GPUs; add one to --format.")
    width, clock = len(names), jobs.Clock.of(timezone)
    met = {"mixed": 0, "components": 0, "held": 0}

    def cell(cells: list[str], name: str) -> str:
        return cells[at[name]].strip() if name in at else ""

    def job(cells: list[str] | None) -> jobs.Row:
        cells = jobs.cut(cells, width)
        if ends_with_bar and cells[-1]:
            raise jobs.Bad("it has more columns than the header")
        name = jobs.name_of(cell(cells, key), key)
        state = state_of(cell(cells, "state"))
        if "." in name:
            raise jobs.Aside("steps, which run on what their job holds")
        if not state:
            raise jobs.Bad(f"State is {cell(cells, 'state')[:40]!r}, which sacct does not print")
        count, kinds = _devices(cells, at, gpus)
        if count == 0:
            raise jobs.Aside("jobs without GPUs")
        submit = clock.read(cell(cells, "submit"), "Submit")
        if since == "eligible" and cell(cells, "eligible") not in UNKNOWN:
            submit = max(submit, clock.read(cell(cells, "eligible"), "Eligible"))
            met["held"] += 1
        if state in WAITING or cell(cells, "start") in UNKNOWN:
            raise jobs.Aside("jobs that never ran")
        if state in RUNNING and not unfinished:
            raise jobs.Aside("jobs that still run")
        start = clock.read(cell(cells, "start"), "Start", after=submit)
        end = None if cell(cells, "end") in UNKNOWN else clock.read(cell(cells, "end"), "End", after=start)
        ran = jobs.optional(cell(cells, "elapsedraw"), "ElapsedRaw")
        if math.isnan(ran):
            if end is None:
                raise jobs.Bad("it has neither End nor ElapsedRaw")
            ran = (end - start) / SECOND
        if ran < 0:
            raise jobs.Bad("it ended before it started")
        if ran == 0:
            raise jobs.Aside("jobs that ran for less than a second")
        met["mixed"] += "|" in kinds
        met["components"] += "+" in name
        return {
            "job": name,
            "submit": submit,
            "start": start,
            "end": end,
            "gpus": jobs.gpus_of(str(count), "gres/gpu"),
            "gpu_type": kinds,
            "work_s": ran,
            "estimate_s": _limit(cell(cells, "timelimitraw"), cell(cells, "timelimit")),
            "user": cell(cells, "user"),
            "tenant": cell(cells, "partition"),
            "priority": jobs.optional(cell(cells, "priority") or "0", "Priority"),
            "state": state,
            "account": cell(cells, "account"),
            "qos": cell(cells, "qos"),
            "nodes": jobs.optional(cell(cells, "nnodes"), "NNodes"),
        }

    def last_runs(ledger: jobs.RowAccount, rows: list[tuple[str, jobs.Row]]) -> list[tuple[str, jobs.Row]]:
        last: dict[str, int] = {}
        for position, (_, row) in enumerate(rows):
            before = last.get(row["job"])
            if before is None or row["start"] >= rows[before][1]["start"]:
                last[row["job"]] = position
        if len(last) < len(rows):
            ledger.aside["earlier runs of jobs that were put back into the queue"] = len(rows) - len(last)
        return [rows[position] for position in sorted(last.values())]

    def notes() -> list[str]:
        told = jobs.table_notes(type(taken)(tuple(name for name in names if name), taken.rows, taken.blank), _TAKEN)
        if met["mixed"]:
            told.append(
                f"{met['mixed']} jobs ask for several kinds of GPUs at once and are taken to run on any of these"
            )
        if met["components"]:
            told.append(f"{met['components']} components of heterogeneous jobs are taken for jobs of their own")
        if since == "eligible":
            told.append(f"{met['held']} jobs count from when they became eligible")
        return [*told, *clock.note]

    return jobs.LogRows(
        rows=jobs.placed(lower.rows), parse=job, dated=True, finish=last_runs, notes=notes,
        details={"state": "", "account": "", "qos": "", "nodes": math.nan},
    )  # fmt: skip


def _devices(cells: list[str], at: dict[str, int], which: str) -> tuple[int, str]:
    """Return GPUs and their kinds joined by bars. The kind that was allocated is no wish and is not taken for one."""
    order = ("reqtres", "alloctres") if which == "requested" else ("alloctres", "reqtres")
    counts = (gpus_in(cells[at[name]]) for name in order if name in at)
    wishes = gpus_by_kind(cells[at["reqtres"]]) if "reqtres" in at else {}
    return next(filter(None, counts), 0), "|".join(sorted(kind for kind in wishes if kind))


def gpus_by_kind(text: str) -> dict[str, int]:
    """Return GPUs by kind ("" where none is said): `gres:gpu:4`, `gpu:a100:2(IDX:0-1)`, `cpu=8,gres/gpu=4`."""
    found: dict[str, int] = {}
    for kind, count in _GPU.findall(re.sub(r"\([^)]*\)", "", text)):
        found[kind] = found.get(kind, 0) + int(count or 1)
    return {kind: count for kind, count in found.items() if count}


def gpus_in(text: str) -> int:
    """Return GPUs that a list of resources names."""
    found = gpus_by_kind(text)
    plain = found.pop("", 0)
    return max(plain, sum(found.values()))  # Slurm counts typed ones in the plain count as well


def state_of(text: str) -> str:
    """Return the state without what follows it (`CANCELLED by 1000`), also from `R` or `OUT_OF_ME+`; "" if unknown."""
    word, plus, _ = re.split(r"[ ,]", text.strip().upper())[0].partition("+")
    state, known = _STATES.get(word, word), sorted(_STATES.values())
    if plus and len(word) > 3 and state not in known:
        return next((each for each in known if each.startswith(word)), "")
    return state if state in known else ""


def duration(text: str) -> float:
    """Return seconds of [days-]hours:minutes:seconds, minutes:seconds or minutes. Raises ValueError."""
    found = _TIME.fullmatch(text)
    if not found:
        raise ValueError(f"{text[:30]!r} is no duration")
    days, first, second, third = found.groups()
    if days is None and third is None:  # minutes, or minutes:seconds
        return float(int(first) * 60 + int(second or 0))
    return float(int(days or 0) * 86400 + int(first) * 3600 + int(second or 0) * 60 + int(third or 0))


def _limit(raw: str, written: str) -> float:
    """Return time limit in seconds, nan where there is none; raises Bad."""
    if raw.upper() not in NO_LIMIT:
        return jobs.not_below_zero(raw, "TimelimitRaw") * 60 or math.nan
    if written.upper() in NO_LIMIT:
        return math.nan
    try:
        return duration(written)
    except ValueError as error:
        raise jobs.Bad(f"Timelimit: {error}") from None
