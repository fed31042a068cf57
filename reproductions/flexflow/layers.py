"""`LayeredModel`: `SoapOperators` written layer by layer, as the published models are, and its times by a roofline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from foretrace.arrays import Float64
from foretrace.plan.soap.operators import SAME, Degrees, Input, Needed, Sizes, SoapModel, SoapOperator, SoapOperators
from foretrace.plan.soap.problem import SoapProblem, Synchronisation
from reproductions.flexflow.cluster import SoapCluster

KEPT = 3  # copies of a weight: itself, gradient, momentum


@dataclass(frozen=True, kw_only=True)
class ShapedOperator(SoapOperator):
    """An operator of float32 elements; figures are per element of its output unless they say otherwise."""

    flops: float
    weights: int = 0  # parameters per channel of the output
    reads_weights: bool = True  # all of them; an embedding reads a few rows
    launches: int = 1  # kernels one after another


class LayeredModel(SoapOperators):
    """Operators of the usual kinds."""

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return self.weight_bytes // 4

    def put(
        self, *, name: str, sizes: Sizes, splits: str, flops: float, layer: str = "", inputs: tuple[Input, ...] = (),
        weights: int = 0, reads_weights: bool = True, launches: int = 1,
    ) -> int:  # fmt: skip
        """Append an operator; returns its place."""
        return self.add(ShapedOperator(
            name=name, layer=layer or name, sizes=sizes, splits=splits, flops=flops, inputs=inputs, weights=weights,
            reads_weights=reads_weights, launches=launches, recurrent=launches > 1, weight_bytes=4 * weights,
            kept_bytes=4 * KEPT * weights, saved_bytes=4 * prod(sizes),
        ))  # fmt: skip

    def all_of(self, source: int) -> tuple[Needed, ...]:
        """Every element of an operator's output, per dimension."""
        return tuple(Needed(0, 0, size) for size in self.operators[source].sizes)

    def window(
        self, name: str, source: int | Sizes, kernel: tuple[int, int], stride: int = 1,
        padding: tuple[int, int] = (0, 0), channels: int = 0,
    ) -> int:  # fmt: skip
        """A convolution to so many channels with its normalisation and activation, or (0) a pooling.

        It reads an operator or, given their sizes, the model's samples, which are there wherever they are needed.
        """
        samples, height, width, before = self.operators[source].sizes if isinstance(source, int) else source
        rows, columns = (
            (size + 2 * pad - taps) // stride + 1
            for size, pad, taps in zip((height, width), padding, kernel, strict=True)
        )
        taps = kernel[0] * kernel[1]
        needed = (
            SAME,
            Needed(stride, -padding[0], kernel[0]),
            Needed(stride, -padding[1], kernel[1]),
            Needed(0, 0, before) if channels else SAME,
        )
        return self.put(
            name=name, layer=name, sizes=(samples, rows, columns, channels or before), splits="shwc",
            flops=2.0 * taps * before if channels else float(taps),
            inputs=(Input(source, needed),) if isinstance(source, int) else (),
            weights=taps * before if channels else 0,
        )  # fmt: skip

    def together(self, name: str, sources: Sequence[int]) -> int:
        """The sum of tensors of one shape."""
        inputs = tuple(Input(source, (SAME, SAME, SAME, SAME)) for source in sources)
        sizes = self.operators[sources[0]].sizes
        return self.put(name=name, sizes=sizes, splits="shwc", flops=1, inputs=inputs)

    def concatenate(self, name: str, sources: Sequence[int]) -> int:
        """Channels one behind another."""
        inputs, channels = [], 0
        for source in sources:
            inputs.append(Input(source, (SAME, SAME, SAME, Needed(1, -channels, 1))))
            channels += self.operators[source].sizes[3]
        sizes = (*self.operators[sources[0]].sizes[:3], channels)
        return self.put(name=name, sizes=sizes, splits="shwc", flops=0, inputs=tuple(inputs))

    def linear(self, name: str, source: int, channels: int, layer: str = "", *, flat: bool = False) -> int:
        """A product at every place, or of all that a sample is (`flat`), with bias."""
        samples, height, width, before = self.operators[source].sizes
        everything = self.all_of(source)
        if flat:
            sizes, needed, fan = (samples, 1, 1, channels), (SAME, *everything[1:]), height * width * before
        else:
            sizes, needed, fan = (samples, height, width, channels), (SAME, SAME, SAME, everything[3]), before
        return self.put(
            name=name, layer=layer or name, sizes=sizes, splits="shwc", flops=2.0 * fan,
            inputs=(Input(source, (needed[0], needed[1], needed[2], needed[3])),), weights=fan + 1,
        )  # fmt: skip

    def loss(self, name: str, source: int) -> int:
        """Softmax and cross entropy: one number per place of all its channels."""
        samples, height, width, before = self.operators[source].sizes
        needed = (SAME, SAME, SAME, Needed(0, 0, before))
        return self.put(
            name=name, layer=name, sizes=(samples, height, width, 1), splits="shw", flops=4.0 * before,
            inputs=(Input(source, needed),),
        )  # fmt: skip

    def embedding(self, name: str, layer: str, samples: int, steps: int, rows: int, channels: int) -> int:
        """One row of a table per word; the gradient is dense. Words are there wherever they are needed."""
        return self.put(
            name=name, layer=layer, sizes=(samples, steps, 1, channels), splits="shc", flops=0, weights=rows,
            reads_weights=False,
        )  # fmt: skip

    def lstm(self, name: str, layer: str, source: int, before: int | None, hidden: int) -> int:
        """Steps of an LSTM layer behind those of operator `before`; None at the beginning.

        Parts of the hidden state would exchange it at every step, so only single steps may be split by parameters.
        """
        samples, steps, _, width = self.operators[source].sizes
        inputs = [Input(source, (SAME, SAME, SAME, Needed(0, 0, width)))]
        if before is not None:
            last = self.operators[before].sizes[1] - 1
            inputs.append(Input(before, (SAME, Needed(0, last, 1), SAME, Needed(0, 0, hidden))))
        return self.put(
            name=name, layer=layer, sizes=(samples, steps, 1, hidden), splits="sc" if steps == 1 else "s",
            flops=8.0 * (width + hidden), inputs=tuple(inputs), weights=4 * (width + hidden + 1), launches=steps,
        )  # fmt: skip

    def attention(self, name: str, layer: str, query: int, keys: Sequence[int]) -> int:
        """Luong's attention of every step over all steps of `keys`, and the product that joins both."""
        samples, steps, _, width = self.operators[query].sizes
        inputs = [Input(query, (SAME, SAME, SAME, Needed(0, 0, width)))]
        length = 0
        for key in keys:
            _, there, _, channels = self.operators[key].sizes
            inputs.append(Input(key, (SAME, Needed(0, 0, there), SAME, Needed(0, 0, channels))))
            length += there
        return self.put(
            name=name, layer=layer, sizes=(samples, steps, 1, width), splits="sh", flops=4.0 * length + 4.0 * width,
            inputs=tuple(inputs), weights=2 * width, launches=4,
        )  # fmt: skip


class TimedModel(SoapModel):
    """A layered model on a cluster's devices: the larger of operations and bytes, and the launches of its kernels."""

    def __init__(self, model: SoapOperators, cluster: SoapCluster) -> None:
        super().__init__(model.name)
        self.operators, self.cluster = model.operators, cluster

    def times(self, op: int, ways: Sequence[Degrees]) -> tuple[Float64, Float64]:
        operator, cluster, found = self.operators[op], self.cluster, []
        assert isinstance(operator, ShapedOperator)
        for degrees in ways:
            part = [-(-size // degree) for size, degree in zip(operator.sizes, degrees, strict=True)]
            read = sum(
                prod(
                    _most(each.needed[d], operator.sizes[d], degrees[d], self.operators[each.source].sizes[d])
                    for d in range(4)
                )
                for each in operator.inputs
            )
            weights = operator.weights * part[3] * operator.reads_weights
            busy = max(prod(part) * operator.flops / cluster.flop_s, 4 * (read + prod(part) + weights) / cluster.byte_s)
            launch = operator.launches * cluster.launch_s
            found.append((launch + busy, launch + busy * (2.0 if operator.weights else 1.0)))
        forward, backward = np.array(found, dtype=np.float64).T
        return forward, backward


def _most(needed: Needed, size: int, parts: int, have: int) -> int:
    """Elements of one dimension of an input that the part needs which needs most."""
    return max(
        min((size * (k + 1) // parts - 1) * needed.stride + needed.offset + needed.extent, have)
        - max(size * k // parts * needed.stride + needed.offset, 0)
        for k in range(parts)
    )


def problem(
    model: SoapOperators, cluster: SoapCluster, synchronisation: Synchronisation, memory_gb: float | None = None
) -> SoapProblem:
    """The search on a cluster, within its devices' memory unless it is given."""
    limit = cluster.device.memory_gb if memory_gb is None else memory_gb
    return SoapProblem(TimedModel(model, cluster), cluster.links, synchronisation, memory_bytes=1e9 * limit)
