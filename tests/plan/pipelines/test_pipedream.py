"""PipeDream's planner: the known answers, and every plan of a small graph tried."""

from __future__ import annotations

import csv
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.plan.pipelines.ideals import ideals, inside, totals
from foretrace.plan.pipelines.pipedream import LayerProfile, plan_pipedream
from foretrace.reading import read_text
from tests.plan.pipelines.published import profile_of

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
        plan = plan_pipedream(profile_of(read_text(path, mend="")), [(4, 1e9)])
        assert plan.bottleneck_s == pytest.approx(float(row["bottleneck_s"]), rel=1e-9), row["model"]
        assert plan.one_machine_s == pytest.approx(float(row["one_machine_s"]), rel=1e-9)
        alone = plan.one_machine_s / plan.data_parallel_s
        assert alone == pytest.approx(float(row["dp4_speedup_vs_one"]), rel=1e-9)
        assert sum(each.replicas for each in plan.stages) == 4


def test_a_profile_is_read() -> None:
    profile = profile_of(PROFILE)
    assert profile.names == ("Linear(in, out)", "LSTM")  # no input, and nothing that nobody uses
    assert profile.compute_s.tolist() == [0.004, 0.006]
    assert profile.weight_bytes.tolist() == [4e6, 0.0]
    assert profile.edges == ((0, 1),)


@st.composite
def profiles(draw: st.DrawFn) -> LayerProfile:
    n = draw(st.integers(1, 5))
    pairs = list(combinations(range(n), 2))
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    times = st.lists(st.integers(1, 20).map(float), min_size=n, max_size=n)
    return LayerProfile(
        names=tuple("abcde"[:n]), compute_s=np.array(draw(times)),
        weight_bytes=np.array(draw(times)), edges=tuple(chosen),
    )  # fmt: skip


def tried(
    profile: LayerProfile, time: list[list[float]], sets: list[int], count: int, width: float, inner: int
) -> list[list[float]]:
    """The least bottleneck between every two ideals by trying every chain of stages and every number of replicas."""
    weight = totals(sets, profile.weight_bytes)

    def best(a: int, b: int, m: int, first: bool) -> float:
        found = float("inf")
        for mine in range(1, m + 1):
            for k in range(len(sets)):
                if (sets[k] & ~sets[b]) == 0 and k != b and (k == a or (sets[a] & ~sets[k]) == 0):
                    whole = k == a
                    # Published so: replicas of everything count what is inside a machine, those of a last stage do not.
                    share = mine * inner if whole and mine == m and first else mine
                    own = (time[k][b] + 4 * (mine - 1) * (weight[b] - weight[k]) / (width * share)) / mine
                    ahead = 0.0 if whole else best(a, k, m - mine, first) if m > mine else float("inf")
                    if not whole or mine == m:
                        found = min(found, max(own, ahead))
        return found

    proper = inside(sets, len(profile.names))
    return [
        [best(a, b, count, True) if proper[a, b] else float("inf") for b in range(len(sets))] for a in range(len(sets))
    ]


@given(profiles(), st.integers(1, 3), st.sampled_from((1.0, 30.0)), st.booleans())
def test_every_plan_of_a_small_graph(profile: LayerProfile, count: int, width: float, two: bool) -> None:
    sets = ideals(len(profile.names), profile.edges)
    compute = totals(sets, profile.compute_s)
    time = [[compute[b] - compute[a] for b in range(len(sets))] for a in range(len(sets))]
    levels = [(count, width), (2, width / 4)] if two else [(count, width)]
    inner = 1
    for machines, bandwidth in levels:
        # A stage never has fewer machines than it is given.
        time = tried(profile, time, sets, machines, bandwidth, inner)
        inner *= machines
    plan = plan_pipedream(profile, levels)
    assert plan.bottleneck_s == pytest.approx(time[0][-1])
    assert sorted(v for stage in plan.stages for v in stage.nodes) == list(range(len(profile.names)))
    assert sum(stage.replicas for stage in plan.stages) == levels[-1][0]


@given(profiles())
def test_ideals_are_all_closed_sets(profile: LayerProfile) -> None:
    n = len(profile.names)
    closed = [
        each for each in range(2**n) if all(each >> u & 1 for u, v in profile.edges if each >> v & 1)
    ]  # fmt: skip
    found = ideals(n, profile.edges)
    assert sorted(found) == closed
    assert [each.bit_count() for each in found] == sorted(each.bit_count() for each in found)


def test_what_cannot_be_planned() -> None:
    profile = profile_of(PROFILE)
    with pytest.raises(ForetraceError, match="levels must be machines"):
        plan_pipedream(profile, [(0, 1e9)])
    with pytest.raises(ForetraceError, match="form a cycle"):
        ideals(2, [(0, 1), (1, 0)])
    with pytest.raises(ForetraceError, match="more than 100 ways to be cut"):
        ideals(20, [], most=100)
