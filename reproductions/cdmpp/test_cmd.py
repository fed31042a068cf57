"""Central moment discrepancy: known answers, symmetry, and the same from numpy and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from reproductions.cdmpp.cmd import cmd, cmd_torch


def sample(seed: int, rows: int = 200, features: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0, 1, (rows, features))


def test_zero_for_equal_samples_in_any_order() -> None:
    x = sample(0)
    assert cmd(x, x) == 0
    assert cmd(x, np.random.default_rng(1).permutation(x)) == pytest.approx(0, abs=1e-12)


def test_a_shift_moves_only_the_mean() -> None:
    x = sample(0)
    assert cmd(x, x + np.array([0.3, 0.4, 0.0])) == pytest.approx(0.5, abs=1e-9)
    assert cmd(x, x + np.array([0.3, 0.4, 0.0]), span=2.0) == pytest.approx(0.25, abs=1e-9)


def test_two_point_distributions_by_hand() -> None:
    """Symmetric two-point samples at distance a from 0.5 have central moments a^2, 0, a^4, 0."""
    wide, narrow = np.array([[0.0], [1.0]]), np.array([[0.25], [0.75]])
    assert cmd(wide, narrow) == pytest.approx((0.25 - 0.0625) + (0.0625 - 0.00390625))
    assert cmd(wide, narrow, moments=3) == pytest.approx(0.25 - 0.0625)
    assert cmd(wide, narrow, moments=1) == 0
    assert cmd(wide, narrow, span=2.0) == pytest.approx((0.25 - 0.0625) / 4 + (0.0625 - 0.00390625) / 16)


def test_third_moment_sees_skew() -> None:
    """Values -1 (2/3) and 2 (1/3) against their mirror: mean 0 and variance 2 in both, third moment 2 against -2."""
    right = np.array([[-1.0], [-1.0], [2.0]])
    assert cmd(right, -right, moments=2) == pytest.approx(0, abs=1e-12)
    assert cmd(right, -right, moments=3) == pytest.approx(4.0)


def test_same_distribution_sampled_twice_comes_close() -> None:
    near = cmd(sample(0, 4000), sample(1, 4000))
    far = cmd(sample(0, 4000), sample(1, 4000) ** 2)
    assert near < 0.05
    assert far > 0.2


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 30), st.integers(1, 30), st.integers(1, 6), st.integers(1, 6))
def test_numpy_is_torch_and_both_are_symmetric(seed: int, rows: int, other: int, features: int, moments: int) -> None:
    x, y = sample(seed, rows, features), sample(seed + 1, other, features) - 0.3
    expected = cmd(x, y, moments=moments)
    assert expected >= 0
    assert cmd(y, x, moments=moments) == pytest.approx(expected)
    found = cmd_torch(torch.from_numpy(x), torch.from_numpy(y), moments=moments)
    assert found.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_gradient_pulls_samples_together_and_is_finite_at_zero() -> None:
    x = torch.from_numpy(sample(0)).requires_grad_()
    cmd_torch(x, x.detach().clone()).backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()
    shift = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([shift], lr=0.05)
    source, target = torch.from_numpy(sample(0)), torch.from_numpy(sample(1) + 0.7)
    for _ in range(60):
        optimizer.zero_grad()
        cmd_torch(source + shift, target).backward()
        optimizer.step()
    assert shift.detach().numpy() == pytest.approx(np.full(3, 0.7), abs=0.08)


@pytest.mark.parametrize(("x", "y"), [([[1.0]], [[1.0, 2.0]]), ([1.0], [1.0]), (np.zeros((0, 2)), np.zeros((3, 2)))])
def test_wrong_samples_are_refused(x: object, y: object) -> None:
    with pytest.raises(ForetraceError, match="of shapes"):
        cmd(np.asarray(x), np.asarray(y))
    with pytest.raises(ForetraceError, match="moments"):
        cmd([[1.0]], [[1.0]], moments=0)
