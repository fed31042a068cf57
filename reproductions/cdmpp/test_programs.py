"""Tensor programs: every schedule computes the right thing, JSON forms come back, what is missing is said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.cost.programs.compile import CompiledProgram
from foretrace.cost.programs.drawing import draw
from foretrace.cost.programs.emit import module
from foretrace.cost.programs.program import (
    Access,
    Buffer,
    Loop,
    LoopKind,
    Purpose,
    Statement,
    TensorProgram,
    leaves,
)
from foretrace.cost.programs.schedules import Group, LoopSchedule, StagePlan, apply
from foretrace.cost.programs.tasks import KINDS, Task, task
from foretrace.errors import ForetraceError
from reproductions.cdmpp.truth import reference

ROWS = {"m": 16, "n": 32}
SIZES: dict[str, dict[str, int]] = {
    "matmul": {"m": 16, "n": 32, "k": 24},
    "dense-relu": {"m": 8, "n": 32, "k": 16},
    "dense-gelu": {"m": 8, "n": 32, "k": 16},
    "batched-matmul": {"b": 3, "m": 8, "n": 16, "k": 16},
    "gemv": {"m": 32, "k": 64},
    "conv2d": {"c": 4, "f": 8, "h": 8, "r": 3, "s": 1},
    "conv2d-last": {"c": 16, "f": 8, "h": 4, "r": 3, "s": 2},
    "depthwise": {"c": 6, "h": 8, "r": 3, "s": 2},
    "max-pool": {"c": 6, "h": 8, "r": 2, "s": 2},
    "transpose": {"b": 3, "m": 8, "n": 12},
    **dict.fromkeys(
        ("row-sum", "column-sum", "softmax", "layer-norm", "rms-norm", "pointwise-relu", "pointwise-silu"), ROWS
    ),
}
DOT = task("matmul", m=4, n=8, k=6)


def short(given: Task, seed: int) -> LoopSchedule:
    """A random schedule that compiles quickly."""
    rng = np.random.default_rng(seed)
    while True:
        schedule = draw(given, rng)
        if module(apply(given, schedule)).text.count("\n") < 700:
            return schedule


def off(found: Any, right: Any) -> float:
    return float(np.abs(found - right).max() / np.abs(right).max())


@pytest.mark.parametrize("kind", KINDS)
def test_random_schedules_compute_what_numpy_computes(kind: str) -> None:
    given = task(kind, **SIZES[kind])
    for seed in range(3):
        schedule = short(given, seed)
        dtype, setting = (("float32", "native"), ("float64", "native"), ("float32", "baseline"))[seed]
        inputs = given.inputs(dtype, seed)
        right = reference(given, {name: each.astype("float64") for name, each in inputs.items()})
        found = CompiledProgram(apply(given, schedule, dtype), setting).run(inputs)
        assert off(found, right) < (1e-4 if dtype == "float32" else 1e-10), msgspec.to_builtins(schedule)


@pytest.mark.parametrize("kind", ["matmul", "gemv", "conv2d"])
def test_stored_layouts_do_not_change_the_result(kind: str) -> None:
    given = task(kind, **SIZES[kind]) if kind != "matmul" else task("matmul", m=16, n=32, k=24, t=2)
    inputs = given.inputs("float64")
    for seed in range(40, 43):
        compiled = CompiledProgram(apply(given, short(given, seed), "float64"))
        assert off(compiled.run(inputs), reference(given, inputs)) < 1e-12


@settings(max_examples=25)
@given(st.sampled_from(KINDS), st.integers(0, 10_000))
def test_schedules_come_back_from_json(kind: str, seed: int) -> None:
    given_task = task(kind, **SIZES[kind])
    schedule = draw(given_task, np.random.default_rng(seed))
    assert draw(given_task, np.random.default_rng(seed)) == schedule
    assert msgspec.json.decode(msgspec.json.encode(schedule), type=LoopSchedule) == schedule


@settings(max_examples=25)
@given(st.sampled_from(["matmul", "batched-matmul", "conv2d", "gemv", "column-sum"]), st.integers(0, 10_000))
def test_every_schedule_does_the_same_work(kind: str, seed: int) -> None:
    """A reduction runs every iteration of its axes once, however they are split and ordered."""
    given_task = task(kind, **SIZES[kind])
    (stage,) = given_task.define().stages
    expected = int(np.prod([n for _, n in (*stage.spatial, *stage.reduced)]))
    program = apply(given_task, draw(given_task, np.random.default_rng(seed)))
    (main,) = [found for found in leaves(program) if found[1].name == stage.buffer]
    assert np.prod([loop.extent for loop in main[0]]) == expected
    assert program.nbytes == apply(given_task, draw(given_task, np.random.default_rng(seed + 1))).nbytes


def plain(order: tuple[tuple[str, int], ...], splits: Mapping[str, tuple[int, ...]], **more: Any) -> LoopSchedule:
    plan = StagePlan(splits=tuple(splits.items()), order=order, **more)
    return LoopSchedule(groups=(Group(shared=(), plans=(plan,)),))


def test_the_code_has_the_loops_of_the_schedule() -> None:
    """What is vectorised becomes vector instructions, what is serial stays a loop that the compiler leaves alone."""
    order = (("i", 0), ("k", 0), ("j", 0))
    splits = {"i": (4,), "j": (8,), "k": (6,)}
    serial, vector = (apply(DOT, plain(order, splits, vectorised=v)) for v in (False, True))
    assert " <8 x float>" not in module(serial).text
    assert "fmul contract <8 x float>" in module(vector).text
    assert module(serial).text.count("phi i64") == 5  # repeat; i; the start's j; k and j
    assert module(vector).text.count("phi i64") == 3
    code = CompiledProgram(serial, "baseline").listing
    assert "mulss" in code
    assert "mulps" not in code


def test_unrolled_and_tiled_by_hand() -> None:
    schedule = plain(
        (("i", 0), ("k", 0), ("i", 1), ("k", 1), ("j", 0)),
        {"i": (2, 2), "j": (8,), "k": (3, 2)},
        unrolled=(("i", 1), ("k", 1)),
        vectorised=True,
        local=True,
    )
    program = apply(DOT, schedule)
    assert [leaf.name for _, leaf in leaves(program)] == ["y.start", "y", "y.out"]
    assert program.buffer("y.local").shape == (2, 8)
    inputs = DOT.inputs("float32")
    assert off(CompiledProgram(program).run(inputs), inputs["a"] @ inputs["b"]) < 1e-6


def test_what_is_missing_is_said() -> None:
    buffers = (
        Buffer(name="x", shape=(8,), role=Purpose.INPUT),
        Buffer(name="y", shape=(8,), role=Purpose.OUTPUT),
    )

    moves = (("i", 1),)
    leaf = Statement(
        name="y",
        target=Access(buffer="y", strides=moves),
        reads=(Access(buffer="x", strides=moves),),
        value=("read", 0),
    )
    loop = Loop(variable="i", extent=8, kind=LoopKind.SERIAL, body=(leaf,))
    program = TensorProgram(task="copy", dtype="float32", buffers=buffers, nests=(loop,))
    assert np.array_equal(CompiledProgram(program).run({"x": np.arange(8, dtype="f4")}), np.arange(8))
    with pytest.raises(ForetraceError, match="task kind"):
        task("fft", n=8).define()
    with pytest.raises(ForetraceError, match="lacks the size"):
        task("matmul", m=8).define()


def test_a_timed_run_takes_time() -> None:
    bound = CompiledProgram(apply(DOT, short(DOT, 1))).bind(DOT.inputs("float32"))
    assert bound.run(2000) > 0
    assert off(bound.output, reference(DOT, DOT.inputs("float32"))) < 1e-5
