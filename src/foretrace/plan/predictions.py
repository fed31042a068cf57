"""Predictions of chains of techniques on one graph, each technique predicted once behind the same ones before it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from foretrace.deadline import Deadline
from foretrace.graph.taskgraph import TaskGraph
from foretrace.techniques.base import Technique

_MOST_TASKS = 1_000_000  # kept in memory, about 100 bytes each


class Predictions:
    """Graphs by chain, and what a prediction and its range take by the clock of `deadline`."""

    def __init__(self, graph: TaskGraph, deadline: Deadline) -> None:
        self._graph = graph
        self._deadline = deadline
        self._known: OrderedDict[tuple[str, ...], TaskGraph] = OrderedDict()
        self._assumptions: dict[str, int] = {}

    def of(self, chain: Sequence[Technique]) -> TaskGraph:
        """The graph after these techniques. Raises NotApplicableError where one of them does not fit."""
        names = tuple(map(str, chain))
        for length in range(len(names), -1, -1):
            if not length or names[:length] in self._known:
                break
        graph = self._known[names[:length]] if length else self._graph
        for i in range(length, len(chain)):
            technique = chain[i]
            with self._deadline.part(names[i]), self._deadline.part(technique.name):
                changed = technique.predict(graph)
            count = sum(bool(each.flag) for each in technique.uncertain(graph))
            self._assumptions[technique.name] = max(count, self._assumptions.get(technique.name, 0))
            graph = changed
            self._keep(names[: i + 1], graph)
        return graph

    def seconds(self, chain: Sequence[Technique]) -> float:
        """What predicting this chain again would take, as far as its techniques were predicted before."""
        return sum(self._deadline.took(each.name) for each in chain)

    def range_seconds(self, chain: Sequence[Technique]) -> float:
        """What `whatif` would take: the chain, and what is behind an assumption once for each of its two ends."""
        ends = (2 * self._assumptions.get(each.name, 0) * self.seconds(chain[i:]) for i, each in enumerate(chain))
        return self.seconds(chain) + sum(ends)

    def _keep(self, names: tuple[str, ...], graph: TaskGraph) -> None:
        self._known[names] = graph
        while len(self._known) > 1 and sum(map(len, self._known.values())) > _MOST_TASKS:
            self._known.popitem(last=False)
