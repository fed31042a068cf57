"""What a recording says about itself, beside its events: the form of each fact, checked in one place.

Facts come from files (a recorder's metadata, a stored graph), so they may be anything. What is read of them later may
rely on the forms below; keys that are not listed pass as they are. `foretrace.trace.recorder` explains them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
_Number = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
_Time = Annotated[int, msgspec.Meta(ge=0, le=86_400 * 10**9)]  # a step of a day is no step
_Root = Annotated[int, msgspec.Meta(ge=-1)]  # which of several models; -1 is none of them
_Index = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Threads = Annotated[int, msgspec.Meta(ge=1, le=2**20)]


class _Spent(TypedDict, total=False):
    wall_ns: _Time
    cpu_ns: _Time
    page_faults: _Count
    preemptions: _Count
    device_ns: _Time


class _Step(TypedDict):
    step: NotRequired[int]
    phase: str
    wall_ns: _Time
    cpu_ns: _Time
    page_faults: NotRequired[_Count]
    preemptions: NotRequired[_Count]
    batches: NotRequired[_Count]
    loader_wall_ns: NotRequired[_Count]
    loader_cpu_ns: NotRequired[_Count]
    loader_queued_ns: NotRequired[_Count]


class _Machine(TypedDict, total=False):
    cpu: str | None
    cores: _Count | None
    affinity: list[int] | None
    cpu_quota: float | None
    memory_bytes: _Count | None
    memory_available_bytes: _Count | None
    system: str | None
    architecture: str | None
    libc: str | None


class _Options(TypedDict, total=False):
    samples: _Count | None


class _Tensors(TypedDict):
    count: _Count
    elements: _Count


_Optimizer = TypedDict(
    "_Optimizer",
    {
        "class": str, "module": str, "settings": dict[str, Any], "groups": _Count, "tensors": dict[str, _Tensors],
        "with_gradient": _Count, "steps": _Count, "state_bytes": _Count,
    },
    total=False,
)  # fmt: skip
_Module = TypedDict("_Module", {"root": _Root, "name": str, "class": str, "parameters": _Count})


class _Parameter(TypedDict):
    name: str
    shape: list[_Count]
    dtype: str
    numel: _Count
    trained: bool
    optimizer: int
    root: NotRequired[_Root]
    group: NotRequired[int]


class _Workers(TypedDict, total=False):
    processes: _Count
    batches: _Count
    cpu_ns: _Count
    queued_ns: _Count


class _Loader(TypedDict, total=False):
    dataset: str
    num_workers: _Count
    batch_size: _Count | None
    prefetch_factor: _Count | None
    persistent_workers: bool
    pin_memory: bool
    start_method: str | None
    read_by_step_thread: bool
    batches: _Count
    workers: _Workers


class _Device(TypedDict, total=False):
    type: str | None
    name: str | None
    count: _Count | None


class _Together(TypedDict):
    workers: Annotated[int, msgspec.Meta(ge=2)]
    steps: _Count
    late_ms: tuple[_Number, _Number, _Number]
    resumed_ms: NotRequired[tuple[_Number, _Number, _Number]]


_FORMS: dict[str, Any] = {
    "steps": list[_Step] | None,
    "whole_steps": list[_Count] | None,
    "overhead": dict[str, _Spent | None] | None,
    "threads": dict[str, _Threads | None] | None,
    "machine": _Machine | None,
    "environment": dict[str, str] | None,
    "device": _Device | None,
    "options": _Options | None,
    "optimizers": list[_Optimizer] | None,
    "modules": list[_Module] | None,
    "module_calls": list[_Index] | None,
    "parameters": list[_Parameter] | None,
    "gradient_order": list[tuple[_Index, _Count]] | None,
    "buffer_bytes": _Count | None,
    "micro_batches": Annotated[int, msgspec.Meta(ge=1, le=1 << 30)],
    "loaders": list[_Loader] | None,
    "memory": dict[str, _Count | None] | None,
    "peaks": dict[str, Any] | None,
    "distributed": dict[str, Any] | None,
    "together": _Together | None,
    "python": str | None,
    "torch": str | None,
    "allocator": str | None,
    "cpu_capability": str | None,
}
# Numbers in the first are places in the second.
_PLACES = (("module_calls", "modules"), ("gradient_order", "parameters"))


def sound(told: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the facts that have their form, and what is wrong with each of the others; None tells nothing."""
    facts, wrong = dict(told), dict[str, str]()
    for key in [each for each in _FORMS if each in told]:
        try:
            msgspec.convert(facts[key], _FORMS[key])
        except (msgspec.ValidationError, RecursionError) as error:
            wrong[key] = str(error)
        if key in wrong or facts[key] is None:
            del facts[key]
    for places, things in _PLACES:
        numbers = [each[0] if isinstance(each, list | tuple) else each for each in facts.get(places, ())]
        if numbers and max(numbers) >= len(facts.get(things, ())):
            wrong[places] = f"{max(numbers)} is no place among its {things}"
            del facts[places]
    return facts, wrong
