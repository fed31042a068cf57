"""Operators of a layer on cores: equal to brute force on small graphs, never longer than one after another."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product
from math import inf

import numpy as np
import pytest

from foretrace.graph.taskgraph import Phase
from foretrace.hardware.accelerators import TPU_LIKE
from foretrace.plan.codesign.schedule import (
    LayerOperator,
    LayerSchedule,
    _longest,
    _serial,
    _settled,
    _solve,
    layer_operators,
    schedule_layer,
)
from foretrace.plan.solver import SolverLimits
from foretrace.plan.transformers.model import DESIGNED, Parallelism, machine
from foretrace.plan.transformers.shape import transformer
from foretrace.plan.transformers.space import ParallelismSpace
from foretrace.simulate.timeline import simulate

Rows = list[tuple[bool, int, int, tuple[int, ...]]]


def _random(rng: np.random.Generator, count: int = 5) -> Rows:
    found: Rows = []
    for at in range(count):
        one = int(rng.integers(2, 30))
        needs = tuple(each for each in range(at) if rng.random() < 0.3)
        found.append((bool(rng.random() < 0.6), one, int(rng.integers(1, one + 3)), needs))
    return found


def _shortest(rows: Rows, cores: tuple[int, int]) -> int:
    """Over all modes and orders, each operator at the first moment that its cores allow."""
    best = sum(min(one, every) for _, one, every, _ in rows)
    orders = [
        order for order in permutations(range(len(rows)))
        if all(order.index(need) < order.index(at) for at in order for need in rows[at][3])
    ]  # fmt: skip
    for modes in product((False, True), repeat=len(rows)):
        for order in orders:
            placed: dict[int, tuple[int, int]] = {}
            for at in order:
                took = rows[at][2] if modes[at] else rows[at][1]
                ready = max((placed[need][1] for need in rows[at][3]), default=0)
                moments = sorted({ready, *(end for _, end in placed.values() if end >= ready)})
                begin = next(each for each in moments if _free(rows, modes, cores, placed, at, each, each + took))
                placed[at] = (begin, begin + took)
            best = min(best, max(end for _, end in placed.values()))
    return best


def _free(
    rows: Rows, modes: tuple[bool, ...], cores: tuple[int, int], placed: dict[int, tuple[int, int]], at: int,
    begin: int, end: int,
) -> bool:  # fmt: skip
    beside = [each for each, (first, last) in placed.items() if first < end and begin < last]
    if modes[at] or any(modes[each] for each in beside):
        return not beside
    mine = [each for each in beside if rows[each][0] == rows[at][0]]
    for moment in {begin, *(placed[each][0] for each in mine)}:
        now = sum(placed[each][0] <= moment < placed[each][1] for each in mine)
        if begin <= moment < end and now >= cores[0 if rows[at][0] else 1]:
            return False
    return True


def _length(rows: Rows, begins: list[int], core: list[int]) -> int:
    return max(
        begin + (every if on < 0 else one) for (_, one, every, _), begin, on in zip(rows, begins, core, strict=True)
    )


def test_equal_to_brute_force_on_random_graphs() -> None:
    pytest.importorskip("ortools", reason="OR-Tools is not installed")
    rng = np.random.default_rng(11)
    gained = 0
    for _ in range(12):
        rows, cores = _random(rng, 4), (int(rng.integers(1, 4)), int(rng.integers(1, 3)))
        begins, core, bound = _solve(rows, cores, SolverLimits(work=5.0, threads=1), 0.0)
        least = _shortest(rows, cores)
        assert _length(rows, begins, core) == least == bound
        gained += least < _length(rows, *_serial(rows))
    assert gained >= 3  # more than the serial schedule was found


@pytest.fixture(scope="module")
def passes() -> tuple[list[LayerOperator], list[LayerOperator]]:
    at = Parallelism(tensor=2, data=4, micro=2)
    return layer_operators(transformer("gpt2-medium"), at, replace(TPU_LIKE, vector_cores=16))


def test_a_layer_is_scheduled_and_takes_as_long_as_it_simulates(
    passes: tuple[list[LayerOperator], list[LayerOperator]],
) -> None:
    pytest.importorskip("ortools", reason="OR-Tools is not installed")
    operators = passes[0]
    found = schedule_layer(operators, (8, 16), Phase.FORWARD, 0.05)
    assert 0 < found.bound_ns <= found.ns <= found.serial_ns
    assert 0 <= found.gap < 1 and found.proven == (found.gap == 0)
    assert simulate(found.graph()).window_ns == found.ns
    ends = [begin + (each.all_ns if core < 0 else each.one_ns)
            for each, begin, core in zip(operators, found.begins, found.core, strict=True)]  # fmt: skip
    for each, begin in zip(operators, found.begins, strict=True):
        assert all(ends[need] <= begin for need in each.needs)
    again = _solve(
        [(each.tensor, each.one_ns, each.all_ns, each.needs) for each in operators], (8, 16),
        SolverLimits(work=0.05, threads=1), 0.0,
    )  # fmt: skip
    assert again == ([*found.begins], [*found.core], found.bound_ns)  # deterministic


def test_any_settled_schedule_simulates_to_its_length() -> None:
    rng = np.random.default_rng(4)
    for _ in range(60):
        rows = _random(rng, 9)
        cores = (int(rng.integers(1, 4)), int(rng.integers(1, 4)))
        order = rng.integers(0, 40, len(rows)).tolist()
        for at, (_, _, _, needs) in enumerate(rows):  # no earlier than what it needs
            order[at] = max([order[at], *(order[need] for need in needs)])
        on_all = (rng.random(len(rows)) < 0.4).tolist()
        begins, core = _settled(rows, [100 * each + at for at, each in enumerate(order)], on_all, cores)
        operators = tuple(
            LayerOperator(name=f"{at}", tensor=tensor, one_ns=one, all_ns=every, needs=needs)
            for at, (tensor, one, every, needs) in enumerate(rows)
        )
        found = LayerSchedule(
            operators=operators, cores=cores, begins=tuple(begins), core=tuple(core), bound_ns=0,
            phase=Phase.FORWARD,
        )  # fmt: skip
        assert simulate(found.graph()).window_ns == found.ns


def test_operators_are_those_that_are_priced(passes: tuple[list[LayerOperator], list[LayerOperator]]) -> None:
    """Without groups of heads, one after another on all cores, a layer is that of the planner but for split weights."""
    at, design = Parallelism(tensor=1, data=8, micro=1), replace(TPU_LIKE, vector_cores=16)
    model = transformer("gpt2-medium")
    forward, backward = layer_operators(model, at, design, groups=1)
    whole = ParallelismSpace(model=model, on=machine(str(design)), software=DESIGNED, devices=8, batch=8).cost(at)
    layers = (sum(each.all_ns for each in forward) + sum(each.all_ns for each in backward)) * model.layers / 1e9
    assert layers == pytest.approx(whole.parts["compute"], rel=0.03)
    assert [len(each) for each in passes] == [23, 33]
    names = [each.name for each in passes[0]]
    third = next(each for each in passes[0] if each.name == "context, heads 3 of 4")
    assert {names[need] for need in third.needs} == {"softmax, heads 3 of 4", "query", "key", "value"}
    assert all(need < row for each in passes for row, operator in enumerate(each) for need in operator.needs)


def test_without_time_the_serial_schedule_is_answered() -> None:
    pytest.importorskip("ortools", reason="OR-Tools is not installed")
    rows: Rows = [(True, 5, 2, ()), (False, 4, 6, (0,)), (True, 9, 3, (0,))]
    assert _longest(rows) == 6  # the first on all cores, the second on one
    begins, core, bound = _solve(rows, (4, 4), SolverLimits(work=0.0, threads=1), 0.0)
    assert _length(rows, begins, core) <= _length(rows, *_serial(rows))
    assert bound <= _length(rows, begins, core) < inf
