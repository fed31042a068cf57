"""The measurements that techniques ask for, made where the operators run: a graph with the calibration it lacks.

What a technique wants depends on the graph that those before it lead to, so each is asked after the others have been
predicted with what is known by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from foretrace.cost.bench import Measured
from foretrace.cost.calibration import Calibration
from foretrace.cost.operator import Operator
from foretrace.graph.taskgraph import TaskGraph
from foretrace.techniques.base import Technique

Measure = Callable[[list[Operator]], Measured]


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibrated:
    """A graph that carries what was measured for its techniques."""

    graph: TaskGraph
    seconds: Mapping[str, float] = field(default_factory=dict)  # what was measured now, by operator key
    failed: Mapping[str, str] = field(default_factory=dict)  # what could not be, with the reason


def calibrated(graph: TaskGraph, techniques: Sequence[Technique], measure: Measure) -> Calibrated:
    """`graph` with the times of all operators that `techniques`, applied in this order, want and it lacks.

    `measure` times operators on the machine of the recording (`foretrace.cost.bench.measure`). Raises
    NotApplicableError where a technique does not fit.
    """
    found = Calibration.of(graph)
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    for number, technique in enumerate(techniques):
        changed = found.on(graph) if found else graph
        for earlier in techniques[:number]:
            changed = earlier.predict(changed)
        lacking = [each for each in found.lacking(technique.wants(changed)) if each.key not in failed]
        if lacking:
            measured = measure(lacking)
            seconds |= measured.seconds
            failed |= measured.failed
            found = found.extended(measured.seconds)
    return Calibrated(graph=found.on(graph) if found else graph, seconds=seconds, failed=failed)
