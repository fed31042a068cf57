"""Gradients of the small network are those of finite differences, and following them fits."""

from __future__ import annotations

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.search.hybrid import Hybrid
from foretrace.search.named import NAMES, strategy_named
from foretrace.search.reinforcement import Adam, DenseNet


def test_gradients_are_those_of_small_differences() -> None:
    rng = np.random.default_rng(0)
    net, x, weight = DenseNet((3, 5, 4, 2), rng), rng.normal(size=(6, 3)), rng.normal(size=(6, 2))
    of_parameters, of_inputs = net.backward(net.forward(x), weight)
    for array, gradient in [*zip(net.parameters, of_parameters, strict=True), (x, of_inputs)]:
        for i in np.ndindex(array.shape):
            ends = []
            for step in (1e-6, -2e-6):
                array[i] += step
                ends.append(float((net(x) * weight).sum()))
            array[i] += 1e-6
            assert gradient[i] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-7)


def test_adam_fits_a_line() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (64, 1))
    net = DenseNet((1, 8, 1), rng)
    adam = Adam(net.parameters)
    for _ in range(1000):
        values = net.forward(x)
        adam.step(net.backward(values, (values[-1] - (2 * x + 1)) / len(x))[0], 0.02)
    assert np.abs(net(x) - (2 * x + 1)).max() < 0.1


def test_strategies_have_names() -> None:
    for name in NAMES:
        found = strategy_named(name, 100)
        assert isinstance(found, Hybrid) == name.startswith("hybrid:")
        assert not isinstance(found, Hybrid) or found.lessons == 25
    for name in ("hybrid", "cma", "hybrid:", "hybrid:random", "dqn:hybrid", ""):
        with pytest.raises(ForetraceError, match="must be one that there is"):
            strategy_named(name, 100)
