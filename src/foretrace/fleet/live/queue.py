"""A snapshot in numbers: who may go where, in which order, and from when, as `forecast` plays it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.live.forecast import Queue, SchedulerPace
from foretrace.fleet.live.snapshot import QueuedJob, SlurmNode, SlurmPartition, Snapshot

MOST_JOBS, MOST_CELLS = 20_000, 40_000_000
# Reasons (squeue(1)) that no schedule answers: somebody has to act, or a limit that is not seen here must ease.
_NOBODY = re.compile(
    r"JobHeld|DependencyNeverSatisfied|PartitionTimeLimit|PartitionNodeLimit|BadConstraints|Invalid|Inactive|Account|"
    r"FrontEnd|ReqNodeNotAvail|Licenses|Assoc|QOS(?!$)|MaxCpuPer|MaxGRES|MaxNodePer|Cleaning|Prolog|launch_failed|"
    r"JobLaunchFailure|SystemFailure|NodeDown|OutOfMemory|BeginTimeUnknown|Federation|AdminHold|RequeueHold|Limit$"
)
_ANSWERED = ("JobArrayTaskLimit",)  # which the play knows
_JOB = re.compile(r"(after\w*|singleton)(?::([\d_*+,:()\w]*))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lined:
    """The jobs that are played, in Slurm's order, as records (a task of an array each), and in numbers.

    limits_s: (j,) time limits as Slurm plans with them. left_out: jobs that are not played → why.
    """

    jobs: tuple[QueuedJob, ...]
    queue: Queue
    limits_s: np.ndarray[tuple[int], np.dtype[np.float64]]
    left_out: Mapping[str, str]
    notes: tuple[str, ...]


def line_up(seen: Snapshot) -> Lined:
    """What is played on from a snapshot. Raises ForetraceError where it is too large, or no node takes jobs."""
    parts = {each.name: each for each in seen.partitions}
    nodes = list(seen.nodes)
    at = {each.name: i for i, each in enumerate(nodes)}
    devices = any(each.gpus for each in nodes)
    left_out: dict[str, str] = {}
    played: list[QueuedJob] = []
    notes: list[str] = []
    for job in seen.jobs:
        if job.running:
            played.append(job)
        elif job.waiting:
            why = stuck(job, seen)
            if why:
                left_out[job.job] = why
            else:
                played += _tasks(job)
    if len(played) > MOST_JOBS or len(played) * max(len(nodes), 1) > MOST_CELLS:
        raise ForetraceError(
            f"{len(played):,} jobs on {len(nodes):,} nodes are more than is played ({MOST_CELLS:,} pairs); save the "
            "output of one partition, e.g. with squeue -p NAME and sinfo -p NAME."
        )
    tiers = {each.name: each.tier for each in seen.partitions}

    def rank(job: QueuedJob) -> tuple[float, ...]:
        tier = max((tiers.get(name, 1) for name in job.partition.split(",")), default=1)
        return (not job.running, -tier, -job.priority, _submit(job), _number(job.job))

    played.sort(key=rank)
    slots = np.array([(each.gpus if devices and each.gpus else each.cpus) if each.usable else 0 for each in nodes])
    names = list(dict.fromkeys(job.partition.split(",")[0] for job in played)) or [""]
    switch = {host: i for i, hosts in enumerate(seen.leaves.values()) for host in hosts}
    count = (len(played), len(nodes))
    may, held = np.zeros(count, bool), np.zeros(count, np.int64)
    number, each = np.ones(count[0], np.int64), np.ones(count[0], np.int64)
    limits = np.array([limit_of(job, parts) for job in played], np.float64)
    for i, job in enumerate(played):
        if job.running:
            for host, share in job.held.items():
                if host in at:
                    node = nodes[at[host]]
                    used = share if node.gpus else -(-job.cpus // len(job.held))
                    held[i, at[host]] = slots[at[host]] if job.exclusive else min(used, node.gpus or node.cpus)
            continue
        may[i] = [_fits(job, node, parts) for node in nodes]
        largest = int(slots[may[i]].max(initial=0))
        whole = job.exclusive or any(parts[name].whole for name in job.partition.split(",") if name in parts)
        number[i], each[i] = _shape(job, largest, devices, whole=whole)
        if int((slots[may[i]] >= each[i]).sum()) < number[i] or not largest:
            left_out[job.job] = "no set of nodes that are up now could hold it"
    listed = {job.job for job in played}
    for job in played:
        if job.reason == "Dependency" and _awaited(job, dict.fromkeys(listed, 0)) < 0:
            left_out[job.job] = f"it depends on {job.after}, whose end is not known here"
    keep = np.array([job.running or job.job not in left_out for job in played], bool)
    index = {job.job: i for i, job in enumerate(job for job, yes in zip(played, keep, strict=True) if yes)}
    kept = tuple(job for job, yes in zip(played, keep, strict=True) if yes)
    groups = {name: i for i, name in enumerate(dict.fromkeys(job.array for job in kept if job.array))}
    now = seen.now_s
    most_wait = seen.parameter("max_switch_wait", 300.0)
    queue = Queue(
        slots=slots.astype(np.int64),
        leaf=np.array([switch.get(node.name, len(seen.leaves)) for node in nodes], np.int64),
        running=np.array([job.running for job in kept], bool), nodes=number[keep], each=each[keep], may=may[keep],
        held=held[keep], limit=limits[keep], began=np.array([-job.ran_s if job.running else 0.0 for job in kept]),
        eligible=np.array([_eligible(job, now) for job in kept], np.float64),
        part=np.array([names.index(job.partition.split(",")[0]) for job in kept], np.int64),
        switches=np.array([job.switches for job in kept], np.int64),
        insists=np.array([_submit(job) - now + min(job.switch_wait_s, most_wait) for job in kept], np.float64),
        waits_for=np.array([_awaited(job, index) for job in kept], np.int64),
        group=np.array([groups.get(job.array, -1) for job in kept], np.int64),
        throttle=np.array([job.throttle for job in kept], np.int64),
    )  # fmt: skip
    strange = sum(not job.held for job in kept if job.running)
    if strange:
        notes.append(f"where {strange} running jobs are is not said; their nodes are taken to be free")
    return Lined(jobs=kept, queue=queue, limits_s=limits[keep], left_out=left_out, notes=tuple(notes))


def pace_of(seen: Snapshot) -> SchedulerPace:
    """How often this Slurm decides, from its SchedulerParameters."""
    return SchedulerPace(
        interval_s=max(seen.parameter("bf_interval", 30.0), 1.0),
        window_s=seen.parameter("bf_window", 1440.0) * 60,
        depth=int(min(max(seen.parameter("bf_max_job_test", 500.0), 1.0), 5000.0)),
        backfill=seen.settings.get("schedulertype", "sched/backfill") != "sched/builtin",
        lag_s=max(seen.parameter("batch_sched_delay", 3.0), seen.parameter("sched_min_interval", 2e6) / 1e6) / 2,
    )


def stuck(job: QueuedJob, seen: Snapshot) -> str:
    """Why no schedule says when it starts, "" where one does."""
    reason = job.reason
    if _NOBODY.search(reason) and not reason.startswith(_ANSWERED):
        return pending(job)
    if job.reservation:
        return f"it waits for the reservation {job.reservation}, which is not read here"
    if job.priority == 0 and reason not in ("", "None", "Dependency", "BeginTime"):
        return "it is held (priority 0); scontrol release lets it go"
    parts = {each.name: each for each in seen.partitions}
    names = [name for name in job.partition.split(",") if name]
    if names and all(name in parts and not parts[name].up for name in names):
        return f"partition {job.partition} is not up"
    if reason == "Dependency" and not _on(job):
        return f"it depends on {job.after or 'other jobs'}, whose end is not known here"
    return ""


_WORDS = {
    "Priority": "other jobs of its partition with a higher priority come first",
    "Resources": "it is first in line, and the nodes it needs are not free",
    "Dependency": "it waits until other jobs have ended",
    "BeginTime": "the time before which it must not start has not come",
    "JobHeldUser": "its user holds it; scontrol release lets it go",
    "JobHeldAdmin": "an operator holds it; only an operator can release it",
    "JobArrayTaskLimit": "as many tasks of its array run as it allows at once",
    "DependencyNeverSatisfied": "what it depends on failed and cannot be satisfied any more; cancel it",
    "PartitionTimeLimit": "its time limit is above that of its partition; lower it with scontrol update TimeLimit=",
    "PartitionNodeLimit": "it requests more nodes than its partition has or gives to one job",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition takes no new starts",
    "ReqNodeNotAvail": "a node that it insists on is down, drained or reserved",
    "Reservation": "it waits for its reservation",
    "Licenses": "licenses that it needs are all in use",
    "BadConstraints": "no node can satisfy its constraints; change them",
}  # fmt: skip


def pending(job: QueuedJob) -> str:
    """Slurm's reason in plain words."""
    reason = job.reason.strip("()")
    if reason in _WORDS:
        return _WORDS[reason]
    if reason.startswith("Nodes") or "DOWN" in reason:
        return "nodes it needs are down, drained, or kept for jobs of a higher priority"
    if reason.startswith(("Assoc", "QOS", "Max")):
        return f"a limit of its account or QOS is reached ({reason}); it starts when others of them end"
    first = reason.split(",")[0]
    if first in ("", "None"):
        return "Slurm has not looked at it yet"
    return _WORDS.get(first, f"Slurm says {reason}")


def limit_of(job: QueuedJob, parts: Mapping[str, SlurmPartition]) -> float:
    """The time limit that Slurm plans with: the job's, its partition's default, or its partition's limit; seconds."""
    given = [parts[name] for name in job.partition.split(",") if name in parts]
    limit = job.limit_s
    for each in given:
        limit = each.default_s if math.isnan(limit) else limit
        limit = each.limit_s if math.isnan(limit) else limit
    return min(limit, 365 * 86400.0) if not math.isnan(limit) else 365 * 86400.0


def _tasks(job: QueuedJob) -> list[QueuedJob]:
    return [job, *(replace(job, job=f"{job.job}+{i}", tasks=1) for i in range(1, job.tasks))]


def _submit(job: QueuedJob) -> float:
    return job.submit_s if math.isfinite(job.submit_s) else 0.0


def _number(job: str) -> float:
    found = re.match(r"\d{1,15}", job)
    return float(found[0]) if found else 0.0


def _eligible(job: QueuedJob, now: float) -> float:
    if job.reason == "BeginTime":
        later = [each - now for each in (job.eligible_s, job.start_s) if math.isfinite(each)]
        return max([0.0, *later])
    return 0.0


def _on(job: QueuedJob) -> list[str]:
    """Jobs that it depends on."""
    found = []
    for _, rest in _JOB.findall(job.after):
        found += re.findall(r"\d+(?:_\d+)?", rest.split("(")[0])
    return found


def _awaited(job: QueuedJob, index: Mapping[str, int]) -> int:
    """The last in line of those it depends on, −1 where none is left."""
    wanted = set(_on(job))
    return max((i for each, i in index.items() if {each, re.split(r"[+_]", each)[0]} & wanted), default=-1)


def _fits(job: QueuedJob, node: SlurmNode, parts: Mapping[str, SlurmPartition]) -> bool:
    if not node.usable or node.name in job.without or (job.only and node.name not in job.only):
        return False
    given = [parts[name] for name in job.partition.split(",") if name in parts]
    if given and not any(node.name in part.nodes for part in given):
        return False
    wanted = [word for word in re.split(r"[&,]", job.features) if word]
    if any(sign in job.features for sign in "|[*("):
        wanted = []  # which of several is not worked out
    return all(word in node.features for word in wanted) and (node.gpus > 0 or not job.gpus)


def _shape(job: QueuedJob, largest: int, devices: bool, *, whole: bool) -> tuple[int, int]:
    """Nodes and slots on each."""
    nodes = max(job.nodes, 1)
    if job.gpus and job.per_node:
        each = job.per_node
    elif job.gpus:
        nodes = max(nodes, -(-job.gpus // max(largest, 1)))
        each = -(-job.gpus // nodes)
    else:
        each = 0 if devices else -(-job.cpus // nodes)
    return nodes, largest if whole and largest else each


def changed_job(seen: Snapshot, job: str, **fields: object) -> Snapshot:
    """The snapshot with one job asking for something else."""
    return replace(seen, jobs=tuple(replace(each, **fields) if each.job == job else each for each in seen.jobs))  # type: ignore[arg-type]


def larger(seen: Snapshot, racks: int) -> Snapshot:
    """The snapshot with so many more leaf switches like the largest one, all free."""
    like = max(seen.leaves.values(), key=len) if seen.leaves else tuple(each.name for each in seen.nodes)
    known = {each.name: each for each in seen.nodes}
    nodes, leaves, parts = list(seen.nodes), dict(seen.leaves), list(seen.partitions)
    for i in range(racks):
        added = {host: f"{host}+{i + 1}" for host in like if host in known}
        nodes += [replace(known[host], name=name, state="IDLE") for host, name in added.items()]
        leaves[f"added{i + 1}"] = tuple(added.values())
        parts = [
            replace(part, nodes=(*part.nodes, *(added[host] for host in part.nodes if host in added))) for part in parts
        ]
    return replace(seen, nodes=tuple(nodes), leaves=leaves, partitions=tuple(parts))


def with_parameters(seen: Snapshot, changes: Mapping[str, float]) -> Snapshot:
    """The snapshot with other SchedulerParameters."""
    kept = [
        word for word in seen.settings.get("schedulerparameters", "").split(",")
        if word and word.partition("=")[0].strip() not in changes
    ]  # fmt: skip
    words = [*kept, *(f"{key}={value:g}" for key, value in changes.items())]
    return replace(seen, settings={**seen.settings, "schedulerparameters": ",".join(words)})
