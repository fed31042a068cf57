"""A small ResNet on generated images: trained dense, then quantised layer by layer and trained again.

Ten classes of strokes, each warped, coloured and hidden in noise, drawn anew for every step; the test images are the
same for all. `noise` is its standard deviation, of strokes 0.4 to 1 bright. Nothing here was tuned on test images but
the noise, which was set so that the dense network is not saturated, and the batch, the stem and the numbers of steps,
which were cut to save time. Rates of training again were
chosen on other pictures, seed 0, length 9, 16 prototypes, L2 (README.md).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.training.product_quantised import ProductQuantised, Quantiser, quantise

SIDE, CLASSES, BATCH, TESTED = 16, 10, 32, 2000
DENSE_STEPS, DENSE_RATE = 600, 3e-3
_TEST_SEED, _CALIBRATION = 987_654_321, 256
_TEMPERATURE = 2.0  # of a teacher's outputs


def _templates() -> Tensor:
    """Strokes of each class, (classes, 1, 32, 32) from 0 to 1."""
    generator = torch.Generator().manual_seed(0)
    y, x = torch.meshgrid(torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 32), indexing="ij")
    made = []
    for _ in range(CLASSES):
        drawn = torch.zeros(32, 32)
        for _ in range(4):
            at_x, at_y, angle, bend = (2 * torch.rand(4, generator=generator) - 1).tolist()
            angle *= 3.1416
            along = (x - 0.5 * at_x) * torch.tensor(angle).cos() + (y - 0.5 * at_y) * torch.tensor(angle).sin()
            across = (y - 0.5 * at_y) * torch.tensor(angle).cos() - (x - 0.5 * at_x) * torch.tensor(angle).sin()
            across = across + bend * along.square()
            drawn = torch.maximum(drawn, torch.exp(-((across / 0.1) ** 2) - (along / 0.45) ** 4))
        made.append(drawn)
    return torch.stack(made).unsqueeze(1)


_TEMPLATES = _templates()


def images(count: int, seed: int, noise: float) -> tuple[Tensor, Tensor]:
    """Draw images (count, 3, side, side) and their classes (count,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angle, size, left, down = (torch.rand(4, count, generator=generator) * 2 - 1).unbind()
    angle, size = angle * 0.5, 1 + 0.25 * size
    cos, sin = angle.cos() * size, angle.sin() * size
    theta = torch.stack([cos, -sin, left * 0.3, sin, cos, down * 0.3], 1).view(-1, 2, 3)
    grid = functional.affine_grid(theta, [count, 1, SIDE, SIDE], align_corners=False)
    strokes = functional.grid_sample(_TEMPLATES[labels], grid, align_corners=False)
    colours = 0.4 + 0.6 * torch.rand(count, 3, 1, 1, generator=generator)
    ground = torch.rand(count, 3, 1, 1, generator=generator) * 2 - 1
    drawn = 0.4 * ground + strokes * colours
    return drawn + noise * torch.randn(count, 3, SIDE, SIDE, generator=generator), labels


class Block(nn.Module):
    """Two 3×3 convolutions around a shortcut (He et al. 2016, section 4.2), 1×1 where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.more = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        found = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        short = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return functional.relu(found + short)


class ResNet(nn.Module):
    """8 layers of widths 16, 32 and 64 (He et al. 2016, section 4.2), the first with a stride of 2."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, 2, 1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.fc = nn.Linear(64, CLASSES)

    def features(self, x: Tensor) -> list[Tensor]:
        """What each block gives."""
        found = [functional.relu(self.bn(self.conv(x)))]
        for block in self.blocks:
            found.append(block(found[-1]))
        return found[1:]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc(self.features(x)[-1].mean((2, 3)))
        return found


def distilled(model: ResNet, teacher: ResNet, x: Tensor, labels: Tensor) -> Tensor:
    """Loss by labels and, as much, by a teacher's softened outputs (Hinton et al., 2015); and by what its blocks give.

    The latter (FitNets, Romero et al., 2015) is the sum over blocks of the squared error relative to the teacher's.
    """
    with torch.no_grad():
        wanted = teacher.features(x)
        told = (teacher.fc(wanted[-1].mean((2, 3))) / _TEMPERATURE).softmax(1)
    found = model.features(x)
    logits = model.fc(found[-1].mean((2, 3)))
    said = functional.kl_div((logits / _TEMPERATURE).log_softmax(1), told, reduction="batchmean")
    apart = sum((a - b).square().mean() / b.square().mean() for a, b in zip(found, wanted, strict=True))
    return 0.5 * (functional.cross_entropy(logits, labels) + _TEMPERATURE**2 * said) + apart


def train(
    model: ResNet, steps: int, seed: int, rates: Sequence[float], noise: float, teacher: ResNet | None = None
) -> None:  # fmt: skip
    """Train with Adam, rates falling to nothing as a cosine; images are drawn anew for every step.

    `rates`: of weights and of prototypes. `teacher`: stays as it is.
    """
    if teacher is not None:
        teacher = copy.deepcopy(teacher).eval()
    prototypes = [each.prototypes for each in model.modules() if isinstance(each, ProductQuantised)]
    weights = [each for each in model.parameters() if not any(each is other for other in prototypes)]
    groups = [{"params": weights, "lr": rates[0]}, {"params": prototypes, "lr": rates[1]}]
    optimizer = torch.optim.AdamW(groups[: 1 + bool(prototypes)], weight_decay=1e-4)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    model.train()
    for step in range(steps):
        x, labels = images(BATCH, seed * 1_000_003 + step + 1, noise)
        optimizer.zero_grad(set_to_none=True)
        loss = distilled(model, teacher, x, labels) if teacher else functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        falling.step()


def accuracy(model: nn.Module, noise: float, tested: int = TESTED) -> float:
    """Share of the test images that are told right."""
    x, labels = images(tested, _TEST_SEED, noise)
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(part).argmax(1) == wanted).sum())
            for part, wanted in zip(x.split(250), labels.split(250), strict=True)
        )
    return right / tested


def dense(seed: int, folder: Path, noise: float, steps: int = DENSE_STEPS) -> tuple[ResNet, float]:
    """Train the dense network of a seed, or read it from the folder; with its accuracy."""
    torch.manual_seed(seed)
    model, path = ResNet(), folder / f"dense_{noise}_{seed}_{steps}.pt"
    if not path.exists():
        train(model, steps, seed, (DENSE_RATE, 0.0), noise)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"weights": model.state_dict(), "accuracy": accuracy(model, noise)}, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").rename(path)
    kept = torch.load(path, weights_only=True)
    model.load_state_dict(kept["weights"])
    return model, kept["accuracy"]


def longer(
    model: ResNet, seed: int, steps: int, rates: Sequence[float], noise: float, tested: int = TESTED
) -> float:  # fmt: skip
    """Accuracy of a copy of a dense network that is trained on as a quantised one is."""
    found = copy.deepcopy(model)
    train(found, steps, seed + 100, rates, noise)
    return accuracy(found, noise, tested)


def quantised(
    model: ResNet, quantiser: Quantiser, seed: int, steps: int, rates: Sequence[float], noise: float,
    tested: int = TESTED, *, taught: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Quantise a copy of a dense network, all convolutions but the first, and train it, `taught` by the dense one."""
    found = copy.deepcopy(model)
    x, _ = images(_CALIBRATION, seed * 1_000_003, noise)
    fc, found.fc = found.fc, nn.Identity()  # type: ignore[assignment]  # ten outputs: a table would be larger
    quantise(found, lambda: found(x), quantiser, seed=seed)
    found.fc = fc
    begun, before = accuracy(found, noise, tested), prototypes_of(found, x)
    train(found, steps, seed + 100, rates, noise, model if taught else None)
    return {"kmeans": begun, **before, "accuracy": accuracy(found, noise, tested)}


def prototypes_of(model: nn.Module, x: Tensor) -> dict[str, float]:
    """What prototypes make of their inputs, means over the quantised layers.

    `lost`: the share of the inputs' squares that they miss. `used`: how many are in use, the exponential of the entropy
    of how often each is the nearest, which is K where all are equally often. `against`: where a small step of the
    inputs (a tenth of their root mean square, at random) changes the nearest, the share of changes that lead back.
    """
    every = list[tuple[float, float, float]]()

    def note(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, ProductQuantised)
        rows = layer.rows(given[0])
        (spaces, many, length), codes = layer.prototypes.shape, layer.codes(rows)
        often = torch.bincount(codes.flatten(), minlength=spaces * many).view(spaces, many) / len(rows)
        square = rows.square()
        step = 0.1 * square.mean().sqrt() * torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
        looked_up = layer.reconstructed(rows)
        along = ((layer.reconstructed(rows + step) - looked_up) * step).view(-1, length).sum(1)
        lost = (looked_up - rows).square().sum() / square.sum()
        used = torch.special.entr(often).sum(1).exp().mean()
        every.append((float(lost), float(used), float((along < 0).sum() / (along != 0).sum().clamp(min=1))))

    hooks = [each.register_forward_pre_hook(note) for each in model.modules() if isinstance(each, ProductQuantised)]
    model.eval()
    with torch.no_grad():
        model(x)
    for each in hooks:
        each.remove()
    means = (sum(column) / len(every) for column in zip(*every, strict=True))
    return dict(zip(("lost", "used", "against"), means, strict=True))
