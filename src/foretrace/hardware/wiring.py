"""How the devices of one machine are joined by direct links, and how many rings fit on them.

Where a switch joins all devices, any of them reach each other at full rate. Where cables do, what a collective
reaches depends on which devices take part: NCCL runs as many rings at a time as the cables allow, so bus bandwidth is
the rate of a cable times the number of rings. On eight V100 in a hybrid cube mesh that is 1, 2, 4, 2, 2, 4 and 6 rings
for the first 2 to 8 devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

_MOST_TRIED = 20_000  # sets of rings; what is found by then counts
_MOST_RINGS = 2_000  # different rings looked at

_Pair = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Cables between the devices of a machine: pairs (a, b), a < b, and how many cables join them."""

    name: str
    devices: int
    cables: tuple[tuple[int, int, int], ...] = field(repr=False)
    source: str = ""

    def rings(self, workers: int) -> int:
        """Return rings through the first `workers` devices that share no cable in one direction; 0 where there is none.

        A device that no ring of cables passes is reached through a peer, as NCCL forwards.
        """
        return _rings(self, workers)[0]

    def forwards(self, workers: int) -> bool:
        """Return whether those rings lead through a peer somewhere."""
        return _rings(self, workers)[1]


@lru_cache(maxsize=256)
def _rings(wiring: Wiring, workers: int) -> tuple[int, bool]:
    if not 2 <= workers <= wiring.devices:
        return 0, False
    cables = [each for each in wiring.cables if max(each[:2]) < workers]
    free = {pair: count for a, b, count in cables for pair in ((a, b), (b, a))}
    if workers == 2:
        return free.get((0, 1), 0), False
    if len(free) == workers * (workers - 1) and len(set(free.values())) == 1:
        # Every pair alike: the cables split into rings without rest, but for 4 and 6 devices (Tillson, 1980).
        each = next(iter(free.values()))
        return (workers - 1) * each - (1 if each == 1 and workers in (4, 6) else 0), False
    direct = list(_through(free, workers, forward=False))
    rings = direct or list(_through(free, workers, forward=True))
    return _most(rings, dict(free), _bound(free, workers)), not direct and bool(rings)


def _bound(free: Mapping[_Pair, int], workers: int) -> int:
    """Return cables of the device that has the fewest: every ring leaves every device once."""
    return min(sum(count for (a, _), count in free.items() if a == device) for device in range(workers))


def _through(free: Mapping[_Pair, int], workers: int, *, forward: bool) -> Iterator[tuple[_Pair, ...]]:
    """Yield the cables that rings through all devices use; with `forward` a hop may lead through one device between."""
    hops: dict[int, list[tuple[int, tuple[_Pair, ...]]]] = {device: [] for device in range(workers)}
    for a, b in free:
        hops[a].append((b, ((a, b),)))
    if forward:
        for a, middle in free:
            for left, b in free:
                if left == middle and b != a and (a, b) not in free:
                    hops[a].append((b, ((a, middle), (middle, b))))
    found = 0
    stack: list[tuple[int, frozenset[int], tuple[_Pair, ...]]] = [(0, frozenset({0}), ())]
    while stack and found < _MOST_RINGS:
        at, seen, used = stack.pop()
        for to, cables in hops[at]:
            if to == 0 and len(seen) == workers:
                ring = used + cables
                if all(ring.count(cable) <= free[cable] for cable in set(ring)):
                    found += 1
                    yield ring
            elif to not in seen:
                stack.append((to, seen | {to}, used + cables))


def _most(rings: list[tuple[_Pair, ...]], free: dict[_Pair, int], bound: int) -> int:
    """Return the largest number of rings (one may count several times) that fit on the cables together."""
    best = tried = 0

    def search(at: int, taken: int) -> None:
        nonlocal best, tried
        best = max(best, taken)
        tried += 1
        for number in range(at, len(rings)):
            if best == bound or tried > _MOST_TRIED:
                return
            ring = rings[number]
            for cable in ring:
                free[cable] -= 1
            if all(free[cable] >= 0 for cable in ring):
                search(number, taken + 1)
            for cable in ring:
                free[cable] += 1

    search(0, 0)
    return best


HYBRID_CUBE_MESH = Wiring(
    name="hybrid-cube-mesh",
    devices=8,
    cables=(
        (0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 2), (1, 2, 2), (1, 3, 1), (1, 5, 2), (2, 3, 2),
        (2, 6, 1), (3, 7, 1), (4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2),
    ),
    source="eight V100 as in DGX-1 and NDv2: six cables each, as nvidia-smi topo -m shows them",
)  # fmt: skip
FULL_MESH = Wiring(
    name="full-mesh",
    devices=8,
    cables=tuple((a, b, 1) for a in range(8) for b in range(a + 1, 8)),
    source="eight devices, one cable per pair, as eight MI300X",
)
KNOWN: Mapping[str, Wiring] = {each.name: each for each in (HYBRID_CUBE_MESH, FULL_MESH)}
