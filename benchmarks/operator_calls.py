"""Write the operators that calibrations measure: src/foretrace/cost/operators/calls.json.gz.

    python benchmarks/operator_calls.py

The grid (classes x sizes, with twins), and all of the grid and of 600 random calls in the order in which they say most
of a processor: greedily, by the shipped prices.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from foretrace.cost.calls import Calls
from foretrace.cost.operators.grid import ChosenCalls, Point
from foretrace.cost.operators.local import NOISE, RegressionRows, covariance, rows_of, shipped
from foretrace.cost.operators.operator import BFLOAT16, CHANNELS_LAST, Operator, call
from foretrace.files import write_bytes
from operator_pool import random_pool
from tables import ROOT

CALLS = ROOT / "src" / "foretrace" / "cost" / "operators" / "calls.json.gz"
_POOL, _POOL_SEED = 600, 1  # candidates: other calls than those that the shipped prices were fitted to
_SIZES = ((8, 128), (16, 256), (32, 512), (64, 1024), (128, 2048), (256, 4096))  # of what goes over data once


def grid() -> list[Point]:
    """All points: one size of every class first, then another of each; whoever stops early has all classes."""
    points = [*_products(), *_convolutions(), *_norms(), *_recurrent(), *_attention(), *_pointwise(), *_moving()]
    families: dict[str, list[Point]] = {}
    for point in points:
        families.setdefault(point.family, []).append(point)
    turn = {}
    for members in families.values():
        middle = len(members) // 2
        for i, point in enumerate(sorted(members, key=lambda each: abs(members.index(each) - middle))):
            turn[point] = i
    return sorted(points, key=lambda each: turn[each])


def choose_designed(rows: RegressionRows, k: int) -> npt.NDArray[np.int64]:
    """The k calls after which least is left unknown of all rows: greedy, by the mean of the variances."""
    total = rows.cost.sum(axis=1)
    share = rows.cost / total[:, None]
    among = covariance(rows, rows, share, share)
    chosen: list[int] = []
    free = np.ones(len(rows), dtype=bool)
    for _ in range(min(k, len(rows))):
        gain = (among**2).mean(axis=0) / (np.diag(among) + NOISE**2)
        best = int(np.argmax(np.where(free, gain, -1.0)))
        chosen.append(best)
        free[best] = False
        among = among - np.outer(among[:, best], among[best]) / (among[best, best] + NOISE**2)
    return np.array(chosen, dtype=np.int64)


def designed() -> list[Operator]:
    """The calls that say most of a processor first; sizes beyond those of the prices count like others."""
    prices = msgspec.structs.replace(shipped(), most={})
    pool = list(dict.fromkeys([*(point.base for point in grid()), *random_pool(_POOL, _POOL_SEED)]))
    rows, said = rows_of(Calls.of([(each.name, each.text) for each in pool]), prices, 0.5)
    at = np.flatnonzero(said)
    return [pool[at[i]] for i in choose_designed(rows.take(at), len(pool))]


def _point(
    family: str, size: str, small: Operator, large: Operator, *, layouts: bool = False, half: bool = True
) -> Point:
    last = small.with_layout(CHANNELS_LAST) if layouts else None
    return Point(
        family=family,
        size=size,
        base=small,
        bfloat16=_half(small) if half else None,
        channels_last=last,
        both=_half(last) if last is not None and half else None,
        batch=large,
        batch_bfloat16=_half(large) if half else None,
    )


def _half(operator: Operator) -> Operator:
    """Return the call on bfloat16; statistics of a batch normalisation stay float32, as they do in training."""
    types = [BFLOAT16 if each == "float" else each for each in operator.types]
    types = [f"{each}:{BFLOAT16}" if each == "TensorList" else each for each in types]
    if "batch_norm" in operator.name:
        types = [BFLOAT16 if len(dims) > 1 else kind for dims, kind in zip(operator.dims, operator.types, strict=True)]
    return operator.with_types(types)


def _products() -> Iterator[Point]:
    for m, k, n in ((32, 64, 64), (32, 256, 256), (64, 512, 512), (128, 128, 512), (256, 256, 256), (256, 512, 1024),
                    (512, 128, 128), (512, 768, 768), (1024, 256, 256), (256, 1024, 1024)):  # fmt: skip
        size = f"{m} x {k} x {n}"
        yield _point("mm", size, *(call("mm", [rows, k], [k, n]) for rows in (m, 2 * m)))
        if m <= 256:
            yield _point("addmm", size, *(call("addmm", [n], [rows, k], [k, n], "1", "1") for rows in (m, 2 * m)))
    for b, m, k, n in ((16, 64, 32, 64), (16, 64, 64, 32), (32, 128, 64, 128), (32, 128, 128, 64), (8, 256, 64, 256)):
        size = f"{b} x {m} x {k} x {n}"
        yield _point("bmm", size, *(call("bmm", [batch, m, k], [batch, k, n]) for batch in (b, 2 * b)))


def _convolutions() -> Iterator[Point]:
    """Yield keyed by channels: in, out, kernel, stride, height and width, groups."""
    for c, o, kernel, stride, side, groups in (
        (3, 32, 3, 1, 32, 1),
        (16, 16, 3, 1, 32, 1),
        (32, 32, 3, 1, 32, 1),
        (32, 64, 3, 2, 32, 1),
        (64, 64, 3, 1, 16, 1),
        (128, 128, 3, 1, 8, 1),
        (256, 256, 3, 1, 8, 1),
        (64, 256, 1, 1, 16, 1),
        (256, 64, 1, 1, 16, 1),
        (48, 48, 3, 1, 16, 48),
        (192, 192, 3, 1, 16, 192),
    ):
        out, pad = side // stride, f"[{kernel // 2}, {kernel // 2}]"
        weight, steps = [o, c // groups, kernel, kernel], f"[{stride}, {stride}]"
        pairs = [([batch, c, side, side], [batch, o, out, out]) for batch in (8, 16)]
        forward = (call("mkldnn_convolution", x, weight, None, pad, steps, "[1, 1]", str(groups)) for x, _ in pairs)
        rest = (steps, pad, "[1, 1]", "False", "[0, 0]", str(groups), "[True, True, False]")
        backward = (call("convolution_backward", y, x, weight, None, *rest) for x, y in pairs)
        size = f"{c} to {o}, {kernel} x {kernel}{', depthwise' if groups > 1 else ''}, {side} x {side}"
        yield _point("convolution", size, *forward, layouts=True)
        yield _point("convolution backward", size, *backward, layouts=True)


def _norms() -> Iterator[Point]:
    for c, side in ((16, 32), (64, 16), (128, 16), (256, 8)):
        images = [[batch, c, side, side] for batch in (8, 16)]
        size, rest = f"8 x {c} x {side} x {side}", ([c], [c], [c], [c])
        forward = (call("native_batch_norm", x, *rest, "True", "0.1", "1e-05") for x in images)
        yield _point("batch norm", size, *forward, layouts=True)
        last = ("True", "1e-05", "[True, True, True]")
        backward = (call("native_batch_norm_backward", x, x, [c], *rest, *last) for x in images)
        yield _point("batch norm backward", size, *backward, layouts=True)
        if side > 8:
            window = ("[2, 2]", "[2, 2]", "[0, 0]", "[1, 1]", "False")
            forward = (call("max_pool2d_with_indices", x, *window) for x in images)
            yield _point("max pool", size, *forward, layouts=True)
            pairs = [(x, [*x[:2], side // 2, side // 2]) for x in images]
            backward = (call("max_pool2d_with_indices_backward", y, x, *window, ("long int", y)) for x, y in pairs)
            yield _point("max pool backward", size, *backward, layouts=True)
        yield _point("mean", size, *(call("mean", x, "[-1, -2]", "True", None) for x in images), layouts=True)
    for rows, width in ((128, 128), (512, 256), (512, 768)):
        shape, w, mask = f"[{width}]", [width], "[True, True, True]"
        forward = (call("native_layer_norm", [m, width], shape, w, w, "1e-05") for m in (rows, 2 * rows))
        backward = (
            call("native_layer_norm_backward", [m, width], [m, width], shape, [m, 1], [m, 1], w, w, mask)
            for m in (rows, 2 * rows)
        )
        yield _point("layer norm", f"{rows} x {width}", *forward)
        yield _point("layer norm backward", f"{rows} x {width}", *backward)


def _recurrent() -> Iterator[Point]:
    for hidden, steps in ((64, 20), (128, 20), (256, 20), (512, 10)):
        w, b, rest = [4 * hidden, hidden], [4 * hidden], ("2", str(hidden), "2", "True")
        last = ("True", "False", "[]", "False", ("unsigned char", [16]))
        pairs = [([steps, batch, hidden], [batch, hidden]) for batch in (8, 16)]
        forward = (
            call("mkldnn_rnn_layer", x, w, w, b, b, h, h, "False", "[]", *rest, "False", "False", "True")
            for x, h in pairs
        )
        backward = (
            call("mkldnn_rnn_layer_backward", x, w, w, b, b, h, h, x, h, h, x, None, None, "False", *rest, *last)
            for x, h in pairs
        )
        yield _point("LSTM layer", f"{steps} x 8 x {hidden}", *forward)
        yield _point("LSTM layer backward", f"{steps} x 8 x {hidden}", *backward)


def _attention() -> Iterator[Point]:
    for batch, heads, length, width in ((2, 4, 64, 32), (2, 4, 128, 64), (1, 8, 256, 64)):
        name, last = "_scaled_dot_product_flash_attention_for_cpu", ("0.", "False")
        pairs = [([b, heads, length, width], [b, length, heads]) for b in (batch, 2 * batch)]
        forward = (call(name, q, q, q, *last) for q, _ in pairs)
        backward = (call(f"{name}_backward", q, q, q, q, q, sums, *last) for q, sums in pairs)
        size = f"{batch} x {heads} x {length} x {width}"
        yield _point("attention", size, *forward)
        yield _point("attention backward", size, *backward)
    for rows, width in ((1024, 64), (2048, 128), (256, 1000), (128, 10_000)):
        name, size = "_softmax" if width < 1000 else "_log_softmax", f"{rows} x {width}"
        yield _point(name.strip("_"), size, *(call(name, [m, width], "-1", "False") for m in (rows, 2 * rows)))
        backward = (call(f"{name}_backward_data", [m, width], [m, width], "-1", "6") for m in (rows, 2 * rows))
        yield _point(f"{name.strip('_')} backward", size, *backward)


def _pointwise() -> Iterator[Point]:
    for rows, width in _SIZES:
        size = f"{rows} x {width}"
        calls: dict[str, list[Operator]] = {}
        for m in (rows, 2 * rows):
            x = [m, width]
            for each in (
                call("add", x, x, "1"),
                call("add_", x, x, "1"),
                call("mul", x, x),
                call("relu", x),
                call("clamp_min_", x, "0"),
                call("threshold_backward", x, x, "0"),
                call("gelu", x, None),
                call("gelu_backward", x, x, None),
                call("tanh", x),
                call("sigmoid", x),
                call("sigmoid_backward", x, x),
                call("bernoulli_", x, "0.9", None),
                call("native_dropout", x, "0.1", "True"),
                call("sum", x, "[0]", "True", None),
                call("fill_", x, "0"),
            ):
                calls.setdefault(each.name.removeprefix("aten::"), []).append(each)
        for name, (small, large) in calls.items():
            yield _point(name, size, small, large)


def _moving() -> Iterator[Point]:
    for rows, width in _SIZES:
        size = f"{rows} x {width}"
        for kind, code, word in (("float", "15", "to bfloat16"), (BFLOAT16, "6", "to float32")):
            casts = [
                call("_to_copy", (kind, [m, width]), code, None, None, None, "False", None) for m in (rows, 2 * rows)
            ]
            yield _point(f"cast {word}", size, *casts, half=False)
        yield _point("copy", size, *(call("copy_", [m, width], [m, width], "False") for m in (rows, 2 * rows)))
        yield _point("cat", size, *(call("cat", [[m, width], [m, width]], "1") for m in (rows, 2 * rows)))
    for words, width in ((1000, 128), (10_000, 512)):
        size = f"{words} x {width}, 512 words"
        forward = [call("embedding", [words, width], ("long int", [m]), "-1", "False", "False") for m in (512, 1024)]
        backward = [
            call("embedding_dense_backward", [m, width], ("long int", [m]), str(words), "-1", "False")
            for m in (512, 1024)
        ]
        yield _point("embedding", size, *forward)
        yield _point("embedding backward", size, *backward)


def main() -> int:
    found = ChosenCalls(grid=tuple(grid()), designed=tuple(designed()))
    write_bytes(CALLS, msgspec.json.encode(found), compress=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
