"""What benchmarks/scale_rig.py asks of workers: to record the ranks of a job, all at once."""

from __future__ import annotations

import msgspec

from foretrace.experiment.links.arms import training_of
from foretrace.experiment.messages import Setup, Worker
from foretrace.techniques.arguments import parse_all
from foretrace.training.recording import record_training


class RecordRank(msgspec.Struct, frozen=True, kw_only=True):
    """Record a training with its techniques into a folder, which gets a file per rank."""

    setup: Setup
    folder: str
    steps: int


def record_rank(given: RecordRank, worker: Worker) -> str:
    """Record in a worker that has joined the others; the file."""
    training = training_of(given.setup)
    for technique in parse_all(given.setup.techniques):
        training = technique.apply(training)
    return str(record_training(training, given.folder, wait=3, active=given.steps, skip_first=1, rehearse=False))
