"""The links of a cluster, and what collectives put on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError, GraphError
from foretrace.graph.taskgraph import TaskKind
from foretrace.hardware.cables import Cable
from foretrace.hardware.cluster import Cluster, Link, Machine
from foretrace.simulate.flows.flows import Flows, Transfer, simulate_flows
from foretrace.simulate.flows.routes import all_to_all, ring, send
from tests.simulate.rates import engine_rates
from tests.simulate.small import small_graph

FAST = Link(name="inside", gbit_s=80, latency_us=1)  # 10 bytes per ns
SLOW = Link(name="between", gbit_s=8, latency_us=10)  # 1 byte per ns


def cluster(nodes: int, per_node: int, **more: float) -> Cluster:
    return replace(Cluster(name="test", nodes=nodes, per_node=per_node, inside=FAST, between=SLOW), **more)  # type: ignore[arg-type]


def capacity(on: Cluster) -> Float64:
    return np.array([rate for _, rate in on.links])


def ends(on: Cluster, moves: list[Transfer]) -> list[int]:
    """When transfers that begin together at 0 end (ns)."""
    graph = small_graph([(i + 1, TaskKind.COLLECTIVE, 1) for i in range(len(moves))], [])
    flows = Flows.of([([i], move) for i, move in enumerate(moves)])
    _, end = simulate_flows(graph, flows, capacity(on))
    return [int(e) for e in end]


def all_reduce(on: Cluster, workers: Sequence[int], nbytes: float) -> Transfer:
    """2 (p − 1) messages of a p-th of the buffer around a ring (Thakur et al., IJHPCA 19(1), 2005, section 4.5)."""
    p = len(workers)
    return ring(on, workers, 2 * (p - 1) / p * nbytes, steps=2 * (p - 1))


def test_a_ring_alone_takes_what_alpha_beta_says() -> None:
    """2 (p − 1) latencies and 2 (p − 1) / p of the buffer over the slowest link, however many workers a machine has."""
    for nodes, per_node, latency, rate in ((4, 1, 10_000, 1), (1, 4, 1_000, 10), (2, 2, 10_000, 1)):
        on = cluster(nodes, per_node)
        assert ends(on, [all_reduce(on, range(4), 1_000_000)]) == [6 * latency + 1_500_000 // rate]
        assert ends(on, [ring(on, range(4), 750_000, steps=3)]) == [3 * latency + 750_000 // rate]


def test_rings_that_share_the_way_out_of_a_machine_halve_their_rates() -> None:
    on = cluster(2, 2)
    rings = [all_reduce(on, [0, 2], 1_000_000), all_reduce(on, [1, 3], 1_000_000)]
    assert ends(on, rings[:1]) == [20_000 + 1_000_000]
    assert ends(on, rings) == [20_000 + 2_000_000] * 2
    inside = [all_reduce(on, [0, 1], 1_000_000), all_reduce(on, [2, 3], 1_000_000)]
    assert ends(on, inside) == [2_000 + 100_000] * 2  # each in its own machine


def test_an_oversubscribed_core_is_shared_by_all_machines() -> None:
    """Four machines behind a core that carries half of their links: four connections of a ring get half a link each."""
    on = cluster(4, 1, oversubscription=2.0)
    assert on.links[-1] == ("core", 2e9)
    assert ends(on, [all_reduce(on, range(4), 1_000_000)]) == [60_000 + 3_000_000]
    assert ends(on, [send(on, 0, 3, 1_000)]) == [10_000 + 1_000]


def test_a_switch_of_some_machines_is_met_only_by_what_leaves_it() -> None:
    on = cluster(4, 1, oversubscription=4.0, per_switch=2)
    assert ends(on, [send(on, 0, 1, 1_000)]) == [11_000]
    assert ends(on, [send(on, 1, 2, 1_000)]) == [12_000]  # two links' worth over 4: half a link
    assert ends(on, [send(on, 0, 2, 1_000), send(on, 1, 3, 1_000)]) == [14_000] * 2


def test_an_all_to_all_is_bound_by_what_leaves_a_machine() -> None:
    """Two machines of two: four connections leave each one, with a quarter of the buffer each."""
    on = cluster(2, 2)
    move = all_to_all(on, range(4), 4_000)
    assert move.nbytes == 1_000 and max(move.route.values()) == 4
    assert ends(on, [move]) == [10_000 + 4_000]


def test_routes_follow_cables() -> None:
    machines = tuple(Machine(name=name, per_node=1, inside=FAST) for name in "abc")
    cables = tuple(
        Cable(ends=(name, "s"), gbit_s=gbit_s, latency_us=latency_us)
        for name, gbit_s, latency_us in (("a", 8, 2), ("b", 8, 2), ("c", 4, 3))
    )
    on = replace(cluster(3, 1), machines=machines, cables=cables)
    assert [on.links[link][0] for link in on.path(0, 2)[0]] == ["a to s", "s to c"]
    assert [on.links[link][0] for link in on.path(2, 1)[0]] == ["c to s", "s to b"]
    assert ends(on, [send(on, 0, 1, 1_000)]) == [5_000]
    assert ends(on, [send(on, 0, 2, 1_000)]) == [7_000]
    # The second one joins at 5 us, takes half of the way out of a until 7 us, and leaves it to the first one.
    assert ends(on, [send(on, 0, 1, 3_000), send(on, 0, 2, 1_000)]) == [8_000, 7_000]


def test_one_worker_needs_no_link() -> None:
    on = cluster(2, 2)
    for move in (all_reduce(on, [1], 1_000), all_to_all(on, [1], 1_000), send(on, 1, 1, 1_000)):
        assert ends(on, [move]) == [0]
    assert np.isinf(engine_rates(Flows.of([([], send(on, 1, 1, 5))]), capacity(on))[0])


def test_links_are_as_many_as_named() -> None:
    on = cluster(2, 4)
    assert len(on.links) == len(dict(on.links)) == 2 * 8 + 2 * 2
    assert on.workers == 8


def test_a_worker_that_is_not_there_and_a_link_without_rate_are_refused() -> None:
    with pytest.raises(GraphError, match="worker 4 is not in test, which has 4"):
        all_reduce(cluster(2, 2), range(5), 1_000)
    with pytest.raises(ForetraceError, match="a link carries more than 0"):
        on = replace(cluster(2, 2), between=Link(name="cut", gbit_s=0))
        ends(on, [send(on, 0, 2, 1_000)])
