"""How to split cores among instances of a model so that a batch ends soonest: the dynamic program of Packrat.

Packrat (Bhardwaj et al., arXiv 2311.18174, section 3): an instance runs `batch` samples on `threads` cores and takes a
profiled latency; instances with the threads of the machine and the samples of the batch among them run at once, and the
batch ends with the slowest. Here threads may also stay idle, and there is a best split for every number of instances,
since memory and interference go by that number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError

_MOST_CELLS = 1 << 27  # of four bytes
_GROUP = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3}):([1-9]\d{0,5})")


class ModelInstance(NamedTuple):
    """One copy of a model: on so many cores, with so many samples of every batch."""

    threads: int
    batch: int


@dataclass(frozen=True, slots=True)
class CoreSplit:
    """A multiset of instances that share a batch, those with most threads first."""

    instances: tuple[ModelInstance, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "instances", tuple(sorted(self.instances, reverse=True)))

    @classmethod
    def parse(cls, text: str) -> CoreSplit:
        """Parse "2x1:4+1x2:8": two instances with 1 thread and batch 4, one with 2 threads and batch 8."""
        found: list[ModelInstance] = []
        for part in text.split("+"):
            match = _GROUP.fullmatch(part.strip())
            if match is None:
                raise ForetraceError(
                    f"a split must be INSTANCESxTHREADS:BATCH, joined by +, got {text[:80]!r}; write 2x1:4 for two "
                    "instances with 1 thread and batch 4."
                )
            count, threads, batch = map(int, match.groups())
            found += [ModelInstance(threads, batch)] * count
        return cls(tuple(found))

    @property
    def text(self) -> str:
        """As `parse` reads it."""
        return "+".join(f"{count}x{threads}:{batch}" for (threads, batch), count in Counter(self.instances).items())

    def __len__(self) -> int:
        return len(self.instances)

    @property
    def threads(self) -> int:
        """Threads of all instances; others of the machine are idle."""
        return sum(each.threads for each in self.instances)

    @property
    def batch(self) -> int:
        """Samples of all instances."""
        return sum(each.batch for each in self.instances)

    def __str__(self) -> str:
        """Return text such as "2 × (4 threads, batch 16) + 1 × (1 thread, batch 8)"."""
        return " + ".join(
            f"{count} × ({threads} thread{'s' * (threads > 1)}, batch {batch})"
            for (threads, batch), count in Counter(self.instances).items()
        )

    @classmethod
    def fat(cls, threads: int, batch: int) -> CoreSplit:
        """Return one instance with all threads."""
        return cls((ModelInstance(threads, batch),))

    @classmethod
    def thin(cls, threads: int, batch: int) -> CoreSplit:
        """Return an instance per thread, the batch shared out evenly; no more instances than samples."""
        count = min(threads, batch)
        return cls(tuple(ModelInstance(1, (batch + k) // count) for k in range(count)))


@dataclass(frozen=True, kw_only=True)
class SplitTable:
    """The best splits of up to so many threads for every batch and number of instances. Made by `split_table`."""

    points: tuple[ModelInstance, ...]
    latency: Float64  # [instances, batch] on all threads, infinite where there is no split; row 0 is none
    chosen: npt.NDArray[np.int32]  # [instances, threads, batch] -> the point that its last instance is

    def splits(self, batch: int) -> tuple[CoreSplit, ...]:
        """Return the best split of a batch for every number of instances that can have one, the quickest first."""
        order = np.argsort(self.latency[:, batch], kind="stable").tolist()
        return tuple(self._split(count, batch) for count in order if isfinite(self.latency[count, batch]))

    def _split(self, instances: int, batch: int) -> CoreSplit:
        found, threads = list[ModelInstance](), self.chosen.shape[1] - 1
        for count in range(instances, 0, -1):
            found.append(self.points[self.chosen[count, threads, batch]])
            threads, batch = threads - found[-1].threads, batch - found[-1].batch
        return CoreSplit(tuple(found))


def split_table(
    latency: Mapping[ModelInstance, float], *, threads: int, batch: int, instances: int | None = None, idle: bool = True
) -> SplitTable:
    """Return the splits of up to `batch` samples among up to `instances` (by default `threads`) with the least latency.

    `latency` holds positive times of single instances in any unit; what it lacks is not used. Without `idle`, every
    thread belongs to an instance. Takes O(instances · threads · batch · points) steps, in array operations. Raises
    ForetraceError where the table would not fit into memory.
    """
    most = min(instances or threads, threads, batch)
    if most * (threads + 1) * (batch + 1) > _MOST_CELLS:
        raise ForetraceError(
            f"`batch={batch}` on {threads} threads has too many splits of up to {most} instances to compare; choose a "
            "smaller batch, or fewer threads."
        )
    points = tuple(sorted(each for each in latency if each.threads <= threads and each.batch <= batch))
    before = np.full((threads + 1, batch + 1), inf)
    before[slice(None) if idle else 0, 0] = 0.0
    best = np.full((most + 1, batch + 1), inf)
    chosen = np.full((most + 1, threads + 1, batch + 1), -1, np.int32)
    for count in range(1, most + 1):
        now = np.full_like(before, inf)
        for index, point in enumerate(points):
            # What the others may have left over before this instance is added, in place: a view of both tables.
            slowest = np.maximum(before[: threads + 1 - point.threads, : batch + 1 - point.batch], latency[point])
            part = now[point.threads :, point.batch :]
            better = slowest < part
            np.copyto(part, slowest, where=better)
            np.copyto(chosen[count, point.threads :, point.batch :], index, where=better)
        best[count] = now[threads]
        before = now
    return SplitTable(points=points, latency=best, chosen=chosen)
