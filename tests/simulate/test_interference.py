"""The slow-down of kernels by communication, as a run shows it."""

from __future__ import annotations

import numpy as np
import pytest

from foretrace.graph.taskgraph import TaskKind
from foretrace.simulate.flows.flows import Flows, Transfer, measured_interference, simulate_flows
from foretrace.simulate.replay import replay
from tests.simulate.test_groups import LINK, Ranks


def _ranks(*, slowed: int, beside: int = 4) -> Ranks:
    """Four equal kernels of 100 ns alone, then `beside` of them that take `slowed` ns while a collective runs."""
    build = Ranks(2, slots=[1], ordered=True)
    for _ in range(4):
        build.task(0, TaskKind.KERNEL, 100)
    build.task(LINK, TaskKind.COLLECTIVE, slowed * beside, release=400)
    for _ in range(beside):
        build.task(0, TaskKind.KERNEL, slowed)
    for _ in range(5):
        build.task(2, TaskKind.KERNEL, 900)  # of another rank, beside nothing
    for task in build.tasks:
        task["name"] = 0 if task["kind"] == TaskKind.KERNEL and task["lane"] == 0 else 1
    return build


def test_a_slow_down_is_read_from_a_run() -> None:
    graph = _ranks(slowed=130).graph()
    found = measured_interference(graph, *replay(graph))
    assert found is not None and found.factor == pytest.approx(1.3)
    assert found.why.startswith("4 kernels beside collectives")


def test_the_measured_slow_down_gives_the_run_again() -> None:
    """With kernels at their lonely times and the measured factor, the simulated run is as long as the recorded one."""
    recorded = _ranks(slowed=130).graph()
    start, end = replay(recorded)
    found = measured_interference(recorded, start, end)
    lonely = recorded.with_columns(dur=np.where(recorded.dur == 130, 100, recorded.dur))
    collective = int(np.flatnonzero(recorded.kind == TaskKind.COLLECTIVE)[0])
    flows = Flows.of([([collective], Transfer(nbytes=520, route={0: 1}))])
    assert np.array_equal(simulate_flows(lonely, flows, np.array([1e9]), interference=found)[1], end)


def test_what_cannot_be_told_is_not_told() -> None:
    for build in (_ranks(slowed=130, beside=2), Ranks(1, slots=[1])):
        if not build.tasks:
            build.task(0, TaskKind.COPY, 5)
        graph = build.graph()
        assert measured_interference(graph, *replay(graph)) is None


def test_a_factor_below_one_is_noise() -> None:
    graph = _ranks(slowed=90).graph()
    found = measured_interference(graph, *replay(graph))
    assert found is not None and found.factor == 1.0
