"""The 1F1B schedule as a graph, the Megatron iteration made of it, and strong scaling."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError, GraphError
from foretrace.plan.megatron import Layout, iteration_s, shipped
from foretrace.plan.pipeline import one_forward_one_backward
from foretrace.plan.strong_scaling import Pair, fit_overhead, speedup
from foretrace.simulate.replay import replay

NOTHING = np.zeros(8, dtype=np.int64)


def length(forward: int, backward: int, stages: int, micro_batches: int, send: int = 0) -> int:
    graph = one_forward_one_backward(
        np.full(stages, forward),
        np.full(stages, backward),
        np.full(stages, send),
        NOTHING[:stages],
        NOTHING[:stages],
        micro_batches=micro_batches,
    )
    return int(replay(graph)[1].max())


@settings(deadline=None)
@given(forward=st.integers(1, 1000), backward=st.integers(1, 1000), stages=st.integers(1, 8), micro=st.integers(1, 20))
def test_equal_stages_take_the_known_time(forward: int, backward: int, stages: int, micro: int) -> None:
    # Narayanan et al., SC 2021, 2.2.1: m (f + b) of work and a bubble of (p - 1) (f + b)
    assert length(forward, backward, stages, micro) == (micro + stages - 1) * (forward + backward)


@settings(deadline=None)
@given(slow=st.integers(0, 3), micro=st.integers(1, 12))
def test_a_slower_stage_decides(slow: int, micro: int) -> None:
    forward = np.full(4, 100)
    forward[slow] = 300
    graph = one_forward_one_backward(forward, 2 * forward, NOTHING[:4], NOTHING[:4], NOTHING[:4], micro_batches=micro)
    assert micro * 900 <= replay(graph)[1].max() <= (micro + 3) * 900
    assert replay(graph)[1].max() >= 900 + 3 * 300


def test_sending_is_paid_in_the_bubble_only() -> None:
    assert length(100, 200, 2, 1, send=50) == 600 + 2 * 50
    assert length(100, 200, 1, 4, send=50) == 4 * 300


def test_a_pipeline_of_nothing_is_refused() -> None:
    with pytest.raises(GraphError, match="give one of both"):
        one_forward_one_backward(*([NOTHING[:0]] * 5), micro_batches=1)
    with pytest.raises(GraphError, match="give one of both"):
        one_forward_one_backward(*([NOTHING[:2]] * 5), micro_batches=0)


GPT = {"hidden": 2048, "heads": 16, "layers": 24, "sequence": 1024, "tensor": 1, "data": 1, "pipeline": 1}


def test_more_work_takes_longer_and_more_devices_less() -> None:
    one = Layout(global_batch=16, micro_batch=2, **GPT)
    assert iteration_s(Layout(global_batch=32, micro_batch=2, **GPT), shipped()) > iteration_s(one, shipped())
    for split in ("tensor", "data", "pipeline"):
        faster = iteration_s(Layout(global_batch=16, micro_batch=2, **(GPT | {split: 2})), shipped())
        assert 0.5 * iteration_s(one, shipped()) < faster < iteration_s(one, shipped()), split


def test_layouts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ForetraceError, match="cannot be cut into micro-batches"):
        Layout(global_batch=10, micro_batch=4, **GPT)
    with pytest.raises(ForetraceError, match="equal stages"):
        Layout(global_batch=16, micro_batch=4, **(GPT | {"pipeline": 5}))
    with pytest.raises(ForetraceError, match="hidden is 0"):
        Layout(global_batch=16, micro_batch=4, **(GPT | {"hidden": 0}))


@settings(deadline=None)
@given(overhead=st.floats(0.01, 100), fewer=st.integers(1, 16), times=st.integers(2, 16), batch=st.integers(64, 4096))
def test_the_overhead_of_exact_pairs_is_found(overhead: float, fewer: int, times: int, batch: int) -> None:
    pair = Pair(global_batch=batch, fewer=fewer, more=fewer * times, speedup=2.0)
    exact = Pair(global_batch=batch, fewer=fewer, more=fewer * times, speedup=speedup(pair, overhead))
    assert speedup(pair, fit_overhead([exact])) == pytest.approx(exact.speedup, rel=0.01)
    assert 1 <= speedup(pair, overhead) <= times


def test_no_pair_is_refused() -> None:
    with pytest.raises(ForetraceError, match="no pair"):
        Pair(global_batch=8, fewer=8, more=8, speedup=1.0)
    with pytest.raises(ForetraceError, match="no pair"):
        fit_overhead([])
