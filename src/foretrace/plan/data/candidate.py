"""A way to give a training its batches, as the planner compares them: memory, and seconds per batch with a range."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from foretrace.errors import ForetraceError

HALF = 0.5  # of a graph, from which accuracy was that of memory on the graphs tried


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTime:
    """Seconds of one batch, all that is waited for included, in the mean of an epoch; `low_s` <= `s` <= `high_s`."""

    s: float
    low_s: float
    high_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.low_s <= self.s <= self.high_s:
            raise ForetraceError(f"A time must lie in its range, got {self.s} in {self.low_s} to {self.high_s}.")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataCandidate:
    """A loader with its parameters. Swaps are loads of a partition after the first `buffer` ones; None without any."""

    loader: str  # "in memory", "partition buffer", "rows from disk", "FCR", ...
    parameters: Mapping[str, int | float | str] = field(default_factory=dict)
    memory_bytes: int  # at the peak, beyond interpreter and libraries; temporaries of a batch included
    disk_bytes: int = 0  # files that it needs
    batches: int  # of an epoch
    batch_s: BatchTime
    swaps: int | None = None
    swaps_bound: int | None = None
    reach: float = 1.0  # share of a node's neighbours that are held when it is trained
    notes: tuple[str, ...] = ()  # what it changes beside time, as "a hub shows 24 of its 1,900 neighbours"

    @property
    def name(self) -> str:
        """As in "partition buffer partitions=16 buffer=4 order=comet"."""
        return " ".join([self.loader, *(f"{key}={value}" for key, value in self.parameters.items())])

    @property
    def epoch_s(self) -> tuple[float, float, float]:
        """Predicted seconds of an epoch, and their range."""
        time = self.batch_s
        return self.batches * time.s, self.batches * time.low_s, self.batches * time.high_s


def ranked(candidates: Iterable[DataCandidate], memory_bytes: int) -> tuple[DataCandidate, ...]:
    """Those that fit into the memory, the quickest epoch first; of equal ones that with less memory.

    Those that hold less than half of a node's neighbours come last: their accuracy is lower than in memory.
    Raises ForetraceError where none fits, with the least memory that one of them needs.
    """
    known = sorted(candidates, key=lambda each: (each.reach < HALF, each.epoch_s[0], each.memory_bytes))
    fitting = tuple(each for each in known if each.memory_bytes <= memory_bytes)
    if not fitting:
        least = min(known, key=lambda each: each.memory_bytes)
        raise ForetraceError(
            f"Nothing fits into `memory={memory_bytes / 1e6:g}MB`; the least that works is "
            f"{-(-least.memory_bytes // 10**6)}MB ({least.name})."
        )
    return fitting
