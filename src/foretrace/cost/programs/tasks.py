"""What is to be computed, before anybody decides how: tasks of stages over named axes.

A stage fills one buffer. Its axes are spatial (one element of the buffer each) or reduced; every read is indexed by
sums of axes, as in a tensor expression. Convolutions read inputs that are padded already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.cost.programs.program import Buffer, Expression, Purpose
from foretrace.errors import ForetraceError

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
class Fill:
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
    stages: tuple[Fill, ...]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A kind of computation at given sizes, e.g. ("matmul", m=64, n=64, k=64)."""

    kind: str
    sizes: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        return f"{self.kind}({', '.join(f'{key}={value}' for key, value in self.sizes)})"

    def define(self) -> Definition:
        """Raise ForetraceError where the kind is unknown or a size is missing."""
        return _define(self)

    def inputs(self, dtype: str, seed: int = 0) -> dict[str, Array]:
        """Return random inputs in (0.1, 1): no cancellation, no denormal numbers."""
        rng = np.random.default_rng(seed)
        return {
            each.name: rng.uniform(0.1, 1.0, each.shape).astype(dtype)
            for each in self.define().buffers
            if each.role is Purpose.INPUT
        }


def task(kind: str, **sizes: int) -> Task:
    return Task(kind=kind, sizes=tuple(sizes.items()))


@cache
def _define(given: Task) -> Definition:
    if given.kind not in _KINDS:
        raise ForetraceError(f"task kind {given.kind!r} is unknown; take one of {', '.join(_KINDS)}.")
    try:
        return _KINDS[given.kind](dict(given.sizes))
    except KeyError as error:
        raise ForetraceError(f"task {given.name} lacks the size {error}; give it.") from None


# --- expressions and indices -------------------------------------------------------------------------------------


def _r(i: int) -> Expression:
    return ("read", i)


def _c(value: float) -> Expression:
    return ("const", value)


_PRODUCT: Expression = ("mul", _r(0), _r(1))


def _at(*axes: str | Mapping[str, int]) -> Index:
    """Return `_at("i", {"y": 2, "u": 1})`: dimension 0 is i, dimension 1 is 2 y + u."""
    return tuple(((each, 1),) if isinstance(each, str) else tuple(each.items()) for each in axes)


def _read(buffer: str, *axes: str | Mapping[str, int]) -> Read:
    return Read(buffer=buffer, index=_at(*axes))


def _sigmoid(x: Expression) -> Expression:
    return ("div", _c(1.0), ("add", _c(1.0), ("exp", ("sub", _c(0.0), x))))


_ACTIVATIONS: dict[str, Callable[[Expression], Expression]] = {
    "relu": lambda x: ("max", x, _c(0.0)),
    "silu": lambda x: ("mul", x, _sigmoid(x)),
    "gelu": lambda x: ("mul", x, _sigmoid(("mul", _c(1.702), x))),
}


def _buffers(output: Mapping[str, tuple[int, ...]], *, temporary: Mapping[str, tuple[int, ...]] | None = None,
             **inputs: tuple[int, ...]) -> tuple[Buffer, ...]:  # fmt: skip
    groups = ((Purpose.INPUT, inputs), (Purpose.TEMPORARY, temporary or {}), (Purpose.OUTPUT, output))
    return tuple(Buffer(name=n, shape=shape, role=role) for role, group in groups for n, shape in group.items())


# --- products ------------------------------------------------------------------------------------------------------


def _matmul(s: dict[str, int]) -> Definition:
    """Return [m x k] @ [k x n]; with `t` = 1 the right side is stored as [n x k], with 2 the left side as [k x m]."""
    m, n, k, t = s["m"], s["n"], s["k"], s.get("t", 0)
    left, right = (_read("a", "k", "i") if t == 2 else _read("a", "i", "k")), (
        _read("b", "j", "k") if t == 1 else _read("b", "k", "j")
    )  # fmt: skip
    stage = Fill(buffer="y", spatial=(("i", m), ("j", n)), reduced=(("k", k),), reads=(left, right), value=_PRODUCT,
                  combine="add")  # fmt: skip
    a, b = (k, m) if t == 2 else (m, k), (n, k) if t == 1 else (k, n)
    return Definition(buffers=_buffers({"y": (m, n)}, a=a, b=b), stages=(stage,))


def _dense(name: str) -> Callable[[dict[str, int]], Definition]:
    """Return a product with bias and activation."""

    def define(s: dict[str, int]) -> Definition:
        m, n, k = s["m"], s["n"], s["k"]
        product = Fill(buffer="t", spatial=(("i", m), ("j", n)), reduced=(("k", k),),
                        reads=(_read("a", "i", "k"), _read("b", "k", "j")), value=_PRODUCT, combine="add")  # fmt: skip
        value = _ACTIVATIONS[name](("add", _r(0), _r(1)))
        last = Fill(
            buffer="y", spatial=(("i", m), ("j", n)), reads=(_read("t", "i", "j"), _read("c", "j")), value=value
        )
        return Definition(
            buffers=_buffers({"y": (m, n)}, temporary={"t": (m, n)}, a=(m, k), b=(k, n), c=(n,)), stages=(product, last)
        )

    return define


def _batched(s: dict[str, int]) -> Definition:
    b, m, n, k = s["b"], s["m"], s["n"], s["k"]
    stage = Fill(buffer="y", spatial=(("b", b), ("i", m), ("j", n)), reduced=(("k", k),),
                  reads=(_read("a", "b", "i", "k"), _read("w", "b", "k", "j")), value=_PRODUCT,
                  combine="add")  # fmt: skip
    return Definition(buffers=_buffers({"y": (b, m, n)}, a=(b, m, k), w=(b, k, n)), stages=(stage,))


def _gemv(s: dict[str, int]) -> Definition:
    m, k = s["m"], s["k"]
    stage = Fill(buffer="y", spatial=(("i", m),), reduced=(("k", k),), reads=(_read("a", "i", "k"), _read("x", "k")),
                  value=_PRODUCT, combine="add")  # fmt: skip
    return Definition(buffers=_buffers({"y": (m,)}, a=(m, k), x=(k,)), stages=(stage,))


# --- convolutions and pooling, stride `s`, kernel `r` x `r`, output `h` x `h` -----------------------------------------


def _sides(s: dict[str, int]) -> tuple[int, int, int, int]:
    return s["h"], s["r"], s["s"], (s["h"] - 1) * s["s"] + s["r"]


def _conv2d(s: dict[str, int]) -> Definition:
    """Return direct convolution, channels first."""
    (h, r, step, side), c, f = _sides(s), s["c"], s["f"]
    stage = Fill(
        buffer="y", spatial=(("f", f), ("y", h), ("x", h)), reduced=(("c", c), ("u", r), ("v", r)),
        reads=(_read("a", "c", {"y": step, "u": 1}, {"x": step, "v": 1}), _read("w", "f", "c", "u", "v")),
        value=_PRODUCT, combine="add",
    )  # fmt: skip
    return Definition(buffers=_buffers({"y": (f, h, h)}, a=(c, side, side), w=(f, c, r, r)), stages=(stage,))


def _conv2d_last(s: dict[str, int]) -> Definition:
    """Return direct convolution, channels last, with a rectifier."""
    (h, r, step, side), c, f = _sides(s), s["c"], s["f"]
    product = Fill(
        buffer="t", spatial=(("y", h), ("x", h), ("f", f)), reduced=(("u", r), ("v", r), ("c", c)),
        reads=(_read("a", {"y": step, "u": 1}, {"x": step, "v": 1}, "c"), _read("w", "u", "v", "c", "f")),
        value=_PRODUCT, combine="add",
    )  # fmt: skip
    last = Fill(buffer="y", spatial=(("y", h), ("x", h), ("f", f)), reads=(_read("t", "y", "x", "f"),),
                 value=("max", _r(0), _c(0.0)))  # fmt: skip
    return Definition(
        buffers=_buffers({"y": (h, h, f)}, temporary={"t": (h, h, f)}, a=(side, side, c), w=(r, r, c, f)),
        stages=(product, last),
    )


def _depthwise(s: dict[str, int]) -> Definition:
    (h, r, step, side), c = _sides(s), s["c"]
    stage = Fill(
        buffer="y", spatial=(("c", c), ("y", h), ("x", h)), reduced=(("u", r), ("v", r)),
        reads=(_read("a", "c", {"y": step, "u": 1}, {"x": step, "v": 1}), _read("w", "c", "u", "v")),
        value=_PRODUCT, combine="add",
    )  # fmt: skip
    return Definition(buffers=_buffers({"y": (c, h, h)}, a=(c, side, side), w=(c, r, r)), stages=(stage,))


def _pool(s: dict[str, int]) -> Definition:
    (h, r, step, side), c = _sides(s), s["c"]
    stage = Fill(buffer="y", spatial=(("c", c), ("y", h), ("x", h)), reduced=(("u", r), ("v", r)),
                  reads=(_read("a", "c", {"y": step, "u": 1}, {"x": step, "v": 1}),), value=_r(0), combine="max",
                  start=LOWEST)  # fmt: skip
    return Definition(buffers=_buffers({"y": (c, h, h)}, a=(c, side, side)), stages=(stage,))


# --- rows, columns and elements -----------------------------------------------------------------------------------


def _rows(s: dict[str, int], combine: str, value: Expression = ("read", 0)) -> Fill:
    start = LOWEST if combine == "max" else 0.0
    return Fill(buffer="t", spatial=(("i", s["m"]),), reduced=(("j", s["n"]),), reads=(_read("a", "i", "j"),),
                 value=value, combine=combine, start=start)  # fmt: skip


def _row_sum(s: dict[str, int]) -> Definition:
    stage = Fill(buffer="y", spatial=(("i", s["m"]),), reduced=(("j", s["n"]),), reads=(_read("a", "i", "j"),),
                  value=("mul", _r(0), _r(0)), combine="add")  # fmt: skip
    return Definition(buffers=_buffers({"y": (s["m"],)}, a=(s["m"], s["n"])), stages=(stage,))


def _column_sum(s: dict[str, int]) -> Definition:
    stage = Fill(buffer="y", spatial=(("j", s["n"]),), reduced=(("i", s["m"]),), reads=(_read("a", "i", "j"),),
                  value=_r(0), combine="add")  # fmt: skip
    return Definition(buffers=_buffers({"y": (s["n"],)}, a=(s["m"], s["n"])), stages=(stage,))


def _softmax(s: dict[str, int]) -> Definition:
    m, n = s["m"], s["n"]
    both = (("i", m), ("j", n))
    exps = Fill(buffer="e", spatial=both, reads=(_read("a", "i", "j"), _read("t", "i")),
                 value=("exp", ("sub", _r(0), _r(1))))  # fmt: skip
    total = Fill(buffer="z", spatial=(("i", m),), reduced=(("j", n),), reads=(_read("e", "i", "j"),), value=_r(0),
                  combine="add")  # fmt: skip
    last = Fill(buffer="y", spatial=both, reads=(_read("e", "i", "j"), _read("z", "i")), value=("div", _r(0), _r(1)))
    return Definition(
        buffers=_buffers({"y": (m, n)}, temporary={"t": (m,), "e": (m, n), "z": (m,)}, a=(m, n)),
        stages=(_rows(s, "max"), exps, total, last),
    )


def _layer_norm(s: dict[str, int]) -> Definition:
    """Return mean, variance about it, normalised and scaled."""
    m, n = s["m"], s["n"]
    share, both = _c(1.0 / n), (("i", m), ("j", n))
    off: Expression = ("sub", _r(0), ("mul", _r(1), share))
    spread = Fill(buffer="v", spatial=(("i", m),), reduced=(("j", n),), reads=(_read("a", "i", "j"), _read("t", "i")),
                   value=("mul", off, off), combine="add")  # fmt: skip
    scale: Expression = ("sqrt", ("add", ("mul", _r(2), share), _c(1e-5)))
    last = Fill(
        buffer="y", spatial=both, reads=(_read("a", "i", "j"), _read("t", "i"), _read("v", "i"), _read("g", "j")),
        value=("mul", ("div", off, scale), _r(3)),
    )  # fmt: skip
    return Definition(
        buffers=_buffers({"y": (m, n)}, temporary={"t": (m,), "v": (m,)}, a=(m, n), g=(n,)),
        stages=(_rows(s, "add"), spread, last),
    )


def _rms_norm(s: dict[str, int]) -> Definition:
    m, n = s["m"], s["n"]
    scale: Expression = ("sqrt", ("add", ("mul", _r(1), _c(1.0 / n)), _c(1e-5)))
    value: Expression = ("mul", ("div", _r(0), scale), _r(2))
    reads = (_read("a", "i", "j"), _read("t", "i"), _read("g", "j"))
    last = Fill(buffer="y", spatial=(("i", m), ("j", n)), reads=reads, value=value)
    return Definition(
        buffers=_buffers({"y": (m, n)}, temporary={"t": (m,)}, a=(m, n), g=(n,)),
        stages=(_rows(s, "add", ("mul", _r(0), _r(0))), last),
    )


def _transpose(s: dict[str, int]) -> Definition:
    """Swap the last two of three dimensions."""
    b, m, n = s["b"], s["m"], s["n"]
    stage = Fill(buffer="y", spatial=(("b", b), ("j", n), ("i", m)), reads=(_read("a", "b", "i", "j"),), value=_r(0))
    return Definition(buffers=_buffers({"y": (b, n, m)}, a=(b, m, n)), stages=(stage,))


def _pointwise(name: str) -> Callable[[dict[str, int]], Definition]:
    """Return a scale and shift per column, an activation, and a residual: three stages."""

    def define(s: dict[str, int]) -> Definition:
        m, n = s["m"], s["n"]
        both, whole = (("i", m), ("j", n)), (m, n)
        first = Fill(buffer="t", spatial=both, reads=(_read("a", "i", "j"), _read("g", "j"), _read("c", "j")),
                      value=("add", ("mul", _r(0), _r(1)), _r(2)))  # fmt: skip
        second = Fill(buffer="u", spatial=both, reads=(_read("t", "i", "j"),), value=_ACTIVATIONS[name](_r(0)))
        last = Fill(buffer="y", spatial=both, reads=(_read("u", "i", "j"), _read("d", "i", "j")),
                     value=("add", _r(0), _r(1)))  # fmt: skip
        return Definition(
            buffers=_buffers({"y": whole}, temporary={"t": whole, "u": whole}, a=whole, g=(n,), c=(n,), d=whole),
            stages=(first, second, last),
        )

    return define


_KINDS: dict[str, Callable[[dict[str, int]], Definition]] = {
    "matmul": _matmul, "dense-relu": _dense("relu"), "dense-gelu": _dense("gelu"), "batched-matmul": _batched,
    "gemv": _gemv, "conv2d": _conv2d, "conv2d-last": _conv2d_last, "depthwise": _depthwise, "max-pool": _pool,
    "row-sum": _row_sum, "column-sum": _column_sum, "softmax": _softmax, "layer-norm": _layer_norm,
    "rms-norm": _rms_norm, "transpose": _transpose, "pointwise-relu": _pointwise("relu"),
    "pointwise-silu": _pointwise("silu"),
}  # fmt: skip
KINDS = tuple(_KINDS)
_M, _N, _ROWS = (16, 64, 128, 256), (32, 64, 128, 256, 512), (32, 64, 128, 256, 512, 1024)
_SHAPES: dict[tuple[str, ...], dict[str, tuple[int, ...]]] = {
    ("matmul", "dense-relu", "dense-gelu"): {"m": _M, "n": _N, "k": (32, 64, 128, 256)},
    ("batched-matmul",): {"b": (2, 4, 8, 16), "m": (16, 32, 64), "n": (32, 64, 96), "k": (16, 32, 64)},
    ("gemv",): {"m": _ROWS, "k": _ROWS},
    ("conv2d", "conv2d-last"): {"c": (3, 8, 32), "f": (16, 32, 64), "h": (8, 14, 28), "r": (1, 3, 5), "s": (1, 2)},
    ("depthwise", "max-pool"): {"c": (16, 32, 64), "h": (14, 16, 28), "r": (2, 3, 5), "s": (1, 2)},
    ("row-sum", "column-sum", "softmax", "layer-norm", "rms-norm", "pointwise-relu", "pointwise-silu"): {
        "m": _ROWS, "n": (64, 128, 256, 384, 512, 768, 1024),
    },
    ("transpose",): {"b": (1, 2, 4, 8), "m": (32, 64, 128, 256), "n": (32, 64, 128, 256)},
}  # fmt: skip
SIZES = {kind: sizes for kinds, sizes in _SHAPES.items() for kind in kinds}
"""Of every kind its sizes, and some usual ones of each."""
