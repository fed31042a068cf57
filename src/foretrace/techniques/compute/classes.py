"""What kind of work a task does and in which precision, read from the names of kernels and operators."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from foretrace.arrays import Int64, Mask
from foretrace.cost.calls import Family, describe
from foretrace.cost.calls import Precision as Arithmetic
from foretrace.graph.sound import fixed
from foretrace.graph.taskgraph import TaskGraph, TaskKind, per_graph


class WorkClass(IntEnum):
    """What bounds a task by its nature."""

    OTHER = 0  # not floating-point work, or unknown
    GEMM = 1  # matrix product
    CONV = 2
    ATTENTION = 3  # fused attention
    MEMORY = 4  # elementwise, normalisation, reduction, pooling, copies: bytes over bandwidth


class TaskPrecision(IntEnum):
    """Arithmetic that a task uses."""

    OTHER = 0  # integers, double, or unknown
    SINGLE = 1
    TF32 = 2  # float32 data on tensor cores
    HALF = 3  # 16 bit or less


MATRIX = (WorkClass.GEMM, WorkClass.CONV, WorkClass.ATTENTION)

_OF_FAMILY = {
    Family.GEMM: WorkClass.GEMM, Family.RECURRENT: WorkClass.GEMM, Family.CONV: WorkClass.CONV,
    Family.ATTENTION: WorkClass.ATTENTION, Family.OTHER: WorkClass.OTHER,
}  # fmt: skip
_ATTENTION = re.compile(r"flash|fmha|attn_|attention|efficient_attention|scaled_dot_product", re.IGNORECASE)
_CONV = re.compile(
    r"[hs]\d*cudnn|cudnn.*conv|fprop|dgrad|wgrad|winograd|convolve|fft2d|igemm_(fwd|bwd|wrw)|conv2d|_conv_",
    re.IGNORECASE,
)
_GEMM = re.compile(r"(?<!fb)gemm|gemv|Cijk_|nvjet|matmul|cutlass::Kernel|xdlops|splitKreduce|^bmm_", re.IGNORECASE)
_CONV_OP = re.compile(r"^aten::\w*conv(olution|\d|_|$)")
_GEMM_OP = re.compile(
    r"^aten::(addmm|mm|bmm|baddbmm|matmul|linear|addbmm|mv|_addmm_activation|mkldnn_rnn_layer(_backward)?)$"
)
# Operators that hand their work on to others of their kind.
_WRAPPERS = frozenset((
    "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::convolution", "aten::_convolution", "aten::linear",
    "aten::matmul", "aten::scaled_dot_product_attention",
))  # fmt: skip
_HELPER = re.compile(r"nchwToNhwc|nhwcToNchw|transpose|SubTensor|im2col|col2im|epilogue|Memset", re.IGNORECASE)
_TENSILE = re.compile(r"Cijk_[A-Za-z]+_[A-Za-z]+_([A-Z0-9]+)_")
_NVJET = re.compile(r"nvjet_([a-z]+)_")
_TF32 = re.compile(r"tf32|tensorop_s1688", re.IGNORECASE)
_HALF = re.compile(
    r"bf16|bfloat16|float16|half|fp16|fp8|e4m3|e5m2|mxfp|(?<![bt])f16|h884|h1688|h16816|s884|s16816|s161616|hgemm|hcudnn|"
    r"int8|i8_|I?DF16",
    re.IGNORECASE,
)
_WHOLE = re.compile(r"(Functor\w*|ReduceOp)<(long|int|bool|unsigned)|<double|RadixSort|DeviceScan|ReduceByKey")

# The interpreter and the dispatcher take less between two operators: in recordings of whole steps 99 % of these
# stretches are shorter than 0.65 ms (chosen on those of processors, of Kineto's and PARAM's samples; the others: 0.66).
_HOLE_NS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Classes:
    """`WorkClass` and `TaskPrecision` of every task (n rows each)."""

    work: npt.NDArray[np.uint8]
    precision: npt.NDArray[np.uint8]


@per_graph
def classify(graph: TaskGraph) -> Classes:
    """Return classes of kernels and, in CPU-only recordings, of operators; all other tasks are OTHER."""
    work, precision = np.zeros(len(graph), np.uint8), np.zeros(len(graph), np.uint8)
    lowered = (graph.kind == TaskKind.KERNEL) & (graph.name == graph.op) & (graph.shape >= 0)
    _classify_lowered(graph, np.flatnonzero(lowered), work, precision)
    for kind in (TaskKind.KERNEL, TaskKind.OPERATOR):
        rows = np.flatnonzero((graph.kind == kind) & ~lowered)
        pairs, inverse = np.unique(np.stack([graph.name[rows], graph.op[rows]]), axis=1, return_inverse=True)
        table = np.zeros((2, pairs.shape[1]), dtype=np.uint8)
        for i, (index, op) in enumerate(pairs.T.tolist()):
            name = graph.names[index]
            of = graph.names[op] if op >= 0 else ""
            table[:, i] = kernel_class(name, of) if kind == TaskKind.KERNEL else operator_class(name)
        work[rows], precision[rows] = table[:, inverse.ravel()]
    return Classes(work=fixed(work), precision=fixed(precision))


def holes(graph: TaskGraph) -> Mask:
    """Return stretches of the host (n) that are too long for the way from one operator to the next, or through one."""
    host = np.isin(graph.kind, (TaskKind.CPU, TaskKind.PYTHON))
    return np.asarray(host & (graph.dur > _HOLE_NS) & ~graph.gone)


def _classify_lowered(
    graph: TaskGraph, rows: Int64, work: npt.NDArray[np.uint8], precision: npt.NDArray[np.uint8]
) -> None:
    """Classify kernels of a graph that was lowered from operators, whose names they have; their inputs say the rest."""
    known: dict[tuple[int, int], tuple[int, int]] = {}
    for row in rows.tolist():
        key = (int(graph.op[row]), int(graph.shape[row]))
        if key not in known:
            call = describe(graph.names[key[0]], graph.shapes[key[1]])
            kind = _OF_FAMILY.get(call.family, WorkClass.MEMORY)
            narrow = call.precision in (Arithmetic.FP16, Arithmetic.BF16, Arithmetic.FP8, Arithmetic.INT8)
            single = TaskPrecision.SINGLE if call.precision == Arithmetic.FP32 else TaskPrecision.OTHER
            known[key] = (kind, TaskPrecision.HALF if narrow else single)
        work[row], precision[row] = known[key]


@lru_cache(maxsize=8192)
def operator_class(name: str) -> tuple[WorkClass, TaskPrecision]:
    """Return the class of an operator by its name; what hands work on or is not of ATen is OTHER."""
    if not name.startswith("aten::") or name in _WRAPPERS:
        return WorkClass.OTHER, TaskPrecision.OTHER
    tests = ((_GEMM_OP, WorkClass.GEMM), (_CONV_OP, WorkClass.CONV), (_ATTENTION, WorkClass.ATTENTION))
    work = next((kind for test, kind in tests if test.search(name)), WorkClass.MEMORY)
    return work, TaskPrecision.SINGLE


@lru_cache(maxsize=8192)
def kernel_class(name: str, op: str) -> tuple[WorkClass, TaskPrecision]:
    """Return the class of a kernel that the operator `op` launched ("" if unknown)."""
    if _HELPER.search(name):
        return WorkClass.MEMORY, _precision(name)
    if _ATTENTION.search(name):  # flash kernels exist for 16 bit only and do not always say so
        return WorkClass.ATTENTION, TaskPrecision.SINGLE if "f32" in name else TaskPrecision.HALF
    if _CONV.search(name) or (_GEMM.search(name) and _CONV_OP.match(op)):
        return WorkClass.CONV, _precision(name)
    return WorkClass.GEMM if _GEMM.search(name) else WorkClass.MEMORY, _precision(name)


def _precision(name: str) -> TaskPrecision:
    tensile, nvjet = _TENSILE.search(name), _NVJET.search(name)
    if tensile:
        return {"S": TaskPrecision.SINGLE, "D": TaskPrecision.OTHER}.get(tensile.group(1)[0], TaskPrecision.HALF)
    if nvjet:
        return TaskPrecision.TF32 if nvjet.group(1).startswith("s") else TaskPrecision.HALF
    if _HALF.search(name):
        return TaskPrecision.HALF
    if _TF32.search(name):
        return TaskPrecision.TF32
    return TaskPrecision.OTHER if _WHOLE.search(name) else TaskPrecision.SINGLE
