"""`random_pool`: operator calls of random kinds and sizes, drawn from a seed and from no model.

What training steps consist of, in sizes spread evenly over their logarithms. Pools serve twice: the prices of `Local`
are fitted to one machine's times of a large pool, and the few calls that a machine measures are chosen from another.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from foretrace.cost.operators.operator import Operator, call

_ELEMENTS = (32, 4 << 20)  # of a tensor that is gone over once: from what only dispatch decides to 16 MiB
_FLOPS = 6e8  # of one product or convolution: some ten milliseconds of one core
_BYTES = 24 << 20  # of all tensors of a call


Kinds = Sequence[tuple[float, Callable[["Draw"], Operator | None]]]  # how often each is drawn, and what draws it


class Draw:
    """Random sizes from a seed; only `random()` is used, whose numbers are the same in every version of Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def size(self, low: float, high: float) -> int:
        """Return a whole number, evenly on the logarithm; half of them are multiples of 8, as layers like them."""
        found = round(math.exp(math.log(low) + self._random() * math.log(high / low)))
        if found >= 12 and self._random() < 0.5:
            found = round(found / 8) * 8
        return max(int(found), 1)

    def of(self, *values: Any) -> Any:
        """Return one of these."""
        return values[int(self._random() * len(values))]

    def tensor(self, low: float = _ELEMENTS[0], high: float = _ELEMENTS[1]) -> list[int]:
        """Return sizes of a tensor with so many elements, rows by width."""
        elements = self.size(low, high)
        width = min(self.size(8, 2048), elements)
        return [max(elements // width, 1), width]

    def image(self) -> list[int]:
        """Return batch, channels, height, width."""
        return [self.size(1, 32), self.channels(), *[self.size(4, 64)] * 2]

    def channels(self) -> int:
        """Return a number of channels of an image: of colours, mostly multiples of 16 as in hidden layers, sometimes
        any number.
        """
        kind = self._random()
        if kind < 0.12:
            return 3
        return self.size(1, 16) * 16 if kind < 0.7 else self.size(1, 32) * 8 if kind < 0.85 else self.size(4, 256)


def random_pool(count: int, seed: int = 0, kinds: Kinds | None = None) -> list[Operator]:
    """Return so many different calls. The same seed gives the same ones, and a longer pool begins with the
    shorter one.
    """
    draw, kinds = Draw(seed), kinds or _KINDS
    total = sum(weight for weight, _ in kinds)
    found: dict[Operator, None] = {}
    while len(found) < count:
        at = draw._random() * total
        for weight, kind in kinds:
            make = kind
            at -= weight
            if at < 0:
                break
        made = make(draw)
        if made is not None:
            found.setdefault(made)
    return list(found)


def _product(draw: Draw) -> Operator | None:
    m, k, n = draw.size(1, 4096), draw.size(4, 4096), draw.size(1, 4096)
    if 2 * m * k * n > _FLOPS or 4 * (m * k + k * n + m * n) > _BYTES:
        return None
    if draw.of(True, False):
        return call("mm", [m, k], [k, n])
    return call("addmm", [n], [m, k], [k, n], "1", "1")


def _batched(draw: Draw) -> Operator | None:
    b, m, k, n = draw.size(2, 256), draw.size(1, 512), draw.size(4, 512), draw.size(1, 512)
    if 2 * b * m * k * n > _FLOPS or 4 * b * (m * k + k * n + m * n) > _BYTES:
        return None
    if draw._random() < 0.25:
        return call("baddbmm", [b, m, n], [b, m, k], [b, k, n], "1", "1")
    return call("bmm", [b, m, k], [b, k, n])


def _convolution(draw: Draw) -> Operator | None:
    x = draw.image()
    kernel, stride = draw.of(1, 1, 1, 3, 3, 3, 3, 5, 7), draw.of(1, 1, 1, 2)
    groups, outputs = 1, draw.channels()
    if x[1] > 3 and draw._random() < 0.2:
        groups = outputs = x[1]  # each channel alone
    elif x[1] % 4 == 0 and draw._random() < 0.1:
        groups, outputs = 4, 4 * max(outputs // 4, 1)
    transposed = groups == 1 and draw._random() < 0.12
    pad = draw.of(kernel // 2, kernel // 2, 0)
    side = (x[2] - 1) * stride - 2 * pad + kernel if transposed else (x[2] + 2 * pad - kernel) // stride + 1
    if x[2] + 2 * pad < kernel or side < 1 or side > 160:
        return None
    weight = [x[1], outputs, kernel, kernel] if transposed else [outputs, x[1] // groups, kernel, kernel]
    y = [x[0], outputs, side, side]
    work = 2.0 * math.prod(x if transposed else y) * math.prod(weight[1:])
    if work > _FLOPS or 4 * (math.prod(x) + math.prod(y) + math.prod(weight)) > _BYTES:
        return None
    flat = draw._random() < 0.1 and groups == 1  # along one axis

    def pair(n: int) -> str:
        return f"[{n}]" if flat else f"[{n}, {n}]"

    if flat:
        x, y, weight = x[:3], y[:3], weight[:3]
    rest = (pair(stride), pair(pad), pair(1), str(transposed), pair(0), str(groups))
    bias = [outputs] if draw._random() < 0.4 else None
    if draw.of(True, False):
        return call("convolution", x, weight, bias, *rest)
    mask = f"[{x[1] != 3}, True, {bias is not None}]"
    sizes = f"[{outputs}]" if bias else None
    return call("convolution_backward", y, x, weight, sizes, *rest, mask)


def _batch_norm(draw: Draw) -> Operator | None:
    x = draw.image() if draw._random() < 0.8 else draw.tensor(256)
    c = x[1]
    if math.prod(x) > _ELEMENTS[1] or math.prod(x) // c < 2:
        return None
    if draw.of(True, False):
        return call("native_batch_norm", x, [c], [c], [c], [c], "True", "0.1", "1e-05")
    return call("native_batch_norm_backward", x, x, [c], [c], [c], [c], [c], "True", "1e-05", "[True, True, True]")


def _layer_norm(draw: Draw) -> Operator:
    x = draw.tensor(256)
    m, width = x
    shape = f"[{width}]"
    if draw.of(True, False):
        return call("native_layer_norm", x, shape, [width], [width], "1e-05")
    return call("native_layer_norm_backward", x, x, shape, [m, 1], [m, 1], [width], [width], "[True, True, True]")


def _group_norm(draw: Draw) -> Operator | None:
    x = draw.image()
    groups = draw.of(1, 4, 8)
    n, c, pixels = x[0], x[1], x[2] * x[3]
    if c % groups or math.prod(x) > _ELEMENTS[1]:
        return None
    sizes = (str(n), str(c), str(pixels), str(groups))
    if draw.of(True, False):
        return call("native_group_norm", x, [c], [c], *sizes, "1e-05")
    stat = [n, groups]
    return call("native_group_norm_backward", x, x, stat, stat, [c], *sizes, "[True, True, True]")


def _softmax(draw: Draw) -> Operator:
    x = draw.tensor(64, 1 << 20) if draw.of(True, False) else [draw.size(8, 512), draw.size(64, 8192)]
    name = draw.of("_softmax", "_log_softmax")
    if draw.of(True, False):
        return call(name, x, "-1", "False")
    return call(f"{name}_backward_data", x, x, "-1", "6")


def _attention(draw: Draw) -> Operator | None:
    b, heads, m, width = draw.size(1, 32), draw.size(1, 12), draw.size(8, 512), draw.of(16, 32, 64, 80)
    if 4.0 * b * heads * m * m * width > _FLOPS:
        return None
    q, sums = [b, heads, m, width], [b, m, heads]
    causal = draw.of("True", "False")
    if draw.of(True, False):
        return call("_scaled_dot_product_flash_attention_for_cpu", q, q, q, "0.", causal)
    return call("_scaled_dot_product_flash_attention_for_cpu_backward", q, q, q, q, q, sums, "0.", causal)


def _recurrent(draw: Draw) -> Operator | None:
    steps, b, inputs, hidden = draw.size(1, 40), draw.size(1, 64), draw.size(16, 768), draw.size(16, 768)
    if 8.0 * steps * b * hidden * (inputs + hidden) > _FLOPS:
        return None
    x, y, w, u, bias, h = (
        [steps, b, inputs], [steps, b, hidden], [4 * hidden, inputs], [4 * hidden, hidden], [4 * hidden], [b, hidden],
    )  # fmt: skip
    rest = ("2", str(hidden), "2", "True")
    if draw.of(True, False):
        return call("mkldnn_rnn_layer", x, w, u, bias, bias, h, h, "False", "[]", *rest, "False", "False", "True")
    return call(
        "mkldnn_rnn_layer_backward", x, w, u, bias, bias, h, h, y, h, h, y, None, None, "False", *rest, "True",
        "False", "[]", "False", ("unsigned char", [16]),
    )  # fmt: skip


_ONE = ("relu", "relu_", "tanh", "sigmoid", "silu", "exp", "sqrt", "rsqrt", "neg", "log", "sin", "cos", "abs",
        "square", "reciprocal", "logical_not", "sigmoid_", "tanh_")  # fmt: skip
_TWO_GRADIENT = ("tanh_backward", "sigmoid_backward", "silu_backward")


def _one(draw: Draw) -> Operator:
    x = draw.tensor()
    name = draw.of(*_ONE)
    return call(name, ("bool", x)) if name == "logical_not" else call(name, x)


def _binary(draw: Draw) -> Operator:
    x = draw.tensor()
    name = draw.of(
        "add", "add_", "sub", "mul", "mul_", "div", "div_", "addcmul", "addcdiv_", "addcmul_", "lerp_", "maximum"
    )
    if name in ("addcmul", "addcmul_", "addcdiv_"):
        return call(name, x, x, x, "1")
    if name == "lerp_":
        return call(name, x, x, "0.1")
    other = draw.of(x, x, x, [x[1]], [x[0], 1])
    return call(name, x, other, "1") if name in ("add", "add_", "sub") else call(name, x, other)


def _scalar(draw: Draw) -> Operator:
    x = draw.tensor()
    name = draw.of("add_", "mul", "mul_", "div", "pow", "clamp_min", "leaky_relu", "hardtanh", "eq", "gt", "ge")
    if name == "pow":
        return call(name, x, draw.of("2", "3"))
    if name == "hardtanh":
        return call(name, x, "0.", "6.")
    return call(name, x, "0.5", "1") if name == "add_" else call(name, x, "0.5")


def _gradient(draw: Draw) -> Operator:
    x = draw.tensor()
    kind = int(draw._random() * 7)
    if kind < 2:
        return call("threshold_backward", x, x, "0")
    if kind == 2:
        return call("gelu", x, "none") if draw.of(True, False) else call("gelu_backward", x, x, "none")
    if kind == 3:
        return call("leaky_relu_backward", x, x, "0.2", "False")
    if kind == 4:
        return call("hardtanh_backward", x, x, "0.", "6.")
    if kind == 5:
        return call("native_dropout_backward", x, ("bool", x), "1.25")
    return call(draw.of(*_TWO_GRADIENT), x, x)


def _chance(draw: Draw) -> Operator:
    x = draw.tensor()
    if draw.of(True, False):
        return call("native_dropout", x, "0.2", "True")
    return call("bernoulli_", x, "0.8", None)


def _masked(draw: Draw) -> Operator:
    x = draw.tensor()
    if draw.of(True, False):
        return call("where", ("bool", x), x, x)
    return call("masked_fill", x, ("bool", x), "0")


def _reduction(draw: Draw) -> Operator:
    x = draw.tensor()
    name = draw.of("sum", "sum", "mean", "amax", "linalg_vector_norm", "cumsum", "argmax")
    axis = draw.of("0", "1")
    if name in ("sum", "mean"):
        return call(name, x, f"[{axis}]", draw.of("True", "False"), None)
    if name == "amax":
        return call(name, x, f"[{axis}]", "False")
    if name == "linalg_vector_norm":
        return call(name, x, "2", None, "False", None)
    return call(name, x, "1", None) if name == "cumsum" else call(name, x, axis, "False")


def _image_sum(draw: Draw) -> Operator | None:
    x = draw.image()
    if math.prod(x) > _ELEMENTS[1]:
        return None
    return call(
        *(("sum", x, "[0, 2, 3]", "False", None) if draw.of(True, False) else ("mean", x, "[2, 3]", "True", None))
    )


def _loss(draw: Draw) -> Operator:
    x = [draw.size(4, 1024), draw.size(2, 8192)]
    if x[0] * x[1] > _ELEMENTS[1]:
        x[1] = 128
    rows = ("long int", [x[0]])
    if draw.of(True, False):
        return call("nll_loss_forward", x, rows, None, "1", "-100")
    return call("nll_loss_backward", [], x, rows, None, "1", "-100", ("float", []))


def _pool(draw: Draw) -> Operator | None:
    x = draw.image()
    kernel = draw.of(2, 3)
    stride, pad = draw.of((2, 0), (2, 1), (1, 1)) if kernel == 3 else (2, 0)
    side = (x[2] + 2 * pad - kernel) // stride + 1
    if side < 1 or math.prod(x) > _ELEMENTS[1] // 2:
        return None
    y = [x[0], x[1], side, side]
    window = (f"[{kernel}, {kernel}]", f"[{stride}, {stride}]", f"[{pad}, {pad}]")
    kind = int(draw._random() * 6)
    if kind < 2:
        return call("max_pool2d_with_indices", x, *window, "[1, 1]", "False")
    if kind < 4:
        return call("max_pool2d_with_indices_backward", y, x, *window, "[1, 1]", "False", ("long int", y))
    if kind == 4:
        return call("avg_pool2d", x, *window, "False", "True", None)
    return call("avg_pool2d_backward", y, x, *window, "False", "True", None)


def _move(draw: Draw) -> Operator:
    x = draw.tensor()
    kind = int(draw._random() * 8)
    if kind < 2:
        return call("copy_", x, x, "False")
    if kind == 2:
        return call("clone", x, None)
    if kind == 3:
        return call("cat", [x] * draw.of(2, 3, 8), draw.of("0", "1"))
    if kind == 4:
        return call("stack", [x] * draw.of(2, 4), "1")
    if kind == 5:
        return call("fill_", x, "0.5")
    if kind == 6:
        return call("_to_copy", ("long int", x), "6", None, None, None, "False", None)
    return call("zero_", x)


def _lookup(draw: Draw) -> Operator:
    rows, width, words = draw.size(8, 65536), draw.size(4, 512), draw.size(4, 4096)
    if rows * width > _ELEMENTS[1]:
        rows = _ELEMENTS[1] // width
    index = ("long int", [words])
    kind = int(draw._random() * 6)
    if kind < 2:
        return call("embedding", [rows, width], index, "-1", "False", "False")
    if kind < 4:
        return call("embedding_dense_backward", [words, width], index, str(rows), "-1", "False")
    if kind == 4:
        return call("index_select", [rows, width], "0", index)
    return call("gather", [words, width], "1", ("long int", [words, draw.of(1, width)]), "False")


def _view(draw: Draw) -> Operator:
    x = draw.tensor(32, 1 << 16)
    name = draw.of("t", "view", "transpose", "unsqueeze", "expand", "select", "slice", "detach", "permute", "empty")
    more: dict[str, tuple[str, ...]] = {
        "view": (str([x[0] * x[1]]),), "transpose": ("0", "1"), "unsqueeze": ("0",), "expand": (str([2, *x]), "False"),
        "select": ("0", "0"), "slice": ("0", "0", str(x[0]), "1"), "permute": ("[1, 0]",),
    }  # fmt: skip
    if name == "empty":
        return call("empty", str(x), "6", None, None, None, None)
    return call(name, x, *more.get(name, ()))


# How often each kind is drawn.
_KINDS: Kinds = (
    (14, _product), (6, _batched), (24, _convolution), (5, _batch_norm), (4, _layer_norm), (1.5, _group_norm),
    (4, _softmax), (4, _attention), (4, _recurrent), (6, _one), (9, _binary), (5, _scalar), (4, _gradient),
    (2, _chance), (2, _masked), (5, _reduction), (1, _image_sum), (1.5, _loss), (4, _pool), (5, _move), (4, _lookup),
    (3, _view),
)  # fmt: skip
