"""What a call makes a processor do, as amounts that each have a price: dispatches, products, elements, bytes.

A call's time is the sum of amounts times prices, and nothing else. So it grows with every dimension, and small
dimensions are penalised by themselves: a product of [m x k] by [k x n] packs n k + m k numbers and writes m n, which
weigh little beside m n k unless one of the three is small.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

from foretrace.cost.calls import Calls, Family, Float64, Precision
from foretrace.graph import work
from foretrace.plaintext import whole_number
from foretrace.trace.trace import told_shapes

NEAR_BYTES = 1 << 20  # what the caches of one core hold; larger calls stream through the shared one

# Amounts and which part of the machine prices each of them.
TERMS: dict[str, str] = {
    "dispatch": "dispatch",  # 1
    "pieces": "dispatch",  # parts that are begun one by one: batches, planes of an image, time steps, tensors of a list
    "flops": "matrix",
    "padded": "matrix",  # FLOPs with n and k filled up to whole vectors
    "left": "vector",  # elements packed, m x k
    "right": "vector",  # k x n
    "out": "vector",  # m x n
    "elements": "vector",  # gone over one by one
    "rows": "vector",  # each begun and ended
    "near": "near",  # bytes
    "stream": "near",  # bytes beyond NEAR_BYTES
    "again": "near",  # bytes of weights that every time step reads again, beyond NEAR_BYTES
    "far": "far",  # bytes, of calls that find their data in no cache of the core
}
NAMES = tuple(TERMS)
_AT = {name: i for i, name in enumerate(NAMES)}
# Planes of an image of 2 to 7 numbers have a backward pass without vectors: 14 ns a number instead of 0.5, measured.
_SHORT, _ONE_BY_ONE = 8, 30.0
_VECTOR = 16  # numbers; what the widest registers in use hold
PRODUCTS = frozenset([Family.GEMM, Family.CONV, Family.ATTENTION, Family.RECURRENT])
_ROWS = frozenset([Family.SOFTMAX, Family.NORM, Family.REDUCTION])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Amounts:
    """Of n calls."""

    terms: Float64  # [n x terms]
    op: tuple[str, ...]  # name with the variant that is priced apart: "convolution 1x1", "sum.first"
    family: npt.NDArray[np.uint8]
    known: npt.NDArray[np.bool_]  # whether enough is known of the call

    def __len__(self) -> int:
        return len(self.family)


def amounts(calls: Calls) -> Amounts:
    """Return the amounts of work of every call. Products in another precision than float32 are not known: their prices
    are others.
    """
    n = len(calls)
    terms = np.zeros((n, len(NAMES)))
    ops: list[str] = []
    seen: dict[tuple[str, str, float, float, float], tuple[npt.NDArray[np.float64], str]] = {}
    for i in range(n):
        key = (calls.op[i], calls.text[i], float(calls.flops[i]), float(calls.read_bytes[i]),
               float(calls.written_bytes[i]))  # fmt: skip
        if key not in seen:
            seen[key] = _one(calls, i)
        terms[i], op = seen[key]
        ops.append(op)
    whole = np.isin(calls.precision, [Precision.FP32, Precision.TF32, Precision.OTHER, Precision.INT8])
    return Amounts(terms=terms, op=tuple(ops), family=calls.family, known=whole)


def _one(calls: Calls, i: int) -> tuple[Float64, str]:
    family = Family(int(calls.family[i]))
    row = np.zeros(len(NAMES))
    row[_AT["dispatch"]] = 1.0
    base = calls.op[i].removeprefix("aten::")
    if family == Family.NONE:
        return row, base
    said = _said(calls.text[i])
    b, m, n, k = (float(column[i]) for column in (calls.b, calls.m, calls.n, calls.k))
    flops = float(calls.flops[i])
    _moves(row, float(calls.read_bytes[i] + calls.written_bytes[i]))
    if family in PRODUCTS and flops > 0:
        return _product(row, family, base, said, (b, m, n, k), flops)
    largest = max((prod(each) for each in said.tensors), default=m * n * b)
    row[_AT["elements"]] = float(largest)
    row[_AT["rows"]] = m if family in _ROWS else 0.0
    if family == Family.NORM and ("batch_norm" in base or "group_norm" in base) and said.tensors:
        row[_AT["pieces"]] = float(prod(said.tensors[0][:2]))
        if base == "native_batch_norm_backward" and 1 < prod(said.tensors[0][2:]) < _SHORT and len(said.tensors[0]) > 2:
            row[_AT["elements"]] *= _ONE_BY_ONE
    elif family == Family.REDUCTION:
        base, row[_AT["rows"]] = _reduced(base, said, largest)
        if base.startswith("nll_loss"):  # it looks at one number of every row
            row[_AT["elements"]] = 0.0
            _moves(row, 0.0)
    elif family == Family.POOL:
        row[_AT["rows"]] = _pooled(base, said) or max(flops, 0.0)
        row[_AT["pieces"]] = float(prod(said.tensors[0][:2])) if said.tensors else 0.0
    elif family == Family.LOOKUP:
        base = _looked_up(row, base, said, float(calls.written_bytes[i]))
    elif family in (Family.MOVE, Family.OPTIMIZER) and said.lists:
        row[_AT["pieces"]] = float(said.lists)
        row[_AT["elements"]] = float(sum(prod(each) for each in said.tensors))
    elif family == Family.ELEMENTWISE and len({prod(each) for each in said.tensors if prod(each) > 1}) > 1:
        base += " broadcast" if base.rstrip("_") in ("add", "sub", "mul", "div") else ""
    return row, base


def _pooled(base: str, said: _Said) -> float:
    """Return additions of an average over windows, forward or backward; 0 for other pooling."""
    at = 2 if base == "avg_pool2d_backward" else 1
    if base not in ("avg_pool2d", "avg_pool2d_backward") or len(said.concrete) < at + 3:
        return 0.0
    window, stride, pad = (
        [int(each) for each in text.strip("[]").split(",") if each] for text in said.concrete[at : at + 3]
    )
    x = said.tensors[at - 1]
    out = prod((size + 2 * p - w) // s + 1 for size, w, s, p in zip(x[-2:], window, stride or window, pad, strict=True))
    return float(prod(x[:-2]) * out * prod(window))


def _moves(row: Float64, nbytes: float) -> None:
    row[_AT["near"]], row[_AT["stream"]], row[_AT["far"]] = nbytes, max(nbytes - NEAR_BYTES, 0.0), nbytes


def _looked_up(row: Float64, base: str, said: _Said, written: float) -> str:
    """Return rows taken from a table, or added to a gradient that is as large as the table."""
    index = next((prod(each) for each, kind in said.kinds if kind.lower().startswith(("long", "int"))), 0)
    row[_AT["rows"]] = float(index)
    if base in ("_embedding_bag_backward", "_embedding_bag_dense_backward") and said.tensors:
        at = 6 if base == "_embedding_bag_backward" else 5
        words = said.concrete[at] if len(said.concrete) > at else ""
        sparse = base == "_embedding_bag_backward" and "True" in said.concrete[9:10]
        nbytes = 4.0 * prod(said.tensors[0])
        nbytes += 4.0 * (whole_number(words) or 0) * said.tensors[0][-1] if not sparse else 0.0
        _moves(row, nbytes)
        row[_AT["elements"]] = float(prod(said.tensors[0]))
        return "embedding_dense_backward"
    if base.lstrip("_").startswith("embedding") and "backward" not in base:
        row[_AT["elements"]] = written / 4
        return "embedding"
    return base


def _product(
    row: Float64, family: Family, base: str, said: _Said, dims: tuple[float, float, float, float], flops: float
) -> tuple[Float64, str]:
    b, m, n, k = dims
    if family == Family.RECURRENT:
        return _recurrent(row, base, said, flops)
    twice = 1.0
    if family == Family.CONV:
        base, twice = _convolution(base, said)
        m = flops / max(2.0 * b * n * k * twice, 1.0)  # what a recording does not say of strides, the FLOPs do
    fill = np.ceil(n / _VECTOR) * _VECTOR / n * (np.ceil(k / _VECTOR) * _VECTOR / k if family == Family.CONV else 1.0)
    row[_AT["flops"]], row[_AT["padded"]] = flops, flops * fill
    row[_AT["left"]], row[_AT["right"]], row[_AT["out"]] = b * m * k * twice, b * n * k * twice, b * m * n * twice
    if family == Family.CONV and len(said.tensors) > 1:  # a convolution reads the image, not the unfolded one
        row[_AT["left"]] = float(prod(said.tensors[1 if "backward" in base else 0])) * twice
        row[_AT["pieces"]] = float(said.tensors[0][0]) * b
    elif family != Family.CONV:
        row[_AT["pieces"]] = b if b > 1 else 0.0
    return row, base


def _convolution(base: str, said: _Said) -> tuple[str, float]:
    """Return the variant that is priced apart, and how many products it computes."""
    backward = "backward" in base
    name = "convolution_backward" if backward else "convolution"
    twice = 1.0
    if backward:
        mask = said.concrete[-1] if said.concrete else ""
        twice = float(mask.strip("[]").replace(" ", "").split(",")[:2].count("True")) or 1.0 if "True" in mask else 2.0
    if len(said.tensors) < 2:
        return name, twice
    x, w = (said.tensors[1], said.tensors[2]) if backward and len(said.tensors) > 2 else said.tensors[:2]
    at = 7 if backward else 6
    transposed = "transpose" in base or (len(said.concrete) > at and said.concrete[at] == "True")
    if transposed:
        return f"{name} transposed", twice
    if len(w) > 1 and w[1] == 1 and len(x) > 1 and x[1] > 1:
        return f"{name} depthwise", twice
    return f"{name} 1x1" if prod(w[2:]) == 1 else name, twice


def _recurrent(row: Float64, base: str, said: _Said, flops: float) -> tuple[Float64, str]:
    row[_AT["flops"]] = row[_AT["padded"]] = flops
    if said.tensors and len(said.tensors[0]) == 3:
        x, weights = said.tensors[0], [each for each in said.tensors[1:] if len(each) == 2][:2]
        steps, batch = float(x[0]), float(x[1])
        numbers = float(sum(map(prod, weights)))
        row[_AT["pieces"]] = steps
        row[_AT["out"]] = steps * batch * (weights[-1][0] if weights else x[2])
        row[_AT["right"]] = numbers
        row[_AT["again"]] = max(4 * numbers - NEAR_BYTES, 0.0) * steps
        row[_AT["near"]] = 4 * numbers * steps  # read at every step
    return row, base


def _reduced(base: str, said: _Said, largest: float) -> tuple[str, float]:
    """Return whether the last dimension goes (rows are summed) or stays (columns are); and the number of sums."""
    x = said.tensors[0] if said.tensors else [int(largest)]
    named = said.concrete[1].strip("[]").split(",") if len(said.concrete) > 1 else []
    axes = [axis % len(x) for each in named if (axis := whole_number(each)) is not None]
    if not axes or base.startswith(("nll", "linalg", "dot", "isfinite")):
        return base, float(x[0] if base.startswith("nll") else 1)
    kept = prod(each for i, each in enumerate(x) if i not in axes)
    return f"{base}.{'last' if len(x) - 1 in axes else 'first'}", float(kept)


@dataclass(frozen=True, slots=True)
class _Said:
    """What the text of a call says of its inputs."""

    tensors: list[list[int]]
    kinds: list[tuple[list[int], str]]
    concrete: list[str]
    lists: int  # tensors of its first list


@lru_cache(maxsize=8192)
def _said(text: str) -> _Said:
    shapes = told_shapes(text)
    kinds = [
        (dims, kind)
        for dims, kind in zip(shapes.dims, shapes.types, strict=False)
        if isinstance(dims, list) and dims and all(isinstance(each, int) for each in dims)
    ]
    lists = [len(dims) for dims in shapes.dims if isinstance(dims, list) and dims and isinstance(dims[0], list)]
    tensors = [list(dims) for dims, _ in work.tensors(shapes)]
    return _Said(tensors, kinds, list(shapes.concrete), lists[0] if lists else 0)
