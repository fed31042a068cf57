"""Networks of NAS-Bench-201 from their cell string: operators, FLOPs, bytes and aggregate arithmetic intensity.

Dong and Yang, NAS-Bench-201 (ICLR 2020), section 2: a cell has four nodes and an edge from every node to every later
one; each edge is one of five operations, a node is the sum of its edges. The network is a 3 x 3 convolution, three
stages of five cells with 16, 32 and 64 channels on 32 x 32, 16 x 16 and 8 x 8 pixels, a residual block with stride 2
between stages, global average pooling and a linear layer. A convolution edge is ReLU, convolution, batch normalisation.

    |nor_conv_3x3~0|+|nor_conv_3x3~0|skip_connect~1|+|avg_pool_3x3~0|none~1|nor_conv_1x1~2|
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import Phase
from foretrace.model.draft import OperatorGraphDraft
from foretrace.model.operator_graph import OperatorGraph, Role
from foretrace.model.texts import TensorType, text_of

Float64 = npt.NDArray[np.float64]

OPERATIONS = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")
CHANNELS = (16, 32, 64)
PIXELS = (32, 16, 8)  # height and width of each stage
CELLS = 5  # per stage
CLASSES = 10
_FLOAT = 4
_EDGE = re.compile(r"([a-z0-9_]+)~(\d+)")

Cell = tuple[tuple[str, ...], ...]  # per node after the first: operation of the edge from each earlier node


def parse(text: str) -> Cell:
    """The cell of an architecture string. Raises ForetraceError that says which part is wrong."""
    nodes = text.strip().split("+")
    if len(nodes) != 3:
        raise ForetraceError(f"cell {text!r} has {len(nodes)} nodes joined by '+'; a NAS-Bench-201 cell has 3.")
    cell = []
    for at, node in enumerate(nodes, start=1):
        edges = [each for each in node.split("|") if each]
        if len(edges) != at:
            raise ForetraceError(
                f"cell {text!r}: node {at} has {len(edges)} edges; it needs {at}, one per earlier node."
            )
        operations: dict[int, str] = {}
        for edge in edges:
            found = _EDGE.fullmatch(edge)
            if found is None:
                raise ForetraceError(f"cell {text!r}: {edge!r} is no edge; write operation~node, e.g. nor_conv_3x3~0.")
            operation, source = found.group(1), int(found.group(2))
            if operation not in OPERATIONS:
                raise ForetraceError(f"cell {text!r}: {operation!r} is none of {', '.join(OPERATIONS)}.")
            if source >= at or source in operations:
                raise ForetraceError(f"cell {text!r}: node {at} needs one edge from each of the nodes 0 to {at - 1}.")
            operations[source] = operation
        cell.append(tuple(operations[i] for i in range(at)))
    return tuple(cell)


@dataclass(frozen=True, kw_only=True, eq=False)
class Space:
    """Architectures as columns (n rows); work is of one image."""

    counts: npt.NDArray[np.int64]  # n x 5: edges of each of OPERATIONS
    flops: Float64  # of convolutions and the linear layer, 2 per multiply-add
    parameters: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.flops)

    def nbytes(self, batch: int = 1) -> Float64:
        """Bytes that convolutions and the linear layer read and write for so many images, everything else fused in."""
        return _matrix_bytes(self.counts, batch)

    def intensity(self, batch: int = 1) -> Float64:
        """Aggregate arithmetic intensity: FLOPs per byte of convolutions and linear layer together."""
        return np.asarray(self.flops * batch / self.nbytes(batch), dtype=np.float64)

    def kernels(self) -> Float64:
        """Operators that one forward pass launches."""
        none, skip, one, three, pool = self.counts.T
        per_cell = none + 3 * (one + three) + pool + 3  # three sums join the edges
        del skip  # an identity is no operator
        return np.asarray(len(CHANNELS) * CELLS * per_cell + 2 + 2 * 9 + 4, dtype=np.float64)


def space(archs: Sequence[str]) -> Space:
    """Work of these architectures. Raises ForetraceError as `parse` does."""
    counts = np.zeros((len(archs), len(OPERATIONS)), dtype=np.int64)
    number = {name: i for i, name in enumerate(OPERATIONS)}
    for row, text in enumerate(archs):
        for node in parse(text):
            for operation in node:
                counts[row, number[operation]] += 1
    one, three = counts[:, OPERATIONS.index("nor_conv_1x1")], counts[:, OPERATIONS.index("nor_conv_3x3")]
    flops = np.full(len(archs), sum(_conv_flops(*layer) for layer in _FIXED) + 2.0 * CHANNELS[-1] * CLASSES)
    parameters = np.full(len(archs), sum(_conv_parameters(*layer[:3]) for layer in _FIXED), dtype=np.int64)
    parameters -= sum(2 * c for c in CHANNELS[1:])  # the shortcuts have no normalisation
    parameters += 2 * CHANNELS[-1] + (CHANNELS[-1] + 1) * CLASSES
    for c, side in zip(CHANNELS, PIXELS, strict=True):
        flops += CELLS * (one * _conv_flops(c, c, 1, side, 1) + three * _conv_flops(c, c, 3, side, 1))
        parameters += CELLS * (one * _conv_parameters(c, c, 1) + three * _conv_parameters(c, c, 3))
    return Space(counts=counts, flops=flops, parameters=parameters)


# (channels in, channels out, kernel, pixels of the side of the result, stride) of what every network has.
_FIXED = [(3, CHANNELS[0], 3, PIXELS[0], 1)] + [
    layer
    for a, b, side in zip(CHANNELS, CHANNELS[1:], PIXELS[1:], strict=False)
    for layer in ((a, b, 3, side, 2), (b, b, 3, side, 1), (a, b, 1, side, 1))
]


def _conv_flops(c_in: int, c_out: int, kernel: int, side: int, stride: int) -> float:
    del stride  # `side` is that of the result
    return 2.0 * c_in * c_out * kernel**2 * side**2


def _conv_parameters(c_in: int, c_out: int, kernel: int) -> int:
    return c_in * c_out * kernel**2 + 2 * c_out  # the normalisation has a scale and a shift per channel


def _conv_bytes(c_in: int, c_out: int, kernel: int, side: int, stride: int, batch: int) -> float:
    images = batch * (c_in * (side * stride) ** 2 + c_out * side**2)
    return float(_FLOAT * (images + c_in * c_out * kernel**2))


def _matrix_bytes(counts: npt.NDArray[np.int64], batch: int) -> Float64:
    one, three = counts[:, OPERATIONS.index("nor_conv_1x1")], counts[:, OPERATIONS.index("nor_conv_3x3")]
    head = _FLOAT * (batch * (CHANNELS[-1] + CLASSES) + CHANNELS[-1] * CLASSES + CLASSES)
    total = np.full(len(counts), head + sum(_conv_bytes(*layer, batch) for layer in _FIXED))
    for c, side in zip(CHANNELS, PIXELS, strict=True):
        for edges, kernel in ((one, 1), (three, 3)):
            total += CELLS * edges * _conv_bytes(c, c, kernel, side, 1, batch)
    return total


def operator_graph(arch: str, batch: int = 1) -> OperatorGraph:
    """One forward pass of a network, operator by operator, in float32. Raises ForetraceError as `parse` does."""
    cell = parse(arch)
    if batch < 1:
        raise ForetraceError(f"a batch of {batch} has no images; give 1 or more.")
    draft = _Network(batch)
    x = draft.draft.tensor(TensorType(dims=(batch, 3, PIXELS[0], PIXELS[0])), role=Role.INPUT, name="images")
    x = draft.normalised(draft.convolution(x, CHANNELS[0], 3, layer="stem"), layer="stem")
    for stage, channels in enumerate(CHANNELS):
        if stage:
            x = draft.reduction(x, channels, layer=f"reduction.{stage}")
        for i in range(CELLS):
            x = draft.cell(x, cell, channels, layer=f"stage{stage}.{i}")
    draft.head(x)
    return draft.draft.finish(arch, batch=batch, source="NAS-Bench-201 cell")


class _Network:
    """Writes the operators of a network."""

    def __init__(self, batch: int) -> None:
        self.draft = OperatorGraphDraft()
        self.batch = batch

    def convolution(self, x: int, channels: int, kernel: int, *, layer: str, stride: int = 1) -> int:
        """A convolution without bias that keeps the size but for its stride."""
        dims = self.draft.value(x).dims
        weight = self.draft.tensor(TensorType(dims=(channels, dims[1], kernel, kernel)), role=Role.WEIGHT, name=layer)
        side, pad = dims[2] // stride, kernel // 2
        sizes = [list(dims), list(self.draft.value(weight).dims), [], [], [], [], [], [], []]
        steps, padding = f"[{stride}, {stride}]", f"[{pad}, {pad}]"
        concrete = ["", "", "", steps, padding, "[1, 1]", "False", "[0, 0]", "1"]
        kinds = ["float32", "float32", "", *["ScalarList"] * 3, "Scalar", "ScalarList", "Scalar"]
        out = self.draft.tensor(TensorType(dims=(self.batch, channels, side, side)))
        text = text_of(sizes, kinds, concrete)
        self._node("aten::convolution", [x, weight], out, layer, text)
        return out

    def normalised(self, x: int, *, layer: str) -> int:
        """Batch normalisation as at inference."""
        channels = self.draft.value(x).dims[1]
        roles = {"weight": Role.WEIGHT, "bias": Role.WEIGHT, "running_mean": Role.BUFFER, "running_var": Role.BUFFER}
        state = [
            self.draft.tensor(TensorType(dims=(channels,)), role=role, name=f"{layer}.{name}")
            for name, role in roles.items()
        ]
        return self._alike("aten::native_batch_norm", [x, *state], layer)

    def edge(self, x: int, operation: str, channels: int, *, layer: str) -> int:
        """The result of one edge of a cell."""
        if operation == "skip_connect":
            return x
        if operation == "none":
            return self._alike("aten::mul", [x], layer)
        if operation == "avg_pool_3x3":
            return self._alike("aten::avg_pool2d", [x], layer)
        return self.block(x, channels, 3 if operation == "nor_conv_3x3" else 1, layer=layer)

    def block(self, x: int, channels: int, kernel: int, *, layer: str, stride: int = 1) -> int:
        """ReLU, convolution, batch normalisation."""
        x = self._alike("aten::relu", [x], layer)
        return self.normalised(self.convolution(x, channels, kernel, layer=layer, stride=stride), layer=layer)

    def cell(self, x: int, cell: Cell, channels: int, *, layer: str) -> int:
        """One cell; every node is the sum of its edges."""
        nodes = [x]
        for at, edges in enumerate(cell, start=1):
            found = [
                self.edge(nodes[i], operation, channels, layer=f"{layer}.{i}-{at}") for i, operation in enumerate(edges)
            ]
            total = found[0]
            for other in found[1:]:
                total = self._alike("aten::add", [total, other], layer)
            nodes.append(total)
        return nodes[-1]

    def reduction(self, x: int, channels: int, *, layer: str) -> int:
        """The residual block between stages: half the pixels, twice the channels."""
        first = self.block(x, channels, 3, layer=f"{layer}.a", stride=2)
        second = self.block(first, channels, 3, layer=f"{layer}.b")
        b, c, h, w = self.draft.value(x).dims
        pooled = self.draft.tensor(TensorType(dims=(b, c, h // 2, w // 2)))
        self._node("aten::avg_pool2d", [x], pooled, layer)
        shortcut = self.convolution(pooled, channels, 1, layer=f"{layer}.shortcut")
        return self._alike("aten::add", [shortcut, second], layer)

    def head(self, x: int) -> None:
        """Normalisation, ReLU, global pooling and the classifier."""
        x = self._alike("aten::relu", [self.normalised(x, layer="head")], "head")
        b, c = self.draft.value(x).dims[:2]
        pooled = self.draft.tensor(TensorType(dims=(b, c)))
        self._node("aten::mean", [x], pooled, "head")
        weight = self.draft.tensor(TensorType(dims=(c, CLASSES)), role=Role.WEIGHT, name="classifier.weight")
        bias = self.draft.tensor(TensorType(dims=(CLASSES,)), role=Role.WEIGHT, name="classifier.bias")
        self._node(
            "aten::addmm", [bias, pooled, weight], self.draft.tensor(TensorType(dims=(b, CLASSES))), "classifier"
        )

    def _alike(self, op: str, inputs: list[int], layer: str) -> int:
        out = self.draft.tensor(TensorType(dims=self.draft.value(inputs[0]).dims))
        self._node(op, inputs, out, layer)
        return out

    def _node(self, op: str, inputs: list[int], output: int, layer: str, text: str = "") -> None:
        self.draft.node(op, inputs, [output], text=text, phase=Phase.FORWARD, layer=layer)
