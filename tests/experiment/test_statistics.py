"""Ratios and their intervals on blocks whose truth is known, and the rules of the verdict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.experiment.statistics import (
    LEAST_FLOOR,
    Arm,
    Ratio,
    Verdict,
    floor,
    paired_ratio,
    strays,
    too_uncertain,
    trimmed_mean,
    verdict,
)

QUIET = Ratio(value=1.0, low=0.998, high=1.002)


def ratio(value: float, by: float = 0.0) -> Ratio:
    return Ratio(value=value, low=value - by, high=value + by)


def blocks(truth: float, rounds: int, noise: float, seed: int) -> tuple[list[float], list[float]]:
    """Both arms of a machine that becomes slower and slower, and stalls in one round of five for one of them."""
    random = np.random.default_rng(seed)
    drift = np.linspace(0.1, 0.15, rounds)
    first = drift * (1 + noise * random.standard_normal(rounds))
    second = truth * drift * (1 + noise * random.standard_normal(rounds))
    second[::5] *= 3.0
    return first.tolist(), second.tolist()


@given(truth=st.floats(0.2, 5.0), rounds=st.integers(8, 40), seed=st.integers(0, 1000))
@settings(max_examples=60)
def test_drift_and_outliers_do_not_move_the_ratio(truth: float, rounds: int, seed: int) -> None:
    found = paired_ratio(*blocks(truth, rounds, 0.01, seed))
    assert found.value == pytest.approx(truth, rel=0.03)
    assert found.low <= found.value <= found.high


def test_without_noise_the_ratio_is_exact() -> None:
    assert paired_ratio([1.0, 2.0, 4.0], [0.5, 1.0, 2.0]) == Ratio(value=0.5, low=0.5, high=0.5)


@pytest.mark.parametrize("rounds", [2, 3, 4, 5, 6, 12])
def test_the_interval_covers_the_truth_about_as_often_as_it_says(rounds: int) -> None:
    random = np.random.default_rng(7)
    covered = 0
    for seed in range(200):
        first = 1 + 0.05 * random.standard_normal(rounds)
        second = 0.7 * (1 + 0.05 * random.standard_normal(rounds))
        found = paired_ratio(first.tolist(), second.tolist(), seed=seed)
        covered += found.low <= 0.7 <= found.high
    assert 0.70 <= covered / 200 <= 0.92  # 80 % in the limit; a few rounds are known to fall short or beyond


def test_the_same_blocks_give_the_same_interval() -> None:
    arms = blocks(0.7, 12, 0.05, 3)
    assert paired_ratio(*arms, seed=5) == paired_ratio(*arms, seed=5)


def test_an_arm_by_hand() -> None:
    arm = Arm.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert arm.median_s == 3.0
    assert arm.spread == pytest.approx(2 / 3)
    assert arm.mean_s == 3.0
    assert arm.blocks_s == (1.0, 2.0, 3.0, 4.0, 100.0)


@given(st.lists(st.floats(0.001, 1e3), min_size=1, max_size=50), st.floats(0, 0.49))
def test_a_trimmed_mean_lies_inside(values: list[float], share: float) -> None:
    found = trimmed_mean(values, share)
    assert min(values) * (1 - 1e-9) <= found <= max(values) * (1 + 1e-9)


def test_verdicts_by_hand() -> None:
    assert verdict(ratio(0.70, 0.04), ratio(0.72, 0.01), same=QUIET) is Verdict.COVERED
    assert verdict(ratio(0.70, 0.01), ratio(0.72, 0.005), same=QUIET) is Verdict.MISSED
    # that the two intervals meet is not enough
    assert verdict(ratio(0.70, 0.01), ratio(0.72, 0.012), same=QUIET) is Verdict.MISSED
    # below the floor
    assert verdict(ratio(0.99, 0.02), ratio(1.01, 0.005), same=QUIET) is Verdict.NO_CHANGE
    # a promise that was not kept is no agreement, even where nothing could be measured
    assert verdict(ratio(0.70, 0.04), ratio(1.0, 0.005), same=QUIET) is Verdict.MISSED
    assert verdict(ratio(0.70, 0.04), ratio(0.7, 0.0), same=QUIET, uncertain="noise") is Verdict.INCONCLUSIVE


def test_a_baseline_that_differs_from_itself_lifts_the_floor() -> None:
    assert floor(QUIET) == LEAST_FLOOR
    assert floor(Ratio(value=1.04, low=1.02, high=1.06)) == pytest.approx(0.06)
    measured, predicted = ratio(0.95, 0.005), ratio(0.96, 0.02)
    assert verdict(predicted, measured, same=QUIET) is Verdict.COVERED
    assert verdict(predicted, measured, same=Ratio(value=1.0, low=0.94, high=1.06)) is Verdict.NO_CHANGE


def arm(spread: float) -> Arm:
    return Arm(median_s=0.1, p10_s=0.1, p90_s=0.1, spread=spread, mean_s=0.1, blocks_s=(0.1,))


@pytest.mark.parametrize(
    ("spread", "clock", "refused"),
    [(0.09, "wall", False), (0.11, "wall", True), (0.11, "cpu", False), (0.26, "cpu", True)],
)
def test_how_much_the_blocks_may_spread(spread: float, clock: str, refused: bool) -> None:
    said = too_uncertain([arm(0.01), arm(spread)], ratio(0.7, 0.01), clock)
    assert bool(said) is refused
    assert f"{100 * spread:.0f} %" in said or not refused


@given(effect=st.floats(0.0, 0.9), half=st.floats(0.0, 0.5))
def test_how_wide_the_interval_may_be(effect: float, half: float) -> None:
    measured = ratio(1 - effect, half)
    refused = bool(too_uncertain([arm(0.01)], measured, "cpu"))
    assert refused == (measured.half_width > max(0.02, measured.effect / 3))


@given(value=st.floats(0.3, 3.0), half=st.floats(0, 0.2), other=st.floats(0.3, 3.0))
def test_an_interval_holds_its_middle_and_nothing_outside(value: float, half: float, other: float) -> None:
    one = ratio(value, half)
    assert one.holds(value)
    assert one.holds(other) == (one.low <= other <= one.high)


@pytest.mark.parametrize(
    ("recorded", "spread", "concludes"),
    [(0.100, 0.0, True), (0.1015, 0.0, True), (0.104, 0.0, False), (0.104, 0.06, True), (0.09, 0.06, False)],
)
def test_a_recording_of_another_step_decides_nothing(recorded: float, spread: float, concludes: bool) -> None:
    steps = [0.1 * (1 + spread * each) for each in (-1.0, -0.5, 0.0, 0.5, 1.0)]
    said = strays([recorded] * 8, [Arm.of(steps), Arm.of(steps)])
    assert (said == "") == concludes
    if not concludes:
        assert said.startswith(f"the recorded step ({1e3 * recorded:.3g} ms) and the baseline of the arms (100 ms)")
        same = ratio(1.0, 0.001)
        assert verdict(ratio(0.8, 0.01), ratio(0.8, 0.01), same=same, uncertain=said) == Verdict.INCONCLUSIVE
