"""Two runs side by side: which task of the one is which task of the other, and where the difference lies.

Works on recordings and on predictions alike, on the same machine or on two. Tasks are matched in order, lane by
lane, first by (phase, layer, operator, name) and then, for what is left, by (phase, layer, operator): a kernel that
another library or another device replaced still finds its counterpart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np

from foretrace.arrays import Int32, Int64
from foretrace.graph.kernels import longest_common
from foretrace.graph.taskgraph import Phase, TaskKind
from foretrace.simulate.overhead import one_clock
from foretrace.simulate.replay import effective
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.trace.trace import LaneKind

Pair = tuple[int, int]
Key = tuple[int, ...]

MOST_EDITS = 3_000  # of an exact alignment, whose time grows with them
ROUNDS = 8  # refinements of an alignment that is not exact
SAME = 0.02  # tasks whose durations agree to this share count as unchanged
_TAKES_NO_TIME = (TaskKind.RETURN, TaskKind.MARK, TaskKind.JOIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDifference:
    """One layer (the operator or task where the layer is unknown) of both runs, in a typical step; times in ns.

    `before_ns` and `after_ns` are busy times (work on any lane); `critical_*_ns` are what the layer contributes to
    the critical path, waits included, so that over all layers they sum to the step.
    """

    layer: str
    phase: str  # "" if unknown
    before_ns: int
    after_ns: int
    critical_before_ns: int
    critical_after_ns: int
    matched: int
    changed: int  # matched tasks whose duration differs by more than SAME
    replaced: int  # matched tasks that carry another name
    only_before: int
    only_after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What `compare` found, rows by the size of their part in the difference of the step."""

    before_ns: int  # the typical steps that were compared
    after_ns: int
    rows: tuple[LayerDifference, ...]
    matched_share: float  # share of both sides' busy time in matched tasks
    note: str = ""  # how both came to be on one clock, if they were not


def on_one_clock(before: Timeline, after: Timeline) -> tuple[Timeline, Timeline, str]:
    """Return both timelines on one clock, and what was done for it; see `one_clock`. Raises ForetraceError."""
    first, second, said = one_clock(before.graph, after.graph)
    return (
        before if first is before.graph else simulate(first),
        after if second is after.graph else simulate(second),
        said,
    )


def compare(before: Timeline, after: Timeline) -> Comparison:
    """Match the tasks of the median steps of two runs and sum up, layer by layer, what became of them.

    Times are compared on one clock (`on_one_clock`). Raises ForetraceError where there is none.
    """
    before, after, said = on_one_clock(before, after)
    vocabulary: dict[str, int] = {}
    sides = (_Side(before, vocabulary), _Side(after, vocabulary))
    pairs, replaced = _match(*sides)
    layers: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)  # sums by the field that they are for
    for when, side in zip(("before", "after"), sides, strict=True):
        for row, label in enumerate(side.labels):
            layers[label][f"{when}_ns"] += int(side.dur[row])
            layers[label][f"only_{when}"] += 1
        for label, time in side.on_critical_path():
            layers[label][f"critical_{when}_ns"] += time
    left, right = sides
    for a, b in pairs:
        one, other = layers[left.labels[a]], layers[right.labels[b]]
        one["only_before"] -= 1
        other["only_after"] -= 1
        one["matched"] += 1
        one["changed"] += abs(int(right.dur[b]) - int(left.dur[a])) > SAME * max(int(left.dur[a]), 1)
        one["replaced"] += (a, b) in replaced
    summed = [each.name for each in fields(LayerDifference) if each.name not in ("layer", "phase")]
    rows = [
        LayerDifference(layer=layer, phase=phase, **{name: sums[name] for name in summed})
        for (layer, phase), sums in layers.items()
    ]
    rows.sort(
        key=lambda r: (
            -abs(r.critical_after_ns - r.critical_before_ns),
            -abs(r.after_ns - r.before_ns),
            r.layer,
            r.phase,
        )
    )
    both = sum(int(left.dur[a]) + int(right.dur[b]) for a, b in pairs)
    return Comparison(
        before_ns=left.step_ns,
        after_ns=right.step_ns,
        rows=tuple(rows),
        matched_share=both / max(int(left.dur.sum() + right.dur.sum()), 1),
        note=said,
    )


class _Side:
    """The tasks of the median step of a run that take time, lane by lane in the order in which they ran."""

    def __init__(self, timeline: Timeline, vocabulary: dict[str, int]) -> None:
        self.timeline, graph = timeline, timeline.graph
        order = np.argsort(timeline.step_times_ns, kind="stable")
        self.step = int(order[(len(order) - 1) // 2])
        self.step_ns = int(timeline.step_times_ns[self.step])
        takes_time = (graph.step == self.step) & ~graph.gone & ~np.isin(graph.kind, _TAKES_NO_TIME)
        self.rows = np.flatnonzero(takes_time)
        self.rows = self.rows[np.argsort(timeline.start[self.rows], kind="stable")]
        self.dur = effective(graph).dur[self.rows]
        self.labels = [self._label(v) for v in self.rows.tolist()]

        def shared(column: Int32, table: Sequence[str]) -> list[int]:
            used, inverse = np.unique(column[self.rows], return_inverse=True)
            known = [-1 if i < 0 else vocabulary.setdefault(table[i], len(vocabulary)) for i in used.tolist()]
            numbers: list[int] = np.array([*known, -1], dtype=np.int64)[inverse].tolist()
            return numbers

        phase = graph.phase[self.rows].tolist()
        name = shared(graph.name, graph.names)
        self.place: list[Key] = list(
            zip(phase, shared(graph.layer, graph.layers), shared(graph.op, graph.names), strict=True)
        )
        self.key: list[Key] = [(*place, word) for place, word in zip(self.place, name, strict=True)]
        self.lanes = self._lanes()

    def _label(self, v: int) -> tuple[str, str]:
        graph = self.timeline.graph
        phase = Phase(int(graph.phase[v]))
        if graph.layer[v] >= 0:
            text = graph.layers[graph.layer[v]]
        elif phase == Phase.DATA:
            text = "data loading"  # whichever loader hands the batch over
        else:
            text = graph.names[graph.op[v] if graph.op[v] >= 0 else graph.name[v]]
        return text, phase.name.lower() if phase else ""

    def _lanes(self) -> dict[Key, list[int]]:
        """Return positions in `rows` by (which rank, kind of lane, number): threads as one lane, streams by
        busy time.
        """
        graph = self.timeline.graph
        ranks = sorted({lane.rank for lane in graph.lanes}, key=lambda rank: (rank < 0, rank))  # −1: no rank's own
        lane_of = graph.lane[self.rows]
        busy = np.bincount(lane_of, weights=self.dur, minlength=len(graph.lanes))
        number: dict[int, Key] = {}
        seen: dict[Key, int] = defaultdict(int)
        for lane in np.argsort(-busy, kind="stable").tolist():
            group = (ranks.index(graph.lanes[lane].rank), int(graph.lanes[lane].kind))
            number[lane] = (*group, seen[group])
            if graph.lanes[lane].kind == LaneKind.GPU:
                seen[group] += 1
        lanes: dict[Key, list[int]] = defaultdict(list)
        for position, lane in enumerate(lane_of.tolist()):
            lanes[number[lane]].append(position)
        return lanes

    def on_critical_path(self) -> Iterator[tuple[tuple[str, str], int]]:
        """Yield (label, ns) of every piece of the critical path inside the step; the pieces sum to the step."""
        path, marks = self.timeline.critical_path(), self.timeline.end[self.timeline.graph.marks]
        reached = marks[0] + np.cumsum(path.lag_ns + path.delay_ns + path.work_ns)
        inside = np.clip(np.concatenate(([marks[0]], reached)), marks[self.step], marks[self.step + 1])
        for task, time in zip(path.task.tolist(), np.diff(inside).tolist(), strict=True):
            if time:
                yield self._label(task), time


def _match(before: _Side, after: _Side) -> tuple[list[Pair], set[Pair]]:
    """Return pairs of positions that are the same task, and those among them that carry another name."""
    pairs: list[Pair] = []
    replaced: set[Pair] = set()
    for lane in before.lanes.keys() & after.lanes.keys():
        left, right = before.lanes[lane], after.lanes[lane]
        same = align([before.key[i] for i in left], [after.key[i] for i in right])
        found = [(left[a], right[b]) for a, b in same]
        taken = ({a for a, _ in found}, {b for _, b in found})
        rest = [i for i in left if i not in taken[0]], [i for i in right if i not in taken[1]]
        other = align([before.place[i] for i in rest[0]], [after.place[i] for i in rest[1]])
        renamed = [(rest[0][a], rest[1][b]) for a, b in other]
        replaced.update(renamed)
        pairs += found + renamed
    return pairs, replaced


def align(before: Sequence[Hashable], after: Sequence[Hashable]) -> list[Pair]:
    """Return positions of equal keys that appear in the same order in both sequences, ascending.

    A longest common subsequence where that takes at most MOST_EDITS edits. Sequences further apart are first pinned
    to each other: the n-th occurrence of a key here to its n-th occurrence there, as far as these agree in order;
    what lies between two pins is aligned again in the same way.
    """
    number: dict[Hashable, int] = {}
    a, b = (np.array([number.setdefault(key, len(number)) for key in side], dtype=np.int64) for side in (before, after))
    return sorted(_aligned(a, b, 0, 0, ROUNDS))


def _aligned(a: Int64, b: Int64, first_a: int, first_b: int, rounds: int) -> Iterator[Pair]:
    """Yield pairs of two stretches that begin at these positions."""
    pairs: list[Pair] = [(int(i), int(j)) for i, j in longest_common(a, b, MOST_EDITS)] if len(a) and len(b) else []
    exact = len(a) + len(b) - 2 * len(pairs) <= MOST_EDITS
    if not exact and rounds and (pins := _increasing(_candidates(a.tolist(), b.tolist()))):
        for (i, j), (k, m) in pairwise([(-1, -1), *pins, (len(a), len(b))]):
            yield from _aligned(a[i + 1 : k], b[j + 1 : m], first_a + i + 1, first_b + j + 1, rounds - 1)
        pairs = pins
    for i, j in pairs:
        yield first_a + i, first_b + j


def _candidates(before: list[int], after: list[int]) -> list[Pair]:
    """Return the n-th occurrence of every key in both stretches, ascending by the first."""
    places: dict[int, list[int]] = defaultdict(list)
    for b in range(len(after) - 1, -1, -1):
        places[after[b]].append(b)  # reversed, so that pop() gives the first
    return [(a, places[key].pop()) for a, key in enumerate(before) if places.get(key)]


def _increasing(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the longest subsequence whose second members increase (the first ones already do)."""
    ends: list[int] = []  # smallest last member of an increasing run of each length
    rows: list[int] = []  # the pair that ends it
    back = [-1] * len(pairs)
    for i, (_, b) in enumerate(pairs):
        length = bisect_left(ends, b)
        back[i] = rows[length - 1] if length else -1
        if length == len(ends):
            ends.append(b)
            rows.append(i)
        else:
            ends[length], rows[length] = b, i
    kept = []
    i = rows[-1] if rows else -1
    while i >= 0:
        kept.append(pairs[i])
        i = back[i]
    return kept[::-1]
