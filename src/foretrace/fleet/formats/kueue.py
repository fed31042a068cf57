"""Kueue: `kubectl get workloads -A -o json` (kueue.x-k8s.io, v1beta1 and v1beta2).

Submission is `metadata.creationTimestamp`, start the time of the condition Admitted, end that of Finished. GPUs are
`podSets[].count` × what one pod of the set requests.
"""

from __future__ import annotations

import math
from typing import Any

from foretrace.fleet.formats.jobs import Aside, Bad, Clock, LogRows, Row, gpus_of, name_of
from foretrace.fleet.formats.kubernetes import RESOURCES, count_of, inside, kind_of, kinds_in, objects, pod_gpus
from foretrace.fleet.formats.source import Source
from foretrace.fleet.workload import SECOND

GROUP = "kueue.x-k8s.io"


def matches(source: Source) -> bool:
    """Return whether every object of the list is a Workload of Kueue."""
    if not source.first.lstrip().startswith("{"):
        return False
    items = objects(source)
    mine = [kind_of(item) == "Workload" and str(item.get("apiVersion", GROUP)).startswith(GROUP) for item in items]
    return bool(mine) and all(mine)


def rows(source: Source, *, resource: str | None = None) -> LogRows:
    """Keep `cluster_queue`, `topology` (`required=LABEL`, `preferred=LABEL`, `unconstrained`), `pods` in details.

    resource: what a GPU is called, else the usual names. Workloads without GPUs, not admitted or not finished are set
    aside. Of a workload that was evicted the last admission counts.
    """
    names = RESOURCES if resource is None else (resource,)
    clock = Clock()
    evicted = 0

    def job(item: Any) -> Row:
        nonlocal evicted
        if kind_of(item) != "Workload":
            raise Bad("it is no Workload")
        name = name_of(inside(item, "metadata", "name", of=str), "metadata.name")
        namespace = inside(item, "metadata", "namespace", of=str)
        spec = inside(item, "spec")
        gpus = fewest = pods = 0
        kinds, wishes = set(), set()
        for pod_set in inside(spec, "podSets", of=list):
            count = count_of(pod_set.get("count", 1) if isinstance(pod_set, dict) else None, "podSets.count")
            pod = inside(pod_set, "template", "spec")
            each = pod_gpus(pod, names)
            least = count_of(pod_set["minCount"], "podSets.minCount") if pod_set.get("minCount") is not None else count
            gpus += count * each
            fewest += min(least, count) * each
            pods += count
            kinds.add(kinds_in(pod))
            wishes.add(_wish(pod_set))
        if gpus == 0:
            raise Aside("workloads without GPUs")
        times = {}
        for condition in inside(item, "status", "conditions", of=list):
            if inside(condition, "status", of=str) == "True":
                kind = inside(condition, "type", of=str)
                when = inside(condition, "lastTransitionTime", of=str)
                if kind in ("QuotaReserved", "Admitted", "Finished"):
                    times[kind] = clock.read(when, f"time of {kind}")
                evicted += kind == "Evicted"
        start = times.get("Admitted", times.get("QuotaReserved"))
        if start is None:
            raise Aside("workloads that were not admitted")
        if "Finished" not in times:
            raise Aside("workloads that have not finished")
        ran = (times["Finished"] - start) / SECOND
        if ran < 0:
            raise Bad("it finished before it was admitted")
        if ran == 0:
            raise Aside("workloads that ran for less than a second")
        limit = spec.get("maximumExecutionTimeSeconds")
        priority = spec.get("priority")
        if priority is not None and (not isinstance(priority, int) or isinstance(priority, bool)):
            raise Bad(f"spec.priority is {str(priority)[:40]!r}, not a whole number")
        return {
            "job": f"{namespace}/{name}" if namespace else name,
            "submit": clock.read(inside(item, "metadata", "creationTimestamp", of=str), "creationTimestamp"),
            "start": start,
            "end": times["Finished"],
            "gpus": gpus_of(str(gpus), "GPUs of its pods"),
            "min_gpus": max(1, fewest),
            "max_gpus": gpus,
            "work_s": ran,
            "gpu_type": "|".join(sorted(kinds - {""})),
            "tenant": inside(spec, "queueName", of=str),
            "estimate_s": math.nan
            if limit is None
            else float(count_of(limit, "maximumExecutionTimeSeconds")) or math.nan,
            "priority": float(min(max(priority or 0, -(2**53)), 2**53)),
            "cluster_queue": inside(item, "status", "admission", "clusterQueue", of=str),
            "topology": "|".join(sorted(wishes - {""})),
            "pods": float(pods),
        }

    def notes() -> list[str]:
        if not evicted:
            return list(clock.note)
        return [
            f"{evicted} workloads were evicted; what they ran before their last admission is not counted",
            *clock.note,
        ]

    items = ((f"items[{at}]", item) for at, item in enumerate(objects(source)))
    details = {"cluster_queue": "", "topology": "", "pods": math.nan}
    return LogRows(rows=items, parse=job, dated=True, notes=notes, details=details)


def _wish(pod_set: Any) -> str:
    """Return what a set of pods asks of the topology, from its request or the annotations of its pods."""
    request = inside(pod_set, "topologyRequest")
    annotations = inside(pod_set, "template", "metadata", "annotations")
    for wish in ("required", "preferred"):
        label = request.get(wish) or annotations.get(f"{GROUP}/podset-{wish}-topology")
        if label:
            return f"{wish}={label}"
    free = request.get("unconstrained") or annotations.get(f"{GROUP}/podset-unconstrained-topology") == "true"
    return "unconstrained" if free else ""
