"""What ``gpu_pairs.py`` trains: models, a data set, and the arms and pairs each is measured in.

Plain PyTorch, so that a workload is the same on every machine.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

LOADER_BATCHES = 1_000_000  # a loader never runs dry inside a block

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Model and batch sizes; ``QUICK`` is for dry runs only."""

    resnet_blocks: tuple[int, ...] = (3, 4, 6, 3)
    resnet_width: int = 64
    resnet_batch: int = 64
    image: int = 224
    cnn_batch: int = 128
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50_257
    context: int = 512
    text_batch: int = 8
    mixer_layers: int = 16
    queue_elements: int = 64 * 2**20
    queue_launches: int = 700


QUICK = Sizes(
    resnet_blocks=(1, 1, 1, 1),
    resnet_width=8,
    resnet_batch=4,
    image=64,
    cnn_batch=8,
    layers=2,
    width=64,
    heads=2,
    vocabulary=512,
    context=64,
    text_batch=2,
    mixer_layers=2,
    queue_elements=2**10,
    queue_launches=50,
)


class Bottleneck(nn.Module):
    """Residual block of He et al. 2016 (1x1, 3x3, 1x1), stride in the 3x3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x), inplace=True)


class ResNet(nn.Module):
    """ResNet with bottleneck blocks; (3, 4, 6, 3), width 64, 1,000 classes has 25,557,032 parameters."""

    def __init__(self, blocks: tuple[int, ...], width: int, classes: int, *, small_images: bool) -> None:
        super().__init__()
        if small_images:
            stem: list[nn.Module] = [
                nn.Conv2d(3, width, 3, 1, 1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
        else:
            stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            stem.append(nn.MaxPool2d(3, 2, 1))
        self.stem = nn.Sequential(*stem)
        stages, inputs = [], width
        for index, count in enumerate(blocks):
            stage = []
            for block in range(count):
                stride = 2 if block == 0 and index > 0 else 1
                stage.append(Bottleneck(inputs, width << index, stride))
                inputs = 4 * (width << index)
            stages.append(nn.Sequential(*stage))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return y


class Block(nn.Module):
    """Pre-norm causal transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, c))
        y: torch.Tensor = x + self.mlp(self.norm2(x))
        return y


class Transformer(nn.Module):
    """Decoder-only language model with tied embedding; the default sizes are GPT-2 small (no dropout)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Parameter(torch.zeros(sizes.context, sizes.width))
        self.blocks = nn.Sequential(*(Block(sizes.width, sizes.heads) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.norm(self.blocks(self.tokens(x) + self.positions))).flatten(0, 1)
        return y


class MixerBlock(nn.Module):
    """One block of Tolstikhin et al. 2021: an MLP over the patches, then an MLP over the channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_patches = nn.Sequential(nn.Linear(patches, patches), nn.GELU(), nn.Linear(patches, patches))
        self.over_channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.over_patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        y: torch.Tensor = x + self.over_channels(self.norm2(x))
        return y


class Mixer(nn.Module):
    """Small MLP-mixer: hundreds of kernels of a few microseconds, so the CPU sets the pace."""

    def __init__(self, layers: int, width: int = 128, patches: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Linear(48, width)
        self.blocks = nn.Sequential(*(MixerBlock(patches, width) for _ in range(layers)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.blocks(self.embed(x)).mean(1))
        return y


class CompressedImages(Dataset[Batch]):
    """Images kept deflated in memory; an item is inflated, cropped, resized and normalised on the CPU.

    The work of an item is real and the same everywhere: standard library and PyTorch only, no image files.
    """

    def __init__(self, image: int, batch: int, classes: int, images: int = 32) -> None:
        self.image, self.classes, self.length = image, classes, batch * LOADER_BATCHES
        self.source = image + image // 4
        generator = torch.Generator().manual_seed(0)
        self.deflated = []
        for _ in range(images):
            coarse = torch.rand(1, 3, 12, 12, generator=generator)
            picture = F.interpolate(coarse, (self.source, self.source), mode="bicubic")[0]
            picture = picture * 250 + 4 * torch.rand(picture.shape, generator=generator)
            self.deflated.append(zlib.compress(bytes(picture.clamp(0, 255).byte().flatten().tolist()), 6))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        inflated = bytearray(zlib.decompress(self.deflated[index % len(self.deflated)]))
        pixels = torch.frombuffer(inflated, dtype=torch.uint8)
        margin = index % (self.source - self.image)
        picture = pixels.view(3, self.source, self.source)[:, margin:, margin:].float()
        picture = F.interpolate(picture[None], (self.image, self.image), mode="bilinear", antialias=True)[0]
        return picture.sub_(127.0).div_(64.0), torch.tensor(index % self.classes)


# --- arms, workloads and pairs -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Arm:
    """How one job differs from its neighbours.

    ``graph`` is "" (eager), "step" (the whole step is one CUDA graph) or "model" (forward and backward are
    graphs, the optimizer is eager).  ``workers`` is None when batches lie ready in pinned memory.
    """

    name: str
    optimizer: str = "adamw-fused"
    precision: str = "fp32"
    graph: str = ""
    workers: int | None = None
    pin: bool = False
    steps: int = 2  # profiled steps


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training job: how to build its model and batch, and the arms and pairs it is measured in."""

    name: str
    build: Callable[[], tuple[nn.Module, Batch]]
    arms: tuple[Arm, ...]
    pairs: tuple[tuple[str, str, str], ...]  # (technique, arm before, arm after)
    twins: tuple[str, str]  # two arms that are the same job
    reads_loss: bool = False  # loss.item() every step
    dataset: Callable[[], Dataset[Batch]] | None = None
    blocks: int = 8
    block_steps: int = 5


BODY_ARMS = (
    Arm(name="fused", steps=4),
    Arm(name="fused-twin"),
    Arm(name="foreach", optimizer="adamw-foreach", steps=4),
    Arm(name="loop", optimizer="adamw-loop", steps=4),
    Arm(name="bf16-fused", precision="bf16", steps=4),
    Arm(name="step-graph", graph="step"),
    Arm(name="bf16-step-graph", precision="bf16", graph="step"),
    Arm(name="model-graph", graph="model"),
)
BODY_PAIRS = (
    ("fused-optimizer", "loop", "fused"),
    ("fused-optimizer", "foreach", "fused"),
    ("mixed-precision", "fused", "bf16-fused"),
    ("cuda-graphs", "fused", "step-graph"),
    ("cuda-graphs", "bf16-fused", "bf16-step-graph"),
    ("cuda-graphs", "fused", "model-graph"),
)
SGD_ARMS = (
    Arm(name="sgd", optimizer="sgd", steps=4),
    Arm(name="bf16-sgd", optimizer="sgd", precision="bf16", steps=4),
)
LOADER_ARMS = (
    Arm(name="workers0", optimizer="sgd", workers=0, steps=4),
    Arm(name="workers0-twin", optimizer="sgd", workers=0),
    Arm(name="workers0-pinned", optimizer="sgd", workers=0, pin=True, steps=4),
    Arm(name="workers1-pinned", optimizer="sgd", workers=1, pin=True, steps=3),
    Arm(name="workers4", optimizer="sgd", workers=4, steps=4),
    Arm(name="workers4-pinned", optimizer="sgd", workers=4, pin=True, steps=4),
)
LOADER_PAIRS = (
    ("prefetch-data", "workers0", "workers4"),
    ("prefetch-data", "workers0", "workers4-pinned"),
    ("prefetch-data", "workers0-pinned", "workers1-pinned"),
    ("prefetch-data", "workers0-pinned", "workers4-pinned"),
)


def workloads(sizes: Sizes) -> tuple[Workload, ...]:
    """Return every workload, most valuable first: a run that is cut short still has the best pairs."""

    def images(batch: int, side: int, classes: int) -> Batch:
        return torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))

    def resnet() -> tuple[nn.Module, Batch]:
        model = ResNet(sizes.resnet_blocks, sizes.resnet_width, 1000, small_images=False)
        return model, images(sizes.resnet_batch, sizes.image, 1000)

    def transformer() -> tuple[nn.Module, Batch]:
        text = torch.randint(sizes.vocabulary, (sizes.text_batch, sizes.context + 1))
        return Transformer(sizes), (text[:, :-1].contiguous(), text[:, 1:].flatten())

    def mixer() -> tuple[nn.Module, Batch]:
        return Mixer(sizes.mixer_layers), (torch.randn(8, 64, 48), torch.randint(10, (8,)))

    def cnn() -> tuple[nn.Module, Batch]:
        model = ResNet((2, 2, 2, 2), 32, 100, small_images=True)
        return model, images(sizes.cnn_batch, 32, 100)

    body: dict[str, Any] = {"arms": BODY_ARMS, "pairs": BODY_PAIRS, "twins": ("fused", "fused-twin")}
    resnet_body = body | {
        "arms": SGD_ARMS + BODY_ARMS,  # graph captures last: a failed one could spoil what follows
        "pairs": (*BODY_PAIRS, ("mixed-precision", "sgd", "bf16-sgd")),
    }
    return (
        Workload(name="transformer", build=transformer, **body),
        Workload(name="resnet50", build=resnet, **resnet_body),
        Workload(
            name="resnet50-loader",
            build=resnet,
            arms=LOADER_ARMS,
            pairs=LOADER_PAIRS,
            twins=("workers0", "workers0-twin"),
            dataset=functools.cache(lambda: CompressedImages(sizes.image, sizes.resnet_batch, 1000)),
            blocks=4,
            block_steps=12,  # workers deliver round robin: a whole number of rounds for 1 and 4 workers
        ),
        Workload(name="mixer", build=mixer, blocks=12, block_steps=15, **body),
        Workload(name="cnn", build=cnn, reads_loss=True, blocks=12, block_steps=15, **body),
    )
