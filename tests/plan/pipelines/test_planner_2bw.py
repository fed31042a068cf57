"""2BW's planner: columns agree with what the simulator says of every row, and nothing that works is left out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.plan.pipelines.planner_2bw import BlockModel, expanded, plan_2bw

MODEL = BlockModel(
    blocks=12,
    forward_s={1: 0.010, 2: 0.017, 4: 0.032},
    backward_s={1: 0.020, 2: 0.034, 4: 0.064},
    weight_bytes=1e6,
    state_bytes=2e6,
    activation_bytes=3e5,
    boundary_bytes=1e4,
)


@settings(max_examples=5)
@given(st.sampled_from((1, 2, 4, 6, 12)), st.sampled_from((24, 48)), st.floats(1e6, 1e9))
def test_columns_agree_with_the_simulator(devices: int, batch: int, bandwidth: float) -> None:
    quiet = {"bandwidth": 1e30}  # a hop as time of its stage is an upper bound; without one both must agree
    found = plan_2bw(MODEL, devices=devices, memory_bytes=1e12, batch=batch, **quiet)
    for row in range(0, len(found), 3):
        run = expanded(MODEL, found, row, **quiet)
        step = batch / found.samples_per_s[row]
        if found.schedule[row] == "2bw" and found.micro_batches[row] > found.depth[row]:
            assert run.batch_s == pytest.approx(step)
        elif found.schedule[row] == "1f1b-flush":
            assert run.total_s == pytest.approx(4 * step)
        assert max(run.nbytes) == pytest.approx(found.nbytes[row])
    slow = plan_2bw(MODEL, devices=devices, memory_bytes=1e12, batch=batch, bandwidth=bandwidth)
    for row in range(0, len(slow), 7):
        run = expanded(MODEL, slow, row, bandwidth=bandwidth)
        if slow.width[row] == 1:
            assert run.total_s <= (4 + slow.depth[row]) * batch / slow.samples_per_s[row] * (1 + 1e-9)


def test_all_configurations_are_there_and_the_fastest_is_first() -> None:
    found = plan_2bw(MODEL, devices=4, memory_bytes=1e12, batch=48, bandwidth=1e9)
    columns = (found.schedule, found.depth, found.micro_batch, found.recompute)
    rows = set(zip(*(each.tolist() for each in columns), strict=True))
    assert len(rows) == len(found) == 2 * 3 * 3 * 2
    assert (np.diff(found.samples_per_s) <= 0).all()
    least = plan_2bw(MODEL, devices=4, memory_bytes=0.9 * found.nbytes[0], batch=48, bandwidth=1e9)
    assert (least.nbytes <= 0.9 * found.nbytes[0]).all() and len(least) < len(found)


def test_a_slow_network_asks_for_depth_and_a_fast_one_for_width() -> None:
    slow, fast = (plan_2bw(MODEL, devices=4, memory_bytes=1e12, batch=48, bandwidth=b) for b in (1e6, 1e12))
    assert slow.depth[0] == 4 and slow.width[0] == 1 and slow.schedule[0] == "2bw"
    assert fast.samples_per_s[0] > slow.samples_per_s[0]
    assert set(fast.depth[fast.samples_per_s > 0.999 * fast.samples_per_s[0]].tolist()) >= {1}


def test_two_versions_need_enough_micro_batches() -> None:
    found = plan_2bw(MODEL, devices=12, memory_bytes=1e12, batch=12, bandwidth=1e9)
    two = found.schedule == "2bw"
    assert (found.micro_batches[two] >= found.depth[two] - 1).all()
    assert (found.micro_batches[~two] < found.depth[~two] - 1).any()


def test_what_cannot_be_planned_says_what_comes_nearest() -> None:
    with pytest.raises(ForetraceError, match=r"nothing fits in 1,000 bytes per device; the least is .* with 4 stages"):
        plan_2bw(MODEL, devices=4, memory_bytes=1e3, batch=48, bandwidth=1e9)
    with pytest.raises(ForetraceError, match="no depth divides 7 devices and 12 blocks with micro-batches"):
        plan_2bw(MODEL, devices=7, memory_bytes=1e12, batch=5, bandwidth=1e9)
    with pytest.raises(ForetraceError, match="above zero"):
        plan_2bw(MODEL, devices=0, memory_bytes=1e12, batch=7, bandwidth=1e9)
