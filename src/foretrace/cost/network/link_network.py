"""`LinkNetwork`: times of collective algorithms on links, by latency, bandwidth and which part crosses which link.

Alpha-beta costs of rings, trees and of algorithms in two levels, after Thakur, Rabenseifner and Gropp (2005), Sanders,
Speck and Traeff (2009, two binary trees), and Cho et al. (BlueConnect, 2019). A cluster has two kinds of links:
`inside` a machine, and `between` machines, which the devices of one machine share.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2

from foretrace.cost.network.network import NOTHING, CollectiveKind, Cost, Network, asked
from foretrace.errors import ForetraceError
from foretrace.hardware.cluster import Cluster, Link

# Rates of the catalog are reached to 70 - 90 %; latency per step depends on protocol and size (LL a fifth of Simple).
_CATALOG_SPREAD = 0.25
_CATALOG_LATENCY = (0.2, 2.5)


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
        p = asked(self, nbytes, workers)
        if p < 2 or not nbytes:
            return NOTHING
        found = ways(kind, nbytes, self.cluster, p)
        way = next((each for each in found if each.algorithm == self.algorithm), found[0])
        why = f"{kind} of {p} workers, {way.algorithm} over {way.link.name}, {way.link.gbit_s:.4g} Gbit/s"
        low, high = self.latency_factors or (1 - self.spread, 1 + self.spread)
        return Cost(
            seconds=way.seconds,
            low_s=way.latency_s * low + way.transfer_s * (1 - self.spread),
            high_s=way.latency_s * high + way.transfer_s * (1 + self.spread),
            why=why,
        )


def cluster_network(cluster: Cluster, workers: int, *, in_flight: int = 1) -> LinkNetwork:
    """Return the quickest algorithms on a cluster. Raises ForetraceError where it has fewer devices than workers."""
    if cluster.workers < workers:
        raise ForetraceError(f"{cluster.name} has {cluster.workers} devices, not {workers}; add machines or use fewer.")
    catalog = any("catalog" in link.source for link in (cluster.inside, cluster.between))
    return LinkNetwork(
        cluster=cluster,
        name=cluster.name,
        in_flight=in_flight,
        algorithm="quickest",
        spread=_CATALOG_SPREAD if catalog else LinkNetwork.spread,
        latency_factors=_CATALOG_LATENCY if catalog else None,
        members=workers,
    )


@dataclass(frozen=True, slots=True)
class Way:
    """One algorithm for a collective: its time, and the link that it waits for most."""

    algorithm: str
    link: Link
    latency_s: float  # steps one after the other
    transfer_s: float

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.latency_s + self.transfer_s


def ways(kind: CollectiveKind, nbytes: float, cluster: Cluster, workers: int) -> tuple[Way, ...]:
    """Return all algorithms that can do this among the first `workers` devices of a cluster, quickest first."""
    nodes, most = cluster.spread_over(workers)
    job = _Job(kind=kind, nbytes=nbytes, workers=workers, nodes=nodes, most=most, cluster=cluster)
    if kind == CollectiveKind.SEND:
        link = cluster.link_of(0, min(workers, cluster.workers) - 1)  # the furthest of them
        found = [Way("direct", link, link.latency_s, nbytes / link.bytes_per_s)]
    elif kind == CollectiveKind.ALL_TO_ALL:
        found = [job.pairwise()]
    else:
        found = [job.ring()]
        if kind in _TREES:
            found.append(job.tree())
        if nodes > 1 and most > 1:
            found.append(job.hierarchical())
    return tuple(sorted(found, key=lambda way: way.seconds))


_TREES = (CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST, CollectiveKind.REDUCE)
_ROOTED = (CollectiveKind.BROADCAST, CollectiveKind.REDUCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    kind: CollectiveKind
    nbytes: float
    workers: int
    nodes: int
    most: int  # workers of one machine
    cluster: Cluster

    @property
    def inside(self) -> Link:
        return self.cluster.inside_for(min(self.most, self.workers))

    @property
    def slow(self) -> Link:
        """What a ring through all workers waits for."""
        if self.nodes == 1:
            return self.inside
        between = self.cluster.between_for(self.nodes)
        return between if self.most == 1 or between.bytes_per_s <= self.inside.bytes_per_s else self.inside

    @property
    def latency_s(self) -> float:
        """Of a step of such a ring: the longest hop."""
        between_s = self.cluster.between_for(self.nodes).latency_s if self.nodes > 1 else 0.0
        return max(between_s, self.inside.latency_s if self.most > 1 else 0.0)

    def ring(self) -> Way:
        steps, share = ring_shape(self.kind, self.workers)
        slow = self.slow
        return Way("ring", slow, steps * self.latency_s, share * self.nbytes / slow.bytes_per_s)

    def tree(self) -> Way:
        """Return pipelined binary trees: a chain inside each machine, trees between. Two of them use both
        directions.
        """
        passes = 1 if self.kind in _ROOTED else 2
        hops_s = (self.most - 1) * self.inside.latency_s if self.most > 1 else 0.0
        if self.nodes > 1:
            hops_s += ceil(log2(self.nodes)) * self.cluster.between_for(self.nodes).latency_s
        return Way("tree", self.slow, passes * hops_s, passes * self.nbytes / self.slow.bytes_per_s)

    def hierarchical(self) -> Way:
        """Return the way that scatters inside every machine, does the rest between machines and gathers inside again.

        Between machines each worker moves its own part, and the parts of one machine together are the whole buffer.
        """
        between = self.cluster.between_for(self.nodes)
        within = CollectiveKind.ALL_REDUCE if self.kind in _ROOTED else self.kind  # scatter and gather, both
        inside, among = ring_shape(within, self.most), ring_shape(self.kind, self.nodes)
        inside_s = inside[1] * self.nbytes / self.inside.bytes_per_s
        between_s = among[1] * self.nbytes / between.bytes_per_s
        latency_s = inside[0] * self.inside.latency_s + among[0] * between.latency_s
        slow = between if between_s >= inside_s else self.inside
        return Way("hierarchical", slow, latency_s, inside_s + between_s)

    def pairwise(self) -> Way:
        """Return every worker sends each other one its part; what leaves a machine shares its link."""
        part = self.nbytes / self.workers
        inside_s = (self.most - 1) * part / self.inside.bytes_per_s if self.most > 1 else 0.0
        steps_s = (self.workers - 1) * self.latency_s
        if self.nodes == 1:
            return Way("pairwise", self.inside, steps_s, inside_s)
        between = self.cluster.between_for(self.nodes, everyone=True)
        between_s = self.most * (self.workers - self.most) * part / between.bytes_per_s
        slow = between if between_s >= inside_s else self.inside
        return Way("pairwise", slow, steps_s, max(inside_s, between_s))


def ring_shape(kind: CollectiveKind, workers: int) -> tuple[int, float]:
    """Return messages one after the other, and the share of the buffer that crosses every link of a ring."""
    if workers < 2:
        return 0, 0.0
    part = (workers - 1) / workers
    return {
        CollectiveKind.ALL_REDUCE: (2 * (workers - 1), 2 * part),
        CollectiveKind.REDUCE_SCATTER: (workers - 1, part),
        CollectiveKind.ALL_GATHER: (workers - 1, part),
        CollectiveKind.ALL_TO_ALL: (workers - 1, part),
        CollectiveKind.BROADCAST: (workers - 1, 1.0),
        CollectiveKind.REDUCE: (workers - 1, 1.0),
        CollectiveKind.SEND: (1, 1.0),
    }[kind]
