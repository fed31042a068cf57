"""Wires: the links of a cluster as flows share them, and what collectives put on them.

Links count in one direction each. A worker has a link into its machine and one out of it (what the devices of a machine
reach each other by), a machine one up and one down (all its network cards together), and what lies between the
machines is one of: the cables of a fabric, a switch per `per_switch` machines with a link up and one down, or one core
that all machines share; the last two only where they carry less than the machines below them can send. A transfer
between machines does not touch the links inside: network cards are joined beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import GraphError
from foretrace.hardware.cluster import Cluster, Link
from foretrace.simulate.flows.flows import Transfer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wires:
    """`capacity` (L, bytes per second) of every link, by `names`; routes come from the methods.

    `nbytes` of a collective is the buffer of a worker. Every method raises GraphError for a worker that is not there.
    """

    cluster: Cluster
    names: tuple[str, ...]
    capacity: Float64
    machine: tuple[int, ...]  # of every worker
    inside: tuple[Link, ...]  # of every machine

    @classmethod
    def of(cls, cluster: Cluster) -> Wires:
        """Return all links of a cluster."""
        if cluster.machines:
            sizes = [machine.per_node for machine in cluster.machines]
            inside = [machine.inside for machine in cluster.machines]
        else:
            sizes = [cluster.per_node] * cluster.nodes
            inside = [cluster.inside_for(cluster.per_node)] * cluster.nodes
        machine = [m for m, size in enumerate(sizes) for _ in range(size)]
        links = [(f"worker {w} {way}", inside[m].bytes_per_s) for w, m in enumerate(machine) for way in ("out", "in")]
        if cluster.fabric is not None:
            for cable in cluster.fabric.cables:
                rate = cable.gbit_s * 1e9 / 8
                a, b = cable.ends
                links += [(f"{a} to {b}", rate), (f"{b} to {a}", rate)]
        else:
            rate = cluster.between.bytes_per_s
            links += [(f"machine {m} {way}", rate) for m in range(len(sizes)) for way in ("up", "down")]
            if cluster.oversubscription > 1 and cluster.per_switch:
                up = cluster.per_switch * rate / cluster.oversubscription
                switches = -(-len(sizes) // cluster.per_switch)
                links += [(f"switch {s} {way}", up) for s in range(switches) for way in ("up", "down")]
            elif cluster.oversubscription > 1:
                links.append(("core", len(sizes) * rate / cluster.oversubscription))
        return cls(
            cluster=cluster,
            names=tuple(name for name, _ in links),
            capacity=np.array([rate for _, rate in links], dtype=np.float64),
            machine=tuple(machine),
            inside=tuple(inside),
        )

    @property
    def workers(self) -> int:
        """Workers of all machines."""
        return len(self.machine)

    def path(self, source: int, target: int) -> tuple[tuple[int, ...], float]:
        """Return links from one worker to another, and the seconds until a byte has crossed them."""
        for worker in (source, target):
            if not 0 <= worker < self.workers:
                raise GraphError(
                    f"worker {worker} is not in {self.cluster.name}, which has {self.workers}, counted from 0."
                )
        a, b = self.machine[source], self.machine[target]
        if source == target:
            return (), 0.0
        if a == b:
            return (2 * source, 2 * target + 1), self.inside[a].latency_s
        base = 2 * self.workers
        if self.cluster.fabric is not None:
            fabric, machines = self.cluster.fabric, self.cluster.machines
            steps = fabric.path(machines[a].name, machines[b].name)
            latency_us = sum(fabric.cables[at].latency_us for at, _ in steps)
            return tuple(base + 2 * at + (0 if forwards else 1) for at, forwards in steps), latency_us * 1e-6
        across: tuple[int, ...] = ()
        above, per_switch = base + 2 * len(self.inside), self.cluster.per_switch
        if self.cluster.oversubscription > 1 and not per_switch:
            across = (above,)
        elif self.cluster.oversubscription > 1 and a // per_switch != b // per_switch:
            across = (above + 2 * (a // per_switch), above + 2 * (b // per_switch) + 1)
        return (base + 2 * a, *across, base + 2 * b + 1), self.cluster.between.latency_s

    def send(self, source: int, target: int, nbytes: float) -> Transfer:
        """Return one worker sends to another."""
        return self._transfer([(source, target)], nbytes, steps=1)

    def ring(self, workers: Sequence[int], nbytes: float, *, steps: int) -> Transfer:
        """Return every worker sends `nbytes` to the next one, in `steps` messages that wait for those before them.

        The ring goes through the workers by number, so that it enters and leaves every machine once.
        """
        around = sorted(workers)
        pairs = zip(around, around[1:] + around[:1], strict=True) if len(around) > 1 else ()
        return self._transfer(pairs, nbytes, steps=steps)

    def all_to_all(self, workers: Sequence[int], nbytes: float) -> Transfer:
        """Return every worker sends a p-th of its buffer to every other one, to all of them at a time."""
        pairs = [(a, b) for a in workers for b in workers if a != b]
        return self._transfer(pairs, nbytes / len(workers) if workers else 0.0, steps=1)

    def _transfer(self, pairs: Iterable[tuple[int, int]], nbytes: float, *, steps: int) -> Transfer:
        """Return connections between the pairs, in lock step; a step takes as long as the slowest one's latency."""
        route, latency_s = Counter[int](), 0.0
        for source, target in pairs:
            links, seconds = self.path(source, target)
            route.update(links)
            latency_s = max(latency_s, seconds)
        return Transfer(nbytes=nbytes, route=dict(route), latency_ns=round(steps * latency_s * 1e9))
