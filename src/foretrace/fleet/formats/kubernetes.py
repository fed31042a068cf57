"""What readers of Kubernetes objects share: GPUs that a pod requests, dates, values out of nested objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from foretrace.fleet.formats.jobs import Bad
from foretrace.fleet.formats.source import Source

RESOURCES = ("nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe")
TYPE_LABELS = ("nvidia.com/gpu.product", "cloud.google.com/gke-accelerator", "gpu.product", "accelerator")


def objects(source: Source) -> list[Any]:
    """Return items of a `kubectl get ... -o json`, or the one object it is."""
    top = source.json
    if isinstance(top, dict):
        items = top.get("items")
        return items if isinstance(items, list) else [top]
    return []


def kind_of(item: Any) -> str:
    """Return what it is, "" where it does not say."""
    kind = item.get("kind") if isinstance(item, dict) else None
    return kind if isinstance(kind, str) else ""


def inside(item: Any, *keys: str, of: type = dict) -> Any:
    """Return a value some keys down, an empty one of its type where there is none; raises Bad for another type."""
    for position, key in enumerate(keys):
        if not isinstance(item, dict):
            raise Bad(f"{'.'.join(keys[:position])} is not an object")
        item = item.get(key)
        if item is None:
            return of()
    if not isinstance(item, of) or isinstance(item, bool):
        raise Bad(
            f"{'.'.join(keys)} is not {'text' if of is str else 'an object' if of is dict else 'a ' + of.__name__}"
        )
    return item


def count_of(value: Any, what: str) -> int:
    """Return a whole number as JSON or as a quantity in text; raises Bad."""
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 12:
        number = int(value)
    else:
        raise Bad(f"{what} is {str(value)[:40]!r}, not a whole number")
    if not 0 <= number <= 1_000_000_000:
        raise Bad(f"{what} is {number}, which no cluster has")
    return number


def gpus_in(resources: Any, names: tuple[str, ...]) -> int:
    """Return GPUs of a list of resources by name; raises Bad."""
    return sum(count_of(resources[name], name) for name in names if isinstance(resources, dict) and name in resources)


def pod_gpus(spec: Any, names: tuple[str, ...]) -> int:
    """Return GPUs of a pod: those of its containers together, or of its neediest init container if that is more."""

    def of(containers: str) -> Iterator[int]:
        for container in inside(spec, containers, of=list):
            limits = gpus_in(inside(container, "resources", "limits"), names)
            yield max(limits, gpus_in(inside(container, "resources", "requests"), names))

    return max(sum(of("containers")), max(of("initContainers"), default=0))


def kinds_in(spec: Any) -> str:
    """Return the kind of GPU that a pod's node selector names, "" where it names none."""
    selector = inside(spec, "nodeSelector")
    return next((str(selector[label]) for label in TYPE_LABELS if label in selector), "")
