"""The 1F1B schedule as a graph, the Megatron iteration made of it, and strong scaling."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError, GraphError
from foretrace.simulate.replay import replay
from reproductions.vtrain.megatron import (
    Constants,
    Layout,
    crosses,
    graph,
    iteration,
    iteration_s,
    shipped,
    stage_times,
)
from reproductions.vtrain.pipeline import one_forward_one_backward, pipeline_ends

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


@given(forward=st.integers(1, 1000), backward=st.integers(1, 1000), stages=st.integers(1, 8), micro=st.integers(1, 20))
def test_equal_stages_take_the_known_time(forward: int, backward: int, stages: int, micro: int) -> None:
    # Narayanan et al., SC 2021, 2.2.1: m (f + b) of work and a bubble of (p - 1) (f + b)
    assert length(forward, backward, stages, micro) == (micro + stages - 1) * (forward + backward)


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


@given(stages=st.lists(st.tuples(*[st.integers(0, 500)] * 5), min_size=1, max_size=6), micro=st.integers(1, 15))
def test_ends_are_those_of_the_graph(stages: list[tuple[int, ...]], micro: int) -> None:
    forward, backward, send, exchange, update = np.array(stages, dtype=np.int64).T.copy()
    found = one_forward_one_backward(forward, backward, send, exchange, update, micro_batches=micro)
    ends = pipeline_ends(forward, backward, send, micro) + exchange + update
    assert replay(found)[1].max() == ends.max()


def test_a_pipeline_of_nothing_is_refused() -> None:
    with pytest.raises(GraphError, match="give one of both"):
        one_forward_one_backward(*([NOTHING[:0]] * 5), micro_batches=1)
    with pytest.raises(GraphError, match="give one of both"):
        one_forward_one_backward(*([NOTHING[:2]] * 5), micro_batches=0)


GPT = {"hidden": 2048, "heads": 16, "layers": 24, "sequence": 1024, "tensor": 1, "data": 1, "pipeline": 1}


def layout(batch: int = 16, micro: int = 2, **changed: int) -> Layout:
    return Layout(global_batch=batch, micro_batch=micro, **(GPT | changed))


def test_more_work_takes_longer_and_more_devices_less() -> None:
    known = shipped().constants
    one = iteration_s(layout(), known)
    assert iteration_s(layout(32), known) > one
    for split in ("tensor", "data", "pipeline"):
        assert 0.5 * one < iteration_s(layout(**{split: 2}), known) < one, split


@settings(max_examples=40)
@given(
    tensor=st.sampled_from([1, 2, 4, 8, 16]), data=st.sampled_from([1, 2, 8]), pipeline=st.sampled_from([1, 2, 6]),
    micro=st.integers(1, 3), times=st.integers(1, 5),
)  # fmt: skip
def test_an_iteration_is_the_replay_of_its_graph(tensor: int, data: int, pipeline: int, micro: int, times: int) -> None:
    made = layout(micro * data * times, micro, tensor=tensor, data=data, pipeline=pipeline)
    known = shipped().constants
    found = graph(made, known)
    _, end = replay(found)
    assert iteration_s(made, known) == float(end[found.marks[-1]] - end[found.marks[0]]) / 1e9
    predicted = iteration(made)
    assert predicted.low_s < predicted.seconds < predicted.high_s
    assert ("network cards" in predicted.why) == crosses(made)


def test_ranks_of_a_node_share_its_network_cards() -> None:
    plain = Constants(crossing=0.0, between_us=0.0)
    exchanged = {t: stage_times(layout(data=16, tensor=t, batch=32), plain)["exchange"][0] for t in (1, 2, 4, 8, 16)}
    assert all(exchanged[t] == pytest.approx(exchanged[1]) for t in (2, 4, 8))
    assert exchanged[16] == pytest.approx(exchanged[1] / 2)  # each of its two nodes has half of the gradients
    parameters = 12 * 24 * 2048**2 + 51_200 * 2048
    assert exchanged[1] == pytest.approx(2 * 15 / 16 * 4 * parameters / 95e9)
    sent = {t: stage_times(layout(data=8, tensor=t, pipeline=2), plain)["send"][0] for t in (2, 8)}
    assert sent[8] == pytest.approx(sent[2] / 4)  # every tensor rank sends its part


def test_changing_network_cards_takes_time_and_is_uncertain() -> None:
    known = Constants()
    times = {t: stage_times(layout(64, 1, data=64 // t, tensor=t), known)["exchange"][0] for t in (1, 2, 4, 8)}
    assert times[8] < 1.05 * times[1] < times[2] < times[4]
    wide, narrow = iteration(layout(64, 1, data=16, tensor=4)), iteration(layout(64, 1, data=8, tensor=8))
    assert wide.low_s / wide.seconds < narrow.low_s / narrow.seconds < 1
    assert wide.high_s / wide.seconds > narrow.high_s / narrow.seconds > 1
    fit = shipped()
    for crossing in (0.0, 2 * fit.constants.crossing):
        made = layout(64, 1, data=16, tensor=4)
        assert wide.low_s <= iteration_s(made, replace(fit.constants, crossing=crossing)) <= wide.high_s


def test_layouts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ForetraceError, match="cannot be cut into micro-batches"):
        Layout(global_batch=10, micro_batch=4, **GPT)
    with pytest.raises(ForetraceError, match="equal stages"):
        Layout(global_batch=16, micro_batch=4, **(GPT | {"pipeline": 5}))
    with pytest.raises(ForetraceError, match="hidden is 0"):
        Layout(global_batch=16, micro_batch=4, **(GPT | {"hidden": 0}))
