"""What the window would save if tasks were faster, exactly: every single task at once, and groups of tasks.

**Single tasks.** Split every task v into a start at position 2v and an end at 2v + 1, joined by its duration. All
edges lead to higher positions, so every path to the last mark that avoids v's duration crosses the cut between 2v
and 2v + 1 by another edge. The longest path that avoids v is therefore the maximum, over the other edges that cross
this cut, of (longest path to the edge) + its lag + (longest path from it to the mark); all cuts together are one
offline range maximum. If v is on a longest path M, shortening it by d saves min(d, M − longest path that avoids v),
and nothing otherwise. The window begins at the first mark, which may move as well: what a task saves there is
subtracted, computed the same way.

**Groups** are replayed as variants, side by side; groups that cannot move either mark are recognised by the paths
and skipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrace.arrays import Int32, Int64
from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, TaskGraph, TaskKind
from foretrace.simulate.critical import UNREACHED, tails
from foretrace.simulate.replay import WIDEST_BLOCK, effective, replay_variants


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sensitivity:
    """Per task (n, ns): how much shorter the window gets if this task alone were faster.

    Negative where a task holds up the first mark more than the last one.
    """

    faster: float  # share of the duration taken away for `saved_if_faster_ns`
    saved_if_faster_ns: Int64
    saved_if_zero_ns: Int64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupSavings:
    """Per group (G, ns): how much shorter the window gets if all of its tasks were faster, or gone."""

    faster: float
    saved_if_faster_ns: Int64
    saved_if_removed_ns: Int64


def single_tasks(graph: TaskGraph, start: Int64, end: Int64, *, faster: float = 0.1) -> Sensitivity:
    """Return savings of every task, `faster` being the share of its duration that it loses."""
    dur = effective(graph).dur
    less = dur - np.rint(dur * (1.0 - faster)).astype(np.int64)
    saved_faster, saved_zero = np.zeros(len(graph), dtype=np.int64), np.zeros(len(graph), dtype=np.int64)
    for mark, sign in ((int(graph.marks[-1]), 1), (int(graph.marks[0]), -1)):
        most = _most_to_save(graph, start, end, mark)
        saved_faster += sign * np.minimum(less, most)
        saved_zero += sign * np.minimum(dur, most)
    return Sensitivity(faster=faster, saved_if_faster_ns=saved_faster, saved_if_zero_ns=saved_zero)


def _most_to_save(graph: TaskGraph, start: Int64, end: Int64, mark: int) -> Int64:
    """Return the longest path to the end of `mark` minus the longest one that avoids a task (n)."""
    n, columns = len(graph), effective(graph)
    rows = np.arange(n)
    from_start, from_end = tails(graph, mark)
    arrival = from_start + columns.delay
    anchor = np.where(graph.from_start, start[graph.src], end[graph.src])
    dst = graph.dst
    through = anchor + columns.lag + arrival[dst]
    useful = np.flatnonzero((from_start > UNREACHED)[dst] & (columns.lag > UNREACHED))
    first = graph.src[useful] + np.where(graph.from_start[useful], 0, 1)  # cuts that the edge crosses,
    last = dst[useful] - 1  # both inclusive
    crossing = first <= last
    around = range_maximum(n, first[crossing], last[crossing], through[useful][crossing])
    # A path may also begin, by a release time, behind the cut.
    begins = np.where(from_start > UNREACHED, graph.release + arrival, NO_RELEASE)
    later = np.append(np.maximum.accumulate(begins[::-1])[::-1], NO_RELEASE)[1:]
    total = int(end[mark])
    on_longest = (from_end > UNREACHED) & (end + from_end == total) & (rows <= mark)
    return np.where(on_longest, total - np.maximum(around, later), 0)


def range_maximum(n: int, first: npt.NDArray[np.integer], last: npt.NDArray[np.integer], value: Int64) -> Int64:
    """Return maximum `value` of the intervals [first, last] that cover each of n positions; NO_RELEASE where none does.

    Every interval is the union of two of a power-of-two length; these are handed down from long to short.
    """
    level = np.frexp((last - first + 1).astype(np.float64))[1] - 1
    best = np.full(n, NO_RELEASE, dtype=np.int64)
    for k in range(int(level.max(initial=0)), -1, -1):
        here = level == k
        np.maximum.at(best, first[here], value[here])
        np.maximum.at(best, last[here] + 1 - (1 << k), value[here])
        if k:
            half = 1 << (k - 1)
            shifted = best.copy()
            np.maximum(best[half:], shifted[:-half], out=best[half:])
    return best


def groups(
    graph: TaskGraph, start: Int64, end: Int64, label: Int32, n_groups: int, *, faster: float = 0.1
) -> GroupSavings:
    """Return savings of `n_groups` groups; `label` (n) is the group of a task, −1 for none.

    What is removed with a group beside its own tasks is said in `with_calls`.
    """
    begin, mark = int(graph.marks[0]), int(graph.marks[-1])
    window = int(end[mark] - end[begin])
    label, launcher = with_calls(graph, label)
    may_move = np.zeros(len(graph), dtype=np.bool_)
    for target in (begin, mark):
        from_start, _ = tails(graph, target)
        may_move |= (from_start > UNREACHED) & (start + from_start == end[target])
    saved_faster, saved_removed = np.zeros(n_groups, dtype=np.int64), np.zeros(n_groups, dtype=np.int64)
    scaled = np.unique(label[may_move & (label >= 0)])
    removed = np.union1d(scaled, launcher[may_move & (launcher >= 0)])
    for chunk in _chunks(scaled):
        scale = np.ones((len(chunk), len(chunk)))
        np.fill_diagonal(scale, 1.0 - faster)
        ends = replay_variants(graph, _renumber(label, chunk, n_groups), scale)
        saved_faster[chunk] = window - (ends[-1] - ends[0])
    for chunk in _chunks(removed):
        # A call is gone in two variants: that of its own group and that of what it launched.
        base = len(chunk) + 1
        pair = (_renumber(label, chunk, n_groups) + 1) * base + _renumber(launcher, chunk, n_groups) + 1
        used = np.flatnonzero(np.bincount(pair, minlength=base * base))
        place = np.zeros(base * base, dtype=np.int32)
        place[used] = np.arange(len(used), dtype=np.int32)
        variant = np.arange(1, base)
        gone = (used[:, None] // base == variant) | (used[:, None] % base == variant)
        ends = replay_variants(graph, place[pair], np.ones(gone.shape), gone)
        saved_removed[chunk] = window - (ends[-1] - ends[0])
    return GroupSavings(faster=faster, saved_if_faster_ns=saved_faster, saved_if_removed_ns=saved_removed)


def with_calls(graph: TaskGraph, label: Int32) -> tuple[Int32, Int32]:
    """Return groups (n, −1 for none) with which a task is removed: its own, and that of the work which it launched.

    A call launched for a group if the group holds all device tasks that it launched and that are still there. The
    RETURN of a blocking call follows its call in both.
    """
    dst = graph.dst
    launch = np.flatnonzero((graph.edge_kind == EdgeKind.LAUNCH) & ~graph.gone[dst])
    lowest = np.full(len(graph), np.iinfo(np.int32).max, dtype=np.int32)
    highest = np.full(len(graph), -1, dtype=np.int32)
    np.minimum.at(lowest, graph.src[launch], label[dst[launch]])
    np.maximum.at(highest, graph.src[launch], label[dst[launch]])
    launcher = np.where((lowest == highest) & (graph.kind == TaskKind.CALL), highest, np.int32(-1)).astype(np.int32)
    own = label.copy()
    back = np.flatnonzero(
        (graph.edge_kind == EdgeKind.PROGRAM)
        & (graph.kind[dst] == TaskKind.RETURN)
        & (graph.kind[graph.src] == TaskKind.CALL)
    )
    for groups_of in (own, launcher):
        groups_of[dst[back]] = groups_of[graph.src[back]]
    return own, launcher


def _chunks(chosen: Int32) -> list[Int32]:
    """Return groups in blocks that are replayed side by side."""
    return [chosen[i : i + WIDEST_BLOCK] for i in range(0, len(chosen), WIDEST_BLOCK)]


def _renumber(label: Int32, chunk: Int32, n_groups: int) -> Int32:
    """Return the position of each label in `chunk`, −1 for all others."""
    place = np.full(n_groups + 1, -1, dtype=np.int32)  # the last entry stands for −1
    place[chunk] = np.arange(len(chunk), dtype=np.int32)
    return place[label]
