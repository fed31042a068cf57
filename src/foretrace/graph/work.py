"""Floating-point operations and bytes of one operator call, from its recorded input shapes.

FLOPs: 2 per multiply-add of matrix products, convolutions, recurrent layers and attention (whose backward pass computes
the scores again: 2.5 times the forward pass); one per element of the largest input for everything else; none for views.
Bytes: every input read once and the output written once, an estimate from below that ignores caches and workspaces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

from foretrace.plaintext import whole_number
from foretrace.trace.trace import Shapes, told_shapes

Dims = list[int]
Tensor = tuple[Dims, int]  # sizes, bytes per element
Outputs = Mapping[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]]  # (input, weight) -> output

# Names of C++, of PyTorch and of back ends.
_NAMES = {
    1: "bool byte char int8 uint8 float8_e4m3fn float8_e5m2", 2: "half bfloat16 float16 short int16",
    4: "float float32 int int32", 8: "double float64 long int64 complex<float> complexfloat complex64",
}  # fmt: skip
_ELEMENT_BYTES = {name: size for size, names in _NAMES.items() for name in names.split()} | {
    "long int": 8, "signed char": 1, "unsigned char": 1,
}  # fmt: skip

# Operators that look at memory in another way, or allocate it: they move nothing.
_VIEWS = frozenset((
    "view", "t", "transpose", "permute", "expand", "expand_as", "unsqueeze", "squeeze", "select", "slice", "narrow",
    "split", "split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split", "unbind", "detach", "alias", "as_strided",
    "_reshape_alias", "_unsafe_view", "unflatten", "view_as", "lift_fresh", "resolve_conj", "resolve_neg", "empty_like",
    "empty_strided", "new_empty", "new_empty_strided", "resize", "set", "numpy_T", "movedim", "swapaxes",
    "view_as_real", "view_as_complex", "real", "imag", "requires_grad", "cudnn_is_acceptable", "result_type", "reshape",
    "flatten", "ravel", "contiguous", "to", "empty", "item", "_local_scalar_dense", "_indices", "_values",
    "_sparse_coo_tensor_with_dims_and_tensors", "_coalesced",
))  # fmt: skip
_WRITERS = frozenset(["zero", "fill", "normal", "uniform", "bernoulli", "random", "exponential"])  # they read nothing
_REDUCTIONS = frozenset((
    "sum", "mean", "max", "min", "amax", "amin", "argmax", "argmin", "all", "any", "norm", "linalg_vector_norm", "std",
    "var", "var_mean", "nll_loss_forward", "nll_loss", "nll_loss2d_forward", "dot", "adaptive_avg_pool2d",
    "_adaptive_avg_pool2d", "_foreach_norm", "isfinite", "count_nonzero", "_amp_foreach_non_finite_check_and_unscale",
))  # fmt: skip
_PRODUCTS = frozenset((
    "mm", "bmm", "matmul", "baddbmm", "addmm", "linear", "_addmm_activation", "mv", "addmv", "mkldnn_linear", "dot",
    "_scaled_mm", "_int_mm", "_grouped_mm", "_scaled_grouped_mm",
))  # fmt: skip
# They read and write rows of their first input, which they copy before unless they work in place.
_INTO_ROWS = frozenset((
    "index_put", "_index_put_impl", "index_add", "index_copy", "put", "scatter", "scatter_add", "scatter_reduce",
))  # fmt: skip
_ADDED = frozenset(["baddbmm", "addmm", "_addmm_activation", "addmv"])  # the first input is added

# Operator -> positions of stride, padding, dilation and "transposed" (−1: never) among its arguments.
_CONVOLUTIONS = {
    "conv1d": (3, 4, 5, -1), "conv2d": (3, 4, 5, -1), "conv3d": (3, 4, 5, -1),
    "convolution": (3, 4, 5, 6), "_convolution": (3, 4, 5, 6), "convolution_overrideable": (3, 4, 5, 6),
    "mkldnn_convolution": (4, 3, 5, -1), "miopen_convolution": (4, 3, 5, -1),
    "miopen_depthwise_convolution": (4, 3, 5, -1),
    "cudnn_convolution": (3, 2, 4, -1), "cudnn_convolution_relu": (3, 4, 5, -1),
    "thnn_conv2d": (4, 5, -1, -1), "_slow_conv2d_forward": (4, 5, -1, -1), "slow_conv3d_forward": (4, 5, -1, -1),
    "_conv_depthwise2d": (4, 5, 6, -1), "conv_depthwise3d": (4, 5, 6, -1), "slow_conv_dilated2d": (4, 5, 6, -1),
}  # fmt: skip
_TRANSPOSED = frozenset(
    [
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("mkldnn_convolution_transpose", "cudnn_convolution_transpose", "miopen_convolution_transpose"),
    ]
)
# Backward operator -> positions of (gradient, input, weight) among its tensors, and products that it computes.
_BACKWARDS = {
    "convolution_backward": (0, 1, 2, 2), "convolution_backward_overrideable": (0, 1, 2, 2),
    "_slow_conv2d_backward": (0, 1, 2, 2), "cudnn_convolution_backward": (1, 0, 2, 2),
    "mkldnn_convolution_backward": (1, 0, 2, 2), "miopen_convolution_backward": (1, 0, 2, 2),
    "thnn_conv2d_backward": (0, 1, 2, 2), "thnn_conv_depthwise2d_backward": (0, 1, 2, 2),
}  # fmt: skip
# Until PyTorch 1.10 the two gradients were operators of their own.
_INPUT_GRADIENTS = frozenset(f"{home}_convolution_backward_input" for home in ("cudnn", "miopen", "mkldnn"))
_WEIGHT_GRADIENTS = frozenset(f"{home}_convolution_backward_weight" for home in ("cudnn", "miopen", "mkldnn"))
_ATTENTION = ("_scaled_dot_product", "scaled_dot_product", "_flash_attention", "_efficient_attention",
              "_cudnn_attention")  # fmt: skip
_RECURRENT = frozenset(["mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "lstm", "gru", "rnn_tanh", "rnn_relu"])
_BACKWARD_OF_ATTENTION = 2.5  # five products where the forward pass has two

_MOST_BYTES, _MOST_FLOPS = 1 << 60, 1e30  # of one call


class Work(NamedTuple):
    """What a call computes and moves."""

    flops: float
    nbytes: int


def operator_work(name: str, text: str, outputs: Outputs | None = None) -> tuple[int, float]:
    """Return (bytes, FLOPs) of a call of operator `name` whose shapes are the JSON `text` of `Trace.shapes`.

    (−1, 0) if no tensor has a known type, or sizes that no memory holds (a damaged file). `outputs` gives the output
    sizes of convolutions whose strides were not recorded; without them their FLOPs are unknown, which is 0.
    """
    shapes = told_shapes(text)
    inputs = list(tensors(shapes))
    base = name.removeprefix("aten::").rstrip("_")
    if not inputs or ("::" in name and not name.startswith("aten::")):
        return -1, 0.0  # another library's: it may be given whole tables or caches and read a few of their rows
    found: Work | None = None
    try:
        with suppress(IndexError, TypeError, ValueError):
            found = _special(base, inputs, shapes, outputs or {})
            if found and base in _INTO_ROWS and not name.endswith("_"):
                found = found._replace(nbytes=found.nbytes + 2 * prod(inputs[0][0]) * inputs[0][1])
        found = found or _elementwise(inputs)
    except OverflowError:
        return -1, 0.0
    possible = -1 <= found.nbytes <= _MOST_BYTES and 0 <= found.flops <= _MOST_FLOPS
    return (found.nbytes, found.flops) if possible else (-1, 0.0)


def conv_output(name: str, text: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Return (input, weight, output) sizes that a backward call of a convolution tells, None for other operators."""
    positions = _BACKWARDS.get(name.removeprefix("aten::"))
    if positions is None:
        return None
    dims = [tuple(dims) for dims, _ in tensors(told_shapes(text))]
    if len(dims) < 3:
        return None
    gradient, x, w = (dims[at] for at in positions[:3])
    return x, w, gradient


def is_product(name: str) -> bool:
    """Return whether an operator's FLOPs are those of a matrix product, convolution, recurrent layer or attention."""
    base = name.removeprefix("aten::").rstrip("_")
    one = base.removesuffix("_backward")
    known = (_PRODUCTS, _CONVOLUTIONS, _TRANSPOSED, _RECURRENT)
    gradients = (_BACKWARDS, _INPUT_GRADIENTS, _WEIGHT_GRADIENTS)
    return any(one in each for each in known) or any(base in each for each in gradients) or base.startswith(_ATTENTION)


def _special(base: str, tensors: list[Tensor], shapes: Shapes, outputs: Outputs) -> Work | None:
    """Return work of operators that are not one operation per element; None for those that are."""
    read = sum(prod(dims) * size for dims, size in tensors)
    dims, size = [dims for dims, _ in tensors], tensors[0][1]
    if base in _VIEWS:
        return Work(0.0, 0)
    if base in _PRODUCTS:
        return _product(base, dims, size, read)
    if base in _CONVOLUTIONS or base in _TRANSPOSED:
        return _convolution(base, dims, size, read, shapes, outputs)
    if base in _BACKWARDS:
        return _convolution_backward(base, dims, size, read, shapes)
    if base in _INPUT_GRADIENTS:
        gradient, w = dims[0], dims[1]
        return Work(2.0 * prod(gradient) * prod(w[1:]), read)
    if base in _WEIGHT_GRADIENTS:
        between = (tuple(dims[1]), tuple(dims[0]))
        weights = {w for (found, w), out in outputs.items() if (found, out) == between}
        return Work(2.0 * prod(dims[0]) * prod(weights.pop()[1:]) if len(weights) == 1 else 0.0, read)
    if base.startswith(_ATTENTION):
        return _attention(base, dims, size, read)
    if base.removesuffix("_backward") in _RECURRENT:
        return _recurrent(base, dims, size, read)
    if base.startswith("_fused_") and isinstance(shapes.dims[0], list) and shapes.dims[0][0]:
        lists = list(_lists(shapes))
        wrote = sum(count * each for i, (count, each) in enumerate(lists) if i != 1)  # all but the gradients
        return Work(float(lists[0][0]), read + wrote)
    if base.startswith("_foreach_") and base not in _REDUCTIONS:
        first, each = next(_lists(shapes), (0, 4))
        return Work(float(first), read + first * each)
    elements = prod(max(dims, key=prod))
    if base == "copy":
        return Work(0.0, prod(dims[1]) * tensors[1][1] + prod(dims[0]) * size)
    if base in _WRITERS:
        return Work(float(elements), elements * size)
    if base in _REDUCTIONS:
        return Work(float(elements), read)
    if base in ("cat", "stack"):
        return Work(0.0, 2 * read)
    if base.startswith("max_pool"):
        return _pooling(dims, size, read, shapes)
    return _lookup(base, tensors, shapes)


def _elementwise(tensors: list[Tensor]) -> Work:
    """Return one operation per element of the largest input, all inputs read, one output like the largest input."""
    largest, size = max(tensors, key=lambda tensor: prod(tensor[0]))
    return Work(float(prod(largest)), sum(prod(dims) * each for dims, each in tensors) + prod(largest) * size)


def _product(base: str, dims: list[Dims], size: int, read: int) -> Work:
    a, b = (dims[1], dims[2]) if base in _ADDED else (dims[0], dims[1])
    columns = b[-2] if base in ("linear", "mkldnn_linear") and len(b) > 1 else b[-1]
    if base in ("mv", "addmv", "dot") or len(b) == 1:
        columns = 1
    return Work(2.0 * prod(a) * columns, read + prod(a[:-1]) * columns * size)


def _convolution(base: str, dims: list[Dims], size: int, read: int, shapes: Shapes, outputs: Outputs) -> Work | None:
    x, w = dims[0], dims[1]
    stride_at, padding_at, dilation_at, _ = _CONVOLUTIONS.get(base, (0, 0, 0, -1))
    if transposed(base, shapes):
        return Work(2.0 * prod(x) * prod(w[1:]), read + x[0] * w[1] * prod(x[2:]) * size)
    stride, padding = (_numbers(_argument(shapes, at)) for at in (stride_at, padding_at))
    dilation = _numbers(_argument(shapes, dilation_at)) if dilation_at >= 0 else [1]
    if not stride or not padding:
        out = prod(outputs.get((tuple(x), tuple(w)), [0]))
    else:
        spatial = range(len(w) - 2)
        x = x if len(x) == len(w) else [1, *x]
        out = x[0] * w[0]
        for axis in spatial:
            s, p, d = (values[axis % len(values)] for values in (stride, padding, dilation or [1]))
            out *= max((x[2 + axis] + 2 * p - d * (w[2 + axis] - 1) - 1) // max(s, 1) + 1, 1)
    return Work(2.0 * out * prod(w[1:]), read + out * size)


def transposed(base: str, shapes: Shapes) -> bool:
    """Return whether a convolution (without "aten::") or its backward pass is a transposed one."""
    at = 7 if base == "convolution_backward" else _CONVOLUTIONS.get(base, (0, 0, 0, -1))[3]
    return base in _TRANSPOSED or (at >= 0 and _argument(shapes, at) == "True")


def _convolution_backward(base: str, dims: list[Dims], size: int, read: int, shapes: Shapes) -> Work:
    *positions, products = _BACKWARDS[base]
    gradient, x, w = (dims[at] for at in positions)
    mask = shapes.concrete[-1].strip("[]").replace(" ", "").split(",") if shapes.concrete else []
    wanted = [each == "True" for each in mask] if len(mask) == 3 else [True, True, True]
    products = sum(wanted[:2])  # gradients of the input and of the weight
    one = 2.0 * (prod(x) if transposed(base, shapes) else prod(gradient)) * prod(w[1:])
    return Work(products * one, read + (wanted[0] * prod(x) + wanted[1] * prod(w)) * size)


def _attention(base: str, dims: list[Dims], size: int, read: int) -> Work | None:
    backward = "backward" in base
    q, k, v = dims[1:4] if backward else dims[:3]
    if len(q) < 4 or len(k) < 4:  # sequences of different lengths in one tensor
        return None
    sequence, heads = (-3, q[-2]) if heads_last(base) else (-2, prod(q[1:-2]))
    scores = q[0] * heads * q[sequence] * k[sequence]
    forward = 2.0 * scores * (q[-1] + v[-1])
    if backward:
        return Work(_BACKWARD_OF_ATTENTION * forward, read + 3 * prod(q) * size)
    return Work(forward, read + prod(q) * size)


def heads_last(base: str) -> bool:
    """Return whether an attention operator's tensors are [batch, sequence, heads, width], not heads first."""
    return base.startswith(("_flash", "_efficient"))


def _recurrent(base: str, dims: list[Dims], size: int, read: int) -> Work:
    """Return one product with every weight matrix per sequence element; both gradients in the backward pass."""
    x, weights = dims[0], [each for each in dims[1:] if len(each) == 2]
    if base.startswith("mkldnn_rnn_layer"):
        weights = dims[1:3]
    steps = prod(x[:-1])
    forward = 2.0 * steps * sum(map(prod, weights))
    hidden = weights[-1][-1]
    return Work(forward * (2 if base.endswith("_backward") else 1), read + steps * hidden * size)


def _pooling(dims: list[Dims], size: int, read: int, shapes: Shapes) -> Work | None:
    if len(dims) > 1:  # the backward pass
        return None
    kernel, stride = _numbers(shapes.concrete[1]), _numbers(shapes.concrete[2])
    padding, dilation = _numbers(shapes.concrete[3]) or [0], _numbers(shapes.concrete[4]) or [1]
    x = dims[0]
    out = prod(x[: -len(kernel)])
    for axis, length in enumerate(x[-len(kernel) :]):
        s = (stride or kernel)[axis % len(stride or kernel)]
        p, d = padding[axis % len(padding)], dilation[axis % len(dilation)]
        out *= (length + 2 * p - d * (kernel[axis] - 1) - 1) // s + 1
    return Work(float(out * prod(kernel)), read + out * (size + 8))  # values and their places


def _lookup(base: str, tensors: list[Tensor], shapes: Shapes) -> Work | None:
    """Return rows taken from a table or added to one: only these rows are touched."""
    (table, size), *rest = tensors
    if base in ("embedding", "index_select", "_embedding_bag", "embedding_bag", "_embedding_bag_forward_only"):
        indices, width = prod(rest[0][0]), prod(table[1:]) if base != "index_select" else 0
        if base == "index_select":
            axis = int(_argument(shapes, 1) or 0)
            width = prod(table) // max(table[axis], 1)
        bags = prod(rest[1][0]) if "bag" in base else indices
        return Work(float(indices * width) if "bag" in base else 0.0,
                    indices * rest[0][1] + (indices + bags) * width * size)  # fmt: skip
    if base in ("gather", "scatter", "scatter_add", "scatter_reduce"):
        index, width = rest[0]
        return Work(0.0, prod(index) * (width + 2 * size))
    if base in _INTO_ROWS:
        *places, (values, width) = rest
        return Work(float(prod(values)), 3 * prod(values) * width + sum(prod(dims) * each for dims, each in places))
    if base in ("embedding_dense_backward", "_embedding_bag_dense_backward", "_embedding_bag_backward"):
        rows = next((found for each in shapes.concrete if (found := whole_number(each)) is not None and found >= 0), 0)
        picked, width = rest[0]  # the first tensor is the gradient, of every index or of every bag
        moved = prod(table) if "bag" not in base else prod(picked) * table[-1]
        if base == "_embedding_bag_backward" and _argument(shapes, 9) == "True":
            rows = 0  # sparse: a row for every index
        return Work(float(moved), (3 * moved + rows * table[-1]) * size + prod(picked) * width)
    return None


def plain_type(dtype: str) -> str:
    """Return the name of a type without where it is defined: "bfloat16" of "c10::BFloat16"."""
    return dtype.lower().removeprefix("tensorlist:").removeprefix("c10::").removeprefix("torch.").strip()


def element_bytes(dtype: str) -> int | None:
    """Return bytes of an element of this type, None where the name is none of a type of tensors."""
    return _ELEMENT_BYTES.get(plain_type(dtype))


def tensors(shapes: Shapes) -> Iterator[Tensor]:
    """Yield (dims, bytes per element) of every tensor input of known type; lists of tensors are walked into."""
    for dims, kind in zip(shapes.dims, shapes.types, strict=False):
        size = element_bytes(kind)
        if isinstance(dims, list) and dims and all(isinstance(d, int) for d in dims):
            if size:
                yield dims, size
        elif isinstance(dims, list):
            for inner in dims:
                if isinstance(inner, list) and inner and all(isinstance(d, int) for d in inner):
                    yield inner, size or 4


def _lists(shapes: Shapes) -> Iterator[tuple[int, int]]:
    """Yield (numbers, bytes of each) of every list of tensors."""
    for dims, kind in zip(shapes.dims, shapes.types, strict=False):
        if dims and isinstance(dims[0], list):
            yield sum(map(prod, dims)), element_bytes(kind) or 4


def _argument(shapes: Shapes, at: int) -> str:
    return shapes.concrete[at] if 0 <= at < len(shapes.concrete) else ""


def _numbers(text: Any) -> Dims:
    try:
        return [int(part) for part in text.strip("[]").split(",") if part.strip()]
    except ValueError:
        return []


def adds(base: str) -> bool:
    """Return whether the first input of a product (without "aten::") is added to it, as in addmm."""
    return base in _ADDED


def kind_of(base: str) -> str | None:
    """Return the family of an operator (without "aten::" and "_" behind) in the tables of this file, None if none."""
    one = base.removesuffix("_backward")
    if base in _VIEWS:
        return "NONE"
    if base in _PRODUCTS:
        return "GEMM"
    if one in _CONVOLUTIONS or one in _TRANSPOSED or base in _BACKWARDS:
        return "CONV"
    if base in _INPUT_GRADIENTS or base in _WEIGHT_GRADIENTS:
        return "CONV"
    if base.startswith(_ATTENTION):
        return "ATTENTION"
    if one in _RECURRENT:
        return "RECURRENT"
    return "REDUCTION" if base in _REDUCTIONS and not base.startswith("_foreach") else None
