"""Cables between machines and switches, and what machines get from them when several send at once.

Transfers take a path of fewest hops, always the same one; cables may form a tree or a mesh.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from foretrace.errors import ForetraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """A link between two named ends, in both directions; `gbit_s` is payload of all its strands one way."""

    ends: tuple[str, str]
    gbit_s: float
    latency_us: float = 0.0


def ring(cables: tuple[Cable, ...], nodes: Sequence[str]) -> tuple[float, float, str]:
    """Return Gbit/s of each, longest latency in us and bottleneck while every machine sends to the next one."""
    return _shared(cables, zip(nodes, (*nodes[1:], nodes[0]), strict=True), per_sender=1)


def exchange(cables: tuple[Cable, ...], nodes: Sequence[str]) -> tuple[float, float, str]:
    """Return Gbit/s that leave each, latency in us and bottleneck while every machine sends to all others evenly."""
    pairs = [(a, b) for a in nodes for b in nodes if a != b]
    return _shared(cables, pairs, per_sender=max(len(nodes) - 1, 1))


def _shared(
    cables: tuple[Cable, ...], pairs: Iterable[tuple[str, str]], *, per_sender: int
) -> tuple[float, float, str]:
    load: dict[tuple[int, bool], int] = {}
    latency_us = 0.0
    for source, target in pairs:
        if source == target:
            continue
        path = route(cables, source, target)
        latency_us = max(latency_us, sum(cables[at].latency_us for at, _ in path))
        for step in path:
            load[step] = load.get(step, 0) + 1
    if not load:
        return float("inf"), 0.0, "no cable"
    at, flows = min(load.items(), key=lambda item: cables[item[0][0]].gbit_s / item[1])
    cable = cables[at[0]]
    return per_sender * cable.gbit_s / flows, latency_us, f"{cable.ends[0]} – {cable.ends[1]}"


@lru_cache(maxsize=65_536)
def route(cables: tuple[Cable, ...], source: str, target: str) -> tuple[tuple[int, bool], ...]:
    """Return cables from one end to another: (index, forwards). Raises ForetraceError where nothing joins them."""
    came: dict[str, tuple[str, int, bool]] = {}
    neighbours = _neighbours(cables)
    queue = deque([source])
    while queue:
        end = queue.popleft()
        if end == target:
            break
        for other, at, forwards in neighbours.get(end, ()):
            if other != source and other not in came:
                came[other] = (end, at, forwards)
                queue.append(other)
    if target not in came:
        raise ForetraceError(f"no link leads from {source} to {target}; join them, or leave one of them out.")
    steps, end = [], target
    while end != source:
        end, at, forwards = came[end]
        steps.append((at, forwards))
    return tuple(reversed(steps))


@lru_cache(maxsize=64)
def _neighbours(cables: tuple[Cable, ...]) -> dict[str, tuple[tuple[str, int, bool], ...]]:
    found: dict[str, list[tuple[str, int, bool]]] = {}
    for at, cable in enumerate(cables):
        a, b = cable.ends
        found.setdefault(a, []).append((b, at, True))
        found.setdefault(b, []).append((a, at, False))
    return {end: tuple(each) for end, each in found.items()}


def cycle_in(cables: Iterable[tuple[str, str]]) -> tuple[str, str] | None:
    """Return the first cable that joins two ends which are joined already; None where the cables form trees."""
    group: dict[str, str] = {}

    def root(end: str) -> str:
        while group.setdefault(end, end) != end:
            end = group[end]
        return end

    for a, b in cables:
        one, other = root(a), root(b)
        if one == other:
            return a, b
        group[one] = other
    return None
