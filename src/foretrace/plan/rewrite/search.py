"""`search`: MetaFlow's relaxed backtracking over graphs (`BestFirst`): every rule at every place is a neighbour.

With alpha = 1 only what improves on the best is followed (greedy); above 1 the search can pass through graphs that are
worse, which rules that prepare for others need (a kernel is enlarged before it can be merged). Beside single places, a
rule is also applied at all of its places at once, so that a large graph needs few steps. The same costs give the same
answer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from foretrace.deadline import Deadline
from foretrace.plan.rewrite.costs import OperatorCosts
from foretrace.plan.rewrite.rules import GraphView, Rule
from foretrace.plan.rewrite.terms import Graph
from foretrace.search.minimise import Found, minimise
from foretrace.search.space import Infeasible, Problem, Space
from foretrace.search.strategies import BestFirst

_GROWTH = 2  # a graph with more than twice the operators (and some) is not followed
_SPARE = 8


class Derivation(NamedTuple):
    """A graph, and the rules that lead to it; "rule (all)" where applied at all places at once."""

    graph: Graph
    rules: tuple[str, ...]


@dataclass(frozen=True)
class Rewrites(Space[Derivation]):
    """What rules make of a graph."""

    rules: Sequence[Rule]

    def key(self, point: Derivation) -> Hashable:
        return point.graph.key

    def neighbours(self, point: Derivation, rng: Random) -> Iterator[Derivation]:
        return (Derivation(graph, (*point.rules, name)) for name, graph in neighbours(point.graph, self.rules))


class Seconds(Problem[Derivation]):
    """What graphs cost (s); those that have grown too large cannot be."""

    def __init__(self, graph: Graph, rules: Sequence[Rule], costs: OperatorCosts) -> None:
        self.space, self._costs, self._most = Rewrites(rules), costs, _GROWTH * len(graph.order()) + _SPARE

    def costs(self, points: Sequence[Derivation]) -> list[float]:
        fits = [len(point.graph.order()) <= self._most for point in points]
        self._costs.learn(point.graph for point, fit in zip(points, fits, strict=True) if fit)
        return [
            self._costs.of(point.graph) if fit else Infeasible(f"more than {self._most} operators")
            for point, fit in zip(points, fits, strict=True)
        ]


def search(
    graph: Graph, rules: Sequence[Rule], costs: OperatorCosts, *, alpha: float = 1.05, budget: int = 100,
    until: Deadline | None = None,
) -> Found[Derivation]:  # fmt: skip
    """Return the best graph that `budget` expansions reach.

    Args:
        graph: where to begin.
        rules: verified ones.
        costs: seconds of a graph.
        alpha: how much more than the best a graph may cost to be followed; 1 is greedy.
        budget: graphs to expand at most.
        until: when to stop with the best so far. None: no limit.

    """
    return minimise(
        Seconds(graph, rules, costs), strategy=BestFirst(alpha=alpha), starts=[Derivation(graph, ())], steps=budget,
        seconds=until,
    )  # fmt: skip


def neighbours(graph: Graph, rules: Sequence[Rule]) -> Iterator[tuple[str, Graph]]:
    """Yield every graph that one rule makes of this one, at one place or at all."""
    view = GraphView(graph)
    for rule in rules:
        count = 0
        for place in rule.places(view):
            changed = graph.replaced(place.pairs)
            if changed is not None:
                count += 1
                yield rule.name, changed
        if count > 1:
            everywhere, used = exhausted(graph, rule, most=count)
            if used > 1:
                yield f"{rule.name} (all)", everywhere


def exhausted(graph: Graph, rule: Rule, *, most: int) -> tuple[Graph, int]:
    """Return a graph with a rule applied again and again at its first place, at most so often; and how often it was."""
    used = 0
    while used < most:
        view = GraphView(graph)
        for place in rule.places(view):
            changed = graph.replaced(place.pairs)
            if changed is not None and changed.key != graph.key:
                graph = changed
                used += 1
                break
        else:
            break
    return graph, used
