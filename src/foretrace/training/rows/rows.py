"""`Rows`: a table whose rows a batch reads and writes by number, wherever the table is kept.

    with RowsInMemory(values) as rows:
        rows.add(ids, -0.1 * gradient_of(rows.get(ids)))
        rows.counters.bytes_read

Stores (memory, disk, a server) and what wraps one (a cache, look-ahead) have the same five methods. Checks, bytes and
waits are done here, once for all of them.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import Self

import numpy as np

from foretrace.arrays import Float32, Int64
from foretrace.errors import ForetraceError
from foretrace.training.rows.orders import State


@dataclass(slots=True)
class RowCounters:
    """What was asked of rows since they were opened."""

    gets: int = 0  # calls
    writes: int = 0  # calls of add and put
    rows_read: int = 0
    rows_written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    hits: int = 0  # rows that a cache had
    misses: int = 0  # rows that it had to ask for
    wait_s: float = 0.0  # seconds that callers waited, and did not compute

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what this thread waits meanwhile."""
        wall, own = perf_counter(), thread_time()
        yield
        self.wait_s += max(perf_counter() - wall - (thread_time() - own), 0.0)


class Rows(ABC):
    """A table of `count` rows of `width` float32 numbers.

    `ids` are int64 (n,); those of a write are distinct. `get` returns a copy (n, width) in the order of `ids`. Methods
    raise ForetraceError for ids that are none of the table's, for values of another shape, and where the store is gone.
    """

    def __init__(self, count: int, width: int) -> None:
        if count < 1 or width < 1:
            raise ForetraceError(f"A table must have rows and columns, got {count} x {width}.")
        self.count, self.width = count, width
        self.counters = RowCounters()

    def get(self, ids: Int64) -> Float32:
        """Return the rows of `ids` (n,), as they are after all writes so far: (n, width)."""
        return self._read(self._get, ids)

    def add(self, ids: Int64, values: Float32) -> None:
        """Add `values` (n, width) to the rows of `ids` (n,), each named once."""
        self._write(self._add, ids, values)

    def put(self, ids: Int64, values: Float32) -> None:
        """Replace the rows of `ids` (n,), each named once, by `values` (n, width)."""
        self._write(self._put, ids, values)

    def visit(self, states: Sequence[State]) -> Iterator[State]:
        """Yield states of partitions whose rows are read and written next: a table with a buffer holds these."""
        return iter(states)

    def close(self) -> None:  # noqa: B027 - a table in memory has nothing to close
        """Write what is not yet written, and release files and connections. May be called again."""

    @abstractmethod
    def _get(self, ids: Int64) -> Float32: ...

    @abstractmethod
    def _put(self, ids: Int64, values: Float32) -> None: ...

    def _add(self, ids: Int64, values: Float32) -> None:
        self._put(ids, self._get(ids) + values)

    def _read(self, how: Callable[[Int64], Float32], ids: Int64) -> Float32:
        ids = self.checked(ids)
        with _recorded("rows.get", ids, self.width), self.counters.waiting():
            found = how(ids)
        self.counters.gets += 1
        self.counters.rows_read += len(ids)
        self.counters.bytes_read += found.nbytes
        return found

    def _write(self, how: Callable[[Int64, Float32], object], ids: Int64, values: Float32, width: int = 0) -> None:
        ids, width = self.checked(ids), width or self.width
        if values.shape != (len(ids), width):
            raise ForetraceError(
                f"Values of {len(ids)} rows must have shape ({len(ids)}, {width}), got {values.shape}."
            )
        if len(distinct(ids)) != len(ids):
            raise ForetraceError("Rows of one write must be distinct; add up what belongs to the same row first.")
        with _recorded("rows.put", ids, width), self.counters.waiting():
            how(ids, np.asarray(values, np.float32))
        self.counters.writes += 1
        self.counters.rows_written += len(ids)
        self.counters.bytes_written += 4 * values.size

    def checked(self, ids: Int64) -> Int64:
        """Return `ids` (n,) as int64. Raises ForetraceError where they are none of the table's."""
        ids = np.asarray(ids)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ForetraceError(f"Rows are named by a list of whole numbers, got {ids.dtype} of shape {ids.shape}.")
        within(ids, self.count, "A row must be")
        return ids.astype(np.int64, copy=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _recorded(what: str, ids: Int64, width: int) -> AbstractContextManager[object]:
    """Return a range in the recording of this thread, if there is one: the graph has it as a task with this name."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.autograd._profiler_enabled():
        return nullcontext()
    range_: AbstractContextManager[object] = torch.profiler.record_function(f"{what} {len(ids)} x {width}")
    return range_


def within(ids: Int64, count: int, what: str) -> None:
    """Raise ForetraceError unless all of `ids` are from 0 to count - 1; `what` begins the sentence."""
    if len(ids) and not 0 <= ids.min() <= ids.max() < count:
        raise ForetraceError(f"{what} from 0 to {count - 1}, got {ids.min() if ids.min() < 0 else ids.max()}.")


def distinct(ids: Int64) -> Int64:
    """Return the different numbers among `ids` (n,), sorted; np.unique, which hashes them, takes ten times as long."""
    ordered = np.sort(ids)
    first = np.ones(len(ids), np.bool_)
    first[1:] = ordered[1:] != ordered[:-1]
    found: Int64 = ordered[first]
    return found


class RowsInMemory(Rows):
    """A table in the memory of this process; `values` (count, width) float32 is written in place."""

    def __init__(self, values: Float32) -> None:
        super().__init__(*values.shape)
        self.values = values

    def _get(self, ids: Int64) -> Float32:
        return self.values[ids]

    def _put(self, ids: Int64, values: Float32) -> None:
        self.values[ids] = values
