"""What eager PyTorch runs for a node of an operator graph: kernels, not the list that the file states.

The file's lists are its authors' model of a network. What a GPU runs follows from the operators' definitions, and
differs: views and slices cost nothing; a broadcast or scalar operand is not read like a whole tensor; non-contiguous
operands of a batched product are copied first; a backward pass reads what was saved (softmax, dropout, GELU, layer
norm), sums gradients of bias and of values that were used more than once, and starts at the loss. The rules below are
those of PyTorch's derivative formulas; no measured network was looked at for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from opgraph import ELEMENT, Graph, Node

FORWARD, BACKWARD = 0, 1
COPY = "addu"  # elementwise kernels that were never measured reach the bandwidth that this one does
_SHAPES_ONLY = ("size", "getattr", "dim", "eq", "ne", "gt", "lt", "finfo", "output")
_VIEWS = ("view", "permute", "transpose", "reshape", "expand", "to", "type", "float", "split", "unsqueeze", "getitem")
_NO_BIAS = ("lm_head", "switch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel of a pass."""

    op: str  # "BMM", "Linear" or a vector operator
    part: str  # of the summary table: BMM, Linear, VECln, VECsoftmax, VEC, MEM
    b: int = 1
    m: int = 1  # rows
    k: int = 0  # summed over; 0 for a vector operator
    n: int = 1  # columns, width of a row
    nbytes: float = 0.0
    backward: bool = False
    waits: bool = False  # the host needs the result before it can go on

    @property
    def flops(self) -> float:
        return 2.0 * self.b * self.m * self.k * self.n


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """Kernels of one node, and how many calls the host makes for it."""

    node: Node
    kernels: tuple[Kernel, ...]
    views: int = 0  # calls without a kernel, in the forward pass


def lower(graph: Graph) -> list[Lowered]:
    """Every node of the graph once; `graph.order` says how often they run."""
    by_name = {node.name: node for node in graph.nodes}
    switch = graph.model.startswith("switch")
    found = []
    for node in graph.nodes:
        kernels = list(_kernels(node, by_name, graph.train, switch))
        if graph.train:
            kernels += _summed_again(node, by_name)
        kernels = [kernel for kernel in kernels if kernel.k or kernel.nbytes > 0]
        views = int(not kernels and node.base in _VIEWS and len(node.output) > 1)
        found.append(Lowered(node=node, kernels=tuple(kernels), views=views))
    if graph.train:
        at = max(row for row, each in enumerate(found) if any(kernel.k for kernel in each.kernels))
        found[at] = replace(found[at], kernels=found[at].kernels + tuple(_loss(graph)))
    return found


def _vec(op: str, shape: tuple[int, ...], per_element: float, *, back: bool = False, waits: bool = False) -> Kernel:
    """A vector kernel over a tensor of this shape that moves `per_element` bytes for each of its elements."""
    width = shape[-1] if shape else 1
    rows = prod(shape) // max(width, 1)
    part = f"VEC{op}" if op in ("softmax", "ln") else "VEC"
    return Kernel(op=op, part=part, m=rows, n=width, nbytes=per_element * prod(shape), backward=back, waits=waits)


def _product(node: Node, b: int, m: int, k: int, n: int, op: str, train: bool) -> Iterator[Kernel]:
    yield Kernel(op=op, part=op, b=b, m=m, k=k, n=n, nbytes=float(ELEMENT * b * (m * k + k * n + m * n)))
    if train:
        for rows, inner, columns in ((m, n, k), (k, m, n)):
            nbytes = float(ELEMENT * b * (rows * inner + inner * columns + rows * columns))
            yield Kernel(op=op, part=op, b=b, m=rows, k=inner, n=columns, nbytes=nbytes, backward=True)


def _kernels(node: Node, by_name: dict[str, Node], train: bool, switch: bool) -> Iterator[Kernel]:
    shape, op = node.output, node.op
    full = [each for each in node.inputs if prod(each) == prod(shape) and prod(shape) > 1]
    stated = [each for each in node.forward if each.kind == "gemm"]
    if stated:
        yield from _matrix(node, by_name, train, switch)
    elif op == "VECadd":
        yield _vec("add", shape, ELEMENT * (1 + len(full)) + _rest(node))
    elif op in ("VECmul", "VECdiv", "VECpow"):
        name = op.removeprefix("VEC")
        yield _vec(name, shape, ELEMENT * (1 + len(full)) + _rest(node))
        if train:
            both = len(full) > 1 or len([each for each in node.inputs if prod(each) > 1]) > 1
            for _ in range(2 if both else 1):
                yield _vec("mul" if both else "mulu", shape, 12 if both else 8, back=True)
    elif op in ("VECmulu", "VECdivu"):
        yield _vec(op.removeprefix("VEC"), shape, 8)
        if train:
            yield _vec("mulu", shape, 8, back=True)
    elif op == "VECaddu":
        yield _vec("addu", shape, 8)
    elif op == "VECpowu":
        yield _vec("powu", shape, 8)
        if train:  # gradient x (exponent x power of one less)
            yield _vec("powu", shape, 8, back=True)
            yield _vec("mulu", shape, 8, back=True)
            yield _vec("mul", shape, 12, back=True)
    elif op in ("VECtanh", "VECgelu", "VECrelu"):
        yield _vec(op.removeprefix("VEC"), shape, 8)
        if train:
            yield _vec("mul", shape, 12, back=True)
    elif op == "VECsoftmax":
        yield _vec("softmax", shape, 8)
        if train:
            yield _vec("softmax", shape, 12, back=True)
    elif op == "VECln":
        yield _vec("ln", shape, 8)
        if train:  # gradient of the input, then of weight and bias
            yield _vec("ln", shape, 12, back=True)
            yield _vec(COPY, shape, 8, back=True)
            yield from _gradients_added(node)
    elif op == "dropout" and train:  # values, and one byte each of mask
        yield _vec(COPY, shape, 9)
        yield _vec(COPY, shape, 9, back=True)
    elif op == "where":
        yield _vec(COPY, shape, 8)
        if train:
            yield _vec(COPY, shape, 8, back=True)
    elif op == "contiguous":
        if any(by_name[name].base in ("permute", "transpose") for name in node.before if name in by_name):
            yield _vec(COPY, shape, 8)
            if train:
                yield _vec(COPY, shape, 8, back=True)
    elif op == "EMBEDDING":
        yield _vec(COPY, shape, 8)
        if train:
            table = node.accumulate[0].dims if node.accumulate else (1, 1)
            yield _vec(COPY, table, 4, back=True)  # zeros, then the rows that were used
            yield _vec("add", shape, 12, back=True)
            yield from _gradients_added(node)
    elif op == "mean":
        source = node.inputs[0]
        yield _vec(COPY, source, 4)
        if train:
            yield _vec(COPY, source, 4, back=True)
    elif op == "Weight" and train:
        yield from _gradients_added(node)
    elif op in ("getitem", "setitem") and _masked(node):
        largest = max(node.inputs, key=prod)
        yield _vec(COPY, node.inputs[1], 9, waits=True)  # which elements: the host waits for their number
        yield _vec(COPY, largest if op == "setitem" else shape, 8)
        if train:
            yield _vec(COPY, largest, 8, back=True)
    elif op in ("count", "cumsum", "rsqrt"):
        yield _vec(COPY, node.inputs[0], 8, waits=op == "count")
    elif node.base == "max" and full and len(node.inputs) > 1:
        yield _vec(COPY, shape, 8)
        if train:  # ==, half the gradient, where, <, masked fill
            for per_element in (5, 8, 13, 5, 9):
                yield _vec(COPY, shape, per_element, back=True)
    elif node.base in ("transpose", "permute") and train and _splits_heads(node, by_name):
        yield _vec(COPY, shape, 8, back=True)  # the gradient goes back to the layout of the projection


def _matrix(node: Node, by_name: dict[str, Node], train: bool, switch: bool) -> Iterator[Kernel]:
    """A product, the copies that it needs first, and the gradients of weight and bias."""
    b, m, k, n = next(each for each in node.forward if each.kind == "gemm").dims
    batched = node.base == "matmul" and len(node.inputs) > 1 and len(node.inputs[0]) == 4 == len(node.inputs[1])
    if batched:  # whatever the file calls it
        first, second = node.inputs[0], node.inputs[1]
        yield from _product(node, first[0] * first[1], first[2], first[3], second[3], "BMM", train)
        if first[0] > 1:  # strides of batch and heads cannot be merged: a contiguous copy is made
            for name in node.before:
                if name in by_name and by_name[name].base in ("permute", "transpose"):
                    yield _vec(COPY, by_name[name].output, 8)
        return
    op = "BMM" if node.op == "BMM" else "Linear"
    yield from _product(node, b, m, k, n, op, train)
    if train and op == "Linear":
        bias = not switch and not node.name.startswith(_NO_BIAS)
        if bias:
            yield _vec(COPY, (m, n), 4, back=True)
        yield from _gradients_added(node, None if bias else 1)


def _gradients_added(node: Node, count: int | None = None) -> Iterator[Kernel]:
    """Gradients are added to those of earlier passes: the measured loop does not clear them."""
    for each in node.accumulate[:count]:
        yield _vec("add", each.dims, 12, back=True)


def _rest(node: Node) -> float:
    """Bytes per output element of operands that are broadcast."""
    total = prod(node.output)
    small = sum(prod(each) for each in node.inputs if prod(each) != total)
    return ELEMENT * small / total if total else 0.0


def _masked(node: Node) -> bool:
    """Whether a slice is chosen by a mask of many elements."""
    return len(node.inputs) > 1 and prod(node.inputs[1]) > 1


def _splits_heads(node: Node, by_name: dict[str, Node]) -> bool:
    """Whether this permutation takes [batch, rows, heads, width] to [batch, heads, rows, width] before a product."""
    if not node.inputs or len(node.inputs[0]) != 4 or not any(name.startswith("view") for name in node.before):
        return False
    return not any(by_name[name].op == "contiguous" for name in node.after if name in by_name)


def _consumers(node: Node, by_name: dict[str, Node]) -> Iterable[Node]:
    return (by_name[name] for name in node.after if name in by_name and by_name[name].base not in _SHAPES_ONLY)


def _summed_again(node: Node, by_name: dict[str, Node]) -> Iterator[Kernel]:
    """A value that was used f times gets f gradients, which are added up."""
    if (len(node.output) < 3 and prod(node.output) < 65536) or node.base in ("getitem", "input_ids"):
        return
    times = len(list(_consumers(node, by_name)))
    for _ in range(times - 1):
        yield _vec("add", node.output, 12, back=True)


def _loss(graph: Graph) -> Iterator[Kernel]:
    """Backward of the cross entropy over the logits: zeros, then log-softmax."""
    logits = next(node for node in reversed(graph.nodes) if node.op == "Linear" and node.output[-1] > 1000)
    yield _vec(COPY, logits.output, 4, back=True)
    yield _vec("softmax", logits.output, 12, back=True)
