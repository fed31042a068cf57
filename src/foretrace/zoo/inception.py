"""Image classification: Inception v3.

Images are (batch, 3, height, width) float32, labels (batch,) int64. Many branches of different shapes, joined
by concatenation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.training.training import Training
from foretrace.zoo.data import loader
from foretrace.zoo.vision import Photo, classification_loss

_Size = int | tuple[int, int]
_AUXILIARY_WEIGHT = 0.4  # of the loss of the classifier in the middle


class Convolution(nn.Module):
    """Convolution, batch norm and ReLU."""

    def __init__(self, inputs: int, outputs: int, size: _Size, stride: int = 1, padding: _Size = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.bn(self.conv(images)), inplace=True)


class Branches(nn.Module):
    """Branches side by side on the same input, concatenated along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([branch(images) for branch in self.branches], 1)


class InceptionV3(nn.Module):
    """The network of table 1 (with the branches of figures 5, 6 and 7); `width` multiplies the channels.

    With `auxiliary`, training gives the scores of both classifiers: (final, auxiliary).
    """

    def __init__(self, *, width: float = 1.0, classes: int = 1000, auxiliary: bool = True) -> None:
        super().__init__()

        def wide(channels: int) -> int:
            return max(8, round(channels * width / 8) * 8)

        def conv(inputs: int, outputs: int, size: _Size, stride: int = 1, padding: _Size = 0) -> Convolution:
            return Convolution(inputs, wide(outputs), size, stride, padding)

        self.stem = nn.Sequential(
            conv(3, 32, 3, stride=2),
            conv(wide(32), 32, 3),
            conv(wide(32), 64, 3, padding=1),
            nn.MaxPool2d(3, stride=2),
            conv(wide(64), 80, 1),
            conv(wide(80), 192, 3),
            nn.MaxPool2d(3, stride=2),
        )
        channels = wide(192)

        def fine(pooled: int) -> Branches:
            nonlocal channels
            inputs, channels = channels, wide(64) + wide(64) + wide(96) + wide(pooled)
            return Branches(
                conv(inputs, 64, 1),
                nn.Sequential(conv(inputs, 48, 1), conv(wide(48), 64, 5, padding=2)),
                nn.Sequential(conv(inputs, 64, 1), conv(wide(64), 96, 3, padding=1), conv(wide(96), 96, 3, padding=1)),
                nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), conv(inputs, pooled, 1)),
            )

        def to_middle() -> Branches:
            nonlocal channels
            inputs, channels = channels, wide(384) + wide(96) + channels
            return Branches(
                conv(inputs, 384, 3, stride=2),
                nn.Sequential(conv(inputs, 64, 1), conv(wide(64), 96, 3, padding=1), conv(wide(96), 96, 3, stride=2)),
                nn.MaxPool2d(3, stride=2),
            )

        def middle(inner: int) -> Branches:
            nonlocal channels
            inputs, channels = channels, 4 * wide(192)
            row, column = ((1, 7), (0, 3)), ((7, 1), (3, 0))

            def chain(outputs: list[int], shapes: list[tuple[tuple[int, int], tuple[int, int]]]) -> nn.Sequential:
                made = [conv(inputs, inner, 1)]
                previous = inner
                for each, (size, padding) in zip(outputs, shapes, strict=True):
                    made.append(conv(wide(previous), each, size, padding=padding))
                    previous = each
                return nn.Sequential(*made)

            return Branches(
                conv(inputs, 192, 1),
                chain([inner, 192], [row, column]),
                chain([inner, inner, inner, 192], [column, row, column, row]),
                nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), conv(inputs, 192, 1)),
            )

        def to_coarse() -> Branches:
            nonlocal channels
            inputs, channels = channels, wide(320) + wide(192) + channels
            return Branches(
                nn.Sequential(conv(inputs, 192, 1), conv(wide(192), 320, 3, stride=2)),
                nn.Sequential(
                    conv(inputs, 192, 1),
                    conv(wide(192), 192, (1, 7), padding=(0, 3)),
                    conv(wide(192), 192, (7, 1), padding=(3, 0)),
                    conv(wide(192), 192, 3, stride=2),
                ),
                nn.MaxPool2d(3, stride=2),
            )

        def coarse() -> Branches:
            nonlocal channels
            inputs, channels = channels, wide(320) + 4 * wide(384) + wide(192)

            def split() -> Branches:
                return Branches(
                    conv(wide(384), 384, (1, 3), padding=(0, 1)), conv(wide(384), 384, (3, 1), padding=(1, 0))
                )

            return Branches(
                conv(inputs, 320, 1),
                nn.Sequential(conv(inputs, 384, 1), split()),
                nn.Sequential(conv(inputs, 448, 1), conv(wide(448), 384, 3, padding=1), split()),
                nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), conv(inputs, 192, 1)),
            )

        self.fine = nn.Sequential(fine(32), fine(64), fine(64), to_middle())
        self.middle = nn.Sequential(middle(128), middle(160), middle(160), middle(192))
        self.auxiliary: nn.Module | None = None
        if auxiliary:  # on features of 17 x 17, as images of 299 x 299 give them
            self.auxiliary = nn.Sequential(
                nn.AvgPool2d(5, stride=3),
                conv(channels, 128, 1),
                conv(wide(128), 768, 5),
                nn.Flatten(),
                nn.Linear(wide(768), classes),
            )
        self.coarse = nn.Sequential(to_coarse(), coarse(), coarse())
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        middle = self.middle(self.fine(self.stem(images)))
        scores: Tensor = self.fc(self.dropout(self.coarse(middle).mean((2, 3))))
        if self.auxiliary is not None and self.training:
            return scores, self.auxiliary(middle)
        return scores


def two_classifier_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return mean cross entropy of the final classifier and, with less weight, of the auxiliary one."""
    images, labels = batch
    found = model(images)
    scores, *auxiliary = found if isinstance(found, tuple) else (found,)  # the second one in training alone
    final = functional.cross_entropy(scores.float(), labels)
    return sum((_AUXILIARY_WEIGHT * functional.cross_entropy(each.float(), labels) for each in auxiliary), final)


def inception_v3(size: str) -> Training:
    if size == "full":
        model, photo, batch_size, loss = InceptionV3(), Photo(side=299, classes=1000), 32, two_classifier_loss
    else:  # 107 pixels leave 5 x 5 in the middle, too few for the auxiliary classifier
        model = InceptionV3(width=0.25, classes=100, auxiliary=False)
        photo, batch_size, loss = Photo(side=107, classes=100), 8, classification_loss
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=4e-5)
    batches = loader(photo, batch_size=batch_size)
    return Training(name="inception-v3", model=model, optimizers=(optimizer,), loader=batches, loss=loss)
