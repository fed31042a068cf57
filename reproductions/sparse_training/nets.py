"""Six small convolutional networks and generated pictures of coloured shapes, for the masks of real training.

VGG without and with batch norm, ResNet, MobileNet, DenseNet and GoogLeNet (without batch norm), for 32 × 32 pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from foretrace.training.training import Training

CLASSES, SIDE = 10, 32
IMAGES, HELD_OUT = 6144, 2048


def _shape(label: int, x: Tensor, y: Tensor) -> Tensor:
    """Where a shape is, on coordinates from its middle in units of its size."""
    r, box = (x * x + y * y).sqrt(), torch.maximum(x.abs(), y.abs())
    return (
        r < 1, box < 0.85, (r < 1) & (r > 0.6), (box < 0.9) & (box > 0.55), x.abs() + y.abs() < 1,
        (y < 0.8) & (y > 2 * x.abs() - 0.9), torch.minimum(x.abs(), y.abs()) < 0.25,
        ((x - y).abs() < 0.35) | ((x + y).abs() < 0.35), (y.abs() < 0.9) & ((3.4 * y).sin() > 0),
        (x.abs() < 0.9) & ((3.4 * x).sin() > 0),
    )[label] & (box < 1)  # fmt: skip


@cache
def shapes() -> tuple[Tensor, Tensor]:
    """Pictures (N, 3, 32, 32) from 0 to 1, without noise, and which of ten shapes each shows (N)."""
    random = torch.Generator().manual_seed(21)
    count = IMAGES + HELD_OUT
    label = torch.arange(count) % CLASSES
    middle = SIDE * (0.3 + 0.4 * torch.rand(2, count, 1, 1, generator=random))
    size = SIDE * (0.16 + 0.14 * torch.rand(count, 1, 1, generator=random))
    turn = 0.35 * (torch.rand(count, 1, 1, generator=random) - 0.5)
    at = torch.arange(SIDE) + 0.5
    dx, dy = (at.view(1, 1, -1) - middle[0]) / size, (at.view(1, -1, 1) - middle[1]) / size
    x, y = turn.cos() * dx - turn.sin() * dy, turn.sin() * dx + turn.cos() * dy
    inside = torch.zeros(count, SIDE, SIDE, dtype=torch.bool)
    for kind in range(CLASSES):
        mine = label == kind
        inside[mine] = _shape(kind, x[mine], y[mine])
    colours = torch.rand(2, count, 3, 1, 1, generator=random)
    # A slope of brightness, so that a background is no single number.
    slope = 0.3 * (torch.rand(count, 1, 1, generator=random) - 0.5) * (at / SIDE).view(1, 1, -1)
    image = torch.where(inside.unsqueeze(1), colours[0], colours[1]) + slope.unsqueeze(1)
    order = torch.randperm(count, generator=random)
    return image[order].clamp(0.02, 1), label[order]


def _conv(inputs: int, outputs: int, kernel: int = 3, *, norm: bool, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution, batch norm where asked for, ReLU."""
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=not norm)
    ]
    return nn.Sequential(*layers, *([nn.BatchNorm2d(outputs)] if norm else []), nn.ReLU())


class _Head(nn.Sequential):
    """Mean over the picture and a linear layer behind what it holds."""

    def __init__(self, channels: int, *layers: nn.Module) -> None:
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def vgg(norm: bool = False) -> nn.Module:
    """Six 3 × 3 convolutions and three max pools."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128):
        layers += [_conv(channels, width, norm=norm), _conv(width, width, norm=norm), nn.MaxPool2d(2)]
        channels = width
    return _Head(channels, *layers)


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _conv(inputs, outputs, norm=True, stride=stride)
        self.second = nn.Sequential(nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs))
        self.shortcut = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))
            if stride != 1 or inputs != outputs
            else nn.Identity()
        )

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(self.second(self.first(images)) + self.shortcut(images))


def resnet() -> nn.Module:
    """A convolution and six basic blocks."""
    layers: list[nn.Module] = [_conv(3, 24, norm=True)]
    channels = 24
    for width, stride in ((24, 1), (48, 2), (96, 2)):
        layers += [_Residual(channels, width, stride), _Residual(width, width, 1)]
        channels = width
    return _Head(channels, *layers)


def mobilenet() -> nn.Module:
    """Depthwise 3 × 3 and pointwise convolutions in turn, each with batch norm and ReLU (the first MobileNet)."""
    layers: list[nn.Module] = [_conv(3, 32, norm=True)]
    channels = 32
    for width, stride in ((64, 1), (96, 2), (96, 1), (160, 2), (160, 1), (160, 1)):
        layers += [_conv(channels, channels, norm=True, stride=stride, groups=channels)]
        layers += [_conv(channels, width, 1, norm=True)]
        channels = width
    return _Head(channels, *layers)


class _Dense(nn.Module):
    """Batch norm, ReLU and convolution, whose result stands beside what came in."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.BatchNorm2d(inputs), nn.ReLU(), nn.Conv2d(inputs, growth, 3, padding=1, bias=False)
        )

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([images, self.layers(images)], 1)


def densenet() -> nn.Module:
    """Three dense blocks of four layers with growth 16, halved between them."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1, bias=False)]
    channels = 32
    for block in range(3):
        for _ in range(4):
            layers.append(_Dense(channels, 16))
            channels += 16
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
        if block < 2:
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
    return _Head(channels, *layers)


class _Inception(nn.Module):
    """1 × 1, 3 × 3, 5 × 5 and pooled branches side by side (Szegedy et al. 2015, figure 2b), without batch norm."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.one = _conv(inputs, width, 1, norm=False)
        self.three = nn.Sequential(_conv(inputs, width, 1, norm=False), _conv(width, 2 * width, norm=False))
        self.five = nn.Sequential(
            _conv(inputs, width // 2, 1, norm=False), _conv(width // 2, width // 2, 5, norm=False)
        )
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(inputs, width // 2, 1, norm=False))

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([self.one(images), self.three(images), self.five(images), self.pool(images)], 1)


def googlenet() -> nn.Module:
    """A convolution and four inception modules."""
    return _Head(
        192, _conv(3, 32, norm=False), nn.MaxPool2d(2), _Inception(32, 24), _Inception(96, 32), nn.MaxPool2d(2),
        _Inception(128, 40), _Inception(160, 48),
    )  # fmt: skip


NETS: dict[str, Callable[[], nn.Module]] = {
    "VGG": vgg, "VGG-BN": lambda: vgg(norm=True), "ResNet": resnet, "MobileNet": mobilenet, "DenseNet": densenet,
    "GoogLeNet": googlenet,
}  # fmt: skip


def training(name: str, *, batch: int = 64, seed: int = 0) -> Training:
    """A network learning the shapes by Adam; weights and the order of pictures come from the seed."""
    torch.manual_seed(seed)
    model = NETS[name]()
    for each in model.modules():
        if isinstance(each, nn.Conv2d):
            nn.init.kaiming_normal_(each.weight, mode="fan_out", nonlinearity="relu")
    image, label = shapes()
    loader = DataLoader(
        TensorDataset(image[:IMAGES], label[:IMAGES]), batch_size=batch, shuffle=True, drop_last=True,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    return Training(
        name=name, model=model, optimizers=(torch.optim.Adam(model.parameters(), lr=1e-3),), loader=loader,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )  # fmt: skip


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Share of the held-out pictures whose shape is told."""
    image, label = shapes()
    model.eval()
    right = [(model(image[i : i + 256]).argmax(1) == label[i : i + 256]).sum() for i in range(IMAGES, len(image), 256)]
    model.train()
    return int(sum(right)) / HELD_OUT
