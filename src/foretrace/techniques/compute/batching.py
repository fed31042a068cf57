"""Which inputs of an operator count samples, and the same call on a batch of another size.

The first dimension of a batch counts its samples. From there samples spread over dimensions that are the batch or a
multiple of it (batch x sequence, batch x heads), in another place where layers want the sequence first. Tensors shaped
like a parameter, and sums over the samples such as weight gradients, do not grow. Where sizes alone leave several
readings (16 channels, 16 samples), the position of the argument and the shapes of the parameters decide.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from foretrace.cost.operators.operator import Operator
from foretrace.graph.taskgraph import Phase, TaskGraph

Dims = list[int]

# Operators whose first dimension of the first input is what a module was called with, in most models the batch.
_TOLD_BY = (
    "aten::linear", "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::embedding", "aten::batch_norm",
    "aten::layer_norm", "aten::native_layer_norm", "aten::native_batch_norm", "aten::convolution", "aten::dropout",
    "aten::group_norm", "aten::relu", "aten::addmm",
)  # fmt: skip
# Recurrent layers: their initial state is [layers, batch, hidden], whichever way their input lies.
_STATE_OF = {"aten::lstm": 1, "aten::gru": 1, "aten::rnn_tanh": 1, "aten::rnn_relu": 1}
#: Operators that hand their work on to others and do none of their own, whatever their inputs.
HAND_ON = frozenset((
    "aten::linear", "aten::matmul", "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::convolution",
    "aten::_convolution", "aten::lstm", "aten::gru", "aten::reshape", "aten::contiguous", "aten::clone",
    "aten::to", "aten::_to_copy", "aten::view", "aten::transpose", "aten::permute", "aten::t", "aten::expand",
    "aten::unflatten", "aten::flatten", "aten::squeeze", "aten::unsqueeze", "aten::select", "aten::slice",
    "aten::as_strided", "aten::detach", "aten::dropout", "aten::embedding", "aten::feature_dropout",
    "aten::cross_entropy_loss", "aten::nll_loss", "aten::nll_loss_nd", "aten::layer_norm", "aten::batch_norm",
    "aten::_batch_norm_impl_index", "aten::group_norm", "aten::instance_norm", "aten::softmax",
    "aten::log_softmax", "aten::_safe_softmax", "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_attention_math", "aten::max_pool2d", "aten::adaptive_avg_pool2d", "aten::einsum",
    "aten::unbind", "aten::chunk", "aten::split", "aten::narrow", "aten::expand_as", "aten::view_as",
    "aten::reshape_as", "aten::binary_cross_entropy_with_logits", "aten::ones_like", "aten::zeros_like",
    "aten::empty_like", "aten::item",
))  # fmt: skip
# The input at this place is a table, read or written in rows; it is no batch, whatever its size.
_TABLE = {
    "aten::embedding": 0, "aten::_embedding_bag": 0, "aten::_embedding_bag_forward_only": 0, "aten::conv1d": 1,
    "aten::conv2d": 1, "aten::conv3d": 1, "aten::convolution": 1, "aten::_convolution": 1, "aten::linear": 1,
    "aten::mkldnn_convolution": 1, "aten::cudnn_convolution": 1, "aten::miopen_convolution": 1,
    "aten::convolution_backward": 2, "aten::_slow_conv2d_forward": 1, "aten::_slow_conv2d_backward": 2,
    "aten::_conv_depthwise2d": 1, "aten::conv_transpose2d": 1, "aten::thnn_conv2d": 1,
}  # fmt: skip
_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::_addmm_activation": 1, "aten::mv": 0}  # place of the left operand
# Layers of oneDNN over a whole sequence: input, two weights, two biases, then states and what depends on them.
_TIME_FIRST = frozenset(("aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"))
_FIRST_STATE = 5
# A size that the operator makes is among its arguments.
_SIZED = frozenset((
    "aten::slice_backward", "aten::select_backward", "aten::diagonal_backward", "aten::unfold_backward",
    "aten::zeros", "aten::ones", "aten::full", "aten::new_zeros", "aten::new_ones", "aten::new_full",
    "aten::value_selecting_reduction_backward", "aten::rand", "aten::randn",
))  # fmt: skip


def recorded_size(graph: TaskGraph) -> int:
    """Return samples of a batch: told to the recorder, of the loader that is read, or as inputs of layers show; 0 if
    unknown.

    Without a loader the initial state of a recurrent layer tells, or the leading dimension that layers of the forward
    pass are called with most often (parameters apart).
    """
    told = int(graph.info.recording.get("options", {}).get("samples") or 0)
    if told:
        return told
    micro = micro_batches(graph)
    loaders = [each for each in graph.info.recording.get("loaders", []) if each.get("batch_size")]
    if loaders:
        return int(max(loaders, key=lambda each: each.get("batches", 0))["batch_size"])
    fixed = parameter_shapes(graph)
    rows = np.flatnonzero((graph.phase == Phase.FORWARD) & (graph.op >= 0) & (graph.shape >= 0) & ~graph.gone)
    calls = Counter(zip(graph.op[rows].tolist(), graph.shape[rows].tolist(), strict=True))
    called = [(graph.names[op], Operator("", graph.shapes[shape]).dims, count) for (op, shape), count in calls.items()]
    flattened = _flattened(dims for _, dims, _ in called)
    votes: Counter[int] = Counter()
    for name, dims, count in called:
        if name not in _TOLD_BY and name not in _STATE_OF:
            continue
        if name in _STATE_OF:
            state = dims[_STATE_OF[name]]
            state = state[0] if state and isinstance(state[0], list) else state
            if len(state) == 3:
                return int(state[1]) * micro
            continue
        place = 1 if name in ("aten::embedding", "aten::addmm") else 0
        given = dims[place] if place < len(dims) else []
        if given and isinstance(given[0], int) and tuple(given) not in fixed:
            samples = flattened.get(tuple(given), given[0]) if name == "aten::addmm" else given[0]
            votes[samples] += count if len(given) > 1 else 0
    several = Counter({n: count for n, count in votes.items() if n > 1})
    return (several or votes).most_common(1)[0][0] * micro if votes else 0


def _flattened(inputs: Iterable[list[Any]]) -> dict[tuple[int, ...], int]:
    """Return the leading dimension of tensors of more than two by the shape of the matrix that products make of them:
    [samples, words, width] is multiplied as [samples x words, width].
    """
    found: dict[tuple[int, ...], int] = {}
    for dims in inputs:
        for each in dims:
            if isinstance(each, list) and len(each) > 2 and all(isinstance(size, int) for size in each):
                found.setdefault((prod(each[:-1]), each[-1]), each[0])
    return found


def micro_batches(graph: TaskGraph) -> int:
    """Return parts that a batch is cut into, as far as predictions did it."""
    return int(graph.info.recording.get("micro_batches", 1))


def with_facts(graph: TaskGraph, **facts: Any) -> TaskGraph:
    """Return the graph with these facts in the place of recorded ones."""
    return replace(graph, info=replace(graph.info, recording={**graph.info.recording, **facts}))


def parameter_shapes(graph: TaskGraph) -> frozenset[tuple[int, ...]]:
    """Return shapes of the recorded parameters; matrices also transposed."""
    shapes = {tuple(map(int, each["shape"])) for each in graph.info.recording.get("parameters", [])}
    return frozenset(shapes | {shape[::-1] for shape in shapes if len(shape) == 2})


@dataclass(frozen=True, kw_only=True)
class Resize:
    """Turns calls on batches of `before` samples into calls on `after` samples."""

    before: int
    after: int
    fixed: frozenset[tuple[int, ...]] = field(default_factory=frozenset)  # shapes of parameters

    @property
    def factor(self) -> float:
        """New size relative to the old one."""
        return self.after / self.before

    def twin(self, operator: Operator) -> Operator | None:
        """Return the same call on the other batch; None where no input counts samples."""
        dims = operator.dims
        if operator.name in _PRODUCTS:
            new = self._product(dims, _PRODUCTS[operator.name])
        elif operator.name in _TIME_FIRST:
            new = self._time_first(dims)
        else:
            new = self._aligned(dims, _TABLE.get(operator.name, -1))
        concrete = operator.concrete
        if operator.name in _SIZED:
            concrete = [self._size(text) for text in concrete]
        if new == dims and concrete == operator.concrete:
            return None
        return Operator.of(operator.name, new, operator.types, concrete, operator.layout)

    def _time_first(self, dims: list[Any]) -> list[Any]:
        """Return sizes with the other batch: sequences are [time, batch, channels] and states [batch, channels],
        whatever else has the batch's size.
        """
        new = list(dims)
        for i, each in enumerate(dims):
            if tuple(each) in self.fixed or each[:1] == [] or not isinstance(each[0], int):
                continue
            if len(each) == 3 and each[1] == self.before:
                new[i] = [each[0], self.after, each[2]]
            elif len(each) == 2 and each[0] == self.before and i >= _FIRST_STATE:
                new[i] = [self.after, each[1]]
        return new

    def _product(self, dims: list[Any], left: int) -> list[Any]:
        """Return rows grow where the right operand is a weight; the inner dimension where the product is a weight
        gradient.
        """
        a, b = (dims[left], dims[left + 1]) if len(dims) > left + 1 else ([], [])
        if len(a) != 2 or not b:
            return dims
        rows, inner, columns = a[0], a[1], b[-1] if len(b) > 1 else 1
        weight, gradient = tuple(b) in self.fixed, (rows, columns) in self.fixed
        choices = [name for name, n in (("rows", rows), ("inner", inner), ("columns", columns)) if self._counts(n)]
        if gradient and not weight and "inner" in choices:
            chosen = "inner"
        elif tuple(a) in self.fixed and not weight and "columns" in choices:
            chosen = "columns"
        elif choices:
            chosen = choices[0]
        else:
            return dims
        new = list(dims)
        if chosen == "rows":
            new[left] = [self._grown(rows), inner]
            if left and dims[0] and dims[0][0] == rows and len(dims[0]) == 2:  # a sum of products
                new[0] = [self._grown(rows), *dims[0][1:]]
        elif chosen == "inner":
            new[left], new[left + 1] = [rows, self._grown(inner)], [self._grown(b[0]), *b[1:]]
        elif len(b) > 1:
            new[left + 1] = [b[0], self._grown(columns)]
        return new

    def _aligned(self, dims: list[Any], table: int) -> list[Any]:
        """Return the largest input that is no parameter tells where samples are counted; the others follow it."""
        tensors = [
            each
            for i, entry in enumerate(dims)
            if i != table
            for each in (entry if entry and isinstance(entry[0], list) else [entry])
            if each and tuple(each) not in self.fixed
        ]
        if not tensors:
            return dims
        largest = max(tensors, key=prod)
        place = self._place(largest)
        if place < 0:
            return dims

        def follow(each: Dims) -> Dims:
            if not each or tuple(each) in self.fixed:
                return each
            mine = _same_place(each, largest, place)
            mine = self._place(each) if mine < 0 and not _broadcast(each, largest) else mine
            return each if mine < 0 else [*each[:mine], self._grown(each[mine]), *each[mine + 1 :]]

        return [
            entry
            if i == table
            else [follow(each) for each in entry]
            if entry and isinstance(entry[0], list)
            else follow(entry)
            for i, entry in enumerate(dims)
        ]

    def _place(self, dims: Dims) -> int:
        """Return which dimension counts samples: first, or second behind a sequence; a multiple in front; −1
        if none.
        """
        exact = [i for i, n in enumerate(dims) if n == self.before]
        multiple = [i for i, n in enumerate(dims) if self._counts(n)]
        if len(dims) <= 2:
            return 0 if 0 in multiple else -1
        if exact and exact[0] <= 1:
            return exact[0]
        if 0 in multiple:
            return 0
        return (exact or multiple or [-1])[0]

    def _counts(self, size: int) -> bool:
        return size > 0 and size % self.before == 0

    def _grown(self, size: int) -> int:
        return size * self.after // self.before

    def _size(self, text: str) -> str:
        """Return a list of sizes given as text."""
        try:
            sizes = json.loads(text)
        except ValueError:
            return text
        if not isinstance(sizes, list) or not sizes or not all(isinstance(n, int) for n in sizes):
            return text
        place = -1 if tuple(sizes) in self.fixed else self._place(sizes)
        return text if place < 0 else json.dumps([*sizes[:place], self._grown(sizes[place]), *sizes[place + 1 :]])


def _same_place(dims: Dims, largest: Dims, place: int) -> int:
    """Return which dimension of a smaller input is dimension `place` of the largest one; −1 if there is none."""
    for mine in (place - len(largest) + len(dims), place):  # as broadcasting lines them up, or from the front
        if 0 <= mine < len(dims) and dims[mine] == largest[place]:
            return mine
    return -1


def _broadcast(dims: Dims, largest: Dims) -> bool:
    """Return whether an input is spread over the largest one, which then has the samples alone."""
    ends = zip(reversed(dims), reversed(largest), strict=False)
    return len(dims) <= len(largest) and all(mine in (1, theirs) for mine, theirs in ends)
