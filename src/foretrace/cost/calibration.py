"""`Calibration`: what operators cost on one machine, with one number of threads and one setting of the allocator.

A calibration travels with a graph (`TaskGraph.info.calibration`), so that techniques can look up how an operator
changes with its precision, size or layout, and a stored graph predicts the same again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from foretrace.cost import store
from foretrace.cost.machine import differences, fingerprint_of
from foretrace.cost.operator import Operator
from foretrace.cost.similar import Similar
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

    @classmethod
    def load_for(cls, graph: TaskGraph) -> Calibration:
        """What is stored for the machine, threads and allocator of a recording; empty where there is nothing.

        Raises ForetraceError where the stored file is damaged.
        """
        machine = fingerprint_of(graph.info.recording)
        return cls(machine=machine, seconds=store.load(machine) if machine else {})

    def save(self) -> Path:
        """Add the times to those stored for this machine; returns the file."""
        return store.save(self.machine, self.seconds)

    def misfits(self, graph: TaskGraph) -> list[str]:
        """What differs between the calibrated process and the recorded one, in words; empty where it fits."""
        recorded = fingerprint_of(graph.info.recording)
        return differences(self.machine, recorded) if recorded else ["what the recording says of its machine: nothing"]

    def fits(self, graph: TaskGraph) -> bool:
        """Whether it holds for the machine, threads and allocator of a recording."""
        return not self.misfits(graph)

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
        near = self.similar.ratio(before, after)
        return None if near is None else Ratio(value=near.value, low=near.low, high=near.high, how="similar operators")

    @cached_property
    def similar(self) -> Similar:
        """What the measured pairs say about pairs that were not measured."""
        return Similar(seconds=self.seconds)

    def lacking(self, operators: Iterable[Operator]) -> list[Operator]:
        """Those that were not measured, each once, in their order."""
        return [each for each in dict.fromkeys(operators) if each.key not in self.seconds]

    def extended(self, seconds: Mapping[str, float]) -> Calibration:
        """With more measured operators; newer times replace older ones."""
        return replace(self, seconds={**self.seconds, **seconds})
