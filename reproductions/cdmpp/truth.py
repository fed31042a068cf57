"""The same computations in numpy, written apart: the truth for every program that is made of a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.cost.programs.tasks import Task

Array = NDArray[Any]
Truth = Callable[[Mapping[str, Array], dict[str, int]], Array]
_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
}


def reference(task: Task, inputs: Mapping[str, Array]) -> Array:
    """What numpy computes of the inputs."""
    return _KINDS[task.kind](inputs, dict(task.sizes))


def _matmul_truth(x: Mapping[str, Array], s: dict[str, int]) -> Array:
    t = s.get("t", 0)
    return np.asarray((x["a"].T if t == 2 else x["a"]) @ (x["b"].T if t == 1 else x["b"]))


def _dense_truth(name: str) -> Callable[[Mapping[str, Array], dict[str, int]], Array]:
    return lambda x, _: _ACTIVATIONS[name](x["a"] @ x["b"] + x["c"])


def _windows(x: Array, s: dict[str, int]) -> Array:
    """[channels, h, h, r, r] windows of an input [channels, side, side]."""
    found = np.lib.stride_tricks.sliding_window_view(x, (s["r"], s["r"]), axis=(1, 2))
    return np.asarray(found[:, :: s["s"], :: s["s"]])


def _softmax_truth(x: Mapping[str, Array], _: dict[str, int]) -> Array:
    e = np.exp(x["a"] - x["a"].max(axis=1, keepdims=True))
    return np.asarray(e / e.sum(axis=1, keepdims=True))


def _layer_norm_truth(x: Mapping[str, Array], _: dict[str, int]) -> Array:
    a = x["a"]
    return np.asarray((a - a.mean(axis=1, keepdims=True)) / np.sqrt(a.var(axis=1, keepdims=True) + 1e-5) * x["g"])


def _rms_norm_truth(x: Mapping[str, Array], _: dict[str, int]) -> Array:
    return np.asarray(x["a"] / np.sqrt((x["a"] ** 2).mean(axis=1, keepdims=True) + 1e-5) * x["g"])


def _pointwise_truth(name: str) -> Callable[[Mapping[str, Array], dict[str, int]], Array]:
    return lambda x, _: np.asarray(_ACTIVATIONS[name](x["a"] * x["g"] + x["c"]) + x["d"])


_KINDS: dict[str, Truth] = {
    "matmul": _matmul_truth,
    "dense-relu": _dense_truth("relu"),
    "dense-gelu": _dense_truth("gelu"),
    "batched-matmul": lambda x, _: np.asarray(x["a"] @ x["w"]),
    "gemv": lambda x, _: np.asarray(x["a"] @ x["x"]),
    "conv2d": lambda x, s: np.einsum("cyxuv,fcuv->fyx", _windows(x["a"], s), x["w"], optimize=True),
    "conv2d-last": lambda x, s: np.maximum(
        np.einsum("cyxuv,uvcf->yxf", _windows(x["a"].transpose(2, 0, 1), s), x["w"], optimize=True), 0
    ),
    "depthwise": lambda x, s: np.einsum("cyxuv,cuv->cyx", _windows(x["a"], s), x["w"], optimize=True),
    "max-pool": lambda x, s: np.asarray(_windows(x["a"], s).max(axis=(3, 4))),
    "row-sum": lambda x, _: np.asarray((x["a"] ** 2).sum(axis=1)),
    "column-sum": lambda x, _: np.asarray(x["a"].sum(axis=0)),
    "softmax": _softmax_truth,
    "layer-norm": _layer_norm_truth,
    "rms-norm": _rms_norm_truth,
    "transpose": lambda x, _: np.ascontiguousarray(x["a"].transpose(0, 2, 1)),
    "pointwise-relu": _pointwise_truth("relu"),
    "pointwise-silu": _pointwise_truth("silu"),
}
