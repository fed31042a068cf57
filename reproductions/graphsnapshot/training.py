"""What caches do to accuracy: a small graph network trained on sampled batches, judged on whole neighbourhoods."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.training.rows.graphs import NodeData
from foretrace.training.rows.neighbours import CachePolicy, NeighbourLists
from foretrace.training.rows.samplers import NeighborLoader, SampledBatch

WIDTH, RATE, DECAY, DROPOUT = 32, 0.01, 5e-4, 0.5


class MeanSage(nn.Module):
    """Layers h <- W h + U mean of the neighbours' h (Hamilton et al., 2017)."""

    def __init__(self, features: int, classes: int, layers: int) -> None:
        super().__init__()
        sizes = [features, *[WIDTH] * (layers - 1), classes]
        pairs = list(pairwise(sizes))
        self.own = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        self.mean = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairs)

    def forward(self, x: Tensor, batch: SampledBatch) -> Tensor:
        source, target = torch.from_numpy(batch.edge_index)
        count = torch.bincount(target, minlength=len(x)).clamp(min=1)[:, None]
        for i, (own, mean) in enumerate(zip(self.own, self.mean, strict=True)):
            if i:
                x = functional.dropout(x.relu(), DROPOUT, self.training)
            sent = mean(x)
            x = own(x) + torch.zeros_like(sent).index_add(0, target, sent[source]) / count
        return x[: batch.batch_size]


def accuracy(
    data: NodeData, policy: CachePolicy | None, *, seed: int, epochs: int, num_neighbors: tuple[int, ...],
    batch_size: int,
) -> float:  # fmt: skip
    """Share of the test nodes that are labelled rightly, by the weights of the epoch that was best on validation."""
    torch.manual_seed(seed)
    lists = NeighbourLists.of(data.adjacency)
    model = MeanSage(data.features.shape[1], int(data.labels.max()) + 1, len(num_neighbors))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, weight_decay=DECAY)
    loader = NeighborLoader(
        lists, num_neighbors=num_neighbors, input_nodes=data.train, batch_size=batch_size, shuffle=True, cache=policy,
        seed=seed,
    )  # fmt: skip
    whole = [NeighborLoader(lists, num_neighbors=[-1] * len(num_neighbors), input_nodes=nodes, batch_size=len(nodes))
             for nodes in (data.validation, data.test)]  # fmt: skip
    judged = [next(iter(each)) for each in whole]
    best = (-1.0, 0.0)
    for _ in range(epochs):
        model.train()
        for batch in loader:
            loss = functional.cross_entropy(
                model(torch.from_numpy(data.features[batch.n_id]), batch),
                torch.from_numpy(data.labels[batch.n_id[: batch.batch_size]]),
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = [_right(model, data, batch) for batch in judged]
        best = max(best, (right[0], right[1]))
    return best[1]


def _right(model: MeanSage, data: NodeData, batch: SampledBatch) -> float:
    found = model(torch.from_numpy(data.features[batch.n_id]), batch).argmax(1).numpy()
    return float(np.mean(found == data.labels[batch.n_id[: batch.batch_size]]))
