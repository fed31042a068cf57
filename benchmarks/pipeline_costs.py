"""`measured_costs`: what the stages of a pipeline took when it ran, to predict what other schedules would take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from foretrace.errors import ForetraceError
from foretrace.plan.pipelines.lower import StageCost
from foretrace.training.pipeline.runtime import Trained
from foretrace.training.pipeline.schedule import Action, B, F, I, PipelineSchedule, U, W


def measured_costs(schedule: PipelineSchedule, found: Sequence[Trained], *, skip: int = 0) -> list[StageCost]:
    """Medians per stage, without the first `skip` batches; processes must share a clock.

    A hop is counted where its reader waited: from the end of what sent it until it was there. Where no reader waited
    it was hidden and counts as nothing. Raises ForetraceError where no batch is left.
    """
    first = schedule.first + skip
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    ends = {(each.action, r): each.end for r, process in enumerate(found) for each in process.spans}
    for r, process in enumerate(found):
        before = float("-inf")
        for each in process.spans:
            kind, number, stage = action = each.action
            stages = schedule.stages_of[r]
            if (number if kind == U else number // schedule.micro_batches) >= first:
                for s in stages if kind == U else [stage]:  # updates of several stages share what was taken
                    times[kind, s].append((each.end - each.begin) / (len(stages) if kind == U else 1))
                sender = schedule.sender(action)
                if sender is not None and sender != r:
                    source = stage + (-1 if kind == F else 1)
                    sent = ends[Action(kind, number, source), sender]
                    if sent > before:
                        times["hop", source].append(max(each.begin - sent, 0.0))
            before = each.end
    if not times:
        raise ForetraceError(f"the run has no batch behind the first {skip}; train more batches.")

    def of(kind: str, stage: int) -> float:
        return median(times[kind, stage]) if times[kind, stage] else 0.0

    return [
        StageCost(
            forward_s=of(F, s),
            backward_s=of(I, s) + of(W, s) if schedule.halves else of(B, s),
            weight_s=of(W, s) if schedule.halves else None,
            update_s=of(U, s),
            hop_s=of("hop", s),
        )
        for s in range(schedule.stages)
    ]


def batch_times_s(schedule: PipelineSchedule, found: Sequence[Trained]) -> list[float]:
    """Seconds of every batch, from the last process's update before it (or the first pass of all) to that with it."""
    ends = [min(process.spans[0].begin for process in found)] + [0.0] * (schedule.last - schedule.first)
    for each in (span for process in found for span in process.spans if span.action.kind == U):
        at = each.action.number - schedule.first + 1
        ends[at] = max(ends[at], each.end)
    return [after - before for before, after in pairwise(ends)]
