"""Record a few steps of a `Training` in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foretrace.errors import ForetraceError
from foretrace.hardware.probe import cpu_peaks
from foretrace.hardware.processor import operator_threads
from foretrace.trace.recorder import RecordOptions, record
from foretrace.training.training import Training

_WAIT = 3  # unprofiled steps on each side: enough for the CPU time beside the recorded steps


def all_steps(steps: int) -> int:
    """Steps that run in all where so many are recorded."""
    return len(RecordOptions(wait=_WAIT, active=steps).phases(in_hook=False))


def record_steps(
    training: Training, folder: Path, *, name: str, steps: int, threads: int, tell: Callable[[float], None] | None
) -> None:
    """Record so many steps into a folder; of a CPU, with its peaks. Raises ForetraceError where it ends too early."""
    with operator_threads(threads):
        recorder = record(folder, wait=_WAIT, active=steps, samples=training.batch_size)
        if training.device == "cpu":
            recorder.extra["peaks"] = cpu_peaks(threads).as_dict()
        with recorder:
            for _ in training.steps():
                recorder.step()
                if tell is not None:
                    tell(recorder.steps_seen / all_steps(steps))
                if recorder.over:
                    break
    if recorder.path is None:
        raise ForetraceError(f"{name} ended before a step was recorded; let its loader give batches.")


def record_training(
    training: Training, folder: str | Path, *, facts: Mapping[str, Any] | None = None, **options: Any
) -> Path:
    """Train as many steps as a recording takes, into `folder`; the file that was written.

    `options` are those of `foretrace.record`, `facts` further keys of what it stores. Raises ForetraceError where the
    loader is empty.
    """
    with record(folder, samples=training.batch_size, **options) as recorder:
        recorder.extra |= facts or {}
        for _ in training.steps():
            recorder.step()
            if recorder.over:
                break
    if recorder.path is None:
        raise ForetraceError(f"{training.name} gave no batch to train on; check its loader.")
    return recorder.path
