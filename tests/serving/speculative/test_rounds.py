"""Rounds of speculative decoding: known answers, Monte Carlo, and where they break even."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.serving.speculative.rounds import (
    RoundTimes,
    best,
    break_even_batch,
    break_even_draft_s,
    speculated,
)
from foretrace.techniques.compute.acceptance import Acceptance

TIMES = RoundTimes(verify_s=tuple(1e-3 * (1 + 0.05 * m) for m in range(9)), draft_s=2e-4, catch_up_s=1e-5,
                   low=0.9, high=1.2, verify_low=0.8, verify_high=1.2)  # fmt: skip


@pytest.mark.parametrize(("rate", "k", "tau"), [(0.8, 5, 3.689), (0.6, 3, 2.176), (0.9, 8, 6.126)])
def test_tokens_of_a_round(rate: float, k: int, tau: float) -> None:
    """Closed form (Leviathan et al., equation 1), and rounds that are played."""
    found = Acceptance.of(rate).tokens(k)
    assert found.value == pytest.approx(tau, abs=5e-4)
    played = np.random.default_rng(0).random((400_000, k)) < rate
    assert np.cumprod(played, axis=1).sum(1).mean() + 1 == pytest.approx(tau, abs=0.01)


@pytest.mark.parametrize(
    ("rate", "k", "cost", "speedup"), [("0.75", 7, 0.02, 3.2), ("0.8", 7, 0.04, 3.3), ("0.82", 7, 0.11, 2.5)]
)
def test_published_expectations(rate: str, k: int, cost: float, speedup: float) -> None:
    """Of T5-small, -base and -large for T5-XXL, English to German, argmax (Leviathan et al., table 4)."""
    times = RoundTimes(verify_s=(1.0,) * 8, draft_s=cost)
    assert speculated(times, Acceptance.of(rate), k).speedup == pytest.approx(speedup, abs=0.06)


def test_counts_give_what_was_counted() -> None:
    found = Acceptance.of("30/12/8/50")
    assert found.survivals(3) == pytest.approx((0.7, 0.58, 0.5))
    assert found.survival(0) == 1 and found.survival(3) == 0.5
    assert found.tokens(3).value == pytest.approx(2.78)
    beyond = found.tokens(5)
    assert beyond.low < 2.78 < beyond.value < beyond.high <= 6
    assert Acceptance.of("0.6-0.8").tokens(2).low == pytest.approx(1.96)
    assert Acceptance.of("1").tokens(4).value == 5 and Acceptance.of("0").tokens(4).value == 1


def play(known: npt.NDArray[np.bool_], k: int) -> list[int]:
    """Rounds of k proposals on a text, by how many each accepted: where the draft knows the next token, and not."""
    unknown, places = np.append(np.flatnonzero(~known), len(known)), np.arange(len(known))
    runs = (unknown[np.searchsorted(unknown, places)] - places).tolist()  # tokens known from here on
    counts, at = [0] * (k + 1), 0
    while at + k < len(known):
        accepted = min(runs[at], k)
        counts[accepted] += 1
        at += accepted + 1  # the target's own token behind them
    return counts


@pytest.mark.parametrize(
    ("easy", "hard", "stay"), [(0.9, 0.2, 0.9), (0.8, 0.8, 0.5), (0.98, 0.05, 0.95), (0.6, 0.3, 0.7)]
)
def test_rounds_of_many_proposals_tell_those_of_few(easy: float, hard: float, stay: float) -> None:
    """Text that is easy for a while and hard for a while, and text that is alike all over."""
    random = np.random.default_rng(1)
    state = np.cumsum(random.random(200_000) > stay) % 2
    known = random.random(len(state)) < np.where(state == 0, easy, hard)
    found = Acceptance(counts=tuple(play(known, 8)))
    for k in range(1, 9):
        counts = play(known, k)
        tau = 1 + sum(i * each for i, each in enumerate(counts)) / sum(counts)
        assert found.tokens(k).value == pytest.approx(tau, rel=0.025)
        assert found.survival(k) == pytest.approx(counts[-1] / sum(counts), rel=0.1)


@given(counts=st.lists(st.integers(0, 50), min_size=2, max_size=10).filter(any), k=st.integers(1, 9))
def test_cutting_runs_anew_keeps_their_tokens(counts: list[int], k: int) -> None:
    found = Acceptance(counts=tuple(counts)).rounds_of(k)
    emitted = [sum((i + 1) * each for i, each in enumerate(these)) for these in (counts, found)]
    assert emitted[0] == pytest.approx(emitted[1])
    assert len(found) == min(k, len(counts) - 1) + 1


@pytest.mark.parametrize("text", ["1.2", "-0.1", "nan", "a", "1/x", "5", "0/0", "3/-1", "0.1-0.2-0.3", ""])
def test_no_acceptance(text: str) -> None:
    with pytest.raises(ForetraceError, match="must be shares from 0 to 1, or counts"):
        Acceptance.of(text)


@given(rate=st.floats(0.05, 0.95), k=st.integers(1, 8))
def test_a_draft_at_break_even_gains_nothing(rate: float, k: int) -> None:
    accepted = Acceptance.of(rate)
    needed = break_even_draft_s(TIMES, accepted, k)
    if needed > 0:
        assert speculated(replace(TIMES, draft_s=needed), accepted, k).speedup == pytest.approx(1)
    else:
        assert speculated(replace(TIMES, draft_s=0.0), accepted, k).speedup <= 1 + 1e-9


@given(rate=st.floats(0, 1), k=st.integers(1, 8))
def test_ranges_hold_their_middle(rate: float, k: int) -> None:
    found = speculated(TIMES, Acceptance.of(rate), k)
    assert found.tau_low <= found.tau <= found.tau_high
    assert found.speedup_low <= found.speedup <= found.speedup_high
    assert best(TIMES, Acceptance.of(rate)).speedup >= found.speedup
    assert found.tokens_per_s == pytest.approx(found.tau / found.round_s)


def test_depth_decides_not_acceptance() -> None:
    """A draft that is accepted more often loses, where it takes twice as long."""
    quick = best(TIMES, Acceptance.of("0.65"))
    slow = best(replace(TIMES, draft_s=5e-4), Acceptance.of("0.75"))
    assert quick.speedup > slow.speedup


def test_speculation_hurts_from_a_batch_on() -> None:
    def times_of(batch: int) -> RoundTimes:  # arithmetic takes over at 32 tokens
        return RoundTimes(verify_s=tuple(max(1.0, batch * m / 32) for m in range(1, 6)), draft_s=0.1, batch=batch)

    accepted = Acceptance.of("0.7")
    batches = [2**i for i in range(9)]
    found = break_even_batch(times_of, accepted, 4, batches)
    assert found == 16
    gains = {batch: speculated(times_of(batch), accepted, 4).speedup for batch in batches}
    assert gains[8] > 1 >= gains[16]
    assert break_even_batch(lambda _: times_of(1), accepted, 4, batches) is None


def test_what_cannot_be() -> None:
    accepted = Acceptance.of("0.7")
    with pytest.raises(ForetraceError, match="k=0 proposes nothing"):
        speculated(TIMES, accepted, 0)
    with pytest.raises(ForetraceError, match="at most 64"):
        speculated(TIMES, accepted, 65)
    with pytest.raises(ForetraceError, match="needs the time of verifying 10 tokens, and 9 are known"):
        speculated(TIMES, accepted, 9)
    with pytest.raises(ForetraceError, match="no k can be chosen"):
        best(RoundTimes(verify_s=(1.0,), draft_s=0.1), accepted)
    assert best(TIMES, accepted) == max((speculated(TIMES, accepted, k) for k in range(1, 9)), key=lambda e: e.speedup)
