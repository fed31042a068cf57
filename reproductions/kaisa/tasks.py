"""Three small trainings on generated images of digits: an auto-encoder, a convolutional and a deep plain classifier.

And the auto-encoder on the digits of scikit-learn, where that is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from foretrace.training.training import Training
from reproductions.digits import handwritten

SAMPLES, HELD_OUT = 4000, 1000
_ROWS = (
    "111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001",
    "111100111001111", "111100111101111", "111001010010010", "111101111101111", "111101111001111",
)  # fmt: skip


@cache
def digits(noise: float) -> tuple[Tensor, Tensor]:
    """Images (N, 1, 8, 8) from 0 to 1 of ten glyphs, stretched, moved, blurred and with noise; and their digits."""
    random = torch.Generator().manual_seed(20)
    count = SAMPLES + HELD_OUT
    label = torch.randint(0, 10, (count,), generator=random)
    glyphs = torch.tensor([[float(each) for each in rows] for rows in _ROWS]).view(10, 1, 5, 3)
    scale = 0.75 + 0.5 * torch.rand(count, 2, generator=random)
    shift = 0.5 * (torch.rand(count, 2, generator=random) - 0.5)
    shear = 0.6 * (torch.rand(count, generator=random) - 0.5)
    transform = torch.zeros(count, 2, 3)
    transform[:, 0, 0], transform[:, 1, 1] = 1.3 * scale[:, 0], 1.1 * scale[:, 1]
    transform[:, 0, 1], transform[:, :, 2] = shear, shift
    grid = functional.affine_grid(transform, [count, 1, 8, 8], align_corners=False)
    image = functional.grid_sample(glyphs[label], grid, align_corners=False)
    image = image * (0.6 + 0.4 * torch.rand(count, 1, 1, 1, generator=random))
    return (image + noise * torch.randn(image.shape, generator=random)).clamp(0, 1), label


@dataclass(frozen=True, kw_only=True)
class LearningTask:
    """What is trained until it reaches a target."""

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    noise: float
    target: float  # loss on the first training images, or share of wrong answers on as many held out
    images: Callable[[float], tuple[Tensor, Tensor]] = digits  # of a noise
    samples: int = SAMPLES  # to train on; the others are held out
    limit: int = 400  # steps of a run, at most

    def data(self, *, held_out: bool) -> tuple[Tensor, Tensor]:
        """Images and digits."""
        image, label = self.images(self.noise)
        part = slice(self.samples, None) if held_out else slice(self.samples)
        return image[part], label[part]

    def training(self, batch: int, seed: int, optimizer: Callable[[Any], torch.optim.Optimizer]) -> Training:
        """A training whose weights and order of images come from the seed; batches lie ready in memory."""
        torch.manual_seed(seed)
        model = self.model()
        data = TensorDataset(*self.data(held_out=False))
        order = torch.Generator().manual_seed(seed)
        loader = DataLoader(data, batch_size=batch, shuffle=True, drop_last=True, generator=order)
        made = Training(
            name=self.name, model=model, optimizers=(optimizer(model.parameters()),), loader=loader, loss=self.loss
        )
        return made.with_batches(self.samples // batch)

    @torch.no_grad()
    def score(self, model: nn.Module) -> float:
        """What is to come down to the target."""
        model.eval()
        if self.loss is _pixels:
            found = float(self.loss(model, [each[:HELD_OUT] for each in self.data(held_out=False)]))
        else:
            image, label = self.data(held_out=True)
            found = float((model(image).argmax(1) != label).float().mean())
        model.train()
        return found


AUTO_ENCODER, HANDWRITTEN = "auto-encoder", "auto-encoder, scikit-learn"
_SIZES = (64, 128, 64, 32, 8, 32, 64, 128, 64)


def _auto_encoder() -> nn.Module:
    layers = [each for a, b in pairwise(_SIZES) for each in (nn.Linear(a, b), nn.ReLU())]
    del layers[-1], layers[7]  # neither code nor image is cut at 0
    return nn.Sequential(nn.Flatten(), *layers)


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


def _deep() -> nn.Module:
    inner = [each for _ in range(7) for each in (nn.Linear(64, 64), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), *inner, nn.Linear(64, 10))


def _pixels(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of an image, summed over its pixels."""
    image = batch[0].flatten(1)
    return functional.binary_cross_entropy_with_logits(model(image), image, reduction="sum") / len(image)


def _classes(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


TASKS = (
    LearningTask(name=AUTO_ENCODER, model=_auto_encoder, loss=_pixels, noise=0.0, target=37.8),
    LearningTask(name="convolutions", model=_convolutions, loss=_classes, noise=0.25, target=0.2),
    LearningTask(name="deep-tanh", model=_deep, loss=_classes, noise=0.25, target=0.25, limit=1000),
    LearningTask(
        name=HANDWRITTEN, model=_auto_encoder, loss=_pixels, noise=0.0, target=22.0, images=handwritten, samples=1500
    ),
)
