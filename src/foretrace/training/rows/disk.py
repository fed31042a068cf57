"""`RowsOnDisk`: a table in partitions on disk, of which a buffer holds a few.

    with RowsOnDisk(path, buffer=4) as rows:
        for state in rows.visit(beta(rows.partitions, 4, random)):  # the next partition is read meanwhile
            rows.put(ids, new_values(rows.get(ids)))
        rows.commit()

What changes goes to a second file beside the table, which takes its place in `commit`: a process that ends before that,
however it ends, leaves the table as of the last commit. A thread reads and writes partitions in the order in which they
are asked for, past the page cache (O_DIRECT) where the file system can do that, else the pages are given back at once.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from foretrace.arrays import Float32, Int64, UInt8
from foretrace.errors import ForetraceError
from foretrace.files import PART, part_of
from foretrace.training.rows.orders import State
from foretrace.training.rows.rows import RowCounters, Rows

BLOCK = 4096  # bytes; what direct reads and writes are multiples of
_DIRECT = getattr(os, "O_DIRECT", 0)
_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Header(msgspec.Struct, frozen=True):
    """The first block of a table."""

    rows: _Count
    width: _Count
    partitions: _Count
    commits: int
    kind: Literal["foretrace rows"] = "foretrace rows"


def partition_bytes(rows: int, width: int, partitions: int) -> int:
    """Return bytes of one partition on disk and in a buffer: whole blocks."""
    return -(-(-(-rows // partitions) * width * 4) // BLOCK) * BLOCK


def read_whole(path: Path) -> Float32:
    """Return all rows of a table, in memory once: (rows, width). Raises ForetraceError."""
    with RowsOnDisk(path, buffer=1, spare=0) as rows:
        values = np.empty((rows.count, rows.width), np.float32)
        for (k,) in rows.visit([(k,) for k in range(rows.partitions)]):
            held = values[k * rows.size : (k + 1) * rows.size]
            held[:] = rows.held(k)[: len(held)]
    return values


def create(path: Path, rows: int, width: int, partitions: int, values: Callable[[int, int], Float32]) -> None:
    """Write a table whose rows from i to j - 1 are `values(i, j)`: (j - i, width), a partition at a time.

    Raises ForetraceError for sizes that cannot be and where it cannot be written.
    """
    if not 1 <= partitions <= rows or width < 1:
        raise ForetraceError(f"A table of {rows} x {width} must have 1 to {rows} partitions, got {partitions}.")
    size, stride = -(-rows // partitions), partition_bytes(rows, width, partitions)
    temporary = part_of(path)
    with said(path):
        try:
            with temporary.open("xb") as file:
                file.write(_header(_Header(rows, width, partitions, 0)))
                for k in range(partitions):
                    begin, end = min(k * size, rows), min((k + 1) * size, rows)
                    file.write(np.ascontiguousarray(values(begin, end), np.float32).data)
                    file.write(bytes(stride - (end - begin) * width * 4))
                    forget(file.fileno())
                file.flush()
                os.fsync(file.fileno())
                forget(file.fileno())
            temporary.replace(path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


class RowsOnDisk(Rows):
    """Rows of a file of `create`; `buffer` partitions are held, and `spare` more while others are read and written.

    Rows outside the buffer are read and written one by one, block by block. `disk` counts partitions: gets are those
    read, writes those written, wait_s what the caller waited for them. `direct` says whether the page cache is passed
    by.
    """

    def __init__(self, path: Path, *, buffer: int, spare: int = 1, direct: bool = True) -> None:
        self.path = path
        head = _read_header(path)
        super().__init__(head.rows, head.width)
        self.partitions, self.commits = head.partitions, head.commits
        if not 0 <= buffer <= self.partitions or spare < 0:
            raise ForetraceError(f"A buffer must hold 0 to {self.partitions} partitions, got {buffer}.")
        self.buffer, self.disk = buffer, RowCounters()
        self.size = -(-head.rows // head.partitions)
        self._stride = partition_bytes(head.rows, head.width, head.partitions)
        self._work = path.with_name(f".{path.name}{PART}")  # one writer at a time: a stale one is made again
        self._free = list(_aligned((buffer + spare) * self._stride).reshape(-1, self._stride))
        self._slots: dict[int, UInt8] = {}  # by partition
        self._reading: dict[int, Future[None]] = {}
        self._writing: list[Future[None]] = []
        self._dirty: set[int] = set()  # partitions in the buffer that differ from the files
        self._written: set[int] = set()  # those whose newest values are in the second file
        self._table, self.direct = _open(path, os.O_RDONLY, direct)
        self._next: int | None = None  # the second file, once there is one
        self._thread = ThreadPoolExecutor(1, "rows on disk")

    def visit(self, states: Sequence[State]) -> Iterator[State]:
        """Hold the partitions of each state in turn; those of the next one are read meanwhile, as far as there is room.

        Without a buffer nothing is held. Raises ForetraceError for more partitions than the buffer holds, and where the
        disk fails.
        """
        if not self.buffer:
            yield from states
            return
        for state, after in zip(states, [*states[1:], ()], strict=True):
            if len(state) > self.buffer:
                raise ForetraceError(
                    f"A state must have at most the buffer's {self.buffer} partitions, got {len(state)}."
                )
            for partition in [each for each in self._slots if each not in state]:
                self._evict(partition)
            for partition in state:
                self._load(partition)
            with self.disk.waiting():
                for partition in state:
                    self._wait(partition)
            for partition in after:
                if self._free:
                    self._load(partition)
            yield state

    def commit(self) -> None:
        """Make what was written the table, whole; without a write nothing is done. Raises ForetraceError."""
        for partition in sorted(self._dirty):
            self._write_back(partition)
        with self._faults(), self.disk.waiting():
            self._settle(all=True)
            if self._next is not None:
                for partition in range(self.partitions):
                    self._own(partition)
                head = _Header(self.count, self.width, self.partitions, self.commits + 1)
                with self._work.open("r+b") as file:
                    file.write(_header(head))
                    file.flush()
                    os.fsync(file.fileno())
                    forget(file.fileno())
                self._work.replace(self.path)
                folder = os.open(self.path.parent, os.O_RDONLY)
                os.fsync(folder)
                os.close(folder)
                os.close(self._table)
                self._table, self._next, self.commits = self._next, None, head.commits
                self._written.clear()

    def discard(self) -> None:
        """Close the files without a commit: the table stays as of the last one. May be called again."""
        self._thread.shutdown(cancel_futures=True)
        for file in (self._table, self._next):
            if file is not None and file >= 0:
                os.close(file)
        if self._next is not None:
            self._work.unlink(missing_ok=True)
        self._table, self._next = -1, None
        self._slots.clear()

    def close(self) -> None:
        if self._table >= 0:
            try:
                self.commit()
            finally:
                self.discard()

    def __exit__(self, *error: object) -> None:
        """Commit, unless an error is on its way: then the table stays as of the last commit."""
        self.close() if error[0] is None else self.discard()

    def _get(self, ids: Int64) -> Float32:
        found = np.empty((len(ids), self.width), np.float32)
        for partition, where, at in self._by_partition(ids):
            if partition in self._slots:
                found[where] = self.held(partition)[at]
            else:
                for row, place in zip(where.tolist(), at.tolist(), strict=True):
                    found[row] = self._row(partition, place)[0]
        return found

    def _put(self, ids: Int64, values: Float32) -> None:
        for partition, where, at in self._by_partition(ids):
            if partition in self._slots:
                self.held(partition)[at] = values[where]
                self._dirty.add(partition)
            else:
                self._own(partition)
                for row, place in zip(where.tolist(), at.tolist(), strict=True):
                    held, block, offset = self._row(partition, place)
                    held[:] = values[row]
                    with self._faults(), self.disk.waiting():
                        self._transfer(self._second(), block, offset, True)

    def _by_partition(self, ids: Int64) -> Iterator[tuple[int, Int64, Int64]]:
        """Partition, places in `ids`, and rows within the partition."""
        if self._table < 0:
            raise ForetraceError(f"The table {self.path} is closed; open it again.")
        partition = ids // self.size
        for each in np.flatnonzero(np.bincount(partition)).tolist():
            where = np.flatnonzero(partition == each)
            yield each, where, ids[where] - each * self.size

    def held(self, partition: int) -> Float32:
        """Return the rows of a partition in the buffer (size, width), those behind the last row included."""
        self._wait(partition)
        values: Float32 = self._slots[partition].view(np.float32)
        return values[: self.size * self.width].reshape(self.size, self.width)

    def _row(self, partition: int, place: int) -> tuple[Float32, UInt8, int]:
        """Return a row outside the buffer, the blocks that hold it, and where these begin in the file."""
        begin = self._offset(partition) + place * self.width * 4
        first = begin // BLOCK * BLOCK
        block = _aligned(-(-(begin + self.width * 4 - first) // BLOCK) * BLOCK)
        with self._faults():
            self._settle(all=True)
            with self.disk.waiting():
                self._transfer(self._second() if partition in self._written else self._table, block, first)
        return block[begin - first :][: self.width * 4].view(np.float32), block, first

    def _offset(self, partition: int) -> int:
        return BLOCK + partition * self._stride

    def _load(self, partition: int) -> None:
        """Have a partition read, unless it is there."""
        if partition not in self._slots:
            slot = self._slots[partition] = self._free.pop()
            file = self._second() if partition in self._written else self._table
            self._reading[partition] = self._thread.submit(self._transfer, file, slot, self._offset(partition))
            self.disk.gets += 1
            self.disk.bytes_read += self._stride

    def _wait(self, partition: int) -> None:
        if partition in self._reading:
            with self._faults():
                self._reading[partition].result()
                del self._reading[partition]
                self._settle()

    def _evict(self, partition: int) -> None:
        """Take a partition out of the buffer. Its place is free at once: reads into it follow the write from it."""
        self._wait(partition)
        if partition in self._dirty:
            self._write_back(partition)
        self._free.append(self._slots.pop(partition))

    def _write_back(self, partition: int) -> None:
        where = (self._second(), self._slots[partition], self._offset(partition))
        self._writing.append(self._thread.submit(self._transfer, *where, True))
        self._written.add(partition)
        self._dirty.discard(partition)
        self.disk.writes += 1
        self.disk.bytes_written += self._stride

    def _transfer(self, file: int, block: UInt8, offset: int, write: bool = False) -> None:
        """Read or write all of a block. Raises OSError."""
        done = 0
        while done < len(block):
            part = memoryview(block.data)[done:]
            moved = os.pwritev(file, [part], offset + done) if write else os.preadv(file, [part], offset + done)
            if moved <= 0:
                raise OSError(errno.EIO, "it ends too early")
            done += moved
        if not self.direct:
            if write:
                os.fdatasync(file)
            forget(file)

    def _settle(self, *, all: bool = False) -> None:
        """Raise what went wrong in writing: of all that was asked for, or of what has been done."""
        for each in [each for each in self._writing if all or each.done()]:
            self._writing.remove(each)
            each.result()

    def _own(self, partition: int) -> None:
        """Have a partition in the second file."""
        if partition not in self._written:
            target, source = self._second(), self._table
            with self._faults():
                at, left = self._offset(partition), self._stride
                block = _aligned(min(left, 64 * BLOCK))
                while left:
                    part = block[: min(left, len(block))]
                    self._transfer(source, part, at)
                    self._transfer(target, part, at, True)
                    at, left = at + len(part), left - len(part)
            self._written.add(partition)

    def _second(self) -> int:
        """Return the file that takes the table's place: its room on the disk is taken when it is made."""
        if self._next is None:
            with self._faults():
                self._work.unlink(missing_ok=True)
                self._next, _ = _open(self._work, os.O_RDWR | os.O_CREAT | os.O_EXCL, self.direct)
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self._next, 0, BLOCK + self.partitions * self._stride)
        return self._next

    def _faults(self) -> AbstractContextManager[None]:
        return said(self.path, f"; it is whole as of commit {self.commits}")


@contextmanager
def said(path: Path, more: str = "") -> Iterator[None]:
    """Say what goes wrong with a disk in one sentence."""
    try:
        yield
    except OSError as error:
        full = "; make room" if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT) else "; check its disk"
        raise ForetraceError(f"cannot read or write {path} ({error.strerror or error}){more}{full}.") from None


def _header(head: _Header) -> bytes:
    return msgspec.json.encode(head).ljust(BLOCK)


def _read_header(path: Path) -> _Header:
    """Raise ForetraceError for what is no table, or not a whole one."""
    with said(path):
        with path.open("rb") as file:
            text = file.read(BLOCK)
        size = path.stat().st_size
    try:
        head = msgspec.json.decode(text.rstrip(), type=_Header)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ForetraceError(f"{path} is no table of rows; give one that foretrace wrote.") from None
    if size != BLOCK + head.partitions * partition_bytes(head.rows, head.width, head.partitions):
        raise ForetraceError(f"{path} is no whole table of rows; copy it again.")
    return head


def _open(path: Path, flags: int, direct: bool) -> tuple[int, bool]:
    """Return a file, past the page cache where wanted and where its file system can; whether it is."""
    with said(path):
        if direct and _DIRECT:
            with suppress(OSError):
                return os.open(path, flags | _DIRECT, 0o666), True
            flags &= ~os.O_EXCL  # some make the file before they refuse
        return os.open(path, flags, 0o666), False


def _aligned(size: int) -> UInt8:
    """Return bytes that begin at a multiple of BLOCK."""
    memory = np.empty(size + BLOCK, np.uint8)
    return memory[-memory.ctypes.data % BLOCK :][:size]


def forget(file: int) -> None:
    """Let the system give back the pages of a file that it holds, once they are on the disk."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
