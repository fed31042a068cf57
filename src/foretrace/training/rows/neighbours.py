"""Lists of neighbours, in memory or in blocks of a `Rows`, and caches that keep a sample of every list in memory.

    with RowsInMemory(blocks(adjacency, 1024)) as rows:
        lists = NeighbourLists(adjacency.starts, rows)
        lists.read(np.array([3, 17]))

A cache is no lossless one: between two refreshes only what it keeps can be drawn, so that a node of many neighbours
shows few of them (`CachePolicy.distinct`). FCR and OTF are those of GraphSnapShot (Liu et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import ceil, inf
from time import thread_time

import numpy as np

from foretrace.arrays import Float32, Float64, Int32, Int64
from foretrace.compiled import njit
from foretrace.errors import ForetraceError
from foretrace.training.rows.graphs import Adjacency
from foretrace.training.rows.rows import RowCounters, Rows

MOST_NODES = 0x7F80_0000  # larger numbers would be infinite or NaN as float32
MOST_READ = 1 << 20  # numbers of one get: 4 MB
MOST_DRAWN = 1 << 17  # positions drawn at once in a refresh


def blocks(adjacency: Adjacency, width: int) -> Float32:
    """Return all lists in a row as blocks (blocks, width), for a `Rows`: numbers of nodes as int32, whose bits float32
    carry.

    A `Rows` only copies them. Raises ForetraceError for a graph of more than 2,139,095,040 nodes.
    """
    if adjacency.nodes > MOST_NODES:
        raise ForetraceError(f"A graph must have at most {MOST_NODES:,} nodes here, got {adjacency.nodes:,}.")
    numbers = np.zeros(max(-(-len(adjacency.neighbours) // width), 1) * width, np.int32)
    numbers[: len(adjacency.neighbours)] = adjacency.neighbours
    return numbers.view(np.float32).reshape(-1, width)


class NeighbourLists:
    """The neighbours of node i are at positions `starts[i]` to `starts[i + 1]` of `kept`: an array, or a `Rows`.

    `starts` (nodes + 1,) int64 stay in memory.
    """

    def __init__(self, starts: Int64, kept: Int32 | Rows) -> None:
        self.starts, self.kept = starts, kept

    @classmethod
    def of(cls, adjacency: Adjacency) -> NeighbourLists:
        """Make it in memory, four bytes per neighbour."""
        return cls(adjacency.starts, blocks(adjacency, 1).view(np.int32).ravel())

    @property
    def memory_bytes(self) -> int:
        """Bytes in this process."""
        return self.starts.nbytes + (self.kept.nbytes if isinstance(self.kept, np.ndarray) else 0)

    def clock(self) -> float:
        """Return seconds since some time: those that this thread computed, and those that it waited for the rows.

        So what others compute on the same processor meanwhile is left out, which a clock on the wall counts.
        """
        return thread_time() + (0.0 if isinstance(self.kept, np.ndarray) else self.kept.counters.wait_s)

    def sizes(self, nodes: Int64) -> Int64:
        """Return the number of neighbours of each node."""
        return self.starts[nodes + 1] - self.starts[nodes]

    def read(self, positions: Int64) -> Int32:
        """Return the neighbours at `positions` (n,), each block read once: (n,)."""
        if isinstance(self.kept, np.ndarray):
            return self.kept[positions]
        width = self.kept.width
        order = np.argsort(positions, kind="stable")
        ids, first, place_of = np.unique(positions[order] // width, return_index=True, return_inverse=True)
        edges, step = np.append(first, len(order)), max(MOST_READ // width, 1)
        found = np.empty(len(positions), np.int32)
        for begin in range(0, len(ids), step):
            end = min(begin + step, len(ids))
            part = slice(edges[begin], edges[end])
            numbers = np.ascontiguousarray(self.kept.get(ids[begin:end])).view(np.int32)
            found[order[part]] = numbers[place_of[part] - begin, positions[order[part]] % width]
        return found

    def draw(self, nodes: Int64, wanted: Int64, random: np.random.Generator) -> Int32:
        """Draw `wanted[i]` distinct neighbours of each node: (sum of wanted,). Every set is equally likely."""
        return self.read(positions(self.starts[nodes], self.sizes(nodes), wanted, random))


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePolicy:
    """What a cache keeps of every list, and when it reads again.

    For a fan-out f it keeps f `kept` neighbours of a node, rounded up, whole lists where they are shorter: `kept` is
    GraphSnapShot's alpha (FCR) or alpha beta (OTF). Every `every` batches it replaces the share `renewed` (gamma) of
    what it keeps: of all nodes (FCR), or of those whose neighbours the batch draws (OTF).
    """

    kept: float
    renewed: float = 1.0
    served: float = 1.0  # share of a fan-out that is drawn from the cache; the rest is read from the lists
    every: int = 50
    all_nodes: bool = False
    shared: bool = False  # one cache for all hops, else one each

    def __post_init__(self) -> None:
        shares = 0 < self.renewed <= 1 and 0 < self.served <= 1
        if not (0 < self.kept < inf and shares and self.every >= 1):
            raise ForetraceError(
                "A cache must keep more than 0 times a fan-out, renew and serve more than 0 and at most 1 of it, and "
                f"refresh every 1 or more batches, got {self.kept:g}, {self.renewed:g}, {self.served:g}, {self.every}."
            )

    def size(self, fan_out: int) -> int:
        """Return neighbours that are kept of a node; raises ForetraceError where a batch would draw more of them."""
        if fan_out < 0:
            raise ForetraceError("A cache needs a fan-out of at least 0; draw all neighbours, -1, without a cache.")
        size = ceil(round(fan_out * self.kept, 9))
        if size < self.drawn(fan_out):
            raise ForetraceError(
                f"A cache of {size} neighbours of a node is below the {self.drawn(fan_out)} that a batch draws from "
                "it; keep more."
            )
        return size

    def drawn(self, fan_out: int) -> int:
        """Return neighbours that a batch draws from the cache, of a list that is longer than it."""
        return max(round(fan_out * self.served), 1) if fan_out else 0

    def replaced(self, fan_out: int) -> int:
        """Return neighbours of a node that a refresh replaces."""
        return max(int(self.size(fan_out) * self.renewed), 1) if fan_out else 0

    def fan_outs(self, num_neighbors: tuple[int, ...]) -> tuple[int, ...]:
        """Return the fan-out that each cache is made for."""
        return (max(num_neighbors),) if self.shared and num_neighbors else num_neighbors

    def memory_bytes(self, degrees: Int64, num_neighbors: tuple[int, ...]) -> int:
        """Return bytes of all caches: four per neighbour that is kept, eight per node."""
        sizes = [self.size(each) for each in self.fan_outs(num_neighbors)]
        return sum(4 * int(np.minimum(degrees, each).sum()) + 8 * (len(degrees) + 1) for each in sizes)

    def distinct(self, degree: int, fan_out: int, batches: int) -> float:
        """Return distinct neighbours that a node is expected to show in so many batches that all draw from it.

        Exact for FCR; for OTF whether a neighbour is kept is taken to depend on the last refresh alone.
        """
        size = self.size(fan_out)
        if degree <= size:
            return distinct(degree, fan_out, batches)
        kept, drawn = size / degree, self.drawn(fan_out)
        enters = self.replaced(fan_out) / degree
        leaves = enters * (degree - size) / size  # as many as enter
        outside, inside = 1 - kept, kept  # probabilities that a neighbour was not yet seen, and is there
        for begin in range(0, batches, self.every):
            if begin:
                outside, inside = outside * (1 - enters) + inside * leaves, outside * enters + inside * (1 - leaves)
            n = min(self.every, batches - begin)
            missed = (1 - (fan_out - drawn) / degree) ** n
            outside, inside = outside * missed, inside * missed * (1 - drawn / size) ** n
        return degree * (1 - outside - inside)


def distinct(degree: int, fan_out: int, batches: int) -> float:
    """Return distinct neighbours that a node is expected to show in so many batches without a cache."""
    return degree * (1 - (1 - min(fan_out, degree) / max(degree, 1)) ** batches)


def policies(every: int = 50) -> dict[str, CachePolicy]:
    """Return FCR and OTF with the published parameters, by name: `otf-shared-partial-fetch-full-refresh` and so on."""
    found = {}
    for shared, partial, full in product((False, True), repeat=3):
        served = 0.6 if partial else 1.0
        name = "-shared" * shared + "-partial-fetch" * partial
        if not full:
            found[f"fcr{name}"] = CachePolicy(kept=2, served=served, every=every, all_nodes=True, shared=shared)
        found[f"otf{name}{'-full-refresh' * full}"] = CachePolicy(
            kept=1.2, renewed=1.0 if full else 0.4, served=served, every=every, shared=shared
        )
    return found


class NeighbourCache:
    """A sample of every list in memory, from which neighbours are drawn."""

    def __init__(
        self, lists: NeighbourLists, policy: CachePolicy, fan_out: int, random: np.random.Generator,
        counters: RowCounters,
    ) -> None:  # fmt: skip
        self.lists, self.policy, self.random, self.counters = lists, policy, random, counters
        self.size, self.replaced = policy.size(fan_out), policy.replaced(fan_out)
        self.starts = np.concatenate([[0], np.cumsum(np.minimum(np.diff(lists.starts), self.size))])
        self.kept = np.empty(int(self.starts[-1]), np.int32)
        self._renew(np.arange(len(lists.starts) - 1), self.size)

    @property
    def memory_bytes(self) -> int:
        """Bytes of this cache."""
        return self.kept.nbytes + self.starts.nbytes

    def refresh(self, nodes: Int64) -> None:
        """Replace a part of what is kept of these nodes, but of lists that are kept whole."""
        self._renew(nodes[self.lists.sizes(nodes) > self.size], self.replaced)

    def draw(self, nodes: Int64, fan_out: int) -> tuple[Int32, Int64]:
        """Draw neighbours: all (n,), and the place in `nodes` that each belongs to (n,)."""
        sizes = self.lists.sizes(nodes)
        kept = np.minimum(sizes, self.size)
        wanted = np.minimum(kept, np.where(sizes > self.size, self.policy.drawn(fan_out), fan_out))
        found = self.kept[positions(self.starts[nodes], kept, wanted, self.random)]
        places = np.repeat(np.arange(len(nodes)), wanted)
        self.counters.hits += len(found)
        if self.policy.served < 1:
            rest = np.where(sizes > self.size, np.minimum(sizes, fan_out) - wanted, 0)
            read = self.lists.draw(nodes, rest, self.random)
            self.counters.misses += len(read)
            self.counters.rows_read += len(read)
            found, places = np.concatenate([found, read]), np.append(places, np.repeat(np.arange(len(nodes)), rest))
        return found, places

    def _renew(self, nodes: Int64, most: int) -> None:
        step = max(MOST_DRAWN // max(most, 1), 1)
        for begin in range(0, len(nodes), step):
            part = nodes[begin : begin + step]
            sizes = np.minimum(self.lists.sizes(part), self.size)
            renewed = np.minimum(sizes, most)
            slots = positions(self.starts[part], sizes, renewed, self.random)
            fresh = self.lists.draw(part, renewed, self.random)
            place(self.kept, self.starts[part], sizes, renewed, slots, fresh)
            self.counters.rows_read += len(fresh)


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
