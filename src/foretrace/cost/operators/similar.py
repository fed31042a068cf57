"""Ratios from similar operators: what a change did to calls of the same class and of about the same size.

A change is one of types (float32 to bfloat16), of the memory layout, or of sizes (a batch k times as large); several at
once are taken one after the other: sizes first, so that the types' ratio is looked up at the new size. Neighbours are
those nearest in logarithmic size; convolutions are compared by their channels, not by their FLOPs, since equal FLOPs
can gain a third or nothing from another layout. Sizes follow T(kB) = T(B) (f + (1 - f) k) with the fixed share f of the
neighbours: packing weights and dispatch do not grow with the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import dist, exp, log, prod, sqrt
from typing import Any

import msgspec

from foretrace.cost.operators.operator import FLOATS, Operator

NEIGHBOURS = 4
LEAST_SPREAD = log(1.1)  # no range is narrower than ×/÷ this
_FAR = log(4.0)  # a neighbour this far in size says half as much; beyond it the range widens
_Z80 = 1.28
Size = tuple[float, ...]

_CLASSES = {
    "gemm": ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_addmm_activation"),
    "conv": ("mkldnn_convolution", "convolution", "_convolution", "conv2d", "thnn_conv2d", "_slow_conv2d_forward",
             "cudnn_convolution"),
    "conv backward": ("convolution_backward",),
    "add": ("add", "sub", "rsub"),
    "add_": ("add_", "sub_"),
    "mul": ("mul", "div"),
    "mul_": ("mul_", "div_"),
    "relu": ("relu", "clamp_min", "hardtanh", "clamp"),
    "relu_": ("relu_", "clamp_min_", "hardtanh_", "clamp_"),
    "relu backward": ("threshold_backward", "hardtanh_backward"),
    "copy": ("copy_", "clone", "contiguous"),
    "softmax": ("_softmax", "softmax"),
    "log_softmax": ("_log_softmax", "log_softmax"),
    "random": ("bernoulli_", "native_dropout", "dropout"),
}  # fmt: skip
_CLASS = {f"aten::{name}": family for family, names in _CLASSES.items() for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorChange:
    """What happens to an operator: types, layout, or sizes."""

    family: str
    kind: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredChange:
    """A measured change: where it was measured and what came of it, as the logarithm of a ratio or a fixed share."""

    size: Size
    value: float
    pair: tuple[str, str]  # keys


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRatio:
    """Time of an operator relative to another, with its 80 % range, and how it was found."""

    value: float
    low: float
    high: float
    timed: bool = False  # these very calls were timed; else similar ones were


def family(operator: Operator) -> str:
    """Return the class of operators whose times change alike; the operator's own name where none is known."""
    found = _CLASS.get(operator.name, operator.name)
    if found.startswith("conv") and _grouped(operator):
        return f"{found}, grouped"
    return found


def size(operator: Operator) -> Size:
    """Return where an operator stands among those of its class: logarithms of what decides how its time changes."""
    tensors = _tensors(operator)
    kind = family(operator)
    if not tensors:
        return (0.0,)
    if kind == "gemm" and len(tensors) >= 2 and len(tensors[-1]) >= 2 and len(tensors[-2]) >= 2:
        a, b = tensors[-2], tensors[-1]
        m, k, n = prod(a[:-1]), a[-1], b[-1] if b[-2] == a[-1] else b[-2]
        return (log(m * k * n) / 2, log(min(m, k, n)))
    if kind.startswith("conv"):
        weight = tensors[min(2 if "backward" in kind else 1, len(tensors) - 1)]
        batch_and_space = prod(tensors[0]) / max(tensors[0][1] if len(tensors[0]) > 1 else 1, 1)
        kernel = prod(weight[2:]) if len(weight) > 2 else 1
        return (log(weight[0]), log(weight[1] if len(weight) > 1 else 1), log(kernel), log(batch_and_space) / 4)
    if "rnn" in kind or kind == "aten::lstm":
        x, hidden = tensors[0], tensors[2 if len(tensors) > 2 else 0]
        return (log(hidden[-1]), log(prod(x[:-1])) / 4)
    return (log(max(prod(each) for each in tensors)),)


@dataclass(frozen=True, kw_only=True)
class Similar:
    """What the times of a calibration say about changes, by class and change."""

    seconds: Mapping[str, float]

    def ratio(self, before: Operator, after: Operator) -> OperatorRatio | None:
        """Return the time of `after` relative to `before` from similar pairs; None where there are none."""
        if before.name != after.name or len(before.dims) != len(after.dims):
            return None
        if before == after:
            return OperatorRatio(value=1.0, low=1.0, high=1.0)
        total: list[OperatorRatio] = []
        for first, second in _stages(before, after):
            one = self._exact(first, second) or self._single(first, second) or self._apart(first, second)
            if one is None:
                return None
            total.append(one)
        return _product(total)

    def _exact(self, before: Operator, after: Operator) -> OperatorRatio | None:
        first, second = self.seconds.get(before.key), self.seconds.get(after.key)
        return _around(log(second / first), log(1.07)) if first and second else None

    def _single(self, before: Operator, after: Operator) -> OperatorRatio | None:
        change, factor = _change(before, after)
        near = _nearest(size(before), self._known.get(change, []))
        if not near:
            return None
        value, spread = _weighted(near)
        spread = max(spread, _local([(distance, self._missed[change, each.pair]) for distance, each in near]))
        if factor == 1.0:
            return _around(value, max(spread, LEAST_SPREAD))
        share, spread = min(max(value, 0.0), 0.95), min(max(spread, 0.05), 0.5)
        low, middle, high = (
            max(f + (1.0 - f) * factor, 1e-3) for f in (max(share - spread, -0.2), share, min(share + spread, 1.0))
        )
        return OperatorRatio(
            value=middle,
            low=min(low, high, middle / exp(LEAST_SPREAD)),
            high=max(low, high, middle * exp(LEAST_SPREAD)),
        )

    @cached_property
    def _missed(self) -> dict[tuple[OperatorChange, tuple[str, str]], float]:
        """By how much every measured pair is missed by its neighbours, those of its own size left out."""
        found = {}
        for change, pairs in self._known.items():
            for each in pairs:
                near = _nearest(each.size, [other for other in pairs if other.size != each.size])
                found[change, each.pair] = abs(_weighted(near)[0] - each.value) if near else 0.0
        return found

    def _apart(self, before: Operator, after: Operator) -> OperatorRatio | None:
        """Return a change of layout and of types, where both at once were not measured."""
        if before.layout == after.layout or before.types == after.types:
            return None
        middle = before.with_layout(after.layout)
        stages = [self._single(before, middle), self._single(middle, after)]
        if stages[1] is None:  # the types were changed in the old layout only
            stages[1] = self._single(before, after.with_layout(before.layout))
        return _product([each for each in stages if each is not None]) if None not in stages else None

    @cached_property
    def _known(self) -> dict[OperatorChange, list[MeasuredChange]]:
        found: dict[OperatorChange, list[MeasuredChange]] = defaultdict(list)
        for before, after in self.pairs():
            change, factor = _change(before, after)
            ratio = self.seconds[after.key] / self.seconds[before.key]
            value = log(ratio) if factor == 1.0 else (factor - ratio) / (factor - 1.0)
            found[change].append(MeasuredChange(size=size(before), value=value, pair=(before.key, after.key)))
        return found

    def pairs(self) -> Iterator[tuple[Operator, Operator]]:
        """Yield every two measured operators of which one is the other after one change."""
        same_sizes: dict[tuple[str, str], list[Operator]] = defaultdict(list)
        same_types: dict[tuple[str, str, str], list[Operator]] = defaultdict(list)
        for key in self.seconds:
            name, _, text = key.partition(" ")
            operator = Operator(name, text)
            try:
                dims, types = operator.dims, operator.types
            except (msgspec.DecodeError, ValueError, TypeError, RecursionError):
                continue  # a call that describes its inputs in another way
            same_sizes[name, _text(dims)].append(operator)
            same_types[name, _text([types, operator.layout]), _text([_rank(each) for each in dims])].append(operator)
        for group in (*same_sizes.values(), *same_types.values()):
            for before in group:
                for after in group:
                    if before is not after and (before.dims == after.dims or _factor(before, after) not in (None, 1.0)):
                        yield before, after


def _stages(before: Operator, after: Operator) -> Iterator[tuple[Operator, Operator]]:
    """Yield the change, sizes apart from the rest: first the sizes, then types and layout at the new size."""
    if before.dims != after.dims:
        middle = before.with_dims(after.dims)
        yield before, middle
        before = middle
    if before.types != after.types or before.layout != after.layout:
        yield before, after


def _change(before: Operator, after: Operator) -> tuple[OperatorChange, float]:
    """Return what changes, and the factor in size where that is it."""
    if before.dims != after.dims:
        factor = _factor(before, after) or 0.0
        kind: tuple[Any, ...] = ("size", factor > 1.0, _floating(before), before.layout) if factor else ("unknown",)
        return OperatorChange(family=family(before), kind=kind), factor
    types = sorted({(a, b) for a, b in zip(before.types, after.types, strict=True) if a != b})
    kind = (*types, before.layout, after.layout) if types else (_floating(before), before.layout, after.layout)
    return OperatorChange(family=family(before), kind=kind), 1.0


def _factor(before: Operator, after: Operator) -> float | None:
    """Return by how much the batch grows: one dimension per tensor, all by the same factor; None where something else
    changes.

    A batch is the first dimension, or the second of time steps x batch x features; of matrix products any may be it.
    """
    factors = set()
    product = family(before) == "gemm"
    for a, b in zip(_sizes(before.dims), _sizes(after.dims), strict=False):
        changed = [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
        if (
            len(a) != len(b)
            or len(changed) > 1
            or (changed and changed[0] > (2 if product else 1 if len(a) == 3 else 0))
        ):
            return None
        factors |= {b[i] / a[i] if a[i] and b[i] else 0.0 for i in changed}
    if len(factors) > 1 or 0.0 in factors:
        return None
    return factors.pop() if factors else 1.0


def _sizes(dims: list[Any]) -> Iterator[list[int]]:
    """Yield the sizes of every tensor, those of lists among them."""
    for each in dims:
        if each and isinstance(each[0], list):
            yield from _sizes(each)
        else:
            yield each


def _nearest(at: Size, known: list[MeasuredChange]) -> list[tuple[float, MeasuredChange]]:
    """Return the nearest neighbours with their distance."""
    found = [(dist(at, each.size), each) for each in known if len(each.size) == len(at)]
    return sorted(found, key=lambda pair: (pair[0], pair[1].pair))[:NEIGHBOURS]


def _weighted(near: list[tuple[float, MeasuredChange]]) -> tuple[float, float]:
    """Return the mean of the neighbours, the near ones counting more, and the 80 % spread around it."""
    weights = [1.0 / (0.1 + (distance / _FAR) ** 2) for distance, _ in near]
    total = sum(weights)
    mean = sum(w * each.value for w, (_, each) in zip(weights, near, strict=True)) / total
    variance = sum(w * (each.value - mean) ** 2 for w, (_, each) in zip(weights, near, strict=True)) / total
    alone = 0.1 if len(near) == 1 else 0.0
    far = 0.1 * max(near[0][0] / _FAR - 1.0, 0.0)
    return mean, _Z80 * sqrt(variance) + alone + far


def _local(missed: list[tuple[float, float]]) -> float:
    """Return the 80 % range of errors, the near ones counting more."""
    weights = [1.0 / (0.1 + (distance / _FAR) ** 2) for distance, _ in missed]
    return _Z80 * sqrt(sum(w * each**2 for w, (_, each) in zip(weights, missed, strict=True)) / sum(weights))


def _around(value: float, spread: float) -> OperatorRatio:
    return OperatorRatio(value=exp(value), low=exp(value - spread), high=exp(value + spread))


def _product(parts: list[OperatorRatio]) -> OperatorRatio | None:
    """Return one change after the other; independent ranges add in squares."""
    if not parts:
        return None
    value = prod(each.value for each in parts)
    below = sqrt(sum(log(each.value / each.low) ** 2 for each in parts))
    above = sqrt(sum(log(each.high / each.value) ** 2 for each in parts))
    return OperatorRatio(value=value, low=value * exp(-below), high=value * exp(above))


def _tensors(operator: Operator) -> list[list[int]]:
    """Return sizes of all tensors, those of lists among them, without numbers."""
    found = []
    for dims in operator.dims:
        if dims and all(isinstance(n, int) for n in dims):
            found.append([max(n, 1) for n in dims])
        else:
            found += [[max(n, 1) for n in each] for each in dims if isinstance(each, list) and each]
    return found


def _grouped(operator: Operator) -> bool:
    """Return whether a convolution has groups: its weight takes fewer channels than its input has."""
    tensors = _tensors(operator)
    at = 1 if "backward" in operator.name else 0
    x, weight = (tensors[at], tensors[at + 1]) if len(tensors) > at + 1 else ([], [])
    return len(x) > 2 and len(weight) > 2 and weight[1] < x[1]


def _floating(operator: Operator) -> str:
    return next((each for each in operator.types if each in FLOATS), "")


def _rank(dims: Any) -> Any:
    return [_rank(each) for each in dims] if isinstance(dims, list) else 0


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
