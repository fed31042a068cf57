"""Lines and pages that a program misses: every access of its loops, in order, against simulated caches.

Whatever is recently used stays (LRU) in sets; data is where the run before left it, so the second of two runs counts.
Outer iterations beyond a limit of accesses are left out and counted by scaling.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foretrace.compiled import njit
from foretrace.cost.programs.compile import OFFSET_BYTES, PAGE_BYTES
from foretrace.cost.programs.program import Access, Loop, LoopKind, LoopNest, Purpose, TensorProgram
from foretrace.hardware.processor import Caches

MISSES = ("l1_next", "l1_other", "l2_next", "l2_other", "pages", "streams")
"""Lines missed in the first and the second cache, next to the line that the same access missed before or elsewhere;
pages missed in the first translation buffer; accesses to pages that are none of the `_STREAMS` touched last, about as
many as prefetchers follow."""
LINE_BYTES = 64
_STREAMS = 16
_MOST = 1_500_000  # accesses that are simulated in each run
_LOOP, _END, _ACCESS = 0, 1, 2
Ints = NDArray[np.int64]


def simulate(program: TensorProgram, caches: Caches) -> dict[str, float]:
    """Return misses of one run, by the names in MISSES."""
    steps = _Steps(program)
    total = np.zeros(len(MISSES))
    (sets1, ways1), (sets2, ways2) = caches.first, caches.second
    one, two = np.full(sets1 * ways1, -1, np.int64), np.full(sets2 * ways2, -1, np.int64)
    pages, streams = np.full((caches.pages // 4) * 4, -1, np.int64), np.full(_STREAMS, -1, np.int64)
    runs = [steps.nest(nest) for nest in program.nests]
    for again in (False, True):
        for code, scale in runs:
            found = _run(code, one, two, pages, streams, sets1, ways1, sets2, ways2)
            if again:
                total += scale * found
    return dict(zip(MISSES, total.tolist(), strict=True))


class _Steps:
    """Loops and accesses of a nest as numbers in a row: what `_run` plays."""

    def __init__(self, program: TensorProgram) -> None:
        self.itemsize = program.itemsize
        self.place: dict[str, int] = {}
        at = 1 << 20
        for buffer in program.buffers:
            self.place[buffer.name] = at + (OFFSET_BYTES if buffer.role is not Purpose.LOCAL else 0)
            size = buffer.elements * self.itemsize
            # locals lie side by side on the stack, others begin a page each
            at += -(-size // LINE_BYTES) * LINE_BYTES if buffer.role is Purpose.LOCAL else 0
            at += 0 if buffer.role is Purpose.LOCAL else (size // PAGE_BYTES + 2) * PAGE_BYTES

    def nest(self, nest: LoopNest) -> tuple[Ints, float]:
        """Return rows of steps, and by how much to scale what they miss."""
        accesses = self.count(nest)
        self.scale, self.excess = 1.0, accesses / _MOST
        rows: list[list[int]] = []
        self.emit(nest, {}, rows, {})
        return np.array(rows, np.int64), self.scale

    def count(self, node: LoopNest) -> float:
        if not isinstance(node, Loop):
            return 1.0 + len(node.reads)
        inside = sum(self.count(each) for each in node.body)
        lanes = max(1, node.extent * self.itemsize // LINE_BYTES) if node.kind is LoopKind.VECTORISED else node.extent
        return inside * lanes

    def emit(
        self, node: LoopNest, depth: dict[str, int], rows: list[list[int]], fixed: dict[str, int],
        lane: Loop | None = None,
    ) -> None:  # fmt: skip
        """Append: (LOOP, extent, slot, place after its end), (END, place of its loop), (ACCESS, address, count, step,
        then bytes per slot).
        """
        if isinstance(node, Loop) and node.kind is LoopKind.VECTORISED:
            for each in node.body:
                self.emit(each, depth, rows, fixed, node)
        elif isinstance(node, Loop) and node.kind is LoopKind.UNROLLED and node.extent <= 64:
            for i in range(node.extent):
                for each in node.body:
                    self.emit(each, depth, rows, {**fixed, node.variable: i})
        elif isinstance(node, Loop):
            extent = node.extent
            if self.excess > 1:  # fewer of the outer iterations
                kept = max(min(extent, 2), round(extent / self.excess))
                self.scale *= extent / kept
                self.excess *= kept / extent
                extent = kept
            slot, begin = len(depth), len(rows)
            rows.append([_LOOP, extent, slot, 0, *[0] * _SLOTS])
            for each in node.body:
                self.emit(each, {**depth, node.variable: slot}, rows, fixed)
            rows.append([_END, begin, slot, 0, *[0] * _SLOTS])
        else:
            for access in (*node.reads, node.target):
                rows.append(self.access(access, depth, fixed, lane))

    def access(self, access: Access, depth: dict[str, int], fixed: dict[str, int], lane: Loop | None) -> list[int]:
        strides = {name: step * self.itemsize for name, step in access.strides}
        address = self.place[access.buffer] + access.offset * self.itemsize
        address += sum(value * strides.get(name, 0) for name, value in fixed.items())
        moves = [0] * _SLOTS
        for name, slot in depth.items():
            moves[slot] = strides.get(name, 0)
        step = strides.get(lane.variable, 0) if lane else 0
        count = lane.extent if lane and step else 1
        if step == self.itemsize:
            count, step = max(1, lane.extent * step // LINE_BYTES) if lane else 1, LINE_BYTES
        return [_ACCESS, address, count, step, *moves]


_SLOTS = 14  # loops within each other


@njit()
def _touch(store: Ints, sets: int, ways: int, line: int) -> bool:
    """Return whether a line was there; it is the newest of its set now."""
    first = (line % sets) * ways
    place = ways - 1
    for i in range(ways):
        if store[first + i] == line:
            place = i
            break
    hit = store[first + place] == line
    for i in range(place, 0, -1):
        store[first + i] = store[first + i - 1]
    store[first] = line
    return bool(hit)


@njit()
def _run(
    rows: Ints, one: Ints, two: Ints, pages: Ints, streams: Ints, sets1: int, ways1: int, sets2: int, ways2: int
) -> NDArray[np.float64]:  # fmt: skip
    misses = np.zeros(6)
    index = np.zeros(_SLOTS, np.int64)
    last = np.full((len(rows), 3), -9, np.int64)  # per access: the line before, lines missed in both caches
    at = 0
    while at < len(rows):
        kind = rows[at, 0]
        if kind == _LOOP:
            index[rows[at, 2]] = 0
        elif kind == _END:
            slot, begin = rows[at, 2], rows[at, 1]
            index[slot] += 1
            if index[slot] < rows[begin, 1]:
                at = begin
        else:
            address = rows[at, 1]
            for slot in range(_SLOTS):
                address += index[slot] * rows[at, 4 + slot]
            for i in range(rows[at, 2]):
                line = (address + i * rows[at, 3]) // 64
                if line == last[at, 0]:
                    continue
                last[at, 0] = line
                page = line // 64
                if not _touch(pages, len(pages) // 4, 4, page ^ (page // 16)):
                    misses[4] += 1
                if not _touch(streams, 1, len(streams), page):
                    misses[5] += 1
                if not _touch(one, sets1, ways1, line):
                    misses[0 if line == last[at, 1] + 1 else 1] += 1
                    last[at, 1] = line
                    if not _touch(two, sets2, ways2, line):
                        misses[2 if line == last[at, 2] + 1 else 3] += 1
                        last[at, 2] = line
        at += 1
    return misses
