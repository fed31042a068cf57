"""Compiled loops of replays; `tests/simulate/twins.py` says in plain Python what each of them computes.

Compiled loops live here, in `schedule_engine` and in `flow_engine`. None of them calls one of another file, because
numba's cache does not see edits across files. They take bare columns: the callers (`replay`, `schedule`, `slack`)
prepare them, and pass them read-only so that one version per loop is compiled whether a graph is in memory or
memory-mapped. Indices are unsigned where it matters: a signed one costs a test for negative indexing at every access.
"""

# An index of compiled code changes between signed and unsigned, which mypy takes for a change of type.
# mypy: disable-error-code="assignment,arg-type"

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foretrace.compiled import njit
from foretrace.graph.taskgraph import NO_RELEASE

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt32 = npt.NDArray[np.uint32]
UInt8 = npt.NDArray[np.uint8]
Float64 = npt.NDArray[np.float64]

ONE = np.uint64(1)
TWO = np.uint64(2)
UNREACHED = NO_RELEASE // 2  # tails below this lead nowhere, whatever was added to them


@njit(error_model="numpy")
def replay(
    in_ptr: Int64, src: UInt32, from_start: UInt8, lag: Int64, dur: Int64, delay: Int64, release: Int64,
    start: Int64, end: Int64,
) -> None:  # fmt: skip
    """Fill `start` and `end` (n) in one pass over the rows."""
    e = np.uint64(0)
    for v in range(len(dur)):
        at = release[v]
        stop = np.uint64(in_ptr[v + 1])
        while e < stop:
            u = np.uint64(src[e])
            at = max(at, (start[u] if from_start[e] else end[u]) + lag[e])
            e += ONE
        at += delay[v]
        start[v] = at
        end[v] = at + dur[v]


@njit(error_model="numpy")
def value_slots(in_ptr: Int64, src: UInt32, from_start: UInt8) -> tuple[UInt32, Int32, int]:
    """Where a replay of many variants keeps starts and ends while an edge still needs them.

    Value 2u is the end of task u, 2u + 1 its start. A value keeps its slot until the last edge that reads it, so
    the slots in use at one time are few and stay in the cache, however long the graph. Returns the slot read by
    every edge (m), the slot of every value (2n, 0 = nobody reads it) and the number of slots.
    """
    n, m = len(in_ptr) - 1, len(src)
    last_use = np.full(2 * n, -1, dtype=np.int32)
    for e in range(m):
        last_use[np.uint64(src[e]) * TWO + np.uint64(from_start[e])] = e
    slot = np.zeros(2 * n, dtype=np.int32)
    read = np.empty(m, dtype=np.uint32)
    free = np.empty(2 * n + 1, dtype=np.int32)
    n_free, used = 0, 1
    e = np.uint64(0)
    for v in range(n):
        for value in range(2 * v, 2 * v + 2):
            if last_use[value] >= 0:  # taken before those of the predecessors are given back: never shared
                if n_free > 0:
                    n_free -= 1
                    slot[value] = free[n_free]
                else:
                    slot[value] = used
                    used += 1
        stop = np.uint64(in_ptr[v + 1])
        while e < stop:
            value_read = np.uint64(src[e]) * TWO + np.uint64(from_start[e])
            read[e] = slot[value_read]
            free[n_free] = slot[value_read]
            n_free += np.int64(last_use[value_read] == np.int64(e))
            e += ONE
    return read, slot, used


@njit(error_model="numpy")
def replay_variants(
    in_ptr: Int64, read: UInt32, slot: Int32, values: Int64, edge_kind: UInt8, lag: Int64, dur: Int64, delay: Int64,
    release: Int64, group: Int32, scale: Float64, stays: Int64, any_gone: UInt8, ceiling: Int64, rows: Int32,
    out: Int64, meets: UInt8 | None = None,
) -> None:  # fmt: skip
    """Replay blocks of variants side by side; `out` (rows x variants) gets the end of each of `rows` (ascending).

    `values` (slots x width) is room for what `value_slots` lays out. `scale` and `stays` are (blocks, groups + 1,
    width), row 0 for tasks of no group; `stays` is −1 where a task stays and 0 where it is gone; `any_gone` (blocks,
    groups + 1) tells the groups where any variant removes something; `ceiling` bounds the lags into a removed task,
    by kind of edge. With `meets` (m), the variants of a block are copies of the graph in one run: through an edge
    that meets a task waits for its source in all of them. The width is a run-time number, a multiple of 8: a constant
    one would be unrolled before LLVM looks for vectors.
    """
    width = scale.shape[2]
    for block in range(scale.shape[0]):
        next_row = 0
        e = np.uint64(0)
        for v in range(len(dur)):
            stop = np.uint64(in_ptr[v + 1])
            free, wait, length = release[v], delay[v], np.float64(dur[v])
            g = np.uint64(group[v] + 1)
            factor = scale[block, g]
            end = values[np.uint64(slot[2 * v])]
            start_slot = np.uint64(slot[2 * v + 1])
            fused = start_slot == 0 and not any_gone[block, g]
            if meets is not None:
                for other_edge in range(e, stop):
                    fused &= meets[other_edge] == 0
            if fused and stop == e + ONE:
                anchor, here = values[np.uint64(read[e])], lag[e]
                for k in range(width):
                    end[k] = max(free, anchor[k] + here) + wait + np.int64(np.rint(length * factor[k]))
            elif fused and stop == e + TWO:
                anchor, here = values[np.uint64(read[e])], lag[e]
                other, there = values[np.uint64(read[e + ONE])], lag[e + ONE]
                for k in range(width):
                    at = max(free, anchor[k] + here, other[k] + there) + wait
                    end[k] = at + np.int64(np.rint(length * factor[k]))
            else:
                for k in range(width):
                    end[k] = free
                if any_gone[block, g]:
                    keep = stays[block, g]
                    while e < stop:
                        anchor, here = values[np.uint64(read[e])], lag[e]
                        gone = min(here, ceiling[edge_kind[e]])
                        for k in range(width):
                            end[k] = max(end[k], anchor[k] + (gone + ((here - gone) & keep[k])))
                        e += ONE
                    for k in range(width):
                        end[k] += wait & keep[k]
                else:
                    while e < stop:
                        anchor, here = values[np.uint64(read[e])], lag[e]
                        if meets is not None and meets[e]:
                            last = anchor[0]
                            for k in range(1, width):
                                last = max(last, anchor[k])
                            for k in range(width):
                                end[k] = max(end[k], last + here)
                        else:
                            for k in range(width):
                                end[k] = max(end[k], anchor[k] + here)
                        e += ONE
                    for k in range(width):
                        end[k] += wait
                if start_slot != 0:
                    start = values[start_slot]
                    for k in range(width):
                        start[k] = end[k]
                for k in range(width):
                    end[k] += np.int64(np.rint(length * factor[k]))
            e = stop
            while next_row < len(rows) and rows[next_row] == v:
                out_row = out[next_row, block * width : (block + 1) * width]
                for k in range(width):
                    out_row[k] = end[k]
                next_row += 1


@njit(error_model="numpy")
def tails(
    in_ptr: Int64, src: UInt32, from_start: UInt8, lag: Int64, dur: Int64, delay: Int64, target: int
) -> tuple[Int64, Int64]:
    """Longest path to the end of `target` from the start and from the end of every task (n each).

    Below UNREACHED where there is none. The path that leaves a start includes what follows the start only: the
    delay of a task belongs to its arrival.
    """
    n = len(dur)
    from_a_start = np.full(n, NO_RELEASE, dtype=np.int64)
    from_an_end = np.full(n, NO_RELEASE, dtype=np.int64)
    from_an_end[target] = 0
    for v in range(target, -1, -1):
        if from_an_end[v] > UNREACHED:
            from_a_start[v] = max(from_a_start[v], from_an_end[v] + dur[v])
        if from_a_start[v] > UNREACHED:
            arrival = from_a_start[v] + delay[v]
            for e in range(in_ptr[v], in_ptr[v + 1]):
                u = np.uint64(src[e])
                if from_start[e]:
                    from_a_start[u] = max(from_a_start[u], arrival + lag[e])
                else:
                    from_an_end[u] = max(from_an_end[u], arrival + lag[e])
    return from_a_start, from_an_end
