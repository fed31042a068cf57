"""Latency of tensor programs from their compact trees, with numpy alone.

The network of CDMPP (EuroSys 2024, section 5), small: features of the leaves with the positional encoding added, a
transformer encoder in which leaves of one program attend to each other, their weighted mean and maximum as the
embedding of the program, and a decoder to a normalised label. Programs with equally many leaves are computed together,
so nothing is padded. The label is what the program takes over a first estimate (`prior.py`), whose shares also weight
the leaves where they are pooled. The weights that come along were trained by `make reproduce NAME=cdmpp ARGS=train` on
programs measured on one processor core; they say what that processor would take. On another one use `learn.adapt`
with a few measurements.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.cost.programs.program import TensorProgram
from foretrace.errors import ForetraceError
from foretrace.files import write_bytes
from reproductions.cdmpp.ast import FEATURES, Encoded, encode, positional
from reproductions.cdmpp.labels import Labels, labels_from_data
from reproductions.cdmpp.prior import estimates

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
_SHIPPED = "programs.npz"
_BLOCK = 2048  # programs computed at a time
_EPSILON = 1e-5
_TYPICAL_S = 1e-4
EXTRA = 2  # inputs beside the features
_MOST_STANDARD = 6.0  # deviations that a feature may lie from the training programs' mean


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the network."""

    width: int = 64
    layers: int = 2
    heads: int = 4
    hidden: int = 128
    embedding: int = 32
    decoder: int = 64
    positions: bool = True
    attention: bool = True


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Per program seconds and the range that holds 80 % of the programs of tasks that training left out."""

    seconds: Floats
    low_s: Floats
    high_s: Floats


@dataclass(frozen=True, kw_only=True)
class ProgramPredictor:
    """A trained network with what its inputs and labels need."""

    shape: Shape
    weights: Mapping[str, Singles]
    mean: Floats
    deviation: Floats
    costs: Floats
    labels: Labels
    about: str = ""
    low: float = float("nan")
    high: float = float("nan")
    """The range as factors of the prediction, from training with tasks left out; NaN where nobody determined it."""

    def predict(self, programs: Sequence[TensorProgram]) -> Latency:
        """Latencies of programs, one thread, data near."""
        return self.predict_encoded(encode(programs))

    def predict_encoded(self, encoded: Encoded) -> Latency:
        seconds = self.labels.inverse(self.forward(encoded)[1]) * estimates(encoded, self.costs)[1]
        return Latency(seconds=seconds, low_s=seconds * self.low, high_s=seconds * self.high)

    def embed(self, encoded: Encoded) -> Floats:
        """[programs x embedding] in (-1, 1)."""
        return self.forward(encoded)[0]

    def inputs(self, encoded: Encoded) -> Singles:
        """[leaves x (features + 2)] as the network takes them."""
        return standard_inputs(encoded, self.mean, self.deviation, self.costs, self.shape)

    def forward(self, encoded: Encoded) -> tuple[Floats, Floats]:
        """Embeddings and normalised labels."""
        x = self.inputs(encoded)
        z = np.empty((len(encoded), self.shape.embedding))
        label = np.empty(len(encoded))
        for count in np.unique(encoded.counts):
            which = np.flatnonzero(encoded.counts == count)
            for start in range(0, len(which), _BLOCK):
                part = which[start : start + _BLOCK]
                rows = encoded.starts[part][:, None] + np.arange(count)
                z[part], label[part] = _forward(self.weights, x[rows], self.shape)
        return z, label

    def save(self, path: Path) -> None:
        """As one compressed file. Raises ForetraceError where it cannot be written."""
        import io

        head = {
            "shape": vars(self.shape), "labels": self.labels.as_data(), "about": self.about, "low": self.low,
            "high": self.high, "features": list(FEATURES),
        }  # fmt: skip
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {f"w_{name}": value for name, value in self.weights.items()}
        arrays["head"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
        np.savez_compressed(buffer, mean=self.mean, deviation=self.deviation, costs=self.costs, **arrays)
        write_bytes(path, buffer.getvalue())


def load(path: Path | None = None) -> ProgramPredictor:
    """The predictor of a file, or the one that is kept here. Raises ForetraceError where it does not fit."""
    if path is None:
        return _shipped()
    return _load(path)


@cache
def _shipped() -> ProgramPredictor:
    return _load(Path(__file__).with_name(_SHIPPED))


def _load(path: Path) -> ProgramPredictor:
    try:
        with np.load(path, allow_pickle=False) as data:
            arrays = {name: data[name] for name in data.files}
        head: dict[str, Any] = json.loads(arrays["head"].tobytes())
    except (OSError, ValueError, KeyError):
        raise ForetraceError(f"{path} holds no program predictor; make one with ProgramPredictor.save().") from None
    if tuple(head["features"]) != FEATURES:
        raise ForetraceError(
            f"{path} was trained on other features; train it anew with make reproduce NAME=cdmpp ARGS=train."
        )
    return ProgramPredictor(
        shape=Shape(**head["shape"]),
        weights={name[2:]: value for name, value in arrays.items() if name.startswith("w_")},
        mean=arrays["mean"], deviation=arrays["deviation"], costs=arrays["costs"],
        labels=labels_from_data(head["labels"]),
        about=head["about"], low=head["low"], high=head["high"],
    )  # fmt: skip


def standard_inputs(encoded: Encoded, mean: Floats, deviation: Floats, costs: Floats, shape: Shape) -> Singles:
    """Standardised features with the positional encoding added; then per leaf the first estimate and its share."""
    x = np.clip((encoded.leaves - mean) / deviation, -_MOST_STANDARD, _MOST_STANDARD)
    if shape.positions:
        x = x + positional(encoded.positions.tolist(), x.shape[1])
    leaf, program = estimates(encoded, costs)
    share = leaf / np.repeat(program, encoded.counts)
    return np.concatenate([x, np.log10(leaf / _TYPICAL_S)[:, None], share[:, None]], axis=1).astype(np.float32)


def _forward(w: Mapping[str, Singles], x: Singles, shape: Shape) -> tuple[Singles, Singles]:
    """Embeddings and labels of [programs x leaves x inputs]."""
    share = x[..., -1:]
    h = _linear(w, "in", x)
    for i in range(shape.layers):
        a = _norm(w, f"{i}.attend", h)
        if shape.attention:
            h = h + _linear(w, f"{i}.out", _attend(_linear(w, f"{i}.qkv", a), shape.heads))
        f = _norm(w, f"{i}.feed", h)
        h = h + _linear(w, f"{i}.down", np.maximum(_linear(w, f"{i}.up", f), 0))
    h = _norm(w, "last", h)
    pooled = np.concatenate([(h * share).sum(axis=1), h.max(axis=1)], axis=-1)
    z = np.tanh(_linear(w, "embed", pooled))
    d = np.maximum(_linear(w, "decode0", z), 0)
    d = np.maximum(_linear(w, "decode1", d), 0)
    return z, _linear(w, "decode2", d)[..., 0]


def _linear(w: Mapping[str, Singles], name: str, x: Singles) -> Singles:
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def _norm(w: Mapping[str, Singles], name: str, x: Singles) -> Singles:
    centred = x - x.mean(axis=-1, keepdims=True)
    scale = np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + np.float32(_EPSILON))
    return np.asarray(centred / scale * w[f"{name}.weight"] + w[f"{name}.bias"], np.float32)


def _attend(qkv: Singles, heads: int) -> Singles:
    """Multi-head attention of all leaves of a program to all, [programs x leaves x 3 width] -> [.. x width]."""
    programs, count, triple = qkv.shape
    width = triple // 3
    q, k, v = qkv.reshape(programs, count, 3, heads, width // heads).transpose(2, 0, 3, 1, 4)
    scores = q @ k.swapaxes(-1, -2) / np.float32(np.sqrt(width // heads))
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    return np.asarray((scores @ v).transpose(0, 2, 1, 3).reshape(programs, count, width), np.float32)
