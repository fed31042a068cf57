"""Piper's planner: the known answers, and every plan of a small graph tried."""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import combinations, product
from math import ceil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.plan.pipelines.stages import CostGraph, NodeCosts, StageLoads, plan_stages
from tests.plan.pipelines.published import cost_graph

GIB = 2.0**30


def test_known_answers(shared_data: Path) -> None:
    """Four of the twelve rows of the table, which take a second; all twelve agree to the digits that it prints."""
    folder = shared_data / "placement" / "piper"
    if not folder.is_dir():
        pytest.skip("shared data without placement/piper")
    graph = cost_graph(folder / "resnet.json.gz")
    for row in csv.DictReader((folder / "known_resnet.csv").read_text().splitlines()):
        if (row["devices"], float(row["memory_gib"])) in {("8", 4.0), ("8", 8.0), ("8", 16.0), ("16", 16.0)}:
            stages = plan_stages(
                graph, [(int(row["devices"]), 25 * GIB)], memory_bytes=float(row["memory_gib"]) * GIB,
                micro_batches=7680,
            )  # fmt: skip
            assert max(each.load for each in stages) == pytest.approx(float(row["piper_max_load"]), abs=6e-4)


def test_known_fixed_degrees(shared_data: Path) -> None:
    """Sixteen plans of alike stages on 64 devices: all recomputed, and over the mean of NVLink and the network."""
    folder = shared_data / "placement" / "piper"
    if not folder.is_dir():
        pytest.skip("shared data without placement/piper")
    graph = cost_graph(folder / "bert32a100.json.gz")
    again = {
        t: replace(each, **{name: getattr(each, name)[[1, 1]] for name in ("time", "kept_bytes", "fixed_bytes")})
        for t, each in graph.costs.items()
    }
    rows = list(csv.DictReader((folder / "known_fixed_configs.csv").read_text().splitlines()))
    assert len(rows) == 16
    for row in rows:
        d, t, stages = int(row["d"]), int(row["t"]), int(row["stages"])
        loads = StageLoads(replace(graph, costs=again), np.inf, (300 + 25) / 2 * GIB, int(row["microbatches"]))
        best = np.full(len(loads.sets), np.inf)  # from an ideal to the end
        best[-1] = 0.0
        for left in range(1, stages + 1):
            found = [loads.loads(at, t, d, left * d) for at in range(len(best))]
            best = np.array([np.maximum(best[ends], load).min(initial=np.inf) for ends, load in found])
        assert best[0] == pytest.approx(float(row["predicted_time_per_sample"]), rel=5e-6)  # six digits


@st.composite
def graphs(draw: st.DrawFn) -> CostGraph:
    n = draw(st.integers(1, 4))
    pairs = list(combinations(range(n), 2))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []

    def numbers(least: int, most: int, rows: int = 1) -> np.ndarray:
        values = draw(st.lists(st.integers(least, most), min_size=rows * n, max_size=rows * n))
        return np.array(values, dtype=np.float64).reshape((rows, n) if rows > 1 else n)

    costs = {}
    for t in (1, 2):
        time, kept = numbers(1, 9), numbers(1, 9)
        costs[t] = NodeCosts(
            time=np.stack([time, time + 1]), kept_bytes=np.stack([kept, kept / 2]), fixed_bytes=np.zeros((2, n)),
            weight_bytes=numbers(0, 9), entering=dict.fromkeys(edges, float(t - 1)), leaving=dict.fromkeys(edges, 0.5),
        )  # fmt: skip
    return CostGraph(edges={edge: float(draw(st.integers(0, 5))) for edge in edges}, costs=costs)


def tried(graph: CostGraph, devices: int, memory: float, bandwidth: float, batches: int) -> float:
    """The least maximal load: every chain of stages, every degrees, every set of nodes that is computed again."""
    sets = StageLoads(graph, memory, bandwidth, batches).sets

    def load(stage: int, t: int, d: int, s: int) -> float:
        costs, least = graph.costs[t], float("inf")
        mine = [v for v in range(graph.nodes) if stage >> v & 1]
        for again in product((0, 1), repeat=len(mine)):
            held = sum(
                costs.kept_bytes[a, v] * ceil(s / d) + costs.fixed_bytes[a, v] for a, v in zip(again, mine, strict=True)
            )
            if held <= memory:
                least = min(least, float(sum(costs.time[a, v] for a, v in zip(again, mine, strict=True))))
        sent = 0.0
        for (u, v), nbytes in graph.edges.items():
            if stage >> u & 1 and not stage >> v & 1:
                sent += nbytes + costs.leaving[u, v]
            if stage >> v & 1 and not stage >> u & 1:
                sent += nbytes + costs.entering[u, v]
        weight = float(costs.weight_bytes[mine].sum())
        return least / d + 2 * sent / (d * bandwidth) + 4 * (d - 1) * weight / (d * batches) / bandwidth

    def best(at: int, k: int, s: int) -> float:
        if at == sets[-1]:
            return 0.0
        found = float("inf")
        for end in sets:
            if end != at and at & ~end == 0:
                for t in graph.costs:
                    for d in range(1, min(k // t, s) + 1):
                        if batches % d == 0:
                            for mine in range(d, s + 1):
                                behind = best(end, k - t * d, mine - d)
                                if behind < found:
                                    found = min(found, max(behind, load(end & ~at, t, d, mine)))
        return found

    return best(0, devices, devices)


@settings(max_examples=60)
@given(graphs(), st.integers(1, 3), st.integers(4, 120).map(float), st.sampled_from((2.0, 50.0)))
def test_every_plan_of_a_small_graph(graph: CostGraph, devices: int, memory: float, bandwidth: float) -> None:
    exact = tried(graph, devices, memory, bandwidth, 6)
    try:
        stages = plan_stages(graph, [(devices, bandwidth)], memory_bytes=memory, micro_batches=6)
    except ForetraceError as error:
        assert "nothing fits" in str(error) and exact == float("inf")
        return
    found = max(each.load for each in stages)
    assert found >= exact * (1 - 1e-12)
    if memory >= 36 * devices:  # nothing is computed again, and the choice of what is is a heuristic
        assert found == pytest.approx(exact)
    assert found <= exact + 3  # each node computed again loses 1, and at most so many in vain
    assert sorted(v for stage in stages for v in stage.nodes) == list(range(graph.nodes))
    assert sum(each.data * each.tensor for each in stages) <= devices
    for at, stage in enumerate(stages):  # what is computed again is enough
        costs, flight = graph.costs[stage.tensor], ceil(sum(each.data for each in stages[at:]) / stage.data)
        nbytes = costs.kept_bytes * flight + costs.fixed_bytes
        assert sum(nbytes[int(v in stage.again), v] for v in stage.nodes) <= memory


def test_what_cannot_be_planned() -> None:
    ways = NodeCosts(
        time=np.ones((2, 1)), kept_bytes=np.ones((2, 1)), fixed_bytes=np.zeros((2, 1)), weight_bytes=np.zeros(1),
        entering={}, leaving={},
    )  # fmt: skip
    with pytest.raises(ForetraceError, match="above zero"):
        plan_stages(CostGraph(edges={}, costs={1: ways}), [(0, 1.0)], memory_bytes=1, micro_batches=1)
    with pytest.raises(ForetraceError, match="give one level"):
        plan_stages(CostGraph(edges={}, costs={1: ways}), [(2, 2.0), (2, 1.0)], memory_bytes=1, micro_batches=1)
