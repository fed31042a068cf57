"""Record, calibrate, predict, apply, run, compare: one verification, in the process that `worker` prepared."""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from foretrace import executor
from foretrace.cost.operators import bench
from foretrace.cost.operators.calibration import Calibration
from foretrace.deadline import Deadline
from foretrace.errors import ForetraceError
from foretrace.experiment import cores, statistics
from foretrace.experiment.arms import Running, plan, take_turns, waits, workers
from foretrace.experiment.job import LOADING, Assumed, Job, Outcome, Residual
from foretrace.experiment.messages import Worker
from foretrace.experiment.statistics import Arm, Ratio
from foretrace.experiment.trial import changed, versions
from foretrace.graph.builder import build
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.compare import compare
from foretrace.simulate.overhead import Clock, unprofiled
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.techniques.arguments import parse_all
from foretrace.techniques.base import Technique
from foretrace.techniques.measuring import calibrated
from foretrace.techniques.whatif import WhatIf, whatif
from foretrace.trace.read import read
from foretrace.trace.trace import Trace
from foretrace.training.recording import record_training
from foretrace.zoo.registry import job as make_job

if TYPE_CHECKING:
    from foretrace.training.training import Training

Tell = Callable[[str, float], None]

RESIDENT_BATCHES = 4
LOSSES = 5  # first steps of an arm whose losses are kept
RESIDUALS = 20  # rows kept
CALIBRATION_S = 20.0
_RECORDING_S = 10.0  # a recording that would take longer gets fewer steps
_RECORDINGS = 4
PLAIN = ("before", "after")  # phases of steps without the profiler
_CALM = 0.05  # median over shortest step of a recording that nothing disturbed


def measure(job: Job, tell: Tell) -> Outcome:
    """Run one verification.

    Raises NotApplicableError where a technique does not fit, ForetraceError for a job that does not exist, and
    whatever the user's script raises.
    """
    import torch

    began = time.monotonic()
    techniques = parse_all(job.techniques)
    _need_cores(job.threads)
    torch.set_num_threads(job.threads)
    tell("making the training", 0.0)
    training = make_job(job.model, job.size, seed=job.seed)().on(job.device)
    if not job.loads:
        training = training.with_batches(RESIDENT_BATCHES)
    gc.collect()
    gc.freeze()  # what was imported so far is not walked in the middle of a step
    # One clock for the recording, the prediction and the arms. CPU time is not touched by what else wants the core.
    loads = any(each.name in LOADING for each in techniques)
    clock: Clock = "cpu" if job.threads == 1 and not waits(training) and not loads else "wall"

    tell("recording the baseline", 0.05)
    recorded, attempts = recorded_calmly(training, job, clock, tell)
    tell("building the graph", 0.2)
    graph = unprofiled(build(recorded, None))
    tell("timing operators alone", 0.25)
    again = (f"The baseline was recorded {attempts} times: others disturbed it.",) if attempts > 1 else ()
    graph, operators_timed, calibration_notes = _calibrated(graph, techniques, training.device, tell)
    tell("predicting", 0.45)
    predicted = whatif(graph, techniques)

    tell("applying", 0.5)
    treated = training
    for technique in techniques:
        treated = technique.apply(treated)
    arms = {
        "before": Running(training=training.copied(), fresh=workers(training) > 0),
        "after": Running(training=treated, fresh=workers(treated) > 0),
        "again": Running(training=training.copied(), fresh=workers(training) > 0),
    }
    needed = min(max(job.threads, 1 + max(workers(training), workers(treated))), executor.cores())
    if clock == "cpu" and waits(treated):
        raise ForetraceError(
            f"{' + '.join(job.techniques)} makes the step wait for other processes, and the prediction was made in CPU "
            "time; give `batches=loader` with a loader that has workers."
        )
    patience = min(cores.PATIENCE_S, job.seconds) if clock == "wall" else 0.0
    free = [cores.wait_for_cores(needed, patience)]
    tell("running the arms", 0.52)
    losses = {name: arms[name].losses(LOSSES, job.seed) for name in arms}
    turns = plan(
        {"before": predicted.before_s, "after": predicted.after_s, "again": predicted.before_s},
        job.seconds,
        workers=max(workers(training), workers(treated)),
        epoch=0 if not job.loads else min(len(training), len(treated)),
        period=math.lcm(*(each.period for each in techniques)),
    )
    gc.collect()
    gc.freeze()
    rounds = take_turns(
        arms, turns, one_thread=clock == "cpu", tell=lambda share: tell("running the arms", 0.52 + 0.38 * share)
    )
    for arm in arms.values():
        arm.close()
    free.append(cores.free_cores(most=needed))

    tell("recording the treated arm", 0.9)
    walls = {name: Arm.of([arm.wall_s[i] for i in rounds.kept]) for name, arm in arms.items()}
    cpus = {name: Arm.of([arm.cpu_s[i] for i in rounds.kept]) for name, arm in arms.items()}
    first, second, changed_arm = ((cpus if clock == "cpu" else walls)[name] for name in ("before", "again", "after"))
    times_s = predicted.before.step_times_ns / 1e9
    uncertain = statistics.strays(times_s.tolist(), [first, second])
    if clock == "wall":
        uncertain = cores.taken(needed, free) or uncertain
    expected = foretold(predicted, predicted.before_s)
    trial = changed(expected, first, second, changed_arm, clock=clock, seed=job.seed, uncertain=uncertain)
    residual, treated_s, notes = _residual(predicted, treated, trial.measured, clock, keep=_kept(job, "after"))
    tell("done", 1.0)
    info = predicted.before.graph.info
    return Outcome(
        job=job,
        techniques=tuple(str(each) for each in techniques),
        parameters={each.name: parameters_of(each) for each in techniques},
        recorded_s=predicted.before_s,
        trial=trial,
        assumptions=assumed(predicted),
        before=first,
        again=second,
        walls=walls,
        cpus=cpus,
        stretch=walls["before"].median_s / max(cpus["before"].median_s, 1e-9),
        rounds=len(rounds.kept),
        repeated_rounds=rounds.repeated,
        disturbed_rounds=rounds.disturbed,
        steps_per_block=turns.steps,
        samples_before=training.batch_size,
        samples_after=treated.batch_size,
        losses_before=_finite(losses["before"]),
        losses_after=_finite(losses["after"]),
        residual=residual,
        treated_recorded_s=treated_s,
        calibrated=operators_timed,
        free_cores=min(free),
        machine=dict(info.recording.get("machine") or {}),
        device=str((info.recording.get("device") or {}).get("name") or training.device),
        versions=versions(),
        allocator=cores.allocator(),
        notes=(*again, *calibration_notes, *notes, *info.notes),
        took_s=time.monotonic() - began,
    )


def verify(job: Job, worker: Worker) -> Outcome:
    """Measure as `measure` does, in a process of its own."""
    try:
        return measure(job, worker.tell)
    except RuntimeError as error:
        if lacking := bench.lacks(error):
            raise ForetraceError(f"{' + '.join(job.techniques)} cannot run: {lacking}.") from error
        raise


def _need_cores(threads: int) -> None:
    """Refuse several threads without cores for them: they wait for each other, and steps can take 40 times as long."""
    if threads > executor.cores():
        raise ForetraceError(
            f"`threads={threads}`: this process may use {executor.cores()} cores; give at most as many."
        )
    if threads > 1 and (free := cores.wait_for_cores(threads, cores.PATIENCE_S)) < 0.7 * threads:
        raise ForetraceError(
            f"`threads={threads}` needs as many free cores and the machine has {free:.1f} left; stop what else is "
            "running, or use `threads=1`."
        )


def _kept(job: Job, arm: str) -> Path | None:
    """Return the folder for the recording of one arm, if recordings are to be kept."""
    return Path(job.keep) / arm if job.keep else None


def recorded_calmly(
    training: Training, job: Job, clock: Clock | None, tell: Tell, first: Callable[[], None] | None = None
) -> tuple[Trace, int]:
    """Return the baseline's recording that others disturbed least, of at most _RECORDINGS, and how many were made.

    `first` is called before each.

    A prediction is as good as the recording that it starts from; what others take of caches and frequency lengthens
    some steps and not others.
    """
    found: list[tuple[float, Trace]] = []
    for number in range(_RECORDINGS):
        if first is not None:
            first()
        trace = recording_of(training.copied(), clock, steps=job.steps, keep=_kept(job, "before"))
        found.append((max(unrest(trace, phases, "cpu_ns") for phases in (("active",), PLAIN)), trace))
        if found[-1][0] <= _CALM or job.threads > 1 or waits(training) or job.keep:
            break
        tell("recording the baseline", 0.05 + 0.05 * (number + 1))
    return min(found, key=lambda pair: pair[0])[1], len(found)


def unrest(trace: Trace, phases: Sequence[str], clock: str) -> float:
    """Return how much longer the median step of some phases took than the shortest, on one clock; 0 where none was
    timed.
    """
    steps = trace.ranks[0].recording.get("steps", []) if trace.ranks else []
    times = [step[clock] for step in steps if step.get("phase") in phases and step.get(clock)]
    return median(times) / min(times) - 1.0 if times else 0.0


def recording_of(
    training: Training, clock: Clock | None, *, steps: int = 0, brief: bool = False, keep: Path | None = None
) -> Trace:
    """Return a recording of the training, read; a `brief` one is enough to compare layers. It stays in `keep`, if
    given.

    It says that it is to be looked at on `clock`; without one, `unprofiled` chooses.
    """
    trained = training.steps()
    next(trained, None)  # first allocations
    began = time.perf_counter()
    next(trained, None)
    step_s = time.perf_counter() - began
    trained.close()
    options: dict[str, Any] = {"active": steps} if steps else {}
    if brief or 36 * step_s > _RECORDING_S:
        options = {"wait": 3, "active": steps or 4, "skip_first": 1, "rehearse": False}
    with tempfile.TemporaryDirectory(prefix="foretrace-") as folder:
        return read(record_training(training, keep or folder, facts={"clock": clock} if clock else {}, **options))


def _calibrated(
    graph: TaskGraph, techniques: Sequence[Technique], device: str, tell: Tell
) -> tuple[TaskGraph, int, tuple[str, ...]]:
    """Return the graph with the times of the operators that the techniques ask for, how many were timed, and what to
    note.

    Everything is timed again: an operator and its changed twin are to be compared in one state of the machine. What
    `foretrace calibrate` has stored for this machine stands in for what could not be timed. The times are stored there
    themselves, so that a what-if on this recording (--keep) answers the same.
    """

    def told(share: float) -> None:
        tell("timing operators alone", 0.25 + 0.2 * share)

    found = calibrated(graph, techniques, partial(bench.measure, progress=told, device=device), Deadline(CALIBRATION_S))
    stored = Calibration.load_for(graph)
    known = replace(stored, seconds={**stored.seconds, **found.seconds})
    lacking = [key for key in found.failed if key not in stored.seconds]
    notes: tuple[str, ...] = ()
    if found.seconds and known.machine:
        try:
            replace(known, seconds=found.seconds).save()
        except ForetraceError as error:
            notes = (f"The operator times were not stored: {error}",)
    if lacking:
        why = found.failed[lacking[0]]
        notes += (f"{len(lacking)} of {len(lacking) + len(found.seconds)} operators could not be timed alone ({why}).",)
    return (known.on(graph) if known else graph), len(found.seconds), notes


def _residual(
    predicted: WhatIf, treated: Training, measured: Ratio, clock: Clock, *, keep: Path | None
) -> tuple[tuple[Residual, ...], float, tuple[str, ...]]:
    """Return where the recorded treated step differs from the predicted one, largest first; its length; what went
    wrong.
    """
    try:
        recorded: Timeline = simulate(unprofiled(build(recording_of(treated, clock, brief=True, keep=keep), None)))
        rows = compare(predicted.after, recorded).rows
    except ForetraceError as error:
        return (), 0.0, (f"The residual is not attributed: {error}",)
    scale = measured.value * predicted.before_s / recorded.step_time_s
    found = [
        Residual(
            layer=row.layer,
            phase=row.phase,
            predicted_s=row.before_ns / 1e9,
            recorded_s=scale * row.after_ns / 1e9,
        )
        for row in rows
    ]
    found.sort(key=lambda row: -abs(row.difference_s))
    return tuple(found[:RESIDUALS]), recorded.step_time_s, ()


def foretold(predicted: WhatIf, baseline_s: float) -> Ratio:
    """Return a prediction as a ratio to the baseline's step."""
    low_s, high_s = predicted.interval_s
    return Ratio(value=predicted.after_s / baseline_s, low=low_s / baseline_s, high=high_s / baseline_s)


def assumed(predicted: WhatIf) -> tuple[Assumed, ...]:
    """Return what a prediction rests on, those that matter most first."""
    return tuple(
        Assumed(**asdict(each.assumption), step_at_low_s=each.at_low_s, step_at_high_s=each.at_high_s)
        for each in predicted.assumptions
    )


def _finite(losses: Sequence[float]) -> tuple[float | None, ...]:
    return tuple(loss if math.isfinite(loss) else None for loss in losses)


def parameters_of(technique: Technique) -> dict[str, Any]:
    """Return what the user decided, and what was left at its default; priors only where they were replaced."""
    values = {each.name: (getattr(technique, each.field), each.default) for each in technique.parameters()}
    return {name: value for name, (value, default) in values.items() if value is not None or default is not None}
