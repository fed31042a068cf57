"""Train a small depthwise-separable convolutional network on generated pictures.

Every picture is made on the fly (shapes drawn, cropped, flipped, normalised), so that the data loader has
real work: `--workers 0` against `--workers 1` is a fair question to ask foretrace.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from foretrace import Training


class Pictures(Dataset[tuple[Tensor, int]]):
    """Discs and squares on a noisy ground; the label says which, how large and on which side."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        random = torch.Generator().manual_seed(index)
        side = self.size + 16
        ys, xs = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        label = index % 8
        centre = side * (0.35 if label & 1 else 0.65)
        radius = 6 if label & 2 else 12
        dx, dy = (xs - centre).abs(), (ys - side / 2).abs()
        distance = torch.maximum(dx, dy) if label & 4 else (dx**2 + dy**2).sqrt()
        ground = torch.rand(3, side, side, generator=random)
        picture = torch.where(distance < radius, 1.0 - ground, ground)
        for _ in range(3):  # blur
            picture = nn.functional.avg_pool2d(picture, 3, stride=1, padding=1)
        top, left = torch.randint(0, 17, (2,), generator=random).tolist()
        picture = picture[:, top : top + self.size, left : left + self.size]
        if index % 3 == 0:
            picture = picture.flip(1)
        return (picture - picture.mean()) / (picture.std() + 1e-5), label


class Block(nn.Module):
    """Depthwise then pointwise convolution with a residual path where the shape allows it."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(inside, inside, 3, stride, 1, groups=inside, bias=False)
        self.norm1 = nn.BatchNorm2d(inside)
        self.pointwise = nn.Conv2d(inside, outside, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.residual = stride == 1 and inside == outside

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.relu(self.norm1(self.depthwise(x)))
        y = self.norm2(self.pointwise(y))
        return nn.functional.relu(x + y if self.residual else y)


class Net(nn.Module):
    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        plan = [(1, 1, 1), (1, 2, 2), (2, 2, 1), (2, 4, 2), (4, 4, 1), (4, 4, 1)]
        self.blocks = nn.Sequential(*(Block(width * a, width * b, stride) for a, b, stride in plan))
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))
        return logits


def training() -> Training:
    """The same job in parts, for `foretrace verify TECHNIQUE --model examples/train_cnn.py`."""
    from foretrace import Training

    model = Net(32, 8)
    return Training(
        name="train_cnn",
        model=model,
        optimizers=(torch.optim.AdamW(model.parameters(), lr=1e-3),),
        loader=DataLoader(Pictures(640, 64), batch_size=16),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]).float(), batch[1]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="training steps")
    parser.add_argument("--batch", type=int, default=16, help="pictures per step")
    parser.add_argument("--workers", type=int, default=0, help="data-loader processes")
    parser.add_argument("--width", type=int, default=32, help="channels of the first layer")
    parser.add_argument("--size", type=int, default=64, help="height and width of a picture")
    parser.add_argument("--threads", type=int, default=0, help="intra-op threads, 0 for PyTorch's choice")
    parser.add_argument("--fused", action="store_true", help="fused AdamW")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    args = parser.parse_args()

    torch.manual_seed(0)
    if args.threads:
        torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Net(args.width, 8).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=args.fused)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(Pictures(args.batch * args.steps, args.size), batch_size=args.batch, num_workers=args.workers)
    begin = time.perf_counter()
    loss = torch.zeros(())
    for pictures, labels in loader:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=args.bf16):
            loss = criterion(model(pictures.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - begin
    print(f"{args.steps} steps, {1e3 * seconds / max(args.steps, 1):.1f} ms each, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
