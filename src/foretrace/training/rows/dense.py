"""DENSE: neighbours of several hops, sampled once per node and reused by every layer (MariusGNN, section 4.2).

`nodes` holds the farthest new nodes first and the targets last; `hops[k]` is where those of a hop begin. From `hops[1]`
on every node has its sampled neighbours, `places[starts[i] : starts[i + 1]]` for node `hops[1] + i`, as places in
`nodes`. A layer computes the nodes from `hops[1]` on, and `next` is what the layer after it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Int64
from foretrace.errors import ForetraceError
from foretrace.training.rows.drawing import positions
from foretrace.training.rows.graphs import Adjacency


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSample:
    """What some layers of a graph network read; see above."""

    nodes: Int64  # (n,)
    hops: Int64  # (layers + 2,): the first is 0, the last n
    starts: Int64  # (n - hops[1] + 1,)
    places: Int64  # (sampled neighbours,)

    def next(self) -> DenseSample:
        """Return the sample without the nodes that the next layer does not read, and the neighbours of those that it
        does not compute.
        """
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
    if len(targets) and not 0 <= targets.min() <= targets.max() < adjacency.nodes:
        raise ForetraceError(f"Targets must be nodes from 0 to {adjacency.nodes - 1}; leave out the others.")
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
