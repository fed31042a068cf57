"""What a recording says about itself, as far as predictions read it: the types of these facts, checked in one place.

Facts come from files (a trace's metadata, a stored graph), so they may be anything. Whoever reads
`GraphInfo.recording` may rely on what is said below; other keys are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec

from foretrace.errors import GraphError

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Number = Annotated[float, msgspec.Meta(ge=0, le=1e18)]


class _Parameter(TypedDict):
    name: str
    shape: list[Count]
    dtype: str
    numel: Count
    trained: bool
    optimizer: int
    root: NotRequired[int]
    group: NotRequired[int]


class _Tensors(TypedDict):
    count: Count
    elements: Count


_Optimizer = TypedDict(
    "_Optimizer",
    {
        "class": str,
        "module": str,
        "settings": dict[str, Any],
        "groups": Count,
        "tensors": dict[str, _Tensors],
        "with_gradient": Count,
        "steps": Count,
        "state_bytes": Count,
    },
    total=False,
)

_Module = TypedDict("_Module", {"root": int, "name": str, "class": str, "parameters": Count})


class _Workers(TypedDict, total=False):
    processes: Count
    batches: int
    cpu_ns: int
    queued_ns: int


class _Loader(TypedDict, total=False):
    dataset: str
    num_workers: Count
    batch_size: Count | None
    prefetch_factor: Count | None
    persistent_workers: bool
    pin_memory: bool
    start_method: str | None
    read_by_step_thread: bool
    batches: Count
    workers: _Workers


class _Step(TypedDict):
    step: NotRequired[int]
    phase: str
    wall_ns: Count
    cpu_ns: Count
    page_faults: NotRequired[Count]
    preemptions: NotRequired[Count]
    batches: NotRequired[Count]
    loader_wall_ns: NotRequired[Count]
    loader_cpu_ns: NotRequired[Count]
    loader_queued_ns: NotRequired[Count]


class _Options(TypedDict, total=False):
    samples: Count | None


class _Together(TypedDict):
    workers: Annotated[int, msgspec.Meta(ge=2)]
    steps: Count
    late_ms: tuple[Number, Number, Number]
    resumed_ms: NotRequired[tuple[Number, Number, Number]]


class RecordingFacts(TypedDict, total=False):
    """Keys of `GraphInfo.recording` that this program reads."""

    parameters: list[_Parameter]
    optimizers: list[_Optimizer]
    modules: list[_Module]
    module_calls: list[int]
    gradient_order: list[tuple[Count, int]]
    loaders: list[_Loader]
    steps: list[_Step]
    whole_steps: list[int]
    overhead: dict[str, dict[str, Number] | None] | None
    options: _Options
    threads: dict[str, Count | None]
    machine: dict[str, Any]
    device: dict[str, Any]
    peaks: dict[str, Any] | None
    distributed: dict[str, Any] | None
    micro_batches: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
    buffer_bytes: Any
    together: _Together | None


class _Calibration(TypedDict, total=False):
    machine: dict[str, Any]
    seconds: dict[str, Number]


def check_facts(recording: dict[str, Any], where: str) -> None:
    """Raise GraphError, naming the fact, where one of those above has another type."""
    _check(recording, RecordingFacts, f"{where} says of its recording", where)


def check_shapes(shapes: Sequence[str], where: str) -> None:
    """Raise GraphError where the text of an operator's inputs is none: see `foretrace.trace.trace.Shapes`."""
    for text in shapes:
        try:
            inputs = msgspec.json.decode(text, type=list[Any])
            sound = len(inputs) in (3, 4) and all(isinstance(each, list) for each in inputs[:3])
            sound = sound and (len(inputs) == 3 or isinstance(inputs[3], str))
            sound = sound and all(isinstance(each, list) for each in inputs[0])
            sound = sound and all(type(size) is int and size >= 0 for size in _flat(inputs[0]))
        except (msgspec.DecodeError, RecursionError):
            sound = False
        if not sound:
            raise GraphError(f"{where} is damaged: {text[:60]!r} are no inputs of an operator; make it again.")


def _flat(sizes: list[Any]) -> Iterator[Any]:
    for each in sizes:
        if isinstance(each, list):
            yield from _flat(each)
        else:
            yield each


def check_calibration(calibration: dict[str, Any], where: str) -> None:
    """Raise GraphError where the operator times that a graph carries are none."""
    _check(calibration, _Calibration, f"{where} says of its operators' times", where)


def _check(value: object, kind: Any, what: str, where: str) -> None:
    try:
        msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        raise GraphError(f"what {what} is damaged: {error}; make {where} again.") from None
