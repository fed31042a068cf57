"""What Slurm's commands print, as records: `scontrol show ...`, `squeue` (columns or JSON), `sinfo --json`.

Formats as of Slurm 20 to 25: scontrol(1), squeue(1), sinfo(1). Columns and JSON become the keys of scontrol first, so
that a job is read in one place. A record that says nothing that is needed, or a value that cannot be, raises
ForetraceError in one sentence; keys that are not known are passed over.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from foretrace.errors import ForetraceError
from foretrace.fleet.formats import slurm
from foretrace.fleet.formats.slurm_cluster import expand
from foretrace.fleet.formats.source import Source, split_line
from foretrace.fleet.live.snapshot import QueuedJob, SlurmNode, SlurmPartition
from foretrace.fleet.policies.slurm_options import array_ranges

_Made = TypeVar("_Made")
_KEY = re.compile(r"(?:(?<=\s)|^)([A-Za-z][A-Za-z0-9_/:.]*)=")
_FREE = re.compile(r"\b(JobName|Command|WorkDir|Comment|AdminComment|OS)=")  # their values may hold blanks
_GPU = re.compile(r"(?:gres[:/])?gpu(?::([A-Za-z][^:=,()]*))?(?:[:=](\d{1,7}))?(?=[,(\s]|$)")
_NUMBER = re.compile(
    r"(\d{1,12})(?:_(?:(\d{1,9})|\[([^\]]*)\]?))?(?:\+\d+)?"
)  # of a job, with a task or those that wait
NOTHING = frozenset({"", "(null)", "N/A", "None", "none", "Unknown", "NONE", "NOT_SET", "null"})
SQUEUE = "%i|%T|%r|%S|%N|%D|%l|%M|%b|%Q|%P|%u|%a|%V|%C|%E|%f|%n|%x|%h|%j"  # names last: they may hold a bar
# What columns of squeue and keys of its JSON are called by scontrol.
_COLUMNS = {
    "jobid": "JobId", "state": "JobState", "st": "JobState", "reason": "Reason", "start_time": "StartTime",
    "nodelist": "NodeList", "nodelist(reason)": "NodeList", "nodes": "NumNodes", "time_limit": "TimeLimit",
    "time": "RunTime", "tres_per_node": "TresPerNode", "gres": "TresPerNode", "priority": "Priority",
    "partition": "Partition", "user": "UserId", "account": "Account", "submit_time": "SubmitTime", "cpus": "NumCPUs",
    "dependency": "Dependency", "features": "Features", "req_nodes": "ReqNodeList", "exc_nodes": "ExcNodeList",
    "over_subscribe": "OverSubscribe", "oversubscribe": "OverSubscribe", "shared": "OverSubscribe", "name": "JobName",
}  # fmt: skip
_JSON = {
    "job_id": "JobId", "job_state": "JobState", "state_reason": "Reason", "name": "JobName", "user_name": "UserId",
    "account": "Account", "partition": "Partition", "priority": "Priority", "node_count": "NumNodes", "cpus": "NumCPUs",
    "tasks": "NumTasks", "tres_per_node": "TresPerNode", "tres_per_job": "TresPerJob", "tres_per_task": "TresPerTask",
    "tres_alloc_str": "TRES", "tres_req_str": "ReqTRES", "nodes": "NodeList", "time_limit": "TimeLimit",
    "submit_time": "SubmitTime", "eligible_time": "EligibleTime", "start_time": "StartTime", "dependency": "Dependency",
    "features": "Features", "required_nodes": "ReqNodeList", "excluded_nodes": "ExcNodeList",
    "resv_name": "Reservation", "array_job_id": "ArrayJobId", "array_max_tasks": "ArrayTaskThrottle",
}  # fmt: skip
_JSON_NODE = {
    "name": "NodeName", "gres": "Gres", "cpus": "CPUTot", "state": "State", "partitions": "Partitions",
    "active_features": "ActiveFeatures",
}  # fmt: skip


def stamp(text: str) -> float:
    """Return a time as Slurm writes it (or seconds since 1970) in seconds, nan where there is none. Raises
    ValueError.
    """
    text = text.strip()
    if text in NOTHING:
        return math.nan
    if text.isdecimal() and text.isascii():
        return float(int(text[:18])) or math.nan
    return datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC).timestamp()


def duration(text: str) -> float:
    """Return a duration as Slurm writes it in seconds; inf without a limit, nan where none is set. Raises
    ValueError.
    """
    text = text.strip()
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    return math.nan if text in NOTHING or text.upper() in slurm.NO_LIMIT else slurm.duration(text)


def gpus_in(text: str) -> int:
    """Return GPUs that a list of resources names: `gres:gpu:4`, `gpu:a100:2(IDX:0-1)`, `cpu=8,gres/gpu=4`."""
    plain = typed = 0
    for kind, number in _GPU.findall(re.sub(r"\([^)]*\)", "", text)):
        count = int(number or 1)
        plain, typed = (plain, typed + count) if kind else (plain + count, typed)
    return max(plain, typed)


def number(text: str, most: int = 10**9) -> int:
    """Return the first whole number of `8`, `8-16` or `1K`. Raises ValueError."""
    found = re.match(r"\s*(\d{1,12})([KMG]?)", text)
    if not found:
        raise ValueError(f"{text[:30]!r} is no number")
    return min(int(found[1]) * {"": 1, "K": 1024, "M": 1 << 20, "G": 1 << 30}[found[2]], most)


def names(text: str) -> tuple[str, ...]:
    """Return a list of hosts, () where there is none. Raises ForetraceError."""
    return () if text.strip() in NOTHING else tuple(expand(text.strip()))


def pairs(text: str, first: str) -> Iterator[dict[str, str]]:
    """Yield records of Key=Value that each begin with the key `first`, with or without -o."""
    begins = [found.start() for found in re.finditer(rf"^\s*{first}=", text, re.MULTILINE)]
    for begin, end in zip(begins, [*begins[1:], len(text)], strict=False):
        said: dict[str, str] = {}
        lines = text[begin:end].strip().splitlines()
        for line in lines:
            marks = list(_KEY.finditer(line))
            free = _FREE.search(line)
            if free and len(lines) > 1:  # not -o, and not jobcomp: its value is the rest of the line
                marks = [each for each in marks if each.start() <= free.start()]
            for i, mark in enumerate(marks):
                stop = marks[i + 1].start() if i + 1 < len(marks) else len(line)
                said.setdefault(mark[1], line[mark.end() : stop].strip())
                if mark[1] == "Nodes" and first == "JobId":  # one line for each group of nodes alike
                    said["held"] = said.get("held", "") + "\n" + line.strip()
        yield said


def _checked(kind: str, name: str, make: Callable[[], _Made]) -> _Made:
    try:
        return make()
    except ForetraceError:
        raise
    except (ValueError, OverflowError, TypeError, KeyError, IndexError, AttributeError) as error:
        why = f"it says no {error.args[0]}" if isinstance(error, KeyError) else " ".join(str(error).split())[:100]
        raise ForetraceError(f"{kind} {name[:40]!r} cannot be read ({why}); is this the output of Slurm?") from None


def _tasks(text: str) -> tuple[int, int]:
    """Return tasks of an array that wait, and how many may run at once (0: all). Raises ValueError."""
    body, percent, most = text.partition("%")
    kept = ",".join(part for part in body.split(",") if not part.endswith("..."))  # cut short by Slurm
    ranges, throttle = array_ranges(kept + percent + most)
    return max(sum(map(len, ranges)), 1), throttle


def job_of(said: Mapping[str, str]) -> QueuedJob:
    """Return one job, by the keys of `scontrol show job`. Raises ForetraceError."""
    ident = said.get("JobId", "").split(" ")[0]

    def make() -> QueuedJob:
        def text(key: str) -> str:
            value = said.get(key, "")
            return "" if value in NOTHING else value

        state = slurm.state_of(said["JobState"])
        if not state:
            raise ValueError(f"its state is {said['JobState'][:30]!r}, which Slurm does not document")
        waits, runs = state in slurm.WAITING, state in slurm.RUNNING
        nodes = max(number(said.get("NumNodes", "1")), 1)
        task, tasks, throttle = text("ArrayTaskId"), 1, int(text("ArrayTaskThrottle") or 0)
        if waits and task and not task.isdecimal():
            tasks, most = _tasks(task)
            throttle = most or throttle
        per_node = gpus_in(text("TresPerNode"))
        gpus = gpus_in(text("TresPerJob")) or per_node * nodes
        gpus = gpus or gpus_in(text("TresPerTask")) * number(said.get("NumTasks", "1"))
        gpus = gpus or gpus_in(text("TresPerSocket")) * nodes
        gpus = gpus_in(said.get("JOB_GRES", "")) or gpus or gpus_in(text("ReqTRES")) or gpus_in(text("TRES"))
        held = names(said.get("NodeList", "")) if runs else ()
        holding = dict.fromkeys(held, -(-gpus // max(len(held), 1)))
        for line in said.get("held", "").splitlines():
            found = re.match(r"Nodes=(\S+) .*?GRES=(\S*)", line)
            if found and held and gpus_in(found[2]):
                holding |= dict.fromkeys(names(found[1]), gpus_in(found[2]))
        switches, _, wait = text("Switches").partition("@")
        array, over = text("ArrayJobId"), said.get("OverSubscribe", "")
        return QueuedJob(
            job=f"{array}_{task}" if array and task.isdecimal() else ident, state=state, reason=said.get("Reason", ""),
            name=text("JobName"), user=re.sub(r"\(.*", "", text("UserId")), account=text("Account"),
            partition=text("Partition"), priority=float(text("Priority") or 0), nodes=nodes, per_node=per_node,
            gpus=gpus, cpus=number(said.get("NumCPUs", "1")), exclusive=over in ("NO", "EXCLUSIVE"),
            limit_s=duration(said.get("TimeLimit", "")), submit_s=stamp(said.get("SubmitTime", "")),
            eligible_s=stamp(said.get("EligibleTime", "")), start_s=stamp(said.get("StartTime", "")),
            ran_s=duration(said.get("RunTime", "0")), held=holding, switches=number(switches) if switches else 0,
            switch_wait_s=duration(wait) if wait else math.inf, after=text("Dependency"), features=text("Features"),
            only=names(said.get("ReqNodeList", "")) if waits else (), without=names(said.get("ExcNodeList", "")),
            tasks=tasks, throttle=throttle, array=array, reservation=text("Reservation"),
        )  # fmt: skip

    return _checked("job", ident, make)


def node_of(said: Mapping[str, str]) -> SlurmNode:
    """Return one node, by the keys of `scontrol show node`. Raises ForetraceError."""
    name = said.get("NodeName", "")

    def make() -> SlurmNode:
        parts, features = (said.get(key, "").split(",") for key in ("Partitions", "ActiveFeatures"))
        return SlurmNode(
            name=name, gpus=gpus_in(said.get("Gres", "")) or gpus_in(said.get("CfgTRES", "")),
            cpus=number(said.get("CPUTot", "1")), state=said["State"].split(" ")[0],
            partitions=tuple(filter(None, parts)), features=tuple(each for each in features if each not in NOTHING),
        )  # fmt: skip

    return _checked("node", name, make)


def partition_of(said: Mapping[str, str]) -> SlurmPartition:
    """Return one record of `scontrol show partition`. Raises ForetraceError."""
    name = said.get("PartitionName", "")

    def make() -> SlurmPartition:
        limit = duration(said.get("MaxTime", "UNLIMITED"))
        return SlurmPartition(
            name=name, nodes=frozenset(names(said.get("Nodes", ""))), limit_s=math.inf if math.isnan(limit) else limit,
            default_s=duration(said.get("DefaultTime", "NONE")), tier=number(said.get("PriorityTier", "1")),
            up=said.get("State", "UP") == "UP", whole=said.get("OverSubscribe", "").startswith("EXCLUSIVE"),
        )  # fmt: skip

    return _checked("partition", name, make)


def leaves_of(text: str) -> dict[str, tuple[str, ...]]:
    """Return leaf switches of `scontrol show topology` (blocks are leaves, too) and their nodes. Raises
    ForetraceError.
    """
    found: dict[str, tuple[str, ...]] = {}
    for first in ("SwitchName", "BlockName"):
        for said in pairs(text, first):
            if said.get("Nodes") and said.get("Level", "0") == "0" and not said.get("Switches"):
                found[said[first]] = names(said["Nodes"])
    return found


def settings_of(text: str) -> dict[str, str]:
    """Return `scontrol show config` by key in lower case."""
    rows = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip().lower(): value.strip() for key, _, value in rows if key.strip()}


def queue_table(source: Source) -> list[QueuedJob]:
    """Return `squeue` in columns: apart by bars (-o "...|..."), or by blanks, as by default. Raises ForetraceError."""
    header, bars = source.first, "|" in source.first
    heads = header.split("|") if bars else header.split()
    keys = [_COLUMNS.get(each.strip().lower(), "") for each in heads]
    if not {"JobId", "JobState"} <= set(keys):
        raise source.fail('has no columns JOBID and STATE; print it with squeue -a -r -o "' + SQUEUE + '".')
    jobs = []
    for line in source.lines:
        if not line.strip() or line.strip() == header.strip():  # also that of a second partition or call
            continue
        cells = (split_line(line, "|") or []) if bars else line.split(None, len(heads) - 1)
        if len(cells) < len(heads):
            raise source.fail(f"line {line[:40]!r} has {len(cells)} columns where {len(heads)} belong; print it again.")
        said = dict(zip(keys, map(str.strip, cells), strict=False))
        found = _NUMBER.fullmatch(said["JobId"])
        if not found:
            raise source.fail(f"job {said['JobId'][:20]!r} has no number; is this the output of squeue?")
        if found[2] or found[3]:
            said |= {"JobId": found[1], "ArrayJobId": found[1], "ArrayTaskId": found[2] or found[3]}
        if said.get("NodeList", "").startswith("("):  # the reason, in the column of nodes
            said |= {"Reason": said.get("Reason") or said["NodeList"].strip("()"), "NodeList": ""}
        jobs.append(job_of(said))
    return jobs


def queue_json(whole: Mapping[str, Any], where: str) -> list[QueuedJob]:
    """Return `squeue --json` of any of its versions. Raises ForetraceError."""
    rows = _rows(whole, "jobs", where)
    return [job_of(_checked("job", str(row.get("job_id", "?")), partial(_job_said, row))) for row in rows]


def _job_said(row: Mapping[str, Any]) -> dict[str, str]:
    said = {key: _text(row[name]) for name, key in _JSON.items() if name in row}
    said["JobState"] = said["JobState"].split(",")[0]
    said["ArrayTaskId"] = _text(row.get("array_task_string")) or _text(row.get("array_task_id"))
    said["ArrayJobId"] = said.get("ArrayJobId", "").removeprefix("0")  # 0: none
    wait = number(_text(row.get("maximum_switch_wait_time")) or "0")
    said["Switches"] = _text(row.get("required_switches")).removeprefix("0") + f"@{wait // 60}:{wait % 60}" * bool(wait)
    if row.get("exclusive") is True or "none" in (row.get("shared") or ()):
        said["OverSubscribe"] = "NO"
    details, hosts = [str(each) for each in row.get("gres_detail") or ()], names(said.get("NodeList", ""))
    said["JOB_GRES"] = f"gpu:{sum(map(gpus_in, details))}" * bool(details)
    if len(details) == len(hosts):
        said["held"] = "\n".join(f"Nodes={host} GRES={gpus}" for host, gpus in zip(hosts, details, strict=True))
    return {key: value for key, value in said.items() if value}


def nodes_json(whole: Mapping[str, Any], where: str) -> list[SlurmNode]:
    """Return `sinfo --json` of 22.05 or `scontrol show node --json`. Raises ForetraceError."""
    found = []
    for row in _rows(whole, "nodes", where):
        said = {key: _text(row[name]) for name, key in _JSON_NODE.items() if name in row}
        flags = _text(row.get("state_flags"))
        if "State" in said:
            said["State"] = f"{said['State']},{flags}".strip(",").replace(",", "+").upper()
        found.append(node_of(said))
    return found


def _rows(whole: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    rows = whole.get(key)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ForetraceError(f"{where} has no list of {key}; print it with squeue --json or sinfo --json.")
    return rows


def _text(value: Any) -> str:
    """Return a value of Slurm's JSON as scontrol prints it; numbers are plain, or {set, infinite, number} from 23.02
    on.
    """
    if isinstance(value, dict):
        if value.get("infinite"):
            return "UNLIMITED"
        return _text(value.get("number")) if value.get("set", True) else ""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "" if value is None or isinstance(value, bool) else str(value)
