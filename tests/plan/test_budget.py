"""A search keeps the time that it is given, by a clock that only predictions move: no test of ours waits."""

from __future__ import annotations

from pathlib import Path

import pytest

import foretrace as ft
from foretrace.deadline import Deadline
from foretrace.graph.taskgraph import TaskGraph
from foretrace.plan.optimise import Optimiser
from foretrace.plan.result import Answer, OptimiseRequest
from foretrace.techniques.base import Technique

DATA = Path(__file__).resolve().parents[1] / "data"
COSTS = {"compiled": 3.0, "mixed-precision": 2.0, "fused-optimizer": 0.5, "data-parallel": 0.25}


class Clock:
    """Seconds that pass only where something is predicted."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def cnn() -> TaskGraph:
    return ft.read(DATA / "cnn.json.gz").graph().graph


def searched(
    graph: TaskGraph, monkeypatch: pytest.MonkeyPatch, seconds: float, wanted: OptimiseRequest
) -> tuple[Answer, float]:
    clock, plain = Clock(), Technique.predict

    def predict(self: Technique, graph: TaskGraph) -> TaskGraph:
        clock.now += COSTS[self.name]
        return plain(self, graph)

    with monkeypatch.context() as patch:
        patch.setattr(Technique, "predict", predict)
        found = Optimiser(recorded=graph, wanted=wanted, clock=clock).run(seconds)
    return found, clock.now - 100.0


@pytest.mark.parametrize("workers", [1, 4])
def test_all_that_follows_the_search_is_in_the_time(
    cnn: TaskGraph, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    wanted = OptimiseRequest(workers=workers, network="1gbit" if workers > 1 else "", rounds=1)
    least, always = searched(cnn, monkeypatch, 1e-9, wanted)
    assert least.whatif.interval_s[0] <= least.step_s <= least.whatif.interval_s[1]
    first = max(COSTS.values())  # nothing is known of the first prediction of a kind
    sets = []
    for seconds in (3.0, 10.0, 30.0, 60.0, 120.0, 1000.0):
        found, spent = searched(cnn, monkeypatch, seconds, wanted)
        assert spent <= max(1.1 * seconds, always) + first, (seconds, spent)
        assert found.finished or spent > 0.2 * seconds
        sets.append(found.sets)
    assert sets == sorted(sets) and sets[0] < sets[-1]
    assert found.finished and not least.finished


def test_what_no_time_was_left_for_is_said(cnn: TaskGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = searched(cnn, monkeypatch, 1e-9, OptimiseRequest())
    assert any("give `seconds=` more" in each.why for each in found.left_out)


def test_a_deadline_counts_on_its_clock_and_keeps_time_free() -> None:
    clock = Clock()
    deadline = Deadline(10, clock)
    with deadline.part("step"):
        clock.now += 3
    with deadline.part("step"):
        clock.now += 2
    assert (deadline.spent, deadline.left, deadline.took("step")) == (5, 5, 3)
    assert deadline.allows("step", then=1.9) and not deadline.allows("step", then=2.0)
    assert deadline.until(keep=2).seconds == 3 and not deadline.over
    clock.now += 5
    assert deadline.over and not deadline.allows()
