"""`CapturedSoap`: a `SoapModel` of a captured or recorded step, with times of its parts from the cost models.

An operator is a product, convolution, attention, recurrent layer, look-up, pooling, normalisation or sum of tensors,
with the views and the elementwise work that follow it alone, and with the backward calls of all these. A part is priced
as the same calls at its size: rows fewer by samples and attributes, columns by parameters. What does not depend on the
batch is computed wherever it is needed. Where a window is not known, everything of an input is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, prod

import msgspec
import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.cost.calls import Calls, Family
from foretrace.cost.model import CostModel
from foretrace.errors import ForetraceError
from foretrace.graph import work
from foretrace.graph.taskgraph import Phase
from foretrace.hardware.devices import Device
from foretrace.model.operator_graph import OperatorGraph, Role
from foretrace.plan.placement.source import KEPT, PlaceableModel
from foretrace.plan.soap.operators import SAME, Degrees, Input, Needed, Sizes, SoapModel, SoapOperator
from foretrace.trace.trace import decode_shapes

# What each family may be split by; normalisation over channels, soft maxima and the like need all of them.
_SPLITS = {
    Family.CONV: "shwc", Family.GEMM: "shc", Family.ATTENTION: "shc", Family.RECURRENT: "s", Family.LOOKUP: "shc",
    Family.POOL: "shwc", Family.ELEMENTWISE: "shwc", Family.MOVE: "shwc", Family.NORM: "shw", Family.SOFTMAX: "shw",
    Family.REDUCTION: "sc",
}  # fmt: skip
_JOINS = (Family.NONE, Family.ELEMENTWISE, Family.MOVE)  # what may follow an operator as a part of it
_IMAGES = (Family.CONV, Family.POOL)


@dataclass(kw_only=True)
class _Group:
    """The calls of one operator, and how its output lies in four dimensions."""

    nodes: list[int]
    sources: list[int]
    sizes: Sizes
    image: bool  # channels stand behind the samples
    repeated: bool = False  # does not depend on the batch: each part by samples computes all of it
    back: list[int] = field(default_factory=list)
    weights: set[int] = field(default_factory=set)  # storages


class CapturedSoap(SoapModel):
    """The operators of a step, each with its calls."""

    def __init__(self, model: PlaceableModel, costs: CostModel, device: Device) -> None:
        """Raise ForetraceError for a step without a backward pass, and for one whose source names no weights."""
        super().__init__(model.graph.name)
        graph = model.graph
        if not model.backward.any():
            raise ForetraceError(f"{graph.name} has no backward pass, which a training step needs; give a training.")
        if not graph.parameters:
            raise ForetraceError(f"{graph.name} names no weights, whose gradients devices exchange; give the model.")
        self._model, self._costs, self._device, self._end = model, costs, device, 0
        self._priced: dict[tuple[int, bool], Float64] = {}
        self._groups = _groups(graph, model.updates | model.backward)
        _assign(graph, self._groups, np.flatnonzero(model.backward).tolist())
        self._layers = _layers(self._groups)
        share = {role: sum(each.nbytes for each in graph.storages if each.role == role) for role in Role}
        state = sum(share[role] for role in (Role.WEIGHT, Role.GRADIENT, Role.OPTIMIZER)) / share[Role.WEIGHT]
        state = max(state, 2.0)  # a recording does not show what it keeps, but a gradient there is
        saved = model.held(Role.ACTIVATION)
        for number, group in enumerate(self._groups):
            self._put(number, group, int(saved[[*group.nodes, *group.back]].sum()), state)

    def _put(self, number: int, group: _Group, saved: int, state: float) -> None:
        graph, (layer, held) = self._model.graph, self._layers[number]
        node = graph.nodes[group.nodes[0]]
        family = Family(int(graph.calls.family[group.nodes[0]]))
        shared = {self._groups[other].sizes[3] for other, (name, _) in enumerate(self._layers) if name == layer}
        splits = _SPLITS.get(family, "s")
        if len(shared) > 1 or (family == Family.GEMM and not group.weights) or group.repeated:
            splits = splits.replace("c", "") if group.weights else "s"  # of what is tied, or sums over channels
        weights = ceil(sum(graph.storages[each].nbytes for each in held) / group.sizes[3]) if held else 0
        if len(shared) > 1:  # whole on each of their devices: only the sum has to agree
            weights = ceil(sum(graph.storages[each].nbytes for each in held))
            group.sizes = (*group.sizes[:2], group.sizes[2] * group.sizes[3], 1)
        inputs = tuple(self._input(group, each, family) for each in group.sources)
        self.add(SoapOperator(
            name=f"{node.layer or node.op.removeprefix('aten::')}", layer=layer, sizes=group.sizes, splits=splits,
            inputs=inputs, weight_bytes=weights, kept_bytes=ceil(state * weights), saved_bytes=saved,
            element_bytes=_element(graph, group), recurrent=family == Family.RECURRENT,
        ))  # fmt: skip

    def _input(self, group: _Group, source: int, family: Family) -> Input:
        """Return what an operator needs of another one: windows where they are known, else all."""
        have, want, graph = self.operators[source].sizes, group.sizes, self._model.graph
        node = graph.nodes[group.nodes[0]]
        found = [SAME if have[0] == want[0] else Needed(0, 0, have[0])]
        windows = _windows(node.op, node.text) if family in _IMAGES and group.image else {}
        for d in (1, 2, 3):
            if d in windows:
                found.append(windows[d])
            elif d == 3 and family in (Family.GEMM, Family.CONV, Family.RECURRENT) and not _depthwise(graph, group):
                found.append(Needed(0, 0, have[d]))
            elif family == Family.ATTENTION and d == 1 and source != group.sources[0]:
                found.append(Needed(0, 0, have[d]))  # every key and value
            elif have[d] == want[d]:
                found.append(SAME)
            elif d == 3 and want[d] > 1 and have[d] % want[d] == 0:
                found.append(Needed(have[d] // want[d], 0, have[d] // want[d]))  # heads and the like, side by side
            else:
                found.append(Needed(0, 0, have[d]))
        base = node.op.removeprefix("aten::")
        if base in ("cat", "concat"):
            before = self.operators
            for d in (1, 3):
                lengths = [before[each].sizes[d] for each in group.sources]
                if sum(lengths) == want[d] and len(lengths) > 1:
                    found[d] = Needed(1, -sum(lengths[: group.sources.index(source)]), 1)
        return Input(source, (found[0], found[1], found[2], found[3]))

    def at_end(self, end: int) -> CapturedSoap:
        """Return the same with every call as it is expected (0), as fast (1) or as slow (2) as it may be."""
        found = copy(self)
        found._end = end
        return found

    def times(self, op: int, ways: Sequence[Degrees]) -> tuple[Float64, Float64]:
        """Return times by the cost models: kernels or the host that launches them, whichever is slower.

        A part's backward pass ends with the update of its share of the weights.
        """
        group, parts = self._groups[op], self.parts_of(op, ways)
        if group.repeated:
            parts[:, 0] = 1.0
        shares = np.stack([parts[:, :3].prod(axis=1), parts[:, 3]], axis=1)
        unique, which = np.unique(shares, axis=0, return_inverse=True)
        forward, backward = (self._seconds(op, back, unique)[self._end] for back in (False, True))
        users = [name == self._layers[op][0] for name, _ in self._layers]
        backward = backward + self._updates[self._end, users].mean() * unique[:, 1]
        which = which.ravel()
        return forward[which], backward[which]

    @cached_property
    def _updates(self) -> Float64:
        """Seconds of the updates of each operator's weights (3 x operators)."""
        model, costs = self._model, self._model.costs
        ends = [model.update_times(each) for each in (costs.seconds, costs.low_s, costs.high_s)]
        return np.array([[each[[*group.nodes, *group.back]].sum() for group in self._groups] for each in ends])

    def _seconds(self, op: int, back: bool, shares: Float64) -> Float64:
        """Return seconds of a pass at shares of (rows, columns) (m x 2), as expected, fast and slow (3 x m)."""
        if (op, back) in self._priced:
            return self._priced[op, back]
        graph, group = self._model.graph, self._groups[op]
        nodes = group.back if back else group.nodes
        host = np.array([[self._model.host_s[nodes].sum()], [0.0], [self._model.ends[1][1][nodes].sum()]])
        busy = [each for each in nodes if graph.calls.family[each] != Family.NONE]
        kernels = np.zeros((3, len(shares)))
        if busy:
            rows = np.tile(np.array(busy), len(shares))
            calls = self._part(group, graph.calls.take(rows), rows, *np.repeat(shares, len(busy), axis=0).T)
            costs = self._costs.predict(calls, self._device)
            ends = np.stack([costs.seconds, costs.low_s, costs.high_s])
            kernels = np.nan_to_num(ends).reshape(3, len(shares), len(busy)).sum(axis=2)
        found: Float64 = np.maximum(kernels, host)
        self._priced[op, back] = found
        return found

    def _part(self, group: _Group, calls: Calls, nodes: Int64, r: Float64, c: Float64) -> Calls:
        """Return calls at shares of rows and columns (n each)."""
        whole = self._model.graph.calls
        m, n = (float(each[group.nodes[0]]) for each in (whole.m, whole.n))
        product = np.isin(calls.family, (Family.GEMM, Family.CONV))
        attention = calls.family == Family.ATTENTION
        # A backward product sums over the rows, or over the columns, of the forward one.
        sizes = {
            name: np.where(product & (own == m), r, np.where(product & (own == n), c, 1.0))
            for name, own in (("m", calls.m), ("n", calls.n), ("k", calls.k))
        }
        others = ~product & ~attention
        sizes["m"] = np.where(others & (calls.m > 1), r * c, sizes["m"])
        sizes["n"] = np.where(others & (calls.m <= 1), r * c, sizes["n"])
        sizes["b"] = np.where(attention, r * c, 1.0)
        columns = {name: np.maximum(getattr(calls, name) * by, 1.0) for name, by in sizes.items()}
        shrunk = {at: self._shrunk(at, group) for at in set(nodes.tolist())}
        for way, name in enumerate(("read_bytes", "written_bytes")):
            by = np.array([shrunk[at][way] for at in nodes.tolist()])
            columns[name] = getattr(calls, name) * (by[:, 0] * r * c + by[:, 1] * r + by[:, 2] * c)
        return replace(calls, flops=calls.flops * r * c, **columns)

    def _shrunk(self, at: int, group: _Group) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        """Return shares of what a call reads, and writes, that shrink with rows and columns, rows, and columns."""
        graph, whole = self._model.graph, prod(group.sizes)
        node, found = graph.nodes[at], []
        product = graph.calls.family[at] in (Family.GEMM, Family.CONV)
        for tensors in (node.inputs, node.outputs):
            by = [0.0, 0.0, 0.0]
            for each in tensors:
                tensor = graph.tensors[each]
                kept = graph.storages[tensor.storage].role in KEPT
                by[2 if kept else 1 if product and prod(tensor.dims) != whole else 0] += tensor.nbytes
            total = sum(by)
            found.append((by[0] / total, by[1] / total, by[2] / total) if total else (1.0, 0.0, 0.0))
        return found[0], found[1]


def _element(graph: OperatorGraph, group: _Group) -> int:
    outputs = [graph.tensors[each] for each in graph.nodes[group.nodes[0]].outputs] or [graph.tensors[0]]
    largest = max(outputs, key=lambda each: prod(each.dims))
    return max(largest.nbytes // max(prod(largest.dims), 1), 1)


def _groups(graph: OperatorGraph, left_out: Mask) -> list[_Group]:
    """Return the operators of the forward pass; what nothing of it precedes goes with who comes next."""
    families, batch = graph.calls.family.tolist(), graph.batch or _batch(graph)
    found: list[_Group] = []
    of: dict[int, int] = {}  # tensor -> group
    waiting: list[int] = []
    for at in np.flatnonzero(~left_out).tolist():
        node, family = graph.nodes[at], Family(families[at])
        sources = list(dict.fromkeys(of[each] for each in node.inputs if each in of))
        weights = {
            graph.tensors[each].storage for each in node.inputs
            if family != Family.NONE and graph.storages[graph.tensors[each].storage].role == Role.WEIGHT
        }  # fmt: skip
        largest = max((graph.tensors[each].dims for each in node.outputs), key=prod, default=())
        base = node.op.removeprefix("aten::")
        joins = family in _JOINS and base not in ("cat", "concat", "stack")
        if family == Family.NORM and "batch_norm" in base and sources:
            joins = graph.calls.family[found[sources[0]].nodes[0]] == Family.CONV
        if joins and len(sources) == 1:
            group = found[sources[0]]
            if family == Family.NONE or prod(largest) == prod(group.sizes) or prod(largest) <= 1:
                group.nodes.append(at)
                group.weights |= weights
                of |= dict.fromkeys(node.outputs, sources[0])
                continue
        if not sources and not weights and (family in _JOINS or not node.outputs):
            waiting.append(at)
            continue
        image = family == Family.CONV or (
            bool(sources) and found[sources[0]].image and len(largest) > 2 and family != Family.GEMM
        )  # fmt: skip
        sizes, repeated = _sizes(node.op, family, largest, batch, image), False
        if sizes[0] == 1 < batch:
            if any(found[each].sizes[0] > 1 and not found[each].repeated for each in sources):
                sizes = (batch, 1, 1, 1)  # a loss: a number per sample, summed up
            else:
                sizes, repeated = (batch, *sizes[1:]), True
        of |= dict.fromkeys(node.outputs, len(found))
        found.append(
            _Group(nodes=[at, *waiting], sources=sources, sizes=sizes, image=image, repeated=repeated, weights=weights)
        )
        waiting = []
    if not found:
        raise ForetraceError(f"{graph.name} has no operators to split; give a model that computes something.")
    found[-1].nodes += waiting
    return found


def _batch(graph: OperatorGraph) -> int:
    """Return samples where the source does not say: the first size of the first call's first input."""
    dims = next((graph.tensors[node.inputs[0]].dims for node in graph.nodes if node.inputs), ())
    return dims[0] if dims else 1


def _sizes(op: str, family: Family, dims: Sequence[int], batch: int, image: bool) -> Sizes:
    """Return samples, height, width and channels of an output; attention is split by heads: its channels."""
    if family == Family.ATTENTION and len(dims) == 4:
        heads, words = (dims[2], dims[1]) if work.heads_last(op.removeprefix("aten::")) else (dims[1], dims[2])
        return dims[0], words, dims[3], heads
    if image:
        return dims[0], dims[2] if len(dims) > 2 else 1, prod(dims[3:]), dims[1]
    if not dims:
        return 1, 1, 1, 1
    channels = dims[-1] if len(dims) > 1 else 1
    if len(dims) > 2 and dims[1] == batch != dims[0]:  # words first
        return batch, dims[0] * prod(dims[2:-1]), 1, channels
    rest = prod(dims) // channels if channels else 0
    return (batch, rest // batch, 1, channels) if dims[0] % batch == 0 and rest else (1, max(rest, 1), 1, channels)


def _windows(op: str, text: str) -> dict[int, Needed]:
    """Return windows of a convolution or a pooling by dimension; none where its arguments are not known."""
    try:
        shapes = decode_shapes(text)
        said = [msgspec.json.decode(each) if each.startswith("[") else each for each in shapes.concrete]
        if "pool" in op and "adaptive" not in op:
            kernel, stride, padding = (list(map(int, said[i] or said[1])) for i in (1, 2, 3))
            dilation = list(map(int, said[4])) if "max" in op else [1, 1]
        elif op == "aten::convolution" and str(said[6]).lower() not in ("true", "1"):
            kernel = [int(each) for each in shapes.dims[1][2:]]
            stride, padding, dilation = (list(map(int, said[i])) for i in (3, 4, 5))
        else:
            return {}
        sides = range(len(kernel))
        return {
            1 + i: Needed(stride[i % len(stride)], -padding[i % len(padding)],
                          dilation[i % len(dilation)] * (kernel[i] - 1) + 1)
            for i in sides
        } if len(kernel) <= 2 else {}  # fmt: skip
    except (msgspec.DecodeError, ValueError, TypeError, IndexError, RecursionError):
        return {}


def _depthwise(graph: OperatorGraph, group: _Group) -> bool:
    """Return whether channels of the output each read channels of their own."""
    return bool(graph.calls.family[group.nodes[0]] == Family.CONV and graph.calls.b[group.nodes[0]] > 1)


def _assign(graph: OperatorGraph, groups: Sequence[_Group], backward: Iterable[int]) -> None:
    """Give every backward call to the operator of its layer, of several to that whose results or weights it reads."""
    of = {at: number for number, group in enumerate(groups) for at in group.nodes}
    layers: dict[str, set[int]] = {}
    holders: dict[int, int] = {}
    for number, group in enumerate(groups):
        for storage in group.weights:
            holders.setdefault(storage, number)
        for at in group.nodes:
            if graph.nodes[at].phase == Phase.FORWARD and graph.nodes[at].layer:
                layers.setdefault(graph.nodes[at].layer, set()).add(number)
    last = len(groups) - 1
    for at in backward:
        node = graph.nodes[at]
        made = [of[maker] for each in node.inputs if (maker := int(graph.producer[each])) in of]
        own = [holders[s] for each in node.inputs if (s := graph.tensors[each].storage) in holders]
        among = layers.get(node.layer, set()) if node.layer else set()
        likely = [each for each in (*own, *sorted(made, reverse=True)) if not among or each in among]
        last = likely[0] if likely else max(among, default=last)
        groups[last].back.append(at)
        of[at] = last


def _layers(groups: Sequence[_Group]) -> list[tuple[str, frozenset[int]]]:
    """Return a name for the weights of each operator, and their storages: operators that share one hold all of both."""
    of = list(range(len(groups)))
    first: dict[int, int] = {}
    for number, group in enumerate(groups):
        for storage in group.weights:
            old, new = of[number], of[first.setdefault(storage, number)]
            of = [new if each == old else each for each in of]
    held: dict[int, frozenset[int]] = {}
    for number, group in enumerate(groups):
        held[of[number]] = held.get(of[number], frozenset()) | group.weights
    return [(f"layer {each}", held[each]) for each in of]
