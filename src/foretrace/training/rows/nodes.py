"""Classification of nodes by GraphSAGE (Hamilton et al., NeurIPS 2017) on features that may lie on disk.

An epoch holds the partitions of training nodes and random others (MariusGNN, section 5.2); neighbours are sampled among
the nodes in the buffer. Judging is exact: all neighbours of all nodes, a partition at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.arrays import Int64
from foretrace.training.rows.graphs import Adjacency
from foretrace.training.rows.neighbours import NeighbourLists
from foretrace.training.rows.orders import State
from foretrace.training.rows.partitions import PartitionedGraph
from foretrace.training.rows.rows import Rows
from foretrace.training.rows.samplers import SampledBatch


class Sage(nn.Module):
    """Layers h <- own h + mean over neighbours of other h + bias, with dropout and rectifiers between them."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(widths))
        self.other = nn.ModuleList(nn.Linear(i, o, bias=False) for i, o in pairwise(widths))
        self.dropout = nn.Dropout(0.5)

    def forward(self, values: Tensor, read: SampledBatch) -> Tensor:
        """Return scores (targets, classes) from the rows of `read.n_id`.

        A node's neighbours are drawn once and used by every layer that computes it (DENSE; MariusGNN, section 4.2):
        each layer leaves the farthest hop that is left behind.
        """
        source, into = torch.from_numpy(read.edge_index)
        nodes, edges = np.cumsum(read.num_sampled_nodes).tolist(), np.cumsum(read.num_sampled_edges).tolist()
        sizes = zip(nodes[-2::-1], edges[::-1], strict=True)
        for k, (own, other, (count, most)) in enumerate(zip(self.own, self.other, sizes, strict=True)):
            values = self.dropout(values.relu() if k else values)
            sent = other(values)
            total = sent.new_zeros(count, sent.shape[1]).index_add_(0, into[:most], sent[source[:most]])
            drawn = torch.bincount(into[:most], minlength=count).clamp(min=1).to(sent.dtype)
            values = own(values[:count]) + total / drawn[:, None]
        return values


def node_states(graph: PartitionedGraph, buffer: int, random: np.random.Generator) -> list[State]:
    """Return states of an epoch: training partitions with random others, in as many states as they need."""
    training = np.unique(graph.train // graph.size)
    others = random.permutation(np.setdiff1d(np.arange(graph.sizes.partitions), training))
    both = np.concatenate([random.permutation(training), others])
    parts = max(-(-len(training) // buffer), 1)
    return [tuple(sorted(both[k * buffer : (k + 1) * buffer].tolist())) for k in range(parts)]


def neighbours_within(graph: PartitionedGraph, state: State) -> NeighbourLists:
    """Return neighbours of nodes in a state's partitions, among these."""
    pairs = np.stack(np.meshgrid(state, state, indexing="ij"), axis=-1).reshape(-1, 2)
    return NeighbourLists.of(Adjacency.of(graph.edges_of(pairs).astype(np.int64), graph.sizes.nodes))


def step(labels: Int64, rows: Rows, model: Sage, optimizer: torch.optim.Optimizer, read: SampledBatch) -> float:
    """Update a model by what was sampled; the mean loss of its targets."""
    optimizer.zero_grad()
    scores = model(torch.from_numpy(rows.get(read.n_id)), read)
    loss = functional.cross_entropy(scores, torch.from_numpy(labels[read.n_id[: read.batch_size]]))
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(graph: PartitionedGraph, rows: Rows, model: Sage, nodes: Int64) -> float:
    """Return share of `nodes` that a model of two layers classifies as labelled, with all neighbours of all nodes."""
    model.eval()
    count = graph.sizes.nodes
    found: list[Tensor] = []
    for own, other in zip(model.own, model.other, strict=True):
        assert isinstance(other, nn.Linear)
        mine, theirs = torch.empty(count, other.out_features), torch.empty(count, other.out_features)
        parts = range(graph.sizes.partitions)
        alone: list[State] = [(each,) for each in parts]
        for (part,) in rows.visit(alone) if not found else alone:
            begin, end = graph.nodes_of(part)
            at = np.arange(begin, end)
            values = found[0][begin:end].relu() if found else torch.from_numpy(rows.get(at))
            mine[begin:end], theirs[begin:end] = own(values), other(values)
        total, degrees = torch.zeros_like(theirs), torch.zeros(count)
        for k in parts:
            edges = graph.edges_of(np.array([(k, each) for each in parts])).astype(np.int64)
            apart = edges[edges[:, 0] != edges[:, 1]]
            for into, source in ((edges[:, 0], edges[:, 1]), (apart[:, 1], apart[:, 0])):
                for i, j in zip(np.array_split(into, 16), np.array_split(source, 16), strict=True):
                    total.index_add_(0, torch.from_numpy(i), theirs[torch.from_numpy(j)])
                degrees += torch.from_numpy(np.bincount(into, minlength=count)).to(degrees.dtype)
        found = [mine + total / degrees.clamp(min=1)[:, None]]
    right = found[0].argmax(1).numpy()[nodes] == graph.labels[nodes]
    return float(right.mean()) if len(nodes) else 0.0


def batch_bytes(features: int, hidden: int, read: int) -> int:
    """Return most bytes of a step that reads `read` nodes.

    Their rows, a copy without what dropout leaves out, its mask and gradient; both layers' values with theirs, twice.
    """
    return 4 * read * (4 * features + 12 * hidden) + 8 * read * 16


def graph_bytes(nodes: int, edges: int) -> int:
    """Return most bytes while neighbours of a state are sorted: pairs of 32 and 64 bits, both ways, their order."""
    return edges * (8 + 16 + 32 + 32 + 16) + 8 * nodes * 6


def judging_bytes(graph_nodes: int, hidden: int, partition: int, edges: int) -> int:
    """Return most bytes that `accuracy` takes: four values per node, a partition, a row of buckets."""
    return 4 * graph_nodes * (4 * hidden + 2) + 3 * partition + 60 * edges + 8 * graph_nodes
