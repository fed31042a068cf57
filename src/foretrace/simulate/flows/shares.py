"""Max-min fair rates of the flows under way, kept up as flows join and leave: compiled loops of `engine`.

Rates are whole numbers, as parts of a fixed unit (`Shares.of`), so sums of them do not depend on their order.

A link is full at its *level*: the least rate T for which what its slower flows leave, shared among the others and
rounded down, is at most T. The rate of a flow is the lowest level among its links. Progressive filling gives the only
rates and levels that satisfy both: no level can be below the least of all equal shares, the link of that share has it,
its flows stop there, and so on for the links and flows that are left. So `repair` may look at links in any order, until
every level fits the rates. A link whose level changes gives it to the flows that have their *bottleneck* there, and the
other links of these are to be looked at. First come those where the lowest level may change, as what happens there does
not depend on higher levels: then few rates change twice (with a plain queue, 4.6 times as many on random routes).

The flows with their bottleneck at a link are first in its list; of the slower ones, the sum is enough. When a level
falls, or rises no further than the other links of these flows allow, the new one follows from that sum (`_look`). Where
flows have their bottleneck elsewhere from then on, all flows of the link are looked at (`_fill`).
"""

# An index of compiled code changes between signed and unsigned, which mypy takes for a change of type.
# mypy: disable-error-code="assignment,arg-type,misc,no-any-return,no-untyped-call,return-value,type-var"

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np

from foretrace.arrays import Float64, Int32, Int64
from foretrace.compiled import inner

BITS = 60  # of the widest link's capacity
FREE = np.int64(2**62)  # level of a link that is not full
QUEUED, CHANGED, SWEEP = 0, 1, 2
U = np.uint64  # of indices: a signed one costs a test for negative indexing at every access


def _record(names: str, short: str = "") -> np.dtype[Any]:
    kinds = dict.fromkeys(names.split(), np.int64) | dict.fromkeys(short.split(), np.int32)
    return np.dtype(list(kinds.items()), align=True)


# One link of one flow: connections there, and where it is listed while the flow is under way.
ENTRY = _record("times", short="link at")
# The lists of entries under way, link by link: entry, its flow, and what the other links allow it (within `_fill`).
LISTED = _record("allowed", short="entry flow")
# above: the least rate of those who are first in the list, this is the level except where sums would be too large;
# left: what the slower ones leave, most: the largest rate of these (or more); load: connections of those who are first,
# total: of all; first, count: the list; fast: how many are first in it; queued: whether it is to be looked at.
LINK = _record("level above left most load total capacity", short="first count fast queued")
# A place of the heap: a lower bound of the level that may change at a link, and the link.
QUEUE = _record("key link")
# The rate, the one before, and the sweep that changed it; its entries are those from first, before last.
FLOW = _record("rate before marked", short="first last")


class Shares(NamedTuple):
    """Flows and links; few arrays of records, as every loop passes each of them on."""

    entries: Any  # ENTRY
    listed: Any  # LISTED
    links: Any  # LINK
    flows: Any  # FLOW
    heap: Any  # QUEUE
    changed: Int64  # flows
    numbers: Int64

    @classmethod
    def of(cls, route_ptr: Int64, route_link: Int32, route_times: Int64, capacity: Float64) -> tuple[Self, float]:
        """Return shares without flows, and the unit of rates: a power of 2 that gives the widest link `BITS` bits."""
        bits = BITS - int(np.frexp(capacity.max(initial=0.0))[1])
        entries, links = np.zeros(len(route_link), ENTRY), np.zeros(len(capacity), LINK)
        entries["link"], entries["times"] = route_link, route_times
        room = np.bincount(route_link, minlength=len(links))
        links["first"] = np.cumsum(room) - room
        links["left"] = links["capacity"] = np.rint(np.ldexp(capacity, bits))
        links["level"] = links["above"] = FREE
        links["most"] = -1
        flows = np.zeros(len(route_ptr) - 1, FLOW)
        flows["first"], flows["last"] = route_ptr[:-1], route_ptr[1:]
        flows["marked"] = -1
        lists = np.zeros(len(entries), LISTED), links, flows, np.zeros(len(links), QUEUE)
        return cls(entries, *lists, np.zeros(len(flows), dtype=np.int64), np.zeros(3, dtype=np.int64)), 2.0**-bits


@inner
def _earliest(link: Any) -> int:
    """Return a lower bound of the lower one of a link's level and the one that it would have now."""
    if link.load > 0:
        return max(np.int64(0), min(link.level, (link.left - link.total) // link.load))
    return link.level if link.left >= link.total else link.capacity // link.total


@inner
def _push(s: Shares, m: int) -> None:
    """Put a link into the heap."""
    heap, at, key = s.heap, s.numbers[QUEUED], _earliest(s.links[U(m)])
    s.numbers[QUEUED] += 1
    s.links[U(m)].queued = 1
    while at > 0 and key < heap[U((at - 1) >> 1)].key:
        up = heap[U((at - 1) >> 1)]
        heap[U(at)].key, heap[U(at)].link = up.key, up.link
        at = (at - 1) >> 1
    heap[U(at)].key, heap[U(at)].link = key, m


@inner
def _sink(s: Shares, key: int, m: int) -> None:
    """Put a link in the place of the first one of the heap, and from there where it belongs."""
    heap, size, at = s.heap, s.numbers[QUEUED], 0
    while 2 * at + 1 < size:
        down = 2 * at + 1
        if down + 1 < size:
            down += heap[U(down + 1)].key < heap[U(down)].key
        under = heap[U(down)]
        if under.key >= key:
            break
        heap[U(at)].key, heap[U(at)].link = under.key, under.link
        at = down
    heap[U(at)].key, heap[U(at)].link = key, m


@inner
def _seed(s: Shares, m: int) -> None:
    """Note a link for the heap, which is put in order when all flows have joined and left."""
    if s.links[U(m)].queued == 0:
        s.links[U(m)].queued = 1
        s.heap[U(s.numbers[QUEUED])].link = m
        s.numbers[QUEUED] += 1


@inner
def _place(s: Shares, i: int, q: int, f: int) -> None:
    s.listed[U(i)].entry, s.listed[U(i)].flow = q, f
    s.entries[U(q)].at = i


@inner
def _swap(s: Shares, i: int, j: int) -> None:
    q, f = s.listed[U(i)].entry, s.listed[U(i)].flow
    _place(s, i, s.listed[U(j)].entry, s.listed[U(j)].flow)
    _place(s, j, q, f)


@inner
def _enter(s: Shares, q: int, link: Any) -> None:
    """Make a listed entry one of those who are first."""
    _swap(s, s.entries[U(q)].at, link.first + link.fast)
    link.fast += 1
    link.load += s.entries[U(q)].times


@inner
def _exit(s: Shares, q: int, link: Any) -> None:
    """Undo `_enter`."""
    link.fast -= 1
    link.load -= s.entries[U(q)].times
    _swap(s, s.entries[U(q)].at, link.first + link.fast)


@inner
def _part(s: Shares, link: Any, above: int) -> None:
    """Put those of this rate or faster first."""
    link.above, link.left, link.most, link.load, link.fast = above, link.capacity, -1, 0, 0
    for i in range(link.first, link.first + link.count):
        q, rate = s.listed[U(i)].entry, s.flows[U(s.listed[U(i)].flow)].rate
        if rate >= above:
            _enter(s, q, link)
        else:
            link.left -= rate * s.entries[U(q)].times
            link.most = max(link.most, rate)


@inner
def _overflows(link: Any, rate: int, n: int) -> bool:
    """Return whether sums may leave 64 bits with connections at this rate: until a link is looked at, it has no limit.

    They do not with those alone who are slower than the equal share.
    """
    return link.left < -(2**61) or (rate >> 32) * n > 2**28


@inner
def _mark(s: Shares, f: int, before: int) -> None:
    flow = s.flows[U(f)]
    if flow.marked != s.numbers[SWEEP]:
        flow.marked = s.numbers[SWEEP]
        flow.before = before
        s.changed[s.numbers[CHANGED]] = f
        s.numbers[CHANGED] += 1


@inner
def join(s: Shares, f: int) -> None:
    """Add a flow that begins to move bytes; its rate is known after `repair`."""
    flow = s.flows[U(f)]
    _mark(s, f, 0)
    rate = FREE
    for q in range(flow.first, flow.last):
        rate = min(rate, s.links[U(s.entries[U(q)].link)].level)
    flow.rate = rate
    for q in range(flow.first, flow.last):
        link, n = s.links[U(s.entries[U(q)].link)], s.entries[U(q)].times
        link.total += n
        if rate < link.above and _overflows(link, rate, n):
            _part(s, link, link.capacity // link.total)
        _place(s, link.first + link.count, q, f)
        link.count += 1
        if rate >= link.above:
            _enter(s, q, link)
        else:
            link.left -= rate * n
            link.most = max(link.most, rate)
        _seed(s, s.entries[U(q)].link)


@inner
def leave(s: Shares, f: int) -> None:
    """Remove a flow that has a rate: it is through."""
    flow = s.flows[U(f)]
    for q in range(flow.first, flow.last):
        link, n = s.links[U(s.entries[U(q)].link)], s.entries[U(q)].times
        if flow.rate >= link.above:
            _exit(s, q, link)
        else:
            link.left += flow.rate * n
        link.total -= n
        link.count -= 1
        last = s.listed[U(link.first + link.count)]
        _place(s, s.entries[U(q)].at, last.entry, last.flow)
        if link.level < FREE:
            _seed(s, s.entries[U(q)].link)


@inner
def _elsewhere(s: Shares, f: int, m: int) -> int:
    """Return the rate that the links of a flow other than `m` allow it."""
    flow, least = s.flows[U(f)], FREE
    for q in range(flow.first, flow.last):
        other = s.entries[U(q)].link
        if other != m:
            least = min(least, s.links[U(other)].level)
    return least


@inner
def _fill(s: Shares, m: int) -> int:
    """Return a link's level by what other links allow each of its flows (Newton's method, from below)."""
    link, listed, entries = s.links[U(m)], s.listed, s.entries
    begin, end = link.first, link.first + link.count
    for i in range(begin, end):
        rate = s.flows[U(listed[U(i)].flow)].rate
        listed[U(i)].allowed = rate if rate < link.level else _elsewhere(s, listed[U(i)].flow, m)
    level = link.capacity // link.total
    while True:
        left, load, least = link.capacity, np.int64(0), FREE
        for i in range(begin, end):
            each, n = listed[U(i)].allowed, entries[U(listed[U(i)].entry)].times
            if each >= level:
                load += n
                least = min(least, each)
            else:
                left -= each * n
        if load == 0:
            return FREE
        share = left // load
        if share <= level:
            return level
        level = share
        if share <= least:
            return level


@inner
def _look(s: Shares, m: int) -> None:
    """Give a link the level that fits the rates of its flows, and these the rates that follow."""
    link, listed = s.links[U(m)], s.listed
    held, level, follows = link.level, FREE, False
    if link.load == 0 and link.left >= link.total:
        link.level = link.above = FREE
        return
    if link.load > 0 and link.above == held:
        level, least = link.left // link.load, held
        if level > held:
            least = FREE
            for i in range(link.first, link.first + link.fast):
                least = min(least, _elsewhere(s, listed[U(i)].flow, m))
        # A slower flow within rounding of the level could be the one at whose rate the link is full.
        follows = level <= least and (link.left - link.total) // link.load > link.most
    if follows:
        if level == held:
            return
        count, link.above = link.fast, level
    else:
        level, count = _fill(s, m), link.count
    link.level = level
    for i in range(link.first, link.first + count):
        f, now = listed[U(i)].flow, level if follows else min(listed[U(i)].allowed, level)
        flow = s.flows[U(f)]
        was = flow.rate
        if was == now:
            continue
        _mark(s, f, was)
        for q in range(flow.first, flow.last):
            entry = s.entries[U(q)]
            if entry.link == m:
                continue
            other, n = s.links[U(entry.link)], entry.times
            if now < other.above and _overflows(other, now, n):
                _part(s, other, other.capacity // other.total)
            if was < other.above:
                other.left += was * n
                if now >= other.above:
                    _enter(s, q, other)
            if now < other.above:
                other.left -= now * n
                other.most = max(other.most, now)
                if was >= other.above:
                    _exit(s, q, other)
            if other.queued == 0 and (other.level < FREE or other.left < other.total or other.load > 0):
                _push(s, entry.link)
        flow.rate = now
    if not follows:
        _part(s, link, level)


@inner
def repair(s: Shares) -> int:
    """Make the rates fair again after flows joined and left; how many are in `changed`, with their rates before."""
    numbers, heap = s.numbers, s.heap
    seeds = numbers[QUEUED]
    numbers[QUEUED] = 0
    for k in range(seeds):
        _push(s, heap[U(k)].link)
    while numbers[QUEUED] > 0:
        m = heap[0].link
        if numbers[QUEUED] > 1:
            key = _earliest(s.links[U(m)])
            if key > heap[1].key or (numbers[QUEUED] > 2 and key > heap[2].key):  # something changed since
                _sink(s, key, m)
                continue
        numbers[QUEUED] -= 1
        last = heap[U(numbers[QUEUED])]
        _sink(s, last.key, last.link)
        s.links[U(m)].queued = 0
        _look(s, m)
    changed = numbers[CHANGED]
    numbers[CHANGED] = 0
    numbers[SWEEP] += 1
    return changed
