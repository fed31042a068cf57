"""Image classification: ResNet-50, MobileNetV2 and VGG-11 (Inception v3 has a module of its own).

Images are (batch, 3, height, width) float32, labels (batch,) int64.
"""

from __future__ import annotations

from dataclasses import dataclass

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


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution around a shortcut (He et al. 2016, figure 5), with the stride on the 3x3."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, images: Tensor) -> Tensor:
        found = self.relu(self.bn1(self.conv1(images)))
        found = self.relu(self.bn2(self.conv2(found)))
        added: Tensor = self.bn3(self.conv3(found)) + self.shortcut(images)
        return torch.relu_(added)


class ResNet(nn.Module):
    """Residual network of bottleneck blocks. `features` gives the four stages, at strides 4, 8, 16 and 32."""

    def __init__(self, blocks: tuple[int, int, int, int], *, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = width
        stages = []
        for stage, count in enumerate(blocks):
            made = []
            for block in range(count):
                made.append(Bottleneck(channels, width << stage, 2 if stage and not block else 1))
                channels = 4 * (width << stage)
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


class VGG11(nn.Module):
    """Configuration A of the paper: 3x3 convolutions with bias and without normalisation, three large linear layers."""

    PLAN = ((64, 1), (128, 1), (256, 2), (512, 2), (512, 2))

    def __init__(self, *, side: int = 224, width: float = 1.0, hidden: int = 4096, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for outputs, count in self.PLAN:
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


def resnet50(size: str) -> Training:
    if size == "full":
        return _training("resnet50", ResNet((3, 4, 6, 3)), Photo(side=224, classes=1000), 32, lr=0.0125, decay=1e-4)
    model = ResNet((3, 4, 6, 3), width=16, classes=100)
    return _training("resnet50", model, Photo(side=64, classes=100), 16, lr=0.01, decay=1e-4)


def mobilenet_v2(size: str) -> Training:
    if size == "full":
        return _training("mobilenet-v2", MobileNetV2(), Photo(side=224, classes=1000), 96, lr=0.045, decay=4e-5)
    model = MobileNetV2(width=0.35, classes=100)
    return _training("mobilenet-v2", model, Photo(side=64, classes=100), 16, lr=0.02, decay=4e-5)


def vgg11(size: str) -> Training:
    if size == "full":
        return _training("vgg11", VGG11(), Photo(side=224, classes=1000), 64, lr=0.01, decay=5e-4)
    model = VGG11(side=32, width=0.5, hidden=1024, classes=100)
    return _training("vgg11", model, Photo(side=32, classes=100), 16, lr=0.01, decay=5e-4)


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
