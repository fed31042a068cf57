"""One worker alone, recorded: what a prediction for many starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from foretrace.cost.operators import bench
from foretrace.cost.operators.calibration import Calibration
from foretrace.deadline import Deadline
from foretrace.experiment.job import Job
from foretrace.experiment.links.arms import is_emulated, training_of
from foretrace.experiment.measure import CALIBRATION_S, PLAIN, recorded_calmly, recording_of, unrest
from foretrace.experiment.messages import Record, Recorded
from foretrace.graph import store
from foretrace.graph.builder import build
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.overhead import unprofiled
from foretrace.techniques.arguments import parse_all
from foretrace.techniques.base import Technique
from foretrace.techniques.measuring import calibrated
from foretrace.trace.trace import Trace
from foretrace.training.training import Training

_RECORDINGS = 3
_PUNCTUAL = 0.02  # median over shortest step of an emulated training on a machine that does little else


def record(request: Record) -> Recorded:
    """Record the training of one worker, build its graph, time the operators that techniques ask for, save it.

    Raises ForetraceError where the training does not exist or its graph cannot be built.
    """
    import torch

    torch.set_num_threads(request.threads)
    setup = request.setup
    training = training_of(setup)
    if is_emulated(setup.work):
        trace, attempts = _punctual(training)
    else:
        job = Job(techniques=(), model=setup.work, size=setup.size, seed=setup.seed)
        trace, attempts = recorded_calmly(training, job, None, _nobody)
    graph = build(trace, None)
    if is_emulated(setup.work):
        graph = replace(graph, info=replace(graph.info, recording={**graph.info.recording, "emulated": setup.work}))
    graph, operators, notes = _calibrated(unprofiled(graph), [parse_all(texts) for texts in request.arms])
    store.save(graph, Path(request.graph))
    again = (f"The worker alone was recorded {attempts} times: others disturbed it.",) if attempts > 1 else ()
    return Recorded(operators=operators, notes=(*again, *notes))


def _punctual(training: Training) -> tuple[Trace, int]:
    """The recording of an emulated training whose steps were woken in time, and how many were made."""
    found: list[tuple[float, Trace]] = []
    while not found or (found[-1][0] > _PUNCTUAL and len(found) < _RECORDINGS):
        trace = recording_of(training, None)
        found.append((unrest(trace, PLAIN, "wall_ns"), trace))
    return min(found, key=lambda pair: pair[0])[1], len(found)


def _calibrated(graph: TaskGraph, arms: Sequence[Sequence[Technique]]) -> tuple[TaskGraph, int, tuple[str, ...]]:
    """The graph with times of the operators that the techniques of each arm ask for, how many, and what to note."""
    until = Deadline(CALIBRATION_S)
    graph = replace(Calibration.load_for(graph), seconds={}).on(graph)  # everything is timed again, in this state
    timed, failed = 0, dict[str, str]()

    for techniques in arms:
        found = calibrated(graph, techniques, bench.measure, until)
        graph = found.graph
        timed += len(found.seconds)
        failed |= found.failed
    if not failed:
        return graph, timed, ()
    why = next(iter(failed.values()))
    return graph, timed, (f"{len(failed)} of {len(failed) + timed} operators could not be timed alone ({why}).",)


def _nobody(what: str, share: float) -> None:
    """Progress that nobody follows."""
