"""The measurements that techniques ask for, made where the operators run: a graph with the calibration it lacks.

What a technique wants depends on the graph that those before it lead to, so each is asked after the others have been
predicted with what is known by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from foretrace.cost.operators.bench import NO_TIME, OperatorTimings
from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.deadline import Deadline, never
from foretrace.graph.taskgraph import TaskGraph
from foretrace.techniques.base import Technique


class Measure(Protocol):
    """Times operators on the machine of the recording within seconds: `foretrace.cost.operators.bench.measure`."""

    def __call__(self, operators: list[Operator], /, *, budget_s: float) -> OperatorTimings: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class CalibratedGraph:
    """A graph that carries what was measured for its techniques."""

    graph: TaskGraph
    seconds: Mapping[str, float] = field(default_factory=dict)  # what was measured now, by operator key
    failed: Mapping[str, str] = field(default_factory=dict)  # what could not be, with the reason


def calibrated(
    graph: TaskGraph, techniques: Sequence[Technique], measure: Measure, until: Deadline | None = None
) -> CalibratedGraph:
    """Return `graph` with the times of all operators that `techniques`, applied in this order, want and it lacks.

    After `until` no technique is asked any more: predicting those before it takes time, too. Raises
    NotApplicableError where a technique does not fit.
    """
    until = until or never()
    found = Calibration.of(graph)
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    for number, technique in enumerate(techniques):
        if until.over:
            failed[str(technique)] = NO_TIME
            continue
        changed = found.on(graph) if found else graph
        for earlier in techniques[:number]:
            changed = earlier.predict(changed)
        lacking = [each for each in found.lacking(technique.wants(changed)) if each.key not in failed]
        if lacking:
            measured = measure(lacking, budget_s=until.budget_s)
            seconds |= measured.seconds
            failed |= measured.failed
            found = found.extended(measured.seconds)
    return CalibratedGraph(graph=found.on(graph) if found else graph, seconds=seconds, failed=failed)
