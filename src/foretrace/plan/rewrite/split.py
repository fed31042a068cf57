"""Large graphs in parts: minimum cuts through few substitutions, and windows across the cuts.

A cut between two parts forbids the substitutions that need operators of both, so an edge weighs one more than the
number of places that hold both of its ends (after Jia et al., MLSys 2019, section 5.2; there, operators have weights).
Every part is convex: no path leaves it and comes back, so parts can be rewritten one by one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from foretrace.plan.rewrite.rules import GraphView, Rule
from foretrace.plan.rewrite.term import Term
from foretrace.plan.rewrite.terms import Graph

INFINITE = 1 << 40
_PINNED = 0.3  # share of the operators, at either end, that a cut does not pass through


class MaximumFlow:
    """Maximum flow by Dinic's algorithm; capacities are whole numbers."""

    def __init__(self, count: int) -> None:
        self.edges: list[list[int]] = [[] for _ in range(count)]  # of each node, indices into `to` and `room`
        self.to: list[int] = []
        self.room: list[int] = []

    def add(self, source: int, target: int, capacity: int) -> None:
        """Add an edge."""
        for a, b, room in ((source, target, capacity), (target, source, 0)):
            self.edges[a].append(len(self.to))
            self.to.append(b)
            self.room.append(room)

    def run(self, source: int, sink: int) -> int:
        """Return the most that can flow."""
        total = 0
        while (level := self._levels(source))[sink] >= 0:
            at = [0] * len(self.edges)
            while pushed := self._push(source, sink, level, at):
                total += pushed
        return total

    def reached(self, source: int) -> list[bool]:
        """Return, after `run`, the nodes on the source's side of a minimum cut."""
        return [each >= 0 for each in self._levels(source)]

    def _levels(self, source: int) -> list[int]:
        level = [-1] * len(self.edges)
        level[source] = 0
        waiting = deque([source])
        while waiting:
            node = waiting.popleft()
            for edge in self.edges[node]:
                if self.room[edge] > 0 and level[self.to[edge]] < 0:
                    level[self.to[edge]] = level[node] + 1
                    waiting.append(self.to[edge])
        return level

    def _push(self, source: int, sink: int, level: list[int], at: list[int]) -> int:
        """Return one path of a blocking flow, found depth first without recursion."""
        path: list[int] = []
        node = source
        while node != sink:
            while at[node] < len(self.edges[node]):
                edge = self.edges[node][at[node]]
                if self.room[edge] > 0 and level[self.to[edge]] == level[node] + 1:
                    path.append(edge)
                    node = self.to[edge]
                    break
                at[node] += 1
            else:
                if not path:
                    return 0
                node = self.to[path.pop() ^ 1]
                at[node] += 1
        pushed = min(self.room[edge] for edge in path)
        for edge in path:
            self.room[edge] -= pushed
            self.room[edge ^ 1] += pushed
        return pushed


def by_level(graph: Graph) -> list[Term]:
    """Return operators in a topological order in which what is side by side stands together."""
    level: dict[Term, int] = {}
    order = graph.order()
    for term in order:
        level[term] = 1 + max((level.get(each, 0) for each in term.inputs), default=0)
    return sorted(order, key=lambda each: (level[each], each.number))


def weights(graph: Graph, rules: Sequence[Rule]) -> dict[tuple[Term, Term], int]:
    """Return of every edge (maker, reader) one more than the number of places that hold both."""
    view = GraphView(graph)
    found: dict[tuple[Term, Term], int] = {
        (source, term): 1 for term in view.order for source in term.inputs if view.runs(source)
    }
    for rule in rules:
        for place in rule.places(view):
            looked = set(place.looked_at)
            shared = {each.inputs[0] for each in looked if each.inputs}
            for term in looked:
                for source in term.inputs:
                    both = source in looked or (len(looked) > 1 and source in shared)
                    if both and (source, term) in found:
                        found[source, term] += 1
    return found


def parts(graph: Graph, rules: Sequence[Rule], *, most: int = 30) -> list[list[Term]]:
    """Return all operators in convex parts of at most so many, each part after those that it reads from."""
    edges = weights(graph, rules)
    return _cut(by_level(graph), edges, most)


def _cut(order: list[Term], edges: dict[tuple[Term, Term], int], most: int) -> list[list[Term]]:
    n = len(order)
    if n <= most:
        return [order] if order else []
    place = {term: i for i, term in enumerate(order)}
    flow = MaximumFlow(n + 2)
    source, sink = n, n + 1
    pinned = max(1, int(_PINNED * n))
    for i in range(pinned):
        flow.add(source, i, INFINITE)
        flow.add(n - 1 - i, sink, INFINITE)
    for (maker, reader), weight in edges.items():
        if maker in place and reader in place:
            flow.add(place[maker], place[reader], weight)
            flow.add(place[reader], place[maker], INFINITE)  # what a part reads is in it or before it
    flow.run(source, sink)
    before = flow.reached(source)
    first = [term for i, term in enumerate(order) if before[i]]
    second = [term for i, term in enumerate(order) if not before[i]]
    return [*_cut(first, edges, most), *_cut(second, edges, most)]


def boundary(graph: Graph, inside: Iterable[Term]) -> tuple[list[Term], list[Term]]:
    """Return (what a set of operators reads from outside, weights included; what others or the caller read of it)."""
    members = set(inside)
    given: dict[Term, None] = {}
    for term in sorted(members, key=lambda each: each.number):
        given.update(dict.fromkeys(each for each in term.inputs if each not in members))
    outside = {each for term in graph.order() if term not in members for each in term.inputs}
    outside |= set(graph.outputs)
    return list(given), [term for term in sorted(members, key=lambda each: each.number) if term in outside]
