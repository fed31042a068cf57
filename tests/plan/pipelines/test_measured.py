"""What is read off a run that took known times is those times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import TaskKind
from foretrace.plan.pipelines.lower import StageCost, predict
from foretrace.training.pipeline.runtime import Span, Trained
from foretrace.training.pipeline.schedule import SCHEDULES, PipelineSchedule
from pipeline_costs import batch_times_s, measured_costs
from tests.plan.pipelines.test_lower import costs


def played(schedule: PipelineSchedule, costs: list[StageCost]) -> list[Trained]:
    """What the processes would have written down if everything took the predicted time."""
    timeline = predict(schedule, costs).timeline
    graph = timeline.graph
    found = []
    for r, row in enumerate(schedule.rows):
        own = np.flatnonzero((graph.lane == r) & (graph.kind == TaskKind.KERNEL))
        spans = tuple(
            Span(action=action, begin=timeline.start[task] / 1e9, end=timeline.end[task] / 1e9)
            for action, task in zip(row, own, strict=True)
        )
        found.append(Trained(losses={}, weights={}, scale=1.0, skipped=(), spans=spans, fixed_bytes=0))
    return found


@given(st.sampled_from(("gpipe", "1f1b-flush", "2bw", "zero-bubble", "interleaved")), st.integers(0, 1), st.data())
def test_times_come_back(name: str, skip: int, data: st.DataObject) -> None:
    schedule = SCHEDULES[name](4, 4, 3)
    stages = data.draw(st.lists(costs, min_size=4, max_size=4))
    found = played(schedule, stages)
    read = measured_costs(schedule, found, skip=skip)
    for mine, theirs in zip(stages, read, strict=True):
        assert theirs.forward_s == pytest.approx(mine.forward_s)
        assert theirs.backward_s == pytest.approx(mine.backward_s)
        if schedule.halves:
            assert theirs.weight_s == pytest.approx(mine.weight_s)
    steps = predict(schedule, stages).timeline.step_times_ns / 1e9
    assert batch_times_s(schedule, found) == pytest.approx(steps.tolist())


def test_a_hop_that_was_waited_for_comes_back() -> None:
    schedule = SCHEDULES["1f1b-flush"](4, 4, 3)
    stages = [StageCost(forward_s=2.0, backward_s=4.0, hop_s=1.0)] * 4
    assert [each.hop_s for each in measured_costs(schedule, played(schedule, stages))] == [1.0] * 4
    with pytest.raises(ForetraceError, match="no batch behind the first 3"):
        measured_costs(schedule, played(schedule, stages), skip=3)
