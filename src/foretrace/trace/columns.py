"""Columns of one rank, grown chunk by chunk from its events.

Every chunk of events becomes numpy arrays at once and is forgotten. Names, shapes and collectives go through
tables that all ranks share; lanes belong to the rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import compress
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import Raw

from foretrace.errors import TraceError
from foretrace.trace.decimals import integers, nanoseconds
from foretrace.trace.kineto import Args, Event, Number
from foretrace.trace.tables import NO_STREAM, LaneTable, NameKind, Tables
from foretrace.trace.trace import COLUMNS, Category, Mask, UInt8

_CATEGORY: dict[str | None, int] = {
    "cpu_op": Category.OPERATOR,
    "Operator": Category.OPERATOR,
    "cuda_runtime": Category.RUNTIME,
    "cuda_driver": Category.RUNTIME,
    "hip_runtime": Category.RUNTIME,
    "xpu_runtime": Category.RUNTIME,
    "xpu_driver": Category.RUNTIME,
    "mtia_runtime": Category.RUNTIME,
    "privateuse1_runtime": Category.RUNTIME,
    "privateuse1_driver": Category.RUNTIME,
    "Runtime": Category.RUNTIME,
    "kernel": Category.KERNEL,
    "Kernel": Category.KERNEL,
    "gpu_memcpy": Category.MEMCPY,
    "Memcpy": Category.MEMCPY,
    "gpu_memset": Category.MEMSET,
    "Memset": Category.MEMSET,
    "user_annotation": Category.ANNOTATION,
    "gpu_user_annotation": Category.GPU_ANNOTATION,
    "python_function": Category.PYTHON,
    "cuda_sync": Category.SYNC,
    "cpu_instant_event": Category.MEMORY,
    "overhead": Category.OVERHEAD,
}
_SPAN = 254  # the profiler's own "Trace" event, which spans the recording
_NONE = 255  # no category at all
_CODE = {name: int(code) for name, code in _CATEGORY.items()} | {"Trace": _SPAN, None: _NONE}
# PyTorch 1.8's first profiler wrote no categories but named the process so.
_LEGACY = {"CPU functions": Category.OPERATOR, "CUDA functions": Category.KERNEL}


def _set_of(*codes: Category) -> Mask:
    """Membership in a set of categories, as an array to index with codes."""
    return np.isin(np.arange(256), codes)


_WORK = _set_of(Category.KERNEL, Category.MEMCPY, Category.MEMSET)
_DEVICE = _WORK | _set_of(Category.GPU_ANNOTATION, Category.SYNC)
_OPERATORS = _set_of(Category.OPERATOR, Category.ANNOTATION)
_LINKED = _WORK | _set_of(Category.RUNTIME, Category.SYNC, Category.OTHER)
_COLLECTIVES = _set_of(Category.OPERATOR, Category.KERNEL)

_MODULE = "nn.Module: "
_MEMORY = "[memory]"
_FLOWS = frozenset("stf")
_PHASES = frozenset("BEbneCPNODTpFRcvIi")
# c10::DeviceType; PyTorch calls devices of ROCm (6) cuda as well.
_DEVICE_TYPES = {"0": "cpu", "1": "cuda", "6": "cuda", "12": "xpu", "13": "mps"}
_NO_ARGS = Args()
_ZERO = Raw(b"0")

_Column = npt.NDArray[Any]
_T = TypeVar("_T")


class RankColumns:
    """The rows of one recording, in file order; times are nanoseconds as the file counts them.

    Without `salvage`, an event that breaks its own arithmetic (no time, a negative duration) is a TraceError.
    """

    def __init__(self, name: str, tables: Tables, categories: Collection[Category], *, salvage: bool) -> None:
        self.name = name
        self.lanes = LaneTable()
        self.runtime_names: set[int] = set()
        self.device_work = 0
        self.dropped: dict[str, int] = {}
        self.span: tuple[int, int] | None = None  # start and end of the recording, where the profiler tells
        self._tables = tables
        self._salvage = salvage
        self._python = Category.PYTHON in categories
        self._wanted = _set_of(*categories)
        self._store: dict[str, _Column] = {column: np.empty(1 << 14, dtype=dtype) for column, dtype in COLUMNS.items()}
        self._size = 0
        self._memory_names: dict[tuple[Number, Number], int] = {}
        self._events = 0

    def add(self, events: list[Event]) -> None:
        """Append the rows of one chunk."""
        python = self._python
        rows = [
            e
            for e in events
            if (e.ph == "X" and (python or e.cat != "python_function" or e.name.startswith(_MODULE)))
            or (e.ph == "i" and e.name == _MEMORY)
        ]
        if len(rows) < len(events):
            self._note_others(events, len(rows))
        if rows:
            self._add_rows(events, rows)
        self._events += len(events)

    def finish(self) -> dict[str, _Column]:
        """The columns; the object must not be used after that."""
        return {column: self._store.pop(column)[: self._size] for column in COLUMNS}

    def _append(self, rows: dict[str, _Column], good: Mask) -> None:
        # One growing array per column: many small ones would fragment the heap and double the memory held.
        first, self._size = self._size, self._size + int(np.count_nonzero(good))
        everything = self._size - first == len(good)
        for column, values in rows.items():
            store = self._store[column]
            if self._size > len(store):
                grown = np.empty(max(self._size, 3 * len(store) // 2), dtype=store.dtype)
                grown[:first] = store[:first]
                self._store[column] = store = grown
            store[first : self._size] = values if everything else values[good]

    def drop(self, reason: str, count: int) -> None:
        """Note rows that are left out."""
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count

    def _note_others(self, events: list[Event], rows: int) -> None:
        """Use or count what makes no row. Flow arrows only repeat what rows say and are skipped."""
        others = [e for e in events if e.ph != "X"]
        memory = 0
        for e in others:
            if e.ph in _FLOWS:
                continue
            if e.ph == "M":
                if e.name == "thread_name" and e.args is not None:
                    self.lanes.label(e.pid, e.tid, e.args.name)
            elif e.ph == "i" and e.name == _MEMORY:
                memory += 1
            elif e.ph != "i" or not e.name.startswith(("Record Window End", "Iteration Start")):
                phase = e.ph if e.ph in _PHASES else "other"
                self.drop(f'events of phase "{phase}" are not read', 1)
        self.drop("python_function events were not asked for", len(events) - len(others) + memory - rows)

    def _add_rows(self, events: list[Event], rows: list[Event]) -> None:
        rows, code = self._categories(rows)
        args = [e.args or _NO_ARGS for e in rows]
        names = self._tables.names
        column: dict[str, _Column] = {c: np.full(len(rows), -1, dtype=t) for c, t in COLUMNS.items() if c != "category"}
        column["category"] = code
        column["name"] = np.array([names[e.name] for e in rows], dtype=np.int32)
        kind = names.kinds()[column["name"]]
        code[(code == Category.OPERATOR) & (kind == NameKind.ANNOTATION)] = Category.ANNOTATION
        code[(code == Category.PYTHON) & (kind == NameKind.MODULE)] = Category.MODULE
        calls = code == Category.RUNTIME
        self.runtime_names.update(np.unique(column["name"][calls]).tolist())
        self.device_work += int(np.count_nonzero(_WORK[code]))

        good = self._set_times(rows, column)
        self._set_lanes(rows, args, code, column)
        self._set_operators(args, _OPERATORS[code], column, good)
        self._set_calls(args, _LINKED[code], column, good)
        self._set_waits(args, code == Category.SYNC, column, good)
        self._set_memory(args, code == Category.MEMORY, column, good)
        self._set_collectives(rows, args, _COLLECTIVES[code], kind == NameKind.COLLECTIVE, column)

        self._reject(events, rows, ~good, "has no time, or a number that is none")
        negative = good & (column["dur"] < 0)
        self._reject(events, rows, negative, "has a negative duration")
        good &= ~negative
        wanted = self._wanted[code]
        self.drop("events of categories that were not asked for", int(np.count_nonzero(good & ~wanted)))
        self._append(column, good & wanted)

    def _categories(self, rows: list[Event]) -> tuple[list[Event], UInt8]:
        """Category of each row; the profiler's own span is noted and left out."""
        get, other = _CODE.get, int(Category.OTHER)
        code = np.frombuffer(bytearray([get(e.cat, other) for e in rows]), dtype=np.uint8)
        for at in np.flatnonzero(code == _NONE):
            e = rows[at]
            code[at] = Category.MEMORY if e.ph == "i" else _LEGACY.get(str(e.pid), Category.OTHER)
        spans = code == _SPAN
        if not spans.any():
            return rows, code
        marks = _pick(rows, spans)
        start, known = nanoseconds([e.ts for e in marks])
        dur, timed = nanoseconds([e.dur for e in marks])
        for begin, end in zip(start[known & timed].tolist(), (start + dur)[known & timed].tolist(), strict=True):
            first, last = self.span or (begin, end)
            self.span = (min(first, begin), max(last, end))
        return _pick(rows, ~spans), code[~spans]

    def _set_times(self, rows: list[Event], column: dict[str, _Column]) -> Mask:
        column["start"], known = nanoseconds([e.ts for e in rows])
        column["dur"], timed = nanoseconds([e.dur if e.ph == "X" else _ZERO for e in rows])
        return known & timed

    def _set_lanes(self, rows: list[Event], args: list[Args], code: UInt8, column: dict[str, _Column]) -> None:
        device = _DEVICE[code]
        for at in np.flatnonzero(code == Category.OTHER):  # device work of a kind that is new to us
            device[at] = args[at].device is not None and args[at].stream is not None
        threads, streams = self.lanes.threads, self.lanes.streams
        lane = column["lane"]
        lane[~device] = [threads[e.pid, e.tid] for e in _pick(rows, ~device)]
        lane[device] = [
            streams[e.pid, e.tid] if a.device is None or a.stream is None else streams[a.device, a.stream]
            for e, a in zip(_pick(rows, device), _pick(args, device), strict=True)
        ]

    def _set_operators(self, args: list[Args], mask: Mask, column: dict[str, _Column], good: Mask) -> None:
        part = _pick(args, mask)
        _set(column["sequence"], mask, [a.sequence for a in part], good)
        shapes = self._tables.shapes
        column["shape"][mask] = [
            shapes[b"[%b,%b,%b]" % (a.dims, a.types or b"[]", a.concrete or b"[]")] if a.dims else -1 for a in part
        ]

    def _set_calls(self, args: list[Args], mask: Mask, column: dict[str, _Column], good: Mask) -> None:
        """Correlation and bytes of calls and device work."""
        part = _pick(args, mask)
        _set(column["correlation"], mask, [a.correlation for a in part], good)
        column["correlation"][column["correlation"] <= 0] = -1
        sizes = [a.size if a.bytes is None else a.bytes for a in part]
        _set(column["nbytes"], mask, [-1 if size is None else size for size in sizes], good)

    def _set_waits(self, args: list[Args], mask: Mask, column: dict[str, _Column], good: Mask) -> None:
        part = _pick(args, mask)
        _set(column["wait_correlation"], mask, [a.wait_correlation for a in part], good)
        stream = np.full(len(good), -1, dtype=np.int64)
        _set(stream, mask, [a.wait_stream for a in part], good)
        stream[stream == NO_STREAM] = -1
        good &= np.abs(stream) < 2**31
        column["wait_stream"][good] = stream[good]

    def _set_memory(self, args: list[Args], mask: Mask, column: dict[str, _Column], good: Mask) -> None:
        part = _pick(args, mask)
        _set(column["nbytes"], mask, [a.memory for a in part], good)
        column["name"][mask] = [self._memory_name(a.device_type, a.device_id) for a in part]

    def _memory_name(self, kind: Number, device: Number) -> int:
        number = self._memory_names.get((kind, device))
        if number is None:
            text = _DEVICE_TYPES.get(str(kind), f"device type {kind}")
            number = self._tables.names[f"[memory] {text}" if text == "cpu" else f"[memory] {text}:{device}"]
            self._memory_names[kind, device] = number
        return number

    def _set_collectives(
        self, rows: list[Event], args: list[Args], mask: Mask, named: Mask, column: dict[str, _Column]
    ) -> None:
        """Collectives that their arguments describe or, in older recordings, only their names."""
        described = np.zeros(len(rows), dtype=np.bool_)
        described[mask] = [bool(a.collective or a.in_elements) for a in _pick(args, mask)]
        mask = mask & (named | described)
        if mask.any():
            number = self._tables.collectives.number
            column["collective"][mask] = [
                number(a, e.name) for e, a in zip(_pick(rows, mask), _pick(args, mask), strict=True)
            ]

    def _reject(self, events: list[Event], rows: list[Event], mask: Mask, what: str) -> None:
        """Leave out events that cannot be true; without salvage that is an error."""
        if not mask.any():
            return
        if self._salvage:
            self.drop(f"event {what}", int(np.count_nonzero(mask)))
            return
        bad = rows[int(np.argmax(mask))]
        number = self._events + 1 + next(i for i, e in enumerate(events) if e is bad)
        raise TraceError(
            f"{self.name}: event {number:,} ({bad.name[:60]!r}) {what}; record again, or read the rest with --salvage."
        )


def _pick(items: Sequence[_T], mask: Mask) -> list[_T]:
    return list(compress(items, mask.tolist()))


def _set(column: _Column, mask: Mask, values: Sequence[object], good: Mask) -> None:
    """Write whole numbers into the rows of a mask; rows of others are no longer good."""
    column[mask], whole = integers(values)
    good[mask] &= whole
