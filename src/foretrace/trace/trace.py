"""`Trace`: what happened in a run, as columns of events.

One row is one event of a recording. Nothing is kept as Python objects per event: names, lanes, shapes and
collectives are interned tables, everything else is a numpy column. Rows are ordered by (start, longest first),
so that on one thread an enclosing event always precedes what it encloses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np

from foretrace.arrays import Array, Int32, Int64, Mask, UInt8


class Category(IntEnum):
    """What an event is, whatever name its PyTorch version gave the category."""

    OPERATOR = 0  # cpu_op, Operator
    RUNTIME = 1  # cuda_runtime, cuda_driver, hip*, Runtime
    KERNEL = 2
    MEMCPY = 3
    MEMSET = 4
    ANNOTATION = 5  # user_annotation
    GPU_ANNOTATION = 6  # gpu_user_annotation: repeats annotations on the device, never a step
    MODULE = 7  # python_function events named "nn.Module: ..."
    PYTHON = 8  # every other python_function
    SYNC = 9  # cuda_sync
    MEMORY = 10  # [memory] instants; name is "[memory] cpu" or "[memory] cuda:0", nbytes is signed
    OVERHEAD = 11
    OTHER = 12


class LaneKind(IntEnum):
    """What a lane of events or tasks stands for."""

    CPU = 0  # a thread
    GPU = 1  # a stream
    LINK = 2  # a communication channel
    MODEL = 3  # exists in the model only, e.g. a data-loader worker that the recording cannot see


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLane:
    """A thread of a rank (`device` −1, `stream` = thread id) or a stream of a device."""

    rank: int
    kind: LaneKind
    device: int
    stream: int
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What a communication kernel says about itself; fields that a recording lacks are −1 or empty."""

    name: str
    dtype: str = ""
    in_elements: int = -1
    out_elements: int = -1
    group_size: int = -1
    group: str = ""
    group_ranks: tuple[int, ...] = ()
    sequence: int = -1  # of this call within its group
    source: int = -1  # of a point-to-point transfer, as global rank
    destination: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Input sizes, types and scalar arguments of one operator call, as recorded."""

    dims: tuple[Any, ...]
    types: tuple[str, ...]
    concrete: tuple[str, ...]
    layout: str = ""  # "channels_last" where a technique changed it; recordings do not say


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What a file says of its rank: who recorded, on which device, and what foretrace's recorder stored."""

    rank: int
    world_size: int
    source: str
    backend: str  # distributed backend, "" if none
    platform: str  # "cuda", "rocm" or "cpu"
    devices: tuple[str, ...]
    base_ns: int  # epoch of time 0 in nanoseconds
    recording: Mapping[str, Any] = field(default_factory=dict)  # the recorder's metadata, {} for others' files


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """Rows that a reader left out, and why (`--salvage`, filters)."""

    reason: str
    count: int
    where: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Columns of events of one or more ranks; times in int64 nanoseconds since the earliest base of its ranks."""

    start: Int64
    dur: Int64
    name: Int32  # -> names
    category: UInt8  # Category
    lane: Int32  # -> lanes
    correlation: Int64  # launch call <-> device work of one rank; MEMORY: the address; −1 if none
    sequence: Int64  # autograd sequence number, −1 if none
    nbytes: Int64  # copies, memsets and [memory] instants; −1 if unknown
    shape: Int32  # -> shapes, −1 if not recorded
    collective: Int32  # -> collectives, −1 if none
    wait_stream: Int32  # SYNC: the stream waited for, −1 if none
    wait_correlation: Int64  # SYNC: correlation of the event record waited for; MEMORY: total allocated; −1 if none
    names: tuple[str, ...]
    lanes: tuple[TraceLane, ...]
    shapes: tuple[str, ...]  # JSON text [dims, types, concrete]; see `shapes_of`
    collectives: tuple[Collective, ...]
    ranks: tuple[RankInfo, ...]
    dropped: tuple[Dropped, ...] = ()

    def __len__(self) -> int:
        return len(self.start)

    @property
    def cut_short(self) -> bool:
        """Whether the end of a rank's file was lost (`--salvage`)."""
        lost = {each.where for each in self.dropped if each.reason.startswith(("file ends", "file is broken"))}
        return any(rank.source in lost for rank in self.ranks)

    @property
    def nbytes_held(self) -> int:
        """Bytes of the columns (without the interned tables)."""
        return sum(getattr(self, c).nbytes for c in COLUMNS)

    def shapes_of(self, event: int) -> Shapes | None:
        """Return decoded shapes of one event, None where they were not recorded."""
        index = int(self.shape[event])
        return None if index < 0 else decode_shapes(self.shapes[index])

    def lane_kind(self) -> UInt8:
        """Return LaneKind of every lane, as an array to index with `lane`."""
        return np.array([lane.kind for lane in self.lanes], dtype=np.uint8)

    def lane_rank(self) -> Int32:
        """Return rank of every lane, as an array to index with `lane`."""
        return np.array([lane.rank for lane in self.lanes], dtype=np.int32)

    def named(self, predicate: Any) -> Mask:
        """Return rows whose name satisfies `predicate(str)`; the predicate runs once per distinct name."""
        table = np.fromiter((bool(predicate(n)) for n in self.names), dtype=np.bool_, count=len(self.names))
        return table[self.name] if len(table) else np.zeros(len(self), dtype=np.bool_)

    def take(self, rows: Array) -> Trace:
        """Return the trace with only these rows (index array or mask); tables are shared."""
        return replace(self, **{c: getattr(self, c)[rows] for c in COLUMNS})

    def of_rank(self, rank: int) -> Trace:
        """Return the rows and the `RankInfo` of one rank."""
        part = self.take(self.lane_rank()[self.lane] == rank)
        return replace(part, ranks=tuple(r for r in self.ranks if r.rank == rank))


COLUMNS: dict[str, type] = {
    "start": np.int64,
    "dur": np.int64,
    "name": np.int32,
    "category": np.uint8,
    "lane": np.int32,
    "correlation": np.int64,
    "sequence": np.int64,
    "nbytes": np.int64,
    "shape": np.int32,
    "collective": np.int32,
    "wait_stream": np.int32,
    "wait_correlation": np.int64,
}


def decode_shapes(text: str) -> Shapes:
    """Parse one entry of `Trace.shapes`."""
    dims, types, concrete, *layout = msgspec.json.decode(text)
    return Shapes(
        dims=tuple(dims), types=tuple(map(str, types)), concrete=tuple(map(str, concrete)), layout="".join(layout)
    )


def told_shapes(text: str) -> Shapes:
    """Parse one entry of `Trace.shapes`; nothing is told where it is damaged, or foreign."""
    try:
        return decode_shapes(text)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError):
        return Shapes(dims=(), types=(), concrete=())
