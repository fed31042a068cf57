"""What a session came to: every arm's prediction beside its measurement, and its row of the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from foretrace.experiment import statistics
from foretrace.experiment.ledger import Row, new_row
from foretrace.experiment.links.job import ArmOutcome, LinkJob, LinkOutcome
from foretrace.experiment.measure import assumed, foretold, parameters_of
from foretrace.experiment.messages import TimedSteps
from foretrace.experiment.statistics import Arm, Ratio, paired_ratio
from foretrace.techniques.base import Technique
from foretrace.techniques.whatif import WhatIf

CLOCK = "wall"  # workers wait for each other
CPU = "cpu"

Rounds = Sequence[Sequence[TimedSteps]]  # by round and worker


@dataclass(frozen=True, kw_only=True)
class Ran:
    """An arm that was predicted and has run."""

    techniques: tuple[str, ...]
    used: tuple[Technique, ...]
    predicted: WhatIf
    blocks: Rounds
    buckets: tuple[int, ...]


def judge(job: LinkJob, arm: Ran, baseline_s: float, before: Arm, again: Arm, same: Ratio) -> ArmOutcome:
    """What became of one arm's prediction; ratios are compared round by round with the mean of the baseline's arms."""
    measured = summed(arm.blocks)
    baseline = [(a + b) / 2 for a, b in zip(before.blocks_s, again.blocks_s, strict=True)]
    ratio = paired_ratio(baseline, measured.blocks_s, seed=job.seed)
    low_s, high_s = arm.predicted.interval_s
    expected = foretold(arm.predicted, baseline_s)
    uncertain = statistics.too_uncertain([before, again, measured], ratio, CLOCK)
    distributed = arm.predicted.after.graph.info.recording.get("distributed") or {}
    return ArmOutcome(
        techniques=arm.techniques,
        parameters={each.name: parameters_of(each) for each in arm.used},
        predicted_s=arm.predicted.after_s,
        predicted_low_s=low_s,
        predicted_high_s=high_s,
        measured=measured,
        predicted_ratio=expected,
        measured_ratio=ratio,
        verdict=statistics.verdict(expected, ratio, same=same, uncertain=uncertain),
        covered=expected.holds(ratio.value),
        uncertain=uncertain,
        predicted_buckets=tuple(int(each) for each in distributed.get("buckets", ())),
        buckets=arm.buckets,
        losses=tuple(round_[0].loss for round_ in arm.blocks),
        assumptions=assumed(arm.predicted),
    )


def summed(blocks: Rounds) -> Arm:
    """Steps by round: workers wait for each other, so the slowest one's is the step."""
    return Arm.of([max(each.wall_s for each in round_) for round_ in blocks])


def rows_of(outcome: LinkOutcome) -> tuple[Row, ...]:
    """A row of the ledger per arm. Step and ratio are on the wall clock; `arms["rig"]` holds the link and the rest."""
    return tuple(_row(outcome, arm) for arm in outcome.arms)


def _row(outcome: LinkOutcome, arm: ArmOutcome) -> Row:
    job = outcome.job
    return new_row(
        job,
        outcome,
        techniques=arm.techniques,
        predicted=arm.predicted_ratio,
        measured=arm.measured_ratio,
        after=arm.measured,
        assumptions=arm.assumptions,
        model=Path(job.work).name if job.work.endswith(".py") else job.work,
        size=setting(job),
        batches="ready",
        device=CPU,
        clock=CLOCK,
        error=arm.error,
        covered=arm.covered,
        verdict=arm.verdict,
        samples_before=outcome.samples,
        samples_after=outcome.samples,
        parameters={
            name: {key: job.link if key == "network" else value for key, value in found.items()}
            for name, found in arm.parameters.items()
        },
        arms={
            "wall": {
                "before": msgspec.to_builtins(outcome.before),
                "after": msgspec.to_builtins(arm.measured),
                "again": msgspec.to_builtins(outcome.again),
            },
            "rounds": outcome.rounds,
            "steps_per_block": outcome.steps_per_block,
            "recorded_s": outcome.recorded_s,
            "calibrated": outcome.operators_timed,
            "uncertain": arm.uncertain,
            "losses_after": arm.losses,
            "rig": {
                "workers": job.workers,
                "link": job.link,
                "backend": "gloo",
                "against": job.against,
                "link_mbit_s": outcome.link.mbit_s,
                "link_spread": outcome.link.spread,
                "all_reduce_bytes": outcome.link.nbytes,
                "all_reduce_s": outcome.link.seconds,
                "predicted_step_s": arm.predicted_s,
                "step_error": arm.step_error,
                "predicted_buckets": arm.predicted_buckets,
                "buckets": arm.buckets,
            },
        },
        residual=(),
    )


def setting(job: LinkJob) -> str:
    """What a row calls the size: as in "2 workers, 300mbit", with the size of a zoo model before it."""
    own = "" if job.work[:1].isdigit() or job.work.endswith(".py") else f"{job.size}, "
    return f"{own}{job.workers} workers, {job.link}"
