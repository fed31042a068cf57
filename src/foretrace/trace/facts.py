"""What foretrace's recorder stored beside the events, checked once where it enters: later rooms take it as it is.

`foretrace.trace.recorder` lists the keys. A key whose value is not of the form that the recorder writes is left out
with a note, and keys that are not listed here pass as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypedDict

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Time = Annotated[int, msgspec.Meta(ge=0, le=86_400 * 10**9)]  # a step of a day is no step
_Root = Annotated[int, msgspec.Meta(ge=-1)]  # which of several models; -1 is none of them
_Index = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Spent(TypedDict, total=False):
    wall_ns: _Time
    cpu_ns: _Time
    page_faults: _Count
    preemptions: _Count
    device_ns: _Time


class _Step(_Spent, total=False):
    step: int
    phase: str
    batches: _Count | None
    loader_wall_ns: _Count | None
    loader_cpu_ns: _Count | None
    loader_queued_ns: _Count | None


class _Overhead(TypedDict, total=False):
    unprofiled: _Spent | None
    profiled: _Spent | None
    untouched: _Spent | None


class _Threads(TypedDict, total=False):
    intra_op: Annotated[int, msgspec.Meta(ge=1, le=2**20)] | None
    inter_op: Annotated[int, msgspec.Meta(ge=1, le=2**20)] | None


class MachineFacts(TypedDict, total=False):
    cpu: str | None
    cores: _Count | None
    affinity: list[int] | None
    cpu_quota: float | None
    memory_bytes: _Count | None
    memory_available_bytes: _Count | None
    system: str | None
    architecture: str | None
    libc: str | None  # fmt: skip


class _Options(TypedDict, total=False):
    samples: _Count | None


class _Tensors(TypedDict, total=False):
    count: _Count
    elements: _Count


_Optimizer = TypedDict(
    "_Optimizer",
    {
        "class": str, "module": str, "settings": dict[str, Any], "groups": _Count, "tensors": dict[str, _Tensors],
        "with_gradient": _Count | None, "steps": _Count | None, "state_bytes": _Count | None,
    },
    total=False,
)  # fmt: skip
_Module = TypedDict(
    "_Module",
    {"root": _Root, "name": str, "class": str, "parameters": _Count},
    total=False,
)


class _Parameter(TypedDict, total=False):
    root: _Root
    name: str
    shape: list[_Count]
    dtype: str
    numel: _Count
    device: str
    trained: bool
    optimizer: int | None
    group: int | None


class _Workers(TypedDict, total=False):
    processes: _Count
    batches: _Count
    cpu_ns: _Count
    queued_ns: _Count


class _Loader(TypedDict, total=False):
    dataset: str | None
    num_workers: _Count | None
    batch_size: _Count | None
    prefetch_factor: _Count | None
    persistent_workers: bool | None
    pin_memory: bool | None
    start_method: str | None
    read_by_step_thread: bool | None
    batches: _Count | None
    workers: _Workers | None


class _Memory(TypedDict, total=False):
    peak_rss_bytes: _Count | None
    peak_allocated_bytes: _Count | None
    peak_reserved_bytes: _Count | None


class _Device(TypedDict, total=False):
    type: str | None
    name: str | None
    count: _Count | None


_FORMS: dict[str, Any] = {
    "steps": list[_Step] | None,
    "whole_steps": list[_Count] | None,
    "overhead": _Overhead | None,
    "threads": _Threads | None,
    "machine": MachineFacts | None,
    "environment": dict[str, str] | None,
    "device": _Device | None,
    "options": _Options | None,
    "optimizers": list[_Optimizer] | None,
    "modules": list[_Module] | None,
    "module_calls": list[_Index] | None,
    "parameters": list[_Parameter] | None,
    "gradient_order": list[tuple[_Index, _Count]] | None,
    "buffer_bytes": _Count | None,
    "micro_batches": Annotated[int, msgspec.Meta(ge=1, le=2**31)],
    "loaders": list[_Loader] | None,
    "memory": _Memory | None,
    "peaks": dict[str, Any] | None,
    "distributed": dict[str, Any] | None,
    "python": str | None,
    "torch": str | None,
    "allocator": str | None,
    "cpu_capability": str | None,
}
# Numbers in the first are places in the second.
_PLACES = (("module_calls", "modules"), ("gradient_order", "parameters"))


def sound(told: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the facts that are as the recorder writes them, and the keys of those that are not."""
    facts, wrong = dict(told), []
    for key, form in _FORMS.items():
        if key not in facts:
            continue
        try:
            msgspec.convert(facts[key], form)
        except (msgspec.ValidationError, RecursionError):
            wrong.append(key)
            del facts[key]
        else:
            if facts[key] is None and type(None) in getattr(form, "__args__", ()):
                del facts[key]
    for places, things in _PLACES:
        numbers = [each[0] if isinstance(each, list | tuple) else each for each in facts.get(places, ())]
        if numbers and max(numbers) >= len(facts.get(things, ())):
            wrong.append(places)
            del facts[places]
    return facts, wrong
