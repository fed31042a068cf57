"""`Local`: a made-up machine is recovered from a few of its times, and what it says is positive, finite and grows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.cost.calls import Calls
from foretrace.cost.operators.grid import chosen
from foretrace.cost.operators.local import RESOURCES, Local, rows_of, shipped, unsure_key
from foretrace.cost.operators.operator import Operator, call
from foretrace.cost.operators.work_terms import NAMES, amounts
from operator_calls import choose_designed, designed, grid
from operator_pool import random_pool


def calls_of(operators: list[Operator]) -> Calls:
    return Calls.of([(each.name, each.text) for each in operators])


def machine(operators: list[Operator], factors: dict[str, float], noise: float = 0.0) -> dict[str, float]:
    """Stored times of a processor whose resources cost so many times what the package says."""
    scale = np.array([factors.get(each, 1.0) for each in RESOURCES])
    stray = np.exp(noise * np.random.default_rng(3).standard_normal(len(operators)))
    found = {}
    for place, prefix in ((1.0, ""), (0.0, "near ")):
        rows, _ = rows_of(calls_of(operators), shipped(), place)
        for each, seconds in zip(operators, (rows.cost * scale).sum(axis=1) * stray, strict=True):
            found[prefix + each.key] = float(seconds)
    return found


POOL = random_pool(400, seed=11)
TRAINED, HELD = POOL[:200], POOL[200:]


def error(known: Local, operators: list[Operator], factors: dict[str, float]) -> float:
    truth = machine(operators, factors)
    seconds = replace(known, place=1.0).predict(calls_of(operators)).seconds
    far = np.array([truth[each.key] for each in operators])
    large = calls_of(operators).nbytes > 64 << 10  # smaller ones are taken to lie near
    return float(np.quantile(np.abs(seconds[large] / far[large] - 1), 0.8))


@pytest.mark.parametrize(
    "factors",
    [
        {"matrix": 3.0},
        {"dispatch": 2.5, "far": 0.4},
        {"dispatch": 0.3, "matrix": 0.3, "vector": 0.3, "near": 0.3},
        {"near": 2.0, "vector": 0.5, "far": 3.0},
    ],
)
def test_a_made_up_machine_is_recovered(factors: dict[str, float]) -> None:
    rows, _ = rows_of(calls_of(TRAINED), shipped(), 0.5)
    few = [TRAINED[i] for i in choose_designed(rows, 40)]
    known = Local.of(machine(few, factors))
    assert error(Local.of({}), HELD, factors) > 0.15  # it is another machine
    assert error(known, HELD, factors) < 0.1


def test_noise_is_averaged_and_covered() -> None:
    rows, _ = rows_of(calls_of(TRAINED), shipped(), 0.5)
    few = [TRAINED[i] for i in choose_designed(rows, 50)]
    known = Local.of(machine(few, {"matrix": 2.0, "far": 2.0}, noise=0.1))
    truth = machine(HELD, {"matrix": 2.0, "far": 2.0}, noise=0.1)
    found = replace(known, place=0.0).predict(calls_of(HELD))
    near = np.array([truth[each.near_key] for each in HELD])
    assert np.median(np.abs(found.seconds / near - 1)) < 0.15
    assert np.mean((found.low_s <= near) & (near <= found.high_s)) > 0.6


def test_one_disturbed_measurement_is_not_believed() -> None:
    times = machine(TRAINED[:60], {})
    disturbed = dict(times)
    for prefix in ("", "near "):
        disturbed[prefix + TRAINED[5].key] *= 20
    plain, other = (error(Local.of(each), HELD, {}) for each in (times, disturbed))
    assert plain < 0.1
    assert other < 0.15


def test_a_call_that_was_measured_takes_what_was_measured() -> None:
    few = TRAINED[:60]
    times = machine(few, {"matrix": 2.0})
    odd = next(each for each in few if each.key in times and calls_of([each]).nbytes[0] > 1 << 20)
    for key in (odd.key, odd.near_key):
        times[key] *= 1.6  # as no other call says
    calls = calls_of([odd])
    known = Local.of(times)
    for place, key in ((1.0, odd.key), (0.0, odd.near_key)):
        mean, deviation = known.logarithms(calls, np.array([place]))
        assert np.exp(mean[0]) == pytest.approx(times[key])
        assert deviation[0] < 0.1
    assert known.total(calls, np.array([1.0]))[0] == pytest.approx(times[odd.key])
    unsure = Local.of(times | {unsure_key(odd.key): 2.0})
    assert unsure.total(calls, np.array([1.0]))[1] > 0.6


def test_a_measured_time_that_the_others_do_not_believe_at_all_is_unsure() -> None:
    few = TRAINED[:60]
    times = machine(few, {})
    odd = few[5]
    true = times[odd.key]
    for key in (odd.key, odd.near_key):
        times[key] *= 8
    seconds, deviation = Local.of(times).total(calls_of([odd]), np.array([1.0]))
    assert seconds == pytest.approx(8 * true)
    assert seconds / np.exp(1.2816 * deviation) < 2.5 * true


def test_more_measurements_are_surer() -> None:
    wide, narrow = (Local.of(machine(TRAINED[:k], {})) for k in (0, 40))
    calls = calls_of(HELD)
    assert np.median(wide.logarithms(calls)[1]) > 1.5 * np.median(narrow.logarithms(calls)[1])
    assert "none was measured" in wide.why
    assert "40 operators" in narrow.why


def test_the_sum_of_calls_is_surer_than_one_and_equal_calls_count_each() -> None:
    known = Local.of(machine(TRAINED[:60], {}))
    calls = calls_of([*HELD, *HELD])
    total, deviation = known.total(calls)
    assert total == pytest.approx(2 * known.total(calls_of(HELD))[0], rel=1e-3)
    assert 0 < deviation < np.median(known.logarithms(calls)[1])


def test_the_middle_of_a_sum_is_that_of_sums_of_drawn_times() -> None:
    """Of calls that err by themselves and together, as the regression says it; a measured one takes what it took."""
    times = machine(TRAINED[:60], {"matrix": 2.0})
    for each in (Local.of(times), Local.of({})):
        calls = calls_of(HELD)
        rows, _ = each._rows(calls, None)
        mean, among = each.fit.among(rows)
        drawn = np.random.default_rng(0).multivariate_normal(mean, each.widened**2 * among, size=4000)
        middle = float(np.median(np.exp(drawn).sum(axis=1)))
        parts, _ = each.parts(calls)
        assert float(parts.sum()) == pytest.approx(middle, rel=0.06)
    timed = calls_of([next(each for each in TRAINED[:60] if each.key in times)])
    assert Local.of(times).parts(timed, np.array([1.0]))[0][0] == pytest.approx(times[f"{timed.op[0]} {timed.text[0]}"])


def test_products_in_another_precision_are_not_spoken_of() -> None:
    product = call("mm", [64, 64], [64, 64])
    half = product.with_types(["c10::BFloat16", "c10::BFloat16"])
    found = Local.of({}).predict(calls_of([product, half]))
    assert np.isfinite(found.seconds[0])
    assert np.isnan(found.seconds[1])
    assert found.source.tolist() == [0, -1]


def test_stored_times_of_other_things_are_left_aside() -> None:
    times = machine(TRAINED[:10], {})
    others = {"package.module:function [[],[],[]]": 1.0, 'aten::mm [[[2,2],[2,2]],["double","double"],["",""]]': 9.0}
    assert Local.of({**times, **others}).measured == 10


def test_more_than_it_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretrace.cost.operators.local.MOST", 30)
    known = Local.of(machine(TRAINED, {"matrix": 2.0}))
    assert known.measured == 30
    assert error(known, HELD, {"matrix": 2.0}) < 0.15


def test_calls_larger_than_those_of_the_prices_are_less_sure() -> None:
    known = Local.of({})
    largest = int(np.cbrt(shipped().most["GEMM"][0] / 2))
    _, deviation = known.logarithms(calls_of([call("mm", [n, n], [n, n]) for n in (largest, 2 * largest, 8 * largest)]))
    assert deviation[0] < deviation[1] < deviation[2]
    rows, _ = rows_of(calls_of([call("mm", [largest, largest], [largest, largest])]), shipped(), 0.5)
    assert rows.spread[0] == pytest.approx(shipped().spread["GEMM"])


def test_shipped_choices_are_those_that_are_written() -> None:
    assert chosen().grid == tuple(grid())
    assert chosen().designed == tuple(designed())


def test_choices_are_distinct_and_the_same_again() -> None:
    rows, _ = rows_of(calls_of(TRAINED), shipped(), 0.5)
    found = [choose_designed(rows, 20).tolist() for _ in range(2)]
    assert found[0] == found[1]
    assert len(set(found[0])) == 20
    assert len(np.unique(rows.family[np.array(found[0])])) >= 5


def test_designed_choice_leaves_less_unknown_than_the_first_ones() -> None:
    rows, _ = rows_of(calls_of(POOL), shipped(), 0.5)
    few = [POOL[i] for i in choose_designed(rows, 12)]
    held = calls_of(HELD)
    spread = [float((Local.of(machine(each, {})).logarithms(held)[1] ** 2).mean()) for each in (few, POOL[:12])]
    assert spread[0] < spread[1]


def test_the_pool_is_the_same_again_and_longer_ones_begin_alike() -> None:
    assert random_pool(50, seed=4) == random_pool(80, seed=4)[:50]
    assert random_pool(50, seed=4) != random_pool(50, seed=5)
    assert len(set(random_pool(300, seed=4))) == 300


def test_amounts_of_a_product_and_of_a_convolution() -> None:
    rest = ("[2, 2]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1")
    found = amounts(
        calls_of(
            [
                call("mm", [8, 32], [32, 16]),
                call("convolution", [4, 16, 8, 8], [32, 16, 3, 3], None, *rest),
                call("convolution", [4, 16, 8, 8], [32, 16, 1, 1], None, "[1, 1]", "[0, 0]", *rest[2:]),
                call("convolution", [4, 16, 8, 8], [16, 1, 3, 3], None, "[1, 1]", "[1, 1]", *rest[2:5], "16"),
                call("sum", [8, 32], "[1]", "False", None),
                call("t", [8, 32]),
            ]
        )
    )
    at = {name: i for i, name in enumerate(NAMES)}
    assert found.terms[0, [at["flops"], at["left"], at["right"], at["out"]]].tolist() == [8192, 256, 512, 128]
    assert found.terms[1, at["flops"]] == 2 * 4 * 4 * 4 * 32 * 16 * 9
    assert found.terms[1, at["out"]] == 4 * 4 * 4 * 32  # the stride follows from the FLOPs
    assert found.op[1:5] == ("convolution", "convolution 1x1", "convolution depthwise", "sum.last")
    assert found.terms[5].tolist() == [1.0 if name == "dispatch" else 0.0 for name in NAMES]


def test_gradients_of_a_bag_of_embeddings_are_as_large_as_its_table() -> None:
    index = ("long int", [64])
    backward = call(
        "_embedding_bag_backward", [64, 16], index, index, index, index, index, "5000", "False", "0", "False"
    )
    sparse = call("_embedding_bag_backward", [64, 16], index, index, index, index, index, "5000", "False", "0", "True")
    found = amounts(calls_of([backward, sparse])).terms[:, NAMES.index("near")]
    assert found[0] - found[1] == 4 * 5000 * 16


sizes = st.integers(1, 512)


@settings(max_examples=30)
@given(kind=st.sampled_from(["mm", "add", "softmax", "norm", "copy", "conv"]), m=sizes, n=sizes, seed=st.integers(0, 5))
def test_times_are_positive_finite_and_grow_with_the_batch(kind: str, m: int, n: int, seed: int) -> None:
    known = Local.of(machine(POOL[seed * 20 : seed * 20 + 12], {"matrix": 1.0 + seed}))
    rest = ("[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1")
    kinds: dict[str, Callable[[int], Operator]] = {
        "mm": lambda b: call("mm", [b * m, n], [n, m]),
        "add": lambda b: call("add", [b * m, n], [b * m, n], "1"),
        "softmax": lambda b: call("_softmax", [b * m, n], "-1", "False"),
        "norm": lambda b: call("native_layer_norm", [b * m, n], f"[{n}]", [n], [n], "1e-05"),
        "copy": lambda b: call("clone", [b * m, n], None),
        "conv": lambda b: call("convolution", [2 * b, 16, 1 + m % 32, 1 + m % 32], [1 + n % 64, 16, 3, 3], None, *rest),
    }
    found = replace(known, place=1.0).predict(calls_of([kinds[kind](b) for b in (1, 4, 16)]))
    assert np.isfinite(found.seconds).all()
    assert (found.seconds > 0).all()
    assert (found.low_s <= found.seconds).all()
    assert (found.seconds <= found.high_s).all()
    # What one call was off says something of those of its operator nearby, so that small calls may differ a little.
    assert found.seconds[0] <= 1.25 * found.seconds[1]
    assert found.seconds[1] <= 1.25 * found.seconds[2]


def test_averages_over_windows_add_every_number_of_a_window() -> None:
    def additions(name: str, *tensors: list[int], window: int, stride: int) -> float:
        sizes = (f"[{window}, {window}]", f"[{stride}, {stride}]", "[0, 0]", "False", "True", None)
        each = call(name, *tensors, *sizes)
        return float(amounts(Calls.of([(each.name, each.text)])).terms[0, NAMES.index("rows")])

    assert additions("avg_pool2d", [2, 3, 8, 8], window=3, stride=1) == 2 * 3 * 6 * 6 * 9
    assert additions("avg_pool2d", [2, 3, 8, 8], window=2, stride=2) == 2 * 3 * 4 * 4 * 4
    assert additions("avg_pool2d_backward", [2, 3, 6, 6], [2, 3, 8, 8], window=3, stride=1) == 2 * 3 * 6 * 6 * 9


def test_small_planes_are_normalised_number_by_number_on_the_way_back() -> None:
    def elements(side: int) -> float:
        x, c = [4, 16, side, side], [16]
        each = call("native_batch_norm_backward", x, x, c, c, c, c, c, "True", "1e-05", "[True, True, True]")
        return float(amounts(Calls.of([(each.name, each.text)])).terms[0, NAMES.index("elements")]) / (64 * side**2)

    assert [elements(side) > 1 for side in (1, 2, 3, 8)] == [False, True, False, False]
