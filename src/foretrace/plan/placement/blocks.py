"""`PlacementBlocks`: what may be placed apart, after the published contraction (Tarnawski et al., appendix)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import numpy as np

from foretrace.errors import needing
from foretrace.plan.placement.problem import PlacementProblem, topological

NOTHING = 1e-6  # a time below this is none
Edges = set[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class PlacementBlocks:
    """b blocks in topological order: the rows of each, and its predecessors and successors among the blocks.

    A block is a class of colours with its backward operators; edges are those of forward operators, of which a
    contiguous placement takes predecessor-closed sets.
    """

    rows: tuple[tuple[int, ...], ...]
    before: tuple[frozenset[int], ...]
    after: tuple[frozenset[int], ...]

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def of(cls, rows: Iterable[Iterable[int]], edges: Edges) -> PlacementBlocks:
        """Return blocks that are already in topological order."""
        held = tuple(tuple(sorted(each)) for each in rows)
        before: list[set[int]] = [set() for _ in held]
        after: list[set[int]] = [set() for _ in held]
        for source, target in edges:
            before[target].add(source)
            after[source].add(target)
        return cls(rows=held, before=tuple(map(frozenset, before)), after=tuple(map(frozenset, after)))

    def members(self, mask: int) -> list[int]:
        """Return rows of the blocks in a bit mask."""
        return [row for block, rows in enumerate(self.rows) if mask >> block & 1 for row in rows]

    def linear(self) -> PlacementBlocks:
        """Return the same blocks with edges along their order: contiguous sets become intervals."""
        return PlacementBlocks.of(self.rows, {(at, at + 1) for at in range(len(self) - 1)})

    def reordered(self, *, deep: bool) -> PlacementBlocks:
        """Return the same blocks in another topological order, depth first or breadth first."""
        order = topological([sorted(each) for each in self.after], deep=deep)
        place = {block: at for at, block in enumerate(order)}
        edges = {(place[a], place[b]) for a, targets in enumerate(self.after) for b in targets}
        return PlacementBlocks.of((self.rows[at] for at in order), edges)


def contract(problem: PlacementProblem, *, contiguous: bool = True, whole: bool = False) -> PlacementBlocks:
    """Contract colours, cycles and operators without work into blocks.

    1. A colour is a block. 2. Between colours one of which has backward operators alone, a backward edge becomes its
    mirror image among the forward edges. 3. Strongly connected blocks become one. 4. A block without time on either
    device, without a backward neighbour and with one forward neighbour joins that one. Sets that need not be
    contiguous need the first of these alone. For devices that run their blocks as one piece (`whole`), backward
    operators are as forward ones, without 4: what waits for each other is one block.
    """
    forward = ~problem.backward | whole
    label = np.unique(problem.colour, return_inverse=True)[1].ravel()
    has_forward = np.bincount(label, weights=forward) > 0
    ends, kinds = label[problem.edges], forward[problem.edges]
    edges: Edges = set(map(tuple, ends[kinds.all(axis=1)].tolist()))
    mirrored = ~kinds.any(axis=1) & ~has_forward[ends].all(axis=1)
    edges |= set(map(tuple, ends[mirrored][:, ::-1].tolist()))
    if contiguous:
        component = _components(len(has_forward), edges)
        label, edges = component[label], {(int(component[a]), int(component[b])) for a, b in edges}
        edges = {(a, b) for a, b in edges if a != b}
        if not whole:
            label, edges = _without_idle(problem, label, edges)
    rows = defaultdict(list)
    for row, block in enumerate(label.tolist()):
        rows[block].append(row)
    number = {block: at for at, block in enumerate(sorted(rows))}
    found = PlacementBlocks.of((rows[block] for block in number), {(number[a], number[b]) for a, b in edges})
    return found.reordered(deep=True) if contiguous else found


def _components(count: int, edges: Edges) -> np.ndarray:
    """Return the number of the strongly connected component of every node, in the order of their first nodes."""
    source, target = np.array(sorted(edges), dtype=np.int64).reshape(-1, 2).T
    with needing("a placement"):
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import connected_components
    graph = csr_array((np.ones(len(edges)), (source, target)), shape=(count, count))
    number: dict[int, int] = {}
    labels = connected_components(graph, connection="strong")[1].tolist()
    return np.array([number.setdefault(each, len(number)) for each in labels], dtype=np.int64)


def _without_idle(problem: PlacementProblem, label: np.ndarray, edges: Edges) -> tuple[np.ndarray, Edges]:
    """Let every block that does nothing join its only neighbour, one after another."""
    forward = ~problem.backward
    known = np.where(np.isfinite(problem.accelerator_time), problem.accelerator_time, 1.0)
    mixed = problem.edges[forward[problem.edges[:, 0]] != forward[problem.edges[:, 1]]].ravel()
    count = int(label.max()) + 1
    busy = np.zeros(count, dtype=np.bool_)
    for time, rows in ((problem.cpu_time, forward), (known, forward), (problem.cpu_time + known, ~forward)):
        busy |= np.bincount(label[rows], weights=time[rows], minlength=count) >= NOTHING
    busy[label[mixed[forward[mixed]]]] = True
    neighbours: list[set[int]] = [set() for _ in range(count)]
    for source, target in edges:
        neighbours[source].add(target)
        neighbours[target].add(source)
    joined = list(range(count))
    idle = [block for block in range(count) if not busy[block]]
    while idle:
        block = idle.pop()
        if joined[block] != block or len(neighbours[block]) != 1:
            continue
        (other,) = neighbours[block]
        joined[block] = other
        neighbours[block].clear()
        neighbours[other].discard(block)
        if not busy[other]:
            idle.append(other)
    for block in range(count):
        while joined[joined[block]] != joined[block]:
            joined[block] = joined[joined[block]]
    new = np.array(joined, dtype=np.int64)
    return new[label], {(joined[a], joined[b]) for a, b in edges if joined[a] != joined[b]}


def crossing(problem: PlacementProblem, blocks: PlacementBlocks) -> tuple[list[int], list[list[int]], list[int]]:
    """Return rows whose output can cross a boundary: their own block and the distinct other blocks that read it."""
    of = {row: at for at, rows in enumerate(blocks.rows) for row in rows}
    found = []
    for row, block in of.items():
        others = sorted({of[each] for each in problem.successors[row] if each in of} - {block})
        if others and problem.transfer[row] > 0:
            found.append((row, others))
    return [of[row] for row, _ in found], [others for _, others in found], [row for row, _ in found]


def flat(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return lists as one array and the offset where each begins (n + 1)."""
    starts = np.concatenate([[0], np.cumsum([len(each) for each in lists], dtype=np.int64)]).astype(np.int64)
    return np.fromiter(chain.from_iterable(lists), dtype=np.int64, count=int(starts[-1])), starts
