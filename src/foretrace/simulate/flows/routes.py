"""What messages and collectives put on the links of a cluster. `nbytes` of a collective is the buffer of a worker.

Every function raises GraphError for a worker that the cluster does not have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from foretrace.hardware.cluster import Cluster
from foretrace.simulate.flows.flows import Transfer


def send(cluster: Cluster, source: int, target: int, nbytes: float) -> Transfer:
    """Return one worker sends to another."""
    return _transfer(cluster, [(source, target)], nbytes, steps=1, alone=True)


def ring(cluster: Cluster, workers: Sequence[int], nbytes: float, *, steps: int) -> Transfer:
    """Return every worker sends `nbytes` to the next one, in `steps` messages that wait for those before them.

    The ring goes through the workers by number, so that it enters and leaves every machine once.
    """
    around = sorted(workers)
    pairs = zip(around, around[1:] + around[:1], strict=True) if len(around) > 1 else ()
    return _transfer(cluster, pairs, nbytes, steps=steps)


def all_to_all(cluster: Cluster, workers: Sequence[int], nbytes: float) -> Transfer:
    """Return every worker sends a p-th of its buffer to every other one, to all of them at a time."""
    pairs = [(a, b) for a in workers for b in workers if a != b]
    return _transfer(cluster, pairs, nbytes / len(workers) if workers else 0.0, steps=1)


def _transfer(
    cluster: Cluster, pairs: Iterable[tuple[int, int]], nbytes: float, *, steps: int, alone: bool = False
) -> Transfer:
    """Return connections between the pairs, in lock step; a step takes as long as the slowest one's latency."""
    route, latency_s = Counter[int](), 0.0
    for source, target in pairs:
        links, seconds = cluster.path(source, target, alone=alone)
        route.update(links)
        latency_s = max(latency_s, seconds)
    return Transfer(nbytes=nbytes, route=dict(route), latency_ns=round(steps * latency_s * 1e9))
