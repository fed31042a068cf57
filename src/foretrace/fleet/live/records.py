"""`Snapshot` of a Slurm cluster, and the outputs it is read from: `scontrol show`, `squeue`, JSON of both and `sinfo`.

Formats as of Slurm 20 to 25: scontrol(1), squeue(1), sinfo(1). squeue is asked for scontrol's keys, and JSON becomes
such keys first, so that a job is read in one place. A record that says nothing that is needed, or a value that cannot
be, raises ForetraceError in one sentence; keys that are not known are passed over. Times are seconds on the cluster's
own clock (local times taken as if they were UTC; JSON counts real seconds).
"""

from __future__ import annotations

import datetime
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from foretrace.errors import ForetraceError
from foretrace.fleet.formats import slurm
from foretrace.fleet.formats.slurm import gpus_in
from foretrace.fleet.formats.slurm_cluster import expand
from foretrace.fleet.policies.slurm_options import SchedulerParameters, array_ranges

_NUMBER = re.compile(r"(\d{1,12})(?:_(?:(\d{1,9})|\[([^\]]*)\]?))?(?:\+\d+)?")  # of a job, with tasks of an array
NOTHING = frozenset({"", "(null)", "N/A", "None", "none", "Unknown", "NONE", "NOT_SET", "null"})
# The last key may hold blanks and anything else.
SQUEUE = (
    "JobId=%i JobState=%T Reason=%r StartTime=%S NodeList=%N NumNodes=%D TimeLimit=%l RunTime=%M TresPerNode=%b "
    "Priority=%Q Partition=%P UserId=%u Account=%a SubmitTime=%V NumCPUs=%C Dependency=%E Features=%f ReqNodeList=%n "
    "ExcNodeList=%x OverSubscribe=%h JobName=%j"
)
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


# Flags of a node (scontrol(1)) with which it takes no job.
UNUSABLE = frozenset({
    "DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "ERROR", "INVAL", "INVALID_REG", "NOT_RESPONDING",
    "MAINT", "MAINTENANCE", "POWERED_DOWN", "POWERING_DOWN", "PERFCTRS", "REBOOT", "REBOOT_ISSUED", "UNKNOWN", "FUTURE",
    "RESERVED", "BLOCKED", "PLANNED_DOWN",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedJob:
    """A job of the queue, waiting or running, as Slurm knows it.

    nodes: how many it requests at least, or holds. per_node, gpus, cpus: GPUs on each node (0: not said), GPUs in all
    and cores in all. limit_s: its time limit, inf where there is none, nan where it is not said. eligible_s, start_s:
    nan where unknown; the start of a waiting job is what `squeue --start` says. held: node → GPUs, where it runs.
    switches, switch_wait_s: leaf switches it insists on and for how long. after: what it depends on, as written.
    tasks: how many it stands for (a waiting array is one record); throttle: how many of these may run at once.
    """

    job: str
    state: str
    reason: str = ""
    name: str = ""
    user: str = ""
    account: str = ""
    partition: str = ""
    priority: float = 0.0
    nodes: int = 1
    per_node: int = 0
    gpus: int = 0
    cpus: int = 1
    exclusive: bool = False
    limit_s: float = math.nan
    submit_s: float = 0.0
    eligible_s: float = math.nan
    start_s: float = math.nan
    ran_s: float = 0.0
    held: Mapping[str, int] = field(default_factory=dict)
    switches: int = 0
    switch_wait_s: float = math.inf
    after: str = ""
    features: str = ""
    only: tuple[str, ...] = ()  # nodes it insists on
    without: tuple[str, ...] = ()
    tasks: int = 1
    throttle: int = 0
    array: str = ""
    reservation: str = ""

    @property
    def running(self) -> bool:
        """Whether it holds nodes."""
        return self.state in slurm.RUNNING

    @property
    def waiting(self) -> bool:
        """Whether it is in line."""
        return self.state in slurm.WAITING


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    """A node: `usable` where no flag of its state keeps jobs away."""

    name: str
    gpus: int
    cpus: int
    state: str
    partitions: tuple[str, ...] = ()
    features: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether it takes jobs."""
        flags = {each.rstrip("*~#!%$@^-") for each in self.state.upper().replace(" ", "+").split("+")}
        return "*" not in self.state and not flags & UNUSABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmPartition:
    """A partition: times in seconds (inf: no limit); `tier` as PriorityTier; whole: OverSubscribe=EXCLUSIVE."""

    nodes: frozenset[str]
    limit_s: float = math.inf
    default_s: float = math.nan
    tier: int = 1
    up: bool = True
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The cluster at `now_s`. leaves: leaf switch → its nodes; notes: what was not read, one sentence each."""

    source: str
    now_s: float
    version: str
    jobs: tuple[QueuedJob, ...]
    nodes: tuple[SlurmNode, ...]
    partitions: Mapping[str, SlurmPartition]
    leaves: Mapping[str, tuple[str, ...]]
    parameters: SchedulerParameters = field(default_factory=SchedulerParameters)
    backfill: bool = True
    notes: tuple[str, ...] = ()

    def find(self, job: str) -> QueuedJob:
        """Return the job of this number; raises ForetraceError."""
        for each in self.jobs:
            if each.job == job or (each.array and each.array == job):
                return each
        some = ", ".join(each.job for each in self.jobs if each.waiting) or "none that waits"
        raise ForetraceError(f"{self.source} has no job {job!r}; it has {some[:120]}.")


def stamp(text: str) -> float:
    """Return seconds of a time as Slurm writes it, nan where there is none. Raises ValueError."""
    text = text.strip()
    if text in NOTHING:
        return math.nan
    if text.isdecimal() and text.isascii():
        return float(int(text[:18])) or math.nan
    return datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC).timestamp()


def duration(text: str) -> float:
    """Return seconds of a duration; inf without a limit, nan where none is set. Raises ValueError."""
    text = text.strip()
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    return math.nan if text in NOTHING or text.upper() in slurm.NO_LIMIT else slurm.duration(text)


def number(text: str) -> int:
    """Return the first whole number of `8`, `8-16` or `1K`. Raises ValueError."""
    found = re.match(r"\s*(\d{1,12})([KMG]?)", text)
    if not found:
        raise ValueError(f"{text[:30]!r} is no number")
    return min(int(found[1]) * {"": 1, "K": 1024, "M": 1 << 20, "G": 1 << 30}[found[2]], 10**9)


@contextmanager
def _reading(kind: str, name: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OverflowError, TypeError, KeyError, IndexError, AttributeError) as error:
        why = f"it says no {error.args[0]}" if isinstance(error, KeyError) else " ".join(str(error).split())[:100]
        raise ForetraceError(f"{kind} {name[:40]!r} cannot be read ({why}); is this the output of Slurm?") from None


def _known(said: Mapping[str, str]) -> defaultdict[str, str]:
    """Return what is said, "" for all else."""
    return defaultdict(str, {key: value for key, value in said.items() if value.strip() not in NOTHING})


def job_of(said: Mapping[str, str]) -> QueuedJob:
    """Return one job, by the keys of `scontrol show job`. Raises ForetraceError."""
    ident, known = said.get("JobId", "").split(" ")[0], _known(said)
    with _reading("job", ident):
        numbered = _NUMBER.fullmatch(ident)
        if not numbered:
            raise ValueError("it has no number")
        state = slurm.state_of(said["JobState"])
        if not state:
            raise ValueError(f"its state is {said['JobState'][:30]!r}, which Slurm does not document")
        waits, runs = state in slurm.WAITING, state in slurm.RUNNING
        nodes = max(number(known["NumNodes"] or "1"), 1)
        task = known["ArrayTaskId"] or numbered[2] or numbered[3] or ""
        ident, array = numbered[1] if task else ident, known["ArrayJobId"] or numbered[1] * bool(task)
        tasks, throttle = 1, int(known["ArrayTaskThrottle"] or 0)
        if waits and task and not task.isdecimal():
            body, percent, most = task.partition("%")
            kept = ",".join(part for part in body.split(",") if not part.endswith("..."))  # cut short by Slurm
            ranges, at_once = array_ranges(kept + percent + most)
            tasks, throttle = max(sum(map(len, ranges)), 1), at_once or throttle
        per_node = gpus_in(known["TresPerNode"])
        gpus = (
            gpus_in(known["JOB_GRES"]) or gpus_in(known["TresPerJob"]) or per_node * nodes
            or gpus_in(known["TresPerTask"]) * number(known["NumTasks"] or "1")
            or gpus_in(known["TresPerSocket"]) * nodes or gpus_in(known["ReqTRES"]) or gpus_in(known["TRES"])
        )  # fmt: skip
        held = expand(known["NodeList"]) if runs else []
        # A job that completes names the nodes that are not free yet, beside the GPUs that it held on all.
        holding = dict.fromkeys(held, per_node or -(-gpus // max(len(held), nodes)))
        for line in known["held"].splitlines():
            found = re.match(r"Nodes=(\S+) .*?GRES=(\S*)", line)
            if found and held and gpus_in(found[2]):
                holding |= dict.fromkeys(expand(found[1]), gpus_in(found[2]))
        switches, _, wait = known["Switches"].partition("@")
        return QueuedJob(
            job=f"{array}_{task}" if array and task.isdecimal() else ident, state=state, reason=said.get("Reason", ""),
            name=known["JobName"], user=re.sub(r"\(.*", "", known["UserId"]), account=known["Account"],
            partition=known["Partition"], priority=float(known["Priority"] or 0), nodes=nodes, per_node=per_node,
            gpus=gpus, cpus=number(known["NumCPUs"] or "1"), exclusive=known["OverSubscribe"] in ("NO", "EXCLUSIVE"),
            limit_s=duration(known["TimeLimit"]), submit_s=stamp(known["SubmitTime"]),
            eligible_s=stamp(known["EligibleTime"]), start_s=stamp(known["StartTime"]),
            ran_s=duration(known["RunTime"] or "0"), held=holding, switches=number(switches or "0"),
            switch_wait_s=duration(wait) if wait else math.inf, after=known["Dependency"], features=known["Features"],
            only=tuple(expand(known["ReqNodeList"])) if waits else (), without=tuple(expand(known["ExcNodeList"])),
            tasks=tasks, throttle=throttle, array=array, reservation=known["Reservation"],
        )  # fmt: skip


def node_of(said: Mapping[str, str]) -> SlurmNode:
    """Return one node, by the keys of `scontrol show node`. Raises ForetraceError."""
    name, known = said.get("NodeName", ""), _known(said)
    with _reading("node", name):
        parts, features = (filter(None, known[key].split(",")) for key in ("Partitions", "ActiveFeatures"))
        return SlurmNode(
            name=name, gpus=gpus_in(known["Gres"]) or gpus_in(known["CfgTRES"]), cpus=number(known["CPUTot"] or "1"),
            state=said["State"].split(" ")[0], partitions=tuple(parts), features=tuple(features),
        )  # fmt: skip


def partition_of(said: Mapping[str, str]) -> tuple[str, SlurmPartition]:
    """Return one partition and its name, by the keys of `scontrol show partition`. Raises ForetraceError."""
    known = _known(said)
    with _reading("partition", known["PartitionName"]):
        return known["PartitionName"], SlurmPartition(
            nodes=frozenset(expand(known["Nodes"])), limit_s=duration(known["MaxTime"] or "UNLIMITED"),
            default_s=duration(known["DefaultTime"]), tier=number(known["PriorityTier"] or "1"),
            up=known["State"] in ("", "UP"), whole=known["OverSubscribe"].startswith("EXCLUSIVE"),
        )  # fmt: skip


def settings_of(text: str) -> list[tuple[str, str]]:
    """Return `scontrol show config` by key in lower case, and when it was printed as `as_of`."""
    rows = (line.partition("=") for line in text.replace("Configuration data as of", "as_of =", 1).splitlines())
    return [(key.strip().lower(), value.strip()) for key, equals, value in rows if equals and key.strip()]


def queue_json(whole: Mapping[str, Any], where: str) -> list[QueuedJob]:
    """Return `squeue --json` of any of its versions. Raises ForetraceError."""
    found = []
    for row in _rows(whole, "jobs", where):
        with _reading("job", str(row.get("job_id", "?"))):
            said = {key: _text(row[name]) for name, key in _JSON.items() if name in row}
            said["JobState"] = said["JobState"].split(",")[0]
            said["ArrayTaskId"] = _text(row.get("array_task_string")) or _text(row.get("array_task_id"))
            said["ArrayJobId"] = said.get("ArrayJobId", "").removeprefix("0")  # 0: none
            wait = number(_text(row.get("maximum_switch_wait_time")) or "0")
            switches = _text(row.get("required_switches")).removeprefix("0")
            said["Switches"] = switches + f"@{wait // 60}:{wait % 60}" * bool(wait)
            if row.get("exclusive") is True or "none" in (row.get("shared") or ()):
                said["OverSubscribe"] = "NO"
            details, hosts = [str(each) for each in row.get("gres_detail") or ()], expand(said.get("NodeList", ""))
            said["JOB_GRES"] = f"gpu:{sum(map(gpus_in, details))}" * bool(details)
            if len(details) == len(hosts):
                said["held"] = "\n".join(f"Nodes={host} GRES={on}" for host, on in zip(hosts, details, strict=True))
        found.append(job_of(said))
    return found


def nodes_json(whole: Mapping[str, Any], where: str) -> list[SlurmNode]:
    """Return `sinfo --json` of 22.05 or `scontrol show node --json`. Raises ForetraceError."""
    found = []
    for row in _rows(whole, "nodes", where):
        said = {key: _text(row[name]) for name, key in _JSON_NODE.items() if name in row}
        if "State" in said:
            flags = _text(row.get("state_flags"))
            said["State"] = f"{said['State']},{flags}".strip(",").replace(",", "+").upper()
        found.append(node_of(said))
    return found


def _rows(whole: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    rows = whole.get(key)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ForetraceError(f"{where} has no list of {key}; print it with squeue --json or sinfo --json.")
    return rows


def _text(value: Any) -> str:
    """Return a value of JSON as scontrol prints it; numbers are plain, or {set, infinite, number} from 23.02 on."""
    if isinstance(value, dict):
        if value.get("infinite"):
            return "UNLIMITED"
        return _text(value.get("number")) if value.get("set", True) else ""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return "" if value is None or isinstance(value, bool) else str(value)
