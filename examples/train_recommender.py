"""Train a small recommender (embedding tables, feature crosses, a multilayer perceptron) on generated clicks.

Many parameters, little arithmetic: a step is mostly the optimizer.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Clicks(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Visits with dense features, one category per table, and whether the visitor clicked."""

    def __init__(self, count: int, dense: int, tables: int, rows: int) -> None:
        random = torch.Generator().manual_seed(0)
        self.dense = torch.randn(count, dense, generator=random)
        self.sparse = torch.randint(0, rows, (count, tables), generator=random)
        signal = self.dense[:, :4].sum(1) + (self.sparse[:, 0] % 2) - 0.5
        self.clicked = (signal > 0).float()

    def __len__(self) -> int:
        return len(self.clicked)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.dense[index], self.sparse[index], self.clicked[index]


def perceptron(sizes: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inside, outside in pairwise(sizes):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Recommender(nn.Module):
    def __init__(self, dense: int, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = perceptron([dense, 256, 128, width])
        pairs = (tables + 1) * tables // 2
        self.top = perceptron([pairs + width, 512, 256, 128, 1])
        self.register_buffer("upper", torch.triu_indices(tables + 1, tables + 1, offset=1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        features = torch.stack([bottom, *(t(sparse[:, i]) for i, t in enumerate(self.tables))], dim=1)
        crosses = features @ features.transpose(1, 2)
        rows, columns = self.get_buffer("upper")
        click: Tensor = self.top(torch.cat([bottom, crosses[:, rows, columns]], dim=1))
        return click.squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="training steps")
    parser.add_argument("--batch", type=int, default=256, help="visits per step")
    parser.add_argument("--workers", type=int, default=0, help="data-loader processes")
    parser.add_argument("--tables", type=int, default=24, help="embedding tables")
    parser.add_argument("--rows", type=int, default=8000, help="rows of each table")
    parser.add_argument("--threads", type=int, default=0, help="intra-op threads, 0 for PyTorch's choice")
    parser.add_argument("--fused", action="store_true", help="fused AdamW")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    args = parser.parse_args()

    torch.manual_seed(0)
    if args.threads:
        torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Recommender(16, args.tables, args.rows, 32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=args.fused)
    criterion = nn.BCEWithLogitsLoss()
    clicks = Clicks(args.batch * args.steps, 16, args.tables, args.rows)
    loader = DataLoader(clicks, batch_size=args.batch, num_workers=args.workers)
    begin = time.perf_counter()
    loss = torch.zeros(())
    for dense, sparse, clicked in loader:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=args.bf16):
            click = model(dense.to(device), sparse.to(device))
        loss = criterion(click.float(), clicked.to(device))
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - begin
    print(f"{args.steps} steps, {1e3 * seconds / max(args.steps, 1):.1f} ms each, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
