"""Small random placement problems, and all their placements."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import inf

import numpy as np
from hypothesis import strategies as st

from foretrace.plan.placement.blocks import PlacementBlocks
from foretrace.plan.placement.problem import DeviceLoad, PlacementProblem


@st.composite
def problems(draw: st.DrawFn, most: int = 6, *, backward: bool = True) -> PlacementProblem:
    """Up to `most` operators; edges go forward, and backward operators mirror some of them."""
    n = draw(st.integers(1, most))
    pairs = [(a, b) for b in range(n) for a in range(b)]
    edges = [each for each in pairs if draw(st.booleans())]
    mirrored = [each for each in range(n) if backward and draw(st.booleans())]
    number = {each: n + at for at, each in enumerate(mirrored)}
    edges += [(number[b], number[a]) for a, b in edges if a in number and b in number]
    edges += [(a, number[a]) for a in mirrored]
    total = n + len(mirrored)
    sizes = st.integers(0, 9)
    values = {name: np.array([draw(sizes) for _ in range(total)], dtype=np.float64) for name in "acmt"}
    values["a"][[draw(st.integers(0, 11)) == 0 for _ in range(total)]] = inf
    return PlacementProblem(
        name="small", ids=tuple(range(total)), labels=tuple(map(str, range(total))), accelerator_time=values["a"],
        cpu_time=3 * values["c"], nbytes=values["m"], transfer=values["t"], backward=np.arange(total) >= n,
        colour=np.array([*range(n), *mirrored], dtype=np.int64),
        edges=np.array(edges, dtype=np.int64).reshape(-1, 2),
        accelerators=draw(st.integers(1, 2)), cpus=draw(st.integers(0, 1)),
        memory_limit=float(draw(st.integers(4, 40))),
    )  # fmt: skip


def chain(n: int, *, accelerators: int) -> PlacementProblem:
    """Operators of one time each, one after another, that send what takes half of it."""
    one = np.ones(n)
    return PlacementProblem(
        name="chain", ids=tuple(range(n)), labels=tuple(map(str, range(n))), accelerator_time=one, cpu_time=one,
        nbytes=one, transfer=one / 2, backward=np.zeros(n, dtype=np.bool_), colour=np.arange(n),
        edges=np.array([(at, at + 1) for at in range(n - 1)], dtype=np.int64), accelerators=accelerators, cpus=0,
        memory_limit=float(n),
    )  # fmt: skip


def placements(
    problem: PlacementProblem, *, contiguous: bool, blocks: PlacementBlocks | None = None
) -> Iterator[tuple[DeviceLoad, ...]]:
    """Every placement of colours, or of blocks; contiguous ones are differences of a chain of closed sets."""
    kept = problem.colour.tolist()
    if blocks is not None:
        number = {row: at for at, rows in enumerate(blocks.rows) for row in rows}
        kept = [number[row] for row in range(len(problem))]
    colours = sorted(set(kept))
    machines = problem.accelerators + problem.cpus
    for chosen in product(range(machines), repeat=len(colours)):
        of = dict(zip(colours, chosen, strict=True))
        where = [of[each] for each in kept]
        if contiguous and not _chained(problem, where, machines):
            continue
        yield tuple(
            problem.device("accelerator" if machine < problem.accelerators else "cpu", rows)
            for machine in range(machines)
            if (rows := [row for row, at in enumerate(where) if at == machine])
        )


def _chained(problem: PlacementProblem, where: list[int], machines: int) -> bool:
    """Whether forward edges lead from device to device without a circle."""
    ends = problem.edges[~problem.backward[problem.edges].any(axis=1)].tolist()
    links = {(where[a], where[b]) for a, b in ends if where[a] != where[b]}
    left = set(range(machines))
    while left:
        free = {each for each in left if not any(b == each and a in left for a, b in links)}
        if not free:
            return False
        left -= free
    return True
