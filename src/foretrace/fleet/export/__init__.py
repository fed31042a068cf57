"""Decisions as other schedulers take them: Slurm scripts, Kueue jobs, Volcano pod groups, Ray placement groups.

What is exported of a decision is its shape (machines, GPUs on each), the level of the cluster inside which all GPUs
should lie, and how long the job insists on that before it accepts wider placements. Slurm and Ray know such a timer;
Kueue and Volcano know "must" and "should" only, so that a finite wait becomes two files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.export import kubernetes, ray, slurm
from foretrace.fleet.export.ask import Ask
from foretrace.fleet.result import FleetResult
from foretrace.fleet.workload import Workload
from foretrace.names import resolve


def export(
    workload: Workload,
    cluster: ClusterTree,
    result: FleetResult | None = None,
    *,
    to: str,
    job: str | Iterable[str] | None = None,
    level: str | None = None,
    wait_s: float = math.inf,
    labels: Mapping[str, str] | None = None,
    queue: str | None = None,
    image: str = "IMAGE",
    command: Iterable[str] = ("python", "train.py"),
    resource: str = "nvidia.com/gpu",
    namespace: str | None = None,
) -> dict[str, str]:
    """Return texts by file name that ask a scheduler for what was decided about one job, several, or all (`job` None).

    to: `slurm`, `kueue`, `volcano` or `ray`. result: where it holds the GPUs of a job, its first placement gives the
    shape, and the level where `level` is None; without it the shape is the fewest machines and the level the smallest
    that can hold the job. level: name of a level of the cluster, the last one for anywhere. wait_s: how long the job
    insists on the level: 0 prefers it only, inf (unless said) insists forever. labels: node labels of levels, by
    default `kubernetes.io/hostname` and `cloud.provider.com/topology-LEVEL`. queue: partition or queue, else the job's
    tenant. image, command: what runs; IMAGE is to be replaced.
    Raises ForetraceError for an unknown target, job or level, and for a job that the level can never hold.
    """
    writers: dict[str, Callable[[Ask], dict[str, str]]] = {
        "slurm": slurm.script,
        "kueue": kubernetes.kueue,
        "volcano": kubernetes.volcano,
        "ray": ray.group,
    }
    to = resolve(to, writers) or to
    if to not in writers:
        raise ForetraceError(f"cannot export to {to!r}; there are {', '.join(writers)}.")
    if not wait_s >= 0:
        raise ForetraceError(f"a job waits 0 seconds or more, not {wait_s:g}; say inf to insist forever.")
    machine = cluster.machine_level
    known = {each: f"cloud.provider.com/topology-{each}" for each in cluster.levels[machine + 1 : -1]}
    known |= dict.fromkeys(cluster.levels[: machine + 1], "kubernetes.io/hostname")
    for each in labels or {}:
        cluster.level(each)
    said: dict[str, Any] = {
        "labels": known | dict(labels or {}), "image": image, "command": tuple(command), "resource": resource,
        "namespace": namespace, "wait_s": float(wait_s),
    }  # fmt: skip
    if result is not None and len(result.workload) != len(workload):
        raise ForetraceError(
            f"the result is of {len(result.workload):,} jobs and the workload has {len(workload):,}; give those that "
            "belong together."
        )
    wanted = range(len(workload)) if job is None else [workload.position(job)] if isinstance(job, str) else None
    positions = list(wanted) if wanted is not None else [workload.position(each) for each in job or ()]
    names = _names([str(workload.job[at]) for at in positions])
    files: dict[str, str] = {}
    for at, name in zip(positions, names, strict=True):
        files |= writers[to](_ask(workload, cluster, result, at, level, queue, name=name, **said))
    return files


def _ask(
    workload: Workload, cluster: ClusterTree, result: FleetResult | None, at: int, level: str | None,
    queue: str | None, **said: Any,
) -> Ask:  # fmt: skip
    job, gpus = str(workload.job[at]), int(workload.gpus[at])
    asked = str(workload.gpu_type[at])
    usable = np.flatnonzero(cluster.usable(asked))
    kinds = [cluster.types[each] for each in usable] if asked.strip("| ") else []
    largest = cluster.largest()[usable].max(axis=0, initial=0).tolist()
    if (result is not None and result.never[at]) or gpus > largest[-1]:
        of = f" of kind {' or '.join(filter(None, asked.split('|')))}" if asked else ""
        raise ForetraceError(
            f"cluster {cluster.name!r} can never hold the {gpus} GPUs{of} of job {job!r}; ask for fewer."
        )
    smallest = next(each for each, most in enumerate(largest) if most >= gpus)
    held = _held(result, at)
    chosen = cluster.around(held) if held is not None and len(held) == gpus else smallest
    if level is not None:
        chosen = cluster.level(level)
        if chosen < smallest:
            raise ForetraceError(
                f"no {level} of cluster {cluster.name!r} holds the {gpus} GPUs of job {job!r}; the smallest that does "
                f"is {cluster.levels[smallest]!r}."
            )
    machine = cluster.machine_level
    nodes = math.ceil(gpus / largest[machine])
    per_node = gpus // nodes if gpus % nodes == 0 else 0
    if held is not None and len(held) == gpus and cluster.around(held) <= max(chosen, machine):
        _, counts = np.unique(np.searchsorted(cluster.starts[machine], held, side="right"), return_counts=True)
        nodes, per_node = len(counts), int(counts[0]) if len(set(counts.tolist())) == 1 else 0
    return Ask(
        job=job, gpus=gpus, level=max(0, chosen - machine), level_name=cluster.levels[chosen],
        anywhere=chosen == len(cluster.levels) - 1, nodes=nodes, per_node=per_node, largest=largest[machine],
        leaves=math.ceil(gpus / largest[min(machine + 1, len(largest) - 1)]), gpu_type="|".join(kinds),
        queue=queue or str(workload.tenant[at]), estimate_s=float(workload.estimate_s[at]),
        share=float(workload.share[at]), **said,
    )  # fmt: skip


def _held(result: FleetResult | None, at: int) -> np.ndarray[tuple[int], np.dtype[np.int64]] | None:
    """Return GPUs of the job's first stretch, None where the result does not list them."""
    if result is None or result.segments is None:
        return None
    mine = np.flatnonzero(result.segments.job == at)
    if not len(mine):
        return None
    found = result.segments.devices_of(int(mine[np.argmin(result.segments.start_ns[mine])]))
    return found if len(found) else None


def _names(jobs: list[str]) -> list[str]:
    """Return names of at most 50 small letters, digits and dashes (RFC 1123), no two alike."""
    made, seen = [], set()
    for at, job in enumerate(jobs):
        name = re.sub(r"[^a-z0-9]+", "-", job.lower())[:50].strip("-") or "job"
        name = name if name[0].isalpha() else f"job-{name}"[:50].strip("-")
        if name in seen:
            name = f"{name[:40].strip('-')}-{at}"
            while name in seen:
                name += "x"
        seen.add(name)
        made.append(name)
    return made
