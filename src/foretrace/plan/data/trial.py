"""Train the choice of a plan for real, within its limit, and beside it with all rows in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace as but

from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Row
from foretrace.experiment.processes import limited
from foretrace.experiment.statistics import Ratio, paired_ratio
from foretrace.experiment.trial import TriedPrediction, figured
from foretrace.plan.data.plan import DataPlan, GraphSource, Tell
from foretrace.training.rows.out_of_core import EpochRun, TrainedGraph, TrainingJob, train


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTrial:
    """What became of a plan. Seconds are those of the processor and of waiting for the disk, as in the plan."""

    plan: DataPlan
    trained: TrainedGraph
    in_memory: TrainedGraph  # without a limit

    @property
    def trial(self) -> TriedPrediction:
        """Epochs, held against the predicted one."""
        return figured(self.plan.choice.epoch_s, seconds(self.trained.epochs), clock="cpu", seed=self.plan.job.seed)

    @property
    def over_memory(self) -> Ratio:
        """Epochs over those with all rows in memory."""
        return paired_ratio(seconds(self.in_memory.epochs), seconds(self.trained.epochs))

    def row(self) -> Row:
        """What the ledger keeps of it."""
        job, sizes = self.plan.job, self.plan.sizes
        own = {"loader": job.loader, "memory": self.plan.limit_bytes, **self.plan.choice.parameters}
        return self.trial.row(
            f"plan-data {job.task}", parameters=own, model=self.plan.graph,
            size=f"{sizes.nodes} nodes, {sizes.edges} edges, batch {job.batch}, width {job.width}",
            notes=("Seconds are those of the processor and of waiting for the disk.",),
        )  # fmt: skip


def seconds(epochs: Sequence[EpochRun]) -> list[float]:
    """What the epochs took."""
    return [each.s for each in epochs]


def try_plan(plan: DataPlan, source: GraphSource, *, epochs: int = 3, tell: Tell | None = None) -> DataTrial:
    """Train so many epochs of the choice within the plan's limit, and in memory without one, in a temporary folder.

    Raises ForetraceError for fewer than 3 epochs, and where the limit does not suffice.
    """
    if epochs < 3:
        raise ForetraceError(f"`epochs=` must be 3 or more for a median, got {epochs}.")
    say = tell or (lambda what, share: None)
    with tempfile.TemporaryDirectory() as folder:
        say("partitioning", 0.0)
        graph = source.partitioned(Path(folder) / "graph", plan.sizes.partitions, seed=plan.job.seed)

        def trained(job: TrainingJob, name: str, limit: int) -> TrainedGraph:
            (Path(folder) / name).mkdir()
            given = but(job, folder=str(graph.folder), into=str(Path(folder) / name), epochs=epochs)
            return limited(train, given, memory_bytes=limit)

        say("training within the limit", 0.2)
        chosen = trained(plan.job, "chosen", plan.limit_bytes)
        say("training in memory", 0.6)
        memory = but(plan.job, loader="in memory", buffer=0, order="")
        return DataTrial(plan=plan, trained=chosen, in_memory=trained(memory, "memory", 0))
