"""What cannot be true in a recording of one rank: each check finds the rows, the caller refuses or drops them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrace.trace.trace import Category, Int64, Mask

DAY_NS = 86_400 * 10**9
# A recording in which nothing at all runs for an hour has a jumping clock: even a sleep is inside some event.
MAX_SILENCE_NS = 3_600 * 10**9
# An event may not outlast the profiler's own span; a minute is left for clocks that differ.
SPAN_SLACK_NS = 60 * 10**9
# Device and host clocks of one recording agree to some microseconds; work cannot start before its launch.
MAX_SKEW_NS = 100 * 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Impossible:
    """Rows that break a law, and the sentence that says so ("<file> <what>")."""

    rows: Mask
    what: str
    reason: str  # for `Dropped`


def outlasting(start: Int64, dur: Int64, span: tuple[int, int] | None) -> Impossible | None:
    """Events longer than a day, or than the recording (`span`) where the profiler noted it."""
    limit = DAY_NS if span is None else min(DAY_NS, span[1] - span[0] + SPAN_SLACK_NS)
    rows = dur > limit
    if not rows.any():
        return None
    worst = int(dur[rows].max())
    bound = "a day" if limit == DAY_NS else f"the recording ({(limit - SPAN_SLACK_NS) / 1e9:.3g} s)"
    return Impossible(
        rows=rows,
        what=f"has {_events(rows)} longer than {bound}, the longest of {worst / 1e9:.3g} s",
        reason=f"event lasts longer than {bound}",
    )


def clock_jump(start: Int64, dur: Int64) -> Impossible | None:
    """Events on the wrong side of a silence of more than an hour: all but the largest group. Rows in time order."""
    end = np.maximum.accumulate(start + dur)
    silence = start[1:] - end[:-1]
    breaks = np.flatnonzero(silence > MAX_SILENCE_NS)
    if not len(breaks):
        return None
    group = np.zeros(len(start), dtype=np.int64)
    group[breaks + 1] = 1
    group = np.cumsum(group)
    rows = group != np.argmax(np.bincount(group))
    return Impossible(
        rows=rows,
        what=f"has a jump of its clock by {int(silence.max()) / 3.6e12:.3g} hours, which cuts off {_events(rows)}",
        reason="event is cut off by a jump of the clock",
    )


def early_work(
    start: Int64, category: npt.NDArray[np.uint8], correlation: Int64
) -> Impossible | None:
    """Device work that starts before the call that launched it."""
    calls = np.flatnonzero((category == Category.RUNTIME) & (correlation >= 0))
    work = np.flatnonzero(_is_work(category) & (correlation >= 0))
    if not len(calls) or not len(work):
        return None
    calls = calls[np.argsort(correlation[calls], kind="stable")]
    found = np.searchsorted(correlation[calls], correlation[work])
    launch = calls[np.minimum(found, len(calls) - 1)]
    lead = np.where(correlation[launch] == correlation[work], start[launch] - start[work], 0)
    early = work[lead > MAX_SKEW_NS]
    if not len(early):
        return None
    rows = np.zeros(len(start), dtype=np.bool_)
    rows[early] = True
    return Impossible(
        rows=rows,
        what=f"has {_events(rows)} of the device up to {int(lead.max()) / 1e9:.3g} s before their launch",
        reason="device work starts before its launch",
    )


def shared_launches(
    category: npt.NDArray[np.uint8], correlation: Int64, lane: npt.NDArray[np.int32]
) -> Impossible | None:
    """Rows of launches, and of their work, whose correlation id two calls of one thread claim."""
    work_ids = correlation[_is_work(category) & (correlation >= 0)]
    calls = np.flatnonzero((category == Category.RUNTIME) & (correlation >= 0))
    order = calls[np.lexsort((correlation[calls], lane[calls]))]
    same = (np.diff(correlation[order]) == 0) & (np.diff(lane[order]) == 0)
    shared = np.intersect1d(correlation[order[1:]][same], work_ids)
    if not len(shared):
        return None
    rows = np.isin(correlation, shared) & ((category == Category.RUNTIME) | _is_work(category))
    return Impossible(
        rows=rows,
        what=f"has {len(shared):,} correlation id(s) that two launches of one thread claim, the first {shared[0]}",
        reason="correlation id is claimed by two launches: the link is removed, the event kept",
    )


def _is_work(category: npt.NDArray[np.uint8]) -> Mask:
    return np.isin(category, (Category.KERNEL, Category.MEMCPY, Category.MEMSET))


def _events(rows: Mask) -> str:
    count = int(np.count_nonzero(rows))
    return f"{count:,} event" if count == 1 else f"{count:,} events"
