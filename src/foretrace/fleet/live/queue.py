"""A snapshot in numbers: who may go where, in which order, and from when, as `forecast` plays it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from foretrace import shipped
from foretrace.errors import ForetraceError
from foretrace.fleet.live.forecast import FOREVER, HELD_, QUEUED_, ROW, Queue
from foretrace.fleet.live.records import QueuedJob, SlurmNode, SlurmPartition, Snapshot
from foretrace.fleet.workload import Int64

MOST_JOBS, MOST_CELLS = 20_000, 40_000_000
_JOB = re.compile(r"(?:after\w*|singleton)(?::([\d_*+,:()\w]*))?")


@dataclass(frozen=True)
class Reason:
    """What Slurm's reasons (squeue(1)) that begin so mean in plain words; stuck: no schedule answers them.

    Then somebody has to act, or a limit that is not seen here must ease.
    """

    begins: str = ""
    words: str = ""
    stuck: bool = False


_REASONS = shipped.rows(__package__, "reasons.csv", Reason)


def pending(job: QueuedJob) -> Reason:
    """Return Slurm's reason, the first of the table that it begins with."""
    said = job.reason.strip("()")
    found = next(each for each in _REASONS if re.match(each.begins, said))
    return replace(found, words=found.words.format(reason=said))


def line_up(seen: Snapshot) -> Queue:
    """Return what is played on from a snapshot. Raises ForetraceError where it is too large, or no node takes jobs."""
    parts, nodes, given = seen.partitions, seen.nodes, seen.parameters
    devices = any(each.gpus for each in nodes)
    left_out = {job.job: why for job in seen.jobs if job.waiting and (why := stuck(job, parts))}
    played = [
        task for job in seen.jobs if job.running or (job.waiting and job.job not in left_out)
        for task in (job, *(replace(job, job=f"{job.job}+{i}", tasks=1) for i in range(1, job.tasks)))
    ]  # fmt: skip
    if len(played) > MOST_JOBS or len(played) * max(len(nodes), 1) > MOST_CELLS:
        raise ForetraceError(
            f"{len(played):,} jobs on {len(nodes):,} nodes are more than is played ({MOST_CELLS:,} pairs); save the "
            "output of one partition, e.g. with squeue -p NAME and sinfo -p NAME."
        )
    played.sort(key=lambda job: _rank(job, parts))
    slots = np.array([(each.gpus if devices and each.gpus else each.cpus) if each.usable else 0 for each in nodes])
    known = {job.job: 0 for job in played}
    kept: list[tuple[QueuedJob, Int64, Int64, tuple[int, int]]] = []  # job, where it may run, what it holds, its shape
    for job in played:
        may, held, shape = np.zeros(len(nodes), np.int64), np.zeros(len(nodes), np.int64), (1, 1)
        if job.running:
            for at, node in enumerate(nodes):
                if node.name in job.held:
                    used = job.held[node.name] if node.gpus else -(-job.cpus // len(job.held))
                    held[at] = slots[at] if job.exclusive else min(used, node.gpus or node.cpus)
        else:
            may[:] = [_fits(job, node, parts) for node in nodes]
            largest = int(slots[may > 0].max(initial=0))
            shape = _shape(job, largest, devices, whole=job.exclusive or any(part.whole for part in _of(job, parts)))
            if not largest or int((slots[may > 0] >= shape[1]).sum()) < shape[0]:
                left_out[job.job] = "no set of nodes that are up now could hold it"
            if job.reason == "Dependency" and _awaited(job, known) < 0:
                left_out[job.job] = f"it depends on {job.after}, whose end is not known here"
        if job.job not in left_out:
            kept.append((replace(job, limit_s=limit_of(job, parts)), may, held, shape))
    jobs = tuple(each[0] for each in kept)
    index = {job.job: i for i, job in enumerate(jobs)}
    groups = {name: i for i, name in enumerate(dict.fromkeys(job.array for job in jobs if job.array))}
    first = {name: i for i, name in enumerate(dict.fromkeys(job.partition.split(",")[0] for job in jobs))}
    switch = {host: i for i, hosts in enumerate(seen.leaves.values()) for host in hosts}
    rows = [
        (
            HELD_ if job.running else QUEUED_, *shape, first[job.partition.split(",")[0]], job.switches,
            _awaited(job, index), groups.get(job.array, -1), job.throttle, job.limit_s,
            np.nanmax([0.0, *(at - seen.now_s for at in (job.eligible_s, job.start_s) if job.reason == "BeginTime")]),
            _submit(job) - seen.now_s + min(job.switch_wait_s, given.max_switch_wait),
            -job.ran_s if job.running else FOREVER, 0.0, 0.0, 0.0,
        )
        for job, _, _, shape in kept
    ]  # fmt: skip
    strange = sum(not job.held for job in jobs if job.running)
    note = f"where {strange} running jobs are is not said; their nodes are taken to be free"
    empty = np.zeros((0, len(nodes)), np.int64)
    return Queue(
        jobs=jobs, left_out=left_out, notes=(note,) * bool(strange), slots=slots.astype(np.int64),
        leaf=np.array([switch.get(node.name, len(seen.leaves)) for node in nodes], np.int64),
        may=np.array([each[1] for each in kept] or empty).astype(bool),
        held=np.array([each[2] for each in kept] or empty), rows=np.array(rows, ROW), parameters=given,
        # half of batch_sched_delay; the thread that makes passes wakes every second
        backfill=seen.backfill, lag_s=max(given.batch_sched_delay / 2, 1.0),
    )  # fmt: skip


def _rank(job: QueuedJob, parts: Mapping[str, SlurmPartition]) -> tuple[float, ...]:
    """Return who is considered first, sorted ascending."""
    tier = max((each.tier for each in _of(job, parts)), default=1)
    number = re.match(r"\d{1,15}", job.job)
    return (not job.running, -tier, -job.priority, _submit(job), float(number[0]) if number else 0.0)


def _of(job: QueuedJob, parts: Mapping[str, SlurmPartition]) -> list[SlurmPartition]:
    """Return those of the partitions that it names which are known."""
    return [parts[name] for name in job.partition.split(",") if name in parts]


def stuck(job: QueuedJob, parts: Mapping[str, SlurmPartition]) -> str:
    """Return why no schedule says when it starts, "" where one does."""
    reason = job.reason
    if pending(job).stuck:
        return pending(job).words
    if job.reservation:
        return f"it waits for the reservation {job.reservation}, which is not read here"
    if job.priority == 0 and reason not in ("", "None", "Dependency", "BeginTime"):
        return "it is held (priority 0); scontrol release lets it go"
    named = _of(job, parts)
    if named and len(named) == job.partition.count(",") + 1 and not any(each.up for each in named):
        return f"partition {job.partition} is not up"
    if reason == "Dependency" and not _on(job):
        return f"it depends on {job.after or 'other jobs'}, whose end is not known here"
    return ""


def limit_of(job: QueuedJob, parts: Mapping[str, SlurmPartition]) -> float:
    """Return seconds that Slurm plans with: the job's limit, else its partition's default, else its limit."""
    limit = job.limit_s
    for each in _of(job, parts):
        limit = each.default_s if math.isnan(limit) else limit
        limit = each.limit_s if math.isnan(limit) else limit
    return float(np.fmin(limit, 365 * 86400.0))


def _submit(job: QueuedJob) -> float:
    return job.submit_s if math.isfinite(job.submit_s) else 0.0


def _on(job: QueuedJob) -> list[str]:
    """Return jobs that it depends on."""
    return [one for rest in _JOB.findall(job.after) for one in re.findall(r"\d+(?:_\d+)?", rest.split("(")[0])]


def _awaited(job: QueuedJob, index: Mapping[str, int]) -> int:
    """Return the last in line of those it depends on, −1 where none is left."""
    if not (wanted := set(_on(job))):
        return -1
    return max((i for each, i in index.items() if {each, re.split(r"[+_]", each)[0]} & wanted), default=-1)


def _fits(job: QueuedJob, node: SlurmNode, parts: Mapping[str, SlurmPartition]) -> bool:
    if not node.usable or node.name in job.without or (job.only and node.name not in job.only):
        return False
    given = _of(job, parts)
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


def larger(seen: Snapshot, racks: int) -> Snapshot:
    """Return the snapshot with so many more leaf switches like the largest one, all free."""
    like = max(seen.leaves.values(), key=len) if seen.leaves else tuple(each.name for each in seen.nodes)
    known = {each.name: each for each in seen.nodes}
    nodes, leaves, parts = list(seen.nodes), dict(seen.leaves), seen.partitions
    for i in range(racks):
        added = {host: f"{host}+{i + 1}" for host in like if host in known}
        nodes += [replace(known[host], name=name, state="IDLE") for host, name in added.items()]
        leaves[f"added{i + 1}"] = tuple(added.values())
        parts = {
            name: replace(each, nodes=each.nodes | {added[host] for host in each.nodes & added.keys()})
            for name, each in parts.items()
        }
    return replace(seen, nodes=tuple(nodes), leaves=leaves, partitions=parts)
