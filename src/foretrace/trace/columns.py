"""Columns of one rank, grown chunk by chunk from its entries.

Every chunk becomes numpy arrays at once and is forgotten. Names, shapes and collectives go through tables that all
ranks share; lanes belong to the rank.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.arrays import Array, Mask, UInt8
from foretrace.errors import TraceError
from foretrace.trace.decimals import integers, nanoseconds
from foretrace.trace.entries import (
    UNREAD,
    Args,
    Entry,
    Event,
    Foreign,
    Instant,
    MemoryArgs,
    Metadata,
    WholeEvent,
    WholeInstant,
)
from foretrace.trace.tables import NO_STREAM, LaneTable, NameKind, Tables
from foretrace.trace.trace import COLUMNS, Category

_WORDS: dict[Category, tuple[object, ...]] = {
    Category.OPERATOR: ("cpu_op", "Operator"),
    Category.RUNTIME: (
        "cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime", "xpu_driver", "mtia_runtime",
        "privateuse1_runtime", "privateuse1_driver", "Runtime",
    ),
    Category.KERNEL: ("kernel", "Kernel"),
    Category.MEMCPY: ("gpu_memcpy", "Memcpy"),
    Category.MEMSET: ("gpu_memset", "Memset"),
    Category.ANNOTATION: ("user_annotation",),
    Category.GPU_ANNOTATION: ("gpu_user_annotation",),
    Category.PYTHON: ("python_function",),
    Category.SYNC: ("cuda_sync",),
    Category.OVERHEAD: ("overhead",),
    Category.MEMORY: (Instant.cat,),
}  # fmt: skip
# PyTorch 1.8's first profiler wrote no categories but named the process so.
_LEGACY: dict[object, Category] = {"CPU functions": Category.OPERATOR, "CUDA functions": Category.KERNEL}
_CODE = {word: category for category, words in _WORDS.items() for word in words} | _LEGACY
_SPAN = "Trace"  # the category of the profiler's own event, which spans the recording
_WORK = (Category.KERNEL, Category.MEMCPY, Category.MEMSET)
_DEVICE = (*_WORK, Category.GPU_ANNOTATION, Category.SYNC)
_LINKED = (*_WORK, Category.RUNTIME, Category.SYNC, Category.OTHER)

_MODULE = "nn.Module: "
_MEMORY = "[memory]"
_MARKS = ("Record Window End", "Iteration Start")
# c10::DeviceType; PyTorch calls devices of ROCm (6) cuda as well.
_DEVICE_TYPES = {"0": "cpu", "1": "cuda", "6": "cuda", "12": "xpu", "13": "mps"}
_NO_ARGS = Args()
_NO_MEMORY_ARGS = MemoryArgs()

_Row = Event | Instant
_Columns = dict[str, Array]
_At = npt.NDArray[np.intp]


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
        self._wanted = np.isin(np.arange(len(Category)), [int(c) for c in categories])
        self._store: _Columns = {column: np.empty(1 << 14, dtype=dtype) for column, dtype in COLUMNS.items()}
        self._size = 0
        self._memory_names: dict[tuple[object, object], int] = {}
        self._entries = 0

    def add(self, entries: Sequence[Entry | Foreign]) -> None:
        """Append the rows of one chunk."""
        count = Counter(map(type, entries))
        whole = WholeEvent in count or WholeInstant in count
        event, instant = (WholeEvent, WholeInstant) if whole else (Event, Instant)
        python = self._python
        rows: list[Any] = [
            e
            for e in entries
            if (type(e) is event and (python or e.cat != "python_function" or e.name.startswith(_MODULE)))
            or (type(e) is instant and e.name == _MEMORY)
        ]
        if len(rows) < len(entries):
            self._note_others(entries, rows, count)
        if rows:
            self._add_rows(entries, rows)
        self._entries += len(entries)

    def finish(self) -> _Columns:
        """Return the columns; the object must not be used after that."""
        return {column: self._store.pop(column)[: self._size] for column in COLUMNS}

    def drop(self, reason: str, count: int) -> None:
        """Note rows that are left out."""
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count

    def _append(self, rows: _Columns, good: Mask) -> None:
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

    def _note_others(
        self, entries: Sequence[Entry | Foreign], rows: Sequence[_Row], count: Counter[type[Entry | Foreign]]
    ) -> None:
        """Use or count what makes no row. Flow arrows only repeat what rows say and are skipped."""
        instants = count[Instant] + count[WholeInstant]
        memory = sum(isinstance(e, Instant) for e in rows) if instants else 0
        self.drop("python_function events were not asked for", count[Event] + count[WholeEvent] + memory - len(rows))
        if instants > memory:
            marks = sum(isinstance(e, Instant) and e.name.startswith(_MARKS) for e in entries)
            self.drop('events of phase "i" are not read', instants - memory - marks)
        self.drop("events of unknown phases are not read", count[Foreign])
        for kind in count.keys() & UNREAD.keys():
            self.drop(f'events of phase "{UNREAD[kind]}" are not read', count[kind])
        if Metadata in count:
            for e in entries:
                if type(e) is Metadata and e.name == "thread_name" and e.args is not None:
                    self.lanes.label(e.pid, e.tid, e.args.name)

    def _add_rows(self, entries: Sequence[Entry | Foreign], rows: list[_Row]) -> None:
        names = self._tables.names
        column: _Columns = {name: np.full(len(rows), -1, dtype=t) for name, t in COLUMNS.items() if name != "category"}
        column["category"] = np.full(len(rows), Category.OTHER, dtype=np.uint8)
        column["name"] = np.array([names[e.name] for e in rows], dtype=np.int32)
        column["start"], good = nanoseconds([e.ts for e in rows])
        column["dur"], timed = nanoseconds([e.dur for e in rows])
        good &= timed
        kind = names.kinds()[column["name"]]
        keep = np.ones(len(rows), dtype=np.bool_)
        for word, places in _groups(rows).items():
            at = np.array(places, dtype=np.intp)
            if word == _SPAN:
                self._note_span(column, at[good[at]])
                keep[at], good[at] = False, True
            else:
                code = _CODE.get(word, Category.OTHER)
                column["category"][at] = code
                self._fill(code, [rows[i] for i in places], at, kind[at], column, good)
        codes = column["category"]
        codes[(codes == Category.OPERATOR) & (kind == NameKind.ANNOTATION)] = Category.ANNOTATION
        codes[(codes == Category.PYTHON) & (kind == NameKind.MODULE)] = Category.MODULE

        self._reject(entries, rows, ~good, "has no time, or a number that is none")
        keep &= good
        negative = keep & (column["dur"] < 0)
        self._reject(entries, rows, negative, "has a negative duration")
        keep &= ~negative
        wanted = self._wanted[codes]
        self.drop("events of categories that were not asked for", int(np.count_nonzero(keep & ~wanted)))
        self._append(column, keep & wanted)

    def _note_span(self, column: _Columns, at: _At) -> None:
        for begin, dur in zip(column["start"][at].tolist(), column["dur"][at].tolist(), strict=True):
            first, last = self.span or (begin, begin + dur)
            self.span = (min(first, begin), max(last, begin + dur))

    def _fill(self, code: Category, rows: list[Any], at: _At, kind: UInt8, column: _Columns, good: Mask) -> None:
        """Fill in what rows of one category, at places `at` of the columns, have beside name and time."""
        if code == Category.MEMORY:
            column["lane"][at] = [self.lanes.threads[e.pid, e.tid] for e in rows]
            self._fill_memory([e.args or _NO_MEMORY_ARGS for e in rows], at, column, good)
            return
        args: list[Args] = [e.args or _NO_ARGS for e in rows]
        column["lane"][at] = self._lanes_of(code, rows, args)
        if code in _LINKED:
            _set(column["correlation"], at, [a.correlation for a in args], good)
            if code != Category.KERNEL:
                _set(column["nbytes"], at, [a.size if a.bytes == -1 else a.bytes for a in args], good)
            column["correlation"][at] = np.where(column["correlation"][at] > 0, column["correlation"][at], -1)
        if code == Category.RUNTIME:
            self.runtime_names.update(np.unique(column["name"][at]).tolist())
        elif code in _WORK:
            self.device_work += len(rows)
        elif code == Category.SYNC:
            self._fill_waits(args, at, column, good)
        elif code in (Category.OPERATOR, Category.ANNOTATION):
            _set(column["sequence"], at, [a.sequence for a in args], good)
            shapes = self._tables.shapes
            column["shape"][at] = [
                shapes[b"[%b,%b,%b]" % (a.dims, a.types or b"[]", a.concrete or b"[]")] if a.dims else -1 for a in args
            ]
        if code in (Category.OPERATOR, Category.KERNEL):
            # Older kernels tell only by their names that they are collectives.
            number = self._tables.collectives.number
            named = kind == NameKind.COLLECTIVE if code == Category.KERNEL else np.zeros(len(at), dtype=np.bool_)
            described = np.array([bool(a.collective or a.in_elements) for a in args], dtype=np.bool_)
            chosen = np.flatnonzero(named | described)
            column["collective"][at[chosen]] = [number(args[i], rows[i].name) for i in chosen.tolist()]

    def _lanes_of(self, code: Category, rows: list[Event], args: list[Args]) -> list[int]:
        streams, own = self.lanes.streams, self.lanes.streams if code in _DEVICE else self.lanes.threads
        if code not in _DEVICE and code != Category.OTHER:  # those may be device work of a kind that is new to us
            return [own[e.pid, e.tid] for e in rows]
        return [
            own[e.pid, e.tid] if a.device is None or a.stream is None else streams[a.device, a.stream]
            for e, a in zip(rows, args, strict=True)
        ]

    def _fill_waits(self, args: list[Args], at: _At, column: _Columns, good: Mask) -> None:
        _set(column["wait_correlation"], at, [a.wait_correlation for a in args], good)
        stream, whole = integers([a.wait_stream for a in args])
        stream[stream == NO_STREAM] = -1
        whole &= np.abs(stream) < 2**31
        good[at] &= whole
        column["wait_stream"][at[whole]] = stream[whole]

    def _fill_memory(self, args: list[MemoryArgs], at: _At, column: _Columns, good: Mask) -> None:
        _set(column["nbytes"], at, [a.size for a in args], good)
        column["correlation"][at], _ = integers([a.address for a in args])
        column["wait_correlation"][at], _ = integers([a.total for a in args])
        known = self._memory_names
        for a in args:
            if (a.device_type, a.device) not in known:
                text = _DEVICE_TYPES.get(str(a.device_type), f"device type {a.device_type}")
                text = text if text == "cpu" else f"{text}:{a.device}"
                known[a.device_type, a.device] = self._tables.names[f"[memory] {text}"]
        column["name"][at] = [known[a.device_type, a.device] for a in args]

    def _reject(self, entries: Sequence[Entry | Foreign], rows: list[_Row], mask: Mask, what: str) -> None:
        """Leave out events that cannot be true; without salvage that is an error."""
        if not mask.any():
            return
        if self._salvage:
            self.drop(f"event {what}", int(np.count_nonzero(mask)))
            return
        bad = rows[int(np.argmax(mask))]
        number = self._entries + 1 + next(i for i, e in enumerate(entries) if e is bad)
        raise TraceError(
            f"{self.name}: event {number:,} ({bad.name[:60]!r}) {what}; record again, or read the rest with `salvage=`."
        )


def _groups(rows: list[_Row]) -> dict[object, list[int]]:
    """Return places of the rows by the category that the file gives them."""
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for i, e in enumerate(rows):
        groups[e.cat].append(i)
    for i in groups.pop(None, ()):
        pid = rows[i].pid
        groups[pid if pid in _LEGACY else ""].append(i)
    return groups


def _set(column: Array, at: _At, values: Sequence[object], good: Mask) -> None:
    """Write whole numbers at these places; rows of others are no longer good."""
    column[at], whole = integers(values)
    good[at] &= whole
