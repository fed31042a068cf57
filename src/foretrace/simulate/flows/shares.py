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

A link that was not full and on which nobody rises any more is passed over where it is in the heap.
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
QUEUED, SEEDS, CHANGED, SWEEP, DUE = 0, 1, 2, 3, 4  # due: links of the heap that are still to be looked at
U = np.uint64  # of indices: a signed one costs a test for negative indexing at every access


def _record(names: str, short: str = "") -> np.dtype[Any]:
    kinds = dict.fromkeys(names.split(), np.int64) | dict.fromkeys(short.split(), np.int32)
    return np.dtype(list(kinds.items()), align=True)


# One link of one flow: connections there, and where it is listed while the flow is under way.
ENTRY = _record("times", short="link at")
# The lists of entries under way, link by link: entry, its flow, connections and rate.
LISTED = _record("times rate", short="entry flow")
# first, count: its list; left: what flows that are not open leave; load: connections of open flows, total: of all;
# above: flows at this rate or faster count as if they rose with the open ones; risen_left: what the others leave,
# risen: connections of those that rise or count so, least: the least rate among these (or less); most: the largest rate
# of the others (or more); full: the level at which it is full; key: that at which it is looked at next; place: where in
# the heap; opened: the last sweep in which it opened flows.
LINK = _record("left load risen_left risen above least most key full total first count place opened")
# A place of the heap: the key that the link there had when it was put there or moved, and the link.
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
    seeds: Int64  # links that joining and leaving flows touched
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
        links["left"] = links["risen_left"] = np.rint(np.ldexp(capacity, bits))
        for name in ("above", "least", "full"):
            links[name] = FREE
        for name in ("most", "key", "place", "opened"):
            links[name] = -1
        flows = np.zeros(len(route_ptr) - 1, FLOW)
        flows["first"], flows["last"] = route_ptr[:-1], route_ptr[1:]
        scratch = (np.zeros(n, dtype=np.int64) for n in (len(links), len(flows), 5))
        lists = np.zeros(len(entries), LISTED), links, flows, np.zeros(len(links), QUEUE)
        return cls(entries, *lists, *scratch), 2.0**-bits


@inner
def _sift(s: Shares, at: int, key: int, m: int) -> None:
    """Put a link where it belongs, from a place of the heap that is free."""
    heap, links, size = s.heap, s.links, s.numbers[QUEUED]
    while at > 0 and key < heap[U((at - 1) >> 1)].key:
        up = heap[U((at - 1) >> 1)]
        heap[U(at)].key, heap[U(at)].link = up.key, up.link
        links[U(up.link)].place = at
        at = (at - 1) >> 1
    while 2 * at + 1 < size:
        down = 2 * at + 1
        if down + 1 < size:
            down += heap[U(down + 1)].key < heap[U(down)].key
        under = heap[U(down)]
        if under.key >= key:
            break
        heap[U(at)].key, heap[U(at)].link = under.key, under.link
        links[U(under.link)].place = at
        at = down
    heap[U(at)].key, heap[U(at)].link = key, m
    links[U(m)].place = at


@inner
def _look_at(s: Shares, m: int, level: int) -> None:
    """Look at a link when the sweep comes to this level."""
    link = s.links[U(m)]
    if link.key == CLEAN:
        s.numbers[DUE] += 1
    link.key = level
    at = link.place
    if at < 0:
        at = s.numbers[QUEUED]
        s.numbers[QUEUED] += 1
    _sift(s, at, level, m)


@inner
def _pass(s: Shares, m: int) -> None:
    """Do not look at a link any more; where it is in the heap, it stays for now."""
    s.links[U(m)].key = CLEAN
    s.numbers[DUE] -= 1


@inner
def _seed(s: Shares, m: int) -> None:
    if s.links[U(m)].key == CLEAN:
        s.links[U(m)].key = FREE
        s.seeds[s.numbers[SEEDS]] = m
        s.numbers[SEEDS] += 1


@inner
def _gain(s: Shares, m: int, rate: int, n: int) -> None:
    """Count a flow that no longer has this rate on a link."""
    link = s.links[U(m)]
    other = n * (rate < link.above)
    link.left += rate * n
    link.risen_left += rate * other
    link.risen += other


@inner
def join(s: Shares, f: int) -> None:
    """Add a flow that begins to move bytes; its rate is known after `repair`."""
    flow = s.flows[U(f)]
    flow.rate = 0
    for q in range(flow.first, flow.last):
        entry = s.entries[U(q)]
        link = s.links[U(entry.link)]
        i = link.first + link.count
        listed = s.listed[U(i)]
        listed.entry, listed.flow, listed.times, listed.rate = q, f, entry.times, OPEN
        entry.at = i
        link.count += 1
        link.load += entry.times
        link.risen += entry.times
        link.total += entry.times
        _seed(s, entry.link)


@inner
def leave(s: Shares, f: int) -> None:
    """Remove a flow that has a rate: it is through."""
    flow = s.flows[U(f)]
    for q in range(flow.first, flow.last):
        entry = s.entries[U(q)]
        link, listed = s.links[U(entry.link)], s.listed[U(entry.at)]
        _gain(s, entry.link, listed.rate, listed.times)
        link.risen -= listed.times
        link.total -= listed.times
        link.count -= 1
        last = s.listed[U(link.first + link.count)]
        s.entries[U(last.entry)].at = entry.at
        listed.entry, listed.flow, listed.times, listed.rate = last.entry, last.flow, last.times, last.rate
        if link.full < FREE:
            _seed(s, entry.link)


@inner
def _earliest(s: Shares, m: int) -> int:
    """Return a lower bound of the level at which an open flow's link is full: who does not rise takes a bit more."""
    link = s.links[U(m)]
    return (link.risen_left - (link.total - link.risen)) // link.risen


@inner
def _level(s: Shares, m: int, level: int) -> int:
    """Return the level at which a link is full, from one that is not above it (Newton's method, from below)."""
    link, listed = s.links[U(m)], s.listed
    while True:
        if link.risen > 0:
            level = max(level, _earliest(s, m))
            if link.most < level:  # all who may rise as far count
                level = max(level, link.risen_left // link.risen)
                if level <= link.least:
                    return level
        elif link.most < level:
            return FREE
        rate, load, least, most = np.int64(0), np.int64(0), FREE, np.int64(-1)
        for i in range(link.first, link.first + link.count):
            each, times = listed[U(i)].rate, listed[U(i)].times
            if each >= level:
                rate += each * times
                load += times
                least = min(least, each)
            else:
                most = max(most, each)
        link.above, link.risen_left, link.risen = level, link.left + rate, link.load + load
        link.least, link.most = least, most


@inner
def _mark(s: Shares, f: int) -> None:
    flow = s.flows[U(f)]
    if flow.marked != s.numbers[SWEEP]:
        flow.marked = s.numbers[SWEEP]
        flow.before = flow.rate
        s.changed[s.numbers[CHANGED]] = f
        s.numbers[CHANGED] += 1


@inner
def _open(s: Shares, f: int, now: int) -> None:
    """Let a flow that stopped at this level rise."""
    _mark(s, f)
    flow = s.flows[U(f)]
    for q in range(flow.first, flow.last):
        entry = s.entries[U(q)]
        link = s.links[U(entry.link)]
        _gain(s, entry.link, now, entry.times)
        link.load += entry.times
        s.listed[U(entry.at)].rate = OPEN
        if link.key != now:
            earliest = max(now, min(link.full, _earliest(s, entry.link)))
            if link.key == CLEAN or earliest < link.key:
                _look_at(s, entry.link, earliest)


@inner
def _stop(s: Shares, f: int, was: int, level: int, m: int) -> None:
    """Give a flow that is open, or faster, this level for a rate, because of link `m`."""
    _mark(s, f)
    flow = s.flows[U(f)]
    flow.rate = level
    for q in range(flow.first, flow.last):
        entry = s.entries[U(q)]
        link, n = s.links[U(entry.link)], entry.times
        s.listed[U(entry.at)].rate = level
        other = n * (level < link.above)
        link.left -= level * n
        link.risen_left -= level * other
        link.risen -= other
        link.least = min(link.least, level if level >= link.above else FREE)
        link.most = max(link.most, level if level < link.above else OPEN)
        if was == OPEN:
            link.load -= n
        else:
            _gain(s, entry.link, was, n)
            if link.key == CLEAN and link.full < FREE and entry.link != m:
                _look_at(s, entry.link, link.full)
        # Nobody rises on it, and whoever crosses it could have more there.
        if link.load == 0 and link.full == FREE and link.key != CLEAN and link.left >= link.total:
            _pass(s, entry.link)


@inner
def _take(s: Shares) -> None:
    """Take the first link out of the heap."""
    heap, numbers = s.heap, s.numbers
    s.links[heap[0].link].place = -1
    numbers[QUEUED] -= 1
    if numbers[QUEUED] > 0:
        _sift(s, 0, heap[numbers[QUEUED]].key, heap[numbers[QUEUED]].link)


@inner
def repair(s: Shares) -> int:
    """Make the rates fair again after flows joined and left; how many are in `changed`, with their rates before."""
    numbers, listed = s.numbers, s.listed
    numbers[SWEEP] += 1
    numbers[CHANGED] = 0
    for k in range(numbers[SEEDS]):
        m = s.seeds[k]
        first = s.links[U(m)].full
        s.links[U(m)].key = CLEAN
        _look_at(s, m, first if s.links[U(m)].load == 0 else max(np.int64(0), min(first, _earliest(s, m))))
    numbers[SEEDS] = 0
    while numbers[DUE] > 0:
        m = s.heap[0].link
        link = s.links[U(m)]
        now, held = link.key, link.full
        if now == CLEAN:
            _take(s)
            continue
        level = _level(s, m, now)
        raises = link.opened != numbers[SWEEP] and held < level
        following = held if raises else level
        if following > now and following < FREE:
            _look_at(s, m, following)
        elif raises:
            link.opened = numbers[SWEEP]
            for i in range(link.first, link.first + link.count):
                if listed[U(i)].rate == held:
                    _open(s, listed[U(i)].flow, held)
        else:
            _take(s)
            _pass(s, m)
            link.full = level
            if level < FREE and (level != held or link.load > 0):
                for i in range(link.first, link.first + link.count):
                    was = listed[U(i)].rate
                    if was == OPEN or was > level:
                        _stop(s, listed[U(i)].flow, was, level, m)
    for k in range(numbers[QUEUED]):
        s.links[U(s.heap[U(k)].link)].place = -1
    numbers[QUEUED] = 0
    return numbers[CHANGED]
