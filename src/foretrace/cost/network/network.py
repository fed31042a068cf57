"""`Network`: what communication between workers costs.

`nbytes` is what NCCL's own benchmarks call the size: all-reduce, broadcast, reduce, send: the buffer of a worker;
all-gather: the gathered buffer; reduce-scatter: the buffer before it is scattered; all-to-all: what a worker holds
for all workers together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite

from foretrace.errors import ForetraceError


class CollectiveKind(StrEnum):
    """What workers do together."""

    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    SEND = "send"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """How long a transfer takes once every worker has arrived, with its 80 % range, and how that is known."""

    seconds: float
    low_s: float
    high_s: float
    why: str


class Network(ABC):
    """What collectives cost between a number of workers."""

    name: str
    workers: int
    in_flight: int  # collectives at a time: NCCL 1 per communicator, gloo 2

    @abstractmethod
    def cost(self, kind: CollectiveKind, nbytes: float, *, workers: int | None = None) -> Cost:
        """Time of one collective of `nbytes` among `workers` (all by default)."""


def bus_share(kind: CollectiveKind, workers: int) -> float:
    """Bus bandwidth over algorithm bandwidth (size / time), as NCCL's benchmarks define it."""
    if workers < 2:
        return 0.0
    part = (workers - 1) / workers
    if kind == CollectiveKind.ALL_REDUCE:
        return 2 * part
    if kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL):
        return part
    return 1.0


NOTHING = Cost(seconds=0.0, low_s=0.0, high_s=0.0, why="one worker, nothing to send")


def asked(network: Network, nbytes: float, workers: int | None) -> int:
    """How many workers are meant. Raises ForetraceError where size or number cannot be."""
    if not (isfinite(nbytes) and nbytes >= 0):
        raise ForetraceError(f"a transfer of {nbytes} bytes cannot be; sizes are finite and not below 0.")
    found = network.workers if workers is None else workers
    if found < 1:
        raise ForetraceError(f"{found} workers cannot communicate; one is the least.")
    return found
