"""A way to give a training its batches, as the planner compares them: memory, and seconds of an epoch with a range."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from foretrace.errors import ForetraceError

HALF = 0.5  # of a graph, from which accuracy was that of memory on the graphs tried
Words = Mapping[str, int | float | str]


class DataCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A loader with its parameters, and the epoch that is predicted: all that is waited for is in its seconds."""

    name: str  # loader and parameters, as in "partition buffer partitions=16 buffer=4 order=comet"
    loader: str  # "in memory", "partition buffer", "rows from disk", "fcr", ...
    parameters: dict[str, int | float | str]
    epoch_s: float  # infinite before it is timed
    low_s: float
    high_s: float
    batches: int  # of an epoch
    memory_bytes: int  # at the peak, beyond interpreter and libraries; temporaries of a batch included
    disk_bytes: int = 0  # files that it needs
    swaps: int | None = None  # loads of a partition after the first `buffer` ones; null without any
    swaps_bound: int | None = None
    reach: float = 1.0  # share of a node's neighbours that are held when it is trained
    notes: tuple[str, ...] = ()  # what it changes beside time, as "a hub shows 24 of its 1,900 neighbours"

    @staticmethod
    def name_of(loader: str, parameters: Words) -> str:
        """Return what to call it."""
        return " ".join([loader, *(f"{key}={value}" for key, value in parameters.items())])


def ranked(candidates: Iterable[DataCandidate], memory_bytes: float) -> tuple[DataCandidate, ...]:
    """Return those that fit into the memory, the quickest epoch first; of equal ones that with less memory.

    Those that hold less than half of a node's neighbours come last: their accuracy is lower than in memory.
    Raises ForetraceError where none fits, with the least memory that one of them needs.
    """
    known = sorted(candidates, key=lambda each: (each.reach < HALF, each.epoch_s, each.memory_bytes))
    fitting = tuple(each for each in known if each.memory_bytes <= memory_bytes)
    if not fitting:
        least = min(known, key=lambda each: each.memory_bytes)
        raise ForetraceError(
            f"Nothing fits into `memory={memory_bytes / 1e6:g}MB`; the least that works is "
            f"{-(-least.memory_bytes // 10**6)}MB ({least.name})."
        )
    return fitting
