"""What cannot be true in the recording of one rank: each check finds the rows, the caller refuses or drops them.

All take the columns of `Trace` of one rank, with rows in time order and times in nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Array, Mask, UInt8
from foretrace.trace.trace import Category

Columns = Mapping[str, Array]
Span = tuple[int, int] | None

# A step of a day is no step.
MAX_DURATION_NS = 86_400 * 10**9
# The profiler notes the span of its recording; clocks that it compares may differ a little.
SPAN_SLACK_NS = 10 * 10**9
# If no thread and no device does anything for ten minutes, the clock has jumped.
MAX_SILENCE_NS = 600 * 10**9
# Device and host clocks agree to some microseconds, and no work starts before its launch.
MAX_SKEW_NS = 100 * 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Impossible:
    """Rows that break a law: `what` ends a sentence "<file> ...", `reason` is for `Dropped`."""

    rows: Mask
    what: str
    reason: str


def too_long(columns: Columns, span: Span) -> Impossible | None:
    """Return events longer than a day."""
    dur = columns["dur"]
    rows = dur > MAX_DURATION_NS
    if not rows.any():
        return None
    return Impossible(
        rows=rows,
        what=f"has {_events(rows)} longer than a day (the longest of {int(dur.max()) / 1e9:,.0f} s)",
        reason="event lasts longer than a day",
    )


def outside(columns: Columns, span: Span) -> Impossible | None:
    """Return events outside the span that the profiler noted for its recording.

    If that is most events, it is the span that is wrong, and nothing is said.
    """
    if span is None:
        return None
    start, end = columns["start"], columns["start"] + columns["dur"]
    rows = (start < span[0] - SPAN_SLACK_NS) | (end > span[1] + SPAN_SLACK_NS)
    if not rows.any() or 2 * np.count_nonzero(rows) > len(rows):
        return None
    far = max(span[0] - int(start.min()), int(end.max()) - span[1])
    return Impossible(
        rows=rows,
        what=f"has {_events(rows)} up to {far / 1e9:,.0f} s outside its recording (a clock jumped)",
        reason="event lies outside the recording",
    )


def beyond_silence(columns: Columns, span: Span) -> Impossible | None:
    """Return events that a silence of more than ten minutes cuts off from the largest group."""
    start = columns["start"]
    end = np.maximum.accumulate(start + columns["dur"])
    silence = start[1:] - end[:-1]
    if not (silence > MAX_SILENCE_NS).any():
        return None
    group = np.concatenate([[0], np.cumsum(silence > MAX_SILENCE_NS)])
    rows = group != np.argmax(np.bincount(group))
    return Impossible(
        rows=rows,
        what=f"has {_events(rows)} cut off by {int(silence.max()) / 1e9:,.0f} s of silence (a clock jumped)",
        reason="event is cut off by ten minutes of silence",
    )


def before_launch(columns: Columns, span: Span) -> Impossible | None:
    """Return device work that starts before the call that launched it."""
    start, category, correlation = (columns[k] for k in ("start", "category", "correlation"))
    calls = np.flatnonzero((category == Category.RUNTIME) & (correlation >= 0))
    work = np.flatnonzero(_is_work(category) & (correlation >= 0))
    if not len(calls) or not len(work):
        return None
    calls = calls[np.argsort(correlation[calls], kind="stable")]
    found = np.searchsorted(correlation[calls], correlation[work])
    launch = calls[np.minimum(found, len(calls) - 1)]
    lead = np.where(correlation[launch] == correlation[work], start[launch] - start[work], 0)
    if lead.max() <= MAX_SKEW_NS:
        return None
    rows = np.zeros(len(start), dtype=np.bool_)
    rows[work[lead > MAX_SKEW_NS]] = True
    return Impossible(
        rows=rows,
        what=f"has {_events(rows)} of a device up to {int(lead.max()) / 1e9:,.1f} s before their launch "
        "(a clock jumped)",
        reason="device work starts before its launch",
    )


DROPPING: tuple[Callable[[Columns, Span], Impossible | None], ...] = (
    too_long,
    outside,
    beyond_silence,
    before_launch,
)


def shared_launches(columns: Columns) -> Impossible | None:
    """Return launches, and their work, whose correlation id two calls of one thread claim.

    A runtime call may share its id with the driver call inside it.
    """
    start, dur, name, category, lane, correlation = (
        columns[k] for k in ("start", "dur", "name", "category", "lane", "correlation")
    )
    calls = np.flatnonzero((category == Category.RUNTIME) & (correlation >= 0))
    calls = calls[np.lexsort((correlation[calls], lane[calls]))]
    one, two = calls[:-1], calls[1:]
    same = (correlation[one] == correlation[two]) & (lane[one] == lane[two])
    nested = (start[two] + dur[two] <= start[one] + dur[one]) & (name[one] != name[two])
    work = _is_work(category)
    shared = np.intersect1d(correlation[two[same & ~nested]], correlation[work])
    if not len(shared):
        return None
    return Impossible(
        rows=np.isin(correlation, shared) & (work | (category == Category.RUNTIME)),
        what=f"has {len(shared):,} correlation ids that two launches of one thread claim (the first: {shared[0]})",
        reason="correlation id is claimed by two launches: the event stays, its link is removed",
    )


def _is_work(category: UInt8) -> Mask:
    return np.isin(category, (Category.KERNEL, Category.MEMCPY, Category.MEMSET))


def _events(rows: Mask) -> str:
    count = int(np.count_nonzero(rows))
    return f"{count:,} event" if count == 1 else f"{count:,} events"
