"""What caches do to accuracy: a small graph network trained on sampled batches, judged on whole neighbourhoods."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from foretrace.training.rows.graphs import NodeData
from foretrace.training.rows.neighbours import CachePolicy, NeighbourLists
from foretrace.training.rows.nodes import Sage
from foretrace.training.rows.samplers import NeighborLoader, SampledBatch

WIDTH, RATE, DECAY = 32, 0.01, 5e-4


def accuracy(
    data: NodeData, policy: CachePolicy | None, *, seed: int, epochs: int, num_neighbors: tuple[int, ...],
    batch_size: int,
) -> float:  # fmt: skip
    """Share of the test nodes that are labelled rightly, by the weights of the epoch that was best on validation."""
    torch.manual_seed(seed)
    lists = NeighbourLists.of(data.adjacency)
    widths = (data.features.shape[1], *[WIDTH] * (len(num_neighbors) - 1), data.classes)
    model = Sage(widths)
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


def _right(model: Sage, data: NodeData, batch: SampledBatch) -> float:
    found = model(torch.from_numpy(data.features[batch.n_id]), batch).argmax(1).numpy()
    return float(np.mean(found == data.labels[batch.n_id[: batch.batch_size]]))
