"""`Network`: what communication between workers costs.

`nbytes` is what NCCL's own benchmarks call the size: all-reduce, broadcast, reduce, send: the buffer of a worker;
all-gather: the gathered buffer; reduce-scatter: the buffer before it is scattered; all-to-all: what a worker holds
for all workers together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import TYPE_CHECKING

from foretrace.errors import ForetraceError
from foretrace.plaintext import whole_number

if TYPE_CHECKING:
    from foretrace.simulate.transfers import Price


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

    @property
    def hosts(self) -> Mapping[str, tuple[float, float, float]]:
        """What workers were measured to take beside collectives: value, low, high by parameter of techniques."""
        return {}

    @abstractmethod
    def cost(self, kind: CollectiveKind, nbytes: float, *, workers: int | None = None) -> Cost:
        """Return the time of one collective of `nbytes` among `workers` (all by default)."""


def bus_share(kind: CollectiveKind, workers: int) -> float:
    """Return bus bandwidth over algorithm bandwidth (size / time), as NCCL's benchmarks define it."""
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
    """Return how many workers are meant. Raises ForetraceError where size or number cannot be."""
    if not (isfinite(nbytes) and nbytes >= 0):
        raise ForetraceError(f"a transfer of {nbytes} bytes cannot be; sizes are finite and not below 0.")
    found = network.workers if workers is None else workers
    if found < 1:
        raise ForetraceError(f"{found} workers cannot communicate; one is the least.")
    return found


# --- as recordings name collectives ----------------------------------------------------------------------------------

# PyTorch's words. NCCL's SendRecv kernel among a whole group is an all-to-all; a barrier is the smallest all-reduce.
KINDS = {
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "all_gather": CollectiveKind.ALL_GATHER,
    "all_to_all": CollectiveKind.ALL_TO_ALL,
    "send_recv": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.BROADCAST,
    "reduce": CollectiveKind.REDUCE,
    "gather": CollectiveKind.REDUCE,
    "scatter": CollectiveKind.BROADCAST,
    "barrier": CollectiveKind.ALL_REDUCE,
}
_LEAST_BYTES = 4.0  # what a barrier sends


def price(network: Network) -> Price:
    """Return seconds, low and high end of a collective on this network; None for a kind that it does not know."""

    def priced(kind: str, nbytes: float, workers: int) -> tuple[float, float, float] | None:
        known = KINDS.get(kind)
        if known is None:
            return None
        cost = network.cost(known, max(nbytes, _LEAST_BYTES), workers=workers)
        return cost.seconds, cost.low_s, cost.high_s

    return priced


# --- options behind the name of a network: "nccl:h200,nodes=4,nics=8" ------------------------------------------------


def split(text: str) -> tuple[str, dict[str, str]]:
    """Return what stands before the first comma, and the key=value pairs behind it."""
    head, *rest = (part.strip() for part in text.strip().split(","))
    options: dict[str, str] = {}
    for part in rest:
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise ForetraceError(f"{text!r}: {part!r} is no option; write key=value, e.g. per-node=4.")
        options[key.strip()] = value.strip()
    return head, options


def none_left(options: dict[str, str], text: str) -> None:
    """Raise ForetraceError where there are options but nothing takes any."""
    if options:
        raise ForetraceError(f"{text!r}: {', '.join(options)} says nothing here; leave it out.")


def whole(options: dict[str, str], key: str, default: int) -> int:
    """Return an option that is a whole number above 0. Raises ForetraceError."""
    if key not in options:
        return default
    number = whole_number(text := options.pop(key))
    if number is None or number < 1:
        raise ForetraceError(f"{key}={text} is no whole number above 0.")
    return number


def none_else(options: dict[str, str], where: str, allowed: str) -> None:
    """Raise ForetraceError where an option is left that nobody knows."""
    if options:
        raise ForetraceError(f"{where}: {', '.join(options)} is unknown; there are {allowed}.")
