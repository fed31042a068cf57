"""Neighbour samplers as candidates of the data planner: each is filled, and timed on a few batches and refreshes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import inf
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import numpy as np
from msgspec.structs import replace

from foretrace.arrays import Int64
from foretrace.errors import ForetraceError
from foretrace.plan.data.plan import DataCandidate, ranked
from foretrace.training.rows.disk import RowsOnDisk, create
from foretrace.training.rows.graphs import NodeData
from foretrace.training.rows.neighbours import (
    MOST_DRAWN,
    MOST_READ,
    CachePolicy,
    NeighbourLists,
    blocks,
    distinct,
    policies,
)
from foretrace.training.rows.samplers import NeighborLoader, SampledBatch

DISK_WIDTH = 1024  # neighbours of a block on disk: 4096 bytes, as a disk reads them
_TIMED = 3  # batches, with a refresh and without
_BATCH_BYTES, _REFRESH_BYTES = 144, 64  # of temporary arrays, per neighbour of a batch and of a part of a refresh
_OFF = 0.2  # share by which so few batches were off where it was tried, beside what they differ by


def candidates(
    lists: NeighbourLists, *, num_neighbors: tuple[int, ...], input_nodes: Int64, batch_size: int,
    among: Mapping[str, CachePolicy | None] | None = None, memory_bytes: float = inf, disk_bytes: int = 0,
    seed: int = 0,
) -> Iterator[DataCandidate]:  # fmt: skip
    """Yield samplers with their memory and predicted seconds of an epoch of sampling alone.

    `among` are policies by name, None for plain sampling; by default plain sampling and all of `policies`. What takes
    more than `memory_bytes` is not timed. `disk_bytes` are of the lists' files, 0 in memory. Notes say what a cache
    changes: how few neighbours of the node with most an epoch sees, and how long it takes to fill.
    """
    loader = partial(NeighborLoader, lists, num_neighbors=num_neighbors, batch_size=batch_size, seed=seed)
    pilot = loader(input_nodes=input_nodes, shuffle=True)
    batches = [batch for batch, _ in zip(pilot, range(_TIMED), strict=False)] or [pilot.sample(input_nodes)]
    words: dict[str, int | float | str] = {"fan_out": ",".join(map(str, num_neighbors)), "batch": batch_size}
    words["lists"] = "disk" if disk_bytes else "memory"
    if among is None:
        among = {"plain": None, **(policies() if min(num_neighbors, default=0) >= 0 else {})}
    for name, policy in among.items():
        memory = pilot.memory_bytes + _temporary_bytes(lists, policy, batches)
        memory += policy.memory_bytes(np.diff(lists.starts), num_neighbors) if policy else 0
        found = DataCandidate(
            name=DataCandidate.name_of(name, words), loader=name, parameters=words, epoch_s=inf, low_s=inf, high_s=inf,
            memory_bytes=memory, disk_bytes=disk_bytes, batches=len(pilot),
        )  # fmt: skip
        if memory <= memory_bytes:
            filled_s, low_s, s, high_s = _timed(lists, policy, partial(loader, cache=policy), batches)
            found = replace(
                found, epoch_s=len(pilot) * s, low_s=len(pilot) * low_s, high_s=len(pilot) * high_s,
                notes=_notes(lists, policy, num_neighbors, len(pilot), filled_s) if policy else (),
            )  # fmt: skip
        yield found


def _timed(
    lists: NeighbourLists, policy: CachePolicy | None, loader: Callable[[], NeighborLoader], batches: list[SampledBatch]
) -> tuple[float, float, float, float]:
    """Return seconds that a loader takes to fill, and of a batch with its share of a refresh: low, mean, high."""
    begin = lists.clock()
    made = loader()
    filled_s = lists.clock() - begin
    times: dict[int, list[float]] = {0: [], policy.every if policy else 0: []}
    seeds = [batch.n_id[: batch.batch_size] for batch in batches]
    made.sample(seeds[0])  # compiles
    for chosen in seeds:
        for number, taken in times.items():
            made.batches, begin = number, lists.clock()  # so many were drawn: a refresh is due, or none
            made.sample(chosen)
            taken.append(lists.clock() - begin)
    plain, renewing = times[0], [*times.values()][-1]
    share = 1 / policy.every if policy else 0.0
    low, s, high = (of(plain) + share * max(of(renewing) - of(plain), 0.0) for of in (min, fmean, max))
    return filled_s, low * (1 - _OFF), s, high * (1 + _OFF)


def samplers(
    data: NodeData, *, memory_bytes: int, num_neighbors: tuple[int, ...], batch_size: int, folder: Path | None = None,
    seed: int = 0,
) -> tuple[DataCandidate, ...]:  # fmt: skip
    """Return ways to sample neighbours within a memory, the quickest first: lists in memory, or in a file with each
    cache.

    Batches are of training nodes, of all nodes where there are none. The file is made in `folder`, by default that of
    temporary files, to time reads from its disk, and removed. Seconds are those of the processor and of waiting for the
    disk, of sampling alone; what a cache changes is in the notes.

    Raises ForetraceError where nothing fits, with the least that works.
    """
    adjacency = data.adjacency
    input_nodes = data.train if len(data.train) else np.arange(adjacency.nodes)
    held = blocks(adjacency, DISK_WIDTH)
    ways = partial(
        candidates, num_neighbors=num_neighbors, input_nodes=input_nodes, batch_size=batch_size,
        memory_bytes=memory_bytes, seed=seed,
    )  # fmt: skip
    found = list(ways(NeighbourLists.of(adjacency), among={"plain": None}))
    with TemporaryDirectory(dir=folder) as own:
        path = Path(own) / "lists"
        create(path, held.shape[0], held.shape[1], 1, lambda i, j: held[i:j])
        with RowsOnDisk(path, buffer=0, spare=0) as rows:
            found += ways(NeighbourLists(adjacency.starts, rows), disk_bytes=path.stat().st_size)
    return ranked(found, memory_bytes)


def fan_outs(text: str) -> tuple[int, ...]:
    """Return numbers of neighbours per hop as a user writes them: `10,10`. Raises ForetraceError."""
    found = tuple(int(each) for each in text.split(",") if re.fullmatch(r" *(-1|0*[1-9][0-9]*) *", each))
    if len(found) != text.count(",") + 1:
        raise ForetraceError(
            f"`sample=` must be numbers of neighbours per hop above 0, as 10,10, or -1 for all, got {text!r}."
        )
    return found


def _temporary_bytes(lists: NeighbourLists, policy: CachePolicy | None, batches: list[SampledBatch]) -> int:
    """Return bytes of the arrays of one batch, or of a part of a refresh where that is more."""
    edges = max(sum(batch.num_sampled_edges) for batch in batches)
    part = min(MOST_DRAWN, int(lists.starts[-1])) if policy else 0
    found = max(edges * _BATCH_BYTES, part * _REFRESH_BYTES)
    if isinstance(lists.kept, np.ndarray):
        return found
    width = lists.kept.width
    return found + 4 * width * min(max(edges, part), lists.kept.count, max(MOST_READ // width, 1))


def _notes(
    lists: NeighbourLists, policy: CachePolicy, num_neighbors: tuple[int, ...], batches: int, filled_s: float
) -> tuple[str, ...]:
    """Return what a cache changes, in sentences."""
    fan_out, degree = max(num_neighbors, default=0), int(np.diff(lists.starts).max(initial=0))
    alone = "every batch alone is drawn as without one" if policy.served == 1 else "a batch may draw a neighbour twice"
    seen, plain = policy.distinct(degree, fan_out, batches), distinct(degree, fan_out, batches)
    return (
        f"a node of {degree:,} neighbours shows {seen:,.0f} of them in an epoch of {batches:,} batches that all draw "
        f"from it, without a cache {plain:,.0f}; {alone}",
        f"its caches were filled in {filled_s:.3g} s",
    )
