"""Classification of graphs by a graph isomorphism network.

A batch is (features (batch, nodes, features) float32, adjacency (batch, nodes, nodes) float32, label (batch,) int64):
graphs of one size as dense matrices, so that sums over neighbours are batched products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.training.training import Training
from foretrace.zoo.data import integer, loader


@dataclass(frozen=True, kw_only=True)
class RandomGraph:
    """An undirected graph with random edges, denser the higher its class; features are one-hot node types."""

    nodes: int
    features: int
    classes: int

    def __call__(self, generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
        label = integer(self.classes, generator)
        edges = torch.rand(self.nodes, self.nodes, generator=generator) < 0.04 * (label + 1)
        upper = edges.triu(1)
        kinds = torch.randint(self.features, (self.nodes,), generator=generator)
        return functional.one_hot(kinds, self.features).float(), (upper | upper.T).float(), label


class Perceptron(nn.Module):
    """Two linear layers with batch norm over the nodes of all graphs."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.norm1 = nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width)
        self.norm2 = nn.BatchNorm1d(width)

    def forward(self, nodes: Tensor) -> Tensor:
        found: Tensor = self.norm1(self.first(nodes.flatten(0, 1))).relu()
        found = self.norm2(self.second(found)).relu()
        return found.view(*nodes.shape[:2], -1)


class GIN(nn.Module):
    """Layers h <- MLP((1 + eps) h + sum over neighbours); the sums over nodes of every layer are classified."""

    def __init__(self, *, features: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Perceptron(width if i else features, width) for i in range(layers))
        self.epsilon = nn.Parameter(torch.zeros(layers))
        self.readout = nn.ModuleList(nn.Linear(width if i else features, classes) for i in range(layers + 1))
        self.dropout = nn.Dropout(0.5)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        scores: Tensor = self.readout[0](nodes.mean(1))
        for i, (layer, readout) in enumerate(zip(self.layers, self.readout[1:], strict=True)):
            nodes = layer((1 + self.epsilon[i]) * nodes + torch.bmm(adjacency, nodes))
            scores = scores + self.dropout(readout(nodes.mean(1)))
        return scores


def graph_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return mean cross entropy per graph."""
    nodes, adjacency, labels = batch
    return functional.cross_entropy(model(nodes, adjacency).float(), labels)


def gnn(size: str) -> Training:
    if size == "full":  # 5 layers of 64 on batches of 128, as for the largest graphs of the paper
        graph = RandomGraph(nodes=512, features=64, classes=5)
        model, batch_size = GIN(features=64, width=64, layers=5, classes=5), 128
    else:
        graph = RandomGraph(nodes=96, features=16, classes=5)
        model, batch_size = GIN(features=16, width=64, layers=5, classes=5), 32
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batches = loader(graph, batch_size=batch_size)
    return Training(name="gnn", model=model, optimizers=(optimizer,), loader=batches, loss=graph_loss)
