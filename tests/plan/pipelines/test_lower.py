"""Schedules as task graphs: closed forms of the papers, and a plain clock beside the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.graph.sound import verify
from foretrace.plan.pipelines.lower import StageCost, lower, predict, simulated_batches
from foretrace.training.pipeline.schedule import (
    SCHEDULES,
    Action,
    B,
    F,
    I,
    PipelineSchedule,
    U,
    W,
    gpipe,
    interleaved,
    one_f_one_b,
    two_bw,
    zero_bubble,
)
from tests.training.pipeline.test_schedule import drawn, sizes

FORWARD, BACKWARD = 0.02, 0.04


def same(stages: int, **options: float) -> list[StageCost]:
    given: dict[str, Any] = {"forward_s": FORWARD, "backward_s": BACKWARD, **options}
    return [StageCost(**given)] * stages


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 3))
def test_bubbles_of_the_papers(p: int, m: int, batches: int) -> None:
    whole = FORWARD + BACKWARD
    for name in ("gpipe", "1f1b-flush"):
        found = predict(SCHEDULES[name](p, m, batches), same(p))
        assert found.total_s == pytest.approx(batches * (m + p - 1) * whole)
        assert found.bubble == pytest.approx([(p - 1) / (m + p - 1)] * p)
    if m >= p:  # fewer cannot hide it
        half = predict(zero_bubble(p, m, 1), same(p, weight_s=FORWARD))  # F = I = W
        assert half.total_s == pytest.approx(m * whole + (p - 1) * FORWARD)
    if m >= p - 1:
        endless = [predict(two_bw(p, m, n), same(p)).total_s for n in (batches, batches + 1)]
        assert endless[1] - endless[0] == pytest.approx(m * whole)  # no flush: a batch costs its work alone
        assert endless[0] == pytest.approx((batches * m + p - 1) * whole)
        settled = predict(two_bw(p, m, 4), same(p))
        assert settled.bubble == pytest.approx([0.0] * p, abs=1e-6), "of a batch, not of a run of four"
    chunked = predict(interleaved(2 * p, m * p, 1), same(2 * p))
    assert chunked.total_s == pytest.approx((2 * m * p + p - 1) * whole)  # half of GPipe's bubble, in units of a chunk


def test_a_hop_costs_2bw_again_and_again_and_more_warm_up_hides_it() -> None:
    p, m, hop = 4, 8, 0.006  # a tenth of a forward and a backward pass
    per_batch = {
        warmup: predict(two_bw(p, m, 9, warmup=warmup), same(p, hop_s=hop)).batch_s / (m * (FORWARD + BACKWARD))
        for warmup in (1, 2)
    }
    assert 1.1 <= per_batch[1] <= 1.18
    assert per_batch[2] == pytest.approx(1.0)


costs = st.builds(
    StageCost,
    forward_s=st.integers(0, 20).map(float),
    backward_s=st.integers(8, 40).map(float),
    weight_s=st.integers(0, 8).map(float),
    update_s=st.integers(0, 5).map(float),
    hop_s=st.integers(0, 6).map(float),
)


@given(sizes, st.data())
def test_the_engine_agrees_with_a_plain_clock(size: tuple[str, int, int, int], data: st.DataObject) -> None:
    schedule = drawn(size)
    stages = data.draw(st.lists(costs, min_size=schedule.stages, max_size=schedule.stages))
    found = predict(schedule, stages)
    verify(found.timeline.graph)
    assert found.timeline.window_ns == round(1e9 * clock(schedule, stages))


def clock(schedule: PipelineSchedule, costs: list[StageCost]) -> float:
    """When the last update ends, by going round the processes until nothing moves."""
    ends: dict[tuple[Action, int], float] = {}
    there: dict[Action, float] = {}  # when what an action reads is with it
    free, links = [0.0] * len(schedule.rows), dict[tuple[int, int], float]()
    at, home = [0] * len(schedule.rows), schedule.process_of
    while any(at[r] < len(row) for r, row in enumerate(schedule.rows)):
        for r, row in enumerate(schedule.rows):
            if at[r] == len(row):
                continue
            kind, i, s = action = row[at[r]]
            ready = free[r]
            if (kind == F and s) or (kind in (B, I) and s + 1 < schedule.stages):
                if action not in there:
                    continue
                ready = max(ready, there[action])
            mine = [each for each in range(schedule.stages) if home[each] == r] if kind == U else [s]
            free[r] = ends[action, r] = ready + sum(costs[each].of(kind) for each in mine)
            at[r] += 1
            reader = Action(kind, i, s + (1 if kind == F else -1))
            if kind in (F, B, I) and 0 <= reader.stage < schedule.stages:
                there[reader], way = free[r], (r, home[reader.stage])
                if way[0] != way[1]:
                    links[way] = there[reader] = max(free[r], links.get(way, 0.0)) + costs[s].hop_s
    return max(free)


@pytest.mark.parametrize(("p", "m"), [(5, 1), (8, 1), (8, 3), (8, 7), (12, 2)])
def test_fewer_micro_batches_than_stages_settle(p: int, m: int) -> None:
    """Without a flush a batch takes what the slowest stage does: not less, because a pipeline fills and empties."""
    costs = [StageCost(forward_s=(1 + 7 * i % 5 / 4) * 1e-3, backward_s=(1 + 3 * i % 7 / 2) * 1e-3) for i in range(p)]
    slowest = max(m * (each.forward_s + each.backward_s) for each in costs)
    for batches in (4, simulated_batches(p, m)):
        assert predict(one_f_one_b(p, m, batches), costs).batch_s >= slowest * (1 - 1e-9)
    settled = predict(one_f_one_b(p, m, 4 * simulated_batches(p, m)), costs).batch_s
    assert predict(one_f_one_b(p, m, simulated_batches(p, m)), costs).batch_s == pytest.approx(settled, rel=1e-6)


def test_memory_per_process() -> None:
    sized = same(4, activation_bytes=100.0, weight_bytes=1000.0, state_bytes=2000.0)
    assert predict(two_bw(4, 4, 3), sized).nbytes == (5400.0, 5300.0, 5200.0, 5100.0)
    assert predict(gpipe(4, 4, 3), sized).nbytes == (4400.0,) * 4
    shared = [*sized[:3], replace(sized[3], replicas=3)]  # four in flight are two on a replica
    assert predict(gpipe(4, 4, 3), shared).nbytes == (4400.0, 4400.0, 4400.0, 4200.0)
    assert predict(gpipe(4, 4, 3), shared).total_s == pytest.approx(3 * (3 + 4 - 1 + 1 / 3) * (FORWARD + BACKWARD))
    chunked = predict(interleaved(4, 4, 3), sized)  # its two stages have most in flight at different times
    assert chunked.in_flight == (5, 3) and chunked.nbytes == (8500.0, 8300.0)
    with pytest.raises(ForetraceError, match="one cost per stage"):
        lower(gpipe(4, 4, 3), sized[:3])


def test_halves_are_a_backward_pass() -> None:
    cost = StageCost(forward_s=1.0, backward_s=4.0)
    assert cost.of(I) + cost.of(W) == cost.of(B)
