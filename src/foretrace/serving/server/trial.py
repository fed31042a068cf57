"""Run fat, thin and the planned split in turns, after the plan was made, and judge the plan by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Row
from foretrace.experiment.statistics import Arm
from foretrace.experiment.trial import TriedPrediction, changed
from foretrace.serving.server.measure import run_in_turns
from foretrace.serving.server.plan import FAT, THIN, PlannedSplit, SplitPlan

AGAIN = "again"  # fat's second arm


@dataclass(frozen=True, kw_only=True)
class SplitTrial:
    """A plan and what became of it."""

    plan: SplitPlan
    after: PlannedSplit  # the planned split; the runner-up where that is fat
    arms: Mapping[str, Arm]  # by name of the split, and fat once more
    trial: TriedPrediction  # latencies of a batch over fat's

    @property
    def quickest(self) -> str:
        """The split that had the least median latency."""
        return min((name for name in self.arms if name != AGAIN), key=lambda name: self.arms[name].median_s)

    def row(self) -> Row:
        """The row of the ledger: fat is the baseline, a batch is a step; `arms["serve"]` has all splits."""
        plan, split = self.plan, self.after.split.text
        assert plan.source is not None
        predicted = {each.name: each.latency_s for each in plan.splits if each.name in self.arms}
        return self.trial.row(
            f"serve-split batch={plan.batch} split={split}", parameters={"batch": plan.batch, "split": split},
            model=plan.source.name, size=plan.source.size, threads=plan.threads, samples=(plan.batch, plan.batch),
            notes=plan.notes,
            arms={
                "wall": {name: msgspec.to_builtins(arm) for name, arm in self.arms.items()},
                "uncertain": self.trial.uncertain,
                "serve": {"chosen": plan.chosen.name, "quickest": self.quickest, "predicted_s": predicted},
            },
        )  # fmt: skip


def try_plan(plan: SplitPlan, *, seconds: float, tell: Callable[[float], None] | None = None) -> SplitTrial:
    """Run the splits of a plan in turns, fat twice. Raises ForetraceError where there is nothing to compare."""
    if plan.source is None:
        raise ForetraceError("a recorded profile has no model that could be run; leave `run=` out.")
    after = next((each for each in plan.splits if each.name in plan.ratios), None)
    if after is None or plan.named(FAT) is None:
        raise ForetraceError(
            "there are no two splits to compare: one thread or one sample cannot be split, and fat needs a profile; "
            "leave `run=` out."
        )
    named = {each.name: each.split for each in plan.splits if each.name in (FAT, THIN, after.name)}
    runs = run_in_turns(plan.source, named | {AGAIN: named[FAT]}, cores=plan.cores, seconds=seconds, tell=tell)
    arms = {name: Arm.of(run.wall_s) for name, run in runs.items()}
    trial = changed(plan.ratios[after.name], arms[FAT], arms[AGAIN], arms[after.name])
    return SplitTrial(plan=plan, after=after, arms=arms, trial=trial)
