"""`replace-kernel`: times of one's own for chosen tasks."""

from __future__ import annotations

import numpy as np
import pytest

from foretrace.errors import NotApplicableError
from foretrace.graph.select import select
from foretrace.simulate.timeline import simulate
from foretrace.techniques.arguments import parse
from foretrace.testing.workloads import Cpu, Gpu


@pytest.mark.parametrize("graph", [Gpu().graph(), Cpu().graph()])
def test_every_chosen_task_takes_the_time_given(graph) -> None:  # type: ignore[no-untyped-def]
    mask = select(graph, op="aten::relu", kind="kernel" if graph.on_device.any() else "operator")
    kind = "kernel" if graph.on_device.any() else "operator"
    after = parse(f"replace-kernel op=aten::relu kind={kind} time_us=7.5").predict(graph)
    assert (after.dur[mask] == 7500).all()
    assert np.array_equal(after.dur[~mask], graph.dur[~mask])
    assert "7.5 µs each" in after.changes[-1].what


def test_fewer_tasks_may_do_the_work() -> None:
    graph = Cpu(steps=3, layers=5).graph()
    after = parse("replace-kernel op=aten::addmm time_us=100 count=1").predict(graph)
    before_s, after_s = simulate(graph).step_time_s, simulate(after).step_time_s
    assert before_s - after_s == pytest.approx(5 * 400e-6 - 100e-6, rel=1e-6)
    left = select(after, op="aten::addmm")
    assert np.bincount(after.step[left]).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("replace-kernel time_us=5", "choose tasks by"),
        ("replace-kernel op=nothing time_us=5", "no task fits op=nothing; the names"),
        ("replace-kernel op=aten::relu time_us=-1", "time_us must be 0 or more, got -1"),
        ("replace-kernel op=aten::relu time_us=5 count=0", "leaves no task"),
    ],
)
def test_refusals(text: str, said: str) -> None:
    with pytest.raises(NotApplicableError, match=said):
        parse(text).predict(Cpu().graph())


def test_cannot_be_applied_and_says_why() -> None:
    technique = parse("replace-kernel op=aten::relu time_us=5")
    assert not technique.can_apply() and "record again" in technique.not_applied
