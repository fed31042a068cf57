"""The collectives of a joined graph (who meets, which task is whose arrival and transfer, and what is sent), and what
they take among more ranks than were recorded: every one that grows takes what a network says of its size.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import log2

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.errors import spelled
from foretrace.graph.alignment import ClockOffsets
from foretrace.graph.matching import Matching
from foretrace.graph.taskgraph import Assumption, EdgeKind, TaskGraph, TaskKind
from foretrace.simulate.sharing import durations_alone, durations_together


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """One collective: its kind in PyTorch's words, bytes (−1 if unknown), ranks recorded and ranks of its group.

    `paired` marks a transfer from one rank to another.
    """

    kind: str
    nbytes: int
    recorded: int
    size: int
    paired: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Meetings:
    """Collectives of a graph of several ranks, and the parts that ranks have in them.

    `arrival`, `transfer` (rows of tasks) and `which` (index into `meetings`) have one entry per part; `edge` (m) is
    the index of the collective that an edge belongs to, −1 for all other edges.
    """

    meetings: tuple[Meeting, ...]
    arrival: Int64
    transfer: Int64
    which: Int64
    edge: Int64


def meetings_of(graph: TaskGraph, matching: Matching, clock: ClockOffsets) -> Meetings:
    """Return the collectives of a graph that `join(..., matching=matching, clock=clock)` made."""
    dst = graph.dst
    of_collective = graph.edge_kind == EdgeKind.COLLECTIVE
    arrives = of_collective & (graph.kind[graph.src] == TaskKind.ARRIVAL)
    own = np.flatnonzero(
        arrives & (graph.kind[dst] == TaskKind.COLLECTIVE) & (graph.lane[graph.src] == graph.lane[dst])
    )
    arrival, transfer = graph.src[own].astype(np.int64), dst[own].astype(np.int64)
    places = _places(matching, clock)
    rank = graph.rank
    which = np.array(
        [places[int(rank[row]), int(graph.recorded[row])].pop(0) for row in arrival.tolist()], dtype=np.int64
    )
    of_task = np.full(len(graph), -1, dtype=np.int64)
    of_task[arrival] = of_task[transfer] = which
    into_join = arrives & (graph.kind[dst] == TaskKind.JOIN)
    of_task[dst[into_join]] = of_task[graph.src[into_join]]
    meets = of_collective & (of_task[graph.src] >= 0) & (of_task[graph.src] == of_task[dst])
    return Meetings(
        meetings=tuple(
            Meeting(
                kind=each.what.kind,
                nbytes=each.what.nbytes,
                recorded=len(each.members),
                size=each.size,
                paired=bool(each.what.peers),
            )
            for each in matching.matches
        ),
        arrival=arrival,
        transfer=transfer,
        which=which,
        edge=np.where(meets, of_task[graph.src], -1),
    )


def _places(matching: Matching, clock: ClockOffsets) -> dict[tuple[int, int], list[int]]:
    """Return indices of the matches in which a rank arrives at a time of the common clock."""
    places: dict[tuple[int, int], list[int]] = defaultdict(list)
    which, rank, _ = matching.flat
    starts = matching.starts.copy()
    for i in range(len(matching.ranks)):
        mine = rank == i
        starts[mine] = clock.aligned(i, starts[mine])
    for match, member, start in zip(which.tolist(), rank.tolist(), starts.tolist(), strict=True):
        places[matching.ranks[member], start].append(match)
    return places


# Seconds with their low and high end of one collective: kind in PyTorch's words, bytes, workers. None: it cannot say.
Price = Callable[[str, float, int], tuple[float, float, float] | None]

_FAR = 3.0  # a network that is off by more from what was recorded is another one than that of the recording
_LEAST_BYTES, _MOST_BYTES = 1.0, 1e13


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Transfers:
    """Durations of all tasks (n each, ns) with transfers among more ranks, and with those at either end of their range.

    `ratio` is recorded over expected transfer time among the recorded ranks, None where no size is known;
    `absolute` says that the network's own times were taken because of it.
    """

    dur: Int64
    low: Int64
    high: Int64
    ratio: float | None
    absolute: bool
    assumptions: tuple[Assumption, ...]


def ring_share(kind: str, nbytes: float, workers: int) -> tuple[float, float, float]:
    """Return relative times where no network is given: the share of a buffer that a ring sends over one link.

    The low end does not grow with the workers, the high end as the depth of a tree does, as latencies would.
    """
    share = (workers - 1) / workers
    unit = 1e-12 * max(nbytes, 1.0)
    return unit * share, unit * 0.5, unit * max(log2(workers), 0.5)


def grown_transfers(graph: TaskGraph, found: Meetings, grows: Mask, ranks: int, price: Price | None) -> Transfers:
    """Return durations of a graph whose collectives with `grows` (one per meeting) take place among `ranks`.

    A transfer of known size takes its recorded time x expected time among `ranks` / expected time among the recorded
    group. Transfers of a rank that are in flight together share its link: what grows is the time of each alone. Where
    the size was not recorded, it is the one whose expected time is the recorded one. Where the network is plainly not
    that of the recording (times differ more than threefold), its own times are taken as they are.
    """
    ask = price or ring_share
    rank = graph.rank[found.transfer]
    links = [found.transfer[grows[found.which] & (rank == each)] for each in np.unique(rank)]
    alone = durations_alone(graph, links)
    recorded = _alone_s(alone, found)
    rows = np.flatnonzero(grows)
    base, target = np.zeros(len(grows)), np.zeros((len(grows), 3))
    known = np.array([each.nbytes >= 0 for each in found.meetings], dtype=np.bool_)
    kept: Counter[str] = Counter()
    asked: dict[tuple[str, float, int], tuple[float, tuple[float, float, float]] | None] = {}
    for i in rows.tolist():
        meeting = found.meetings[i]
        nbytes = float(meeting.nbytes) if known[i] else _size(ask, meeting.kind, meeting.size, float(recorded[i]))
        key = (meeting.kind, nbytes, meeting.size)
        if key not in asked:
            before, after = ask(meeting.kind, nbytes, meeting.size), ask(meeting.kind, nbytes, ranks)
            asked[key] = None if before is None or after is None else (before[0], after)
        answer = asked[key]
        if answer is None:
            kept[meeting.kind] += 1
        else:
            base[i], target[i] = answer
    told = known & (base > 0)
    ratio = float(recorded[told].sum() / base[told].sum()) if price is not None and told.any() else None
    absolute = ratio is not None and not 1 / _FAR <= ratio <= _FAR
    priced = grows & (base > 0)
    dur = np.zeros((3, len(graph)), dtype=np.int64)
    mine = priced[found.which]
    rows, which = found.transfer[mine], found.which[mine]
    for end in range(3):
        grown = alone.copy()
        grown[rows] = target[which, end] * 1e9 if absolute else alone[rows] * target[which, end] / base[which]
        dur[end] = durations_together(graph, links, grown)
    return Transfers(
        dur=dur[0],
        low=dur[1],
        high=dur[2],
        ratio=ratio,
        absolute=absolute,
        assumptions=(
            *_assumptions(found, grows, known, kept, ranks, price is not None, ratio, absolute),
            *(_spread(dur[:, found.transfer].sum(axis=1)) if price is not None else ()),
        ),
    )


def _spread(total_ns: Int64) -> list[Assumption]:
    """Return the range that the network gives its own times, as shares of the likely ones."""
    likely, low, high = total_ns.tolist()
    if not likely or low == high:
        return []
    return [
        Assumption(
            technique="scale", name="times of the network", value=1.0, low=low / likely, high=high / likely, unit="x",
            why="the range that the network itself gives", flag=spelled("`network=`"),
        )
    ]  # fmt: skip


def _alone_s(alone: Float64, found: Meetings) -> Float64:
    """Return mean transfer of every collective over its parts, seconds; `alone`: of all tasks, ns."""
    count = len(found.meetings)
    parts = np.maximum(np.bincount(found.which, minlength=count), 1)
    return np.asarray(np.bincount(found.which, weights=alone[found.transfer], minlength=count) / parts / 1e9)


def _size(price: Price, kind: str, workers: int, seconds: float) -> float:
    """Return bytes that are expected to take these seconds; the least where even one byte takes longer."""
    low, high = _LEAST_BYTES, _MOST_BYTES
    for _ in range(50):
        middle = (low * high) ** 0.5
        answer = price(kind, middle, workers)
        if answer is None:
            return low
        low, high = (middle, high) if answer[0] < seconds else (low, middle)
    return low


def _assumptions(
    found: Meetings, grows: Mask, known: Mask, kept: Counter[str], ranks: int, given: bool, ratio: float | None,
    absolute: bool,
) -> list[Assumption]:  # fmt: skip
    def assumed(name: str, value: float, low: float, high: float, unit: str, why: str, flag: str = "") -> Assumption:
        return Assumption(technique="scale", name=name, value=value, low=low, high=high, unit=unit, why=why, flag=flag)

    rows = np.flatnonzero(grows)
    says = []
    if not given:
        base = max((found.meetings[i].size for i in rows.tolist()), default=2)
        value = (1 - 1 / ranks) / (1 - 1 / base)
        says.append(
            assumed("growth of transfers", value, 1.0, max(log2(ranks) / log2(base), value), "x",
                    f"no network given: links among {ranks:,} ranks as fast as those among the recorded ones, latency "
                    "not counted; the range goes from no growth to that of a tree's depth", spelled("`network=`"))
        )  # fmt: skip
    elif ratio is not None:
        says.append(
            assumed("recorded over expected transfer", ratio, ratio, ratio, "x",
                    "too far from 1 for one network: the times of the given network are taken as they are" if absolute
                    else "what the network expects among more ranks is scaled by it")
        )  # fmt: skip
    if unknown := int((grows & ~known).sum()):
        why = "the recording does not tell it: the size that takes the recorded time" + (
            " on this network" if given else ""
        )
        says.append(assumed("collectives of unknown size", unknown, unknown, unknown, "collectives", why))
    for kind, count in sorted(kept.items()):
        says.append(
            assumed(f"transfers kept: {kind}", count, count, count, "collectives",
                    "the network says nothing of this kind: as recorded")
        )  # fmt: skip
    return says
