"""What communication between workers costs: one protocol, and the way from text to a network.

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
from foretrace.hardware.cluster import Cluster


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


@dataclass(frozen=True, kw_only=True)
class LinkNetwork(Network):
    """Algorithms over the links that the workers need, alpha-beta: a ring, or the quickest of those there are."""

    cluster: Cluster
    name: str = ""
    in_flight: int = 1
    spread: float = 0.15  # 80 % range of a time, relative
    latency_factors: tuple[float, float] | None = None  # 80 % range of latency where it is assumed; None: `spread`
    algorithm: str = "ring"  # or "quickest"
    members: int = 0  # the first so many take part; 0: all workers of the cluster

    @property
    def workers(self) -> int:  # type: ignore[override]  # worked out, not stored
        return self.members or self.cluster.workers

    def cost(self, kind: CollectiveKind, nbytes: float, *, workers: int | None = None) -> Cost:
        from foretrace.cost.network.collectives import ways

        p = asked(self, nbytes, workers)
        if p < 2 or not nbytes:
            return NOTHING
        found = ways(kind, nbytes, self.cluster, p)
        way = next((each for each in found if each.algorithm == self.algorithm), found[0])
        seconds = way.seconds
        why = f"{kind} of {p} workers, {way.algorithm} over {way.link.name}, {way.link.gbit_s:.4g} Gbit/s"
        low, high = self.latency_factors or (1 - self.spread, 1 + self.spread)
        return Cost(
            seconds=seconds,
            low_s=way.latency_s * low + way.transfer_s * (1 - self.spread),
            high_s=way.latency_s * high + way.transfer_s * (1 + self.spread),
            why=why,
        )


def asked(network: Network, nbytes: float, workers: int | None) -> int:
    """How many workers are meant. Raises ForetraceError where size or number cannot be."""
    if not (isfinite(nbytes) and nbytes >= 0):
        raise ForetraceError(f"a transfer of {nbytes} bytes cannot be; sizes are finite and not below 0.")
    found = network.workers if workers is None else workers
    if found < 1:
        raise ForetraceError(f"{found} workers cannot communicate; one is the least.")
    return found


def network(text: str, workers: int, *, in_flight: int = 1) -> Network:
    """A network from what a user writes, for so many workers.

    - a link between all workers: "1gbit", "25gbit/10us";
    - a cluster: the path of a YAML file (`Cluster.load`);
    - measured collectives: the path of a table (JSON of `foretrace calibrate network`, CSV, output of nccl-tests), with
      options behind commas: "table.csv,per-node=4", "table.csv,model=pieces";
    - NCCL's own model: "nccl:H100-SXM5-80GB", with options: "nccl:h200,nodes=4,nics=8,nic=400gbit".

    Raises ForetraceError with the sentence that says what is wrong.
    """
    from foretrace.cost.network import networks

    return networks.parse(text, workers, in_flight=in_flight)
