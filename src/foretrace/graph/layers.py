"""Which layer, phase and operator a task belongs to, and what its operator computes.

A device task inherits from its launch call; a call from the spans around it: the module it ran in; for backward work
the forward operator with the same autograd sequence number; else the optimizer, another annotation, or the operator
itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from foretrace.arrays import Float64, Int64, Mask, UInt8
from foretrace.graph.host import HostSpans
from foretrace.graph.kernels import nearest
from foretrace.graph.steps import Steps
from foretrace.graph.taskgraph import Phase
from foretrace.graph.work import conv_output, is_product, operator_work
from foretrace.trace.trace import Category

MODULE_PREFIX = "nn.Module: "

#: How a layer was found, best first; the order of `GraphInfo.attribution`.
WAYS = ("module", "sequence number", "collective", "optimizer", "annotation", "operator", "none")


@dataclass(frozen=True, eq=False)
class Layers:
    """Layer names and, per host span, which layer it belongs to and how that was found."""

    host: HostSpans
    steps: Steps

    @cached_property
    def _modules(self) -> tuple[list[str], Int64]:
        """Distinct module paths and, per span, the path of the innermost module around it (−1 outside)."""
        host, names = self.host, self.host.trace.names
        rows = np.flatnonzero(host.category == Category.MODULE)
        paths: dict[tuple[int, int], int] = {}
        text: list[str] = []
        own = np.full(len(host.event), -1, dtype=np.int64)
        above = nearest(host.parent, host.rows(host.category == Category.MODULE))
        parents = np.where(host.parent[rows] >= 0, above[host.parent[rows]], -1)
        for row, parent, name in zip(rows.tolist(), parents.tolist(), host.name[rows].tolist(), strict=True):
            prefix = int(own[parent]) if parent >= 0 else -1
            key = (prefix, name)
            if key not in paths:
                paths[key] = len(text)
                leaf = names[name].removeprefix(MODULE_PREFIX)
                text.append(f"{text[prefix]}.{leaf}" if prefix >= 0 else leaf)
            own[row] = paths[key]
        return text, nearest(host.parent, own)

    @cached_property
    def _forward_labels(self) -> tuple[list[str], Int64]:
        """Labels such as "conv2d[3]" of outermost forward operators: name and count within the step."""
        host = self.host
        top = np.flatnonzero((host.top_operator == np.arange(len(host.event))) & (host.phase == Phase.FORWARD))
        step = np.searchsorted(self.steps.bounds, host.start[top], side="right")
        order = np.lexsort((host.start[top], host.name[top], step))
        top, step = top[order], step[order]
        new = np.ones(len(top), dtype=np.bool_)
        new[1:] = (step[1:] != step[:-1]) | (host.name[top][1:] != host.name[top][:-1])
        first = np.flatnonzero(new)
        count = np.arange(len(top)) - first[np.cumsum(new) - 1] if len(top) else np.empty(0, np.int64)
        keys, inverse = np.unique(host.name[top].astype(np.int64) * 2**31 + count, return_inverse=True)
        names = host.trace.names
        labels = [f"{names[key >> 31].removeprefix('aten::')}[{key & 0x7FFFFFFF}]" for key in keys.tolist()]
        own = np.full(len(host.event), -1, dtype=np.int64)
        own[top] = inverse
        return labels, nearest(host.parent, own)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All layer names: module paths, forward operator labels, and names of annotations and operators."""
        return (*self._modules[0], *self._forward_labels[0], *self._named[0])

    @cached_property
    def _named(self) -> tuple[list[str], Int64, Int64]:
        """Names of annotations and outermost operators used as layers, and per span the index of each."""
        host, names = self.host, self.host.trace.names
        annotation, operator = host.annotation, host.top_operator
        used = np.unique(np.concatenate([host.name[annotation[annotation >= 0]], host.name[operator[operator >= 0]]]))
        table = np.full(len(names) + 1, -1, dtype=np.int64)
        table[used] = np.arange(len(used))
        by_annotation = np.where(annotation >= 0, table[host.name[np.maximum(annotation, 0)]], -1)
        by_operator = np.where(operator >= 0, table[host.name[np.maximum(operator, 0)]], -1)
        return [names[i] for i in used.tolist()], by_annotation, by_operator

    @cached_property
    def of_span(self) -> tuple[Int64, UInt8]:
        """Per host span: index into `names` (−1 if none) and the way it was found (index into WAYS)."""
        host = self.host
        module = self._modules[1]
        labels = self._forward_labels[1]
        n_modules, n_labels = len(self._modules[0]), len(self._forward_labels[0])
        best = np.where(module >= 0, module, np.where(labels >= 0, labels + n_modules, -1))
        forward = host.is_operator & (host.phase == Phase.FORWARD) & (host.trace.sequence[host.event] >= 0)
        rows = np.flatnonzero(forward & (best >= 0))
        # Parents precede children at equal numbers: the outermost forward operator gives the layer.
        order = np.argsort(host.trace.sequence[host.event[rows]], kind="stable")
        numbers, owners = host.trace.sequence[host.event[rows[order]]], rows[order]
        wanted = host.sequence
        place = np.searchsorted(numbers, wanted)
        hit = (place < len(numbers)) & (wanted >= 0)
        hit[hit] = numbers[place[hit]] == wanted[hit]
        backward = (host.phase == Phase.BACKWARD) | (host.phase == Phase.RECOMPUTE)
        from_sequence = np.where(
            hit & backward, best[owners[np.minimum(place, len(owners) - 1)]] if len(owners) else -1, -1
        )

        _, by_annotation, by_operator = self._named
        offset = n_modules + n_labels
        optimizer = host.phase == Phase.OPTIMIZER
        layer = np.full(len(host.event), -1, dtype=np.int64)
        way = np.full(len(host.event), WAYS.index("none"), dtype=np.uint8)
        for name, candidate in (
            ("operator", np.where(by_operator >= 0, by_operator + offset, -1)),
            ("operator", np.where((labels >= 0) & ~backward, labels + n_modules, -1)),
            ("annotation", np.where((by_annotation >= 0) & (labels < 0), by_annotation + offset, -1)),
            ("optimizer", np.where(optimizer & (by_annotation >= 0), by_annotation + offset, -1)),
            ("sequence number", from_sequence),
            ("module", np.where(~backward & ~optimizer, module, -1)),
        ):
            found = candidate >= 0
            layer[found] = candidate[found]
            way[found] = WAYS.index(name)
        return layer, way

    def work_of(self, spans: Int64) -> tuple[Int64, Float64]:
        """Return bytes and floating-point operations of the operators in these rows (−1 and 0 where unknown)."""
        host = self.host
        trace = host.trace
        name, shape = host.name[spans], trace.shape[host.event[spans]]
        keys, inverse = np.unique(
            name.astype(np.int64) * 2**31 + np.where(shape >= 0, shape, 2**31 - 1), return_inverse=True
        )
        nbytes = np.full(len(keys), -1, dtype=np.int64)
        flops = np.zeros(len(keys), dtype=np.float64)
        for i, key in enumerate(keys.tolist()):
            index = key & 0x7FFFFFFF
            if index < len(trace.shapes):
                nbytes[i], flops[i] = operator_work(trace.names[key >> 31], trace.shapes[index], self._conv_outputs)
        return nbytes[inverse], flops[inverse]

    @cached_property
    def _conv_outputs(self) -> dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]]:
        """Output sizes of convolutions, as their backward calls tell; older recordings store no strides."""
        host, trace = self.host, self.host.trace
        rows = host.event[host.is_operator & host.named(lambda name: "conv" in name and "backward" in name)]
        rows = rows[trace.shape[rows] >= 0]
        calls = np.unique(np.stack([trace.name[rows], trace.shape[rows]]), axis=1)
        found = (conv_output(trace.names[name], trace.shapes[shape]) for name, shape in calls.T.tolist())
        return {(x, w): out for x, w, out in filter(None, found)}

    @cached_property
    def hands_on(self) -> Mask:
        """Operators whose work is that of the operators they call (`linear` of `addmm`), so that it counts once.

        Half of an operator's own work must be found below it: `sum` also calls `fill_` on its small result.
        """
        host = self.host
        rows = np.flatnonzero(host.is_operator)
        own = np.zeros((len(host.event), 2))  # bytes, FLOPs of products
        nbytes, flops = self.work_of(rows)
        own[rows, 0] = np.maximum(nbytes, 0)
        own[rows, 1] = np.where(host.named(is_product)[rows], flops, 0.0)
        own[host.is_autograd | host.named(lambda name: name.startswith("torch::autograd::"))] = 0.0
        depth, above = np.zeros(len(host.event), dtype=np.int64), host.parent
        while (some := above >= 0).any():
            depth += some
            above = np.where(some, host.parent[above], -1)
        below, result = np.zeros_like(own), np.zeros(len(host.event), dtype=np.bool_)
        for level in range(int(depth.max(initial=0)), -1, -1):
            at = np.flatnonzero(depth == level)
            part = np.where(own[at, 1] > 0, 1, 0)
            result[at] = 2 * below[at, part] >= own[at, part]
            done = np.where(result[at, None], below[at], own[at])
            inside = host.parent[at] >= 0
            np.add.at(below, host.parent[at[inside]], done[inside])
        return result
