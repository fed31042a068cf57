"""Turns, and what becomes of a prediction that is held against rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.experiment.ledger import Ledger
from foretrace.experiment.statistics import Arm, Ratio, Verdict
from foretrace.experiment.trial import changed, figured, in_turns

pytest.importorskip("torch")


@given(arms=st.integers(1, 5), rounds=st.integers(1, 12), warm_up=st.integers(0, 2))
def test_every_arm_runs_in_every_round_and_begins_as_often_as_others(arms: int, rounds: int, warm_up: int) -> None:
    ran: list[tuple[int, int]] = []
    orders: list[list[int]] = []

    def run(arm: int, number: int) -> int:
        ran.append((arm, number))
        return number

    found = in_turns(range(arms), run, rounds, warm_up=warm_up, before=lambda _, order: orders.append(list(order)))
    assert found == {arm: list(range(rounds)) for arm in range(arms)}
    assert ran == [(arm, at - warm_up) for at, order in enumerate(orders) for arm in order]
    begins = [sum(order[0] == arm for order in orders) for arm in range(arms)]
    assert max(begins) - min(begins) <= 1


@given(seconds=st.floats(0.0, 50.0), least=st.integers(1, 8))
def test_a_round_that_would_not_end_in_time_is_not_begun(seconds: float, least: int) -> None:
    now = [0.0]

    def run(arm: str, number: int) -> None:
        now[0] += 1.0

    found = in_turns("ab", run, 20, least=least, seconds=seconds, clock=lambda: now[0])
    assert least <= len(found["a"]) == len(found["b"]) <= 20
    assert now[0] <= max(seconds, 2.0 * least)
    assert len(found["a"]) == 20 or now[0] > seconds - 4.0


def test_rounds_that_are_unfit_are_run_again() -> None:
    ran: list[int] = []
    told: list[float] = []
    found = in_turns("a", lambda _, number: ran.append(number), 3, most=9, good=lambda: len(ran) - 2, tell=told.append)
    assert len(found["a"]) == 5 and told[-1] == 1.0
    assert len(in_turns("a", lambda _, number: None, 3, most=9, good=lambda: 0)["a"]) == 9


@pytest.mark.parametrize(("rounds_s", "again_s", "verdict", "covered", "said"), [
    ([1.04, 1.05, 1.06], [], Verdict.COVERED, True, ""),
    ([1.015, 1.015, 1.015], [], Verdict.COVERED, True, ""),
    ([1.30, 1.31, 1.32], [], Verdict.MISSED, False, ""),
    ([1.11, 1.15, 1.21], [1.11, 1.15, 1.21], Verdict.MISSED, False, ""),
    ([1.09, 1.12, 1.14], [], Verdict.INCONCLUSIVE, False, "off by 12 %"),  # what was measured reaches into the range
    ([1.0, 1.0, 1.0], [1.4, 1.4, 1.4], Verdict.INCONCLUSIVE, True, "differ by 40 %"),
    ([0.7, 1.05, 1.9], [], Verdict.INCONCLUSIVE, True, "spread by 57 %"),
])  # fmt: skip
def test_figures_are_covered_missed_or_swamped_by_noise(
    rounds_s: list[float], again_s: list[float], verdict: Verdict, covered: bool, said: str
) -> None:
    trial = figured((2.0, 1.8, 2.2), [2 * each for each in rounds_s], [2 * each for each in again_s])
    assert (trial.verdict, trial.covered) == (verdict, covered)
    assert said in trial.uncertain and bool(said) == bool(trial.uncertain)
    assert trial.predicted == Ratio(value=1.0, low=0.9, high=1.1)
    assert trial.error == pytest.approx(2.0 / trial.after.median_s - 1)


def test_each_round_is_held_against_its_own_prediction() -> None:
    trial = figured((2.0, 1.9, 2.1), [1.0, 2.0, 3.0, 3.0], [1.0, 2.0, 3.0, 3.0], each_s=[1.0, 2.0, 3.0, 3.0])
    assert trial.measured == Ratio(value=1.0, low=1.0, high=1.0) == trial.same


def test_a_change_is_compared_with_the_mean_of_both_copies_of_its_baseline(tmp_path: Path) -> None:
    before, again = Arm.of([1.0, 1.02, 1.01]), Arm.of([1.02, 1.0, 1.01])
    trial = changed(Ratio(value=0.5, low=0.45, high=0.55), before, again, Arm.of([0.505, 0.505, 0.505]), clock="cpu")
    assert trial.measured.value == pytest.approx(0.5) and trial.verdict == Verdict.COVERED
    doubted = changed(trial.predicted, before, again, trial.after, uncertain="there are too few cores")
    assert (doubted.verdict, doubted.uncertain) == (Verdict.INCONCLUSIVE, "there are too few cores")
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.keep(trial.row("faster n=2", model="m", size="tiny", parameters={"n": 2}, samples=(4, 8)))
    (row,) = ledger.rows(technique="faster")
    assert (row.before_s, row.after_s, row.clock, row.samples_after) == (1.01, 0.505, "cpu", 8)
    assert row.parameters == {"faster": {"n": 2}} and row.torch and row.error == pytest.approx(0)
