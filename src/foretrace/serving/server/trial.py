"""Run fat, thin and the planned split in turns, after the plan was made, and judge the plan by it.

Instances of a server let threads that wait sleep, so fat is slower there than PyTorch by itself on the same cores. So
that a gain is not one over the server's own settings alone, the model runs by itself, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Row
from foretrace.experiment.statistics import Arm, Ratio, paired_ratio
from foretrace.experiment.trial import TriedPrediction, changed
from foretrace.serving.server.measure import run_in_turns
from foretrace.serving.server.plan import FAT, THIN, PlannedSplit, SplitPlan

AGAIN = "again"  # fat's second arm
ALONE = "alone"  # one process with all cores and PyTorch's own settings, beside no server


@dataclass(frozen=True, kw_only=True)
class SplitTrial:
    """A plan and what became of it."""

    plan: SplitPlan
    after: PlannedSplit  # the planned split; the runner-up where that is fat
    arms: Mapping[str, Arm]  # by name of the split, fat once more, and the model by itself (not with ONNX Runtime)
    trial: TriedPrediction  # latencies of a batch over fat's

    @property
    def quickest(self) -> str:
        """The split that had the least median latency."""
        own = {name: arm for name, arm in self.arms.items() if name not in (AGAIN, ALONE)}
        return min(own, key=lambda name: own[name].median_s)

    @property
    def over_alone(self) -> Ratio | None:
        """Latency of the compared split over that of the model by itself, from blocks of the same rounds."""
        if ALONE not in self.arms:
            return None
        return paired_ratio(self.arms[ALONE].blocks_s, self.arms[self.after.name].blocks_s)

    def row(self) -> Row:
        """Return the row of the ledger: fat is the baseline, a batch is a step; `arms["serve"]` has all splits."""
        plan, split = self.plan, self.after.split
        assert plan.source is not None
        predicted = {each.name: each.latency_s for each in plan.splits if each.name in self.arms}
        return self.trial.row(
            f"serve-split batch={plan.batch} split={split}", parameters={"batch": plan.batch, "split": split},
            model=plan.source.name, size=plan.source.size, threads=plan.threads, samples=(plan.batch, plan.batch),
            notes=plan.notes,
            arms={
                "wall": {name: msgspec.to_builtins(arm) for name, arm in self.arms.items()},
                "uncertain": self.trial.uncertain,
                "serve": {"chosen": plan.chosen.name, "quickest": self.quickest, "predicted_s": predicted,
                          "over_alone": msgspec.to_builtins(self.over_alone)},
            },
        )  # fmt: skip


def try_plan(plan: SplitPlan, *, seconds: float, tell: Callable[[float], None] | None = None) -> SplitTrial:
    """Run the splits of a plan in turns, fat twice. Raises ForetraceError where there is nothing to compare."""
    if plan.source is None:
        raise ForetraceError("a recorded profile has no model that could be run; leave `run=` out.")
    after = next((each for each in plan.splits if each.over_fat is not None), None)
    if after is None or after.over_fat is None or plan.named(FAT) is None:
        raise ForetraceError(
            "there are no two splits to compare: one thread or one sample cannot be split, and fat needs a profile; "
            "leave `run=` out."
        )
    named = {each.name: each.instances for each in plan.splits if each.name in (FAT, THIN, after.name)}
    named[AGAIN] = named[FAT]
    if "torch" in plan.source.libraries:
        named[ALONE] = named[FAT]
    runs = run_in_turns(plan.source, named, cores=plan.cores, seconds=seconds, own=ALONE, tell=tell)
    arms = {name: Arm.of(run.wall_s) for name, run in runs.items()}
    trial = changed(after.over_fat, arms[FAT], arms[AGAIN], arms[after.name])
    return SplitTrial(plan=plan, after=after, arms=arms, trial=trial)
