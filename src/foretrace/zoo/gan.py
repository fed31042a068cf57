"""A generative adversarial network: two networks, two optimizers, two updates a step.

A batch is (image (batch, 3, side, side) float32 in -1 ... 1, noise (batch, dimensions) float32).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.training.batches import parts
from foretrace.training.training import Training
from foretrace.zoo.data import loader

_NOISE = 100


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A smooth picture (random colours on a coarse grid, enlarged), and noise to make another one from."""

    side: int

    def __call__(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        coarse = torch.rand(1, 3, 4, 4, generator=generator) * 2 - 1
        image = functional.interpolate(coarse, size=self.side, mode="bilinear", align_corners=False)[0]
        return image, torch.randn(_NOISE, generator=generator)


class DCGAN(nn.Module):
    """Generator and discriminator for images of 64 x 64 (32 x 32 with `doublings` 3); batch norm in both."""

    def __init__(self, *, width: int, doublings: int) -> None:
        super().__init__()
        made: list[nn.Module] = []
        channels, inputs = width << (doublings - 1), _NOISE
        for i in range(doublings):
            stride, padding = (2, 1) if i else (1, 0)
            made += [
                nn.ConvTranspose2d(inputs, channels >> i, 4, stride, padding, bias=False),
                nn.BatchNorm2d(channels >> i),
                nn.ReLU(inplace=True),
            ]
            inputs = channels >> i
        self.generator = nn.Sequential(*made, nn.ConvTranspose2d(inputs, 3, 4, 2, 1, bias=False), nn.Tanh())
        made, inputs = [], 3
        for i in range(doublings):
            made.append(nn.Conv2d(inputs, width << i, 4, 2, 1, bias=False))
            made += [nn.BatchNorm2d(width << i)] if i else []
            made.append(nn.LeakyReLU(0.2, inplace=True))
            inputs = width << i
        self.discriminator = nn.Sequential(*made, nn.Conv2d(inputs, 1, 4, bias=False))
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
                nn.init.normal_(module.weight, 0.0, 0.02)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1.0, 0.02)

    def forward(self, noise: Tensor) -> Tensor:
        """Return images from noise (batch, dimensions)."""
        made: Tensor = self.generator(noise[:, :, None, None])
        return made


def discriminator_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return how badly real and generated images are distinguished."""
    assert isinstance(model.discriminator, nn.Module)
    images, noise = batch
    with torch.no_grad():
        made = model(noise)
    real, fake = model.discriminator(images).float(), model.discriminator(made).float()
    return _judged(real, 1.0) + _judged(fake, 0.0)


def generator_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return how badly generated images pass for real ones."""
    assert isinstance(model.discriminator, nn.Module)
    _, noise = batch
    return _judged(model.discriminator(model(noise)).float(), 1.0)


def adversarial_step(training: Training, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Train discriminator, then generator (Goodfellow et al. 2014, algorithm 1 with k = 1); return both losses' sum."""
    of_generator, of_discriminator = training.optimizers
    pieces = parts(batch, training.micro_batches) if training.micro_batches > 1 else [batch]
    total = torch.zeros((), device=training.device)
    for optimizer, loss in ((of_discriminator, discriminator_loss), (of_generator, generator_loss)):
        for piece in pieces:
            found = training.forward(piece, loss) / len(pieces)
            training.backward(found)
            total += found.detach()
        training.update(optimizer)
    of_discriminator.zero_grad(set_to_none=True)  # the generator's loss left gradients there, too
    return total


def dcgan(size: str) -> Training:
    if size == "full":
        model, picture, batch_size = DCGAN(width=64, doublings=4), Picture(side=64), 128
    else:
        model, picture, batch_size = DCGAN(width=32, doublings=3), Picture(side=32), 16
    return Training(
        name="gan",
        model=model,
        optimizers=tuple(
            torch.optim.Adam(network.parameters(), lr=2e-4, betas=(0.5, 0.999))
            for network in (model.generator, model.discriminator)
        ),
        loader=loader(picture, batch_size=batch_size),
        loss=generator_loss,
        run=adversarial_step,
    )


def _judged(scores: Tensor, truth: float) -> Tensor:
    return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, truth))
