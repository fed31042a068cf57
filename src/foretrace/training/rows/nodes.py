"""Classification of nodes by GraphSAGE (Hamilton et al., NeurIPS 2017) on features that may lie on disk.

An epoch holds the partitions of training nodes and random others (MariusGNN, section 5.2); neighbours are sampled among
the nodes in the buffer. Judging is exact: all neighbours of all nodes, a partition at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.arrays import Int64
from foretrace.errors import ForetraceError
from foretrace.training.rows.graphs import Adjacency
from foretrace.training.rows.links import visited
from foretrace.training.rows.neighbours import positions
from foretrace.training.rows.orders import State
from foretrace.training.rows.partitions import PartitionedGraph
from foretrace.training.rows.rows import Rows, within


class Sage(nn.Module):
    """Layers h <- own h + mean over neighbours of other h + bias, with dropout and rectifiers between them."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(widths))
        self.other = nn.ModuleList(nn.Linear(i, o, bias=False) for i, o in pairwise(widths))
        self.dropout = nn.Dropout(0.5)

    def forward(self, values: Tensor, read: DenseSample) -> Tensor:
        """Return scores (targets, classes) from the rows of `read.nodes`."""
        for k, (own, other) in enumerate(zip(self.own, self.other, strict=True)):
            read = read.next() if k else read
            values = self.dropout(values.relu() if k else values)
            values = own(values[int(read.hops[1]) :]) + _mean(other(values), read)
        return values


def _mean(values: Tensor, read: DenseSample) -> Tensor:
    """Return the mean of every computed node's neighbours; 0 where it has none."""
    counts = np.diff(read.starts)
    into = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    total = values.new_zeros(len(counts), values.shape[1]).index_add_(0, into, values[torch.from_numpy(read.places)])
    return total / torch.from_numpy(np.maximum(counts, 1)).to(values.dtype)[:, None]


def node_states(graph: PartitionedGraph, buffer: int, random: np.random.Generator) -> list[State]:
    """Return states of an epoch: training partitions with random others, in as many states as they need."""
    training = np.unique(graph.train // graph.size)
    others = random.permutation(np.setdiff1d(np.arange(graph.sizes.partitions), training))
    both = np.concatenate([random.permutation(training), others])
    parts = max(-(-len(training) // buffer), 1)
    return [tuple(sorted(both[k * buffer : (k + 1) * buffer].tolist())) for k in range(parts)]


def neighbours_within(graph: PartitionedGraph, state: State) -> Adjacency:
    """Return neighbours of nodes in a state's partitions, among these."""
    pairs = np.stack(np.meshgrid(state, state, indexing="ij"), axis=-1).reshape(-1, 2)
    return Adjacency.of(graph.edges_of(pairs).astype(np.int64), graph.sizes.nodes)


def step(labels: Int64, rows: Rows, model: Sage, optimizer: torch.optim.Optimizer, read: DenseSample) -> float:
    """Update a model by what was sampled; the mean loss of its targets."""
    optimizer.zero_grad()
    scores = model(torch.from_numpy(rows.get(read.nodes)), read)
    loss = functional.cross_entropy(scores, torch.from_numpy(labels[read.nodes[read.hops[-2] :]]))
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
        for (part,) in visited(rows, alone) if not found else alone:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSample:
    """DENSE: neighbours of several hops, sampled once per node and reused by every layer (MariusGNN, section 4.2).

    `nodes` holds the farthest new nodes first and the targets last; `hops[k]` is where those of a hop begin. From
    `hops[1]` on, which a layer computes, every node has its sampled neighbours, `places[starts[i] : starts[i + 1]]` for
    node `hops[1] + i`, as places in `nodes`.
    """

    nodes: Int64  # (n,)
    hops: Int64  # (layers + 2,): the first is 0, the last n
    starts: Int64  # (n - hops[1] + 1,)
    places: Int64  # (sampled neighbours,)

    def next(self) -> DenseSample:
        """Return what the next layer reads: without the nodes that it does not, and what this one computed."""
        gone, done = int(self.hops[1]), int(self.hops[2] - self.hops[1])
        starts = self.starts[done:] - self.starts[done]
        return DenseSample(
            nodes=self.nodes[gone:], hops=self.hops[1:] - gone, starts=starts,
            places=self.places[self.starts[done] :] - gone,
        )  # fmt: skip


def sample(adjacency: Adjacency, targets: Int64, fanouts: Sequence[int], random: np.random.Generator) -> DenseSample:
    """Sample neighbours of distinct `targets` (n,), one fan-out per layer, the targets' own first.

    Raises ForetraceError for targets that are no nodes, or named twice.
    """
    within(targets, adjacency.nodes, "Targets must be nodes")
    place = np.full(adjacency.nodes, -1)
    place[targets] = np.arange(len(targets))
    if (place[targets] != np.arange(len(targets))).any():
        raise ForetraceError("Targets must be distinct; name each once.")
    deltas, found = [targets], list[tuple[Int64, Int64]]()
    for fanout in fanouts:
        begins, degrees = adjacency.starts[deltas[-1]], adjacency.starts[deltas[-1] + 1] - adjacency.starts[deltas[-1]]
        wanted = np.minimum(degrees, fanout)
        neighbours = adjacency.neighbours[positions(begins, degrees, wanted, random)]
        found.append((wanted, neighbours))
        fresh = np.unique(neighbours[place[neighbours] < 0])
        place[fresh] = 0  # it is known; where it lies is when all are
        deltas.append(fresh)
    deltas.reverse()
    hops = np.concatenate([[0], np.cumsum([len(each) for each in deltas])])
    nodes = np.concatenate(deltas)
    place[nodes] = np.arange(len(nodes))
    counts = np.concatenate([each for each, _ in reversed(found)])
    return DenseSample(
        nodes=nodes, hops=hops, starts=np.concatenate([[0], np.cumsum(counts)]),
        places=place[np.concatenate([each for _, each in reversed(found)])],
    )  # fmt: skip
