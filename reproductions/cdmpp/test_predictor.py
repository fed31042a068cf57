"""The predictor of tensor programs: trees and features, labels, numpy against torch, learning and adapting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.cost.programs.drawing import draw
from foretrace.cost.programs.program import Loop, LoopNest, TensorProgram, leaves
from foretrace.cost.programs.schedules import Group, LoopSchedule, StagePlan, apply
from foretrace.cost.programs.tasks import KINDS, task
from foretrace.errors import ForetraceError
from reproductions.cdmpp import labels, learn
from reproductions.cdmpp.ast import FEATURES, POP, CompactTree, compact, encode, features, positional
from reproductions.cdmpp.predictor import ProgramPredictor, Shape, load
from reproductions.cdmpp.prior import TERMS, estimates, fit_costs
from reproductions.cdmpp.test_programs import SIZES

SMALL = Shape(width=16, layers=2, heads=2, hidden=16, embedding=8, decoder=16)


def drawn(kind: str, seed: int) -> TensorProgram:
    given_task = task(kind, **SIZES[kind])
    return apply(given_task, draw(given_task, np.random.default_rng(seed)))


def some(count: int) -> list[TensorProgram]:
    return [drawn(KINDS[i % len(KINDS)], i) for i in range(count)]


def nested(node: LoopNest) -> object:
    if isinstance(node, Loop):
        return (node.kind.value, node.extent, tuple(nested(each) for each in node.body))
    return "leaf"


@settings(max_examples=25)
@given(st.sampled_from(KINDS), st.integers(0, 10_000))
def test_the_serialised_tree_is_the_tree(kind: str, seed: int) -> None:
    program = drawn(kind, seed)
    tree = compact(program)
    assert tree.nested() == tuple(nested(each) for each in program.nests)
    assert len(tree.positions) == len(list(leaves(program)))
    assert sum(node == POP for node in tree.sequence) == len(tree.codes)
    assert list(tree.positions) == sorted(tree.positions)


def test_broken_trees_are_refused() -> None:
    for sequence in ((0,), (POP,)):
        with pytest.raises(ForetraceError, match="serialised tree"):
            CompactTree(codes=(4,), extents=(1,), sequence=sequence).nested()


@settings(max_examples=25)
@given(st.sampled_from(KINDS), st.integers(0, 10_000))
def test_features_are_finite_and_count_what_is_there(kind: str, seed: int) -> None:
    program = drawn(kind, seed)
    table = features(program)
    assert table.shape == (len(list(leaves(program))), len(FEATURES))
    assert np.isfinite(table).all()
    column = dict(zip(FEATURES, table.T, strict=True))
    assert (2 ** column["operations"] - 1).sum() == pytest.approx(program.flops)
    executions = [np.prod([loop.extent for loop in loops]) for loops, _ in leaves(program)]
    assert 2 ** column["executions"] - 1 == pytest.approx(executions)
    for i in range(5):
        assert (column[f"unique bytes of buffer {i}"] <= column[f"bytes of buffer {i}"] + 1e-9).all()
    double = dict(zip(FEATURES, features(replace(program, dtype="float64")).T, strict=True))
    assert double["operations"] == pytest.approx(column["operations"])
    assert 2 ** double["bytes of buffer 0"] - 1 == pytest.approx(2 * (2 ** column["bytes of buffer 0"] - 1))


def test_features_of_a_product_by_hand() -> None:
    """y[i, j] += a[i, k] b[k, j] with j as lanes.

    b is a vector each time, a one number spread over the lanes, y stays in registers while k runs.
    """
    dot = task("matmul", m=4, n=8, k=6)
    plan = StagePlan(
        splits=(("i", (4,)), ("j", (8,)), ("k", (6,))), order=(("i", 0), ("k", 0), ("j", 0)), vectorised=True
    )
    program = apply(dot, LoopSchedule(groups=(Group(shared=(), plans=(plan,)),)))
    found = dict(zip(FEATURES, features(program)[1], strict=True))  # leaf 0 sets y to zero
    assert found["executions"] == pytest.approx(np.log2(1 + 4 * 8 * 6))
    assert found["operations"] == pytest.approx(np.log2(1 + 2 * 4 * 8 * 6))
    assert found["lanes"] == 3
    assert found["in registers"] == 1
    assert found["accumulated"] == pytest.approx(np.log2(6))
    issued = [2 ** found[f"issued of buffer {i}"] - 1 for i in range(3)]
    assert issued == pytest.approx([4, 24, 24])
    assert found["unique bytes of buffer 0"] == pytest.approx(np.log2(1 + 4 * 8 * 4))
    assert (found["contiguous lanes"], found["broadcast lanes"]) == (pytest.approx(2 / 3), pytest.approx(1 / 3))


def test_positional_encoding_as_published() -> None:
    table = positional([0, 3], 6)
    assert table[0] == pytest.approx([0, 1, 0, 1, 0, 1])
    assert table[1, 2] == pytest.approx(np.sin(3 / 10000 ** (4 / 6)))
    assert table[1, 3] == pytest.approx(np.cos(3 / 10000 ** (6 / 6)))


# --- labels --------------------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(st.sampled_from(labels.METHODS), st.integers(0, 10_000), st.floats(0.05, 3.0))
def test_label_transforms_invert(method: str, seed: int, spread: float) -> None:
    values = np.exp(np.random.default_rng(seed).normal(-9, spread, 80))
    fitted = labels.fit(values, method)
    forward = fitted.forward(values)
    assert fitted.inverse(forward) == pytest.approx(values, rel=1e-6)
    assert forward.mean() == pytest.approx(0, abs=1e-8)
    assert forward.std() == pytest.approx(1)
    assert (np.argsort(forward, kind="stable") == np.argsort(values, kind="stable")).all()
    assert labels.labels_from_data(fitted.as_data()) == fitted


def test_box_cox_and_yeo_johnson_are_scipys() -> None:
    import scipy.stats

    values = np.exp(np.random.default_rng(3).normal(0, 1, 300)) + 0.2
    for power in (-1.3, 0.0, 0.4, 2.0):
        assert labels.box_cox(values, power) == pytest.approx(scipy.stats.boxcox(values, power))
        both = values - 1.5
        assert labels.yeo_johnson(both, power) == pytest.approx(scipy.stats.yeojohnson(both, power))
        if power == 0.4:
            assert labels.inverse_yeo_johnson(labels.yeo_johnson(both, power), power) == pytest.approx(both)
    unit = np.exp(np.log(values).mean())
    assert labels.fit(values, "box-cox").power == pytest.approx(scipy.stats.boxcox(values / unit)[1], abs=1e-3)
    assert labels.fit(values, "yeo-johnson").power == pytest.approx(scipy.stats.yeojohnson(values / unit)[1], abs=1e-3)


def test_wrong_labels_are_refused() -> None:
    for values in ([1.0, 0.0], [1.0, np.inf], [2.0, 2.0], [1.0]):
        with pytest.raises(ForetraceError, match="positive finite"):
            labels.fit(values)
    with pytest.raises(ForetraceError, match="unknown"):
        labels.fit([1.0, 2.0], "probit")


# --- the network -----------------------------------------------------------------------------------------------------


def untrained(shape: Shape, programs: list[TensorProgram]) -> ProgramPredictor:
    encoded = encode(programs)
    weights = learn._as_numpy(learn._fresh(shape, torch.Generator().manual_seed(1)))
    return ProgramPredictor(
        shape=shape, weights=weights, mean=encoded.leaves.mean(axis=0), deviation=encoded.leaves.std(axis=0) + 0.1,
        costs=np.full(len(TERMS), 1e-9), labels=labels.fit([0.4, 1.0, 3.0]),
    )  # fmt: skip


@pytest.mark.parametrize("shape", [SMALL, replace(SMALL, positions=False), replace(SMALL, attention=False, layers=1)])
def test_numpy_is_torch(shape: Shape) -> None:
    """Grouped by leaves in numpy, padded and masked in torch: the same embeddings and labels."""
    programs = some(34)
    encoded = encode(programs)
    assert len(set(encoded.counts.tolist())) > 3
    predictor = untrained(shape, programs)
    z, label = predictor.forward(encoded)
    weights = {name: torch.tensor(value) for name, value in predictor.weights.items()}
    x, real = learn.padded(predictor.inputs(encoded), encoded)
    other_z, other = learn.forward(weights, x, real, shape)
    assert z == pytest.approx(other_z.numpy(), abs=2e-6)
    assert label == pytest.approx(other.numpy(), abs=2e-6)
    alone = np.array([predictor.predict([each]).seconds[0] for each in programs[:5]])
    assert predictor.predict(programs).seconds[:5] == pytest.approx(alone, rel=1e-4)
    some_rows = np.array([7, 3, 3])
    assert predictor.predict_encoded(encoded.take(some_rows)).seconds == pytest.approx(
        predictor.predict_encoded(encoded).seconds[some_rows], rel=1e-4
    )


def test_first_estimates_recover_costs_and_have_no_negative_ones() -> None:
    encoded = encode(some(51))
    costs = np.zeros(len(TERMS))
    costs[[1, 2, 12]] = 2e-10, 5e-10, 1e-9
    seconds = estimates(encoded, costs)[1]
    found = fit_costs(encoded, seconds)
    assert (found >= 0).all()
    assert estimates(encoded, found)[1] == pytest.approx(seconds, rel=0.05)
    assert (fit_costs(encoded, np.random.default_rng(0).uniform(1e-6, 1e-3, 51)) >= 0).all()


def test_learns_what_follows_from_features_and_adapts_to_another_device(tmp_path: Path) -> None:
    programs = some(51)
    encoded = encode(programs)
    work = np.add.reduceat(2.0 ** encoded.leaves[:, FEATURES.index("instructions")], encoded.starts[:-1])
    seconds = 1e-9 * work**0.8
    chosen = learn.Settings(shape=SMALL, epochs=40, batch=26, rate=1e-2, dropout=0.0)

    def error(model: ProgramPredictor, truth: np.ndarray) -> float:
        return float(np.abs(model.predict_encoded(encoded).seconds / truth - 1).mean())

    model = learn.train(encoded, seconds, chosen)
    again = learn.train(encoded, seconds, replace(chosen, epochs=3))
    assert error(model, seconds) < 0.2
    assert error(again, seconds) == error(learn.train(encoded, seconds, replace(chosen, epochs=3)), seconds)
    model = replace(model, low=0.8, high=1.3, about="made up")
    model.save(tmp_path / "model.npz")
    loaded = load(tmp_path / "model.npz")
    assert loaded.about == "made up"
    found = loaded.predict_encoded(encoded)
    assert np.array_equal(found.seconds, model.predict_encoded(encoded).seconds)
    assert found.low_s == pytest.approx(0.8 * found.seconds)
    few = np.arange(26)
    new = 3 * seconds
    for alpha in (0.0, 0.1):
        adapted = learn.adapt(
            model, encoded, seconds, encoded.take(few), new[few], encoded, replace(chosen, epochs=20), alpha=alpha
        )
        assert error(adapted, new) < 0.5 * error(model, new)
        assert np.isnan(adapted.low)


def test_cmd_draws_embeddings_together() -> None:
    from reproductions.cdmpp.cmd import cmd

    programs = some(51)
    encoded, other = encode(programs), encode([replace(each, dtype="float64") for each in programs])
    predictor = untrained(SMALL, programs)
    seconds = np.random.default_rng(0).uniform(1e-5, 1e-3, len(programs))
    settings_ = learn.Settings(epochs=20, batch=51, rate=5e-3, dropout=0.0, squared=0.0, relative=0.0)
    nothing = encoded.take(np.empty(0, np.int64))
    drawn_together = learn.adapt(predictor, encoded, seconds, nothing, seconds[:0], other, settings_, alpha=1.0)
    before = cmd(predictor.embed(encoded), predictor.embed(other), span=2.0)
    after = cmd(drawn_together.embed(encoded), drawn_together.embed(other), span=2.0)
    assert after < 0.5 * before


def test_shipped_predictor_answers_with_a_range() -> None:
    found = load().predict(some(34))
    assert ((found.seconds > 1e-8) & (found.seconds < 1)).all()
    assert (found.low_s < found.seconds).all()
    assert (found.high_s > found.seconds).all()
    assert "programs of" in load().about


def test_what_is_no_predictor_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"nothing")
    with pytest.raises(ForetraceError, match="holds no program predictor"):
        load(tmp_path / "x.npz")
    with pytest.raises(ForetraceError, match="holds no program predictor"):
        load(tmp_path / "missing.npz")
    with pytest.raises(ForetraceError, match="no programs"):
        encode([])
