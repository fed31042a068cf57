"""Large graphs in parts: minimum cuts through few substitutions, and windows across the cuts.

A cut between two parts forbids the substitutions that need operators of both, so an edge weighs one more than the
number of places that hold both of its ends (after Jia et al., MLSys 2019, section 5.2; there, operators have weights).
Every part is convex: no path leaves it and comes back, so parts can be rewritten one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf

from foretrace.plan.rewrite.rules import GraphView, Rule
from foretrace.plan.rewrite.term import Term
from foretrace.plan.rewrite.terms import Graph

_PINNED = 0.3  # share of the operators, at either end, that a cut does not pass through


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
    capacities: dict[tuple[int, int], float] = defaultdict(float)
    source, sink = n, n + 1
    for i in range(max(1, int(_PINNED * n))):
        capacities[source, i] = capacities[n - 1 - i, sink] = inf
    for (maker, reader), weight in edges.items():
        if maker in place and reader in place:
            capacities[place[maker], place[reader]] += weight
            capacities[place[reader], place[maker]] = inf  # what a part reads is in it or before it
    before = source_side(capacities, source, sink)
    first = [term for i, term in enumerate(order) if i in before]
    second = [term for i, term in enumerate(order) if i not in before]
    return [*_cut(first, edges, most), *_cut(second, edges, most)]


def source_side(capacities: Mapping[tuple[int, int], float], source: int, sink: int) -> set[int]:
    """Return the fewest nodes on the source's side of a minimum cut, by the capacities of edges (from, to)."""
    import networkx  # PyTorch brings it along
    from networkx.algorithms.flow import dinitz

    graph = networkx.DiGraph()
    graph.add_weighted_edges_from(((*edge, room) for edge, room in capacities.items()), weight="capacity")
    left = dinitz(graph, source, sink).edges
    free = networkx.DiGraph(edge for edge in left if left[edge]["flow"] < left[edge]["capacity"])
    return {source, *networkx.descendants(free, source)} if source in free else {source}


def boundary(graph: Graph, inside: Iterable[Term]) -> tuple[list[Term], list[Term]]:
    """Return (what a set of operators reads from outside, weights included; what others or the caller read of it)."""
    members = set(inside)
    given: dict[Term, None] = {}
    for term in sorted(members, key=lambda each: each.number):
        given.update(dict.fromkeys(each for each in term.inputs if each not in members))
    outside = {each for term in graph.order() if term not in members for each in term.inputs}
    outside |= set(graph.outputs)
    return list(given), [term for term in sorted(members, key=lambda each: each.number) if term in outside]
