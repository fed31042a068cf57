"""Several ranks on one timeline: how long each one waits for others, how long transfers take, who is late and why.

A rank waits from its arrival at a collective to the last arrival; from there on the transfer runs (dPRO, MLSys 2022,
cuts receives at their sends likewise). Time in a communication kernel is the sum of both, which blames the network for
a straggler.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

from foretrace.arrays import Int64
from foretrace.errors import GraphError
from foretrace.graph.taskgraph import NO_RELEASE, Change, EdgeKind, TaskGraph, TaskKind
from foretrace.simulate.critical import binding
from foretrace.simulate.timeline import Timeline
from foretrace.trace.trace import LaneKind

_HEAVIEST = 48  # collectives of a straggler whose causes are looked into
_LEAST_LATE_NS = 1_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """Every rank's part in every collective of a timeline (p each), ordered by collective, then rank; times in ns.

    `collective` counts from 0 in the order in which they begin.
    """

    collective: Int64
    rank: Int64
    arrival: Int64  # rows of the graph
    transfer: Int64
    arrived: Int64
    began: Int64
    ended: Int64
    step: Int64  # −1 outside of the steps

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def count(self) -> int:
        """Number of collectives."""
        return int(self.collective.max(initial=-1)) + 1

    @cached_property
    def wait_ns(self) -> Int64:
        """Time until the last rank that a part waits for has arrived."""
        wait: Int64 = np.maximum(self.began - self.arrived, 0)
        return wait

    @cached_property
    def transfer_ns(self) -> Int64:
        """Time from then to the part's own end."""
        transfer: Int64 = self.ended - self.began
        return transfer

    @cached_property
    def first(self) -> Int64:
        """First part of every collective, and the number of parts."""
        return np.searchsorted(self.collective, np.arange(self.count + 1))

    @cached_property
    def last_arriver(self) -> Int64:
        """Part that arrives last, per collective."""
        order = np.lexsort((self.arrived, self.collective))
        return order[self.first[1:] - 1] if self.count else order

    @cached_property
    def caused_ns(self) -> Int64:
        """Waiting of all ranks in every collective, which its last arriver causes."""
        total = np.zeros(self.count, dtype=np.int64)
        np.add.at(total, self.collective, self.wait_ns)
        return total


def parts(timeline: Timeline) -> Parts:
    """Return arrivals and transfers of the collectives that tie ranks together; none in the graph of one rank."""
    graph = timeline.graph
    dst = graph.dst
    edges = np.flatnonzero((graph.edge_kind == EdgeKind.COLLECTIVE) & ~graph.gone[dst])  # removed ones tie nobody
    edges = edges[np.isin(graph.kind[graph.src[edges]], (TaskKind.ARRIVAL, TaskKind.JOIN))]
    edges = edges[np.isin(graph.kind[dst[edges]], (TaskKind.COLLECTIVE, TaskKind.JOIN))]
    src, to = graph.src[edges], dst[edges]
    # Tasks that edges connect are one collective: the lowest row spreads until nothing changes.
    label = np.arange(len(graph), dtype=np.int64)
    while True:
        before = label.copy()
        np.minimum.at(label, to, label[src])
        np.minimum.at(label, src, label[to])
        if np.array_equal(label, before):
            break
    own = (graph.lane[src] == graph.lane[to]) & (graph.kind[src] == TaskKind.ARRIVAL)
    arrival, transfer = src[own].astype(np.int64), to[own].astype(np.int64)
    start, end = timeline.start, timeline.end
    rank = graph.rank[transfer]
    begin = np.full(len(graph), np.iinfo(np.int64).max)
    np.minimum.at(begin, label[arrival], start[arrival])
    order = np.lexsort((rank, label[arrival], begin[label[arrival]]))
    arrival, transfer = arrival[order], transfer[order]
    group = label[arrival]
    new = np.append(True, group[1:] != group[:-1])[: len(group)]
    return Parts(
        collective=np.cumsum(new) - 1,
        rank=rank[order].astype(np.int64),
        arrival=arrival,
        transfer=transfer,
        arrived=start[arrival],
        began=start[transfer],
        ended=end[transfer],
        step=graph.step[transfer].astype(np.int64),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What one rank spends in collectives per step."""

    rank: int
    wait_s: float
    transfer_s: float
    last: int  # collectives at which it arrives last
    caused_s: float  # waiting of the others in those, per step


def shares(timeline: Timeline, found: Parts) -> tuple[RankShare, ...]:
    """Return one row per rank, by rank."""
    graph = timeline.graph
    steps = max(graph.n_steps, 1)
    inside = found.step >= 0 if graph.n_steps else np.ones(len(found), dtype=np.bool_)
    ranks = graph.ranks
    last = found.last_arriver
    rows = []
    for rank in ranks:
        mine = inside & (found.rank == rank)
        late = last[(found.rank[last] == rank) & inside[last]]
        rows.append(
            RankShare(
                rank=rank,
                wait_s=float(found.wait_ns[mine].sum()) / steps / 1e9,
                transfer_s=float(found.transfer_ns[mine].sum()) / steps / 1e9,
                last=int(np.count_nonzero(found.rank[last] == rank)),
                caused_s=float(found.caused_ns[found.collective[late]].sum()) / steps / 1e9,
            )
        )
    return tuple(rows)


class StragglerCause(StrEnum):
    """What made a rank late."""

    ENTRY = "entry"  # it entered the recording later: the cause is outside of it
    HOST = "host"
    DATA = "data loading"
    KERNELS = "kernels"
    COPIES = "copies"
    LAUNCH = "launches and queues"
    TRANSFER = "earlier transfers"
    WAIT = "earlier waits"
    DELAY = "delays"


_WORDS = {
    StragglerCause.HOST: "its host works {} longer",
    StragglerCause.DATA: "it waits {} longer for data",
    StragglerCause.KERNELS: "its kernels take {} longer",
    StragglerCause.COPIES: "its copies take {} longer",
    StragglerCause.LAUNCH: "launching and queueing take {} longer",
    StragglerCause.TRANSFER: "its earlier transfers take {} longer",
    StragglerCause.WAIT: "it waits {} longer in earlier collectives",
    StragglerCause.DELAY: "its streams stand {} longer without a recorded reason",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """Why one rank arrived last at a collective, compared with the rank in the middle of the others.

    `by` is the time by which the rank `than` came earlier; `more_s` of the `cause` (task `name` most) explain it, or
    more than explain it where other things were faster.
    """

    collective: int
    rank: int
    than: int
    by_s: float
    cause: StragglerCause
    more_s: float
    name: str
    name_more_s: float

    def sentence(self, seconds: str, name_seconds: str, short: str) -> str:
        """Return the cause in words, with the times as text and the name as short as it should be read."""
        if self.cause == StragglerCause.ENTRY:
            return f"it enters the step {seconds} after rank {self.than} (step-entry skew from outside the recording)"
        words = _WORDS[self.cause].format(seconds)
        return f"{words} ({name_seconds} of that is {short})" if self.name else words


def lateness(timeline: Timeline, found: Parts, collective: int) -> Lateness:
    """Return why the last rank of a collective came last.

    Both ranks' own critical paths to their arrivals are walked back to the last collective that both waited for, else
    to where they entered the recording; what the late one has more of, most of all, is the cause. Raises GraphError
    for a collective that does not exist.
    """
    return _Walks(timeline, found).explain(collective)


def straggler(timeline: Timeline, found: Parts) -> tuple[RankShare, Lateness] | None:
    """Return the rank that makes the others wait most, and why it is late at most of its collectives by waiting caused.

    None where no rank waits.
    """
    rows = shares(timeline, found)
    late = max(rows, key=lambda row: row.caused_s, default=None)
    if late is None or late.caused_s <= 0:
        return None
    mine = np.flatnonzero(found.rank[found.last_arriver] == late.rank)
    heaviest = mine[np.argsort(-found.caused_ns[mine], kind="stable")][:_HEAVIEST]
    walks = _Walks(timeline, found)
    reasons = [walks.explain(int(each)) for each in heaviest.tolist()]
    votes: dict[StragglerCause, float] = defaultdict(float)
    for reason in reasons:
        votes[reason.cause] += float(found.caused_ns[reason.collective])
    cause = max(votes, key=lambda each: votes[each])
    return late, next(reason for reason in reasons if reason.cause == cause)


class _Walks:
    """Critical paths of single ranks: waits for other ranks are waits, not paths into them."""

    def __init__(self, timeline: Timeline, found: Parts) -> None:
        self.timeline, self.found = timeline, found
        graph = timeline.graph
        edge = binding(graph, timeline.start, timeline.end)
        self.from_start = np.where(edge >= 0, graph.from_start[edge] if graph.edges else False, False)
        self.reason = np.where(edge >= 0, graph.edge_kind[edge] if graph.edges else 0, 0)
        self.before = np.where(edge >= 0, graph.src[edge] if graph.edges else -1, -1).astype(np.int64)
        self.before[found.transfer] = found.arrival
        self.from_start[found.transfer] = False
        self.collective = np.full(len(graph), -1, dtype=np.int64)
        self.collective[found.transfer] = found.collective
        lane = graph.lane_kinds[graph.lane]
        kind = graph.kind
        cause = np.full(len(graph), list(StragglerCause).index(StragglerCause.HOST))
        for each, mask in (
            (StragglerCause.KERNELS, np.isin(kind, (TaskKind.KERNEL, TaskKind.MEMSET))),
            (StragglerCause.COPIES, kind == TaskKind.COPY),
            (StragglerCause.DATA, kind == TaskKind.DATA),
            (StragglerCause.TRANSFER, (kind == TaskKind.COLLECTIVE) | (lane == LaneKind.LINK)),
        ):
            cause[mask] = list(StragglerCause).index(each)
        self.cause = cause

    def path(self, row: int) -> Int64:
        """Return rows from a task back to the first one that waited for nothing on its rank."""
        chain = []
        while row >= 0:
            chain.append(row)
            row = int(self.before[row])
        return np.array(chain, dtype=np.int64)

    def explain(self, collective: int) -> Lateness:
        """Return why the last rank of a collective came last."""
        found, graph = self.found, self.timeline.graph
        if not 0 <= collective < found.count:
            raise GraphError(f"collective {collective} does not exist; this graph has {found.count}, from 0.")
        part = np.arange(found.first[collective], found.first[collective + 1])
        if len(part) < 2:
            raise GraphError(f"collective {collective} has one rank in this graph; nobody waits for another.")
        part = part[np.argsort(found.arrived[part], kind="stable")]
        late, other = int(part[-1]), int(part[(len(part) - 2) // 2])
        mine, theirs = self.path(int(found.arrival[late])), self.path(int(found.arrival[other]))
        mine, theirs, common = self._cut(mine, theirs)
        more: dict[tuple[StragglerCause, str], float] = defaultdict(float)
        for sign, chain in ((1.0, mine), (-1.0, theirs)):
            for key, time in self._spent(chain, common).items():
                more[key] += sign * time
        entry = 0.0
        if not common:
            entry = self._entry(mine) - self._entry(theirs)
            more[StragglerCause.ENTRY, ""] += entry
        by_cause: dict[StragglerCause, float] = defaultdict(float)
        for (cause, _), time in more.items():
            by_cause[cause] += time
        cause = max(by_cause, key=lambda each: by_cause[each])
        name, name_more = max(
            ((name, time) for (each, name), time in more.items() if each == cause), key=lambda item: item[1]
        )
        by = int(found.arrived[late] - found.arrived[other])
        return Lateness(
            collective=collective,
            rank=int(found.rank[late]),
            than=int(found.rank[other]),
            by_s=by / 1e9,
            cause=cause,
            more_s=by_cause[cause] / 1e9,
            name=name if graph.names and cause != StragglerCause.LAUNCH else "",
            name_more_s=name_more / 1e9,
        )

    def _cut(self, mine: Int64, theirs: Int64) -> tuple[Int64, Int64, bool]:
        """Return both paths up to the last collective that they share, and whether there is one."""
        a, b = self.collective[mine], self.collective[theirs]
        both = np.intersect1d(a[a >= 0], b[b >= 0])
        if not len(both):
            return mine, theirs, False
        latest = int(both[np.argmax(self.found.began[self.found.first[both]])])
        return mine[: int(np.argmax(a == latest)) + 1], theirs[: int(np.argmax(b == latest)) + 1], True

    def _entry(self, chain: Int64) -> float:
        return float(self.timeline.start[chain[-1]] - self.timeline.graph.delay[chain[-1]])

    def _spent(self, chain: Int64, common: bool) -> dict[tuple[StragglerCause, str], float]:
        """Return the time of a path by cause and name, ns; the shared collective at its end counts from its start."""
        graph, start, end = self.timeline.graph, self.timeline.start, self.timeline.end
        spent: dict[tuple[StragglerCause, str], float] = defaultdict(float)
        causes = list(StragglerCause)
        for i, row in enumerate(chain.tolist()):
            name = graph.names[
                graph.op[row] if graph.kind[row] == TaskKind.CPU and graph.op[row] >= 0 else graph.name[row]
            ]
            later = int(chain[i - 1]) if i else -1
            if i and not self.from_start[later]:  # the path runs through the task, not from its start
                spent[causes[self.cause[row]], name] += float(end[row] - start[row])
            if i + 1 == len(chain):
                break
            before = int(chain[i + 1])
            gap = float(start[row] - (start[before] if self.from_start[row] else end[before]))
            if self.collective[row] >= 0:
                spent[StragglerCause.WAIT, name] += gap
            else:
                held = float(graph.delay[row])
                spent[StragglerCause.DELAY, ""] += held
                spent[StragglerCause.LAUNCH, ""] += gap - held
        if not common:
            spent[StragglerCause.DELAY, ""] += float(graph.delay[chain[-1]])
        return spent


def entering_together(graph: TaskGraph) -> TaskGraph:
    """Return the graph with all ranks entering when the first one did: only their release times move.

    A rank enters at its first step boundary; without one at its first task.
    """
    rank = graph.rank
    entry: dict[int, int] = {}
    for each in graph.ranks:
        mine = rank == each
        marks = mine & (graph.kind == TaskKind.MARK)
        if mine.any():
            entry[each] = int(graph.recorded[marks if marks.any() else mine].min())
    first = min(entry.values(), default=0)
    shift = np.zeros(len(graph), dtype=np.int64)
    for each, time in entry.items():
        shift[rank == each] = time - first
    release = np.where(graph.release > NO_RELEASE // 2, graph.release - shift, graph.release)
    moved = int(np.count_nonzero([time > first for time in entry.values()]))
    what = (
        f"let {moved} ranks enter the recording with the first one, up to {max(shift, default=0) / 1e6:.3g} ms earlier"
    )
    return graph.with_columns(release=release).noted(Change(technique="", what=what, tasks=moved))
