"""Flows over shared links: the compiled run against its twin, what max-min fairness promises, and known answers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import GraphError
from foretrace.graph.taskgraph import EdgeKind, TaskGraph, TaskKind
from foretrace.simulate.flows import engine
from foretrace.simulate.flows.flows import Flows, Interference, Transfer, simulate_flows
from foretrace.simulate.flows.shares import Shares
from foretrace.simulate.replay import replay
from foretrace.simulate.schedule import schedule
from foretrace.simulate.timeline import simulate
from tests.simulate import flow_twins
from tests.simulate.rates import engine_rates
from tests.simulate.small import small_graph
from tests.simulate.test_groups import LINK, Ranks, group_graphs
from tests.strategies import task_graphs

Float64 = npt.NDArray[np.float64]
GB = 1e9  # bytes per second: one byte per nanosecond
NO_FLOWS = Flows.of([])
ZERO_LENGTH = (TaskKind.RETURN, TaskKind.MARK, TaskKind.JOIN, TaskKind.ARRIVAL)


@st.composite
def transfers(draw: st.DrawFn, n_links: int, *, empty: bool = True) -> Transfer:
    """Something to move over some of the links."""
    links = draw(st.lists(st.integers(0, n_links - 1), min_size=0 if empty else 1, max_size=3, unique=True))
    size = st.sampled_from((0, 1, 3, 7, 10, 16.5, 40)) if empty else st.sampled_from((1, 3, 7, 10, 16.5, 40))
    return Transfer(
        nbytes=draw(size),
        route={link: draw(st.sampled_from((1, 1, 1, 2, 3))) for link in links},
        latency_ns=draw(st.integers(0, 5)) if empty else 0,
    )


capacities = st.lists(st.sampled_from((GB, GB, 3 * GB, GB / 3, 0.7 * GB)), min_size=1, max_size=4)


@st.composite
def flows_of(draw: st.DrawFn, graph: TaskGraph, n_links: int) -> Flows:
    """Some tasks of a graph as flows of one or two tasks."""
    rows = np.flatnonzero(~np.isin(graph.kind, ZERO_LENGTH)).tolist()
    chosen = draw(st.lists(st.sampled_from(rows), max_size=8, unique=True)) if rows else []
    pairs: list[tuple[list[int], Transfer]] = []
    while chosen:
        size = 1 if draw(st.integers(0, 3)) else 2
        pairs.append((chosen[:size], draw(transfers(n_links))))
        chosen = chosen[size:]
    return Flows.of(pairs)


@st.composite
def bundles(draw: st.DrawFn) -> tuple[Flows, Float64]:
    """Flows without a graph, and the links."""
    capacity = np.array(draw(capacities))
    moves = draw(st.lists(transfers(len(capacity), empty=False), min_size=1, max_size=8))
    return Flows.of([([], move) for move in moves]), capacity


@given(st.one_of(group_graphs(), task_graphs(lane_order=None, ranks=2), task_graphs(ranks=2)), st.data())
def test_a_run_with_flows_equals_its_twin(graph: TaskGraph, data: st.DataObject) -> None:
    capacity = np.array(data.draw(capacities))
    flows = data.draw(flows_of(graph, len(capacity)))
    factor = data.draw(st.sampled_from((None, 1.0, 1.5, 3.0)))
    interference = None if factor is None else Interference(factor=factor)
    fast, why = _run(graph, flows, capacity, interference)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("foretrace.simulate.flows.flows._run", flow_twins.run)
        slow, why_slow = _run(graph, flows, capacity, interference)
    assert (fast, why) == (slow, why_slow)


def _run(
    graph: TaskGraph, flows: Flows, capacity: Float64, interference: Interference | None
) -> tuple[list[list[int]], str]:
    try:
        return [column.tolist() for column in simulate_flows(graph, flows, capacity, interference=interference)], ""
    except GraphError as error:
        return [], str(error)


@given(task_graphs(ranks=2), st.booleans())
def test_without_flows_it_is_the_replay(graph: TaskGraph, interfere: bool) -> None:
    interference = Interference(factor=1.0) if interfere else None
    for mine, theirs in zip(
        simulate_flows(graph, NO_FLOWS, np.array([GB]), interference=interference), replay(graph), strict=True
    ):
        assert np.array_equal(mine, theirs)


@given(task_graphs(lane_order=None, ranks=2))
def test_without_flows_it_is_the_schedule(graph: TaskGraph) -> None:
    for mine, theirs in zip(simulate_flows(graph, NO_FLOWS, np.array([GB])), schedule(graph), strict=True):
        assert np.array_equal(mine, theirs)


@given(group_graphs(), st.booleans())
def test_without_flows_groups_run_as_in_the_schedule(graph: TaskGraph, interfere: bool) -> None:
    """Also where ends of kernels become known only as time goes on.

    Nothing is removed there, as what follows a removed task may turn out to have been ready in the past.
    """
    graph = graph.with_columns(gone=np.zeros(len(graph), dtype=np.bool_)) if interfere else graph
    try:
        expected = schedule(graph)
    except GraphError:
        return
    interference = Interference(factor=1.0) if interfere else None
    for mine, theirs in zip(
        simulate_flows(graph, NO_FLOWS, np.array([GB]), interference=interference), expected, strict=True
    ):
        assert np.array_equal(mine, theirs)


@given(group_graphs())
def test_a_flow_with_links_of_its_own_is_a_task_of_that_length(graph: TaskGraph) -> None:
    """At a byte per nanosecond and alone on its link, a flow of as many bytes takes as long as the task did.

    Nothing is removed, as what follows a removed task may turn out to have been ready in the past.
    """
    graph = graph.with_columns(gone=np.zeros(len(graph), dtype=np.bool_))
    try:
        expected = schedule(graph)
    except GraphError:
        return
    rows = np.flatnonzero(np.isin(graph.kind, (TaskKind.COLLECTIVE, TaskKind.COPY, TaskKind.KERNEL))).tolist()
    flows = Flows.of([([row], Transfer(nbytes=float(graph.dur[row]), route={i: 1})) for i, row in enumerate(rows)])
    for mine, theirs in zip(simulate_flows(graph, flows, np.full(len(rows), GB)), expected, strict=True):
        assert np.array_equal(mine, theirs)


def test_a_flow_of_no_bytes_lets_who_follows_it_compete_for_the_slot() -> None:
    """What waits for no slot begins before those who do are served, so a tie is decided as for tasks."""
    build = Ranks(2, slots=[1])
    mine, other = build.task(0, TaskKind.KERNEL, 0), build.task(2, TaskKind.KERNEL, 0)
    build.collective({0: [mine], 1: [other]}, 0)
    empty = build.task(0, TaskKind.COLLECTIVE, 0, [mine], priority=1)
    follows, longer = build.task(1, TaskKind.COLLECTIVE, 0, [empty]), build.task(1, TaskKind.COLLECTIVE, 1, [mine])
    build.task(0, TaskKind.KERNEL, 1, [longer])
    graph = build.graph()
    flows = Flows.of([([empty], Transfer(nbytes=0.0, route={0: 1}))])
    start, end = simulate_flows(graph, flows, np.array([GB]))
    assert (start[follows], start[longer], end[longer]) == (0, 0, 1)
    assert np.array_equal(start, schedule(graph)[0])


@given(task_graphs(ranks=2), st.data())
def test_the_durations_of_a_run_replay_to_it(graph: TaskGraph, data: st.DataObject) -> None:
    capacity = np.array(data.draw(capacities))
    flows = data.draw(flows_of(graph, len(capacity)))
    graph = graph.with_columns(release=np.maximum(graph.release, 0))  # bytes move from then on, not since ever
    try:
        start, end = simulate_flows(graph, flows, capacity, interference=Interference(factor=2.0))
    except GraphError:
        return
    assert np.array_equal(replay(graph.with_columns(dur=end - start))[0], start)


@given(bundles())
def test_rates_fit_the_links_and_every_flow_has_a_bottleneck(bundle: tuple[Flows, Float64]) -> None:
    """The max-min certificate: a full link on which no flow is faster."""
    flows, capacity = bundle
    rate = engine_rates(flows, capacity)
    of = np.repeat(np.arange(len(flows)), np.diff(flows.route_ptr))
    load = np.bincount(flows.route_link, weights=flows.route_times * rate[of], minlength=len(capacity))
    assert np.all(rate > 0)
    assert np.all(load <= capacity * (1 + 1e-12))
    full = load >= capacity * (1 - 1e-12)
    fastest = np.zeros(len(capacity))
    np.maximum.at(fastest, flows.route_link, rate[of])
    for f in range(len(flows)):
        links = flows.route_link[of == f]
        assert np.any(full[links] & (rate[f] >= fastest[links] * (1 - 1e-12)))


@pytest.mark.parametrize("seed", range(20))
def test_repaired_rates_are_those_of_filling_all_links_again(seed: int) -> None:
    """As flows come and go: to the last bit, also with small numbers, where every share leaves a remainder and ties."""
    random = np.random.default_rng(seed)
    n, links = int(random.integers(3, 40)), int(random.integers(1, 15))
    routes = [
        {int(m): int(random.choice([1, 1, 2, 3])) for m in random.integers(0, links, random.integers(1, 5))}
        for _ in range(n)
    ]
    flows = Flows.of([([], Transfer(nbytes=1, route=route)) for route in routes])
    fair, _ = Shares.of(flows.route_ptr, flows.route_link, flows.route_times, random.uniform(1, 50, links))
    if seed % 2:
        fair.links["left"] = fair.links["capacity"] = random.integers(5, 60, links)
    moments = [random.random(n) < 0.2 for _ in range(20)]
    _come_and_go(fair, routes, [np.flatnonzero(moment) for moment in moments])


@given(st.data())
def test_rates_of_any_network_are_those_of_filling_all_links_again(data: st.DataObject) -> None:
    """Of alike and very unlike links, also where one flow alone has more connections than rates have room for."""
    capacity = data.draw(st.lists(st.sampled_from((6, 7, 60, 2**40, 2**59, 2**60)), min_size=1, max_size=8))
    times = st.sampled_from((1, 1, 1, 2, 3, 10**5))
    route = st.dictionaries(st.integers(0, len(capacity) - 1), times, min_size=1, max_size=4)
    routes = data.draw(st.lists(route, min_size=1, max_size=16))
    moment = st.sets(st.integers(0, len(routes) - 1), max_size=len(routes))
    moments = data.draw(st.lists(moment, max_size=6))
    _come_and_go(_shares(routes, capacity), routes, [np.array(sorted(each)) for each in moments])


@pytest.mark.parametrize(("count", "times"), [(12, 1), (1, 10**5)])
def test_links_that_get_free_at_once_may_promise_more_than_64_bits_hold(count: int, times: int) -> None:
    """Of one that they all lead to, until it is looked at."""
    through = [{0: times, k + 1: 1} for k in range(count)]
    routes = through + [{k + 1: 10**6} for k in range(count)]
    fair = _shares(routes, [2**60] * (count + 1))
    _come_and_go(fair, routes, [np.arange(2 * count), np.arange(count, 2 * count)])


def _shares(routes: list[dict[int, int]], capacity: list[int]) -> Shares:
    flows = Flows.of([([], Transfer(nbytes=1, route=each)) for each in routes])
    fair, _ = Shares.of(flows.route_ptr, flows.route_link, flows.route_times, np.ones(len(capacity)))
    fair.links["left"] = fair.links["capacity"] = capacity
    return fair


def _come_and_go(fair: Shares, routes: list[dict[int, int]], moments: list[npt.NDArray[np.int64]]) -> None:
    """Let flows come, or go where they are under way, at each moment; compare the rates with the twin's."""
    capacity, active, rates = fair.links["left"].tolist(), set[int](), dict[int, int]()
    for moment in moments:
        gone, come = sorted(active.intersection(moment.tolist())), sorted(set(moment.tolist()) - active)
        active = active.difference(gone).union(come)
        changed = engine.move(fair, np.array(come, dtype=np.int64), np.array(gone, dtype=np.int64))
        wanted = flow_twins.fair_rates({f: routes[f] for f in active}, capacity)
        assert {f: int(fair.flows["rate"][f]) for f in active} == wanted
        told = fair.changed[:changed].tolist()
        assert len(set(told)) == len(told)
        before = {f: int(fair.flows["before"][f]) for f in told}
        assert all(before[f] == rates.get(f, 0) for f in active if rates.get(f, 0) != wanted[f])
        rates = wanted


@given(bundles(), st.randoms(use_true_random=False))
def test_numbers_of_flows_and_links_do_not_matter(bundle: tuple[Flows, Float64], random: object) -> None:
    flows, capacity = bundle
    order = np.array(random.sample(range(len(flows)), len(flows)))  # type: ignore[attr-defined]
    links = np.array(random.sample(range(len(capacity)), len(capacity)))  # type: ignore[attr-defined]
    moves = _transfers(flows)
    renamed = [
        Transfer(nbytes=moves[f].nbytes, route={int(links[m]): k for m, k in moves[f].route.items()}) for f in order
    ]
    other = np.empty_like(capacity)
    other[links] = capacity
    assert np.array_equal(
        engine_rates(Flows.of([([], move) for move in renamed]), other), engine_rates(flows, capacity)[order]
    )
    _, ends = _alone(moves, capacity)
    _, renamed_ends = _alone(renamed, other)
    assert np.array_equal(renamed_ends, ends[order])


@given(bundles())
def test_bytes_are_conserved(bundle: tuple[Flows, Float64]) -> None:
    """What fair rates carry between the ends of flows adds up to what was to be moved, but for the rounding of ends."""
    flows, capacity = bundle
    moves = [Transfer(nbytes=move.nbytes * 1000, route=move.route) for move in _transfers(flows)]
    _, end = _alone(moves, capacity)
    moved = np.zeros(len(moves))
    for begin, finish in zip(*(np.unique([0, *end])[part] for part in (slice(0, -1), slice(1, None))), strict=True):
        active = np.flatnonzero(end > begin)
        moved[active] += engine_rates(Flows.of([([], moves[f]) for f in active]), capacity) / 1e9 * (finish - begin)
    fastest = capacity.max() / 1e9  # bytes per ns; every end is rounded by up to half a nanosecond
    assert moved == pytest.approx([move.nbytes for move in moves], abs=fastest * len(moves))


@given(bundles(), st.sampled_from((2.0, 3.0, 10.0)))
def test_faster_links_scale_the_times(bundle: tuple[Flows, Float64], times: float) -> None:
    flows, capacity = bundle
    moves = [Transfer(nbytes=move.nbytes * 1e6, route=move.route) for move in _transfers(flows)]
    _, end = _alone(moves, capacity)
    _, sooner = _alone(moves, capacity * times)
    assert sooner * times == pytest.approx(end, abs=2 * times * len(moves))


def _transfers(flows: Flows) -> list[Transfer]:
    ptr = flows.route_ptr
    return [
        Transfer(
            nbytes=float(flows.nbytes[f]),
            route=dict(
                zip(
                    flows.route_link[ptr[f] : ptr[f + 1]].tolist(),
                    flows.route_times[ptr[f] : ptr[f + 1]].tolist(),
                    strict=True,
                )
            ),
            latency_ns=int(flows.latency_ns[f]),
        )
        for f in range(len(flows))
    ]


def _alone(
    moves: list[Transfer], capacity: Float64 | list[float]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """A graph of these transfers alone, all of them ready at 0."""
    graph = small_graph([(i + 1, TaskKind.COPY, 5) for i in range(len(moves))], [])
    return simulate_flows(graph, Flows.of([([i], move) for i, move in enumerate(moves)]), np.array(capacity))


def test_one_flow_takes_its_latency_and_its_bytes_over_the_slowest_link() -> None:
    start, end = _alone([Transfer(nbytes=1000, route={0: 1, 1: 1}, latency_ns=50)], [4 * GB, 2 * GB])
    assert (start.tolist(), end.tolist()) == ([0], [550])
    assert _alone([Transfer(nbytes=1000, route={0: 3, 1: 1})], [GB, GB])[1].tolist() == [3000]  # three share a link
    assert _alone([Transfer(nbytes=0, route={0: 1}, latency_ns=7)], [GB])[1].tolist() == [7]
    assert _alone([Transfer(nbytes=1000, route={}, latency_ns=7)], [GB])[1].tolist() == [7]


def test_two_equal_flows_on_one_link_take_twice_as_long() -> None:
    move = Transfer(nbytes=1000, route={0: 1})
    assert _alone([move, move], [GB])[1].tolist() == [2000, 2000]


def test_three_flows_on_two_links() -> None:
    """The textbook's example: a long flow and two short ones; the link of capacity 2 gives its rest to the short one.

    Rates 1/2, 1/2 and 3/2. The third ends at 667, from then on nothing changes for the other two.
    """
    moves = [
        Transfer(nbytes=1000, route={0: 1, 1: 1}), Transfer(nbytes=1000, route={0: 1}),
        Transfer(nbytes=1000, route={1: 1}),
    ]  # fmt: skip
    flows = Flows.of([([], move) for move in moves])
    assert engine_rates(flows, np.array([GB, 2 * GB])).tolist() == [GB / 2, GB / 2, 1.5 * GB]
    assert _alone(moves, [GB, 2 * GB])[1].tolist() == [2000, 2000, 667]


def test_a_flow_that_joins_slows_the_other_and_its_end_speeds_it_up() -> None:
    """Alone until 400, halves until the short one has its 200 bytes at 800, then alone again: 1000 bytes by 1200."""
    graph = small_graph([(1, TaskKind.COPY, 1), (2, TaskKind.KERNEL, 400), (2, TaskKind.COPY, 1)], [
        (1, 2, EdgeKind.STREAM, 0, False)
    ])  # fmt: skip
    flows = Flows.of([([0], Transfer(nbytes=1000, route={0: 1})), ([2], Transfer(nbytes=200, route={0: 1}))])
    start, end = simulate_flows(graph, flows, np.array([GB]))
    assert (start.tolist(), end.tolist()) == ([0, 0, 400], [1200, 400, 800])
    timeline = simulate(graph.with_columns(dur=end - start))
    assert timeline.end.tolist() == end.tolist()


def test_a_collective_transfers_once_all_have_arrived_and_ends_on_all_ranks_together() -> None:
    build = Ranks(2, slots=[1])
    begin = {rank: [build.task(2 * rank, TaskKind.KERNEL, 10 + 90 * rank)] for rank in (0, 1)}
    arrive, transfer = build.collective(begin, 1)
    after = [build.task(2 * rank, TaskKind.KERNEL, 5, [transfer[rank]]) for rank in (0, 1)]
    graph = build.graph()
    rows = {graph.names[graph.name[v]]: v for v in range(len(graph))}
    members = [rows[build.names[transfer[rank]]] for rank in (0, 1)]
    flows = Flows.of([(members, Transfer(nbytes=300, route={0: 1, 1: 1}, latency_ns=20))])
    start, end = simulate_flows(graph, flows, np.array([GB, 3 * GB]))
    assert start[[rows[build.names[arrive[rank]]] for rank in (0, 1)]].tolist() == [10, 100]
    assert start[members].tolist() == [100, 100] and end[members].tolist() == [420, 420]
    assert start[[rows[build.names[row]] for row in after]].tolist() == [420, 420]


def test_slots_bound_the_flows_in_flight() -> None:
    """Three transfers of 100 on one link: with two slots two share it, the third follows alone."""
    for slots, ends in ((1, [100, 200, 300]), (2, [200, 200, 300]), (3, [300, 300, 300])):
        build = Ranks(1, slots=[slots])
        rows = [build.task(LINK, TaskKind.COLLECTIVE, 7, release=0) for _ in range(3)]
        flows = Flows.of([([row], Transfer(nbytes=100, route={0: 1})) for row in rows])
        assert simulate_flows(build.graph(), flows, np.array([GB]))[1].tolist() == ends


def test_removed_flows_move_nothing() -> None:
    graph = small_graph([(1, TaskKind.COPY, 5), (2, TaskKind.COPY, 5)], [])
    graph = graph.with_columns(gone=np.array([True, False]))
    flows = Flows.of([([row], Transfer(nbytes=100, route={0: 1})) for row in (0, 1)])
    assert simulate_flows(graph, flows, np.array([GB]))[1].tolist() == [0, 100]


def test_communication_slows_the_kernels_of_its_rank() -> None:
    """Of 100 ns, 20 run alone, 20 beside the flow that lasts until 60, 60 alone again. The other rank is not slowed."""
    build = Ranks(2, slots=[1])
    kernels = [build.task(2 * rank, TaskKind.KERNEL, 100) for rank in (0, 1)]
    copy = build.task(LINK, TaskKind.COPY, 1, release=20)
    fixed = build.task(LINK, TaskKind.COLLECTIVE, 10, release=70)
    graph = build.graph()
    flows = Flows.of([([copy], Transfer(nbytes=30, route={0: 1}, latency_ns=10))])
    links = np.array([GB])
    plain = simulate_flows(graph, flows, links)[1]
    assert plain[[*kernels, copy, fixed]].tolist() == [100, 100, 60, 80]
    end = simulate_flows(graph, flows, links, interference=Interference(factor=2.0))[1]
    assert end[[*kernels, copy, fixed]].tolist() == [125, 100, 60, 80]  # the fixed collective costs another 5
    nothing = np.zeros(len(graph), dtype=np.bool_)
    spared = simulate_flows(graph, flows, links, interference=Interference(factor=2.0, tasks=nothing))[1]
    assert np.array_equal(spared, plain)


@pytest.mark.parametrize("rate", [0.0, -1.0, np.nan, np.inf])
def test_impossible_capacities_are_refused(rate: float) -> None:
    with pytest.raises(GraphError, match=r"link 1 has a capacity of .* bytes/s; a link carries more than 0"):
        _alone([Transfer(nbytes=1, route={0: 1})], [GB, rate])


def test_links_too_unlike_for_one_unit_are_refused() -> None:
    with pytest.raises(GraphError, match=r"link 1 carries 1e\+09 times as much as link 0"):
        _alone([Transfer(nbytes=1, route={0: 1})], [1.0, GB])


@pytest.mark.parametrize(
    ("move", "says"),
    [
        (Transfer(nbytes=1, route={3: 1}), "flow 0 goes over link 3, but there are 2 links"),
        (Transfer(nbytes=1, route={-1: 1}), "flow 0 goes over link -1"),
        (Transfer(nbytes=1, route={0: 0}), "crosses link 0 0 times"),
        (Transfer(nbytes=-1, route={0: 1}), "moves -1 bytes"),
        (Transfer(nbytes=np.nan, route={0: 1}), "moves nan bytes"),
        (Transfer(nbytes=np.inf, route={0: 1}), "moves inf bytes"),
        (Transfer(nbytes=1, route={0: 1}, latency_ns=-1), "latency of -1 ns"),
        (Transfer(nbytes=1e30, route={0: 1}), "check the units"),
    ],
)
def test_impossible_flows_are_refused(move: Transfer, says: str) -> None:
    with pytest.raises(GraphError, match=says):
        _alone([move], [GB, GB])


def test_tasks_that_cannot_be_flows_are_refused() -> None:
    graph = small_graph([(0, TaskKind.RETURN, 0), (1, TaskKind.COPY, 5)], [])
    move = Transfer(nbytes=1, route={0: 1})
    for pairs, says in (
        ([([2], move)], "carries task 2; the graph has 2 tasks"),
        ([([1], move), ([1], move)], "task 1 is part of two flows"),
        ([([0], move)], "task 0 is of kind RETURN and takes no time"),
        ([([], move)], "flow 0 carries no task"),
    ):
        with pytest.raises(GraphError, match=says):
            simulate_flows(graph, Flows.of(pairs), np.array([GB]))


@pytest.mark.parametrize("factor", [0.5, -1.0, np.nan, np.inf])
def test_impossible_slow_downs_are_refused(factor: float) -> None:
    graph = small_graph([(1, TaskKind.COPY, 5)], [])
    with pytest.raises(GraphError, match=r"slow-down of .* cannot be"):
        simulate_flows(graph, NO_FLOWS, np.array([GB]), interference=Interference(factor=factor))
    short = Interference(factor=2.0, tasks=np.zeros(3, dtype=np.bool_))
    with pytest.raises(GraphError, match="mark each of the 1 tasks"):
        simulate_flows(graph, NO_FLOWS, np.array([GB]), interference=short)


def test_a_flow_that_waits_for_itself_is_an_error() -> None:
    """The second task of the flow follows the first one, which ends when both have."""
    graph = small_graph([(1, TaskKind.COPY, 5), (1, TaskKind.COPY, 5)], [(0, 1, EdgeKind.STREAM, 0, False)])
    flows = Flows.of([([0, 1], Transfer(nbytes=1, route={0: 1}))])
    with pytest.raises(GraphError, match=r"the flows form a cycle through task 0 \(other\) and task 1 \(other\)"):
        simulate_flows(graph, flows, np.array([GB]))
