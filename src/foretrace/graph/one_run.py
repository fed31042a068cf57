"""Whether recordings are of one run, and which of their collectives are one once their clocks are together.

Matching (`matching.py`) says what order and numbers make certain, `alignment.py` puts clocks together from that. Here
each helps the other: what order leaves over is matched by time, what the clocks refute is taken back, and what
cannot be one run is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foretrace.arrays import Float64, Mask
from foretrace.errors import GraphError
from foretrace.graph.alignment import LEAST_SPAN_NS, LEAST_TOLERANCE_NS, MOST_DRIFT, ClockOffsets, align, is_rooted
from foretrace.graph.collectives import CollectiveCalls
from foretrace.graph.matching import Matching, Member, listed, match, with_matches, without

_LEAST_FOR_GROUPS = 4  # collectives
_MOST_FOR_GROUPS = 64
_UNALIGNED_NS = 1_000_000  # what clocks may differ by where nothing has aligned them
_FAR_NS = 3_600 * 10**9


def match_and_align(calls: Sequence[CollectiveCalls]) -> tuple[Matching, ClockOffsets]:
    """Match the collectives of a set of ranks and align their clocks.

    Calls that order alone cannot match are matched by time once the certain ones have aligned the clocks; a match that
    the aligned clocks refute is taken back. Raises GraphError where the recordings cannot be of one job.
    """
    _near(calls)
    found = _by_group(match(calls))
    clock = align(found)
    if more := _by_time(found, clock):
        found = with_matches(found, more)
        clock = align(found)
    tried = len(found.matches)
    refuted = _too_early(found, clock) > max(LEAST_TOLERANCE_NS, 6 * (clock.worst_ns or 0.0))
    if refuted.any():
        if refuted.sum() * 2 > tried:
            raise GraphError(_not_one_job(found, clock, refuted))
        found = without(found, refuted, (_refutation(found, clock, i) for i in np.flatnonzero(refuted).tolist()))
        clock = align(found)
    if not found.matches and _should_match(calls):
        raise GraphError(_nothing_in_common(calls))
    return found, clock


def _near(calls: Sequence[CollectiveCalls]) -> None:
    """Raise GraphError where two ranks were recorded hours apart: no clock is that wrong."""
    some = [each for each in calls if len(each)]
    if len(some) < 2:
        return
    early = min(some, key=lambda each: int(each.end.max()))
    late = max(some, key=lambda each: int(each.start.min()))
    apart = int(late.start.min()) - int(early.end.max())
    if apart > _FAR_NS:
        hours = apart / _FAR_NS
        ago = f"{hours / 24:,.0f} days" if hours >= 48 else f"{hours:.1f} hours"
        raise GraphError(
            f"rank {early.rank} was recorded {ago} before rank {late.rank}: these are not ranks "
            "of one run; give the ranks of one job, or choose one with `rank=`."
        )


def _by_group(found: Matching) -> Matching:
    """Return matches of a channel cut into groups of ranks that end together, where groups are not recorded.

    Ranks of one group differ by their clocks alone, always the same; ranks of two groups differ by something else
    every time.
    """
    alike: dict[tuple[str, object], list[int]] = defaultdict(list)
    for i, each in enumerate(found.matches):
        if each.what.key[0] == "channel" and each.complete and len(each.members) > 2 and not is_rooted(each):
            alike[each.what.channel, each.what.signature].append(i)
    parts: dict[int, list[list[int]]] = {}
    notes = []
    for (channel, _), matches in alike.items():
        sets = {tuple(m.rank for m in found.matches[i].members) for i in matches}
        if len(matches) < _LEAST_FOR_GROUPS or len(sets) > 1:
            continue
        ranks = next(iter(sets))
        chosen = matches[:: -(-len(matches) // _MOST_FOR_GROUPS)]
        ends = np.array([[found.calls[m.rank].end[m.call] for m in found.matches[i].members] for i in chosen])
        starts = np.array([[found.calls[m.rank].start[m.call] for m in found.matches[i].members] for i in chosen])
        apart = (ends[:, :, None] - ends[:, None, :]).astype(np.float64)
        time, half = (ends[:, 0] - ends[0, 0]).astype(np.float64), len(ends) // 2
        if time[-1] >= LEAST_SPAN_NS:  # clocks may drift, too
            pace = np.median((apart[-half:] - apart[:half]) / (time[-half:] - time[:half])[:, None, None], axis=0)
            apart -= np.clip(pace, -MOST_DRIFT, MOST_DRIFT) * time[:, None, None]
        spread = np.median(np.abs(apart - np.median(apart, axis=0)), axis=0)
        groups = _components(spread <= max(LEAST_TOLERANCE_NS, 0.25 * float(np.median(ends - starts))))
        if len(groups) > 1 and any(len(group) > 1 for group in groups):
            parts |= dict.fromkeys(matches, groups)
            told = "; ".join(listed(sorted(found.ranks[ranks[k]] for k in group)) for group in groups)
            kind = found.matches[matches[0]].what.kind
            notes.append(f"{kind} of {channel} is of several groups, distinguished by their ends: ranks {told}.")
    if not parts:
        return found
    cut = []
    for i, each in enumerate(found.matches):
        for group in parts.get(i, [list(range(len(each.members)))]):
            members = tuple(each.members[k] for k in group)
            if len(members) > 1:
                size = each.size if i not in parts else len(members)
                cut.append(replace(each, members=members, present=min(each.present, size), size=size))
    return replace(found, matches=tuple(cut), missing=(*found.missing, *dict.fromkeys(notes)))


def _components(joined: Mask) -> list[list[int]]:
    """Return groups of indices that the symmetric relation `joined` (k x k) connects."""
    label = np.arange(len(joined))
    for _ in range(len(joined)):
        label = np.where(joined, label[None, :], len(joined)).min(axis=1)
    return [np.flatnonzero(label == each).tolist() for each in np.unique(label)]


def _by_time(found: Matching, clock: ClockOffsets) -> list[list[Member]]:
    """Return calls without a partner that overlap and end together on the aligned clocks."""
    pools: dict[object, list[tuple[int, int, int, int]]] = defaultdict(list)
    for i, (calls, rows) in enumerate(zip(found.calls, found.left, strict=True)):
        start, end = clock.aligned(i, calls.start[rows]), clock.aligned(i, calls.end[rows])
        for row, a, b in zip(rows.tolist(), start.tolist(), end.tolist(), strict=True):
            if calls.sequence[row] < 0:
                pools[calls.what[row].key, calls.what[row].signature].append((b, a, i, row))
    result = []
    slop = 0 if clock.known.all() else _UNALIGNED_NS
    for pool in pools.values():
        group: list[tuple[int, int, int, int]] = []
        for each in sorted(pool):
            if group and not _together(group, each, slop):
                result.append(group)
                group = []
            group.append(each)
        result.append(group)
    return [[Member(rank=i, call=row) for _, _, i, row in group] for group in result if len(group) > 1]


def _together(group: list[tuple[int, int, int, int]], new: tuple[int, int, int, int], slop: int) -> bool:
    end, start, rank, _ = new
    if rank in (other[2] for other in group):
        return False
    earliest = group[0][0]
    latest = max(start, *(other[1] for other in group))
    longest = max(end - start, *(b - a for b, a, _, _ in group))
    return latest <= earliest + LEAST_TOLERANCE_NS + slop and end - earliest <= longest // 4 + LEAST_TOLERANCE_NS


def _too_early(found: Matching, clock: ClockOffsets) -> Float64:
    """Return by how much the first end of every match comes before its last start (ns), negative where it does not."""
    which, rank, _ = found.flat
    starts, ends = found.starts.copy(), found.ends.copy()  # theirs are kept
    for i in range(len(found.ranks)):
        mine = rank == i
        starts[mine], ends[mine] = clock.aligned(i, starts[mine]), clock.aligned(i, ends[mine])
    count = len(found.matches)
    last, first = np.full(count, np.iinfo(np.int64).min), np.full(count, np.iinfo(np.int64).max)
    np.maximum.at(last, which, starts)
    np.minimum.at(first, which, ends)
    even = np.array([not is_rooted(m) for m in found.matches], dtype=np.bool_)
    return np.where(even, last - first, -1).astype(np.float64)


def _refutation(found: Matching, clock: ClockOffsets, index: int) -> str:
    each = found.matches[index]
    ends = {m.rank: clock.aligned(m.rank, found.calls[m.rank].end[[m.call]])[0] for m in each.members}
    starts = {m.rank: clock.aligned(m.rank, found.calls[m.rank].start[[m.call]])[0] for m in each.members}
    early, late = min(ends, key=lambda i: ends[i]), max(starts, key=lambda i: starts[i])
    apart = (starts[late] - ends[early]) / 1e6
    return (
        f"{each.what.kind} of {each.what.group_name}: rank {found.ranks[early]} leaves it {apart:.3f} ms before rank "
        f"{found.ranks[late]} enters, so these are not one (at {ends[early] / 1e6:.3f} ms)."
    )


def _not_one_job(found: Matching, clock: ClockOffsets, refuted: Mask) -> str:
    example = _refutation(found, clock, int(np.argmax(refuted)))
    return (
        f"the collectives of these ranks do not fit together ({int(refuted.sum())} of {len(refuted)}), as in "
        f"{example.rstrip('.')}: these are recordings of different jobs or steps; give the ranks of one run, or choose "
        "one with `rank=`."
    )


def _should_match(calls: Sequence[CollectiveCalls]) -> bool:
    """Return whether two ranks share a group or a channel, or cannot know."""
    some = [each for each in calls if len(each)]
    if len(some) < 2:
        return False
    keys = [set(each.groups) for each in some]
    shared = any(a & b for i, a in enumerate(keys) for b in keys[:i])
    grouped = all(key[0] != "channel" for each in keys for key in each)
    ranks = tuple(each.rank for each in calls)
    expected = any(what.expects_partner(ranks) for each in some for what in each.described)
    return shared or expected or not grouped


def _nothing_in_common(calls: Sequence[CollectiveCalls]) -> str:
    told = "; ".join(
        f"rank {each.rank} runs {_counts(each)}"
        + (f" in the steps {each.steps[0]}-{each.steps[-1]}" if each.steps else "")
        for each in [c for c in calls if len(c)][:4]
    )
    return (
        f"the ranks have no collective in common ({told}): these are recordings of different jobs or steps; give the "
        "ranks of one run, or choose one with `rank=`."
    )


def _counts(calls: CollectiveCalls) -> str:
    found: dict[str, int] = defaultdict(int)
    for what in calls.what:
        found[what.kind] += 1
    return ", ".join(f"{count} {kind}" for kind, count in sorted(found.items(), key=lambda item: -item[1])[:3])
