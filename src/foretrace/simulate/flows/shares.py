"""Max-min fair rates of the flows under way, kept up as flows join and leave: compiled loops of `engine`.

Rates are whole numbers, as parts of a fixed unit (`Shares.of`): sums of them do not depend on their order and shares
only rise while links fill, so to repair what a change touches gives what filling all links anew would give, to the
last bit.

Progressive filling raises all rates alike. A link is full at the *level* at which its rest, shared among the flows
that still rise, is that level; its flows stop there. `repair` sweeps up through the levels of those links alone that
may fill at another level than before. Flows that it did not open keep their rates, and take part in the level of a
link by these. At its turn, the lowest first, a link
- that can carry what it held before and more opens the flows that stopped at its old level: they rise again;
- or is full: its open flows stop, and faster ones slow down to its level, which gives other full links a rest.
"""

# An index of compiled code changes between signed and unsigned, which mypy takes for a change of type.
# mypy: disable-error-code="assignment,arg-type,misc,type-var,no-untyped-call"

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np

from foretrace.arrays import Float64, Int32, Int64
from foretrace.compiled import inner

BITS = 60  # of the widest link's capacity
FREE = np.int64(2**62)  # level of a link that holds nobody
OPEN, CLEAN = np.int64(-1), np.int64(-1)  # rate of a flow that rises, key of a link that nothing touched
QUEUED, SEEDS, CHANGED, SWEEP = 0, 1, 2, 3


class Shares(NamedTuple):
    """Flows and links. A route entry is one link of one flow; the entries under way are listed link by link."""

    route_ptr: Int64  # F + 1
    route_link: Int32  # entries
    route_times: Int64
    at: Int64  # where the entry is listed
    first: Int64  # links: where its list begins
    count: Int64  # how long that is
    entry: Int64  # the lists: entry, its flow, connections and rate
    flow: Int64
    times: Int64
    rates: Int64
    left: Int64  # links: what flows that are not open leave
    load: Int64  # connections of open flows
    total: Int64  # connections of all flows
    above: Int64  # flows at this rate or faster count as if they rose with the open ones:
    above_rate: Int64  # what they have together, and their connections
    above_load: Int64
    above_least: Int64  # none of them is slower than this
    below_most: Int64  # none of the others is faster than this
    full: Int64  # level at which it is full
    key: Int64  # level at which it is looked at next
    place: Int64  # where in the heap
    opened: Int64  # the last sweep in which it opened flows
    heap: Int64
    seeds: Int64  # links that joining and leaving flows touched
    rate: Int64  # flows: the rate, the one before, the sweep that changed it
    before: Int64
    marked: Int64
    changed: Int64
    numbers: Int64

    @classmethod
    def of(cls, route_ptr: Int64, route_link: Int32, route_times: Int64, capacity: Float64) -> tuple[Self, float]:
        """No flow under way yet, and the unit of rates: a power of 2, so that the widest link has `BITS` bits."""
        flows, links, entries = len(route_ptr) - 1, len(capacity), len(route_link)
        bits = BITS - int(np.frexp(capacity.max(initial=0.0))[1])
        first = np.concatenate([[0], np.cumsum(np.bincount(route_link, minlength=links))]).astype(np.int64)
        lists = [np.zeros(entries, dtype=np.int64) for _ in range(4)]
        of_links = [np.zeros(links, dtype=np.int64) for _ in range(3)]
        made = cls(
            route_ptr, route_link, route_times, np.zeros(entries, dtype=np.int64), first,
            np.zeros(links, dtype=np.int64), *lists, np.rint(np.ldexp(capacity, bits)).astype(np.int64),
            *(np.zeros(links, dtype=np.int64) for _ in range(2)), np.full(links, FREE),
            *(np.zeros(links, dtype=np.int64) for _ in range(2)), np.full(links, FREE), np.full(links, -1),
            np.full(links, FREE), np.full(links, CLEAN), np.full(links, -1), *of_links,
            *(np.zeros(flows, dtype=np.int64) for _ in range(4)), np.zeros(4, dtype=np.int64),
        )  # fmt: skip
        return made, 2.0**-bits


@inner
def _sift(s: Shares, at: int) -> None:
    heap, key, place, size = s.heap, s.key, s.place, s.numbers[QUEUED]
    m = heap[at]
    while at > 0 and key[m] < key[heap[(at - 1) >> 1]]:
        heap[at] = heap[(at - 1) >> 1]
        place[heap[at]] = at
        at = (at - 1) >> 1
    while 2 * at + 1 < size:
        down = 2 * at + 1
        if down + 1 < size and key[heap[down + 1]] < key[heap[down]]:
            down += 1
        if key[heap[down]] >= key[m]:
            break
        heap[at] = heap[down]
        place[heap[at]] = at
        at = down
    heap[at] = m
    place[m] = at


@inner
def _look_at(s: Shares, m: int, level: int) -> None:
    """Look at a link when the sweep comes to this level."""
    s.key[m] = level
    if s.place[m] < 0:
        s.heap[s.numbers[QUEUED]] = m
        s.place[m] = s.numbers[QUEUED]
        s.numbers[QUEUED] += 1
    _sift(s, s.place[m])


@inner
def _seed(s: Shares, m: int) -> None:
    if s.key[m] == CLEAN:
        s.key[m] = FREE
        s.seeds[s.numbers[SEEDS]] = m
        s.numbers[SEEDS] += 1


@inner
def _gain(s: Shares, m: int, rate: int, n: int) -> None:
    """A flow no longer has this rate on a link."""
    s.left[m] += rate * n
    if rate >= s.above[m]:
        s.above_rate[m] -= rate * n
        s.above_load[m] -= n


@inner
def join(s: Shares, f: int) -> None:
    """The flow begins to move bytes; its rate is known after `repair`."""
    s.rate[f] = 0
    for q in range(s.route_ptr[f], s.route_ptr[f + 1]):
        m = s.route_link[q]
        i = s.first[m] + s.count[m]
        s.count[m] += 1
        s.at[q], s.entry[i], s.flow[i], s.times[i], s.rates[i] = i, q, f, s.route_times[q], OPEN
        s.load[m] += s.route_times[q]
        s.total[m] += s.route_times[q]
        _seed(s, m)


@inner
def leave(s: Shares, f: int) -> None:
    """The flow, which has a rate, is through."""
    for q in range(s.route_ptr[f], s.route_ptr[f + 1]):
        m, i = s.route_link[q], s.at[q]
        _gain(s, m, s.rates[i], s.times[i])
        s.total[m] -= s.times[i]
        s.count[m] -= 1
        last = s.first[m] + s.count[m]
        s.at[s.entry[last]] = i
        s.entry[i], s.flow[i], s.times[i], s.rates[i] = s.entry[last], s.flow[last], s.times[last], s.rates[last]
        if s.full[m] < FREE:
            _seed(s, m)


@inner
def _earliest(s: Shares, m: int) -> int:
    """A level that the one at which an open flow's link is full is not below, at once: those who do not count as rising
    take a bit more than they have, the others this level, and together it is all the link has.
    """
    load = s.load[m] + s.above_load[m]
    return (s.left[m] + s.above_rate[m] - (s.total[m] - load)) // load


@inner
def _level(s: Shares, m: int, level: int) -> int:
    """The level at which a link is full, from one that is not above it (Newton's method, from below)."""
    rates, times, begin, end = s.rates, s.times, s.first[m], s.first[m] + s.count[m]
    while True:
        load = s.load[m] + s.above_load[m]
        if load > 0:
            level = max(level, _earliest(s, m))
            if s.below_most[m] < level:  # all who may rise as far count
                level = max(level, (s.left[m] + s.above_rate[m]) // load)
                if level <= s.above_least[m]:
                    return level
        elif s.below_most[m] < level:
            return FREE
        rate, load, least, most = np.int64(0), np.int64(0), FREE, np.int64(-1)
        for i in range(begin, end):
            if rates[i] >= level:
                rate += rates[i] * times[i]
                load += times[i]
                least = min(least, rates[i])
            else:
                most = max(most, rates[i])
        s.above[m], s.above_rate[m], s.above_load[m], s.above_least[m], s.below_most[m] = level, rate, load, least, most


@inner
def _mark(s: Shares, f: int) -> None:
    if s.marked[f] != s.numbers[SWEEP]:
        s.marked[f] = s.numbers[SWEEP]
        s.before[f] = s.rate[f]
        s.changed[s.numbers[CHANGED]] = f
        s.numbers[CHANGED] += 1


@inner
def repair(s: Shares) -> int:
    """Make the rates fair again after flows joined and left; how many are in `changed`, with their rates before."""
    numbers, rates, full, key = s.numbers, s.rates, s.full, s.key
    numbers[SWEEP] += 1
    numbers[CHANGED] = 0
    sweep = numbers[SWEEP]
    for k in range(numbers[SEEDS]):
        m = s.seeds[k]
        _look_at(s, m, full[m] if s.load[m] == 0 else max(np.int64(0), min(full[m], _earliest(s, m))))
    numbers[SEEDS] = 0
    while numbers[QUEUED] > 0:
        m = s.heap[0]
        now, held = key[m], full[m]
        level = _level(s, m, now)
        raises = s.opened[m] != sweep and held < level
        following = held if raises else level
        if following > now and following < FREE:
            _look_at(s, m, following)
            continue
        begin, end = s.first[m], s.first[m] + s.count[m]
        if raises:
            s.opened[m] = sweep
            for i in range(begin, end):
                if rates[i] == held:
                    f = s.flow[i]
                    _mark(s, f)
                    for q in range(s.route_ptr[f], s.route_ptr[f + 1]):
                        other = s.route_link[q]
                        _gain(s, other, held, s.route_times[q])
                        s.load[other] += s.route_times[q]
                        rates[s.at[q]] = OPEN
                        earliest = max(now, min(full[other], _earliest(s, other)))
                        if key[other] == CLEAN or earliest < key[other]:
                            _look_at(s, other, earliest)
            continue
        numbers[QUEUED] -= 1
        s.place[m] = -1
        key[m] = CLEAN
        full[m] = level
        if numbers[QUEUED] > 0:
            s.heap[0] = s.heap[numbers[QUEUED]]
            _sift(s, 0)
        if level == FREE or (level == held and s.load[m] == 0):
            continue
        for i in range(begin, end):
            was = rates[i]
            if was == OPEN or was > level:
                f = s.flow[i]
                _mark(s, f)
                s.rate[f] = level
                for q in range(s.route_ptr[f], s.route_ptr[f + 1]):
                    other, n = s.route_link[q], s.route_times[q]
                    rates[s.at[q]] = level
                    s.left[other] -= level * n
                    if was == OPEN:
                        s.load[other] -= n
                    else:
                        _gain(s, other, was, n)
                        if key[other] == CLEAN and full[other] < FREE and other != m:
                            _look_at(s, other, full[other])
                    if level >= s.above[other]:
                        s.above_rate[other] += level * n
                        s.above_load[other] += n
                        s.above_least[other] = min(s.above_least[other], level)
                    else:
                        s.below_most[other] = max(s.below_most[other], level)
    return numbers[CHANGED]
