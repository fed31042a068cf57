"""A small model of PyTorch's CUDA caching allocator: how much memory it takes from the device for a step.

As in its documentation and source (c10/cuda/CUDACachingAllocator.cpp, PyTorch 2): requests are rounded to 512 bytes;
those up to 1 MiB come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, larger ones from segments of
their own size rounded to 2 MiB. The smallest free block that is large enough is taken and what is left over is split
off, in the large pool only if it is more than 1 MiB; free neighbours become one block again. Segments stay. One stream,
default settings.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_SMALL, _SMALL_SEGMENT = 2**20, 2 * 2**20
_LARGE_BELOW, _LARGE_SEGMENT = 10 * 2**20, 20 * 2**20
_ROUND_LARGE = 2 * 2**20
_BLOCK = 512


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment, between its neighbours."""

    start: int
    nbytes: int
    free: bool = False
    left: _Block | None = None
    right: _Block | None = None


class _Pool:
    """Free blocks of one pool, the smallest first."""

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.taken = 0
        self._next = 0
        self._free: list[tuple[int, int]] = []  # (bytes, start)
        self._at: dict[int, _Block] = {}

    def get(self, nbytes: int) -> _Block:
        at = bisect_left(self._free, (nbytes, -1))
        if at < len(self._free):
            block = self._at[self._free.pop(at)[1]]
            block.free = False
        else:
            block = self._segment(nbytes)
        rest = block.nbytes - nbytes
        if rest >= _BLOCK if self.small else rest > _SMALL:
            other = _Block(start=block.start + nbytes, nbytes=rest, left=block, right=block.right)
            if block.right is not None:
                block.right.left = other
            block.right, block.nbytes = other, nbytes
            self._offer(other)
        return block

    def give(self, block: _Block) -> None:
        for other in (block.left, block.right):
            if other is None or not other.free:
                continue
            del self._free[bisect_left(self._free, (other.nbytes, other.start))]
            first, second = (other, block) if other.start < block.start else (block, other)
            first.nbytes += second.nbytes
            first.right = second.right
            if second.right is not None:
                second.right.left = first
            block = first
        self._offer(block)

    def _offer(self, block: _Block) -> None:
        block.free = True
        insort(self._free, (block.nbytes, block.start))
        self._at[block.start] = block

    def _segment(self, nbytes: int) -> _Block:
        if self.small:
            size = _SMALL_SEGMENT
        elif nbytes < _LARGE_BELOW:
            size = _LARGE_SEGMENT
        else:
            size = -(-nbytes // _ROUND_LARGE) * _ROUND_LARGE
        self.taken += size
        block = _Block(start=self._next, nbytes=size)
        self._next += 2 * size  # segments are never neighbours
        return block


def reserved(
    nbytes: npt.NDArray[np.int64], born: npt.NDArray[np.int64], dies: npt.NDArray[np.int64], count: int
) -> int:
    """Return bytes that the allocator takes for pieces of memory with these lives (n rows), over `count` nodes."""
    small, large = _Pool(small=True), _Pool(small=False)
    begins: list[list[int]] = [[] for _ in range(count + 1)]
    ends: list[list[int]] = [[] for _ in range(count + 1)]
    for row, (size, first, last) in enumerate(zip(nbytes.tolist(), born.tolist(), dies.tolist(), strict=True)):
        if size > 0 and last >= first:
            begins[min(max(first + 1, 0), count)].append(row)
            if last < count:
                ends[max(last, 0)].append(row)
    sizes = (-(-nbytes // _BLOCK) * _BLOCK).tolist()
    held: dict[int, tuple[_Pool, _Block]] = {}
    for row in begins[0]:  # what the step finds
        _hold(held, row, small if sizes[row] <= _SMALL else large, sizes[row])
    for node in range(count):
        for row in begins[node + 1]:
            _hold(held, row, small if sizes[row] <= _SMALL else large, sizes[row])
        for row in ends[node]:
            pool, block = held.pop(row)
            pool.give(block)
    return small.taken + large.taken


def _hold(held: dict[int, tuple[_Pool, _Block]], row: int, pool: _Pool, size: int) -> None:
    held[row] = (pool, pool.get(size))
