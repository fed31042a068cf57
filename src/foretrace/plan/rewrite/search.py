"""`search`: MetaFlow's relaxed backtracking over graphs.

The cheapest graph known so far is taken, every rule applied at every place, and what is new and costs less than alpha
times the best is kept to be taken later (Jia et al., MLSys 2019, section 5.1). With alpha = 1 only what improves on the
best is followed (greedy); above 1 the search can pass through graphs that are worse, which rules that prepare for
others need (a kernel is enlarged before it can be merged). Beside single places, a rule is also applied at all of
its places at once, so that a large graph needs few steps. The same costs give the same answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from foretrace.deadline import Deadline, never
from foretrace.plan.rewrite.costs import OperatorCosts
from foretrace.plan.rewrite.rules import GraphView, Rule
from foretrace.plan.rewrite.terms import Graph

_GROWTH = 2  # a graph with more than twice the operators (and some) is not followed
_SPARE = 8
Tell = Callable[[int, float], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchResult:
    """The best graph of a search, and how it was reached."""

    graph: Graph
    seconds: float
    first_s: float  # of the graph that the search began with
    rules: tuple[str, ...]  # in the order of their use; "rule (all)" where applied at all places at once
    steps: int  # graphs that were expanded
    seen: int  # different graphs that were priced
    complete: bool  # nothing was left to try


@dataclass
class _Queue:
    heap: list[tuple[float, int, Graph, tuple[str, ...]]] = field(default_factory=list)
    count: int = 0

    def push(self, seconds: float, graph: Graph, rules: tuple[str, ...]) -> None:
        heapq.heappush(self.heap, (seconds, self.count, graph, rules))
        self.count += 1


def search(
    graph: Graph, rules: Sequence[Rule], costs: OperatorCosts, *, alpha: float = 1.05, budget: int = 100,
    until: Deadline | None = None, tell: Tell | None = None,
) -> SearchResult:  # fmt: skip
    """The best graph that `budget` expansions reach.

    Args:
        graph: where to begin.
        rules: verified ones.
        costs: seconds of a graph.
        alpha: how much more than the best a graph may cost to be followed; 1 is greedy.
        budget: graphs to expand at most.
        until: when to stop with the best so far; an expansion that would not end by then is not begun. None: no limit.
        tell: called after every expansion with their number and the best cost.

    """
    first = best_s = costs.of(graph)
    best = graph
    best_rules: tuple[str, ...] = ()
    most = _GROWTH * len(graph.order()) + _SPARE
    queue, seen, steps = _Queue(), {graph.key}, 0
    queue.push(first, graph, ())
    until = until or never()
    while queue.heap and steps < budget and until.allows("expansion"):
        seconds, _, at, path = heapq.heappop(queue.heap)
        if seconds > alpha * best_s:
            queue.heap.clear()
            break
        steps += 1
        with until.part("expansion"):
            new = []
            for name, candidate in neighbours(at, rules):
                if candidate.key not in seen:
                    seen.add(candidate.key)
                    if len(candidate.order()) <= most:
                        new.append((name, candidate))
            costs.learn(each for _, each in new)
            for name, candidate in new:
                cost = costs.of(candidate)
                # The best so far without this one, so that greedy continues from what is better.
                if cost < alpha * best_s:
                    queue.push(cost, candidate, (*path, name))
                if cost < best_s:
                    best, best_s, best_rules = candidate, cost, (*path, name)
        if tell is not None:
            tell(steps, best_s)
    return SearchResult(
        graph=best, seconds=best_s, first_s=first, rules=best_rules, steps=steps, seen=len(seen),
        complete=not queue.heap,
    )  # fmt: skip


def neighbours(graph: Graph, rules: Sequence[Rule]) -> Iterator[tuple[str, Graph]]:
    """Every graph that one rule makes of this one, at one place or at all."""
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
    """A graph with a rule applied again and again at its first place, at most so often; and how often it was."""
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
