"""Run fat, thin and the planned split in turns, after the plan was made, and judge the plan by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import msgspec

from foretrace.errors import ForetraceError
from foretrace.experiment import cores, statistics
from foretrace.experiment.ledger import Row, new_row
from foretrace.experiment.measure import versions
from foretrace.experiment.statistics import Arm, Ratio, Verdict, paired_ratio
from foretrace.serving.server.measure import run_in_turns
from foretrace.serving.server.plan import FAT, THIN, PlannedSplit, SplitPlan
from foretrace.trace.observe.machine import machine

AGAIN = "again"  # fat's second arm
CLOCK = "wall"


@dataclass(frozen=True, kw_only=True)
class SplitTrial:
    """A plan and what became of it. Ratios are latencies of a batch over fat's."""

    plan: SplitPlan
    after: PlannedSplit  # the planned split; the runner-up where that is fat
    arms: Mapping[str, Arm]  # by name of the split, and fat once more
    predicted: Ratio
    measured: Ratio
    same: Ratio  # fat against itself
    uncertain: str  # why nothing was concluded
    verdict: Verdict

    @property
    def quickest(self) -> str:
        """The split that had the least median latency."""
        return min((name for name in self.arms if name != AGAIN), key=lambda name: self.arms[name].median_s)

    @property
    def error(self) -> float:
        """Predicted over measured ratio, less 1."""
        return self.predicted.value / self.measured.value - 1


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
    baseline = [(a + b) / 2 for a, b in zip(arms[FAT].blocks_s, arms[AGAIN].blocks_s, strict=True)]
    measured = paired_ratio(baseline, arms[after.name].blocks_s)
    same = paired_ratio(arms[FAT].blocks_s, arms[AGAIN].blocks_s)
    uncertain = statistics.too_uncertain([arms[each] for each in (FAT, AGAIN, after.name)], measured, CLOCK)
    predicted = plan.ratios[after.name]
    return SplitTrial(
        plan=plan, after=after, arms=arms, predicted=predicted, measured=measured, same=same, uncertain=uncertain,
        verdict=statistics.verdict(predicted, measured, same=same, uncertain=uncertain),
    )  # fmt: skip


def row_of(trial: SplitTrial) -> Row:
    """The row of the ledger: fat is the baseline, a batch is a step; `arms["serve"]` has all splits."""
    plan, split = trial.plan, trial.after.split.text
    assert plan.source is not None
    predicted = {each.name: each.latency_s for each in plan.splits if each.name in trial.arms}
    return new_row(
        SimpleNamespace(threads=plan.threads, seed=0),
        SimpleNamespace(before=trial.arms[FAT], same=trial.same, machine=machine(), allocator=cores.allocator(),
                        notes=plan.notes, versions=versions()),
        techniques=(f"serve-split batch={plan.batch} split={split}",), after=trial.arms[trial.after.name],
        predicted=trial.predicted, measured=trial.measured, assumptions=(), model=plan.source.name,
        size=plan.source.size, batches="ready", device="cpu", clock=CLOCK, error=trial.error,
        covered=trial.predicted.holds(trial.measured.value), verdict=trial.verdict, samples_before=plan.batch,
        samples_after=plan.batch, residual=(), parameters={"serve-split": {"batch": plan.batch, "split": split}},
        arms={
            "wall": {name: msgspec.to_builtins(arm) for name, arm in trial.arms.items()},
            "uncertain": trial.uncertain,
            "serve": {"chosen": plan.chosen.name, "quickest": trial.quickest, "predicted_s": predicted},
        },
    )  # fmt: skip
