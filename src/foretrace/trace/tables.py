"""The interned tables of a trace: names, shapes, collectives and lanes, numbered in order of first use."""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw

from foretrace.arrays import UInt8
from foretrace.trace.entries import Args, Number
from foretrace.trace.trace import Collective, LaneKind, TraceLane

# Annotations that PyTorch 1.8 to 1.10 wrote among the operators.
_ANNOTATIONS = ("ProfilerStep", "Optimizer.step#", "Optimizer.zero_grad#", "enumerate(DataLoader)#")
# ncclKernel_AllReduce_RING_LL_Sum_float(), ncclDevKernel_SendRecv(), ncclAllReduceRingLLKernel_sum_f32()
_NCCL = re.compile(r"nccl(?:Dev)?Kernel_([A-Za-z]+)|nccl([A-Z][A-Za-z]+?)(?:Ring|Tree|CollNet)\w*Kernel")
_LAST_NUMBER = re.compile(r"[0-9]+(?=[^0-9]*$)")
_NAMELESS = -1_000_000_000_000  # first number of processes and threads whose id is no number
_MOST_NUMBER = 2**63 - 1
NO_STREAM = 2**32 - 1  # how older Kineto writes "every stream"


class Interner(dict[Any, int]):
    """Numbers its keys in order of first use."""

    def __missing__(self, key: Any) -> int:
        self[key] = number = len(self)
        return number


class NameKind(IntEnum):
    """What a name alone tells of an event."""

    PLAIN = 0
    ANNOTATION = 1
    MODULE = 2
    COLLECTIVE = 3


class NameTable(Interner):
    """Event names and their `NameKind`."""

    def __init__(self) -> None:
        self._kinds = bytearray()

    def __missing__(self, key: str) -> int:
        kind = NameKind.PLAIN
        if key.startswith(_ANNOTATIONS):
            kind = NameKind.ANNOTATION
        elif key.startswith("nn.Module: "):
            kind = NameKind.MODULE
        elif _NCCL.match(key):
            kind = NameKind.COLLECTIVE
        self._kinds.append(kind)
        return super().__missing__(key)

    def kinds(self) -> UInt8:
        """Return `NameKind` by name number, as of now."""
        return np.frombuffer(bytes(self._kinds), dtype=np.uint8)


class ShapeTable(dict[bytes, int]):
    """Argument text `[dims, types, concrete]` as recorded -> number of its compact form, −1 if it is none."""

    def __init__(self) -> None:
        self.texts = Interner()

    def __missing__(self, key: bytes) -> int:
        try:
            parts = [x if isinstance(x, list) else [] for x in msgspec.json.decode(key)]
            number = self.texts[msgspec.json.encode(parts).decode()]
        except (msgspec.MsgspecError, ValueError, RecursionError):
            number = -1
        self[key] = number
        return number


class CollectiveColumns:
    """Collectives as their kernels and calls describe them."""

    def __init__(self) -> None:
        self.found = Interner()
        self._known: dict[tuple[bytes, str], int] = {}

    def number(self, a: Args, name: str) -> int:
        """Return the number of the collective that an event's arguments or else its kernel's name tell, −1 if none."""
        if not a.collective and not a.in_elements and not _NCCL.match(name):
            return -1
        of_group = (a.group_size, a.group, a.group_ranks, a.group_sequence, a.source, a.destination)
        text = b"\n".join((a.collective, a.dtype, a.in_elements, a.out_elements, *of_group))
        number = self._known.get((text, name))
        if number is None:
            match = _NCCL.match(name)
            of_kernel = (match[1] or match[2]) if match else ""
            found = Collective(
                name=_text(a.collective) or of_kernel,
                dtype=_text(a.dtype),
                in_elements=_count(a.in_elements),
                out_elements=_count(a.out_elements),
                group_size=_count(a.group_size),
                group=_text(a.group),
                group_ranks=_ranks(a.group_ranks),
                sequence=_count(a.group_sequence),
                source=_count(a.source),
                destination=_count(a.destination),
            )
            self._known[text, name] = number = self.found[found]
        return number


class Tables:
    """The tables that all ranks of a trace share."""

    def __init__(self) -> None:
        self.names = NameTable()
        self.shapes = ShapeTable()
        self.collectives = CollectiveColumns()


class Lanes(dict[tuple[Number, Number], int]):
    """Process and thread, or device and stream, as an event names them -> lane of the rank."""

    def __init__(self, number: Callable[[Number, Number], int]) -> None:
        self._number = number

    def __missing__(self, key: tuple[Number, Number]) -> int:
        self[key] = number = self._number(*key)
        return number


class LaneTable:
    """Lanes of one rank, before its rank is known."""

    def __init__(self) -> None:
        self.threads = Lanes(self._of_thread)
        self.streams = Lanes(self._of_stream)
        self._found = Interner()  # (kind, process or device, thread or stream)
        self._nameless = Interner()
        self._labels: dict[tuple[int, int], str] = {}

    def _of_thread(self, process: Number, thread: Number) -> int:
        return self._found[LaneKind.CPU, *self.thread(process, thread)]

    def _of_stream(self, device: Number, stream: Number) -> int:
        if device == "CUDA functions":  # PyTorch 1.8's first profiler: the thread is the device
            device, stream = stream, 0
        return self._found[LaneKind.GPU, _device_number(device), _device_number(stream)]

    def thread(self, process: Number, thread: Number) -> tuple[int, int]:
        """Return numbers of a process and a thread; names are counted down from a far negative number."""
        return self._id(process), self._id(thread)

    def label(self, process: Number, thread: Number, label: Number) -> None:
        """Remember a thread's name; the last one tells most (PyTorch renames its threads)."""
        if isinstance(label, str) and label.strip():
            self._labels[self.thread(process, thread)] = label.strip()

    def lanes(self, rank: int) -> list[TraceLane]:
        """Return the lanes in order of their numbers."""
        return [self._lane(rank, *key) for key in self._found]

    def _lane(self, rank: int, kind: LaneKind, outer: int, inner: int) -> TraceLane:
        if kind == LaneKind.GPU:
            label = f"stream {inner}" if inner >= 0 else "every stream"
            return TraceLane(rank=rank, kind=kind, device=outer, stream=inner, label=label)
        label = self._labels.get((outer, inner)) or f"thread {inner}"
        return TraceLane(rank=rank, kind=kind, device=-1, stream=inner, label=label)

    def _id(self, value: Number) -> int:
        number = _whole(value)
        return number if number is not None else _NAMELESS - self._nameless[value]


def _whole(value: Number) -> int | None:
    """Return the number itself where it is one of 64 bits."""
    if isinstance(value, str):
        number = int(value) if re.fullmatch(r"\s*[-+]?[0-9]{1,19}\s*", value, re.ASCII) else None
    elif isinstance(value, float):
        number = int(value) if value.is_integer() else None
    else:
        number = value
    return number if number is not None and -_MOST_NUMBER <= number <= _MOST_NUMBER else None


def _device_number(value: Number) -> int:
    """Return the number of a device or stream, also out of "stream 7"; −1 where there is none."""
    number = _whole(value)
    if number is None and isinstance(value, str) and (match := _LAST_NUMBER.search(value)):
        number = int(match[0][:18])
    return -1 if number is None or number == NO_STREAM else number


def _text(raw: Raw) -> str:
    value = _value(raw)
    return value if isinstance(value, str) else "" if value is None else str(value)


def _count(raw: Raw) -> int:
    value = _value(raw)
    if isinstance(value, str):
        value = _whole(value)
    return value if isinstance(value, int) else -1


def _ranks(raw: Raw) -> tuple[int, ...]:
    """Return ranks of a group out of "[0, 1, 2]"; empty where Kineto shortened the list with "..."."""
    value = _value(raw)
    if isinstance(value, str):
        value = _value(value.encode())
    good = isinstance(value, list) and all(isinstance(v, int) for v in value)
    return tuple(value) if good else ()


def _value(raw: Raw | bytes) -> Any:
    try:
        return msgspec.json.decode(raw) if raw else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
