"""Floating-point operations and bytes of one operator call, from its recorded input shapes."""

from __future__ import annotations

from math import prod
from typing import Any

import msgspec

from foretrace.trace.trace import Shapes, decode_shapes

_SIZES = {
    "float": 4, "c10::bfloat16": 2, "c10::half": 2, "double": 8, "int": 4, "long": 8, "long int": 8, "bool": 1,
    "unsigned char": 1, "signed char": 1, "short": 2, "c10::complex<float>": 8, "scalar": 0, "c10::float8_e4m3fn": 1,
}  # fmt: skip


def operator_work(name: str, text: str) -> tuple[int, float]:
    """(bytes, FLOPs) of a call of operator `name` whose shapes are the JSON `text` of `Trace.shapes`.

    Bytes: every input tensor read once and the output written once (−1 if no tensor has a known type); an estimate
    from below that ignores caches and workspaces. FLOPs: 2 per multiply-add for matrix products, convolutions and
    attention, one per element of the largest input otherwise; 0 where shapes do not tell.
    """
    try:
        shapes = decode_shapes(text)
    except (msgspec.DecodeError, ValueError, TypeError):
        return -1, 0.0
    tensors = list(_tensors(shapes))
    if not tensors:
        return -1, 0.0
    read = sum(prod(dims) * size for dims, size in tensors)
    base = name.removeprefix("aten::").rstrip("_")
    flops, written = _matrix_work(base, [dims for dims, _ in tensors], tensors[0][1], shapes)
    if flops == 0.0:
        largest = max(tensors, key=lambda t: prod(t[0]))
        flops = float(prod(largest[0]))
        written = prod(largest[0]) * largest[1]
    return read + written, flops


def _tensors(shapes: Shapes) -> Any:
    """(dims, bytes per element) of every tensor input; lists of tensors are walked into."""
    for dims, kind in zip(shapes.dims, shapes.types, strict=False):
        size = _SIZES.get(kind.lower())
        if isinstance(dims, list) and dims and all(isinstance(d, int) for d in dims):
            if size:
                yield dims, size
        elif isinstance(dims, list):
            for inner in dims:
                if isinstance(inner, list) and inner and all(isinstance(d, int) for d in inner):
                    yield inner, size or 4


def _matrix_work(base: str, dims: list[list[int]], size: int, shapes: Shapes) -> tuple[float, int]:
    """(FLOPs, bytes written) of matrix products, convolutions and attention; (0, 0) for other operators."""
    try:
        if base in ("mm", "bmm", "matmul", "baddbmm", "addmm", "linear", "_addmm_activation", "mv"):
            a, b = (dims[1], dims[2]) if base in ("addmm", "baddbmm", "_addmm_activation") else (dims[0], dims[1])
            columns = b[-2] if base == "linear" and len(b) > 1 else b[-1]
            if base == "mv" or len(b) == 1:
                columns = 1
            return 2.0 * prod(a) * columns, prod(a[:-1]) * columns * size
        if base in ("conv2d", "convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution", "conv1d",
                    "miopen_convolution", "conv3d", "thnn_conv2d"):  # fmt: skip
            x, w = dims[0], dims[1]
            out = _convolution_output(x, w, shapes)
            return 2.0 * out * prod(w[1:]), out * size
        if base in ("convolution_backward", "cudnn_convolution_backward"):
            grad, x, w = dims[0], dims[1], dims[2]
            return 2.0 * 2.0 * prod(grad) * prod(w[1:]), (prod(x) + prod(w)) * size
        if base.startswith(("scaled_dot_product", "_scaled_dot_product", "_flash_attention", "_efficient_attention")):
            q, k = (
                dims[-4:][0] if "backward" not in base else dims[1],
                dims[1] if "backward" not in base else dims[2],
            )
            work = 4.0 * prod(q) * k[-2]
            return (2.5 * work if "backward" in base else work), prod(q) * size
    except IndexError:
        pass
    return 0.0, 0


def _convolution_output(x: list[int], w: list[int], shapes: Shapes) -> int:
    """Elements of a convolution's output from the recorded stride, padding and dilation (1, 0, 1 if unknown)."""
    lists = [_numbers(text) for text in shapes.concrete if text.startswith("[")]
    spatial = len(x) - 2
    fitting = [values for values in lists if len(values) in (1, spatial)]
    stride = fitting[0] if fitting else [1]
    padding = fitting[1] if len(fitting) > 1 else [0]
    dilation = fitting[2] if len(fitting) > 2 else [1]
    out = x[0] * w[0]
    for axis in range(spatial):
        s, p, d = (v[axis % len(v)] for v in (stride, padding, dilation))
        out *= max((x[2 + axis] + 2 * p - d * (w[2 + axis] - 1) - 1) // max(s, 1) + 1, 1)
    return out


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.strip("[]").split(",") if part.strip()]
    except ValueError:
        return []
