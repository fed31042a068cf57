"""What outlives a killed training: tables and dense weights after some batches, and a log of the batches since.

Every trainer appends its gradients of a batch to a log of its own before it sends them to anybody. So whoever has begun
a batch knows that those before are in the logs whole, and `recover` applies them: gradients added up in the order of
the ranks, as training does. What ends a process costs the batch under way, no other.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from foretrace.arrays import Float32, Int64
from foretrace.errors import ForetraceError
from foretrace.files import write_bytes
from foretrace.reading import read_bytes
from foretrace.training.rows.disk import said
from foretrace.training.rows.optimizers import DENSE_RATE, RowOptimizer, add_up

_HEAD = struct.Struct("<IQQ")  # CRC-32 of what follows, rows, numbers
_Record = tuple[Int64, Float32, Float32]  # ids (n,), gradients (n, width), gradients of the dense weights


def file_of(folder: Path, what: str, batches: int) -> Path:
    """Return where `rows`, `dense` or the log of a rank (`log0`) after so many batches are."""
    return folder / f"{what}-{batches}.f32"


def read_floats(file: Path, shape: tuple[int, ...]) -> Float32:
    """Return numbers of a file. Raises ForetraceError where they are not so many."""
    data = read_bytes(file, mend="choose another folder")
    if len(data) != 4 * int(np.prod(shape)):
        raise ForetraceError(f"{file} must hold {int(np.prod(shape))} numbers for this training, got {len(data) // 4}.")
    return np.frombuffer(data, np.float32).reshape(shape).copy()


def latest(folder: Path) -> int:
    """Return the most batches after which table and dense weights were both kept; -1 where there are none."""
    found = (re.fullmatch(r"rows-(\d+)\.f32", each.name) for each in folder.glob("rows-*.f32"))
    counts = [int(each[1]) for each in found if each]
    return max((each for each in counts if file_of(folder, "dense", each).exists()), default=-1)


def forget(folder: Path, batches: int) -> None:
    """Remove what is older than the table after so many batches."""
    for each in folder.glob("*-*.f32"):
        if (found := re.fullmatch(r"\w+-(\d+)\.f32", each.name)) and int(found[1]) < batches:
            each.unlink(missing_ok=True)


class BatchLog:
    """One trainer's gradients, batch after batch, from some batch on. A half record at its end is none.

    A record is with the system when `append` returns: it outlives every process, not a power cut, after which the log
    may end earlier. Raises ForetraceError where the disk is full.
    """

    def __init__(self, folder: Path, rank: int, begin: int) -> None:
        self.path = file_of(folder, f"log{rank}", begin)
        with said(self.path):
            self._file = self.path.open("wb", buffering=0)

    def append(self, ids: Int64, gradients: Float32, dense: Float32) -> None:
        """Keep gradients of distinct rows (n,), (n, width) and of the dense weights."""
        body = b"".join(each.tobytes() for each in (ids, gradients, dense))
        with said(self.path):
            left = memoryview(_HEAD.pack(zlib.crc32(body), len(ids), len(dense)) + body)
            while left:
                left = left[self._file.write(left) :]

    def close(self) -> None:
        """Release the file."""
        self._file.close()


def logged(path: Path, width: int) -> Iterator[_Record]:
    """Yield the records of a log, as far as they are whole."""
    if not path.exists():
        return
    with said(path), path.open("rb") as file:
        left = path.stat().st_size
        while len(head := file.read(_HEAD.size)) == _HEAD.size:
            check, rows, dense = _HEAD.unpack(head)
            left -= _HEAD.size + (size := rows * (8 + 4 * width) + 4 * dense)
            if left < 0 or zlib.crc32(body := file.read(size)) != check:
                return
            floats = np.frombuffer(body, np.float32, offset=8 * rows)
            ids = np.frombuffer(body, np.int64, rows)
            yield ids, floats[: rows * width].reshape(rows, width), floats[rows * width :]


def _batches(folder: Path, begin: int, trainers: int, width: int) -> Iterator[tuple[_Record, ...]]:
    """Return what all trainers found in each batch from one on, as far as all have it."""
    logs = (logged(file_of(folder, f"log{rank}", begin), width) for rank in range(trainers))
    return zip(*logs, strict=False)


def whole_batches(folder: Path, *, trainers: int, width: int) -> int:
    """Return after how many batches `recover` would have the weights, of rows of so many weights."""
    begin = max(latest(folder), 0)
    return begin + sum(1 for _ in _batches(folder, begin, trainers, width))


def recover(folder: Path, *, trainers: int, shape: tuple[int, int], optimizer: RowOptimizer) -> int:
    """Bring what is kept up to the last batch that is in the logs of all trainers; how many batches that makes.

    `shape` is that of the table, state of the `optimizer` included. Raises ForetraceError for what cannot be read.
    """
    begin = done = latest(folder)
    if begin < 0:
        return 0
    table, dense = np.empty(0, np.float32), np.empty(0, np.float32)
    for records in _batches(folder, begin, trainers, shape[1] - optimizer.state):
        if done == begin:
            table = read_floats(file_of(folder, "rows", begin), shape)
            dense = read_floats(file_of(folder, "dense", begin), records[0][2].shape)
        ids, sums = add_up([record[:2] for record in records])
        table[ids] = optimizer.apply(table[ids], sums)
        whole = sum((record[2] for record in records[1:]), records[0][2])
        dense -= np.float32(DENSE_RATE) * whole
        done += 1
    if done > begin:
        write_bytes(file_of(folder, "dense", done), dense.tobytes())
        write_bytes(file_of(folder, "rows", done), table.tobytes())
    forget(folder, done)
    return done
