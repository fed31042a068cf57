"""What autograd saves for the backward pass, read off the operators of a recorded forward pass.

A recording does not show saved tensors. Which operand or result an operator saves is PyTorch's table of derivatives
(`derivatives.yaml`); their sizes follow from the recorded inputs. Two things are inferred: an operand whose size is
that of a parameter is one, and an operand of the size that was last produced is that very tensor, so that it is saved
once where its producer (a ReLU) or another consumer saves it already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from foretrace.arrays import Int64
from foretrace.cost.operators.operator import Operator
from foretrace.graph.taskgraph import Phase, TaskGraph, TaskKind
from foretrace.graph.work import element_bytes

_CONVOLUTIONS = (
    "mkldnn_convolution", "cudnn_convolution", "cudnn_convolution_transpose", "miopen_convolution", "thnn_conv2d",
    "_slow_conv2d_forward", "slow_conv_dilated2d", "_conv_depthwise2d", "convolution_overrideable",
    "slow_conv3d_forward",
)  # fmt: skip
_NORMS = (
    "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit", "native_layer_norm",
    "native_group_norm",
)  # fmt: skip
_INPUT = (
    "gelu", "silu", "silu_", "elu", "leaky_relu", "hardtanh", "hardswish", "hardswish_", "softplus", "mish", "log",
    "log_sigmoid_forward", "_adaptive_avg_pool2d", "avg_pool2d", "pow", "sin", "cos", "abs", "clamp",
)  # fmt: skip
_RESULT = (
    "clamp_min", "clamp_min_", "sigmoid", "sigmoid_", "tanh", "tanh_", "exp", "sqrt", "rsqrt", "_softmax",
    "_log_softmax", "reciprocal",
)  # fmt: skip
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
)  # fmt: skip
# Saved variables per call, parameters and statistics among them: each passes a hook. One where nothing is said.
_VARIABLES = {
    **dict.fromkeys(_CONVOLUTIONS, 2),
    **dict.fromkeys(_NORMS, 6),
    "native_layer_norm": 5,
    **dict.fromkeys(_ATTENTION, 5),
    "mkldnn_rnn_layer": 11,
    "addmm": 2,
    "mm": 2,
    "bmm": 2,
    "nll_loss_forward": 4,
    "max_pool2d_with_indices": 2,
}
# Bytes per unit, step and sample: what oneDNN keeps of an LSTM in float32 (measured: 63.4).
_WORKSPACE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One tensor that lives from forward to backward because an operator saved it."""

    row: int  # task of the operator that saves it first
    use: int  # task of the backward pass that needs it, −1 if it shows none
    numel: int
    dtype: str  # as in a recording: "float", "long int", ...

    @property
    def nbytes(self) -> int:
        """Size in memory."""
        return self.numel * (element_bytes(self.dtype) or 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """Everything that the forward passes of a graph save."""

    tensors: tuple[Saved, ...]
    variables: int  # saved variables in all, small ones and parameters among them
    unsized: int  # calls that save a tensor whose size or type the recording does not tell
    last_forward: Int64  # per step of the graph: last host task of its forward pass, −1 if it has none


def find_saved(graph: TaskGraph) -> Savings:
    """Return saved tensors of every forward pass in the order of saving; those of a step in its own backward pass."""
    parameters = _parameters(graph)
    found: list[Saved] = []
    variables = unsized = 0
    calls = _calls(graph)
    last = np.full(max(graph.n_steps, int(graph.step.max(initial=0)) + 1), -1, dtype=np.int64)
    host = ~graph.on_device & ~graph.gone & ~np.isin(graph.kind, (TaskKind.MARK, TaskKind.JOIN))
    forward_rows = np.flatnonzero(host & (graph.phase == Phase.FORWARD) & (graph.step >= 0))
    last[graph.step[forward_rows]] = forward_rows
    for step in np.unique(graph.step[calls]).tolist():
        mine = calls[graph.step[calls] == step]
        tensors, seen, unknown = _of_step(graph, mine, parameters)
        variables += seen
        unsized += unknown
        backward = np.flatnonzero(
            (graph.step == step) & (graph.phase == Phase.BACKWARD) & ~graph.gone & (graph.on_device == _device(graph))
        )
        found += _with_uses(graph, tensors, backward)
    return Savings(tensors=tuple(found), variables=variables, unsized=unsized, last_forward=last)


def _device(graph: TaskGraph) -> bool:
    """Return whether the work of this graph is done by device tasks."""
    return bool(graph.on_device.any())


def _calls(graph: TaskGraph) -> Int64:
    """Return the forward operators, one task per call: of one cut into pieces (or kernels), the one that carries its
    work.
    """
    forward = (graph.phase == Phase.FORWARD) & (graph.op >= 0) & (graph.shape >= 0) & ~graph.gone & (graph.step >= 0)
    if not _device(graph):
        return np.flatnonzero(forward & (graph.nbytes >= 0))
    rows = np.flatnonzero((graph.phase == Phase.FORWARD) & (graph.kind == TaskKind.KERNEL) & ~graph.gone)
    columns = (graph.op, graph.shape, graph.step)
    same = np.all([np.diff(each[rows], prepend=-2) == 0 for each in columns], axis=0)
    rows = rows[~same]
    return np.asarray(rows[forward[rows]], dtype=np.int64)


def _of_step(graph: TaskGraph, calls: Int64, parameters: set[tuple[int, ...]]) -> tuple[list[Saved], int, int]:
    """Return saved tensors of the forward pass of one step, how many variables were saved in all, how many calls save a
    tensor of unknown size.
    """
    found: list[Saved] = []
    held: set[int] = set()  # sizes whose last produced tensor is saved already
    variables = unsized = 0
    dropout = False
    for row in calls.tolist():
        operator = Operator(graph.names[graph.op[row]], graph.shapes[graph.shape[row]])
        name = operator.name.removeprefix("aten::")
        if name in ("relu", "relu_") and _device(graph):  # on a processor, the operator inside it is recorded as well
            name = "clamp_min"
        if name in ("dropout", "bernoulli_"):
            dropout = True
            continue
        saves, whole = _known(_saves(name, operator, parameters, dropout=dropout))
        unsized += not whole
        if name in ("mul", "native_dropout"):
            dropout = False
        variables += (_VARIABLES.get(name, 1) if saves else 0) + (1 if name in ("_to_copy", "embedding") else 0)
        produced, before = _produced(name, operator), frozenset(held)
        for where, numel, dtype in saves:
            if where == "input":
                if numel in before:  # by an earlier call: two operands of one call are two tensors
                    continue
                held.add(numel)
            elif where == "result":
                produced = -1
                held.add(numel)
            found.append(Saved(row=row, use=-1, numel=numel, dtype=dtype))
        held.discard(produced)
    return found, variables, unsized


def _known(saves: Iterator[tuple[str, int, str]]) -> tuple[list[tuple[str, int, str]], bool]:
    """Return what is saved as far as the recorded inputs tell, and whether they tell it all: older profilers leave out
    values and types, and other versions of an operator take other inputs.
    """
    found: list[tuple[str, int, str]] = []
    try:
        found += saves
    except (IndexError, TypeError, ValueError):
        return found, False
    sized = [each for each in found if isinstance(each[1], int)]  # not of a list of tensors
    return sized, len(sized) == len(found)


def _saves(
    name: str, operator: Operator, parameters: set[tuple[int, ...]], *, dropout: bool
) -> Iterator[tuple[str, int, str]]:
    """Yield (input, result or other, elements, type) of every tensor that is no parameter and no statistic."""
    dims, types = operator.dims, operator.types
    first = prod(dims[0]) if dims and dims[0] and all(isinstance(each, int) for each in dims[0]) else 0
    if name == "clamp" and len(dims) > 3 and dims[3]:
        return  # inside hardtanh, which saves its own input
    if name in _CONVOLUTIONS or name in _NORMS or name in _INPUT:
        yield "input", first, types[0]
    elif name in _RESULT:
        yield "result", first, types[0]
    elif name in ("addmm", "_addmm_activation", "mm", "bmm", "baddbmm"):
        at = 1 if name in ("addmm", "_addmm_activation", "baddbmm") else 0
        for i in (at, at + 1):
            size = tuple(dims[i])
            if name in ("bmm", "baddbmm") or not (size in parameters or size[::-1] in parameters):
                yield "input", prod(size), types[i]
    elif name in ("mul", "div") and len(dims) > 1:
        second = prod(dims[1]) if dims[1] else 0
        if dropout and name == "mul":
            yield "other", second, types[1]  # the mask
        elif dims[1] and types[1] == types[0]:
            for i, numel in ((0, first), (1, second)):
                if tuple(dims[i]) not in parameters:
                    yield "input", numel, types[i]
    elif name in _ATTENTION:
        for i in range(3):
            yield "other", prod(dims[i]), types[i]  # views of one product, as a rule: stored one by one
        yield "result", first, types[0]
    elif name == "max_pool2d_with_indices":
        yield "input", first, types[0]
        yield "other", _pooled(operator), "long int"
    elif name == "native_dropout":
        yield "other", first, "bool"
    elif name == "embedding":
        yield "other", prod(dims[1]), types[1]
    elif name == "mkldnn_rnn_layer":
        steps, batch = dims[0][0], dims[0][1]
        units = dims[2][-1] if dims[2] else dims[0][2]
        yield "input", first, types[0]
        yield "other", steps * batch * units * _WORKSPACE, "unsigned char"
        yield "result", steps * batch * units, types[0]


def _produced(name: str, operator: Operator) -> int:
    """Return elements of the result, where it is a new tensor whose size the inputs tell; −1 else."""
    dims = operator.dims
    try:
        if name in ("addmm", "_addmm_activation"):
            return int(dims[1][0] * dims[2][1])
        if name == "mm":
            return int(dims[0][0] * dims[1][1])
        if name in ("bmm", "baddbmm"):
            at = 1 if name == "baddbmm" else 0
            return int(dims[at][0] * dims[at][1] * dims[at + 1][2])
        if name in _CONVOLUTIONS:
            return _convolved(operator)
        if name == "max_pool2d_with_indices":
            return _pooled(operator)
        if name == "embedding":
            return int(prod(dims[1]) * dims[0][1])
        if name in (*_NORMS, *_INPUT, "mul", "mul_", "div", "add", "add_", "sub", "native_dropout", "clone"):
            return int(prod(dims[0]))
    except (IndexError, TypeError, ValueError):
        pass
    return -1


def _convolved(operator: Operator) -> int:
    from foretrace.graph.work import operator_work

    _, flops = operator_work(operator.name, operator.text)
    return int(flops / max(2 * prod(operator.dims[1][1:]), 1) + 0.5)


def _pooled(operator: Operator) -> int:
    """Return elements of a pooled tensor. Raises IndexError, TypeError or ValueError where its settings were not
    recorded.
    """
    x = operator.dims[0]
    lists = [[int(part) for part in text.strip("[]").split(",") if part.strip()] for text in operator.concrete[1:5]]
    kernel, stride, padding, dilation = (each or [d] for each, d in zip(lists, (1, 0, 0, 1), strict=True))
    out = prod(x[:-2])
    for axis in range(2):
        k, s, p, d = (each[axis % len(each)] for each in (kernel, stride, padding, dilation))
        extent = x[-2 + axis] + 2 * p - d * (k - 1) - 1
        out *= (-(-extent // (s or k)) if operator.concrete[5] == "True" else extent // (s or k)) + 1
    return int(out)


def _parameters(graph: TaskGraph) -> set[tuple[int, ...]]:
    """Return sizes of the recorded parameters, where the recorder stored them."""
    return {tuple(int(n) for n in each["shape"]) for each in graph.info.recording.get("parameters", [])}


def _with_uses(graph: TaskGraph, tensors: list[Saved], backward: Int64) -> Iterator[Saved]:
    """Yield each tensor with the task of the backward pass that needs it: as far from its end, by time, as the saving
    task is from the beginning of the forward pass (the backward pass walks back through the forward pass).
    """
    if not len(backward) or not tensors:
        yield from tensors
        return
    rows = np.array([each.row for each in tensors])
    step = graph.step[rows[0]]
    forward = np.flatnonzero(
        (graph.step == step) & (graph.phase == Phase.FORWARD) & ~graph.gone & (graph.on_device == _device(graph))
    )
    spent = np.cumsum(graph.dur[forward]) - graph.dur[forward]
    share = spent[np.searchsorted(forward, rows)] / max(int(graph.dur[forward].sum()), 1)
    left = np.cumsum(graph.dur[backward][::-1])[::-1] / max(int(graph.dur[backward].sum()), 1)
    for each, part in zip(tensors, share.tolist(), strict=True):
        place = max(int((left >= part).sum()) - 1, 0)
        yield Saved(row=each.row, use=int(backward[place]), numel=each.numel, dtype=each.dtype)
