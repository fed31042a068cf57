"""Image classification: ResNets, MobileNetV2, VGG networks and a vision transformer (Inception v3 has its own module).

Images are (batch, 3, height, width) float32, labels (batch,) int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.training.training import Training
from foretrace.zoo.data import integer, loader

_MEAN = torch.tensor([0.485, 0.456, 0.406], device="cpu").view(3, 1, 1)
_STD = torch.tensor([0.229, 0.224, 0.225], device="cpu").view(3, 1, 1)


@dataclass(frozen=True, kw_only=True)
class Photo:
    """A picture as a data pipeline makes it: 8-bit pixels, cropped, flipped, scaled and normalised; and its class."""

    side: int  # pixels
    classes: int

    def __call__(self, generator: torch.Generator) -> tuple[Tensor, int]:
        label = integer(self.classes, generator)
        margin = self.side // 8
        pixels = torch.randint(128, (3, self.side + margin, self.side + margin), generator=generator, dtype=torch.uint8)
        for channel in range(3):  # what can be learned: the class is the mean colour
            pixels[channel] += label * (channel + 7) % 128
        top, left = integer(margin + 1, generator), integer(margin + 1, generator)
        crop = pixels[:, top : top + self.side, left : left + self.side]
        if integer(2, generator):
            crop = crop.flip(2)
        return crop.float().div_(255).sub_(_MEAN).div_(_STD), label


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut (He et al. 2016, figure 5)."""

    EXPANSION = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = _shortcut(inputs, width, stride)

    def forward(self, images: Tensor) -> Tensor:
        found = self.relu(self.bn1(self.conv1(images)))
        added: Tensor = self.bn2(self.conv2(found)) + self.shortcut(images)
        return torch.relu_(added)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution around a shortcut (He et al. 2016, figure 5), with the stride on the 3x3."""

    EXPANSION = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = self.EXPANSION * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = _shortcut(inputs, outputs, stride)

    def forward(self, images: Tensor) -> Tensor:
        found = self.relu(self.bn1(self.conv1(images)))
        found = self.relu(self.bn2(self.conv2(found)))
        added: Tensor = self.bn3(self.conv3(found)) + self.shortcut(images)
        return torch.relu_(added)


class ResNet(nn.Module):
    """Residual network. `features` gives the four stages, at strides 4, 8, 16 and 32."""

    def __init__(
        self,
        blocks: tuple[int, int, int, int],
        *,
        block: type[BasicBlock | Bottleneck] = Bottleneck,
        width: int = 64,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = width
        stages = []
        for stage, count in enumerate(blocks):
            made = []
            for i in range(count):
                made.append(block(channels, width << stage, 2 if stage and not i else 1))
                channels = block.EXPANSION * (width << stage)
            stages.append(nn.Sequential(*made))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(channels, classes) if classes else nn.Identity()
        _initialise(self)

    def features(self, images: Tensor) -> list[Tensor]:
        found = self.pool(self.relu(self.bn1(self.conv1(images))))
        stages = []
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            found = layer(found)
            stages.append(found)
        return stages

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.fc(self.features(images)[-1].mean((2, 3)))
        return scores


class InvertedResidual(nn.Module):
    """Expansion, depthwise 3x3 and linear projection (Sandler et al. 2018, figure 3)."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers += [nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True)]
        layers += [
            nn.Conv2d(hidden, hidden, 3, stride=stride, padding=1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        ]
        self.layers = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.layers(images)
        return images + found if self.residual else found


class MobileNetV2(nn.Module):
    """The network of table 2; `width` multiplies the channels."""

    # expansion, channels, blocks, stride of the first
    PLAN = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, *, width: float = 1.0, classes: int = 1000) -> None:
        super().__init__()
        channels = _multiple_of_8(32 * width)
        last = _multiple_of_8(1280 * width) if width < 1 else 1280
        layers: list[nn.Module] = [
            nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU6(inplace=True),
        ]
        for expansion, outputs, count, stride in self.PLAN:
            for block in range(count):
                wide = _multiple_of_8(outputs * width)
                layers.append(InvertedResidual(channels, wide, stride if block == 0 else 1, expansion))
                channels = wide
        layers += [nn.Conv2d(channels, last, 1, bias=False), nn.BatchNorm2d(last), nn.ReLU6(inplace=True)]
        self.features = nn.Sequential(*layers)
        self.dropout = nn.Dropout(0.2)
        self.classifier = nn.Linear(last, classes)
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.dropout(self.features(images).mean((2, 3))))
        return scores


class VGG(nn.Module):
    """3x3 convolutions with bias and without normalisation in five parts, and three large linear layers.

    `convolutions` of each part are a column of the paper's table 1.
    """

    def __init__(
        self,
        convolutions: Sequence[int],
        *,
        side: int = 224,
        width: float = 1.0,
        hidden: int = 4096,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for outputs, count in zip((64, 128, 256, 512, 512), convolutions, strict=True):
            for _ in range(count):
                layers += [nn.Conv2d(channels, int(outputs * width), 3, padding=1), nn.ReLU(inplace=True)]
                channels = int(outputs * width)
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(channels * (side // 32) ** 2, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, classes),
        )
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(images).flatten(1))
        return scores


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return mean cross entropy, in float32 whatever the scores are."""
    images, labels = batch
    return functional.cross_entropy(model(images).float(), labels)


def _training(name: str, model: nn.Module, photo: Photo, batch_size: int, *, lr: float, decay: float) -> Training:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=decay)
    batches = loader(photo, batch_size=batch_size)
    return Training(name=name, model=model, optimizers=(optimizer,), loader=batches, loss=classification_loss)


def _resnet(size: str, *, name: str, blocks: tuple[int, int, int, int], block: type = Bottleneck) -> Training:
    if size == "full":
        model = ResNet(blocks, block=block)
        return _training(name, model, Photo(side=224, classes=1000), 32, lr=0.0125, decay=1e-4)
    model = ResNet(blocks, block=block, width=16, classes=100)
    return _training(name, model, Photo(side=64, classes=100), 16, lr=0.01, decay=1e-4)


resnet18 = partial(_resnet, name="resnet18", blocks=(2, 2, 2, 2), block=BasicBlock)
resnet34 = partial(_resnet, name="resnet34", blocks=(3, 4, 6, 3), block=BasicBlock)
resnet50 = partial(_resnet, name="resnet50", blocks=(3, 4, 6, 3))
resnet101 = partial(_resnet, name="resnet101", blocks=(3, 4, 23, 3))
resnet152 = partial(_resnet, name="resnet152", blocks=(3, 8, 36, 3))


def mobilenet_v2(size: str) -> Training:
    if size == "full":
        return _training("mobilenet-v2", MobileNetV2(), Photo(side=224, classes=1000), 96, lr=0.045, decay=4e-5)
    model = MobileNetV2(width=0.35, classes=100)
    return _training("mobilenet-v2", model, Photo(side=64, classes=100), 16, lr=0.02, decay=4e-5)


def _vgg(size: str, *, name: str, convolutions: Sequence[int]) -> Training:
    if size == "full":
        return _training(name, VGG(convolutions), Photo(side=224, classes=1000), 64, lr=0.01, decay=5e-4)
    model = VGG(convolutions, side=32, width=0.5, hidden=1024, classes=100)
    return _training(name, model, Photo(side=32, classes=100), 16, lr=0.01, decay=5e-4)


vgg11 = partial(_vgg, name="vgg11", convolutions=(1, 1, 2, 2, 2))
vgg13 = partial(_vgg, name="vgg13", convolutions=(2, 2, 2, 2, 2))
vgg16 = partial(_vgg, name="vgg16", convolutions=(2, 2, 3, 3, 3))
vgg19 = partial(_vgg, name="vgg19", convolutions=(2, 2, 4, 4, 4))


def _scores_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return mean cross entropy of a model of `transformers`."""
    images, labels = batch
    return functional.cross_entropy(model(pixel_values=images).logits.float(), labels)


def vit_b_16(size: str) -> Training:
    from transformers import ViTConfig, ViTForImageClassification

    shape: dict[str, Any] = {"attn_implementation": "sdpa", "num_labels": 1000}  # ViT-B/16 of the paper's table 1
    side, batch_size = 224, 64
    if size == "tiny":
        shape |= {"num_labels": 100, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
        shape |= {"intermediate_size": 512, "image_size": 64, "patch_size": 8}
        side, batch_size = 64, 8
    model = ViTForImageClassification(ViTConfig(**shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    batches = loader(Photo(side=side, classes=shape["num_labels"]), batch_size=batch_size)
    return Training(name="vit-b-16", model=model, optimizers=(optimizer,), loader=batches, loss=_scores_loss)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))


def _multiple_of_8(channels: float) -> int:
    """Return the nearest multiple of 8, never more than 10 % below (the rule of the authors' code)."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
