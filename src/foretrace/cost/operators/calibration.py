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

from foretrace.cost.operators import store
from foretrace.cost.operators.machine import differences, fingerprint_of
from foretrace.cost.operators.operator import Operator
from foretrace.cost.operators.similar import OperatorRatio, Similar
from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import TaskGraph

_APART = 0.03  # times that differ by less with data near and far say nothing about where it lies


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Seconds per call: by `Operator.key` with cold caches, by `Operator.near_key` with warm caches."""

    machine: Mapping[str, Any] = field(default_factory=dict)  # what it holds for: see `fingerprint`
    seconds: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: TaskGraph) -> Calibration:
        """Return the calibration that a graph carries; an empty one where it carries none."""
        stored = graph.info.calibration
        return cls(machine=stored.get("machine", {}), seconds=stored.get("seconds", {}))

    def on(self, graph: TaskGraph) -> TaskGraph:
        """Return the graph with this calibration in the place of its own.

        Raises ForetraceError where it says that it holds for another machine than the recorded one.
        """
        if self.machine and (other := self.misfits(graph)):
            raise ForetraceError(
                f"these times hold for another machine than the recording's: {', '.join(other)}; run foretrace "
                "calibrate run on the recording, where it was made."
            )
        stored = {"machine": dict(self.machine), "seconds": dict(self.seconds)}
        return replace(graph, info=replace(graph.info, calibration=stored))

    @classmethod
    def load_for(cls, graph: TaskGraph) -> Calibration:
        """Return what is stored for the machine, threads and allocator of a recording; empty where there is nothing.

        Raises ForetraceError where the stored file is damaged.
        """
        machine = fingerprint_of(graph.info.recording)
        return cls(machine=machine, seconds=store.load(machine) if machine else {})

    def save(self) -> Path:
        """Add the times to those stored for this machine; returns the file."""
        return store.save(self.machine, self.seconds)

    def misfits(self, graph: TaskGraph) -> list[str]:
        """Return what differs between the calibrated process and the recorded one, in words; empty where it fits."""
        recorded = fingerprint_of(graph.info.recording)
        return differences(self.machine, recorded) if recorded else ["what the recording says of its machine: nothing"]

    def __bool__(self) -> bool:
        return bool(self.seconds)

    def time_s(self, operator: Operator) -> float | None:
        """Return measured seconds per call, None if this very call was not measured."""
        return self.seconds.get(operator.key)

    def midway_s(self, operator: Operator) -> float | None:
        """Return the mean of the seconds per call with data near and far, for calls that find half of their data in a
        cache.
        """
        far = self.time_s(operator)
        return None if far is None else (far + self.seconds.get(operator.near_key, far)) / 2

    def times_s(self, before: Operator, after: Operator, own_s: float = 0.0) -> tuple[float, float] | None:
        """Return measured seconds per call of both, None if either was not measured.

        How cold the caches of a call are in a step decides much of its time, and the recorded time tells:
        where `own_s` (of `before`, as recorded; 0 if unknown) stands between its times with data near and far, `after`
        is taken to stand, too.
        """
        far = self.time_s(before), self.time_s(after)
        if not far[0] or not far[1]:
            return None
        near = [self.seconds.get(each.near_key, time_s) for each, time_s in ((before, far[0]), (after, far[1]))]
        apart = far[0] - near[0]
        place = 1.0
        if own_s > 0 and apart > _APART * far[0]:
            place = min(max((own_s - near[0]) / apart, 0.0), 1.0)
        first, second = (low + place * (high - low) for low, high in zip(near, (far[0], far[1]), strict=True))
        return first, second

    def ratio(self, before: Operator, after: Operator, own_s: float = 0.0) -> OperatorRatio | None:
        """Return the time of `after` relative to `before`; None where neither they nor similar pairs were measured.

        `own_s` is the recorded time of `before`, see `times_s`.
        """
        found = self.times_s(before, after, own_s)
        if found is None:
            return self.similar.ratio(before, after)
        value = found[1] / found[0]
        return OperatorRatio(value=value, low=0.93 * value, high=1.07 * value, timed=True)

    @cached_property
    def similar(self) -> Similar:
        """What the measured pairs say about pairs that were not measured."""
        return Similar(seconds=self.seconds)

    def lacking(self, operators: Iterable[Operator]) -> list[Operator]:
        """Return those that were not measured, each once, in their order."""
        return [each for each in dict.fromkeys(operators) if each.key not in self.seconds]

    def extended(self, seconds: Mapping[str, float]) -> Calibration:
        """Return it with more measured operators; newer times replace older ones."""
        return replace(self, seconds={**self.seconds, **seconds})
