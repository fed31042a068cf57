"""Fully-sharded: gathers and scatters of units, worked out by hand, and on real recordings."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from foretrace.errors import NotApplicableError
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.techniques.arguments import parse
from foretrace.techniques.base import Technique
from foretrace.techniques.distributed.gradients import find_gradients
from foretrace.testing import TechniqueConformance
from foretrace.testing.technique import check_valid
from tests.techniques.backward import Backward
from tests.techniques.test_data_parallel import messages
from tests.techniques.worker_process import make

NOTHING_ELSE = "unit_us=0 operator_us=1e9 waiting_ms=0 transfer=1 copy_gb_s=1e12 blocks=Linear"


class TestOnConvolutions(TechniqueConformance):
    technique: ClassVar[Technique] = parse("fully-sharded workers=4 network=1gbit blocks=Conv2d")


class TestOnBlocks(TechniqueConformance):
    technique: ClassVar[Technique] = parse("fully-sharded workers=2 network=1gbit/50us")
    make_training = staticmethod(make)


class TestWithNccl(TechniqueConformance):
    technique: ClassVar[Technique] = parse("fully-sharded workers=2 network=10gbit backend=nccl reshard=no")
    make_training = staticmethod(make)


def predicted(graph: TaskGraph, text: str) -> Timeline:
    after = parse(f"fully-sharded {text} {NOTHING_ELSE}").predict(graph)
    check_valid(after)
    return simulate(after)


def test_gloo_waits_for_every_collective() -> None:
    # Layers of 4 and 2 MB, 8 Gbit/s: a gather or scatter between two sends half of it, 2 and 1 ms.
    graph = Backward(elements=(1_000_000, 500_000)).graph()
    result = predicted(graph, "workers=2 network=8gbit backend=gloo")
    assert messages(result) == [
        ("all-gather 0", 0.0, 2.0),
        ("all-gather 1", 3.0, 4.0),
        ("all-gather 1 again", 5.0, 6.0),
        ("reduce-scatter 1", 8.0, 9.0),
        ("all-gather 0 again", 9.0, 11.0),
        ("reduce-scatter 0", 13.0, 15.0),
    ]
    assert result.step_times_ns.tolist() == [16_000_000] * 4


def test_zero_2_gathers_once() -> None:
    graph = Backward(elements=(1_000_000, 500_000)).graph()
    result = predicted(graph, "workers=2 network=8gbit backend=gloo reshard=no")
    assert [name for name, _, _ in messages(result)] == [
        "all-gather 0",
        "all-gather 1",
        "reduce-scatter 1",
        "reduce-scatter 0",
    ]
    assert result.step_times_ns.tolist() == [13_000_000] * 4


def test_nccl_gathers_one_unit_ahead() -> None:
    graph = Backward(elements=(1_000_000, 500_000), forward_ms=4, backward_ms=6).graph()
    result = predicted(graph, "workers=2 network=8gbit backend=nccl company=1")
    assert messages(result) == [
        ("all-gather 0", 0.0, 2.0),
        ("all-gather 1", 2.0, 3.0),  # while layer 0 computes, from 2 to 6
        ("all-gather 1 again", 10.0, 11.0),
        ("all-gather 0 again", 11.0, 13.0),
        ("reduce-scatter 1", 17.0, 18.0),
        ("reduce-scatter 0", 23.0, 25.0),
    ]
    blocking = predicted(graph, "workers=2 network=8gbit backend=gloo")
    assert result.step_time_s == pytest.approx(26e-3) and blocking.step_time_s > result.step_time_s


def test_the_update_works_on_a_share() -> None:
    graph = Backward(elements=(1_000_000, 500_000), update_ms=8).graph()
    whole = predicted(graph, "workers=4 network=8000gbit")
    shared = parse(
        f"fully-sharded workers=4 network=8000gbit {NOTHING_ELSE}".replace("operator_us=1e9", "operator_us=0")
    ).predict(graph)
    assert whole.step_time_s - simulate(shared).step_time_s == pytest.approx(6e-3)


def test_memory_falls_with_the_workers() -> None:
    graph = Backward(elements=(1_000_000, 500_000)).graph()
    said = parse(f"fully-sharded workers=4 network=1gbit {NOTHING_ELSE}").predict(graph).changes[-1].what
    # Parameters and gradients of 6 MB each; SGD keeps nothing.
    assert said.startswith("12 MB of parameters, gradients and optimizer state shrink to 3 MB, and 8 MB for")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("workers=1 network=1gbit", "workers must be 2 or more"),
        ("workers=2 network=1gbit blocks=Conv9d", "no modules that fit"),
    ],
)
def test_mistakes_are_refused(text: str, said: str) -> None:
    with pytest.raises(NotApplicableError, match=said):
        parse(f"fully-sharded {text}").predict(Backward(elements=(10, 10)).graph())


def test_twice_and_after_data_parallel_is_refused() -> None:
    graph = Backward(elements=(10, 10)).graph()
    for first in ("data-parallel workers=2 network=1gbit", "fully-sharded workers=2 network=1gbit blocks=Linear"):
        with pytest.raises(NotApplicableError, match="already exchanges messages"):
            parse("fully-sharded workers=2 network=1gbit blocks=Linear").predict(parse(first).predict(graph))


def test_all_bytes_are_gathered_and_scattered() -> None:
    graph = TestOnBlocks().graphs()["cpu"]
    after = TestOnBlocks.technique.predict(graph)
    total = sum(each.nbytes for each in find_gradients(graph))
    rows = np.flatnonzero((after.kind == TaskKind.COLLECTIVE) & (after.step == 1))
    sent = dict.fromkeys(("all-gather", "again", "reduce-scatter"), 0)
    for row in rows.tolist():
        name = after.names[after.name[row]]
        key = "again" if name.endswith("again") else name.split()[0]
        sent[key] += int(after.nbytes[row])
    assert sent["all-gather"] == sent["reduce-scatter"] == total and 0 < sent["again"] < total
