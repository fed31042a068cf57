"""What is to be computed, before anybody decides how: tasks of stages over named axes.

A stage fills one buffer. Its axes are spatial (one element of the buffer each) or reduced; every read is indexed by
sums of axes, as in a tensor expression. Convolutions read inputs that are padded already.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
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
        sizes = dict(given.sizes)
        return _definition(_STORED.get((given.kind, sizes.get("t")), _KINDS[given.kind]), sizes)
    except KeyError as error:
        raise ForetraceError(f"task {given.name} lacks the size {error}; give it.") from None


# --- stages as text: `y[i,j] = sum[k](a[i,k] * b[k,j])` -----------------------------------------------------------

_AXES = {"i": "m", "j": "n", "y": "h", "x": "h", "u": "r", "v": "r"}  # the size of an axis that has another name
_SIGNS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div"}
_FOLDS = {"sum": ("add", 0.0), "max": ("max", LOWEST)}


def _definition(stages: Sequence[str], sizes: Mapping[str, int]) -> Definition:
    fills = [_Stage(text, sizes).fill() for text in stages]
    extent = {axis: size for fill in fills for axis, size in (*fill.spatial, *fill.reduced)}
    shapes = {
        read.buffer: tuple(1 + sum(step * (extent[axis] - 1) for axis, step in terms) for terms in read.index)
        for fill in fills
        for read in fill.reads
    }
    made = {fill.buffer: tuple(size for _, size in fill.spatial) for fill in fills}
    output = fills[-1].buffer
    groups = (
        (Purpose.INPUT, {name: shape for name, shape in shapes.items() if name not in made}),
        (Purpose.TEMPORARY, {name: shape for name, shape in made.items() if name != output}),
        (Purpose.OUTPUT, {output: made[output]}),
    )
    buffers = (Buffer(name=n, shape=shape, role=role) for role, group in groups for n, shape in group.items())
    return Definition(buffers=tuple(buffers), stages=tuple(fills))


class _Stage:
    """One stage, read from its text."""

    def __init__(self, text: str, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.reads: list[Read] = []
        assign: Any = ast.parse(text).body[0]
        self.target, self.right = assign.targets[0], assign.value

    def fill(self) -> Fill:
        reduced, combine, start = [], "", 0.0
        if isinstance(self.right, ast.Call) and isinstance(self.right.func, ast.Subscript):
            combine, start = _FOLDS[self.right.func.value.id]  # type: ignore[attr-defined]
            reduced, self.right = _parts(self.right.func), self.right.args[0]
        value = self.value(self.right)
        spatial, reduced_axes = (
            tuple((each.id, self.sizes[_AXES.get(each.id, each.id)]) for each in axes)
            for axes in (_parts(self.target), reduced)
        )
        return Fill(buffer=self.target.value.id, spatial=spatial, reduced=reduced_axes, reads=tuple(self.reads),
                    value=value, combine=combine, start=start)  # fmt: skip

    def value(self, node: Any) -> Expression:
        if isinstance(node, ast.Subscript):
            read = Read(buffer=node.value.id, index=tuple(map(self.terms, _parts(node))))  # type: ignore[attr-defined]
            if read not in self.reads:
                self.reads.append(read)
            return ("read", self.reads.index(read))
        if isinstance(node, ast.Call):
            return (node.func.id, *map(self.value, node.args))  # type: ignore[attr-defined]
        if isinstance(node, ast.BinOp):
            left, right = self.value(node.left), self.value(node.right)
            if left[0] == right[0] == "const" and isinstance(node.op, ast.Div):
                return ("const", left[1] / right[1])
            return (_SIGNS[type(node.op)], left, right)
        return ("const", self.number(node))

    def terms(self, node: Any) -> tuple[tuple[str, int], ...]:
        """Return the axes of `s*y + u`, each with its coefficient."""
        if isinstance(node, ast.Name):
            return ((node.id, 1),)
        if isinstance(node.op, ast.Mult):
            return ((node.right.id, int(self.number(node.left))),)
        return (*self.terms(node.left), *self.terms(node.right))

    def number(self, node: Any) -> float:
        return float(self.sizes[node.id] if isinstance(node, ast.Name) else node.value)


def _parts(node: Any) -> list[Any]:
    """Return what stands between the brackets."""
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def _activated(kind: str, x: str) -> str:
    forms = {"relu": "max({x}, 0)", "silu": "{x} * (1 / (1 + exp(0 - {x})))",
             "gelu": "{x} * (1 / (1 + exp(0 - 1.702 * {x})))"}  # fmt: skip
    return forms[kind].format(x=x)


def _dense(kind: str) -> tuple[str, ...]:
    """Return a product with bias and activation."""
    return ("t[i,j] = sum[k](a[i,k] * b[k,j])", f"y[i,j] = {_activated(kind, '(t[i,j] + c[j])')}")


def _pointwise(kind: str) -> tuple[str, ...]:
    """Return a scale and shift per column, an activation, and a residual."""
    return ("t[i,j] = a[i,j] * g[j] + c[j]", f"u[i,j] = {_activated(kind, 't[i,j]')}", "y[i,j] = u[i,j] + d[i,j]")


# Convolutions and pooling have stride `s`, kernel `r` x `r` and output `h` x `h`.
_KINDS: dict[str, tuple[str, ...]] = {
    "matmul": ("y[i,j] = sum[k](a[i,k] * b[k,j])",),
    "dense-relu": _dense("relu"),
    "dense-gelu": _dense("gelu"),
    "batched-matmul": ("y[b,i,j] = sum[k](a[b,i,k] * w[b,k,j])",),
    "gemv": ("y[i] = sum[k](a[i,k] * x[k])",),
    "conv2d": ("y[f,y,x] = sum[c,u,v](a[c,s*y+u,s*x+v] * w[f,c,u,v])",),
    "conv2d-last": ("t[y,x,f] = sum[u,v,c](a[s*y+u,s*x+v,c] * w[u,v,c,f])", "y[y,x,f] = max(t[y,x,f], 0)"),
    "depthwise": ("y[c,y,x] = sum[u,v](a[c,s*y+u,s*x+v] * w[c,u,v])",),
    "max-pool": ("y[c,y,x] = max[u,v](a[c,s*y+u,s*x+v])",),
    "row-sum": ("y[i] = sum[j](a[i,j] * a[i,j])",),
    "column-sum": ("y[j] = sum[i](a[i,j])",),
    "softmax": (
        "t[i] = max[j](a[i,j])", "e[i,j] = exp(a[i,j] - t[i])", "z[i] = sum[j](e[i,j])", "y[i,j] = e[i,j] / z[i]",
    ),
    "layer-norm": (
        "t[i] = sum[j](a[i,j])",
        "v[i] = sum[j]((a[i,j] - t[i] * (1 / n)) * (a[i,j] - t[i] * (1 / n)))",
        "y[i,j] = (a[i,j] - t[i] * (1 / n)) / sqrt(v[i] * (1 / n) + 1e-5) * g[j]",
    ),
    "rms-norm": ("t[i] = sum[j](a[i,j] * a[i,j])", "y[i,j] = a[i,j] / sqrt(t[i] * (1 / n) + 1e-5) * g[j]"),
    "transpose": ("y[b,j,i] = a[b,i,j]",),
    "pointwise-relu": _pointwise("relu"),
    "pointwise-silu": _pointwise("silu"),
}  # fmt: skip
_STORED: dict[tuple[str, int | None], tuple[str, ...]] = {  # transposed, by the size `t`
    ("matmul", 1): ("y[i,j] = sum[k](a[i,k] * b[j,k])",),
    ("matmul", 2): ("y[i,j] = sum[k](a[k,i] * b[k,j])",),
}
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
