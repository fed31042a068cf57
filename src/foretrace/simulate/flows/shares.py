"""Max-min fair rates of the flows under way, kept up as flows join and leave: compiled loops of `engine`.

Rates are whole numbers, as parts of a fixed unit (`Shares.of`): sums of them do not depend on their order and shares
only rise while links fill, so to repair what a change touches gives what filling all links again would give, to the
last bit.

Progressive filling raises all rates alike. A link is full at the *level* at which its rest, shared among the flows
that still rise, is that level; its flows stop there. `repair` sweeps up through the levels of those links alone that
may fill at another level than before. Flows that it did not open keep their rates, and take part in the level of a
link by these. At its turn, the lowest first, a link
- that can carry what it held before and more opens the flows that stopped at its old level: they rise again;
- or is full: its open flows stop, and faster ones slow down to its level, which gives other full links a rest.
"""

# An index of compiled code changes between signed and unsigned, which mypy takes for a change of type.
# mypy: disable-error-code="assignment,arg-type,misc,no-any-return,no-untyped-call,return-value,type-var"

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np

from foretrace.arrays import Float64, Int32, Int64
from foretrace.compiled import inner

BITS = 60  # of the widest link's capacity
FREE = np.int64(2**62)  # level of a link that holds nobody
OPEN, CLEAN = np.int64(-1), np.int64(-1)  # rate of a flow that rises, key of a link that nothing touched
QUEUED, SEEDS, CHANGED, SWEEP = 0, 1, 2, 3


def _record(names: str) -> np.dtype[Any]:
    return np.dtype([(name, np.int64) for name in names.split()], align=True)


# One link of one flow: connections there, and where it is listed while the flow is under way.
ENTRY = _record("link times at")
# The lists of entries under way, link by link: entry, its flow, connections and rate.
LISTED = _record("entry flow times rate")
# first, count: its list; left: what flows that are not open leave; load: connections of open flows, total: of all;
# above: flows at this rate or faster count as if they rose with the open ones, with what they have together, their
# connections, and the least rate among them (or less); below_most: the largest rate of the others (or more); full:
# the level at which it is full; key: that at which it is looked at next; place: where in the heap; opened: the last
# sweep in which it opened flows.
LINK = _record("first count left load total above above_rate above_load above_least below_most full key place opened")
# The rate, the one before, and the sweep that changed it.
FLOW = _record("rate before marked")


class Shares(NamedTuple):
    """Flows and links; few arrays of records, as every loop passes each of them on."""

    route_ptr: Int64  # (F + 1,) entries of each flow
    entries: Any  # ENTRY
    listed: Any  # LISTED
    links: Any  # LINK
    flows: Any  # FLOW
    heap: Int64
    seeds: Int64  # links that joining and leaving flows touched
    changed: Int64  # flows
    numbers: Int64

    @classmethod
    def of(cls, route_ptr: Int64, route_link: Int32, route_times: Int64, capacity: Float64) -> tuple[Self, float]:
        """Return shares without flows, and the unit of rates: a power of 2 that gives the widest link `BITS` bits."""
        bits = BITS - int(np.frexp(capacity.max(initial=0.0))[1])
        entries, links = np.zeros(len(route_link), ENTRY), np.zeros(len(capacity), LINK)
        entries["link"], entries["times"] = route_link, route_times
        links["first"] = np.cumsum(np.bincount(route_link, minlength=len(links))) - np.bincount(
            route_link, minlength=len(links)
        )
        links["left"] = np.rint(np.ldexp(capacity, bits))
        for name, value in (("above", FREE), ("above_least", FREE), ("full", FREE)):
            links[name] = value
        for name in ("below_most", "key", "place", "opened"):
            links[name] = -1
        flows = np.zeros(len(route_ptr) - 1, FLOW)
        scratch = (np.zeros(n, dtype=np.int64) for n in (len(links), len(links), len(flows), 4))
        return cls(route_ptr, entries, np.zeros(len(entries), LISTED), links, flows, *scratch), 2.0**-bits


@inner
def _sift(s: Shares, at: int) -> None:
    heap, links, size = s.heap, s.links, s.numbers[QUEUED]
    m = heap[at]
    key = links[m].key
    while at > 0 and key < links[heap[(at - 1) >> 1]].key:
        heap[at] = heap[(at - 1) >> 1]
        links[heap[at]].place = at
        at = (at - 1) >> 1
    while 2 * at + 1 < size:
        down = 2 * at + 1
        if down + 1 < size and links[heap[down + 1]].key < links[heap[down]].key:
            down += 1
        if links[heap[down]].key >= key:
            break
        heap[at] = heap[down]
        links[heap[at]].place = at
        at = down
    heap[at] = m
    links[m].place = at


@inner
def _look_at(s: Shares, m: int, level: int) -> None:
    """Look at a link when the sweep comes to this level."""
    link = s.links[m]
    link.key = level
    if link.place < 0:
        s.heap[s.numbers[QUEUED]] = m
        link.place = s.numbers[QUEUED]
        s.numbers[QUEUED] += 1
    _sift(s, link.place)


@inner
def _seed(s: Shares, m: int) -> None:
    if s.links[m].key == CLEAN:
        s.links[m].key = FREE
        s.seeds[s.numbers[SEEDS]] = m
        s.numbers[SEEDS] += 1


@inner
def _gain(s: Shares, m: int, rate: int, n: int) -> None:
    """Count a flow that no longer has this rate on a link."""
    link = s.links[m]
    link.left += rate * n
    if rate >= link.above:
        link.above_rate -= rate * n
        link.above_load -= n


@inner
def join(s: Shares, f: int) -> None:
    """Add a flow that begins to move bytes; its rate is known after `repair`."""
    s.flows[f].rate = 0
    for q in range(s.route_ptr[f], s.route_ptr[f + 1]):
        entry = s.entries[q]
        link = s.links[entry.link]
        i = link.first + link.count
        listed = s.listed[i]
        listed.entry, listed.flow, listed.times, listed.rate = q, f, entry.times, OPEN
        entry.at = i
        link.count += 1
        link.load += entry.times
        link.total += entry.times
        _seed(s, entry.link)


@inner
def leave(s: Shares, f: int) -> None:
    """Remove a flow that has a rate: it is through."""
    for q in range(s.route_ptr[f], s.route_ptr[f + 1]):
        entry = s.entries[q]
        link, listed = s.links[entry.link], s.listed[entry.at]
        _gain(s, entry.link, listed.rate, listed.times)
        link.total -= listed.times
        link.count -= 1
        last = s.listed[link.first + link.count]
        s.entries[last.entry].at = entry.at
        listed.entry, listed.flow, listed.times, listed.rate = last.entry, last.flow, last.times, last.rate
        if link.full < FREE:
            _seed(s, entry.link)


@inner
def _earliest(s: Shares, m: int) -> int:
    """Return a lower bound of the level at which an open flow's link is full: who does not rise takes a bit more."""
    link = s.links[m]
    load = link.load + link.above_load
    return (link.left + link.above_rate - (link.total - load)) // load


@inner
def _level(s: Shares, m: int, level: int) -> int:
    """Return the level at which a link is full, from one that is not above it (Newton's method, from below)."""
    link, listed = s.links[m], s.listed
    while True:
        load = link.load + link.above_load
        if load > 0:
            level = max(level, _earliest(s, m))
            if link.below_most < level:  # all who may rise as far count
                level = max(level, (link.left + link.above_rate) // load)
                if level <= link.above_least:
                    return level
        elif link.below_most < level:
            return FREE
        rate, load, least, most = np.int64(0), np.int64(0), FREE, np.int64(-1)
        for i in range(link.first, link.first + link.count):
            each, times = listed[i].rate, listed[i].times
            if each >= level:
                rate += each * times
                load += times
                least = min(least, each)
            else:
                most = max(most, each)
        link.above, link.above_rate, link.above_load = level, rate, load
        link.above_least, link.below_most = least, most


@inner
def _mark(s: Shares, f: int) -> None:
    flow = s.flows[f]
    if flow.marked != s.numbers[SWEEP]:
        flow.marked = s.numbers[SWEEP]
        flow.before = flow.rate
        s.changed[s.numbers[CHANGED]] = f
        s.numbers[CHANGED] += 1


@inner
def _open(s: Shares, f: int, now: int) -> None:
    """Let a flow that stopped at this level rise."""
    _mark(s, f)
    for q in range(s.route_ptr[f], s.route_ptr[f + 1]):
        entry = s.entries[q]
        link = s.links[entry.link]
        _gain(s, entry.link, now, entry.times)
        link.load += entry.times
        s.listed[entry.at].rate = OPEN
        earliest = max(now, min(link.full, _earliest(s, entry.link)))
        if link.key == CLEAN or earliest < link.key:
            _look_at(s, entry.link, earliest)


@inner
def _stop(s: Shares, f: int, was: int, level: int, m: int) -> None:
    """Give a flow that is open, or faster, this level for a rate, because of link `m`."""
    _mark(s, f)
    s.flows[f].rate = level
    for q in range(s.route_ptr[f], s.route_ptr[f + 1]):
        entry = s.entries[q]
        link, n = s.links[entry.link], entry.times
        s.listed[entry.at].rate = level
        link.left -= level * n
        if was == OPEN:
            link.load -= n
        else:
            _gain(s, entry.link, was, n)
            if link.key == CLEAN and link.full < FREE and entry.link != m:
                _look_at(s, entry.link, link.full)
        if level >= link.above:
            link.above_rate += level * n
            link.above_load += n
            link.above_least = min(link.above_least, level)
        else:
            link.below_most = max(link.below_most, level)


@inner
def repair(s: Shares) -> int:
    """Make the rates fair again after flows joined and left; how many are in `changed`, with their rates before."""
    numbers, listed = s.numbers, s.listed
    numbers[SWEEP] += 1
    numbers[CHANGED] = 0
    for k in range(numbers[SEEDS]):
        m = s.seeds[k]
        first = s.links[m].full
        _look_at(s, m, first if s.links[m].load == 0 else max(np.int64(0), min(first, _earliest(s, m))))
    numbers[SEEDS] = 0
    while numbers[QUEUED] > 0:
        m = s.heap[0]
        link = s.links[m]
        now, held = link.key, link.full
        level = _level(s, m, now)
        raises = link.opened != numbers[SWEEP] and held < level
        following = held if raises else level
        if following > now and following < FREE:
            _look_at(s, m, following)
        elif raises:
            link.opened = numbers[SWEEP]
            for i in range(link.first, link.first + link.count):
                if listed[i].rate == held:
                    _open(s, listed[i].flow, held)
        else:
            numbers[QUEUED] -= 1
            link.place, link.key, link.full = -1, CLEAN, level
            if numbers[QUEUED] > 0:
                s.heap[0] = s.heap[numbers[QUEUED]]
                _sift(s, 0)
            if level < FREE and (level != held or link.load > 0):
                for i in range(link.first, link.first + link.count):
                    was = listed[i].rate
                    if was == OPEN or was > level:
                        _stop(s, listed[i].flow, was, level, m)
    return numbers[CHANGED]
