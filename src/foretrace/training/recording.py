"""Record a few steps of a `Training`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretrace.errors import ForetraceError
from foretrace.trace.recorder import record

if TYPE_CHECKING:
    from foretrace.training.training import Training


def record_training(
    training: Training,
    folder: str | Path,
    *,
    facts: Mapping[str, Any] | None = None,
    tell: Callable[[int], None] | None = None,
    **options: Any,
) -> Path:
    """Train as many steps as a recording takes, into `folder`; the file that was written.

    `options` are those of `foretrace.record`, `facts` further keys of what it stores; `tell` hears how many steps
    are done. Raises ForetraceError where the loader is empty.
    """
    with record(folder, samples=training.batch_size, **options) as recorder:
        recorder.extra |= facts or {}
        for _ in training.steps():
            recorder.step()
            if tell is not None:
                tell(recorder.steps_seen)
            if recorder.over:
                break
    if recorder.path is None:
        raise ForetraceError(f"{training.name} gave no batch to train on; check its loader.")
    return recorder.path
