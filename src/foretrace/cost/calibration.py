"""`Calibration`: what operators cost on one machine, with one number of threads and one setting of the allocator.

A calibration travels with a graph (`TaskGraph.info.calibration`), so that techniques can look up how an operator
changes with its precision, size or layout, and a stored graph predicts the same again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foretrace.cost.operator import Operator
from foretrace.graph.taskgraph import TaskGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Time of an operator relative to another, with its 80 % range, and how it was found."""

    value: float
    low: float
    high: float
    how: str  # "measured", "similar operators", ...


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Seconds per call of operators, by `Operator.key`."""

    machine: Mapping[str, Any] = field(default_factory=dict)  # what it holds for: see `fingerprint`
    seconds: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: TaskGraph) -> Calibration:
        """The calibration that a graph carries; an empty one where it carries none."""
        stored = graph.info.calibration
        return cls(machine=stored.get("machine", {}), seconds=stored.get("seconds", {}))

    def on(self, graph: TaskGraph) -> TaskGraph:
        """The graph with this calibration in the place of its own."""
        stored = {"machine": dict(self.machine), "seconds": dict(self.seconds)}
        return replace(graph, info=replace(graph.info, calibration=stored))

    def __bool__(self) -> bool:
        return bool(self.seconds)

    def time_s(self, operator: Operator) -> float | None:
        """Measured seconds per call, None if this very call was not measured."""
        return self.seconds.get(operator.key)

    def ratio(self, before: Operator, after: Operator) -> Ratio | None:
        """Time of `after` relative to `before`; None where neither they nor similar pairs were measured."""
        first, second = self.time_s(before), self.time_s(after)
        if first and second:
            value = second / first
            return Ratio(value=value, low=0.93 * value, high=1.07 * value, how="measured")
        return None

    def lacking(self, operators: Iterable[Operator]) -> list[Operator]:
        """Those that were not measured, each once, in their order."""
        return [each for each in dict.fromkeys(operators) if each.key not in self.seconds]

    def extended(self, seconds: Mapping[str, float]) -> Calibration:
        """With more measured operators; newer times replace older ones."""
        return replace(self, seconds={**self.seconds, **seconds})
