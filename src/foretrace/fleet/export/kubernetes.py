"""Objects for Kubernetes: a Job for Kueue with topology annotations, a PodGroup and its Job for Volcano.

Kueue: annotations `kueue.x-k8s.io/podset-required-topology` and `-preferred-topology` on the pod template, the label
`kueue.x-k8s.io/queue-name` on the Job (Kueue's apis/kueue/v1beta2/topology_types.go and its page on topology-aware
scheduling). Volcano: `scheduling.volcano.sh/v1beta1` PodGroup with `networkTopology` (`hard` with the highest tier
allowed, or `soft`), its pods named by `scheduling.k8s.io/group-name` (volcano-sh/apis).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from foretrace.errors import ForetraceError
from foretrace.fleet.export.ask import Ask

QUEUE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def kueue(ask: Ask) -> dict[str, str]:
    """Return NAME.yaml; where the wait is finite also NAME.after-SECONDS.yaml, to apply once it is over."""
    queue = _queue(ask, "LocalQueue")

    def one(ask: Ask) -> list[dict[str, Any]]:
        pods, each = _pods(ask)
        annotations = {}
        if not ask.anywhere and pods > 1:
            wish = "required" if ask.wait_s > 0 else "preferred"
            annotations[f"kueue.x-k8s.io/podset-{wish}-topology"] = ask.labels[ask.level_name]
        job = _job(ask, pods, each, annotations)
        job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": queue}
        job["spec"] = {"suspend": True, **job["spec"]}  # Kueue starts it
        return [job]

    return _timed(ask, one, "Kueue")


def volcano(ask: Ask) -> dict[str, str]:
    """Return manifests as `kueue` does. A level is the tier of its number: the units above the machines are tier 1."""
    queue = _queue(ask, "Queue")

    def one(ask: Ask) -> list[dict[str, Any]]:
        pods, each = _pods(ask)
        spec: dict[str, Any] = {
            "minMember": pods,
            "queue": queue,
            "minResources": {ask.resource: str(ask.gpus)},
        }
        if not ask.anywhere and ask.level > 0 and pods > 1:
            spec["networkTopology"] = {
                "mode": "hard" if ask.wait_s > 0 else "soft",
                "highestTierAllowed": ask.level,  # of "soft" the tier to begin with, where a version looks at it
            }
        group = {
            "apiVersion": "scheduling.volcano.sh/v1beta1",
            "kind": "PodGroup",
            "metadata": _metadata(ask),
            "spec": spec,
        }
        job = _job(ask, pods, each, {"scheduling.k8s.io/group-name": ask.name})
        job["spec"]["template"]["spec"]["schedulerName"] = "volcano"
        return [group, job]

    return _timed(ask, one, "Volcano")


def _timed(ask: Ask, one: Callable[[Ask], list[dict[str, Any]]], who: str) -> dict[str, str]:
    import yaml

    def text(ask: Ask, more: str = "") -> str:
        head = f"# {ask.within} (job {ask.job!r})\n{more}"
        if ask.share < 1:
            head += f"# it needs {ask.share:g} of a GPU; whole ones are asked for\n"
        body: str = yaml.safe_dump_all(one(ask), sort_keys=False, default_flow_style=False)
        return head + body

    wider = not ask.anywhere and 0 < ask.wait_s < math.inf and ask.gpus > 1
    if not wider:
        return {f"{ask.name}.yaml": text(ask)}
    later = f"{ask.name}.after-{math.ceil(ask.wait_s)}s.yaml"
    hint = f"# {who} has no timer: if it still waits after {ask.wait_s:g} s, delete it and apply {later}\n"
    return {f"{ask.name}.yaml": text(ask, hint), later: text(replace(ask, wait_s=0.0))}


def _pods(ask: Ask) -> tuple[int, int]:
    """Return (pods, GPUs of each). One machine is one pod; where several will do as well, every GPU is a pod."""
    if ask.level == 0:
        return (1, ask.gpus) if ask.wait_s > 0 else (ask.gpus, 1)
    return ask.pods


def _metadata(ask: Ask) -> dict[str, Any]:
    return {"name": ask.name} | ({"namespace": ask.namespace} if ask.namespace else {})


def _job(ask: Ask, pods: int, each: int, annotations: dict[str, str]) -> dict[str, Any]:
    container = {
        "name": "train",
        "image": ask.image,
        "command": list(ask.command),
        "resources": {"limits": {ask.resource: str(each)}},
    }
    pod: dict[str, Any] = {"restartPolicy": "Never", "containers": [container]}
    kinds = [kind for kind in ask.gpu_type.split("|") if kind]
    if kinds:
        term = {"key": "nvidia.com/gpu.product", "operator": "In", "values": kinds}
        pod["affinity"] = {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [term]}]}
            }
        }
    template: dict[str, Any] = {"metadata": {"annotations": annotations}, "spec": pod} if annotations else {"spec": pod}
    spec: dict[str, Any] = {
        "parallelism": pods,
        "completions": pods,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": template,
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(ask), "spec": spec}


def _queue(ask: Ask, what: str) -> str:
    queue = ask.queue
    if not QUEUE.fullmatch(queue):
        raise ForetraceError(f"job {ask.job!r} names no {what} ({queue!r} cannot be one); rename the job's tenant.")
    return queue
