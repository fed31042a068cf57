"""ONNX operators as ATen calls, so that they are counted and costed as those of PyTorch are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from foretrace.model.texts import TensorType, text_of, text_of_values

Attributes = Mapping[str, Any]

#: One output element per input element; the operator's name in ATen.
ELEMENTWISE = {
    "Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Pow": "pow", "Mod": "remainder", "Relu": "relu",
    "Sigmoid": "sigmoid", "Tanh": "tanh", "Erf": "erf", "Gelu": "gelu", "FastGelu": "gelu", "QuickGelu": "gelu",
    "Exp": "exp", "Log": "log", "Sqrt": "sqrt", "Neg": "neg", "Abs": "abs", "Clip": "clamp", "LeakyRelu": "leaky_relu",
    "Elu": "elu", "Selu": "selu", "Celu": "celu", "HardSigmoid": "hardsigmoid", "HardSwish": "hardswish",
    "Softplus": "softplus", "Softsign": "softsign", "PRelu": "prelu", "Where": "where", "Equal": "eq", "Greater": "gt",
    "GreaterOrEqual": "ge", "Less": "lt", "LessOrEqual": "le", "Not": "logical_not", "And": "logical_and",
    "Or": "logical_or", "Xor": "logical_xor", "Cast": "_to_copy", "CastLike": "_to_copy", "Min": "minimum",
    "Max": "maximum", "Sum": "add", "Mean": "add", "Reciprocal": "reciprocal", "Floor": "floor", "Ceil": "ceil",
    "Round": "round", "Sign": "sign", "Sin": "sin", "Cos": "cos", "Tan": "tan", "Mish": "mish", "Swish": "silu",
    "IsNaN": "isnan", "IsInf": "isinf", "ThresholdedRelu": "threshold", "BitShift": "bitwise_left_shift",
    "BitwiseAnd": "bitwise_and", "Sinh": "sinh", "Cosh": "cosh", "Atan": "atan", "Asin": "asin", "Acos": "acos",
    "CumSum": "cumsum", "Resize": "upsample_nearest2d", "Upsample": "upsample_nearest2d", "LRN": "local_response_norm",
    "GridSample": "grid_sampler_2d", "TopK": "topk", "OneHot": "one_hot", "NonZero": "nonzero",
    "QuantizeLinear": "quantize_per_tensor", "DequantizeLinear": "dequantize", "RotaryEmbedding": "rotary_embedding",
}  # fmt: skip
#: They look at memory in another way.
VIEWS = {
    "Reshape": "view", "Flatten": "view", "Squeeze": "squeeze", "Unsqueeze": "unsqueeze", "Transpose": "permute",
    "Slice": "slice", "Split": "split", "Identity": "alias", "Expand": "expand", "Dropout": "alias",
    "SpaceToDepth": "permute", "DepthToSpace": "permute",
}  # fmt: skip
REDUCTIONS = {
    "ReduceMean": "mean", "ReduceSum": "sum", "ReduceMax": "amax", "ReduceMin": "amin", "ReduceL2": "norm",
    "ReduceL1": "norm", "ReduceProd": "sum", "ReduceSumSquare": "norm", "ReduceLogSumExp": "sum", "ArgMax": "argmax",
    "ArgMin": "argmin", "GlobalAveragePool": "adaptive_avg_pool2d", "GlobalMaxPool": "adaptive_max_pool2d",
}  # fmt: skip
NORMS = {
    "BatchNormalization": "native_batch_norm", "LayerNormalization": "native_layer_norm",
    "InstanceNormalization": "instance_norm", "GroupNormalization": "native_group_norm",
    "RMSNormalization": "rms_norm", "SimplifiedLayerNormalization": "rms_norm",
    "SkipLayerNormalization": "native_layer_norm", "SkipSimplifiedLayerNormalization": "rms_norm",
    "LpNormalization": "norm", "MeanVarianceNormalization": "native_layer_norm",
}  # fmt: skip
MOVES = {"Concat": "cat", "Pad": "constant_pad_nd", "Tile": "repeat", "Trilu": "tril", "ReverseSequence": "flip"}
SOFTMAX = {"Softmax": "_softmax", "LogSoftmax": "_log_softmax", "Hardmax": "_softmax"}
CONTROL_FLOW = frozenset(["If", "Loop", "Scan", "SequenceMap"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """An ATen call: its name, its inputs as text, and FLOPs where these do not follow from the text."""

    op: str
    text: str
    flops: float | None = None


def mapped(
    kind: str,
    inputs: Sequence[TensorType],
    outputs: Sequence[TensorType],
    attributes: Attributes,
    *,
    table: bool = False,
) -> Mapped | None:
    """Return the ATen call of an ONNX operator; None for one that is not known.

    `inputs` are those that are given, in their order; `table` says that the first one is a weight. Raises IndexError,
    ValueError or KeyError where sizes do not fit the operator.
    """
    if kind in _BUILDERS:
        return _BUILDERS[kind](inputs, outputs, attributes)
    if kind == "Gather":
        return _gather(inputs, attributes, table=table)
    for names in (ELEMENTWISE, VIEWS, REDUCTIONS, NORMS, SOFTMAX, MOVES):
        if kind in names:
            break
    else:
        return None
    name = f"aten::{names[kind]}"
    if kind == "Concat":
        return Mapped(op=name, text=text_of([[list(each.dims) for each in inputs], []], [[], "Scalar"]))
    if names is REDUCTIONS and kind not in ("GlobalAveragePool", "GlobalMaxPool"):
        axes = attributes.get("axes") or [attributes.get("axis", 0)]
        return _plain(name, inputs[:1], [str(list(axes))])
    return _plain(name, inputs)


def _plain(op: str, inputs: Sequence[TensorType], concrete: Sequence[str] = (), flops: float | None = None) -> Mapped:
    """Return a call of these tensors and, behind them, of arguments that are no tensors."""
    return Mapped(op=op, text=text_of_values(inputs, concrete), flops=flops)


def _conv(inputs: Sequence[TensorType], outputs: Sequence[TensorType], attributes: Attributes) -> Mapped:
    x, w = inputs[0], inputs[1]
    spatial = len(w.dims) - 2
    stride = list(attributes.get("strides") or [1] * spatial)
    dilation = list(attributes.get("dilations") or [1] * spatial)
    pads = list(attributes.get("pads") or [0] * 2 * spatial)
    groups = int(attributes.get("group", 1))
    bias = [list(inputs[2].dims)] if len(inputs) > 2 else [[]]
    dims = [list(x.dims), list(w.dims), *bias, [], [], [], [], [], []]
    types = [x.dtype, w.dtype, inputs[2].dtype if len(inputs) > 2 else "", *["ScalarList"] * 3, "Scalar",
             "ScalarList", "Scalar"]  # fmt: skip
    concrete = ["", "", "", str(stride), str(pads[:spatial]), str(dilation), "False", str([0] * spatial), str(groups)]
    flops = 2.0 * prod(outputs[0].dims) * prod(w.dims[1:])
    return Mapped(op="aten::convolution", text=text_of(dims, types, concrete), flops=flops)


def _conv_transposed(inputs: Sequence[TensorType], outputs: Sequence[TensorType], attributes: Attributes) -> Mapped:
    spatial = min(max(len(inputs[1].dims) - 2, 1), 3)
    return _plain(f"aten::conv_transpose{spatial}d", inputs[:3])


def _gemm(inputs: Sequence[TensorType], outputs: Sequence[TensorType], attributes: Attributes) -> Mapped:
    a, b = inputs[0], inputs[1]
    left = a.dims[::-1] if attributes.get("transA") else a.dims
    right = b.dims[::-1] if attributes.get("transB") else b.dims
    pair = [TensorType(dims=left, dtype=a.dtype), TensorType(dims=right, dtype=b.dtype)]
    if left[1] != right[0]:
        raise ValueError(f"{left} and {right} cannot be multiplied")
    return _plain("aten::addmm", [inputs[2], *pair]) if len(inputs) > 2 else _plain("aten::mm", pair)


def _matmul(inputs: Sequence[TensorType], outputs: Sequence[TensorType], attributes: Attributes) -> Mapped:
    a, b = inputs[0].dims, inputs[1].dims
    a, b = (a if len(a) > 1 else (1, *a)), (b if len(b) > 1 else (*b, 1))
    if a[-1] != b[-2]:
        raise ValueError(f"{list(a)} and {list(b)} cannot be multiplied")
    if len(b) == 2 or prod(b[:-2]) == 1:
        pair: list[tuple[int, ...]] = [(prod(a[:-1]), a[-1]), (b[-2], b[-1])]
        name = "aten::mm"
    else:
        lead = prod(outputs[0].dims) // max(a[-2] * b[-1], 1)
        pair, name = [(lead, a[-2], a[-1]), (lead, b[-2], b[-1])], "aten::bmm"
    return _plain(
        name, [TensorType(dims=pair[0], dtype=inputs[0].dtype), TensorType(dims=pair[1], dtype=inputs[1].dtype)]
    )


def _einsum(inputs: Sequence[TensorType], outputs: Sequence[TensorType], attributes: Attributes) -> Mapped | None:
    """Return a product of two tensors: labels in both are the batch if the result has them, else summed over."""
    equation = str(attributes.get("equation", "")).replace(" ", "")
    terms, _, result = equation.partition("->")
    parts = terms.split(",")
    if len(inputs) != 2 or len(parts) != 2 or "." in equation or "->" not in equation:
        return None
    size: dict[str, int] = {}
    for part, each in zip(parts, inputs, strict=True):
        size |= dict(zip(part, each.dims, strict=True))
    left, right = set(parts[0]), set(parts[1])
    both = left & right
    b = prod(size[label] for label in both & set(result))
    k = prod(size[label] for label in both - set(result))
    m, n = (prod(size[label] for label in side) for side in (left - right, right - left))
    dtype = inputs[0].dtype
    return _plain("aten::bmm", [TensorType(dims=(b, m, k), dtype=dtype), TensorType(dims=(b, k, n), dtype=dtype)])


def _pool(name: str, inputs: Sequence[TensorType], outputs: Sequence[TensorType], attributes: Attributes) -> Mapped:
    kernel = list(attributes["kernel_shape"])
    stride = list(attributes.get("strides") or [1] * len(kernel))
    pads = list(attributes.get("pads") or [0] * len(kernel))[: len(kernel)]
    dilation = list(attributes.get("dilations") or [1] * len(kernel))
    flops = float(prod(outputs[0].dims) * prod(kernel))
    arguments = [str(kernel), str(stride), str(pads), str(dilation)]
    return _plain(f"aten::{name}{len(kernel)}d", inputs[:1], arguments, flops)


def _gather(inputs: Sequence[TensorType], attributes: Attributes, *, table: bool) -> Mapped:
    data, indices = inputs[0], inputs[1]
    axis = int(attributes.get("axis", 0))
    if table and axis == 0:
        return _plain("aten::embedding", [data, indices])
    dims = [list(data.dims), [], [prod(indices.dims)]]
    return Mapped(
        op="aten::index_select",
        text=text_of(dims, [data.dtype, "Scalar", indices.dtype], ["", str(axis % max(len(data.dims), 1)), ""]),
    )


def _attention(inputs: Sequence[TensorType], outputs: Sequence[TensorType], attributes: Attributes) -> Mapped:
    """Map Attention of ONNX 23, MultiHeadAttention of ONNX Runtime: [b, s, heads x width] or [b, heads, s, width]."""
    heads = int(attributes.get("q_num_heads") or attributes.get("num_heads") or 1)
    shared = int(attributes.get("kv_num_heads") or heads)
    found = []
    for position, each in enumerate(inputs[:3]):
        count = heads if position == 0 else shared
        dims = each.dims if len(each.dims) == 4 else (each.dims[0], count, each.dims[1], each.dims[2] // count)
        found.append(TensorType(dims=dims, dtype=each.dtype))
    return _plain("aten::scaled_dot_product_attention", found)


def _recurrent(
    name: str, inputs: Sequence[TensorType], outputs: Sequence[TensorType], attributes: Attributes
) -> Mapped:
    x, w, r = inputs[:3]
    weights = [list(each.dims[1:]) for _ in range(w.dims[0]) for each in (w, r)]
    return Mapped(op=f"aten::{name}", text=text_of([list(x.dims), weights], [x.dtype, []]))


_Builder = Callable[[Sequence[TensorType], Sequence[TensorType], Attributes], Mapped | None]
_BUILDERS: dict[str, _Builder] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transposed,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Einsum": _einsum,
    "MaxPool": partial(_pool, "max_pool"),
    "AveragePool": partial(_pool, "avg_pool"),
    "LpPool": partial(_pool, "avg_pool"),
    "Attention": _attention,
    "MultiHeadAttention": _attention,
    "LSTM": partial(_recurrent, "lstm"),
    "GRU": partial(_recurrent, "gru"),
    "RNN": partial(_recurrent, "rnn_tanh"),
}
