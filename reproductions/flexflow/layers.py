"""`LayeredModel`: a `SoapModel` written layer by layer, as the published models are."""

from __future__ import annotations

from collections.abc import Sequence

from reproductions.flexflow.operators import SAME, Input, Needed, Sizes, SoapModel, SoapOperator


class LayeredModel(SoapModel):
    """Operators of the usual kinds."""

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
        return self.add(SoapOperator(
            name=name, layer=name, sizes=(samples, rows, columns, channels or before), splits="shwc",
            flops=2.0 * taps * before if channels else float(taps),
            inputs=(Input(source, needed),) if isinstance(source, int) else (),
            weights=taps * before if channels else 0,
        ))  # fmt: skip

    def together(self, name: str, sources: Sequence[int]) -> int:
        """The sum of tensors of one shape."""
        inputs = tuple(Input(source, (SAME, SAME, SAME, SAME)) for source in sources)
        sizes = self.operators[sources[0]].sizes
        return self.add(SoapOperator(name=name, layer=name, sizes=sizes, splits="shwc", flops=1, inputs=inputs))

    def concatenate(self, name: str, sources: Sequence[int]) -> int:
        """Channels one behind another."""
        inputs, channels = [], 0
        for source in sources:
            inputs.append(Input(source, (SAME, SAME, SAME, Needed(1, -channels, 1))))
            channels += self.operators[source].sizes[3]
        sizes = (*self.operators[sources[0]].sizes[:3], channels)
        return self.add(SoapOperator(name=name, layer=name, sizes=sizes, splits="shwc", flops=0, inputs=tuple(inputs)))

    def linear(self, name: str, source: int, channels: int, layer: str = "", *, flat: bool = False) -> int:
        """A product at every place, or of all that a sample is (`flat`), with bias."""
        samples, height, width, before = self.operators[source].sizes
        everything = self.all_of(source)
        if flat:
            sizes, needed, fan = (samples, 1, 1, channels), (SAME, *everything[1:]), height * width * before
        else:
            sizes, needed, fan = (samples, height, width, channels), (SAME, SAME, SAME, everything[3]), before
        return self.add(SoapOperator(
            name=name, layer=layer or name, sizes=sizes, splits="shwc", flops=2.0 * fan,
            inputs=(Input(source, (needed[0], needed[1], needed[2], needed[3])),), weights=fan + 1,
        ))  # fmt: skip

    def loss(self, name: str, source: int) -> int:
        """Softmax and cross entropy: one number per place of all its channels."""
        samples, height, width, before = self.operators[source].sizes
        needed = (SAME, SAME, SAME, Needed(0, 0, before))
        return self.add(SoapOperator(
            name=name, layer=name, sizes=(samples, height, width, 1), splits="shw", flops=4.0 * before,
            inputs=(Input(source, needed),),
        ))  # fmt: skip

    def embedding(self, name: str, layer: str, samples: int, steps: int, rows: int, channels: int) -> int:
        """One row of a table per word; the gradient is dense. Words are there wherever they are needed."""
        return self.add(SoapOperator(
            name=name, layer=layer, sizes=(samples, steps, 1, channels), splits="shc", flops=0, weights=rows,
            reads_weights=False,
        ))  # fmt: skip

    def lstm(self, name: str, layer: str, source: int, before: int | None, hidden: int) -> int:
        """Steps of an LSTM layer behind those of operator `before`; None at the beginning.

        Parts of the hidden state would exchange it at every step, so only single steps may be split by parameters.
        """
        samples, steps, _, width = self.operators[source].sizes
        inputs = [Input(source, (SAME, SAME, SAME, Needed(0, 0, width)))]
        if before is not None:
            last = self.operators[before].sizes[1] - 1
            inputs.append(Input(before, (SAME, Needed(0, last, 1), SAME, Needed(0, 0, hidden))))
        return self.add(SoapOperator(
            name=name, layer=layer, sizes=(samples, steps, 1, hidden), splits="sc" if steps == 1 else "s",
            flops=8.0 * (width + hidden), inputs=tuple(inputs), weights=4 * (width + hidden + 1), launches=steps,
        ))  # fmt: skip

    def attention(self, name: str, layer: str, query: int, keys: Sequence[int]) -> int:
        """Luong's attention of every step over all steps of `keys`, and the product that joins both."""
        samples, steps, _, width = self.operators[query].sizes
        inputs = [Input(query, (SAME, SAME, SAME, Needed(0, 0, width)))]
        length = 0
        for key in keys:
            _, there, _, channels = self.operators[key].sizes
            inputs.append(Input(key, (SAME, Needed(0, 0, there), SAME, Needed(0, 0, channels))))
            length += there
        return self.add(SoapOperator(
            name=name, layer=layer, sizes=(samples, steps, 1, width), splits="sh", flops=4.0 * length + 4.0 * width,
            inputs=tuple(inputs), weights=2 * width, launches=4,
        ))  # fmt: skip
