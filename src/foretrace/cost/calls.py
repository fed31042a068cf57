"""`Calls`: operator calls to be costed, as numpy columns, whatever they come from: a recording, a model, a file.

Every call has a family, a precision and dimensions that mean the same in all sources:

- products (GEMM): `b` products of [m x k] by [k x n]; k is the dimension that is summed over;
- convolutions as implicit products: m = output pixels x images, n = output channels of a group, k = input channels of a
  group x kernel size, b = groups. A backward call counts its two products in `flops` and keeps these dimensions. A
  transposed one has m = input pixels x images, n = output channels of a group x kernel size, k = input channels of it;
- attention: b = batch x heads, m = queries, n = keys, k = width of a head;
- everything else: m rows of width n, where the row is what is normalised, summed over or looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.graph import work
from foretrace.trace.trace import Shapes, told_shapes

Float64 = npt.NDArray[np.float64]


class Family(IntEnum):
    """What kind of work a call is; members of a family follow one law of time."""

    NONE = 0  # views and allocations: no work
    GEMM = 1
    CONV = 2
    ATTENTION = 3  # fused attention
    RECURRENT = 4  # a whole recurrent layer in one call
    ELEMENTWISE = 5
    SOFTMAX = 6
    NORM = 7  # layer, batch, group and RMS normalisation
    REDUCTION = 8
    POOL = 9
    LOOKUP = 10  # rows taken from a table, or added to one
    MOVE = 11  # copies, concatenation, filling
    OPTIMIZER = 12  # the update of many parameters in one call
    OTHER = 13  # an operator that nothing is known of but its bytes


class Precision(IntEnum):
    """Arithmetic of a call."""

    OTHER = 0  # integers and the like
    FP32 = 1
    TF32 = 2  # float32 data on tensor cores
    FP16 = 3
    BF16 = 4
    FP8 = 5
    INT8 = 6
    FP64 = 7


ELEMENT_BYTES = {
    Precision.OTHER: 8, Precision.FP32: 4, Precision.TF32: 4, Precision.FP16: 2, Precision.BF16: 2, Precision.FP8: 1,
    Precision.INT8: 1, Precision.FP64: 8,
}  # fmt: skip
_PRECISIONS = {
    "float": Precision.FP32, "c10::bfloat16": Precision.BF16, "c10::half": Precision.FP16, "double": Precision.FP64,
    "c10::float8_e4m3fn": Precision.FP8, "c10::float8_e5m2": Precision.FP8, "signed char": Precision.INT8,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calls:
    """Columns of n calls. Dimensions that a family does not use are 1."""

    family: npt.NDArray[np.uint8]  # Family
    precision: npt.NDArray[np.uint8]  # Precision
    b: Float64
    m: Float64
    n: Float64
    k: Float64
    flops: Float64
    read_bytes: Float64
    written_bytes: Float64
    op: tuple[str, ...]  # operator, e.g. "aten::addmm"
    text: tuple[str, ...]  # its inputs as JSON `[dims, types, concrete]` (see `Operator`), "" if unknown

    def __len__(self) -> int:
        return len(self.family)

    @property
    def nbytes(self) -> Float64:
        """Bytes read and written, each tensor once."""
        return self.read_bytes + self.written_bytes

    def take(self, rows: npt.NDArray[Any]) -> Calls:
        """Return the calls of these rows (index array or mask), in their order."""
        at = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        columns: dict[str, Any] = {}
        for each in fields(self):
            column = getattr(self, each.name)
            columns[each.name] = tuple(column[i] for i in at.tolist()) if isinstance(column, tuple) else column[at]
        return Calls(**columns)

    @classmethod
    def of(cls, calls: Sequence[tuple[str, str]]) -> Calls:
        """Make calls from (operator, inputs as JSON text), as a recording and `Operator` have them."""
        return cls.from_rows([describe(op, text) for op, text in calls])

    @classmethod
    def from_rows(cls, rows: Sequence[Call]) -> Calls:
        """Return columns of described calls."""
        columns: dict[str, Any] = {
            each.name: np.array([float(getattr(row, each.name)) for row in rows], dtype=np.float64)
            for each in fields(cls)
            if each.name not in ("family", "precision", "op", "text")
        }
        return cls(
            family=np.array([row.family for row in rows], dtype=np.uint8),
            precision=np.array([row.precision for row in rows], dtype=np.uint8),
            op=tuple(row.op for row in rows),
            text=tuple(row.text for row in rows),
            **columns,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One row of `Calls`."""

    family: Family
    precision: Precision = Precision.FP32
    b: float = 1.0
    m: float = 1.0
    n: float = 1.0
    k: float = 1.0
    flops: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    op: str = ""
    text: str = ""


def describe(
    op: str, text: str, outputs: Sequence[Sequence[int]] | None = None, itemsizes: Sequence[int] | None = None
) -> Call:
    """Return what a call does, from its operator and its inputs as JSON text.

    `outputs` are the sizes of what it returns and `itemsizes` the bytes of an element of each, where they are known;
    else they follow from the inputs.
    """
    base = op.removeprefix("aten::").rstrip("_").removesuffix("_copy") if op.startswith("aten::") else op
    nbytes, flops = work.operator_work(op, text)
    shapes = told_shapes(text)
    tensors, family = list(work.tensors(shapes)), family_of(op)
    if not tensors:
        return Call(family=family, op=op, text=text, flops=flops, precision=Precision.OTHER)
    precision = _precision(shapes)
    read = 0.0 if base in _FILLS else float(sum(prod(dims) * size for dims, size in tensors))
    # A fused update names its gradients among what it may write; it does not write them.
    known = outputs is not None and not base.startswith("_fused_") and family not in (Family.LOOKUP, Family.NONE)
    if known and outputs is not None:
        sizes = itemsizes or [ELEMENT_BYTES[precision]] * len(outputs)
        written = float(sum(prod(dims) * size for dims, size in zip(outputs, sizes, strict=True)))
    else:
        total = float(max(nbytes, 0)) if nbytes >= 0 else 2 * read
        read, written = (read, total - read) if total >= read else (total / 2, total / 2)
    if base in _PICKS and outputs is not None:  # how many rows of the table only the result says
        written = float(prod(outputs[0]) * tensors[0][1])
        read, flops = written + sum(prod(dims) * size for dims, size in tensors[1:]), 0.0
    b, m, n, k = _dimensions(base, family, [dims for dims, _ in tensors], outputs, work.transposed(base, shapes))
    return Call(
        family=family, precision=precision, b=b, m=m, n=n, k=k, flops=flops, read_bytes=read, written_bytes=written,
        op=op, text=text,
    )  # fmt: skip


_SOFTMAX = ("softmax", "log_softmax", "masked_softmax")
_NORMS = ("batch_norm", "layer_norm", "group_norm", "rms_norm", "instance_norm")
_POOLS = ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool")
_LOOKUPS = ("embedding", "index_select", "gather", "scatter", "index_put", "index_add", "index_copy", "take", "put")
_PICKS = ("index", "take")
# Their time grows faster than their bytes, or they go over them several times.
_UNKNOWN = ("linalg_", "cholesky", "lu_", "ormqr", "geqrf", "triangular_solve", "fft_", "sort", "topk", "kthvalue")
_MOVES = ("copy", "to_copy", "cat", "stack", "clone", "fill", "zero", "contiguous", "repeat", "roll", "flip",
          "constant_pad",
          "zeros", "ones", "full", "arange", "new_zeros", "new_ones", "pad", "tril", "triu")  # fmt: skip


_FILLS = ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like", "fill", "zero")  # read nothing


def family_of(op: str) -> Family:
    """Return the family of an operator by its name; what is not of ATen is OTHER, but for kernels that stand for
    several. So are operators of ATen whose time no law here follows.
    """
    if op.startswith("fused::"):
        return Family.ELEMENTWISE if op == "fused::pointwise" else Family.SOFTMAX
    if not op.startswith("aten::"):
        return Family.OTHER
    base = op.removeprefix("aten::").rstrip("_")
    kind = work.kind_of(base)
    if kind is not None:
        return Family[kind]
    plain = base.lstrip("_").removeprefix("native_").removeprefix("cudnn_").removeprefix("miopen_")
    plain = plain.removesuffix("_data").removesuffix("_backward").removesuffix("_forward")
    if plain.startswith(_UNKNOWN):
        return Family.OTHER
    if any(plain.startswith(each) for each in _SOFTMAX):
        return Family.SOFTMAX
    if any(each in plain for each in _NORMS):
        return Family.NORM
    if any(each in plain for each in _POOLS):
        return Family.POOL
    if plain == "index" or plain.startswith(_LOOKUPS):
        return Family.LOOKUP
    if plain.startswith(("foreach", "fused_adam", "fused_sgd", "fused_adagrad")):
        return Family.OPTIMIZER
    if any(plain == each or plain.startswith(each + "_") for each in _MOVES):
        return Family.MOVE
    return Family.ELEMENTWISE


def _precision(shapes: Shapes) -> Precision:
    """Return the precision of the first floating-point input: statistics and masks behind it may have another."""
    for kind in shapes.types:
        found = _PRECISIONS.get(kind.lower().partition(":")[2] if kind.startswith("TensorList:") else kind.lower())
        if found is not None:
            return found
    return Precision.FP32 if any(kind.startswith("TensorList") for kind in shapes.types) else Precision.OTHER


def _dimensions(
    base: str, family: Family, dims: list[list[int]], outputs: Sequence[Sequence[int]] | None, transposed: bool
) -> tuple[float, float, float, float]:
    """Return (b, m, n, k), see the module."""
    try:
        if family == Family.GEMM:
            return _product(base, dims)
        if family == Family.CONV:
            return _convolution(base, dims, outputs, transposed)
        if family == Family.ATTENTION:
            q, key = (dims[1], dims[2]) if "backward" in base else (dims[0], dims[1])
            if work.heads_last(base):
                return float(prod(q[:-3]) * q[-2]), float(q[-3]), float(key[-3]), float(q[-1])
            return float(prod(q[:-2])), float(q[-2]), float(key[-2]), float(q[-1])
    except (IndexError, TypeError, ZeroDivisionError):
        pass
    largest = max(dims, key=prod)
    width = float(largest[-1]) if family in (Family.SOFTMAX, Family.NORM, Family.LOOKUP, Family.REDUCTION) else 0.0
    if family == Family.NORM and "batch_norm" in base and len(largest) > 1:
        width = prod(largest) / largest[1]
    total = float(prod(largest))
    return (1.0, total / width, width, 1.0) if width and total else (1.0, 1.0, max(total, 1.0), 1.0)


def _product(base: str, dims: list[list[int]]) -> tuple[float, float, float, float]:
    left, right = (dims[1], dims[2]) if work.adds(base) else (dims[0], dims[1])
    if "grouped" in base:  # one dimension is shared out: rows; what is summed over, in a gradient of the weights
        groups = float(left[0] if len(left) > 2 else right[0] if len(right) > 2 else dims[-1][0])
        shared = left[-2] / groups if len(right) > 2 else float(left[-2])
        return groups, shared, float(right[-1]), left[-1] / groups if len(left) == len(right) == 2 else float(left[-1])
    if base in ("linear", "mkldnn_linear"):
        right = [right[-1], right[-2]] if len(right) > 1 else [right[-1], 1]
    elif len(right) == 1:
        right = [right[0], 1]
    if len(left) == 1:
        left = [1, left[0]]
    k, n = right[-2], right[-1]
    if len(right) > 2:
        return float(prod(right[:-2])), float(left[-2]), float(n), float(k)
    return 1.0, float(prod(left[:-1])), float(n), float(k)


def _convolution(
    base: str, dims: list[list[int]], outputs: Sequence[Sequence[int]] | None, transposed: bool
) -> tuple[float, float, float, float]:
    backward = "backward" in base
    x, w = (dims[1], dims[2]) if backward else (dims[0], dims[1])
    out_channels = (dims[0] if backward else outputs[0] if outputs else [0, 0])[1]
    if transposed and out_channels:  # as the gradient of its input's convolution: a product for every input pixel
        groups = max(out_channels / w[1], 1.0)
        return groups, float(x[0] * prod(x[2:])), float(prod(w[1:])), w[0] / groups
    groups = max(x[1] / w[1], 1.0)
    out = dims[0] if backward else outputs[0] if outputs else None
    pixels = prod(out[2:]) if out is not None else prod(x[2:])
    return groups, float(x[0] * pixels), w[0] / groups, float(prod(w[1:]))
