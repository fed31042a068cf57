"""What a session came to: every arm's prediction beside its measurement, and its row of the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from foretrace.experiment.ledger import Row
from foretrace.experiment.links.job import ArmOutcome, LinkJob, LinkOutcome
from foretrace.experiment.measure import assumed, foretold, parameters_of
from foretrace.experiment.messages import TimedSteps
from foretrace.experiment.statistics import Arm
from foretrace.experiment.trial import changed
from foretrace.techniques.base import Technique
from foretrace.techniques.whatif import WhatIf

Rounds = Sequence[Sequence[TimedSteps]]  # by round and worker


@dataclass(frozen=True, kw_only=True)
class Ran:
    """An arm that was predicted and has run."""

    techniques: tuple[str, ...]
    used: tuple[Technique, ...]
    predicted: WhatIf
    blocks: Rounds
    buckets: tuple[int, ...]
    foretold_s: float  # step, as predicted before it ran


def judge(job: LinkJob, arm: Ran, baseline_s: float, before: Arm, again: Arm, *, uncertain: str = "") -> ArmOutcome:
    """Return what became of one arm's prediction; `uncertain` says why nothing can be concluded."""
    low_s, high_s = arm.predicted.interval_s
    distributed = arm.predicted.after.graph.info.recording.get("distributed") or {}
    return ArmOutcome(
        techniques=arm.techniques,
        parameters={each.name: parameters_of(each) for each in arm.used},
        predicted_s=arm.predicted.after_s,
        predicted_low_s=low_s,
        predicted_high_s=high_s,
        trial=changed(
            foretold(arm.predicted, baseline_s), before, again, summed(arm.blocks), seed=job.seed, uncertain=uncertain
        ),
        predicted_buckets=tuple(int(each) for each in distributed.get("buckets", ())),
        buckets=arm.buckets,
        losses=tuple(round_[0].loss for round_ in arm.blocks),
        assumptions=assumed(arm.predicted),
        foretold_s=arm.foretold_s,
    )


def summed(blocks: Rounds) -> Arm:
    """Return steps by round: workers wait for each other, so the slowest one's is the step."""
    return Arm.of([max(each.wall_s for each in round_) for round_ in blocks])


def rows_of(outcome: LinkOutcome) -> tuple[Row, ...]:
    """Return a row of the ledger per arm, on the wall clock: workers wait for each other. `arms["rig"]` holds
    the link.
    """
    return tuple(_row(outcome, arm) for arm in outcome.arms)


def _row(outcome: LinkOutcome, arm: ArmOutcome) -> Row:
    job = outcome.job
    return arm.trial.row(
        " + ".join(arm.techniques),
        threads=job.threads,
        assumptions=tuple(msgspec.to_builtins(each) for each in arm.assumptions),
        machine=outcome.machine,
        allocator=outcome.allocator,
        notes=outcome.notes,
        **outcome.versions,
        model=Path(job.work).name if job.work.endswith(".py") else job.work,
        size=setting(job),
        samples=(outcome.samples, outcome.samples),
        parameters={
            name: {key: job.link if key == "network" else value for key, value in found.items()}
            for name, found in arm.parameters.items()
        },
        arms={
            "wall": {
                "before": msgspec.to_builtins(outcome.before),
                "after": msgspec.to_builtins(arm.trial.after),
                "again": msgspec.to_builtins(outcome.again),
            },
            "rounds": outcome.rounds,
            "steps_per_block": outcome.steps_per_block,
            "recorded_s": outcome.recorded_s,
            "calibrated": outcome.operators_timed,
            "uncertain": arm.trial.uncertain,
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
                "foretold_step_s": arm.foretold_s,
                "hosts": outcome.link.hosts,
                "predicted_buckets": arm.predicted_buckets,
                "buckets": arm.buckets,
            },
        },
    )


def setting(job: LinkJob) -> str:
    """Return what a row calls the size: as in "2 workers, 300mbit", with the size of a zoo model before it."""
    own = "" if job.work[:1].isdigit() or job.work.endswith(".py") else f"{job.size}, "
    return f"{own}{job.workers} workers, {job.link}"
