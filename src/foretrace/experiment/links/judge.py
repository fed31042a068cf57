"""What a session came to: every arm's prediction beside its measurement, and its row of the ledger."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from foretrace.experiment import cores, statistics
from foretrace.experiment.ledger import Row
from foretrace.experiment.links.calibrate import Calibrated
from foretrace.experiment.links.job import ArmOutcome, Job, Link, Outcome
from foretrace.experiment.measure import assumed, parameters_of, versions
from foretrace.experiment.messages import Block, Recorded
from foretrace.experiment.statistics import Arm, Ratio, paired_ratio
from foretrace.graph.taskgraph import TaskGraph
from foretrace.techniques.base import Technique
from foretrace.techniques.whatif import WhatIf

CLOCK = "wall"  # workers wait for each other
CPU = "cpu"

Rounds = Sequence[Sequence[Block]]  # by round and worker


@dataclass(frozen=True, kw_only=True)
class Ran:
    """An arm that was predicted and has run."""

    techniques: tuple[str, ...]
    used: tuple[Technique, ...]
    predicted: WhatIf
    blocks: Rounds
    buckets: tuple[int, ...]


def judge(
    job: Job,
    arms: Sequence[Ran],
    *,
    graph: TaskGraph,
    link: Calibrated,
    recorded: Recorded,
    recorded_s: float,
    baseline_s: float,
    before: Rounds,
    again: Rounds,
    steps_per_block: int,
    samples: int,
    took_s: float,
) -> Outcome:
    """Sum up blocks, compare ratios round by round, and say what became of each prediction."""
    first, second = _summed(before), _summed(again)
    same = paired_ratio(first.blocks_s, second.blocks_s, seed=job.seed)
    points = next(each for each in link.table.series if each.kind == "all-reduce")
    return Outcome(
        job=job,
        link=Link(mbit_s=link.mbit_s, spread=link.spread, nbytes=points.nbytes, seconds=points.seconds),
        recorded_s=recorded_s,
        baseline_predicted_s=baseline_s,
        before=first,
        again=second,
        same=same,
        arms=tuple(_judged(job, each, baseline_s, first, second, same) for each in arms),
        rounds=len(before),
        steps_per_block=steps_per_block,
        operators_timed=recorded.operators,
        samples=samples,
        machine=dict(graph.info.recording.get("machine") or {}),
        versions=versions(),
        allocator=dict(cores.ALLOCATOR),
        notes=(*recorded.notes, *graph.info.notes),
        took_s=took_s,
    )


def _judged(job: Job, arm: Ran, baseline_s: float, before: Arm, again: Arm, same: Ratio) -> ArmOutcome:
    measured = _summed(arm.blocks)
    baseline = [(a + b) / 2 for a, b in zip(before.blocks_s, again.blocks_s, strict=True)]
    ratio = paired_ratio(baseline, measured.blocks_s, seed=job.seed)
    low_s, high_s = arm.predicted.interval_s
    foretold = Ratio(value=arm.predicted.after_s / baseline_s, low=low_s / baseline_s, high=high_s / baseline_s)
    uncertain = statistics.too_uncertain([before, again, measured], ratio, CLOCK)
    distributed = arm.predicted.after.graph.info.recording.get("distributed") or {}
    return ArmOutcome(
        techniques=arm.techniques,
        parameters={each.name: parameters_of(each) for each in arm.used},
        predicted_s=arm.predicted.after_s,
        predicted_low_s=low_s,
        predicted_high_s=high_s,
        measured=measured,
        predicted_ratio=foretold,
        measured_ratio=ratio,
        verdict=statistics.verdict(foretold, ratio, same=same, uncertain=uncertain),
        covered=foretold.holds(ratio.value),
        uncertain=uncertain,
        predicted_buckets=tuple(int(each) for each in distributed.get("buckets", ())),
        buckets=arm.buckets,
        losses=tuple(round_[0].loss for round_ in arm.blocks),
        assumptions=assumed(arm.predicted),
    )


def _summed(blocks: Rounds) -> Arm:
    """Steps by round: workers wait for each other, so the slowest one's is the step."""
    return Arm.of([max(each.wall_s for each in round_) for round_ in blocks])


def rows_of(outcome: Outcome) -> tuple[Row, ...]:
    """A row of the ledger per arm. Step and ratio are on the wall clock; `arms["rig"]` holds the link and the rest."""
    return tuple(_row(outcome, arm) for arm in outcome.arms)


def _row(outcome: Outcome, arm: ArmOutcome) -> Row:
    job = outcome.job
    return Row(
        id=str(uuid.uuid4()),
        time=datetime.now(tz=UTC).isoformat(timespec="seconds"),
        techniques=" + ".join(arm.techniques),
        model=Path(job.work).name if job.work.endswith(".py") else job.work,
        size=setting(job),
        threads=job.threads,
        batches="ready",
        device=CPU,
        torch=outcome.versions["torch"],
        python=outcome.versions["python"],
        foretrace=outcome.versions["foretrace"],
        clock=CLOCK,
        before_s=outcome.before.median_s,
        after_s=arm.measured.median_s,
        measured=arm.measured_ratio.value,
        measured_low=arm.measured_ratio.low,
        measured_high=arm.measured_ratio.high,
        predicted=arm.predicted_ratio.value,
        predicted_low=arm.predicted_ratio.low,
        predicted_high=arm.predicted_ratio.high,
        error=arm.error,
        covered=arm.covered,
        verdict=arm.verdict,
        same=outcome.same.value,
        same_low=outcome.same.low,
        same_high=outcome.same.high,
        samples_before=outcome.samples,
        samples_after=outcome.samples,
        seed=job.seed,
        machine=outcome.machine,
        allocator=outcome.allocator,
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
        assumptions=tuple(msgspec.to_builtins(each) for each in arm.assumptions),
        residual=(),
        notes=outcome.notes,
    )


def setting(job: Job) -> str:
    """What a row calls the size: as in "2 workers, 300mbit", with the size of a zoo model before it."""
    own = "" if job.work[:1].isdigit() or job.work.endswith(".py") else f"{job.size}, "
    return f"{own}{job.workers} workers, {job.link}"
