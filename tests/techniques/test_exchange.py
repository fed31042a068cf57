"""Messages on links: order, in flight, chains, and where they are waited for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import GraphError
from foretrace.graph.taskgraph import Phase, TaskGraph
from foretrace.simulate.timeline import simulate
from foretrace.techniques.arguments import parse
from foretrace.techniques.distributed.exchange import Message, Stop, beside, exchange, without_exchange
from foretrace.techniques.distributed.gradients import find_gradients
from foretrace.testing.technique import check_valid
from tests.techniques.backward import PLAIN, Backward
from tests.techniques.test_data_parallel import messages

MS = 1_000_000


def graph_of(count: int) -> TaskGraph:
    """Forward `count` ms, a gradient every 2 ms, update 1 ms."""
    return Backward(elements=[1000] * count).graph()


def plain(graph: TaskGraph, dur_ms: float, wire_ms: float) -> tuple[list[Message], Stop]:
    """One message per gradient, all waited for at the end of the backward pass."""
    gradients = find_gradients(graph)
    last = gradients[-1].ready
    made = [
        Message(
            name=f"message {i}",
            nbytes=8,
            dur_ns=round(dur_ms * MS),
            wire_ns=round(wire_ms * MS),
            after=each.ready,
            waits=last,
        )
        for i, each in enumerate(gradients)
    ]
    return made, Stop(waits=last)


@pytest.mark.parametrize(
    ("in_flight", "wire_ms", "ends"),
    [
        (1, 5, [10, 15, 20]),  # ready at 5, 7 and 9; each waits for the one before
        (2, 5, [10, 15, 20]),  # the link is taken all the time: two in flight gain nothing
        (2, 1, [10, 12, 15]),  # 4 of 5 ms leave the link free: the second starts at once, the third when the first ends
        (3, 1, [10, 12, 14]),
    ],
)
def test_links_are_shared_as_said(in_flight: int, wire_ms: float, ends: list[int]) -> None:
    graph = graph_of(3)
    made, stop = plain(graph, 5, wire_ms)
    after = exchange(graph, made, [stop], in_flight=in_flight)
    check_valid(after)
    assert [end for _, _, end in messages(simulate(after))] == ends


def test_links_do_not_wait_for_each_other_but_chains_do() -> None:
    graph = graph_of(2)
    made, stop = plain(graph, 3, 3)
    first = replace(made[0], link="exchange near", waits=None)
    second = replace(made[0], name="second part", link="exchange far", follows=(0,))
    other = replace(made[1], link="exchange near")
    after = exchange(graph, [first, second, other], [stop], in_flight=1)
    check_valid(after)
    # Forward 2 ms, gradients at 4 and 6.
    assert sorted(messages(simulate(after))) == [("message 0", 4, 7), ("message 1", 7, 10), ("second part", 7, 10)]
    assert simulate(after).step_times_ns.tolist() == [11 * MS] * 4
    bare = without_exchange(after)
    assert bare.lanes == graph.lanes and simulate(bare).step_times_ns.tolist() == [7 * MS] * 4


def test_without_an_order_the_smallest_number_goes_first() -> None:
    graph = graph_of(3)
    made, stop = plain(graph, 6, 6)
    urgent = [replace(each, priority=-i) for i, each in enumerate(made)]
    after = exchange(graph, urgent, [stop], in_flight=1, ordered=False)
    check_valid(after)
    assert [name for name, _, _ in messages(simulate(after))] == ["message 0", "message 2", "message 1"]


def test_the_next_step_can_wait() -> None:
    graph = graph_of(1)
    made, _ = plain(graph, 10, 10)
    forward = np.flatnonzero(graph.phase == Phase.FORWARD)
    stop = Stop(waits=forward.astype(np.int64))
    later = replace(made[0], waits=stop.waits, next_step=True)
    result = simulate(exchange(graph, [later], [stop], in_flight=1))
    # Forward 1, backward 2, update 1; the message begins at 3 and its result is needed 1 ms into the next step.
    assert result.step_times_ns.tolist() == [4 * MS, 12 * MS, 12 * MS, 12 * MS]


def test_host_time_lag_and_what_follows_a_wait() -> None:
    graph = graph_of(1)
    made, stop = plain(graph, 2, 2)
    dear = replace(made[0], host_ns=1 * MS, lag_ns=3 * MS)
    after = exchange(graph, [dear], [replace(stop, then_ns=4 * MS)], in_flight=1)
    assert messages(simulate(after)) == [("message 0", 7, 9)]
    assert simulate(after).step_times_ns.tolist() == [(9 + 4 + 1) * MS] * 4


def test_a_wait_before_its_message_is_a_cycle() -> None:
    graph = graph_of(2)
    made, stop = plain(graph, 1, 1)
    early = find_gradients(graph)[0].ready
    late = replace(made[1], waits=early)
    with pytest.raises(GraphError, match="cycle"):
        exchange(graph, [late], [replace(stop, waits=early)], in_flight=1)


MET = parse(f"data-parallel workers=2 network=8gbit bucket_mb=0.5 {PLAIN}")
BY_HAND = [(1, 1, 14.0), (2, 1, 15.5), (1, 1.5, 14.0), (2, 1.5, 16.25)]


@pytest.mark.parametrize(("company", "stretch", "step_ms"), BY_HAND)
def test_computing_and_messages_slow_each_other_where_they_meet(company: float, stretch: float, step_ms: float) -> None:
    """Three messages of 1 ms begin in the backward pass and one behind it, by hand."""
    changed = MET.predict(Backward(elements=[250_000] * 4).graph())
    assert 1e3 * simulate(beside(changed, company, stretch)).step_time_s == pytest.approx(step_ms, abs=3e-3)


@pytest.mark.parametrize("company", [1, 2])
def test_a_delay_is_a_stretch_for_messages_of_one_length(company: float) -> None:
    changed = MET.predict(Backward(elements=[250_000] * 4).graph())
    delayed, stretched = beside(changed, company, 1, delay_us=500.0), beside(changed, company, 1.5)
    assert np.array_equal(delayed.dur, stretched.dur)


def test_others_have_the_link_during_a_delay() -> None:
    """A message begins every 2 ms, is on the link for 2, and is late by 1 while its worker computes, until 20 ms."""
    graph = graph_of(6)
    made, stop = plain(graph, 2, 2)
    late = beside(exchange(graph, made, [stop], in_flight=2), 1.0, 1.0, delay_us=1000.0)
    spans = [(round(begin, 3), round(end, 3)) for _, begin, end in messages(simulate(late))]
    assert spans[:4] == [(8, 11), (10, 13), (12, 15), (14, 17)]
    assert spans[5] == (18, 20)  # nothing is computed beside the last one


@given(company=st.floats(1.0, 4.0), stretch=st.floats(1.0, 4.0))
def test_meeting_never_makes_a_step_shorter(company: float, stretch: float) -> None:
    changed = MET.predict(Backward(elements=[250_000] * 4, steps=2).graph())
    alone, met = changed.dur, beside(changed, company, stretch).dur
    assert np.all(met >= alone)
    assert np.all(met <= np.ceil(alone * max(company, stretch)) + 1)


def test_other_buckets_are_as_if_they_had_been_there_first() -> None:
    """What computing and messages take from each other goes with the messages."""
    graph = Backward(elements=[250_000] * 4).graph()
    given = f"data-parallel workers=2 network=8gbit {PLAIN.replace('company=1', 'company=1.5')} stretch=1.25"
    fused = parse("bucket-fusion cap_mb=2").predict(parse(f"{given} bucket_mb=0.5").predict(graph))
    direct = parse(f"{given} bucket_mb=2").predict(graph)
    assert simulate(fused).step_time_s == pytest.approx(simulate(direct).step_time_s, rel=1e-3)
