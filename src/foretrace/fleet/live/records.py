"""What Slurm's commands print, as records: `scontrol show ...`, `squeue` (columns or JSON), `sinfo --json`.

Formats as of Slurm 20 to 25: scontrol(1), squeue(1), sinfo(1). A record that says nothing that is needed, or a value
that cannot be, raises ForetraceError in one sentence; keys that are not known are passed over.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from foretrace.errors import ForetraceError
from foretrace.fleet.formats.slurm_cluster import expand
from foretrace.fleet.formats.source import Source, split_line
from foretrace.fleet.live.snapshot import GONE, RUNNING, WAITING, QueuedJob, SlurmNode, SlurmPartition

_KEY = re.compile(r"(?:(?<=\s)|^)([A-Za-z][A-Za-z0-9_/:.]*)=")
_FREE = re.compile(r"\b(JobName|Command|WorkDir|Comment|AdminComment|OS)=")  # their values may hold blanks
_GPU = re.compile(r"(?:gres[:/])?gpu(?::([A-Za-z][^:=,()]*))?(?:[:=](\d{1,7}))?(?=[,(\s]|$)")
_TIME = re.compile(r"(?:(\d{1,6})-)?(\d{1,7})(?::(\d{1,2}))?(?::(\d{1,2}))?(?:\.\d*)?")
_TASKS = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?")
NOTHING = frozenset({"", "(null)", "N/A", "None", "none", "Unknown", "NONE", "NOT_SET", "null"})
SQUEUE = "%i|%T|%r|%S|%N|%D|%l|%M|%b|%Q|%P|%u|%a|%q|%V|%C|%E|%f|%n|%x|%h|%j"  # names last: they may hold a bar
_COLUMNS = {
    "jobid": "job", "state": "state", "st": "state", "reason": "reason", "start_time": "start", "nodelist": "held",
    "nodelist(reason)": "held", "nodes": "nodes", "time_limit": "limit", "time": "ran", "tres_per_node": "gres",
    "gres": "gres", "priority": "priority", "partition": "partition", "user": "user", "account": "account",
    "qos": "qos", "submit_time": "submit", "cpus": "cpus", "dependency": "after", "features": "features",
    "req_nodes": "only", "exc_nodes": "without", "over_subscribe": "shared", "oversubscribe": "shared",
    "shared": "shared", "name": "name",
}  # fmt: skip
_SHORT = {
    "PD": "PENDING", "R": "RUNNING", "CG": "COMPLETING", "CF": "CONFIGURING", "S": "SUSPENDED", "RQ": "REQUEUED",
    "SO": "STAGE_OUT", "ST": "STOPPED", "RH": "REQUEUE_HOLD", "RS": "RESIZING", "SI": "SIGNALING", "SE": "SPECIAL_EXIT",
    "CD": "COMPLETED", "CA": "CANCELLED", "F": "FAILED", "TO": "TIMEOUT", "NF": "NODE_FAIL", "PR": "PREEMPTED",
    "OOM": "OUT_OF_MEMORY", "RF": "REQUEUE_FED", "RD": "RESV_DEL_HOLD", "BF": "BOOT_FAIL", "DL": "DEADLINE",
    "RV": "REVOKED",
}  # fmt: skip


def stamp(text: str) -> float:
    """A time as Slurm writes it (or seconds since 1970) in seconds, nan where there is none. Raises ValueError."""
    text = text.strip()
    if text in NOTHING:
        return math.nan
    if text.isdecimal() and text.isascii():
        return float(int(text[:18])) or math.nan
    return datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC).timestamp()


def duration(text: str) -> float:
    """[days-]hours:minutes:seconds, minutes:seconds or minutes, in seconds; inf, nan if not set. Raises ValueError."""
    text = text.strip()
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    if text in NOTHING or text in ("Partition_Limit", "PARTITION_LIMIT", "INVALID"):
        return math.nan
    found = _TIME.fullmatch(text)
    if not found:
        raise ValueError(f"{text[:30]!r} is no duration")
    days, *parts = found.groups()
    given = [int(each) for each in parts if each is not None]
    if days is not None:
        hours, minutes, seconds = [*given, 0, 0][:3]
        return float(int(days) * 86400 + hours * 3600 + minutes * 60 + seconds)
    if len(given) == 3:
        return float(given[0] * 3600 + given[1] * 60 + given[2])
    return float(given[0] * 60 + (given[1] if len(given) == 2 else 0))


def gpus_in(text: str) -> int:
    """GPUs that a list of resources names: `gres:gpu:4`, `gpu:a100:2(IDX:0-1)`, `cpu=8,gres/gpu=4`."""
    plain = typed = 0
    for kind, number in _GPU.findall(re.sub(r"\([^)]*\)", "", text)):
        count = int(number or 1)
        plain, typed = (plain, typed + count) if kind else (plain + count, typed)
    return max(plain, typed)


def number(text: str, most: int = 10**9) -> int:
    """The first whole number of `8`, `8-16` or `1K`. Raises ValueError."""
    found = re.match(r"\s*(\d{1,12})([KMG]?)", text)
    if not found:
        raise ValueError(f"{text[:30]!r} is no number")
    return min(int(found[1]) * {"": 1, "K": 1024, "M": 1 << 20, "G": 1 << 30}[found[2]], most)


def names(text: str) -> tuple[str, ...]:
    """A list of hosts, () where there is none. Raises ForetraceError."""
    return () if text.strip() in NOTHING else tuple(expand(text.strip()))


def pairs(text: str, first: str) -> Iterator[dict[str, str]]:
    """Records of Key=Value that each begin with the key `first`, with or without -o."""
    begins = [found.start() for found in re.finditer(rf"^\s*{first}=", text, re.MULTILINE)]
    for begin, end in zip(begins, [*begins[1:], len(text)], strict=False):
        said: dict[str, str] = {}
        for line in text[begin:end].splitlines():
            marks = list(_KEY.finditer(line))
            free = _FREE.search(line)
            if free and "UserId=" not in line[free.end() :] and len(line) < 4000:  # not -o: the rest of the line
                marks = [each for each in marks if each.start() <= free.start()]
            for i, mark in enumerate(marks):
                stop = marks[i + 1].start() if i + 1 < len(marks) else len(line)
                said.setdefault(mark[1], line[mark.end() : stop].strip())
                if mark[1] == "Nodes" and first == "JobId":  # one line for each group of nodes alike
                    said["held"] = said.get("held", "") + "\n" + line.strip()
        yield said


def _checked(kind: str, name: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ForetraceError:
        raise
    except (ValueError, OverflowError, TypeError, KeyError, IndexError, AttributeError) as error:
        why = " ".join(str(error).split())[:100]
        raise ForetraceError(f"{kind} {name[:40]!r} cannot be read ({why}); is this the output of Slurm?") from None


def _state(word: str) -> str:
    first = re.split(r"[ ,+]", word.strip())[0].upper()
    state = _SHORT.get(first, first)
    if state not in RUNNING | WAITING | GONE:
        raise ValueError(f"its state is {word[:30]!r}, which Slurm does not document")
    return state


def _tasks(text: str) -> tuple[int, int]:
    """Tasks of an array that wait and how many may run at once (0: all), from `3-6%2` or `1,3,5-9:2`. ValueError."""
    body, _, most = text.partition("%")
    count = 0
    for part in body.split(","):
        if part.endswith("..."):  # cut short by Slurm
            continue
        found = _TASKS.fullmatch(part.strip())
        if not found:
            raise ValueError(f"{part[:20]!r} is no range of tasks")
        low, high, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        count += max((high - low) // max(step, 1) + 1, 1)
    return max(count, 1), int(most or 0)


def job_of(said: Mapping[str, str]) -> QueuedJob:
    """One record of `scontrol show job`. Raises ForetraceError."""
    ident = said.get("JobId", "").split(" ")[0]

    def make() -> QueuedJob:
        def text(key: str) -> str:
            value = said.get(key, "")
            return "" if value in NOTHING else value

        state = _state(said["JobState"])
        nodes = max(number(said.get("NumNodes", "1")), 1)
        task, tasks, throttle = text("ArrayTaskId"), 1, int(text("ArrayTaskThrottle") or 0)
        if state in WAITING and task and not task.isdecimal():
            tasks, most = _tasks(task)
            throttle = most or throttle
        per_node, in_all = gpus_in(text("TresPerNode")), gpus_in(text("TresPerJob"))
        gpus = in_all or per_node * nodes
        gpus = gpus or gpus_in(text("TresPerTask")) * number(said.get("NumTasks", "1"))
        gpus = gpus or gpus_in(text("TresPerSocket")) * nodes
        gpus = gpus_in(said.get("JOB_GRES", "")) or gpus or gpus_in(text("ReqTRES")) or gpus_in(text("TRES"))
        held = names(said.get("NodeList", "")) if state in RUNNING else ()
        holding = dict.fromkeys(held, -(-gpus // max(len(held), 1)))
        for line in said.get("held", "").splitlines():
            found = re.match(r"Nodes=(\S+) .*?GRES=(\S*)", line)
            if found and held and gpus_in(found[2]):
                holding |= dict.fromkeys(names(found[1]), gpus_in(found[2]))
        switches, _, wait = text("Switches").partition("@")
        array, over = text("ArrayJobId"), said.get("OverSubscribe", "")
        return QueuedJob(
            job=f"{array}_{task}" if array and task.isdecimal() else ident, state=state, reason=said.get("Reason", ""),
            name=text("JobName"), user=re.sub(r"\(.*", "", text("UserId")), account=text("Account"), qos=text("QOS"),
            partition=text("Partition"), priority=float(text("Priority") or 0), nodes=nodes, per_node=per_node,
            gpus=gpus, cpus=number(said.get("NumCPUs", "1")), exclusive=over in ("NO", "EXCLUSIVE"),
            limit_s=duration(said.get("TimeLimit", "")), submit_s=stamp(said.get("SubmitTime", "")),
            eligible_s=stamp(said.get("EligibleTime", "")), start_s=stamp(said.get("StartTime", "")),
            ran_s=duration(said.get("RunTime", "0")), held=holding, switches=number(switches) if switches else 0,
            switch_wait_s=duration(wait) if wait else math.inf, after=text("Dependency"), features=text("Features"),
            only=names(said.get("ReqNodeList", "")), without=names(said.get("ExcNodeList", "")), tasks=tasks,
            throttle=throttle, array=array, reservation=text("Reservation"),
        )  # fmt: skip

    return _checked("job", ident, make)  # type: ignore[no-any-return]


def node_of(said: Mapping[str, str]) -> SlurmNode:
    """One record of `scontrol show node`. Raises ForetraceError."""
    name = said.get("NodeName", "")

    def make() -> SlurmNode:
        gpus = gpus_in(said.get("Gres", "")) or gpus_in(said.get("CfgTRES", ""))
        parts = said.get("Partitions", "")
        return SlurmNode(
            name=name, gpus=gpus, cpus=number(said.get("CPUTot", "1")), state=said["State"].split(" ")[0],
            partitions=tuple(each for each in parts.split(",") if each),
            features=tuple(each for each in said.get("ActiveFeatures", "").split(",") if each not in NOTHING),
        )  # fmt: skip

    return _checked("node", name, make)  # type: ignore[no-any-return]


def partition_of(said: Mapping[str, str]) -> SlurmPartition:
    """One record of `scontrol show partition`. Raises ForetraceError."""
    name = said.get("PartitionName", "")

    def make() -> SlurmPartition:
        limit = duration(said.get("MaxTime", "UNLIMITED"))
        return SlurmPartition(
            name=name, nodes=names(said.get("Nodes", "")), limit_s=math.inf if math.isnan(limit) else limit,
            default_s=duration(said.get("DefaultTime", "NONE")), tier=number(said.get("PriorityTier", "1")),
            up=said.get("State", "UP") == "UP", whole=said.get("OverSubscribe", "").startswith("EXCLUSIVE"),
            default=said.get("Default", "") == "YES",
        )  # fmt: skip

    return _checked("partition", name, make)  # type: ignore[no-any-return]


def leaves_of(text: str) -> dict[str, tuple[str, ...]]:
    """Leaf switches of `scontrol show topology` (blocks are leaves, too) and their nodes. Raises ForetraceError."""
    found: dict[str, tuple[str, ...]] = {}
    for first in ("SwitchName", "BlockName"):
        for said in pairs(text, first):
            if said.get("Nodes") and said.get("Level", "0") == "0" and not said.get("Switches"):
                found[said[first]] = names(said["Nodes"])
    return found


def settings_of(text: str) -> dict[str, str]:
    """`scontrol show config` by key in lower case."""
    rows = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip().lower(): value.strip() for key, _, value in rows if key.strip()}


def queue_table(source: Source) -> list[QueuedJob]:
    """`squeue` in columns: apart by bars (-o "...|..."), or by blanks, as by default. Raises ForetraceError."""
    header, bars = source.first, "|" in source.first
    heads = header.split("|") if bars else header.split()
    at = {_COLUMNS[each.strip().lower()]: i for i, each in enumerate(heads) if each.strip().lower() in _COLUMNS}
    if not {"job", "state"} <= set(at):
        raise source.fail('has no columns JOBID and STATE; print it with squeue -a -r -o "' + SQUEUE + '".')
    lines = [line for line in source.lines if line.strip()][1:]
    jobs = []
    for line in lines:
        if line.strip() == header.strip():  # of a second partition or call
            continue
        cells = (split_line(line, "|") or []) if bars else line.split(None, len(heads) - 1)
        if len(cells) < len(heads):
            raise source.fail(f"line {line[:40]!r} has {len(cells)} columns where {len(heads)} belong; print it again.")
        row = {key: cells[i].strip() for key, i in at.items()}
        jobs.append(_checked("job", row["job"], partial(_row, row)))
    return jobs


def _row(row: Mapping[str, str]) -> QueuedJob:
    def text(key: str) -> str:
        return "" if row.get(key, "") in NOTHING else row[key]

    found = re.fullmatch(r"(\d{1,12})(?:_(?:(\d{1,9})|\[([^\]]*)\]?))?(?:\+\d+)?", row["job"])
    if not found:
        raise ValueError("its number is no number")
    state, reason, held = _state(row["state"]), row.get("reason", ""), row.get("held", "")
    if held.startswith("("):
        reason, held = reason or held.strip("()"), ""
    tasks, throttle = _tasks(found[3]) if found[3] else (1, 0)
    hosts, nodes = names(held) if state in RUNNING else (), max(number(row.get("nodes", "1")), 1)
    per_node = gpus_in(text("gres"))
    return QueuedJob(
        job=f"{found[1]}_{found[2]}" if found[2] else found[1], state=state, reason=reason, name=text("name"),
        user=text("user"), account=text("account"), qos=text("qos"), partition=text("partition"),
        priority=float(text("priority") or 0), nodes=nodes, per_node=per_node, gpus=per_node * nodes,
        cpus=number(row.get("cpus", "1")), exclusive=row.get("shared", "") in ("NO", "EXCLUSIVE"),
        limit_s=duration(row.get("limit", "")), submit_s=stamp(row.get("submit", "")), eligible_s=math.nan,
        start_s=stamp(row.get("start", "")), ran_s=duration(row.get("ran", "0:00")),
        held=dict.fromkeys(hosts, per_node), after=text("after"), features=text("features"),
        only=names(row.get("only", "")) if state in WAITING else (),
        without=names(row.get("without", "")), tasks=tasks, throttle=throttle, array=found[1] if found[3] else "",
    )  # fmt: skip


def queue_json(whole: Mapping[str, Any], where: str) -> list[QueuedJob]:
    """`squeue --json` of any of its versions. Raises ForetraceError."""
    return [_checked("job", str(row.get("job_id", "?")), partial(_object, row)) for row in _rows(whole, "jobs", where)]


def _rows(whole: Mapping[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    rows = whole.get(key)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ForetraceError(f"{where} has no list of {key}; print it with squeue --json or sinfo --json.")
    return rows


def plain_number(value: Any) -> float:
    """A number of Slurm's JSON: as it is, or {set, infinite, number} from 23.02 on; nan where it is not set."""
    if isinstance(value, dict):
        if value.get("infinite"):
            return math.inf
        return plain_number(value.get("number")) if value.get("set", True) else math.nan
    return math.nan if value is None or isinstance(value, bool) else float(value)


def _object(row: Mapping[str, Any]) -> QueuedJob:
    def count(key: str, default: int = 0) -> int:
        value = plain_number(row.get(key))
        return int(min(max(value, 0.0), 1e9)) if math.isfinite(value) else default

    def moment(key: str) -> float:
        return plain_number(row.get(key)) or math.nan  # 0: not yet

    def text(key: str) -> str:
        value = row.get(key)
        return "" if value is None or str(value) in NOTHING else str(value)

    states = row["job_state"]
    state = _state(str(states[0] if isinstance(states, list) else states))
    nodes, array, task = max(count("node_count"), 1), count("array_job_id"), plain_number(row.get("array_task_id"))
    tasks, throttle = _tasks(text("array_task_string")) if text("array_task_string") else (1, count("array_max_tasks"))
    per_node, hosts = gpus_in(text("tres_per_node")), names(text("nodes")) if state in RUNNING else ()
    gpus = gpus_in(text("tres_per_job")) or per_node * nodes or gpus_in(text("tres_per_task")) * count("tasks", 1)
    details = [gpus_in(str(each)) for each in row.get("gres_detail") or ()]
    held = dict(zip(hosts, details, strict=True)) if len(details) == len(hosts) else None
    gpus = sum(details) or gpus or gpus_in(text("tres_alloc_str")) or gpus_in(text("tres_req_str"))
    shared = row.get("shared")
    limit, wait = plain_number(row.get("time_limit")) * 60, count("maximum_switch_wait_time")
    return QueuedJob(
        job=f"{array}_{int(task)}" if array and math.isfinite(task) else str(count("job_id")), state=state,
        reason=text("state_reason"), name=text("name"), user=text("user_name"), account=text("account"),
        qos=text("qos"), partition=text("partition"), priority=plain_number(row.get("priority")), nodes=nodes,
        per_node=per_node, gpus=gpus, cpus=max(count("cpus", 1), 1), limit_s=limit, submit_s=moment("submit_time"),
        exclusive="none" in map(str, shared) if isinstance(shared, list) else row.get("exclusive") is True,
        eligible_s=moment("eligible_time"), start_s=moment("start_time"), ran_s=0.0, array=str(array) if array else "",
        held=held or dict.fromkeys(hosts, -(-gpus // max(len(hosts), 1))), after=text("dependency"),
        switches=count("required_switches"), switch_wait_s=float(wait) if wait else math.inf,
        features=text("features"), only=names(text("required_nodes")), without=names(text("excluded_nodes")),
        tasks=tasks if state in WAITING else 1, throttle=throttle, reservation=text("resv_name"),
    )  # fmt: skip


def nodes_json(whole: Mapping[str, Any], where: str) -> list[SlurmNode]:
    """`sinfo --json` of 22.05 or `scontrol show node --json`. Raises ForetraceError."""

    def make(row: Mapping[str, Any]) -> SlurmNode:
        states = row["state"] if isinstance(row["state"], list) else [row["state"], *(row.get("state_flags") or ())]
        given = row.get("active_features") or ()
        return SlurmNode(
            name=str(row["name"]), gpus=gpus_in(str(row.get("gres", ""))), cpus=int(plain_number(row.get("cpus", 1))),
            state="+".join(map(str, states)).upper(), partitions=tuple(map(str, row.get("partitions") or ())),
            features=tuple(given.split(",") if isinstance(given, str) else map(str, given)),
        )  # fmt: skip

    return [_checked("node", str(r.get("name", "?")), partial(make, r)) for r in _rows(whole, "nodes", where)]
