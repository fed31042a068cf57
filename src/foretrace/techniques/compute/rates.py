"""How near the work of a recorded step comes to the peaks of its device: by class of work, in each task's precision."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.graph.work import is_product
from foretrace.hardware.devices import find
from foretrace.hardware.probe import Peaks
from foretrace.simulate.timeline import Timeline
from foretrace.simulate.utilisation import Limits, Utilisation, utilisation
from foretrace.techniques.compute.classes import MATRIX, TaskPrecision, WorkClass, classify
from foretrace.trace.trace import decode_shapes

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

_MATRIX_CLASSES = {WorkClass.GEMM: "matrix products", WorkClass.CONV: "convolutions", WorkClass.ATTENTION: "attention"}
_DEVICE_KINDS = (TaskKind.KERNEL, TaskKind.COPY, TaskKind.MEMSET, TaskKind.COLLECTIVE)
_CPU_TYPES = ("float", "double", "c10::BFloat16", "c10::Half")

# What an operator of a CPU recording does, first match wins.
OPERATOR_CLASSES = (
    ("optimizer steps", r"^Optimizer\.|_foreach_|_fused_(?:adam|sgd)|^aten::(?:addcdiv|addcmul|lerp)"),
    ("convolutions", r"conv"),
    ("attention", r"scaled_dot_product|attention"),
    ("recurrent layers", r"lstm|gru|rnn"),
    (
        "matrix products",
        r"(?:^|::)(?:addmm|mm|bmm|baddbmm|matmul|linear|addmv|mv|dot|einsum|mkldnn_linear)\b",
    ),
    ("normalisation", r"norm"),
    ("embeddings", r"embedding|index_select|gather|scatter"),
    ("softmax and loss", r"softmax|nll_loss|cross_entropy|mse_loss"),
    ("pooling", r"pool"),
    ("copies and casts", r"copy_|_to_copy|contiguous|clone|::to$|::cat$|::stack$"),
    ("random numbers", r"dropout|bernoulli|random|normal_|uniform_|rand"),
    ("reductions", r"::(?:sum|mean|max|min|argmax|topk|sort)\b"),
)
_CLASSES = [(label, re.compile(pattern, re.IGNORECASE)) for label, pattern in OPERATOR_CLASSES]


def operator_words(name: str) -> str:
    """Return the class of a CPU operator in plain words, such as "convolutions"."""
    for label, pattern in _CLASSES:
        if pattern.search(name):
            return label
    return "pointwise operators" if name.startswith("aten::") else "other operators"


def peaks_of(graph: TaskGraph, *, gflops: float | None = None, gb_s: float | None = None) -> Peaks | None:
    """Return peaks of the device that a recording was made on: given, from the catalog, or measured when it was
    recorded.

    None where nobody knows: a CPU that was not probed, a device that the catalog lacks.
    """
    name, found = graph.device_name, None
    device = find(name) if graph.info.platform != "cpu" else None
    if device is not None:
        found = Peaks(
            name=device.name,
            source="catalog",
            fp32=device.fp32_tflops * 1e12,
            tf32=device.tf32_tflops * 1e12,
            fp16=device.fp16_tflops * 1e12,
            bf16=device.bf16_tflops * 1e12,
            bytes_per_s=device.memory_gb_s * 1e9,
        )
    elif stored := graph.info.recording.get("peaks"):
        found = Peaks(**stored)
    if gflops is None and gb_s is None:
        return found
    found = found or Peaks(name=name or "this device", source="given")
    if gflops is not None:
        found = replace(found, fp32=gflops * 1e9, tf32=0.0, fp16=0.0, bf16=0.0, source="given")
    if gb_s is not None:
        found = replace(found, bytes_per_s=gb_s * 1e9, source="given")
    return found


def rates(timeline: Timeline, peaks: Peaks | None) -> Utilisation:
    """Return what a recorded step makes of a device with these peaks. Raises GraphError without step boundaries."""
    label, names = _classes(timeline.graph)
    limits = Limits(
        flops_per_s=_peak_of_tasks(timeline.graph, peaks),
        bytes_per_s=peaks.bytes_per_s if peaks and peaks.bytes_per_s else float("nan"),
    )
    return utilisation(timeline, limits, classes=label, class_names=names)


def _classes(graph: TaskGraph) -> tuple[Int64, tuple[str, ...]]:
    """Return the class of every task that is the device's work (−1 for others), and the classes' names."""
    on_cpu = graph.info.platform == "cpu" and not graph.on_device.any()
    kinds = (TaskKind.OPERATOR, TaskKind.COLLECTIVE) if on_cpu else _DEVICE_KINDS
    rows = np.flatnonzero(np.isin(graph.kind, kinds))
    work = classify(graph).work
    names: dict[str, int] = {}
    label = np.full(len(graph), -1, dtype=np.int64)
    keys = np.stack([graph.kind[rows], graph.name[rows], graph.op[rows], work[rows]])
    pairs, index = np.unique(keys, axis=1, return_inverse=True)
    found = np.empty(pairs.shape[1], dtype=np.int64)
    for i, (kind, name, op, what) in enumerate(pairs.T.tolist()):
        operator = graph.names[op] if op >= 0 else ""
        if kind == TaskKind.COLLECTIVE:
            text = "communication"
        elif kind == TaskKind.COPY:
            text = "copies to and from the device"
        elif kind == TaskKind.OPERATOR:
            text = operator_words(graph.names[name])
        elif WorkClass(what) in MATRIX:
            text = _MATRIX_CLASSES[WorkClass(what)]
        else:
            text = operator_words(operator) if operator else "kernels of unknown operators"
        found[i] = names.setdefault(text, len(names))
    label[rows] = found[index.ravel()]
    return label, tuple(names)


def _peak_of_tasks(graph: TaskGraph, peaks: Peaks | None) -> Float64:
    """Return FLOP/s that the device can reach in each task's precision (n), NaN where unknown.

    Products use the units of their precision, everything else the float32 ones.
    """
    unknown = float("nan")
    result = np.full(len(graph), unknown)
    if peaks is None or not peaks.fp32:
        return result
    result[:] = peaks.fp32
    if graph.on_device.any():
        classes = classify(graph)
        matrix = np.isin(classes.work, MATRIX)
        half = peaks.fp16 or peaks.bf16 or (peaks.fp32 if peaks.source == "given" else unknown)
        by_precision = {
            TaskPrecision.OTHER: unknown,
            TaskPrecision.SINGLE: peaks.fp32,
            TaskPrecision.TF32: peaks.tf32 or peaks.fp32,
            TaskPrecision.HALF: half,
        }
        for precision, value in by_precision.items():
            result[matrix & (classes.precision == precision)] = value
        return result
    rows = np.flatnonzero((graph.op >= 0) & (graph.shape >= 0))
    calls, index = np.unique(np.stack([graph.op[rows], graph.shape[rows]]), axis=1, return_inverse=True)
    by_call = np.full(calls.shape[1], peaks.fp32)
    given = peaks.fp32 if peaks.source == "given" else unknown
    for i, (op, shape) in enumerate(calls.T.tolist()):
        if is_product(graph.names[op]):
            kind = next((each for each in decode_shapes(graph.shapes[shape]).types if each in _CPU_TYPES), "float")
            by_call[i] = {
                "float": peaks.fp32,
                "double": peaks.fp32 / 2,
                "c10::BFloat16": peaks.bf16 or given,
                "c10::Half": peaks.fp16 or given,
            }[kind]
    result[rows] = by_call[index.ravel()]
    return result
