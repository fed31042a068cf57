"""Small multilayer perceptrons in numpy: several of one shape side by side, their outputs averaged.

Inputs are standardised inside the first layer, so a net takes raw features. Rows are taken in blocks that stay in the
cache of one core, which is worth more than any clever arrangement of the products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

_BLOCK = 1024  # rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ensemble:
    """Nets of one shape with two hidden layers, whose outputs are averaged.

    The hidden function is SiLU, x / (1 + exp(-x)), computed as u (1 + tanh u) with u = x / 2: weights and biases of
    hidden layers are stored halved, so that a layer gives u.
    """

    first: Float32  # [inputs, nets * width]
    first_bias: Float32  # [nets * width]
    hidden: Float32  # [nets, width, width]
    hidden_bias: Float32  # [nets * width]
    last: Float32  # [nets * width, outputs], divided by the number of nets
    last_bias: Float32  # [outputs], the mean of all nets

    @property
    def nets(self) -> int:
        """How many nets are averaged."""
        return len(self.hidden)

    @classmethod
    def of(cls, arrays: Mapping[str, npt.NDArray[np.floating]], prefix: str) -> Ensemble:
        """Make it from arrays as `train_predictor.py` stores them: w0 [nets, in, width], b0, w1, b1, w2, b2, mean, std.

        Raises KeyError where one is missing.
        """
        w0, b0, w1, b1, w2, b2, mean, std = (
            np.asarray(arrays[f"{prefix}.{name}"], dtype=np.float64)
            for name in ("w0", "b0", "w1", "b1", "w2", "b2", "mean", "std")
        )
        nets, inputs, width = w0.shape
        scaled = w0 / std[None, :, None]
        shift = b0 - np.einsum("i,niw->nw", mean, scaled)
        return cls(
            first=np.ascontiguousarray(scaled.transpose(1, 0, 2).reshape(inputs, nets * width) / 2, dtype=np.float32),
            first_bias=(shift.reshape(-1) / 2).astype(np.float32),
            hidden=(w1 / 2).astype(np.float32),
            hidden_bias=(b1.reshape(-1) / 2).astype(np.float32),
            last=(w2.reshape(nets * width, -1) / nets).astype(np.float32),
            last_bias=b2.mean(axis=0).astype(np.float32),
        )

    def __call__(self, features: Float32) -> Float32:
        """Return mean outputs [rows, outputs] for features [rows, inputs]."""
        out = np.empty((len(features), self.last.shape[1]), dtype=np.float32)
        nets, width = self.nets, self.hidden.shape[1]
        space = np.empty((3, min(_BLOCK, len(features)), nets * width), dtype=np.float32)
        for begin in range(0, len(features), _BLOCK):
            rows = features[begin : begin + _BLOCK]
            x, y, gate = space[:, : len(rows)]
            np.matmul(rows, self.first, out=x)
            x += self.first_bias
            _silu(x, gate)
            for net in range(nets):
                at = slice(net * width, (net + 1) * width)
                np.matmul(x[:, at], self.hidden[net], out=y[:, at])
            y += self.hidden_bias
            _silu(y, gate)
            np.matmul(y, self.last, out=out[begin : begin + _BLOCK])
        out += self.last_bias
        return out


def _silu(half: Float32, gate: Float32) -> None:
    """Compute SiLU of twice `half`, in place; `gate` is scratch of the same shape."""
    np.tanh(half, out=gate)
    gate += 1.0
    half *= gate


def log_sigmoid(x: Float64) -> Float64:
    """Return the logarithm of 1 / (1 + exp(-x)), without overflow."""
    return np.asarray(-np.logaddexp(0.0, -x))
