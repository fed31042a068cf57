"""`DenseNet`: a small network in numpy, with gradients for its weights and for what goes in; `Adam` to follow them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from foretrace.arrays import Float64

_FORGET, _FORGET_SQUARES, _LEAST = 0.9, 0.999, 1e-8


class DenseNet:
    """Layers with tanh between them; `sizes` from the inputs to the outputs."""

    def __init__(self, sizes: Sequence[int], rng: np.random.Generator) -> None:
        """Draw weights of variance 1 / inputs, no biases."""
        self.parameters: list[Float64] = []
        for inputs, outputs in pairwise(sizes):
            self.parameters += [rng.normal(size=(inputs, outputs)) / max(inputs, 1) ** 0.5, np.zeros(outputs)]

    def forward(self, x: Float64) -> list[Float64]:
        """Return what goes into every layer (samples x inputs), and the outputs last."""
        values = [x]
        for i in range(0, len(self.parameters), 2):
            out = values[-1] @ self.parameters[i] + self.parameters[i + 1]
            values.append(np.tanh(out) if i + 2 < len(self.parameters) else out)
        return values

    def __call__(self, x: Float64) -> Float64:
        """Return outputs (samples x outputs)."""
        return self.forward(x)[-1]

    def backward(self, values: list[Float64], gradient: Float64) -> tuple[list[Float64], Float64]:
        """Return gradients of all parameters and of the inputs from that of the outputs; `values`: of `forward`."""
        found: list[Float64] = []
        for i in range(len(self.parameters) - 2, -1, -2):
            found[:0] = [values[i // 2].T @ gradient, gradient.sum(axis=0)]
            gradient = gradient @ self.parameters[i].T
            if i:
                gradient = gradient * (1 - values[i // 2] ** 2)
        return found, gradient


class Adam:
    """Changes arrays in place (Kingma and Ba, 2015)."""

    def __init__(self, parameters: Sequence[Float64]) -> None:
        self._all = [(each, np.zeros_like(each), np.zeros_like(each)) for each in parameters]
        self._steps = 0

    def step(self, gradients: Sequence[Float64], rate: float) -> None:
        """Step against the gradients, by about `rate`."""
        self._steps += 1
        for (at, mean, square), gradient in zip(self._all, gradients, strict=True):
            mean[...] += (1 - _FORGET) * (gradient - mean)
            square[...] += (1 - _FORGET_SQUARES) * (gradient**2 - square)
            unbiased = mean / (1 - _FORGET**self._steps)
            at[...] -= rate * unbiased / (np.sqrt(square / (1 - _FORGET_SQUARES**self._steps)) + _LEAST)
