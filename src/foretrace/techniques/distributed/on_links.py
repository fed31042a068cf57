"""Transfers of a graph on the links of a cluster: which workers take part in each, and which links it crosses.

Two sorts of graphs: messages that a technique put into the graph of one worker, which stands for all; and recorded
collectives, of one rank or of several that were joined.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.cost.network.link_network import ring_shape
from foretrace.cost.network.network import KINDS, CollectiveKind
from foretrace.graph.collectives import collective_calls, kind_of
from foretrace.graph.taskgraph import EdgeKind, TaskGraph, TaskKind
from foretrace.hardware.cluster import Cluster
from foretrace.simulate.flows.flows import Flows, Transfer
from foretrace.simulate.flows.routes import all_to_all, ring, send
from foretrace.simulate.ranks import parts
from foretrace.simulate.timeline import Timeline
from foretrace.techniques.distributed.messages import HIERARCHICAL, SERVERS

_SENDS = ("send", "recv")
_LEVEL = re.compile(r" level (\d+)$")
_BUCKET = re.compile(r" bucket (\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A transfer of a graph: `rows` that end together, `alone_ns` after the last of them has begun.

    Of that time, bytes are on the links in all but the first `latency_ns`. `one` is what its own group of workers
    moves, 0 bytes if unknown; `route` the links and connections of all groups that do the same at the same time.
    """

    rows: tuple[int, ...]
    alone_ns: int
    latency_ns: int
    one: Transfer
    route: Mapping[int, int]

    @property
    def joined(self) -> bool:
        """Whether other groups that do the same cross links of this one."""
        return any(self.route[link] > times for link, times in self.one.route.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTransfers:
    """All transfers that could be placed, and how many could not because nobody knows who takes part."""

    moved: tuple[Moved, ...]
    lost: int = 0


# -- messages that a technique put into the graph of one worker ----------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PutIn:
    """Who sends what to whom, from what stands of the messages in `info.recording["distributed"]`.

    So many `groups` of workers do the same at the same time; worker w of group g is number w · groups + g.
    """

    facts: Mapping[str, Any]
    groups: int = 1
    _known: dict[tuple[Any, ...], tuple[Transfer, Mapping[int, int]]] = field(default_factory=dict)

    @property
    def workers(self) -> int:
        """Workers of the cluster that are needed, servers among them."""
        apart = self._by_servers and not self.facts["colocated"]
        return (int(self.facts["workers"]) + (int(self.facts["servers"]) if apart else 0)) * self.groups

    @property
    def _by_servers(self) -> bool:
        return self.facts.get("scheme") == SERVERS

    def found(self, graph: TaskGraph, live: Mask, cluster: Cluster) -> PlacedTransfers:
        """Return the transfers `live` (n, a mask of tasks), each a flow of its own."""
        fixed_ns, result = _fixed_ns(graph), []
        for row in np.flatnonzero(live).tolist():
            one, route = self._transfer(graph.names[graph.name[row]], int(graph.nbytes[row]), cluster)
            fixed = int(fixed_ns[graph.lane[row]])
            dur = int(graph.dur[row])
            latency = min(one.latency_ns if fixed < 0 else fixed, dur)
            result.append(Moved(rows=(row,), alone_ns=dur, latency_ns=latency, one=one, route=route))
        return PlacedTransfers(moved=tuple(result))

    def _transfer(self, name: str, nbytes: int, cluster: Cluster) -> tuple[Transfer, Mapping[int, int]]:
        level, bucket = _LEVEL.search(name), _BUCKET.search(name)
        at_level = int(level[1]) if level and self.facts.get("scheme") == HIERARCHICAL else -1
        kind = kind_of(name)
        server = int(bucket[1]) % int(self.facts["servers"]) if self._by_servers and bucket else 0
        key = (kind, at_level, nbytes, server, name.split(maxsplit=1)[0])
        if key not in self._known:
            if self._by_servers and name.startswith(("push", "pull")):
                every = [self._served(cluster, g, server, push=name.startswith("push")) for g in range(self.groups)]
            else:
                every = [_transfer(kind, self._at(team, g), nbytes, cluster) for team in self._teams(at_level)
                         for g in range(self.groups)]  # fmt: skip
            self._known[key] = every[0], _together(each.route for each in every)
        return self._known[key]

    def _at(self, workers: Iterable[int], group: int) -> list[int]:
        return [worker * self.groups + group for worker in workers]

    def _teams(self, level: int) -> list[list[int]]:
        """Return workers that exchange with each other: all, or those that differ in their place along one level."""
        workers = int(self.facts["workers"])
        if level < 0:
            return [list(range(workers))]
        sizes = [int(size) for size, _ in self.facts["levels"]]
        stride, size = prod(sizes[:level]), sizes[level]
        first = [worker for worker in range(workers) if worker // stride % size == 0]
        return [[worker + stride * i for i in range(size)] for worker in first]

    def _served(self, cluster: Cluster, group: int, server: int, *, push: bool) -> Transfer:
        """Return every worker sends to its servers, or they to it; how many bytes follows from the time."""
        workers, servers = int(self.facts["workers"]), range(int(self.facts["servers"]))
        begin = 0 if self.facts["colocated"] else workers
        ends = [
            tuple(self._at((worker, begin + each) if push else (begin + each, worker), group))
            for worker in range(workers)
            for each in (servers if self.facts["sharded"] else (server,))
        ]
        sent = [send(cluster, source, target, 0.0) for source, target in ends if source != target]
        latency_ns = max((each.latency_ns for each in sent), default=0)
        return Transfer(nbytes=0.0, route=_together(each.route for each in sent), latency_ns=latency_ns)


def _fixed_ns(graph: TaskGraph) -> Int64:
    """Return per lane what a message takes beside the time in which it keeps the link for itself; −1 if unknown.

    Messages of one link are in the graph one after the other already, but for this time.
    """
    dst = graph.dst
    queue = (graph.edge_kind == EdgeKind.STREAM) & graph.from_start & (graph.lane[graph.src] == graph.lane[dst])
    queue &= (graph.kind[graph.src] == TaskKind.COLLECTIVE) & (graph.kind[dst] == TaskKind.COLLECTIVE)
    fixed = np.full(len(graph.lanes), -1, dtype=np.int64)
    src = graph.src[queue]
    np.maximum.at(fixed, graph.lane[src], np.maximum(graph.dur[src] - graph.lag[queue], 0))
    return fixed


# -- recorded collectives ------------------------------------------------------------------------------------------


def recorded_workers(graph: TaskGraph) -> int:
    """Return workers that a cluster must have for the ranks of a recording; 0 if it does not tell."""
    return max([graph.info.world_size, *(lane.rank + 1 for lane in graph.lanes)]) if graph.info.world_size > 1 else 0


def recorded(graph: TaskGraph, timeline: Timeline, live: Mask, cluster: Cluster) -> PlacedTransfers:
    """Return the collectives `live` (n, a mask of tasks) of one or several ranks; rank r is worker r of the cluster."""
    if len(graph.ranks) > 1:
        return _of_ranks(graph, timeline, live, cluster)
    calls, result = collective_calls(graph), []
    for row, what in zip(calls.row.tolist(), calls.what, strict=True):
        if not live[row]:
            continue
        nbytes = int(graph.nbytes[row]) if graph.nbytes[row] > 0 else what.nbytes
        if what.peers:
            one = send(cluster, what.peers[0], what.peers[1], max(nbytes, 0))
        elif what.members or what.group_size in (-1, graph.info.world_size):
            one = _transfer(what.kind, what.members or range(graph.info.world_size), nbytes, cluster)
        else:
            continue
        dur = int(graph.dur[row])
        result.append(Moved(rows=(row,), alone_ns=dur, latency_ns=min(one.latency_ns, dur), one=one, route=one.route))
    return PlacedTransfers(moved=tuple(result), lost=int(live.sum()) - len(result))


def _of_ranks(graph: TaskGraph, timeline: Timeline, live: Mask, cluster: Cluster) -> PlacedTransfers:
    """Return members that wait for all others end together. One that may leave early, like a sender, keeps its time."""
    meets = parts(timeline)
    into = graph.edge_kind == EdgeKind.COLLECTIVE
    src, dst = graph.src[into], graph.dst[into]
    arrivals = np.bincount(dst[graph.kind[src] == TaskKind.ARRIVAL], minlength=len(graph))
    by_join = np.isin(np.arange(len(graph)), dst[graph.kind[src] == TaskKind.JOIN])
    result, placed = [], 0
    for first, behind in zip(meets.first[:-1].tolist(), meets.first[1:].tolist(), strict=True):
        rows, at = np.unique(meets.transfer[first:behind], return_index=True)
        ranks = meets.rank[first:behind][at].tolist()
        placed += int(live[rows].sum())
        complete = by_join[rows] | (arrivals[rows] >= len(rows))
        together = rows[complete & live[rows]]
        if not len(together):
            continue
        nbytes = int(graph.nbytes[rows].max())
        kind = kind_of(graph.names[graph.name[rows[0]]])
        if len(ranks) == 2 and complete.sum() == 1:
            source, target = ranks if complete[1] else ranks[::-1]
            one = send(cluster, source, target, max(nbytes, 0))
        else:
            one = _transfer(kind, ranks, nbytes, cluster)
        alone_ns = max(int(timeline.end[together].max() - timeline.start[together].max()), 0)
        result.append(
            Moved(
                rows=tuple(together.tolist()),
                alone_ns=alone_ns,
                latency_ns=min(one.latency_ns, alone_ns),
                one=one,
                route=one.route,
            )
        )
    return PlacedTransfers(moved=tuple(result), lost=int(live.sum()) - placed)


# -- flows ---------------------------------------------------------------------------------------------------------


def _transfer(kind: str, workers: Sequence[int], nbytes: int, cluster: Cluster) -> Transfer:
    """Return a collective in PyTorch's words. What is unknown takes the way of a ring and has 0 bytes."""
    known = KINDS.get(kind)
    if kind in _SENDS:  # every stage of a pipeline to the next one
        return ring(cluster, workers, max(nbytes, 0), steps=1)
    if known == CollectiveKind.ALL_TO_ALL:
        return all_to_all(cluster, workers, max(nbytes, 0))
    steps, share = ring_shape(known or CollectiveKind.ALL_REDUCE, len(workers))
    return ring(cluster, workers, share * max(nbytes, 0) if known else 0.0, steps=steps)


def _together(routes: Iterable[Mapping[int, int]]) -> dict[int, int]:
    total = Counter[int]()
    for route in routes:
        total.update(route)
    return dict(total)


def as_flows(moved: Sequence[Moved], capacity: Float64, now: Float64, *, shared: bool = True) -> tuple[Flows, Float64]:
    """Return flows, and the capacities of all links with one more behind them for each flow; not `shared`: that one
    alone.

    Alone on links of `capacity`, the group of a transfer takes exactly its time: it is limited to the rate that it
    has in the graph, or to what the links carry if that is less, with fewer bytes. `now` is what links carry.
    """
    limits: list[float] = []
    flows: list[tuple[Sequence[int], Transfer]] = []
    for each in moved:
        wire_s = (each.alone_ns - each.latency_ns) / 1e9
        rate = min((capacity[link] / times for link, times in each.one.route.items()), default=inf)
        if wire_s <= 0 or rate == inf:
            flows.append((each.rows, Transfer(nbytes=0.0, route={}, latency_ns=each.alone_ns)))
            continue
        most = wire_s * float(rate)
        nbytes = min(each.one.nbytes, most) if each.one.nbytes > 0 else most
        own = len(capacity) + len(limits)
        limits.append(nbytes / wire_s)
        route = {**each.route, own: 1} if shared else {own: 1}
        flows.append((each.rows, Transfer(nbytes=nbytes, route=route, latency_ns=each.latency_ns)))
    return Flows.of(flows), np.concatenate([now, np.array(limits, dtype=np.float64)])


def sharing(flows: Flows, n_links: int, begin: Int64, end: Int64) -> tuple[Mask, Float64]:
    """Return which flows (F) cross one of the first `n_links` links at the same time as another one; bytes over each
    link.

    `begin` and `end` (F, ns) bound the time in which a flow moves bytes.
    """
    of = np.repeat(np.arange(len(flows)), np.diff(flows.route_ptr))
    mask = np.zeros(len(flows), dtype=np.bool_)
    real = flows.route_link < n_links
    load = np.zeros(n_links)
    np.add.at(load, flows.route_link[real], (flows.route_times * flows.nbytes[of])[real])
    order = np.lexsort((begin[of], flows.route_link))
    order = order[real[order] & (end[of] > begin[of])[order]]
    bounds = np.flatnonzero(np.diff(flows.route_link[order])) + 1
    for rows in np.split(of[order], bounds) if len(order) else ():
        latest = np.maximum.accumulate(end[rows])
        mask[rows[1:][begin[rows[1:]] < latest[:-1]]] = True
        mask[rows[:-1][end[rows[:-1]] > begin[rows[1:]]]] = True
    return mask, load
