"""Embeddings of nodes trained by logistic loss on edges against random pairs, wherever their table is kept.

A row is an embedding and the row-wise sum of squared gradients of Adagrad (Duchi et al., JMLR 2011), which so travels
with it. Per state of the buffer: its edges in random order; the other end of an edge's random pair is one of the nodes
in the buffer.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from foretrace.arrays import Float32, Float64, Int32
from foretrace.training.rows.orders import State
from foretrace.training.rows.partitions import PartitionedGraph
from foretrace.training.rows.rows import Rows

_SPREAD = 0.1  # of first values, as Marius has it


def first_values(width: int, seed: int, begin: int, end: int) -> Float32:
    """Return rows of a new table: (end - begin, width + 1)."""
    values = np.zeros((end - begin, width + 1), np.float32)
    random = np.random.default_rng([seed, begin])
    values[:, :width] = _SPREAD * random.standard_normal((end - begin, width), np.float32)
    return values


def draw(graph: PartitionedGraph, state: State, count: int, random: np.random.Generator) -> Int32:
    """Return nodes of the partitions of a state, uniform: (count,)."""
    bounds = np.array([graph.nodes_of(each) for each in state])
    sizes = np.cumsum(bounds[:, 1] - bounds[:, 0])
    at = random.integers(0, sizes[-1], count)
    which = np.searchsorted(sizes, at, side="right")
    drawn: Int32 = (at - sizes[which] + bounds[which, 1]).astype(np.int32)  # as edges are: sorted faster than 64 bits
    return drawn


def step(rows: Rows, heads: Int32, tails: Int32, others: Int32, rate: float) -> float:
    """Update rows by edges head - tail against pairs head - other: (n,) each. The sum of their losses."""
    ids, inverse = np.unique(np.concatenate([heads, tails, others]), return_inverse=True)
    values = torch.from_numpy(rows.get(ids))
    table, squares = values[:, :-1], values[:, -1:]
    head_at, tail_at, other_at = torch.from_numpy(inverse).split(len(heads))
    head, tail, other = table[head_at], table[tail_at], table[other_at]
    near, far = (head * tail).sum(1, keepdim=True), (head * other).sum(1, keepdim=True)
    loss = functional.softplus(-near).sum() + functional.softplus(far).sum()
    pull, push = torch.sigmoid(near) - 1, torch.sigmoid(far)
    gradient = torch.zeros_like(table)
    gradient.index_add_(0, tail_at, pull * head)
    gradient.index_add_(0, other_at, push * head)
    gradient.index_add_(0, head_at, tail.mul_(pull).add_(other.mul_(push)))
    squares += gradient.square().mean(1, keepdim=True)
    table.addcdiv_(gradient, squares.sqrt().add_(1e-8), value=-rate)
    rows.put(ids, values.numpy())
    return loss.item()


def link_auc(graph: PartitionedGraph, rows: Rows, *, seed: int = 0) -> float:
    """Return the probability that an edge kept apart scores higher than a random pair: 0.5 where nothing was learnt."""
    random = np.random.default_rng(seed)
    pairs = np.concatenate([graph.held_out, random.integers(0, graph.sizes.nodes, graph.held_out.shape)])
    ids, inverse = np.unique(pairs, return_inverse=True)
    values = np.empty((len(ids), rows.width - 1), np.float32)
    for state in rows.visit([(each,) for each in range(graph.sizes.partitions)]):
        first, last = np.searchsorted(ids, graph.nodes_of(state[0]))
        values[first:last] = rows.get(ids[first:last])[:, :-1]
    ends = inverse.reshape(pairs.shape)
    scores = np.concatenate([
        np.einsum("ij,ij->i", values[part[:, 0]], values[part[:, 1]]) for part in np.array_split(ends, 16)
    ])  # fmt: skip
    return auc(scores[: len(graph.held_out)].astype(np.float64), scores[len(graph.held_out) :].astype(np.float64))


def auc(good: Float64, bad: Float64) -> float:
    """Return share of pairs of a good and a bad score in which the good one is higher; equal ones count half."""
    ordered = np.sort(bad)
    below = np.searchsorted(ordered, good, "left") + np.searchsorted(ordered, good, "right")
    return float(below.sum() / 2 / max(len(good) * len(bad), 1))


def batch_bytes(width: int, batch: int) -> int:
    """Return most bytes of what a step makes, which is gone after it.

    Rows of three nodes per edge and their gradients, heads, tails, others and a product: 10 x batch x width floats;
    ids, their order and places, and one number per edge here and there: 40 words per edge.
    """
    return 4 * batch * 10 * (width + 1) + 8 * batch * 40


def judging_bytes(width: int, pairs: int) -> int:
    """Return most bytes that `link_auc` takes: rows of both ends of `pairs` edges and as many random pairs."""
    return 4 * pairs * (width + 1) * 6 + 8 * pairs * 24
