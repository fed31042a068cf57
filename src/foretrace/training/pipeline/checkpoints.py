"""Checkpoints of a pipeline: a file per process of one number of updates; without all of them it is no checkpoint.

Nothing is drained: a process keeps its state when it has made that many updates, while micro-batches of the next batch
are under way. They are computed again from the first micro-batch of that batch, on the same weights.
"""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import torch

from foretrace.errors import ForetraceError
from foretrace.files import write_bytes
from foretrace.training.pipeline.job import PipelineJob
from foretrace.training.pipeline.runtime import StageWorker
from foretrace.training.pipeline.schedule import PipelineSchedule

_FILE = re.compile(r"update-(\d+)-process-(\d+)-of-(\d+)\.pt")


def keep(folder: Path, worker: StageWorker) -> None:
    """Write the state of a process, whole or not at all."""
    kept = {"like": _like(worker.job, worker.schedule), **worker.state()}
    buffer = io.BytesIO()
    torch.save(kept, buffer)
    write_bytes(_path(folder, worker.done, worker.rank, len(worker.schedule.rows)), buffer.getvalue())


def latest(folder: Path, processes: int) -> int:
    """Return the largest number of updates of which every process has kept its state; 0 where there is none."""
    found: dict[int, int] = {}
    for path in folder.glob("update-*.pt"):
        name = _FILE.fullmatch(path.name)
        if name and int(name[3]) == processes:
            found[int(name[1])] = found.get(int(name[1]), 0) + 1
    return max((updates for updates, files in found.items() if files == processes), default=0)


def kept(folder: Path, job: PipelineJob, schedule: PipelineSchedule, rank: int) -> dict[str, Any]:
    """Return the state of a process before the schedule's first batch.

    Raises ForetraceError where a process kept none, or another job or schedule did.
    """
    processes = len(schedule.rows)
    missing = [r for r in range(processes) if not _path(folder, schedule.first, r, processes).is_file()]
    if missing:
        raise ForetraceError(
            f"{folder} has no file of process {missing[0]} of {processes} after {schedule.first} updates; the last "
            f"checkpoint of all processes is that of {latest(folder, processes)} updates."
        )
    path = _path(folder, schedule.first, rank, processes)
    try:
        found: dict[str, Any] = torch.load(path, weights_only=True)
        like = found.pop("like")
    except Exception as error:
        raise ForetraceError(f"{path} is no checkpoint of a pipeline ({type(error).__name__}); remove it.") from None
    if like != _like(job, schedule):
        raise ForetraceError(
            f"{path} was kept by a pipeline of {like}, not of {_like(job, schedule)}; cut and schedule it as then."
        )
    return found


def _like(job: PipelineJob, schedule: PipelineSchedule) -> str:
    return (
        f"layers {list(job.cut)}, {schedule.micro_batches} micro-batches, versions {list(schedule.versions)}, seed "
        f"{job.seed}"
    )


def _path(folder: Path, updates: int, rank: int, processes: int) -> Path:
    return folder / f"update-{updates}-process-{rank}-of-{processes}.pt"
