"""Sizes and strides of what the known operators make, and where inputs do not fit an operator."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from foretrace.errors import ForetraceError
from foretrace.plan.rewrite.term import Dims, Term

UNARY = ("relu", "sigmoid", "tanh", "gelu", "silu", "hardtanh", "neg", "mul_scalar", "add_scalar")
BINARY = ("add", "mul")
POOLS = ("avg_pool", "max_pool")
VIEWS = ("slice", "permute", "reshape")
# conv2d(x, w, [b], [added]): attributes stride, padding, dilation, groups, bias, added, act ("" or "relu").
# linear(x, w, [b], [added]): bias, added, act ("", "relu" or "gelu"). batch_norm(x, gamma, beta, mean, var): eps.
# concat: axis. slice: axis, start, length. permute: order. reshape: dims. unit_kernel: channels, rows, columns.
# pad_kernel(w): rows, columns on each side.
KNOWN = frozenset(
    (*UNARY, *BINARY, *POOLS, *VIEWS, "conv2d", "linear", "matmul", "batch_norm", "concat", "pad_kernel", "unit_kernel",
     "grouped_kernel", "rsqrt_eps", "sum_kernel", "chain_kernel")
)  # fmt: skip


class UnfitError(ForetraceError):
    """Inputs whose sizes do not fit an operator."""


def contiguous(dims: Sequence[int]) -> Dims:
    """Return strides of a tensor whose last dimension lies together."""
    found, step = [], 1
    for size in reversed(dims):
        found.append(step)
        step *= max(size, 1)
    return tuple(reversed(found))


def dense(dims: Dims, strides: Dims) -> bool:
    """Return whether a tensor has no holes, in whatever order its dimensions lie."""
    pairs = sorted((step, size) for step, size in zip(strides, dims, strict=True) if size > 1)
    expected = 1
    for step, size in pairs:
        if step != expected:
            return False
        expected *= size
    return True


def infer(op: str, inputs: Sequence[Term], a: dict[str, Any]) -> tuple[Dims, Dims]:
    """Return (dims, strides) of the result. Raises UnfitError."""
    first = inputs[0] if inputs else None
    if op in UNARY and first is not None:
        return first.dims, first.strides if dense(first.dims, first.strides) else contiguous(first.dims)
    if op in ("slice", "permute", "reshape") and first is not None:
        return _view(op, first, a)
    dims = _dims(op, inputs, a)
    if op in BINARY and all(each.dims == dims and each.strides == inputs[0].strides for each in inputs):
        return dims, inputs[0].strides if dense(dims, inputs[0].strides) else contiguous(dims)
    return dims, contiguous(dims)


def _view(op: str, x: Term, a: dict[str, Any]) -> tuple[Dims, Dims]:
    if op == "permute":
        return tuple(x.dims[i] for i in a["order"]), tuple(x.strides[i] for i in a["order"])
    if op == "slice":
        _require(a["start"] >= 0 and 0 < a["length"] <= x.dims[a["axis"]] - a["start"], "a slice outside its tensor")
        return tuple(a["length"] if i == a["axis"] else n for i, n in enumerate(x.dims)), x.strides
    dims = tuple(a["dims"])
    _require(prod(dims) == x.size, f"{list(x.dims)} has not as many elements as {list(dims)}")
    return dims, _reshaped(x, dims)


def _reshaped(x: Term, dims: Dims) -> Dims:
    """Return strides after a reshape: those of a view where its last dimensions alone are split or joined, else of a
    copy.
    """
    if x.strides == contiguous(x.dims):
        return contiguous(dims)
    shared = 0
    while shared < min(len(dims), x.rank) and dims[shared] == x.dims[shared]:
        shared += 1
    rest = x.dims[shared:]
    inner = x.strides[shared:]
    if rest and inner == tuple(each * inner[-1] for each in contiguous(rest)):
        return (*x.strides[:shared], *(each * inner[-1] for each in contiguous(dims[shared:])))
    return contiguous(dims)


def _dims(op: str, inputs: Sequence[Term], a: dict[str, Any]) -> Dims:
    dims = [each.dims for each in inputs]
    if op in BINARY:
        return broadcast(dims[0], dims[1])
    if op == "conv2d":
        return _convolution(inputs, a)
    if op == "linear":
        x, w = dims[0], dims[1]
        _require(len(w) == 2 and len(x) >= 1 and x[-1] == w[1], f"a product of {list(x)} with weights {list(w)}")
        _extras(inputs, a, w[0], (*x[:-1], w[0]))
        return (*x[:-1], w[0])
    if op == "matmul":
        return _product(dims[0], dims[1])
    if op == "batch_norm":
        _require(len(dims[0]) > 1 and all(each == (dims[0][1],) for each in dims[1:]), "a batch norm of other channels")
        return dims[0]
    if op == "concat":
        axis = a["axis"]
        _require(
            all(len(each) == len(dims[0]) for each in dims) and 0 <= axis < len(dims[0])
            and all(n == m for each in dims for i, (n, m) in enumerate(zip(each, dims[0], strict=True)) if i != axis),
            f"a concatenation of {[list(each) for each in dims]} along {axis}",
        )  # fmt: skip
        return tuple(sum(each[axis] for each in dims) if i == axis else n for i, n in enumerate(dims[0]))
    if op in POOLS:
        return pooled(dims[0], a)
    if op == "pad_kernel":
        out, inner, rows, columns = dims[0]
        return out, inner, rows + 2 * a["rows"], columns + 2 * a["columns"]
    if op == "unit_kernel":
        return a["channels"], a["channels"], a["rows"], a["columns"]
    if op == "grouped_kernel":  # weights of `groups` groups as those of fewer groups, with zeros between
        out, inner, rows, columns = dims[0]
        return out, inner * (a["groups"] // a["into"]), rows, columns
    if op == "chain_kernel":  # a pointwise convolution and then another one, as one
        return (dims[1][0], dims[0][1], *dims[1][2:])
    if op == "sum_kernel":  # over all but the first dimension
        return (dims[0][0],)
    if op == "rsqrt_eps":
        return dims[0]
    raise KeyError(op)


def broadcast(one: Dims, other: Dims) -> Dims:
    """Return sizes of an elementwise operation on both."""
    n = max(len(one), len(other))
    left, right = (1,) * (n - len(one)) + one, (1,) * (n - len(other)) + other
    _require(all(p == q or 1 in (p, q) for p, q in zip(left, right, strict=True)), f"{list(one)} beside {list(other)}")
    return tuple(max(p, q) if 0 not in (p, q) else 0 for p, q in zip(left, right, strict=True))


def _product(left: Dims, right: Dims) -> Dims:
    _require(
        len(left) >= 2 and len(right) >= 2 and left[-1] == right[-2], f"a product of {list(left)} by {list(right)}"
    )
    return (*broadcast(left[:-2], right[:-2]), left[-2], right[-1])


def _convolution(inputs: Sequence[Term], a: dict[str, Any]) -> Dims:
    x, w = inputs[0].dims, inputs[1].dims
    _require(len(x) == 4 and len(w) == 4, "a convolution of other than 4 dimensions")
    groups = a["groups"]
    _require(x[1] == w[1] * groups and w[0] % groups == 0, f"{x[1]} channels in {groups} groups for weights {list(w)}")
    found = [
        (x[i + 2] + 2 * a["padding"][i] - a["dilation"][i] * (w[i + 2] - 1) - 1) // a["stride"][i] + 1 for i in (0, 1)
    ]
    _require(min(found) > 0, "a kernel larger than its image")
    dims = (x[0], w[0], *found)
    _extras(inputs, a, w[0], dims)
    return dims


def _extras(inputs: Sequence[Term], a: dict[str, Any], channels: int, dims: Dims) -> None:
    """Check bias and addend of a convolution or linear layer."""
    rest = list(inputs[2:])
    if a["bias"]:
        _require(bool(rest) and rest.pop(0).dims == (channels,), "a bias of another number of channels")
    if a["added"]:
        _require(bool(rest) and rest.pop(0).dims == dims, "an addend of other sizes than the result")
    _require(not rest, "more inputs than the operator has")


def pooled(x: Dims, a: dict[str, Any]) -> Dims:
    """Return sizes after a pooling of images."""
    found = []
    for i in (0, 1):
        span = x[i + 2] + 2 * a["padding"][i] - a["kernel"][i]
        step = a["stride"][i]
        size = -(-span // step) + 1 if a["ceil"] else span // step + 1
        if a["ceil"] and (size - 1) * step >= x[i + 2] + a["padding"][i]:
            size -= 1
        found.append(size)
    _require(min(found) > 0, "a pooling window larger than its image")
    return (*x[:2], *found)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise UnfitError(f"sizes do not fit: {what}.")
