"""Compiled loops of the neighbour samplers; `tests/training/rows/twins.py` has them in plain Python."""

from __future__ import annotations

import numpy as np

from foretrace.arrays import Float64, Int32, Int64
from foretrace.compiled import njit


@njit(_nrt=False)
def draw(begins: Int64, sizes: Int64, wanted: Int64, uniform: Float64, positions: Int64) -> None:
    """Draw `wanted[i]` distinct positions of the `sizes[i]` from `begins[i]` on, all in order where all are wanted.

    Every set of positions is equally likely (Floyd's algorithm, Bentley and Floyd, CACM 30(9), 1987). `uniform` holds
    a number from 0 to 1 (exclusive) per position.
    """
    done = 0
    for i in range(len(begins)):
        size, count = sizes[i], wanted[i]
        for k in range(count):
            position = size - count + k
            if count < size:
                drawn = int(uniform[done + k] * (position + 1))
                for earlier in range(done, done + k):
                    if positions[earlier] == begins[i] + drawn:
                        drawn = position
                        break
                position = drawn
            positions[done + k] = begins[i] + position
        done += count


def positions(begins: Int64, sizes: Int64, wanted: Int64, random: np.random.Generator) -> Int64:
    """Draw positions by numbers of `random`: (sum of wanted,)."""
    found = np.empty(int(wanted.sum()), np.int64)
    draw(begins, sizes, wanted, random.random(len(found)), found)
    return found


@njit(_nrt=False)
def place(kept: Int32, begins: Int64, sizes: Int64, renewed: Int64, slots: Int64, fresh: Int32) -> None:
    """Write the fresh neighbours of node i, `renewed[i]` of them, to `slots` of its `sizes[i]` kept from `begins[i]`.

    One that is kept already is exchanged with what its slot holds, so that no neighbour is kept twice.
    """
    done = 0
    for i in range(len(begins)):
        for k in range(done, done + renewed[i]):
            if renewed[i] < sizes[i]:
                for slot in range(begins[i], begins[i] + sizes[i]):
                    if kept[slot] == fresh[k]:
                        kept[slot] = kept[slots[k]]
                        break
            kept[slots[k]] = fresh[k]
        done += renewed[i]


@njit(_nrt=False)
def relabel(nodes: Int32, local: Int32, n_id: Int64, known: int, labels: Int64) -> int:
    """Give `nodes` numbers by first appearance, after the `known` of `n_id`, and append new ones; how many it has.

    `local` holds the number of every node of the graph, -1 where it has none.
    """
    for i in range(len(nodes)):
        node = nodes[i]
        if local[node] < 0:
            local[node] = known
            n_id[known] = node
            known += 1
        labels[i] = local[node]
    return known
