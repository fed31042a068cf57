"""What is to be computed, before anybody decides how: tasks of stages over named axes.

A stage fills one buffer. Its axes are spatial (one element of the buffer each) or reduced; every read is indexed by
sums of axes, as in a tensor expression. Convolutions read inputs that are padded already. Each kind of task brings
the same computation in numpy, written apart, as the truth for every program that is made of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.errors import ForetraceError
from reproductions.cdmpp.program import Buffer, Expression, Role

Array = NDArray[Any]
Index = tuple[tuple[tuple[str, int], ...], ...]
"""Per dimension of a buffer the axes that it is the sum of, each with its coefficient."""
LOWEST = -3.0e38  # where a maximum starts; finite, so that no arithmetic meets infinities


@dataclass(frozen=True, kw_only=True)
class Read:
    """A buffer at an index."""

    buffer: str
    index: Index


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One buffer, computed for all spatial axes; `combine` over the reduced axes from `start`."""

    buffer: str
    spatial: tuple[tuple[str, int], ...]
    reduced: tuple[tuple[str, int], ...] = ()
    reads: tuple[Read, ...]
    value: Expression
    combine: str = ""
    start: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Definition:
    """Buffers and stages of a task, in an order that can run."""

    buffers: tuple[Buffer, ...]
    stages: tuple[Stage, ...]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A kind of computation at given sizes, e.g. ("matmul", m=64, n=64, k=64)."""

    kind: str
    sizes: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        return f"{self.kind}({', '.join(f'{key}={value}' for key, value in self.sizes)})"

    def define(self) -> Definition:
        """Raises ForetraceError where the kind is unknown or a size is missing."""
        return _define(self)

    def inputs(self, dtype: str, seed: int = 0) -> dict[str, Array]:
        """Random inputs in (0.1, 1): no cancellation, no denormal numbers."""
        rng = np.random.default_rng(seed)
        return {
            each.name: rng.uniform(0.1, 1.0, each.shape).astype(dtype)
            for each in self.define().buffers
            if each.role is Role.INPUT
        }

    def reference(self, inputs: Mapping[str, Array]) -> Array:
        """What numpy computes of the inputs."""
        return _KINDS[self.kind][1](inputs, dict(self.sizes))


def task(kind: str, **sizes: int) -> Task:
    return Task(kind=kind, sizes=tuple(sizes.items()))


@cache
def _define(given: Task) -> Definition:
    if given.kind not in _KINDS:
        raise ForetraceError(f"task kind {given.kind!r} is unknown; take one of {', '.join(_KINDS)}.")
    try:
        return _KINDS[given.kind][0](dict(given.sizes))
    except KeyError as error:
        raise ForetraceError(f"task {given.name} lacks the size {error}; give it.") from None


# --- expressions and indices -------------------------------------------------------------------------------------


def _r(i: int) -> Expression:
    return ("read", i)


def _c(value: float) -> Expression:
    return ("const", value)


_PRODUCT: Expression = ("mul", _r(0), _r(1))


def _at(*axes: str | Mapping[str, int]) -> Index:
    """`_at("i", {"y": 2, "u": 1})`: dimension 0 is i, dimension 1 is 2 y + u."""
    return tuple(((each, 1),) if isinstance(each, str) else tuple(each.items()) for each in axes)


def _read(buffer: str, *axes: str | Mapping[str, int]) -> Read:
    return Read(buffer=buffer, index=_at(*axes))


def _sigmoid(x: Expression) -> Expression:
    return ("div", _c(1.0), ("add", _c(1.0), ("exp", ("sub", _c(0.0), x))))


_ACTIVATIONS: dict[str, tuple[Callable[[Expression], Expression], Callable[[Array], Array]]] = {
    "relu": (lambda x: ("max", x, _c(0.0)), lambda x: np.maximum(x, 0)),
    "silu": (lambda x: ("mul", x, _sigmoid(x)), lambda x: x / (1 + np.exp(-x))),
    "gelu": (lambda x: ("mul", x, _sigmoid(("mul", _c(1.702), x))), lambda x: x / (1 + np.exp(-1.702 * x))),
}


def _buffers(output: Mapping[str, tuple[int, ...]], *, temporary: Mapping[str, tuple[int, ...]] | None = None,
             **inputs: tuple[int, ...]) -> tuple[Buffer, ...]:  # fmt: skip
    groups = ((Role.INPUT, inputs), (Role.TEMPORARY, temporary or {}), (Role.OUTPUT, output))
    return tuple(Buffer(name=n, shape=shape, role=role) for role, group in groups for n, shape in group.items())


# --- products ------------------------------------------------------------------------------------------------------


def _matmul(s: dict[str, int]) -> Definition:
    """[m x k] @ [k x n]; with `t` = 1 the right side is stored as [n x k], with 2 the left side as [k x m]."""
    m, n, k, t = s["m"], s["n"], s["k"], s.get("t", 0)
    left, right = (_read("a", "k", "i") if t == 2 else _read("a", "i", "k")), (
        _read("b", "j", "k") if t == 1 else _read("b", "k", "j")
    )  # fmt: skip
    stage = Stage(buffer="y", spatial=(("i", m), ("j", n)), reduced=(("k", k),), reads=(left, right), value=_PRODUCT,
                  combine="add")  # fmt: skip
    a, b = (k, m) if t == 2 else (m, k), (n, k) if t == 1 else (k, n)
    return Definition(buffers=_buffers({"y": (m, n)}, a=a, b=b), stages=(stage,))


def _matmul_truth(x: Mapping[str, Array], s: dict[str, int]) -> Array:
    t = s.get("t", 0)
    return np.asarray((x["a"].T if t == 2 else x["a"]) @ (x["b"].T if t == 1 else x["b"]))


def _dense(name: str) -> Callable[[dict[str, int]], Definition]:
    """A product with bias and activation."""

    def define(s: dict[str, int]) -> Definition:
        m, n, k = s["m"], s["n"], s["k"]
        product = Stage(buffer="t", spatial=(("i", m), ("j", n)), reduced=(("k", k),),
                        reads=(_read("a", "i", "k"), _read("b", "k", "j")), value=_PRODUCT, combine="add")  # fmt: skip
        value = _ACTIVATIONS[name][0](("add", _r(0), _r(1)))
        last = Stage(
            buffer="y", spatial=(("i", m), ("j", n)), reads=(_read("t", "i", "j"), _read("c", "j")), value=value
        )
        return Definition(
            buffers=_buffers({"y": (m, n)}, temporary={"t": (m, n)}, a=(m, k), b=(k, n), c=(n,)), stages=(product, last)
        )

    return define


def _dense_truth(name: str) -> Callable[[Mapping[str, Array], dict[str, int]], Array]:
    return lambda x, _: _ACTIVATIONS[name][1](x["a"] @ x["b"] + x["c"])


def _batched(s: dict[str, int]) -> Definition:
    b, m, n, k = s["b"], s["m"], s["n"], s["k"]
    stage = Stage(buffer="y", spatial=(("b", b), ("i", m), ("j", n)), reduced=(("k", k),),
                  reads=(_read("a", "b", "i", "k"), _read("w", "b", "k", "j")), value=_PRODUCT,
                  combine="add")  # fmt: skip
    return Definition(buffers=_buffers({"y": (b, m, n)}, a=(b, m, k), w=(b, k, n)), stages=(stage,))


def _gemv(s: dict[str, int]) -> Definition:
    m, k = s["m"], s["k"]
    stage = Stage(buffer="y", spatial=(("i", m),), reduced=(("k", k),), reads=(_read("a", "i", "k"), _read("x", "k")),
                  value=_PRODUCT, combine="add")  # fmt: skip
    return Definition(buffers=_buffers({"y": (m,)}, a=(m, k), x=(k,)), stages=(stage,))


# --- convolutions and pooling, stride `s`, kernel `r` x `r`, output `h` x `h` -----------------------------------------


def _windows(x: Array, s: dict[str, int]) -> Array:
    """[channels, h, h, r, r] windows of an input [channels, side, side]."""
    found = np.lib.stride_tricks.sliding_window_view(x, (s["r"], s["r"]), axis=(1, 2))
    return np.asarray(found[:, :: s["s"], :: s["s"]])


def _sides(s: dict[str, int]) -> tuple[int, int, int, int]:
    return s["h"], s["r"], s["s"], (s["h"] - 1) * s["s"] + s["r"]


def _conv2d(s: dict[str, int]) -> Definition:
    """Direct convolution, channels first."""
    (h, r, step, side), c, f = _sides(s), s["c"], s["f"]
    stage = Stage(
        buffer="y", spatial=(("f", f), ("y", h), ("x", h)), reduced=(("c", c), ("u", r), ("v", r)),
        reads=(_read("a", "c", {"y": step, "u": 1}, {"x": step, "v": 1}), _read("w", "f", "c", "u", "v")),
        value=_PRODUCT, combine="add",
    )  # fmt: skip
    return Definition(buffers=_buffers({"y": (f, h, h)}, a=(c, side, side), w=(f, c, r, r)), stages=(stage,))


def _conv2d_last(s: dict[str, int]) -> Definition:
    """Direct convolution, channels last, with a rectifier."""
    (h, r, step, side), c, f = _sides(s), s["c"], s["f"]
    product = Stage(
        buffer="t", spatial=(("y", h), ("x", h), ("f", f)), reduced=(("u", r), ("v", r), ("c", c)),
        reads=(_read("a", {"y": step, "u": 1}, {"x": step, "v": 1}, "c"), _read("w", "u", "v", "c", "f")),
        value=_PRODUCT, combine="add",
    )  # fmt: skip
    last = Stage(buffer="y", spatial=(("y", h), ("x", h), ("f", f)), reads=(_read("t", "y", "x", "f"),),
                 value=("max", _r(0), _c(0.0)))  # fmt: skip
    return Definition(
        buffers=_buffers({"y": (h, h, f)}, temporary={"t": (h, h, f)}, a=(side, side, c), w=(r, r, c, f)),
        stages=(product, last),
    )


def _depthwise(s: dict[str, int]) -> Definition:
    (h, r, step, side), c = _sides(s), s["c"]
    stage = Stage(
        buffer="y", spatial=(("c", c), ("y", h), ("x", h)), reduced=(("u", r), ("v", r)),
        reads=(_read("a", "c", {"y": step, "u": 1}, {"x": step, "v": 1}), _read("w", "c", "u", "v")),
        value=_PRODUCT, combine="add",
    )  # fmt: skip
    return Definition(buffers=_buffers({"y": (c, h, h)}, a=(c, side, side), w=(c, r, r)), stages=(stage,))


def _pool(s: dict[str, int]) -> Definition:
    (h, r, step, side), c = _sides(s), s["c"]
    stage = Stage(buffer="y", spatial=(("c", c), ("y", h), ("x", h)), reduced=(("u", r), ("v", r)),
                  reads=(_read("a", "c", {"y": step, "u": 1}, {"x": step, "v": 1}),), value=_r(0), combine="max",
                  start=LOWEST)  # fmt: skip
    return Definition(buffers=_buffers({"y": (c, h, h)}, a=(c, side, side)), stages=(stage,))


# --- rows, columns and elements -----------------------------------------------------------------------------------


def _rows(s: dict[str, int], combine: str, value: Expression = ("read", 0)) -> Stage:
    start = LOWEST if combine == "max" else 0.0
    return Stage(buffer="t", spatial=(("i", s["m"]),), reduced=(("j", s["n"]),), reads=(_read("a", "i", "j"),),
                 value=value, combine=combine, start=start)  # fmt: skip


def _row_sum(s: dict[str, int]) -> Definition:
    stage = Stage(buffer="y", spatial=(("i", s["m"]),), reduced=(("j", s["n"]),), reads=(_read("a", "i", "j"),),
                  value=("mul", _r(0), _r(0)), combine="add")  # fmt: skip
    return Definition(buffers=_buffers({"y": (s["m"],)}, a=(s["m"], s["n"])), stages=(stage,))


def _column_sum(s: dict[str, int]) -> Definition:
    stage = Stage(buffer="y", spatial=(("j", s["n"]),), reduced=(("i", s["m"]),), reads=(_read("a", "i", "j"),),
                  value=_r(0), combine="add")  # fmt: skip
    return Definition(buffers=_buffers({"y": (s["n"],)}, a=(s["m"], s["n"])), stages=(stage,))


def _softmax(s: dict[str, int]) -> Definition:
    m, n = s["m"], s["n"]
    both = (("i", m), ("j", n))
    exps = Stage(buffer="e", spatial=both, reads=(_read("a", "i", "j"), _read("t", "i")),
                 value=("exp", ("sub", _r(0), _r(1))))  # fmt: skip
    total = Stage(buffer="z", spatial=(("i", m),), reduced=(("j", n),), reads=(_read("e", "i", "j"),), value=_r(0),
                  combine="add")  # fmt: skip
    last = Stage(buffer="y", spatial=both, reads=(_read("e", "i", "j"), _read("z", "i")), value=("div", _r(0), _r(1)))
    return Definition(
        buffers=_buffers({"y": (m, n)}, temporary={"t": (m,), "e": (m, n), "z": (m,)}, a=(m, n)),
        stages=(_rows(s, "max"), exps, total, last),
    )


def _softmax_truth(x: Mapping[str, Array], _: dict[str, int]) -> Array:
    e = np.exp(x["a"] - x["a"].max(axis=1, keepdims=True))
    return np.asarray(e / e.sum(axis=1, keepdims=True))


def _layer_norm(s: dict[str, int]) -> Definition:
    """Mean, variance about it, normalised and scaled."""
    m, n = s["m"], s["n"]
    share, both = _c(1.0 / n), (("i", m), ("j", n))
    off: Expression = ("sub", _r(0), ("mul", _r(1), share))
    spread = Stage(buffer="v", spatial=(("i", m),), reduced=(("j", n),), reads=(_read("a", "i", "j"), _read("t", "i")),
                   value=("mul", off, off), combine="add")  # fmt: skip
    scale: Expression = ("sqrt", ("add", ("mul", _r(2), share), _c(1e-5)))
    last = Stage(
        buffer="y", spatial=both, reads=(_read("a", "i", "j"), _read("t", "i"), _read("v", "i"), _read("g", "j")),
        value=("mul", ("div", off, scale), _r(3)),
    )  # fmt: skip
    return Definition(
        buffers=_buffers({"y": (m, n)}, temporary={"t": (m,), "v": (m,)}, a=(m, n), g=(n,)),
        stages=(_rows(s, "add"), spread, last),
    )


def _layer_norm_truth(x: Mapping[str, Array], _: dict[str, int]) -> Array:
    a = x["a"]
    return np.asarray((a - a.mean(axis=1, keepdims=True)) / np.sqrt(a.var(axis=1, keepdims=True) + 1e-5) * x["g"])


def _rms_norm(s: dict[str, int]) -> Definition:
    m, n = s["m"], s["n"]
    scale: Expression = ("sqrt", ("add", ("mul", _r(1), _c(1.0 / n)), _c(1e-5)))
    value: Expression = ("mul", ("div", _r(0), scale), _r(2))
    reads = (_read("a", "i", "j"), _read("t", "i"), _read("g", "j"))
    last = Stage(buffer="y", spatial=(("i", m), ("j", n)), reads=reads, value=value)
    return Definition(
        buffers=_buffers({"y": (m, n)}, temporary={"t": (m,)}, a=(m, n), g=(n,)),
        stages=(_rows(s, "add", ("mul", _r(0), _r(0))), last),
    )


def _rms_norm_truth(x: Mapping[str, Array], _: dict[str, int]) -> Array:
    return np.asarray(x["a"] / np.sqrt((x["a"] ** 2).mean(axis=1, keepdims=True) + 1e-5) * x["g"])


def _transpose(s: dict[str, int]) -> Definition:
    """The last two of three dimensions change places."""
    b, m, n = s["b"], s["m"], s["n"]
    stage = Stage(buffer="y", spatial=(("b", b), ("j", n), ("i", m)), reads=(_read("a", "b", "i", "j"),), value=_r(0))
    return Definition(buffers=_buffers({"y": (b, n, m)}, a=(b, m, n)), stages=(stage,))


def _pointwise(name: str) -> Callable[[dict[str, int]], Definition]:
    """A scale and shift per column, an activation, and a residual: three stages."""

    def define(s: dict[str, int]) -> Definition:
        m, n = s["m"], s["n"]
        both, whole = (("i", m), ("j", n)), (m, n)
        first = Stage(buffer="t", spatial=both, reads=(_read("a", "i", "j"), _read("g", "j"), _read("c", "j")),
                      value=("add", ("mul", _r(0), _r(1)), _r(2)))  # fmt: skip
        second = Stage(buffer="u", spatial=both, reads=(_read("t", "i", "j"),), value=_ACTIVATIONS[name][0](_r(0)))
        last = Stage(buffer="y", spatial=both, reads=(_read("u", "i", "j"), _read("d", "i", "j")),
                     value=("add", _r(0), _r(1)))  # fmt: skip
        return Definition(
            buffers=_buffers({"y": whole}, temporary={"t": whole, "u": whole}, a=whole, g=(n,), c=(n,), d=whole),
            stages=(first, second, last),
        )

    return define


def _pointwise_truth(name: str) -> Callable[[Mapping[str, Array], dict[str, int]], Array]:
    return lambda x, _: np.asarray(_ACTIVATIONS[name][1](x["a"] * x["g"] + x["c"]) + x["d"])


_KINDS: dict[str, tuple[Callable[[dict[str, int]], Definition], Callable[[Mapping[str, Array], dict[str, int]], Array]]]
_KINDS = {
    "matmul": (_matmul, _matmul_truth),
    "dense-relu": (_dense("relu"), _dense_truth("relu")),
    "dense-gelu": (_dense("gelu"), _dense_truth("gelu")),
    "batched-matmul": (_batched, lambda x, _: np.asarray(x["a"] @ x["w"])),
    "gemv": (_gemv, lambda x, _: np.asarray(x["a"] @ x["x"])),
    "conv2d": (_conv2d, lambda x, s: np.einsum("cyxuv,fcuv->fyx", _windows(x["a"], s), x["w"], optimize=True)),
    "conv2d-last": (
        _conv2d_last,
        lambda x, s: np.maximum(
            np.einsum("cyxuv,uvcf->yxf", _windows(x["a"].transpose(2, 0, 1), s), x["w"], optimize=True), 0
        ),
    ),
    "depthwise": (_depthwise, lambda x, s: np.einsum("cyxuv,cuv->cyx", _windows(x["a"], s), x["w"], optimize=True)),
    "max-pool": (_pool, lambda x, s: np.asarray(_windows(x["a"], s).max(axis=(3, 4)))),
    "row-sum": (_row_sum, lambda x, _: np.asarray((x["a"] ** 2).sum(axis=1))),
    "column-sum": (_column_sum, lambda x, _: np.asarray(x["a"].sum(axis=0))),
    "softmax": (_softmax, _softmax_truth),
    "layer-norm": (_layer_norm, _layer_norm_truth),
    "rms-norm": (_rms_norm, _rms_norm_truth),
    "transpose": (_transpose, lambda x, _: np.ascontiguousarray(x["a"].transpose(0, 2, 1))),
    "pointwise-relu": (_pointwise("relu"), _pointwise_truth("relu")),
    "pointwise-silu": (_pointwise("silu"), _pointwise_truth("silu")),
}
KINDS = tuple(_KINDS)
