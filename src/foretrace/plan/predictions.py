"""Predictions of chains of techniques on one graph: each technique once behind the same ones, and the memory left."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from foretrace.deadline import Deadline
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.memory import MemorySplit
from foretrace.techniques.base import Technique

_MOST_TASKS = 1_000_000  # kept in memory, about 100 bytes each
_NOT_KEPT = re.compile(r"about ([\d.e+]+) MB per step need not be kept")
_SHRUNK = re.compile(r"about ([\d.e+]+) MB saved for the backward pass shrink to ([\d.e+]+) MB")


class Predictions:
    """Graphs by chain, and what a prediction and its range take by the clock of `deadline`."""

    def __init__(self, graph: TaskGraph, deadline: Deadline) -> None:
        self._graph = graph
        self._deadline = deadline
        self._known: OrderedDict[tuple[str, ...], TaskGraph] = OrderedDict()
        self._assumptions: dict[str, int] = {}

    def of(self, chain: Sequence[Technique]) -> TaskGraph:
        """Return the graph after these techniques. Raises NotApplicableError where one of them does not fit."""
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
        """Return what predicting this chain again would take, as far as its techniques were predicted before."""
        return sum(self._deadline.took(each.name) for each in chain)

    def range_seconds(self, chain: Sequence[Technique]) -> float:
        """Return what `whatif` would take: the chain, and what is behind an assumption for both of its ends."""
        ends = (2 * self._assumptions.get(each.name, 0) * self.seconds(chain[i:]) for i, each in enumerate(chain))
        return self.seconds(chain) + sum(ends)

    def _keep(self, names: tuple[str, ...], graph: TaskGraph) -> None:
        self._known[names] = graph
        while len(self._known) > 1 and sum(map(len, self._known.values())) > _MOST_TASKS:
            self._known.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Memory at the peak of a step, bytes, and with techniques that trade time for it.

    The recorded peak by category (`simulate.memory`) less what the techniques say that they need not keep. What they
    save beyond the activations alive at the peak does not count: there the peak is elsewhere. 16-bit activations of
    mixed precision are not reckoned with, so a prediction with it is on the safe side.
    """

    recorded: int
    activations: int  # of it
    buckets: int = 0  # copies of gradients that wait to be sent

    @classmethod
    def of(cls, split: MemorySplit) -> Peak:
        """Return the recorded one."""
        return cls(recorded=split.peak_bytes, activations=split.at_peak_bytes.get("activations", 0))

    def after(self, graph: TaskGraph, *, since: int = 0) -> int:
        """Return bytes at the peak of a graph; its changes from `since` on are techniques on the recording."""
        left = float(self.activations)
        for change in graph.changes[since:]:
            if found := _NOT_KEPT.search(change.what):
                left -= min(1e6 * float(found[1]), left)
            elif found := _SHRUNK.search(change.what):
                before, after = float(found[1]), float(found[2])
                left *= after / before if before else 1.0
        return round(self.recorded - self.activations + left) + self.buckets
