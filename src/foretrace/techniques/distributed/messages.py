"""What workers send each other in a step: written into a graph by `data-parallel`, changed by other techniques.

The plan stands in `info.recording["distributed"]`, so that a technique that cuts, joins, reorders or routes messages
takes the old ones out of the graph and puts those of the changed plan in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import msgspec
import numpy as np

from foretrace.cost.network.network import CollectiveKind, Network
from foretrace.cost.network.parse import network
from foretrace.graph.taskgraph import Phase, TaskGraph
from foretrace.techniques.base import Technique
from foretrace.techniques.compute.batching import with_facts
from foretrace.techniques.distributed.exchange import LINK, Message, Stop, apart, beside, exchange, without_exchange
from foretrace.techniques.distributed.gradients import (
    Gradient,
    ahead_of,
    find_gradients,
    first_uses,
    row_before,
    spread_gradients,
)
from foretrace.techniques.distributed.one_worker import IN_FLIGHT

ALL_REDUCE, HIERARCHICAL, SERVERS = "all-reduce", "hierarchical", "parameter-server"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePart:
    """Gradients (numbers in the order in which they become ready) that are sent together; a slice holds one of them."""

    gradients: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One message of the way of a part: which link it takes and for how long."""

    name: str
    link: str
    nbytes: int
    seconds: float
    wire_s: float  # the link is taken by nothing else


@dataclass(frozen=True, kw_only=True)
class ExchangePlan:
    """Messages of a step of data-parallel training, for one worker that stands for all."""

    workers: int
    network: str
    backend: str
    parts: tuple[MessagePart, ...]  # in the order in which they are sent
    transfer: float = 1.0  # time of transfers relative to the model of the network
    waiting_ms: float = 0.0  # from this worker's arrival to that of the last one
    launch_us: float = 0.0  # host time of starting a collective
    copied_ns: int = 0  # copies out of the buckets
    buffer_bytes: int = 0  # of buffers that the first worker sends to all before the forward pass
    buffer_types: int = 0  # one message each
    buffers: int = 0
    buffer_us: float = 0.0  # host time of one, in and out of its message
    gradient_mb: float = 0.0  # of all gradients, where the recording does not show them
    skew: float = 1.0
    scheme: str = ALL_REDUCE
    levels: tuple[tuple[int, str], ...] = ()  # of the hierarchical scheme: workers and network, innermost first
    servers: int = 0
    colocated: bool = False  # servers share the workers' machines and links
    sharded: bool = True  # every part over all servers
    sum_gb_s: float = 0.0  # what a server adds up
    prioritised: bool = False  # by the layer that waits first in the next step
    company: float = 1.0  # slow-down of computing beside messages, task by task
    stretch: float = 1.0  # of messages beside computing
    delay_us: float = 0.0  # of a message beside computing, whatever its size

    @property
    def in_flight(self) -> int:
        """Collectives at a time."""
        return IN_FLIGHT[self.backend]

    def net(self, text: str = "", workers: int = 0) -> Network:
        """Return the network between all workers, or another one."""
        return network(text or self.network, workers or self.workers, in_flight=self.in_flight)

    def gradients(self, graph: TaskGraph) -> tuple[Gradient, ...]:
        """Return the gradients that the parts count, as they stand in this graph."""
        if self.gradient_mb:
            return spread_gradients(graph, self.gradient_mb * 1e6, skew=self.skew)
        return find_gradients(graph)

    def legs(self, number: int) -> list[Leg]:
        """Return the messages that one part takes, one after the other."""
        nbytes = self.parts[number].nbytes
        return _SCHEMES[self.scheme](self, number, nbytes)

    def collective(self, kind: CollectiveKind, nbytes: float, net: Network, name: str, link: str = LINK) -> Leg:
        """Return one collective; what does not depend on its size leaves the link free for others in flight."""
        seconds = net.cost(kind, nbytes).seconds * self.transfer
        one, two = (net.cost(kind, n).seconds * self.transfer for n in (1, 2))
        nothing = max(2 * one - two, 0.0)
        return Leg(name=name, link=link, nbytes=round(nbytes), seconds=seconds, wire_s=max(seconds - nothing, 0.0))

    @property
    def facts(self) -> dict[str, Any]:
        """The plan as it stands in a graph."""
        return {**asdict(self), "buckets": [part.nbytes for part in self.parts]}


def plan_of(graph: TaskGraph, technique: Technique, *, only_all_reduce: bool = False) -> ExchangePlan:
    """Return the plan that stands in a graph; refuses, in the name of `technique`, where there is none to change."""
    facts = dict(graph.info.recording.get("distributed") or {})
    if not facts:
        raise technique.refuse('no messages are exchanged yet; put `do="data-parallel workers=... network=..."` first.')
    if "parts" not in facts:
        raise technique.refuse("it changes the messages of data-parallel, and another technique has replaced those.")
    unknown = set(facts) - set(ExchangePlan.__dataclass_fields__) - {"buckets"}
    if unknown:
        raise technique.refuse(f"the messages are changed by {' and '.join(sorted(unknown))} already; put it first.")
    plan = msgspec.convert(facts, ExchangePlan)
    if only_all_reduce and plan.scheme != ALL_REDUCE:
        raise technique.refuse(f"the messages take another way already ({plan.scheme}).")
    return plan


def replanned(graph: TaskGraph, plan: ExchangePlan, technique: Technique) -> TaskGraph:
    """Return the graph with the messages of this plan in the place of those that it has."""
    return lay_out(without_exchange(apart(graph, plan.company, plan.stretch)), plan, technique)


def lay_out(graph: TaskGraph, plan: ExchangePlan, technique: Technique) -> TaskGraph:
    """Return the graph with the messages of this plan."""
    gradients = plan.gradients(graph)
    if not gradients:
        raise technique.refuse("the graph no longer shows when gradients become ready.")
    last = np.max([each.ready for each in gradients], axis=0)
    on_device = bool(graph.on_device.any())
    device = np.max([each.device for each in gradients], axis=0) if on_device else None
    wait_ns, host_ns = round(plan.waiting_ms * 1e6), round(plan.launch_us * 1e3)
    messages, stops = buffer_messages(graph, plan)
    uses = np.zeros((0, 0), dtype=np.int64)
    if plan.prioritised:
        uses = row_before(graph, first_uses(graph, gradients))
        least = 5 if on_device else 3  # the first step, on a device the first two, wait for nothing yet
        if graph.n_steps < least or np.any(uses < 0):
            raise technique.refuse(
                "messages of a step are waited for in the next one; "
                f"record {least} steps or more with their forward pass."
            )
        if plan.copied_ns:
            stops.append(Stop(waits=last, then_ns=plan.copied_ns, device=device))
        stops += [Stop(waits=np.array(rows)) for rows in sorted({tuple(each) for each in uses.tolist()})]
    else:
        stops.append(Stop(waits=last, then_ns=plan.copied_ns, device=device))
    for i, part in enumerate(plan.parts):
        legs = plan.legs(i)
        earliest = min(part.gradients, key=lambda j: int(uses[j, 0])) if plan.prioritised else 0
        for k, leg in enumerate(legs):
            final = k == len(legs) - 1
            messages.append(
                Message(
                    name=leg.name,
                    nbytes=leg.nbytes,
                    dur_ns=round(leg.seconds * 1e9),
                    wire_ns=round(leg.wire_s * 1e9),
                    after=np.max([gradients[j].ready for j in part.gradients], axis=0),
                    device=np.max([gradients[j].device for j in part.gradients], axis=0) if on_device else None,
                    waits=None if not final else uses[earliest] if plan.prioritised else last,
                    lag_ns=wait_ns if k == 0 else 0,
                    host_ns=host_ns if k == 0 else 0,
                    link=leg.link,
                    follows=(len(messages) - 1,) if k else (),
                    next_step=plan.prioritised and final,
                    priority=int(np.searchsorted(np.sort(uses[:, 0]), uses[earliest, 0])) if plan.prioritised else i,
                )
            )
    free = plan.prioritised or plan.scheme == SERVERS or (plan.scheme == HIERARCHICAL and plan.backend == "nccl")
    changed = exchange(graph, messages, stops, in_flight=1 if free else plan.in_flight, ordered=not free)
    if max(plan.company, plan.stretch) > 1 or plan.delay_us:
        changed = beside(changed, plan.company, plan.stretch, plan.delay_us)
    return with_facts(changed, distributed=plan.facts)


def buffer_messages(graph: TaskGraph, plan: ExchangePlan) -> tuple[list[Message], list[Stop]]:
    """Return buffers (running statistics) that are sent before the forward pass and waited for at once."""
    if not plan.buffer_bytes:
        return [], []
    rows = ahead_of(graph, Phase.FORWARD)
    if rows is None:
        return [], []
    net = plan.net()
    cost = net.cost(CollectiveKind.BROADCAST, plan.buffer_bytes).seconds
    cost += (plan.buffer_types - 1) * net.cost(CollectiveKind.BROADCAST, 8).seconds
    dur = round(cost * plan.transfer * 1e9)
    message = Message(
        name="broadcast of buffers",
        nbytes=plan.buffer_bytes,
        dur_ns=dur,
        wire_ns=dur,
        after=rows,
        waits=rows,
        host_ns=round(plan.launch_us * 1e3) * plan.buffer_types + round(plan.buffer_us * 1e3) * plan.buffers,
        priority=-1,
    )
    return [message], [Stop(waits=rows)]


def by_size(nbytes: Sequence[int], parts: Sequence[Sequence[int]]) -> tuple[MessagePart, ...]:
    """Return parts of whole gradients."""
    return tuple(MessagePart(gradients=tuple(each), nbytes=sum(nbytes[i] for i in each)) for each in parts)


def _ring(plan: ExchangePlan, number: int, nbytes: int) -> list[Leg]:
    return [plan.collective(CollectiveKind.ALL_REDUCE, nbytes, plan.net(), f"all-reduce bucket {number}")]


def _hierarchical(plan: ExchangePlan, number: int, nbytes: int) -> list[Leg]:
    """Return reduce-scatter along every level but the outermost, all-reduce there, all-gather back
    (BlueConnect, 2019).
    """
    scatter, gather = list[Leg](), list[Leg]()
    share = float(nbytes)
    for i, (size, text) in enumerate(plan.levels[:-1]):
        net, link = plan.net(text, size), _link(plan, i)
        what = f"bucket {number} level {i}"
        scatter.append(plan.collective(CollectiveKind.REDUCE_SCATTER, share, net, f"reduce-scatter {what}", link))
        gather.append(plan.collective(CollectiveKind.ALL_GATHER, share, net, f"all-gather {what}", link))
        share /= size
    size, text = plan.levels[-1]
    top = len(plan.levels) - 1
    name, link = f"all-reduce bucket {number} level {top}", _link(plan, top)
    across = plan.collective(CollectiveKind.ALL_REDUCE, share, plan.net(text, size), name, link)
    chain = [*scatter, across, *reversed(gather)]
    if plan.backend == "nccl":
        return chain
    # One thread does all parts of a bucket before the next one: all of them take one link.
    return [replace(leg, link=LINK, wire_s=leg.seconds) for leg in chain]


def _link(plan: ExchangePlan, level: int) -> str:
    """Return the lane of a level; levels on the same network share it."""
    texts = [text for _, text in plan.levels]
    return f"{LINK} level {texts.index(texts[level])}"


def _servers(plan: ExchangePlan, number: int, nbytes: int) -> list[Leg]:
    """Push to the servers, which add up, and pull the result (Li et al., OSDI 2014; BytePS, OSDI 2020)."""
    workers, servers, net = plan.workers, plan.servers, plan.net()
    own = int(plan.colocated)
    if plan.sharded:
        leaves = (servers - own) / servers if servers == workers else 1.0  # of a worker, that has no server of its own
        load = max(leaves, (workers - own) / servers)
        added, which = nbytes * workers / servers, ""
    else:
        load, added = float(workers - own), float(nbytes * workers)
        which = f" {number % servers}"
    push = plan.collective(CollectiveKind.SEND, nbytes * load, net, f"push bucket {number}", f"{LINK} push{which}")
    summed = added / (plan.sum_gb_s * 1e9) if plan.sum_gb_s else 0.0
    pull = replace(push, name=f"pull bucket {number}", link=f"{LINK} pull{which}")
    pull = replace(pull, seconds=pull.seconds + summed, wire_s=pull.wire_s)
    if plan.colocated:  # pushes and pulls share the directions of every machine's link
        push, pull = replace(push, link=f"{LINK}{which}"), replace(pull, link=f"{LINK}{which}")
    return [push, pull]


_SCHEMES: dict[str, Callable[[ExchangePlan, int, int], list[Leg]]] = {
    ALL_REDUCE: _ring,
    HIERARCHICAL: _hierarchical,
    SERVERS: _servers,
}


def level_count(levels: Sequence[tuple[int, str]]) -> int:
    """Return workers of all levels together."""
    return prod(size for size, _ in levels)
