"""Folding: a run of many ranks predicted from a few recorded ones, without simulating ranks that are alike twice.

The recorded ranks are the classes; N ranks are copies of them, the r-th one a copy of recorded rank r mod k. Groups
that hold all recorded ranks grow to all N; smaller ones keep their size, and there are more of them. Copies of a rank
that does not vary do the same at the same time, so a class stands for its copies and the joined graph of the recorded
ranks with the transfers of N ranks *is* the run of N ranks (dPRO, MLSys 2022, section 5.3, calls this symmetry).

Real ranks vary, and a collective waits for the last of its members: the more there are, the later it comes. This is
sampled: every rank of the N draws noise of its own (`noise.factors`: whole recorded steps by class of work, or the
spread of other recordings where there are too few steps), and the copies run side by side and meet in their
collectives (`copies`). The recorded ranks hold one draw of that noise already, so only the difference counts
between N ranks and the recorded number of ranks with the same draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import hypot

import numpy as np

from foretrace.arrays import Float64, Int32, Int64, Mask
from foretrace.errors import NotApplicableError
from foretrace.graph.collectives import collective_calls
from foretrace.graph.join import join
from foretrace.graph.one_run import match_and_align
from foretrace.graph.taskgraph import Assumption, EdgeKind, TaskGraph, TaskKind
from foretrace.simulate import noise
from foretrace.simulate.replay import replay, replay_copies
from foretrace.simulate.transfers import Meetings, Price, Transfers, grown_transfers, meetings_of

SAMPLES = 32
MOST_RANKS = 16_384
LEVEL = 0.8


@dataclass(frozen=True, kw_only=True, eq=False)
class Folded:
    """Recorded ranks that stand for many: the joined graph with the transfers of N ranks, and who is whose copy.

    `meets` (m) marks the edges through which copies wait for each other. `part_rank` is the place among the recorded
    ranks of every part of a meeting. `marks` (recorded ranks x (steps + 1)) are the tasks that bound the steps of a
    rank: the start of its first task, then the ends of its marks; −1 where it has none. `holds` and `holds_own` (parts)
    tell the transfers that were over when the step of all ranks, and of their own rank, ended: a step is not over
    before them, even where the host does not wait for them, since the next one needs their result.
    """

    graph: TaskGraph
    recorded: TaskGraph
    meetings: Meetings
    grows: Mask
    transfers: Transfers
    ranks: int
    recorded_ranks: tuple[int, ...]
    meets: Mask
    part_rank: Int64
    marks: Int64
    holds: Mask
    holds_own: Mask

    @property
    def copies(self) -> int:
        """Copies of the recorded ranks, the last one perhaps of some of them only."""
        return -(-self.ranks // len(self.recorded_ranks))

    @property
    def recorded_rank(self) -> Int64:
        """Recorded rank that each of the N ranks is a copy of (N)."""
        return np.array(self.recorded_ranks, dtype=np.int64)[np.arange(self.ranks) % len(self.recorded_ranks)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Times:
    """One run of copies, or several runs of one copy, as columns (K): seconds per step and rank unless said otherwise.

    `bounds` (steps + 1, K) are the first entry of all ranks and the ends of the steps, ns; `own` the steps of a rank
    (recorded ranks, steps, K); `wait` and `transfer` (recorded ranks, K); `arrival` (parts, K), ns.
    """

    bounds: Int64
    own: Float64
    wait: Float64
    transfer: Float64
    arrival: Int64


@dataclass(frozen=True, kw_only=True)
class RankClass:
    """The ranks that are copies of one recorded rank: means per rank and step, seconds."""

    recorded_rank: int
    copies: int
    step_s: float | None  # null where the rank's own steps are not known
    wait_s: float
    transfer_s: float
    last_share: float  # of the collectives of all ranks: how many wait for one of these


@dataclass(frozen=True, kw_only=True, eq=False)
class Scaling:
    """A prediction of N ranks. Times are seconds per step; the columns have one entry per rank (N).

    `recorded_s` is the recorded step of all ranks, `folded_s` the same with the transfers of N ranks, `predicted_s`
    with what more ranks that vary add. `wait_s`, `transfer_s` and `step_s` are those of each rank, `last_share` the
    share of the growing collectives in which it was the last to arrive.
    """

    folded: Folded
    recorded_s: float
    folded_s: float
    predicted_s: float
    low_s: float
    high_s: float
    level: float
    noise: str
    samples: int
    steps: int
    recorded_wait_s: float
    recorded_transfer_s: float
    step_s: Float64
    wait_s: Float64
    transfer_s: Float64
    last_share: Float64
    assumptions: tuple[tuple[Assumption, float, float], ...]  # with the step at its low and at its high end

    @property
    def classes(self) -> tuple[RankClass, ...]:
        """What the copies of each recorded rank have in common."""
        return tuple(self._class(rank) for rank in self.folded.recorded_ranks)

    def _class(self, rank: int) -> RankClass:
        mine = self.folded.recorded_rank == rank
        step_s = float(self.step_s[mine].mean())
        return RankClass(
            recorded_rank=rank,
            copies=int(mine.sum()),
            step_s=None if np.isnan(step_s) else step_s,
            wait_s=float(self.wait_s[mine].mean()),
            transfer_s=float(self.transfer_s[mine].mean()),
            last_share=float(self.last_share[mine].sum()),
        )


def fold(graphs: Sequence[TaskGraph], ranks: int, *, price: Price | None = None) -> Folded:
    """Return the recorded graphs of some ranks as a run of `ranks`.

    `price` says what a collective takes among so many workers; without it only the share of a ring that every link
    carries grows. Raises NotApplicableError where the recordings cannot stand for so many ranks.
    """
    if len(graphs) < 2:
        raise NotApplicableError(
            f"{graphs[0].info.source if graphs else 'the set'} is one rank, which does not tell waiting from "
            "transfer; give the recordings of two or more ranks."
        )
    if ranks < len(graphs):
        raise NotApplicableError(f"{ranks} ranks are fewer than the {len(graphs)} that were recorded; ask for more.")
    if ranks > MOST_RANKS:
        raise NotApplicableError(f"{ranks:,} ranks are more than can be sampled; ask for at most {MOST_RANKS:,}.")
    matching, clock = match_and_align([collective_calls(graph) for graph in graphs])
    joined = join(graphs, matching=matching, clock=clock)
    if joined.n_steps < 1:
        raise NotApplicableError("the ranks share no step; record whole steps of all ranks, e.g. with ProfilerStep.")
    found = meetings_of(joined, matching, clock)
    grows = np.array([each.recorded == len(graphs) and not each.paired for each in found.meetings], dtype=np.bool_)
    if not grows.any():
        raise NotApplicableError(
            f"no collective joins all {len(graphs)} recorded ranks, so {ranks:,} of them would not be one run; give "
            "the ranks of one data-parallel group."
        )
    if ranks % len(graphs) and not grows.all():
        raise NotApplicableError(
            f"some collectives do not join all {len(graphs)} recorded ranks, which cannot be copied in part; ask for "
            f"a multiple of {len(graphs)} ranks, as {ranks // len(graphs) * len(graphs)}."
        )
    transfers = grown_transfers(joined, found, grows, ranks, price)
    recorded_ranks = tuple(sorted({lane.rank for graph in graphs for lane in graph.lanes}))
    marks = _own_marks(joined, recorded_ranks)
    part_rank = np.searchsorted(recorded_ranks, joined.rank[found.arrival])
    holds, holds_own = _within_step(joined, found, part_rank, marks)
    return Folded(
        graph=joined.with_columns(dur=transfers.dur),
        recorded=joined,
        meetings=found,
        grows=grows,
        transfers=transfers,
        ranks=ranks,
        recorded_ranks=recorded_ranks,
        meets=(found.edge >= 0) & grows[found.edge],
        part_rank=part_rank,
        marks=marks,
        holds=holds,
        holds_own=holds_own,
    )


def _within_step(graph: TaskGraph, found: Meetings, rank: Int64, marks: Int64) -> tuple[Mask, Mask]:
    """Return transfers (parts) that end within the recorded step of all ranks, and within that of their own rank."""
    _, end = replay(graph)
    step, over = graph.step[found.transfer], end[found.transfer]
    inside = np.greater_equal(step, 0)
    own = marks[rank, np.maximum(step, 0) + 1]
    of_all = inside & np.less_equal(over, end[graph.marks[np.maximum(step, 0) + 1]])
    return of_all, inside & (own >= 0) & np.less_equal(over, end[np.maximum(own, 0)])


def _own_marks(graph: TaskGraph, ranks: tuple[int, ...]) -> Int64:
    dst, rank = graph.dst, graph.rank
    marks = np.full((len(ranks), graph.n_steps + 1), -1, dtype=np.int64)
    into = np.flatnonzero((graph.edge_kind == EdgeKind.THREAD) & np.isin(dst, graph.marks[1:]))
    place = {int(row): i for i, row in enumerate(graph.marks.tolist())}
    index = {number: i for i, number in enumerate(ranks)}
    for edge in into.tolist():
        source = int(graph.src[edge])
        marks[index[int(rank[source])], place[int(dst[edge])]] = source
    for i, number in enumerate(ranks):
        mine = np.flatnonzero((rank == number) & (graph.step == 0))
        if len(mine):
            marks[i, 0] = mine[np.argmin(graph.recorded[mine])]
    marks[(marks < 0).any(axis=1)] = -1
    return marks


def run(folded: Folded, graph: TaskGraph, group: Int32, scale: Float64, *, meet: bool) -> Times:
    """Return times of copies (columns of `scale`) that meet, or, without `meet`, of as many runs of one copy."""
    found, marks = folded.meetings, folded.marks
    known = marks >= 0
    rows = np.concatenate([graph.marks, found.arrival, found.transfer, marks[known]]).astype(np.int32)
    meets = folded.meets if meet else np.zeros_like(folded.meets)
    ends = replay_copies(graph, meets, group, scale, rows)
    bounds, arrival, done, own_ends = np.split(
        ends, np.cumsum([len(graph.marks), len(found.arrival), len(found.transfer)])
    )
    took = _durations(graph, group, scale, found.transfer)
    n_ranks, n_steps, width = len(folded.recorded_ranks), graph.n_steps, scale.shape[1]
    own = np.full((*marks.shape, width), np.nan)
    own[known] = own_ends
    number, step = folded.part_rank, graph.step[found.transfer]
    np.maximum.at(bounds, step[folded.holds] + 1, done[folded.holds])
    mine = folded.holds_own
    np.maximum.at(own, (number[mine], step[mine] + 1), done[mine])
    first = marks[:, 0]
    own[:, 0] -= np.where((first >= 0)[:, None], _durations(graph, group, scale, np.maximum(first, 0)), 0)
    inside = step >= 0
    wait, transfer = np.zeros((n_ranks, width)), np.zeros((n_ranks, width))
    np.add.at(wait, number[inside], (done - took - arrival)[inside])
    np.add.at(transfer, number[inside], took[inside])
    return Times(
        bounds=bounds,
        own=np.diff(own, axis=1) / 1e9,
        wait=wait / n_steps / 1e9,
        transfer=transfer / n_steps / 1e9,
        arrival=arrival,
    )


def _durations(graph: TaskGraph, group: Int32, scale: Float64, rows: Int64) -> Int64:
    """Return durations of some tasks in every column, ns."""
    label = group[rows]
    factor = np.where((label >= 0)[:, None], scale[np.maximum(label, 0)], 1.0)
    return np.rint(graph.dur[rows][:, None] * factor).astype(np.int64)


def _alone(folded: Folded, graph: TaskGraph) -> Times:
    """Return one run of the recorded ranks, without noise."""
    return run(folded, graph, np.full(len(graph), -1, dtype=np.int32), np.ones((1, 1)), meet=False)


def _step_s(bounds: Int64) -> float:
    """Return median step of one run of copies: from the first entry of all, or the last end, to the last end."""
    ends = bounds.max(axis=1)
    ends[0] = bounds[0].min()
    return float(np.median(np.diff(ends))) / 1e9


def scale(
    graphs: Sequence[TaskGraph],
    ranks: int,
    *,
    price: Price | None = None,
    samples: int = SAMPLES,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> Scaling:
    """Predict a run of `ranks` from the recorded graphs of some; see this module. Raises as `fold` does.

    `samples` is how many times the noise is drawn, 0 for ranks that do not vary.
    """
    folded = fold(graphs, ranks, price=price)
    before, after = _alone(folded, folded.recorded), _alone(folded, folded.graph)
    folded_s = _step_s(after.bounds)
    member = np.arange(ranks) % len(folded.recorded_ranks), np.arange(ranks) // len(folded.recorded_ranks)
    step, wait, transfer = (part[member[0], 0] for part in (_median(after.own), after.wait, after.transfer))
    growth, low_noise, high_noise, how = 0.0, 0.0, 0.0, "ranks that do not vary"
    late = _last(folded, np.repeat(after.arrival, folded.copies, axis=1))
    if samples:
        drawn = _Draws(folded, seed)
        alone = run(folded, folded.graph, drawn.group, drawn.first_columns(samples), meet=False)
        base = np.array([_step_s(alone.bounds[:, [s]]) for s in range(samples)])
        steps, late = np.empty(samples), np.zeros(late.shape)
        more = np.zeros((3, ranks))
        for s in range(samples):
            many = run(folded, folded.graph, drawn.group, drawn.columns(s, folded.copies), meet=True)
            steps[s] = _step_s(many.bounds)
            late += _last(folded, many.arrival) / samples
            for i, (grown, was) in enumerate(
                ((_median(many.own), _median(alone.own)), (many.wait, alone.wait), (many.transfer, alone.transfer))
            ):
                more[i] += (grown[member] - was[member[0], s]) / samples
            if progress is not None:
                progress((s + 1) / samples)
        growth = float(np.median(steps - base))
        low, middle, high = np.quantile(steps, [(1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2]).tolist()
        low_noise, high_noise, how = middle - low, high - middle, drawn.how
        step, wait, transfer = step + more[0], wait + more[1], transfer + more[2]
    predicted = folded_s + growth
    at_low, at_high = (
        _step_s(_alone(folded, folded.recorded.with_columns(dur=dur)).bounds) - folded_s
        for dur in (folded.transfers.low, folded.transfers.high)
    )
    return Scaling(
        folded=folded,
        recorded_s=_step_s(before.bounds),
        folded_s=folded_s,
        predicted_s=predicted,
        low_s=max(predicted - hypot(low_noise, min(at_low, 0.0), growth), 0.0),
        high_s=predicted + hypot(high_noise, max(at_high, 0.0)),
        level=LEVEL,
        noise=how,
        samples=samples,
        steps=folded.graph.n_steps,
        recorded_wait_s=float(before.wait.mean()),
        recorded_transfer_s=float(before.transfer.mean()),
        step_s=step,
        wait_s=wait,
        transfer_s=transfer,
        last_share=late[member],
        assumptions=tuple(_weighed(folded, predicted, growth, at_low, at_high)),
    )


def _median(own: Float64) -> Float64:
    """Return median step of every rank and column; NaN where a rank has no marks."""
    return np.asarray(np.median(own, axis=1))


def _last(folded: Folded, arrival: Int64) -> Float64:
    """Return share of the growing collectives in which each rank (recorded ranks x copies) is the last to arrive."""
    found, n_ranks = folded.meetings, len(folded.recorded_ranks)
    here = np.flatnonzero(folded.grows[found.which])
    number = folded.part_rank[here]
    which, count = found.which[here], len(found.meetings)
    exists = np.arange(folded.copies)[None, :] * n_ranks + number[:, None] < folded.ranks
    times = np.where(exists, arrival[here], np.iinfo(np.int64).min)
    latest = np.full(count, np.iinfo(np.int64).min)
    np.maximum.at(latest, which, times.max(axis=1))
    last = times == latest[which][:, None]
    ties = np.bincount(which, weights=last.sum(axis=1), minlength=count)
    share = np.zeros((n_ranks, arrival.shape[1]))
    np.add.at(share, number, last / ties[which][:, None])
    return share / max(int(folded.grows.sum()), 1)


class _Draws:
    """Noise of ranks: every rank, step and class of work has a factor of its own, transfers have one per step."""

    def __init__(self, folded: Folded, seed: int) -> None:
        graph = folded.graph
        self._seed, self._ranks, self._steps = seed, len(folded.recorded_ranks), graph.n_steps
        self._target = folded.ranks
        classes = noise.noise_classes(graph)
        self._classes = len(noise.PRIOR_CV)
        number = np.searchsorted(folded.recorded_ranks, graph.rank)
        inside = (graph.step >= 0) & (graph.step < self._steps) & (classes >= 0) & (graph.rank >= 0)
        shared = inside & (graph.kind == TaskKind.COLLECTIVE)
        of_rank = (number * self._steps + graph.step) * self._classes + classes
        of_all = self._ranks * self._steps * self._classes + graph.step * self._classes + classes
        self.group = np.where(shared, of_all, np.where(inside, of_rank, -1)).astype(np.int32)
        total = np.zeros((self._ranks + 1) * self._steps * self._classes)
        np.add.at(total, self.group[inside], graph.dur[inside])
        self._total = total.reshape(self._ranks + 1, self._steps, self._classes)
        self.how = ""

    def columns(self, sample: int, copies: int) -> Float64:
        """Return factors of one sample (groups x copies); those of copy 0 are the same for any number of copies."""
        parts = []
        for i in range(self._ranks + 1):
            width = copies if i < self._ranks else 1
            first, _, how = noise.factors(self._total[i], np.random.default_rng([self._seed, sample, i]), 1)
            self.how = self.how or how
            more = np.random.default_rng([self._seed, sample, i, 1])
            others = noise.factors(self._total[i], more, width - 1)[0] if width > 1 else first[:, :0]
            drawn = np.concatenate([first, others], axis=1)
            if i + (width - 1) * self._ranks >= self._target:  # not in the last copy: there it repeats copy 0
                drawn[:, -1] = drawn[:, 0]
            parts.append(drawn if i < self._ranks else np.repeat(drawn, copies, axis=1))
        return np.concatenate(parts)

    def first_columns(self, samples: int) -> Float64:
        """Return factors of copy 0 in every sample (groups x samples)."""
        return np.concatenate([self.columns(sample, 1) for sample in range(samples)], axis=1)


def _weighed(
    folded: Folded, predicted: float, growth: float, at_low: float, at_high: float
) -> list[tuple[Assumption, float, float]]:
    """Return everything assumed, with the step at either end of what each one may be."""

    def assumed(name: str, value: float, unit: str, why: str, low: float | None = None) -> Assumption:
        least = value if low is None else low
        return Assumption(technique="scale", name=name, value=value, low=least, high=value, unit=unit, why=why)

    k, growing = len(folded.recorded_ranks), int(folded.grows.sum())
    says: list[tuple[Assumption, float, float]] = []
    if growth:
        why = "every rank draws its own noise; where a cause slows all ranks together, more of them wait no longer"
        both = (predicted - growth, predicted)
        says.append((assumed("ranks that vary independently", growth * 1e3, "ms", why, 0.0), *both))
    same, spread = (predicted, predicted), (predicted + at_low, predicted + at_high)
    for each in folded.transfers.assumptions:
        says.append((each, *(spread if each.low < each.high else same)))
    why = f"rank r does what recorded rank r mod {k} did: as much work and as many bytes each"
    says.append((assumed("ranks alike", float(folded.ranks), "ranks", why), *same))
    if growing < len(folded.grows):
        why = "groups smaller than the recording keep their size, and there are more of them"
        says.append(
            (assumed("collectives that do not grow", float(len(folded.grows) - growing), "collectives", why), *same)
        )
    return says
