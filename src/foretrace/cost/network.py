"""What communication between workers costs: one protocol, and the way from text to a network.

`nbytes` is what NCCL's own benchmarks call the size: all-reduce, broadcast, reduce, send: the buffer of a worker;
all-gather: the gathered buffer; reduce-scatter: the buffer before it is scattered; all-to-all: what a worker holds
for all workers together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

from foretrace.hardware.cluster import Cluster, Link, parse_link


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


@dataclass(frozen=True, kw_only=True)
class LinkNetwork(Network):
    """Ring algorithms over the slowest link that the workers need, alpha-beta (Thakur et al., 2005)."""

    cluster: Cluster
    name: str = ""
    in_flight: int = 1
    spread: float = 0.15  # 80 % range of a time, relative

    @property
    def workers(self) -> int:  # type: ignore[override]  # worked out, not stored
        return self.cluster.workers

    def cost(self, kind: CollectiveKind, nbytes: float, *, workers: int | None = None) -> Cost:
        p = self.workers if workers is None else workers
        link = self.cluster.inside if p <= self.cluster.per_node else self.cluster.between
        steps, share = _ring(kind, p)
        seconds = steps * link.latency_s + share * nbytes / link.bytes_per_s
        why = f"{kind} of a ring of {p} over {link.name}, {link.gbit_s:g} Gbit/s"
        return Cost(seconds=seconds, low_s=seconds * (1 - self.spread), high_s=seconds * (1 + self.spread), why=why)


def _ring(kind: CollectiveKind, p: int) -> tuple[int, float]:
    """Messages one after the other, and the share of the buffer that crosses the slowest link."""
    if p < 2:
        return 0, 0.0
    part = (p - 1) / p
    return {
        CollectiveKind.ALL_REDUCE: (2 * (p - 1), 2 * part),
        CollectiveKind.REDUCE_SCATTER: (p - 1, part),
        CollectiveKind.ALL_GATHER: (p - 1, part),
        CollectiveKind.ALL_TO_ALL: (p - 1, part),
        CollectiveKind.BROADCAST: (p - 1, 1.0),
        CollectiveKind.REDUCE: (p - 1, 1.0),
        CollectiveKind.SEND: (1, 1.0),
    }[kind]


def network(text: str, workers: int, *, in_flight: int = 1) -> Network:
    """A network from what a user writes: a link between all workers ("1gbit", "25gbit/10us").

    Raises ForetraceError with the sentence that says what is wrong.
    """
    link: Link = parse_link(text)
    cluster = Cluster(name=text, nodes=workers, per_node=1, inside=link, between=link)
    return LinkNetwork(cluster=cluster, name=text, in_flight=in_flight)
