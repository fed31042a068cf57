"""A snapshot in numbers: who may go where, in which order, and from when, as `forecast` plays it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.live.forecast import Queue
from foretrace.fleet.live.snapshot import QueuedJob, SlurmNode, SlurmPartition, Snapshot
from foretrace.fleet.workload import Float64, Int64

MOST_JOBS, MOST_CELLS = 20_000, 40_000_000
# Reasons (squeue(1)) that no schedule answers: somebody has to act, or a limit that is not seen here must ease.
_NOBODY = re.compile(
    r"JobHeld|DependencyNeverSatisfied|PartitionTimeLimit|PartitionNodeLimit|BadConstraints|Invalid|Inactive|Account|"
    r"FrontEnd|ReqNodeNotAvail|Licenses|Assoc|QOS(?!$)|MaxCpuPer|MaxGRES|MaxNodePer|Cleaning|Prolog|launch_failed|"
    r"JobLaunchFailure|SystemFailure|NodeDown|OutOfMemory|BeginTimeUnknown|Federation|AdminHold|RequeueHold|Limit$"
)
_ANSWERED = ("JobArrayTaskLimit",)  # which the play knows
_JOB = re.compile(r"(after\w*|singleton)(?::([\d_*+,:()\w]*))?")


def line_up(seen: Snapshot) -> Queue:
    """Return what is played on from a snapshot. Raises ForetraceError where it is too large, or no node takes jobs."""
    parts, nodes, now = {each.name: each for each in seen.partitions}, seen.nodes, seen.now_s
    devices = any(each.gpus for each in nodes)
    left_out = {job.job: why for job in seen.jobs if job.waiting and (why := stuck(job, parts))}
    played = [
        task for job in seen.jobs if job.running or (job.waiting and job.job not in left_out) for task in _tasks(job)
    ]
    if len(played) > MOST_JOBS or len(played) * max(len(nodes), 1) > MOST_CELLS:
        raise ForetraceError(
            f"{len(played):,} jobs on {len(nodes):,} nodes are more than is played ({MOST_CELLS:,} pairs); save the "
            "output of one partition, e.g. with squeue -p NAME and sinfo -p NAME."
        )
    played.sort(key=lambda job: _rank(job, parts))
    slots = np.array([(each.gpus if devices and each.gpus else each.cpus) if each.usable else 0 for each in nodes])
    rows: list[tuple[QueuedJob, Int64, Int64, int, int]] = []  # job, where it may run, what it holds, nodes, slots
    at, known = {node.name: i for i, node in enumerate(nodes)}, {job.job: 0 for job in played}
    for job in played:
        may, held, shape = np.zeros(len(nodes), np.int64), np.zeros(len(nodes), np.int64), (1, 1)
        if job.running:
            for host, share in job.held.items():
                if host in at:
                    node = nodes[at[host]]
                    used = share if node.gpus else -(-job.cpus // len(job.held))
                    held[at[host]] = slots[at[host]] if job.exclusive else min(used, node.gpus or node.cpus)
        else:
            may[:] = [_fits(job, node, parts) for node in nodes]
            largest = int(slots[may > 0].max(initial=0))
            whole = job.exclusive or any(parts[name].whole for name in _partitions(job) if name in parts)
            shape = _shape(job, largest, devices, whole=whole)
            if not largest or int((slots[may > 0] >= shape[1]).sum()) < shape[0]:
                left_out[job.job] = "no set of nodes that are up now could hold it"
            if job.reason == "Dependency" and _awaited(job, known) < 0:
                left_out[job.job] = f"it depends on {job.after}, whose end is not known here"
        if job.job not in left_out:
            rows.append((job, may, held, *shape))
    jobs = tuple(row[0] for row in rows)
    strange = sum(not job.held for job in jobs if job.running)
    note = f"where {strange} running jobs are is not said; their nodes are taken to be free"
    index = {job.job: i for i, job in enumerate(jobs)}
    groups = {name: i for i, name in enumerate(dict.fromkeys(job.array for job in jobs if job.array))}
    first = {name: i for i, name in enumerate(dict.fromkeys(_partitions(job)[0] for job in jobs))}
    switch = {host: i for i, hosts in enumerate(seen.leaves.values()) for host in hosts}
    given = seen.parameters

    def column(said: Callable[[QueuedJob], float]) -> Float64:
        return np.array([said(job) for job in jobs], np.float64)

    def counts(said: Callable[[QueuedJob], int]) -> Int64:
        return np.array([said(job) for job in jobs], np.int64)

    shapes = np.array([row[3:] for row in rows], np.int64).reshape(-1, 2)
    empty = np.zeros((0, len(nodes)), np.int64)
    return Queue(
        jobs=jobs, left_out=left_out, notes=(note,) * bool(strange), slots=slots.astype(np.int64),
        leaf=np.array([switch.get(node.name, len(seen.leaves)) for node in nodes], np.int64),
        running=np.array([job.running for job in jobs], bool), nodes=shapes[:, 0], each=shapes[:, 1],
        may=np.array([row[1] for row in rows] or empty).astype(bool),
        held=np.array([row[2] for row in rows] or empty), limit=column(lambda job: limit_of(job, parts)),
        began=column(lambda job: -job.ran_s if job.running else 0.0), eligible=column(lambda job: _eligible(job, now)),
        part=counts(lambda job: first[_partitions(job)[0]]), switches=counts(lambda job: job.switches),
        insists=column(lambda job: _submit(job) - now + min(job.switch_wait_s, given.max_switch_wait)),
        waits_for=counts(lambda job: _awaited(job, index)), group=counts(lambda job: groups.get(job.array, -1)),
        throttle=counts(lambda job: job.throttle), parameters=given, backfill=seen.backfill,
        # half of batch_sched_delay; the thread that makes passes wakes every second
        lag_s=max(given.batch_sched_delay / 2, 1.0),
    )  # fmt: skip


def _rank(job: QueuedJob, parts: Mapping[str, SlurmPartition]) -> tuple[float, ...]:
    """Return who is considered first, sorted ascending."""
    tier = max((parts[name].tier if name in parts else 1 for name in _partitions(job)), default=1)
    return (not job.running, -tier, -job.priority, _submit(job), _number(job.job))


def _partitions(job: QueuedJob) -> list[str]:
    return job.partition.split(",")


def stuck(job: QueuedJob, parts: Mapping[str, SlurmPartition]) -> str:
    """Return why no schedule says when it starts, "" where one does."""
    reason = job.reason
    if _NOBODY.search(reason) and not reason.startswith(_ANSWERED):
        return pending(job)
    if job.reservation:
        return f"it waits for the reservation {job.reservation}, which is not read here"
    if job.priority == 0 and reason not in ("", "None", "Dependency", "BeginTime"):
        return "it is held (priority 0); scontrol release lets it go"
    names = [name for name in _partitions(job) if name]
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
    """Return Slurm's reason in plain words."""
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
    """Return the time limit that Slurm plans with: the job's, its partition's default, or its partition's limit;
    seconds.
    """
    given = [parts[name] for name in _partitions(job) if name in parts]
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
    """Return jobs that it depends on."""
    found = []
    for _, rest in _JOB.findall(job.after):
        found += re.findall(r"\d+(?:_\d+)?", rest.split("(")[0])
    return found


def _awaited(job: QueuedJob, index: Mapping[str, int]) -> int:
    """Return the last in line of those it depends on, −1 where none is left."""
    wanted = set(_on(job))
    return max((i for each, i in index.items() if {each, re.split(r"[+_]", each)[0]} & wanted), default=-1)


def _fits(job: QueuedJob, node: SlurmNode, parts: Mapping[str, SlurmPartition]) -> bool:
    if not node.usable or node.name in job.without or (job.only and node.name not in job.only):
        return False
    given = [parts[name] for name in _partitions(job) if name in parts]
    if given and not any(node.name in part.nodes for part in given):
        return False
    wanted = [word for word in re.split(r"[&,]", job.features) if word]
    if any(sign in job.features for sign in "|[*("):
        wanted = []  # which of several is not worked out
    return all(word in node.features for word in wanted) and (node.gpus > 0 or not job.gpus)


def _shape(job: QueuedJob, largest: int, devices: bool, *, whole: bool) -> tuple[int, int]:
    """Return nodes and slots on each."""
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
    """Return the snapshot with one job asking for something else."""
    return replace(seen, jobs=tuple(replace(each, **fields) if each.job == job else each for each in seen.jobs))  # type: ignore[arg-type]


def larger(seen: Snapshot, racks: int) -> Snapshot:
    """Return the snapshot with so many more leaf switches like the largest one, all free."""
    like = max(seen.leaves.values(), key=len) if seen.leaves else tuple(each.name for each in seen.nodes)
    known = {each.name: each for each in seen.nodes}
    nodes, leaves, parts = list(seen.nodes), dict(seen.leaves), list(seen.partitions)
    for i in range(racks):
        added = {host: f"{host}+{i + 1}" for host in like if host in known}
        nodes += [replace(known[host], name=name, state="IDLE") for host, name in added.items()]
        leaves[f"added{i + 1}"] = tuple(added.values())
        parts = [
            replace(each, nodes=each.nodes | {added[host] for host in each.nodes & added.keys()}) for each in parts
        ]
    return replace(seen, nodes=tuple(nodes), leaves=leaves, partitions=tuple(parts))
