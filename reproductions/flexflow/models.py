"""The six models of FlexFlow's evaluation (Jia et al., MLSys 2019, table 3) as shapes, and its two clusters.

Normalisation is part of its convolution. Recurrent models run 40 steps in chunks; vocabularies: 20,000 words (text
classification), 10,000 (Penn Treebank), 32,000 (translation).
"""

from __future__ import annotations

from collections.abc import Callable

from foretrace.hardware.devices import named
from foretrace.plan.soap.operators import Sizes
from reproductions.flexflow.cluster import SoapCluster
from reproductions.flexflow.layers import LayeredModel

STEPS = 40


def alexnet(samples: int) -> LayeredModel:
    """AlexNet (Krizhevsky, 2014: one tower), 61 million parameters."""
    model = LayeredModel("AlexNet")
    at: int | Sizes = (samples, 224, 224, 3)
    layers = (
        (64, 11, 4, 2, True),
        (192, 5, 1, 2, True),
        (384, 3, 1, 1, False),
        (256, 3, 1, 1, False),
        (256, 3, 1, 1, True),
    )
    for i, (channels, kernel, stride, padding, pooled) in enumerate(layers):
        at = model.window(f"conv{i}", at, (kernel, kernel), stride, (padding, padding), channels)
        if pooled:
            at = model.window(f"pool{i}", at, (3, 3), 2)
    at = model.linear("fc0", len(model.operators) - 1, 4096, flat=True)
    at = model.linear("fc1", at, 4096)
    model.loss("loss", model.linear("fc2", at, 1000))
    return model


def resnet101(samples: int) -> LayeredModel:
    """ResNet-101 (He et al., 2016)."""
    model = LayeredModel("ResNet-101")
    at = model.window("stem", (samples, 224, 224, 3), (7, 7), 2, (3, 3), 64)
    at = model.window("pool", at, (3, 3), 2, (1, 1))
    for stage, blocks in enumerate((3, 4, 23, 3)):
        width = 64 << stage
        for block in range(blocks):
            stride = 2 if block == 0 and stage else 1
            name = f"{stage}.{block}"
            inner = model.window(f"{name}.a", at, (1, 1), 1, (0, 0), width)
            inner = model.window(f"{name}.b", inner, (3, 3), stride, (1, 1), width)
            inner = model.window(f"{name}.c", inner, (1, 1), 1, (0, 0), 4 * width)
            short = at if block else model.window(f"{name}.d", at, (1, 1), stride, (0, 0), 4 * width)
            at = model.together(f"{name}.add", (inner, short))
    at = model.window("mean", at, (7, 7))
    model.loss("loss", model.linear("fc", at, 1000, flat=True))
    return model


def inception_v3(samples: int) -> LayeredModel:
    """Inception-v3 (Szegedy et al., 2016), without the auxiliary classifier."""
    model = LayeredModel("Inception-v3")
    count = 0

    def conv(
        at: int | Sizes, channels: int, kernel: int | tuple[int, int], stride: int = 1, *, same: bool = True
    ) -> int:
        nonlocal count
        count += 1
        taps = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (taps[0] // 2, taps[1] // 2) if same else (0, 0)
        return model.window(f"conv{count}", at, taps, stride, padding, channels)

    def pool(at: int, stride: int = 1) -> int:
        nonlocal count
        count += 1
        return model.window(f"pool{count}", at, (3, 3), stride, (1, 1) if stride == 1 else (0, 0))

    def joined(*parts: int) -> int:
        nonlocal count
        count += 1
        return model.concatenate(f"cat{count}", parts)

    at = conv((samples, 299, 299, 3), 32, 3, 2, same=False)
    at = pool(conv(conv(at, 32, 3, same=False), 64, 3), 2)
    at = pool(conv(conv(at, 80, 1), 192, 3, same=False), 2)
    for pooled in (32, 64, 64):
        at = joined(
            conv(at, 64, 1), conv(conv(at, 48, 1), 64, 5), conv(conv(conv(at, 64, 1), 96, 3), 96, 3),
            conv(pool(at), pooled, 1),
        )  # fmt: skip
    at = joined(conv(at, 384, 3, 2, same=False), conv(conv(conv(at, 64, 1), 96, 3), 96, 3, 2, same=False), pool(at, 2))
    for width in (128, 160, 160, 192):
        double = conv(conv(conv(at, width, 1), width, (7, 1)), width, (1, 7))
        at = joined(
            conv(at, 192, 1), conv(conv(conv(at, width, 1), width, (1, 7)), 192, (7, 1)),
            conv(conv(double, width, (7, 1)), 192, (1, 7)), conv(pool(at), 192, 1),
        )  # fmt: skip
    at = joined(
        conv(conv(at, 192, 1), 320, 3, 2, same=False),
        conv(conv(conv(conv(at, 192, 1), 192, (1, 7)), 192, (7, 1)), 192, 3, 2, same=False), pool(at, 2),
    )  # fmt: skip
    for _ in range(2):
        wide, deep = conv(at, 384, 1), conv(conv(at, 448, 1), 384, 3)
        at = joined(
            conv(at, 320, 1), conv(wide, 384, (1, 3)), conv(wide, 384, (3, 1)), conv(deep, 384, (1, 3)),
            conv(deep, 384, (3, 1)), conv(pool(at), 192, 1),
        )  # fmt: skip
    at = model.window("mean", at, (8, 8))
    model.loss("loss", model.linear("fc", at, 1000, flat=True))
    return model


class _Recurrent:
    """Layers over chunks of steps; the operators of a layer share its weights."""

    def __init__(self, name: str, samples: int, chunk: int) -> None:
        self.model, self.samples, self.chunk = LayeredModel(name), samples, chunk

    def embedded(self, layer: str, rows: int, width: int) -> list[int]:
        return [
            self.model.embedding(f"{layer}.{i}", layer, self.samples, self.chunk, rows, width)
            for i in range(STEPS // self.chunk)
        ]

    def layer(self, layer: str, sources: list[int], hidden: int, before: int | None = None) -> list[int]:
        out: list[int] = []
        for i, source in enumerate(sources):
            before = self.model.lstm(f"{layer}.{i}", layer, source, before, hidden)
            out.append(before)
        return out

    def predicted(self, sources: list[int], channels: int) -> LayeredModel:
        for i, source in enumerate(sources):
            self.model.loss(f"loss.{i}", self.model.linear(f"softmax.{i}", source, channels, "softmax"))
        return self.model


def rnntc(samples: int, chunk: int = 10) -> LayeredModel:
    """Text classification: 4 recurrent layers of 1024, two classes at the last chunk."""
    net = _Recurrent("RNNTC", samples, chunk)
    at = net.embedded("embedding", 20_000, 1024)
    for i in range(4):
        at = net.layer(f"lstm{i}", at, 1024)
    return net.predicted(at[-1:], 2)


def rnnlm(samples: int, chunk: int = 10) -> LayeredModel:
    """Language model: 2 recurrent layers of 2048."""
    net = _Recurrent("RNNLM", samples, chunk)
    at = net.embedded("embedding", 10_000, 2048)
    for i in range(2):
        at = net.layer(f"lstm{i}", at, 2048)
    return net.predicted(at, 10_000)


def nmt(samples: int, chunk: int = 10) -> LayeredModel:
    """Translation: 2 recurrent layers of 1024 read, 2 write, with attention."""
    net = _Recurrent("NMT", samples, chunk)
    read = net.embedded("source", 32_000, 1024)
    last = []
    for i in range(2):
        read = net.layer(f"encoder{i}", read, 1024)
        last.append(read[-1])
    at = net.embedded("target", 32_000, 1024)
    for i in range(2):
        at = net.layer(f"decoder{i}", at, 1024, last[i])
    at = [net.model.attention(f"attention.{i}", "attention", query, read) for i, query in enumerate(at)]
    return net.predicted(at, 32_000)


MODELS: dict[str, Callable[[int], LayeredModel]] = {
    "alexnet": alexnet, "inception-v3": inception_v3, "resnet-101": resnet101,
    "rnntc": rnntc, "rnnlm": rnnlm, "nmt": nmt,
}  # fmt: skip


def p100_cluster() -> SoapCluster:
    """4 nodes with 4 P100 each, NVLink within and 100 Gb/s InfiniBand between them (Jia et al., 2019)."""
    return SoapCluster(name="P100", device=named("p100"), nodes=4, per_node=4, link=18e9, network=10e9)


def k80_cluster() -> SoapCluster:
    """16 nodes with 4 K80 each, PCIe within and 56 Gb/s InfiniBand between them (Jia et al., 2019)."""
    return SoapCluster(name="K80", device=named("K80-half"), nodes=16, per_node=4, link=9e9, network=5e9)
