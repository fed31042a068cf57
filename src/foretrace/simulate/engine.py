"""Compiled loops of replays; `tests/simulate/twins.py` says in plain Python what each of them computes.

Compiled loops live here, in `schedule_engine` and in `flows/engine`. They take bare columns: the callers (`replay`,
`schedule`, `slack`) prepare them, and pass them read-only so that one version per loop is compiled whether a graph is
in memory or memory-mapped. They allocate nothing: that would take as long to compile as the loop itself. Indices are
unsigned where it matters: a signed one costs a test for negative indexing at every access.
"""

# An index of compiled code changes between signed and unsigned, which mypy takes for a change of type.
# mypy: disable-error-code="assignment,arg-type,call-arg,var-annotated"

from __future__ import annotations

import numpy as np

from foretrace.arrays import Float64, Int32, Int64, UInt8, UInt32
from foretrace.compiled import njit
from foretrace.graph.taskgraph import NO_RELEASE
from foretrace.simulate import vectors

ONE = np.uint64(1)
TWO = np.uint64(2)
UNREACHED = NO_RELEASE // 2  # tails below this lead nowhere, whatever was added to them


@njit(_nrt=False)
def replay(
    in_ptr: Int64, src: UInt32, from_start: UInt8, lag: Int64, dur: Int64, delay: Int64, release: Int64, times: Int64
) -> None:  # fmt: skip
    """Fill `times` (2n), the ends of all rows and then their starts, in one pass over the rows."""
    n = np.uint64(len(dur))
    e = np.uint64(0)
    for v in range(n):
        at = release[v]
        stop = np.uint64(in_ptr[v + 1])
        while e < stop:
            # An index in place of a branch, which a processor guesses badly; whether LLVM makes one differs.
            at = max(at, times[np.uint64(src[e]) + n * np.uint64(from_start[e])] + lag[e])
            e += ONE
        at += delay[v]
        times[n + v] = at
        times[v] = at + dur[v]


@njit(_nrt=False)
def value_slots(
    in_ptr: Int64, src: UInt32, from_start: UInt8, last_use: Int32, read: UInt32, slot: Int32, free: Int32
) -> int:
    """Return where a replay of many variants keeps starts and ends while an edge still needs them; the number of slots.

    Value 2u is the end of task u, 2u + 1 its start. A value keeps its slot until the last edge that reads it, so
    the slots in use at one time are few and stay in the cache, however long the graph. Fills `read` (m), the slot read
    by every edge, and `slot` (2n, zeros before), that of every value, 0 where nobody reads it. `last_use` (2n, −1) and
    `free` (2n + 1) are scratch space.
    """
    for e in range(len(src)):
        last_use[np.uint64(src[e]) * TWO + np.uint64(from_start[e])] = e
    n_free, used = 0, 1
    e = np.uint64(0)
    for v in range(len(in_ptr) - 1):
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
    return used


@njit(_nrt=False)
def replay_variants(
    in_ptr: Int64, read: UInt32, slot: Int32, values: Int64, edge_kind: UInt8, lag: Int64, dur: Int64, delay: Int64,
    release: Int64, group: Int32, scale: Float64, stays: Int64, any_gone: UInt8, ceiling: Int64, rows: Int32,
    out: Int64, meets: UInt8 | None = None,
) -> None:  # fmt: skip
    """Replay blocks of variants side by side; `out` (rows x variants) gets the end of each of `rows` (ascending).

    `values` (slots x width) is room for what `value_slots` lays out; slot 0 takes what nobody reads. `scale` and
    `stays` are (blocks, groups + 1, width), row 0 for tasks of no group; `stays` is −1 where a task stays and 0 where
    it is gone; `any_gone` (blocks, groups + 1) tells the groups where any variant removes something; `ceiling` bounds
    the lags into a removed task, by kind of edge. With `meets` (m), the variants of a block are copies of the graph in
    one run: through an edge that meets a task waits for its source in all of them. The width is a run-time number, a
    multiple of 8: a constant one would be unrolled before LLVM looks for vectors.
    """
    width = scale.shape[2]
    for block in range(scale.shape[0]):
        next_row = 0
        e = np.uint64(0)
        for v in range(len(dur)):
            stop = np.uint64(in_ptr[v + 1])
            free, wait, length = release[v], delay[v], np.float64(dur[v])
            g = np.uint64(group[v] + 1)
            factor, keep = scale[block, g], stays[block, g]
            start, end = values[np.uint64(slot[2 * v + 1])], values[np.uint64(slot[2 * v])]
            for k in range(width):
                end[k] = free
            while e < stop:
                anchor, here = values[np.uint64(read[e])], lag[e]
                if meets is not None and meets[e]:
                    last = anchor[0]
                    for k in range(1, width):
                        last = max(last, anchor[k])
                    for k in range(width):
                        end[k] = max(end[k], last + here)
                else:
                    gone = min(here, ceiling[edge_kind[e]]) if any_gone[block, g] else here
                    for k in range(width):
                        end[k] = max(end[k], anchor[k] + (gone + ((here - gone) & keep[k])))
                e += ONE
            for k in range(width):
                at = end[k] + (wait & keep[k])
                start[k] = at
                end[k] = at + np.int64(np.rint(length * factor[k]))
            while next_row < len(rows) and rows[next_row] == v:
                out_row = out[next_row, block * width : (block + 1) * width]
                for k in range(width):
                    out_row[k] = end[k]
                next_row += 1


@njit(_nrt=False)
def replay_side_by_side(
    in_ptr: Int64, read: UInt32, slot: Int32, values: Int64, edge_kind: UInt8, lag: Int64, dur: Int64, delay: Int64,
    release: Int64, group: Int32, scale: Float64, gone: Int64 | None, ceiling: Int64, rows: Int32, out: Int64,
) -> None:  # fmt: skip
    """Replay as `replay_variants` does, many variants at a time, no `meets`, within the limits of `vectors`.

    `gone` is −1 where a task is gone and 0 where it stays, None where all stay. Where any is gone all tasks take the
    same path: a processor guesses badly which.
    """
    blocks, groups, width = scale.shape
    for block in range(blocks):
        next_row = 0
        first = np.uint64(0)
        for v in range(len(dur)):
            stop = np.uint64(in_ptr[v + 1])
            factors = (block * groups + np.int64(group[v]) + 1) * width
            start, end = np.int64(slot[2 * v + 1]) * width, np.int64(slot[2 * v]) * width
            free, length = vectors.spread(release[v] + vectors.ZERO), np.float64(dur[v])
            for k in range(0, width, vectors.LANES):
                at, e = free, first
                while e < stop:
                    anchor = vectors.load(values, np.int64(read[e]) * width + k)
                    ready = vectors.add(anchor, vectors.spread(lag[e]))
                    if gone is not None:
                        above = lag[e] - min(lag[e], ceiling[edge_kind[e]])
                        ready = vectors.less(ready, vectors.spread(above), vectors.load(gone, factors + k))
                    at = vectors.latest(at, ready)
                    e += ONE
                at = vectors.add(at, vectors.spread(delay[v]))
                if gone is not None:
                    at = vectors.less(at, vectors.spread(delay[v]), vectors.load(gone, factors + k))
                vectors.store(values, start + k, at)
                vectors.store(values, end + k, vectors.add(at, vectors.scaled(length, scale, factors + k)))
            first = stop
            while next_row < len(rows) and rows[next_row] == v:
                for k in range(width):
                    out[next_row, block * width + k] = values[np.uint64(slot[2 * v]), k] - vectors.ZERO
                next_row += 1


@njit(_nrt=False)
def tails(
    in_ptr: Int64, src: UInt32, from_start: UInt8, lag: Int64, dur: Int64, delay: Int64, from_a_start: Int64,
    from_an_end: Int64,
) -> None:  # fmt: skip
    """Fill in the longest path from the start and from the end of every task (n) to where `from_an_end` is 0.

    Both are NO_RELEASE elsewhere, and stay below UNREACHED where there is no path. The path that leaves a start
    includes what follows the start only: the delay of a task belongs to its arrival.
    """
    for v in range(len(dur) - 1, -1, -1):
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
