"""Train the choice of a plan for real, within its limit, and beside it with all rows in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
from msgspec.structs import replace as but

from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Row
from foretrace.experiment.processes import limited
from foretrace.experiment.statistics import Ratio, paired_ratio
from foretrace.experiment.trial import figured
from foretrace.plan.data.plan import DataPlan, GraphSource, Tell
from foretrace.training.rows.out_of_core import TrainedGraph, TrainingJob, train


class DataTrial(msgspec.Struct, frozen=True, kw_only=True):
    """The choice, trained within its limit, and the same with all rows in memory. Seconds are CPU and waiting."""

    epochs_s: tuple[float, ...]
    waited_s: tuple[float, ...]  # for the disk
    moved_bytes: int  # of partitions, read and written in the last epoch
    peak_bytes: int  # resident, beyond what the process had before
    limit_bytes: int  # enforced
    quality: float  # AUC of links kept apart, or accuracy on test nodes
    in_memory_s: tuple[float, ...]
    in_memory_peak_bytes: int
    in_memory_quality: float
    measured: Ratio  # epochs over the predicted one
    over_memory: Ratio  # epochs over those in memory
    error: float  # of the prediction
    verdict: str
    direct: bool  # whether the page cache was passed by


def try_plan(
    plan: DataPlan, source: GraphSource, *, epochs: int = 3, tell: Tell | None = None
) -> tuple[Row, DataTrial]:
    """Train so many epochs of the choice within the plan's limit, and in memory without one, in a temporary folder.

    What the ledger keeps of it, and what came of it. Raises ForetraceError for fewer than 3 epochs, and where the limit
    does not suffice.
    """
    if epochs < 3:
        raise ForetraceError(f"`epochs=` must be 3 or more for a median, got {epochs}.")
    say = tell or (lambda what, share: None)
    job, sizes, choice = plan.job, plan.sizes, plan.choice
    with tempfile.TemporaryDirectory() as folder:
        say("partitioning", 0.0)
        graph = source.partitioned(Path(folder) / "graph", sizes.partitions, seed=job.seed)

        def trained(job: TrainingJob, name: str, limit: int) -> TrainedGraph:
            (Path(folder) / name).mkdir()
            given = but(job, folder=str(graph.folder), into=str(Path(folder) / name), epochs=epochs)
            return limited(train, given, memory_bytes=limit)

        say("training within the limit", 0.2)
        chosen = trained(job, "chosen", plan.limit_bytes)
        say("training in memory", 0.6)
        memory = trained(but(job, loader="in memory", buffer=0, order=""), "memory", 0)
    epochs_s, in_memory_s = (tuple(each.s for each in run.epochs) for run in (chosen, memory))
    tried = figured((choice.epoch_s, choice.low_s, choice.high_s), epochs_s, clock="cpu", seed=job.seed)
    row = tried.row(
        f"plan-data {job.task}", model=plan.graph,
        parameters={"loader": job.loader, "memory": plan.limit_bytes, **choice.parameters},
        size=f"{sizes.nodes} nodes, {sizes.edges} edges, batch {job.batch}, width {job.width}",
        notes=("Seconds are those of the processor and of waiting for the disk.",),
    )  # fmt: skip
    last = chosen.epochs[-1]
    return row, DataTrial(
        epochs_s=epochs_s, waited_s=tuple(each.wait_s for each in chosen.epochs),
        moved_bytes=last.bytes_read + last.bytes_written, peak_bytes=chosen.peak_bytes,
        limit_bytes=chosen.limit_bytes, quality=chosen.quality, in_memory_s=in_memory_s,
        in_memory_peak_bytes=memory.peak_bytes, in_memory_quality=memory.quality, measured=tried.measured,
        over_memory=paired_ratio(in_memory_s, epochs_s), error=tried.error, verdict=tried.verdict, direct=chosen.direct,
    )  # fmt: skip
