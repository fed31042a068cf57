"""Clocks of several ranks: how far each one is ahead, from what collectives prove and what they make likely.

*Proof*: nobody leaves a collective before the last rank has entered it, and nothing is received before it was sent.
Each bounds the difference of two clocks. *Likelihood*: a collective ends at nearly the same instant everywhere, so the
offsets are those with the least spread of the ends (the variance objective of dPRO, MLSys 2022, with
medians in place of means: one disturbed rank or collective must not move a clock). Ranks that say themselves that they
share a clock get one offset if their collectives agree.

A clock reads `true + offset + drift · (true − t0)`, with `t0` the beginning of the recording of the set.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.graph.matching import Match, Matching

ROOTED = ("broadcast", "reduce", "gather", "scatter")  # some ranks may leave before others enter
ONE_WAY = ("gloo",)  # back ends whose sender does not wait for its receiver

_ROUNDS = 50
_MOST_SHARED = 0.5  # ranks that share so many of the most shared collectives are placed together
_LEAST_FOR_DRIFT = 8  # collectives
LEAST_SPAN_NS = 1_000_000_000
MOST_DRIFT = 1e-3  # seconds per second: no clock of a working machine is that far off
_SIGNIFICANT = 6.0  # standard errors
LEAST_TOLERANCE_NS = 50_000
_SHARED_CLOCK_NS = 1_000.0  # every process reads it through a calibration of its own


@dataclass(frozen=True, kw_only=True, eq=False)
class ClockOffsets:
    """How far the clock of every rank (R, in the order of `ranks`) is ahead of the first rank's, ns.

    `offset_ns` holds at time 0 of the set; `drift` is in seconds per second. `known` is false where nothing connects
    a rank with the first one: its offset is then taken as 0. `uncertainty_ns` is the standard error of the offset,
    `low_ns` and `high_ns` bound what the collectives allow (infinite where they do not).
    """

    ranks: tuple[int, ...]
    offset_ns: Float64
    drift: Float64
    known: Mask
    uncertainty_ns: Float64
    low_ns: Float64
    high_ns: Float64
    notes: tuple[str, ...] = ()

    def aligned(self, rank: int, times: Int64) -> Int64:
        """Return times (ns) of the rank with this index on the common clock."""
        ahead = self.offset_ns[rank]
        if self.drift[rank]:
            ahead = ahead + self.drift[rank] * (times - ahead)
        aligned: Int64 = times - np.rint(ahead).astype(np.int64)
        return aligned

    @property
    def worst_ns(self) -> float | None:
        """The largest uncertainty among the ranks whose offset is known; None where there is only one."""
        return float(self.uncertainty_ns[self.known].max()) if self.known.sum() > 1 else None


def no_clock(ranks: Sequence[int]) -> ClockOffsets:
    """Return clocks taken as they are."""
    count = len(ranks)
    known = np.zeros(count, dtype=np.bool_)
    known[:1] = True
    return ClockOffsets(
        ranks=tuple(ranks), offset_ns=np.zeros(count), drift=np.zeros(count), known=known,
        uncertainty_ns=np.zeros(count), low_ns=np.full(count, -np.inf), high_ns=np.full(count, np.inf),
    )  # fmt: skip


def align(found: Matching) -> ClockOffsets:
    """Return offsets and drifts of the clocks of a matched set, the first rank's being 0."""
    ranks = found.ranks
    clock = no_clock(ranks)
    if len(ranks) < 2:
        return clock
    which, rank, _ = found.flat
    ends = found.ends.astype(np.float64)
    use = _even(found)
    offset, component = _offsets(use[which], which, rank, ends, len(ranks))
    drift = _drifts(use[which], which, rank, ends, offset, component)
    if drift.any():
        ends = ends - drift[rank] * (ends - offset[rank])
        offset, component = _offsets(use[which], which, rank, ends, len(ranks))
    uncertainty = _uncertainty(use[which], which, rank, ends, offset)
    high = _bounds(found, drift)
    notes: list[str] = []
    offset, known, uncertainty = _by_host(found, offset, component, uncertainty, high, drift, notes)
    offset = _within(offset, high)
    return ClockOffsets(
        ranks=ranks,
        offset_ns=np.where(known, offset - offset[0], offset),
        drift=drift,
        known=known,
        uncertainty_ns=uncertainty,
        low_ns=-high[0],
        high_ns=high[:, 0],
        notes=tuple(notes),
    )


def _even(found: Matching) -> Mask:
    """Return matches whose members end together; of rooted ones only where there is nothing else."""
    even = np.array([not is_rooted(m) for m in found.matches], dtype=np.bool_)
    return even if even.any() else np.ones_like(even)


def rooted(kind: str, channel: str) -> bool:
    """Return whether a rank may leave this collective before all others have entered it."""
    return kind in ROOTED or (kind in ("send", "recv", "send_recv") and channel in ONE_WAY)


def _offsets(use: Mask, which: Int64, rank: Int64, ends: Float64, count: int) -> tuple[Float64, Int64]:
    """Return offsets with the least spread of ends, and for every rank which others it is connected with (a number).

    Ranks that no collective connects have offsets of their own zero: that of the first one among them.
    """
    which, rank, ends = which[use], rank[use], ends[use]
    matches = int(which.max(initial=-1)) + 1
    offset, component = np.zeros(count), np.full(count, -1, dtype=np.int64)
    # First guess: from the ranks that are placed to those that share most collectives with them, and so on.
    for first in range(count):
        if component[first] >= 0:
            continue
        component[first] = first
        while True:
            placed = component[rank] == first
            middle = _medians(which[placed], ends[placed] - offset[rank[placed]], matches)
            reach = (component[rank] < 0) & ~np.isnan(middle[which])
            if not reach.any():
                break
            shared = np.bincount(rank[reach], minlength=count)
            new = shared >= _MOST_SHARED * shared.max()
            mine = reach & new[rank]
            offset[new] = _medians(rank[mine], ends[mine] - middle[which[mine]], count)[new]
            component[new] = first
    for _ in range(_ROUNDS):
        step = _group_median(rank, ends - offset[rank] - _centres(which, ends - offset[rank]), count)
        offset += step
        if np.abs(step).max(initial=0.0) < 1.0:
            break
    return offset - offset[component], component


def _medians(key: Int64, values: Float64, count: int) -> Float64:
    """Return the median of the values of every key (0 .. count − 1), NaN for keys without values."""
    order = np.lexsort((values, key))
    size = np.bincount(key, minlength=count)
    first = np.cumsum(size) - size
    some = size > 0
    ordered, result = values[order], np.full(count, np.nan)
    low, high = first[some] + (size[some] - 1) // 2, first[some] + size[some] // 2
    result[some] = (ordered[low] + ordered[high]) / 2
    return result


def _centres(key: Int64, values: Float64) -> Float64:
    """Return for every value the median of those with its key."""
    return _medians(key, values, int(key.max(initial=-1)) + 1)[key]


def _group_median(key: Int64, values: Float64, count: int) -> Float64:
    """Return the median by key (0 .. count − 1), 0 for keys without values."""
    return np.nan_to_num(_medians(key, values, count))


def _drifts(use: Mask, which: Int64, rank: Int64, ends: Float64, offset: Float64, component: Int64) -> Float64:
    """Pace of every rank's clock against the first one's (Theil-Sen), 0 where it does not differ for certain."""
    count = len(offset)
    drift = np.zeros(count)
    which, rank, ends = which[use], rank[use], ends[use]
    if not len(ends) or np.ptp(ends - offset[rank]) < LEAST_SPAN_NS:
        return drift
    matches = int(which.max()) + 1
    placed = component == np.arange(count)  # the first rank of each component sets its pace
    while True:
        mine = placed[rank]
        true = ends - offset[rank] - drift[rank] * (ends - offset[rank])
        middle = _medians(which[mine], true[mine], matches)
        reach = ~mine & ~np.isnan(middle[which])
        if not reach.any():
            return drift
        shared = np.bincount(rank[reach], minlength=count)
        new = shared >= _MOST_SHARED * shared.max()
        for each in np.flatnonzero(new).tolist():
            at = reach & (rank == each)
            drift[each] = _certain_slope(middle[which[at]], true[at] - middle[which[at]])
        placed |= new


def _certain_slope(time: Float64, value: Float64) -> float:
    """Return the slope of values over time, 0 where it is not beyond doubt."""
    if len(time) < _LEAST_FOR_DRIFT or np.ptp(time) < LEAST_SPAN_NS:
        return 0.0
    slope = _slope(time, value)
    rest = value - np.median(value) - slope * (time - np.median(time))
    error = 1.4826 * np.median(np.abs(rest)) / (np.std(time) * np.sqrt(len(time)))
    return slope if _SIGNIFICANT * error < abs(slope) < MOST_DRIFT else 0.0


def _slope(time: Float64, value: Float64) -> float:
    """Return Theil-Sen: the median of the slopes between points half the span apart, which is cheap and as robust."""
    order = np.argsort(time)
    time, value = time[order], value[order]
    half = len(time) // 2
    run = time[-half:] - time[:half]
    good = run > 0
    return float(np.median((value[-half:] - value[:half])[good] / run[good])) if good.any() else 0.0


def _uncertainty(use: Mask, which: Int64, rank: Int64, ends: Float64, offset: Float64) -> Float64:
    """Return standard error of every offset: of a median, from the spread of the ends around their centres, ns."""
    which, rank, ends = which[use], rank[use], ends[use]
    rest = np.abs(ends - offset[rank] - _centres(which, ends - offset[rank])) if len(ends) else ends
    spread = _group_median(rank, rest, len(offset))
    count = np.maximum(np.bincount(rank, minlength=len(offset)), 1)
    # The stamps are whole microseconds in older recordings: below half a tick nothing is known.
    tick = 1_000 if len(ends) and not np.any(ends % 1_000) else 1
    error = np.maximum(1.2533 * 1.4826 * spread / np.sqrt(count), tick / 2)
    return np.hypot(error, error[0]) if len(error) else error


def _bounds(found: Matching, drift: Float64) -> Float64:
    """Return the most by which clock r can be ahead of clock s (R x R, ns); infinite where nothing bounds it."""
    count = len(found.ranks)
    high = np.full((count, count), np.inf)
    np.fill_diagonal(high, 0.0)
    which, rank, _ = found.flat
    starts, ends = found.starts.astype(np.float64), found.ends.astype(np.float64)
    if drift.any():
        starts, ends = starts - drift[rank] * starts, ends - drift[rank] * ends
    first = np.searchsorted(which, np.arange(len(found.matches) + 1))
    for i, each in enumerate(found.matches):
        part = slice(int(first[i]), int(first[i + 1]))
        r, begin, end = rank[part], starts[part], ends[part]
        if is_rooted(each):
            if each.what.peers:  # the receiver ends after the sender began
                a = [k for k, m in enumerate(each.members) if found.ranks[m.rank] == each.what.peers[0]]
                b = [k for k, m in enumerate(each.members) if found.ranks[m.rank] == each.what.peers[1]]
                if a and b:
                    s, d = r[a[0]], r[b[0]]
                    high[s, d] = min(high[s, d], end[b[0]] - begin[a[0]])
            continue
        # end[r] − offset[r] >= start[s] − offset[s]
        bound = end[:, None] - begin[None, :]
        high[np.ix_(r, r)] = np.minimum(high[np.ix_(r, r)], bound)
    np.fill_diagonal(high, 0.0)
    return high


def _within(offset: Float64, high: Float64) -> Float64:
    """Return offsets moved as little as possible to respect the bounds, where the bounds agree with each other."""
    offset = offset.copy()
    for _ in range(20 * len(offset)):
        over = offset[:, None] - offset[None, :] - high
        r, s = np.unravel_index(int(np.argmax(over)), over.shape)
        if over[r, s] <= 0.5 or over[r, s] > LEAST_TOLERANCE_NS:
            break
        offset[r] -= over[r, s] / 2
        offset[s] += over[r, s] / 2
    return offset


def _by_host(
    found: Matching,
    offset: Float64,
    component: Int64,
    uncertainty: Float64,
    high: Float64,
    drift: Float64,
    notes: list[str],
) -> tuple[Float64, Mask, Float64]:
    """Return one offset for ranks that share a clock unless collectives deny it, and whose offset is known."""
    hosts: dict[str, list[int]] = defaultdict(list)
    for i, each in enumerate(found.calls):
        if each.host:
            hosts[each.host].append(i)
    offset, component, uncertainty = offset.copy(), component.copy(), uncertainty.copy()
    for members in hosts.values():
        for i in members[1:]:  # a shared clock connects what no collective does
            if component[i] != component[members[0]]:
                mates = component == component[i]
                offset[mates] += offset[members[0]] - offset[i]
                component[mates] = component[members[0]]
        if len(members) < 2:
            continue
        # Threads that wake up late move ends by milliseconds; only what cannot be is a reason to disbelieve a clock.
        denied = high[np.ix_(members, members)] < -LEAST_TOLERANCE_NS
        if drift[members].any() or denied.any():
            most = denied.sum(axis=0) + denied.sum(axis=1)
            odd = [
                found.ranks[i] for i, each in zip(members, most.tolist(), strict=True) if each == most.max() or drift[i]
            ]
            notes.append(
                f"ranks {', '.join(str(found.ranks[i]) for i in members)} say that they share a clock, but their "
                f"collectives put rank {', '.join(map(str, odd))} elsewhere; the collectives are believed."
            )
            continue
        offset[members] = offset[0] if 0 in members else float(np.median(offset[members]))
        uncertainty[members] = _SHARED_CLOCK_NS
    return offset, component == component[0], uncertainty


def is_rooted(each: Match) -> bool:
    return rooted(each.what.kind, each.what.channel)
