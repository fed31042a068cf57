"""PipeDream's planner: the known answers, and every plan of a small graph tried."""

from __future__ import annotations

import csv
from itertools import combinations
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.plan.pipelines.stages import CostGraph, StageLoads, plan_stages
from foretrace.reading import read_text
from tests.plan.pipelines.published import profile, profile_of

PROFILE = """\
node1 -- Input -- forward_compute_time=9.0, backward_compute_time=0.000, activation_size=1.0, parameter_size=0.000
node2 -- Linear(in, out) -- forward_compute_time=1.5, backward_compute_time=2.5, activation_size=8.0, parameter_size=4e6
node3 -- LSTM -- forward_compute_time=2.0, backward_compute_time=4.0, activation_size=[6.0; 1.0], parameter_size=0.0
node4 -- __getitem__(1) -- forward_compute_time=0, backward_compute_time=0, activation_size=1.0, parameter_size=0.0
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4
"""


def test_known_answers(shared_data: Path) -> None:
    folder = shared_data / "placement" / "pipedream"
    if not folder.is_dir():
        pytest.skip("shared data without placement/pipedream")
    rows = list(csv.DictReader((folder / "known_optimizer_results.csv").read_text().splitlines()))
    assert len(rows) == 8
    for row in rows:
        (path,) = (each for each in folder.iterdir() if each.name.split(".")[0].endswith(f"_{row['model']}"))
        graph = profile_of(read_text(path, mend=""))
        stages, loads = plan_stages(graph, [(4, 1e9)]), StageLoads(graph, inf, 1e9, 0)
        bottleneck, one, four = max(each.load for each in stages), *(loads.loads(0, 1, d, 0)[1][-1] for d in (1, 4))
        assert bottleneck == pytest.approx(float(row["bottleneck_s"]), rel=1e-9), row["model"]
        assert one == pytest.approx(float(row["one_machine_s"]), rel=1e-9)
        assert one / four == pytest.approx(float(row["dp4_speedup_vs_one"]), rel=1e-9)
        assert sum(each.data for each in stages) <= 4


def test_a_profile_is_read() -> None:
    graph = profile_of(PROFILE)  # no input, and nothing that nobody uses
    assert graph.costs[1].time.tolist() == [[0.004, 0.006]] * 2
    assert graph.costs[1].weight_bytes.tolist() == [4e6, 0.0]
    assert graph.edges.keys() == {(0, 1)}


@st.composite
def profiles(draw: st.DrawFn) -> CostGraph:
    n = draw(st.integers(1, 5))
    pairs = list(combinations(range(n), 2))
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    times = st.lists(st.integers(1, 20).map(float), min_size=n, max_size=n)
    return profile(draw(times), draw(times), chosen)


def tried(graph: CostGraph, time: list[list[float]], sets: list[int], count: int, width: float) -> list[list[float]]:
    """The least bottleneck between every two ideals by trying every chain of stages and every number of replicas."""
    weight = [sum(w for v, w in enumerate(graph.costs[1].weight_bytes) if each >> v & 1) for each in sets]

    def best(a: int, b: int, m: int) -> float:
        found = float("inf")
        for k in range(len(sets)):
            if k != b and sets[k] & ~sets[b] == 0 and sets[a] & ~sets[k] == 0:
                for mine in range(1, m + 1):
                    own = (time[k][b] + 4 * (mine - 1) * (weight[b] - weight[k]) / (width * mine)) / mine
                    ahead = 0.0 if k == a else best(a, k, m - mine)
                    found = min(found, max(own, ahead))
        return found

    return [[best(a, b, count) for b in range(len(sets))] for a in range(len(sets))]


@given(profiles(), st.integers(1, 3), st.sampled_from((1.0, 30.0)), st.booleans())
def test_every_plan_of_a_small_graph(graph: CostGraph, count: int, width: float, two: bool) -> None:
    sets = StageLoads(graph, inf, width, 0).sets
    compute = [sum(w for v, w in enumerate(graph.costs[1].time[0]) if each >> v & 1) for each in sets]
    time = [[b - a for b in compute] for a in compute]
    levels = [(count, width), (2, width / 4)] if two else [(count, width)]
    for machines, bandwidth in levels:
        time = tried(graph, time, sets, machines, bandwidth)
    stages = plan_stages(graph, levels)
    assert max(each.load for each in stages) == pytest.approx(time[0][-1])
    assert sorted(v for stage in stages for v in stage.nodes) == list(range(graph.nodes))
    assert sum(stage.data for stage in stages) <= levels[-1][0]


@given(profiles())
def test_ideals_are_all_closed_sets(graph: CostGraph) -> None:
    n = graph.nodes
    closed = [
        each for each in range(2**n) if all(each >> u & 1 for u, v in graph.edges if each >> v & 1)
    ]  # fmt: skip
    found = StageLoads(graph, inf, 1.0, 0).sets
    assert sorted(found) == closed
    assert [each.bit_count() for each in found] == sorted(each.bit_count() for each in found)


def test_what_cannot_be_planned() -> None:
    with pytest.raises(ForetraceError, match="above zero"):
        plan_stages(profile_of(PROFILE), [(0, 1e9)])
    with pytest.raises(ForetraceError, match="form a cycle"):
        plan_stages(profile([1.0, 1.0], [0.0, 0.0], [(0, 1), (1, 0)]), [(2, 1e9)])
    with pytest.raises(ForetraceError, match=r"too long to find; give [0-9,]+ devices"):
        plan_stages(profile_of(PROFILE), [(10**6, 1e9)])
    with pytest.raises(ForetraceError, match="more than 2,000 ways to be cut"):
        plan_stages(profile([1.0] * 20, [0.0] * 20, []), [(2, 1e9)])
