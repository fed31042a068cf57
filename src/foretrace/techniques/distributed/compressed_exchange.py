"""Compressed messages in the place of those of `data-parallel`: encoded, sent, decoded, bucket by bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from foretrace.cost.network.network import CollectiveKind
from foretrace.graph.insert import DeviceTask, HostTask, insert_at
from foretrace.graph.taskgraph import Phase, TaskGraph
from foretrace.techniques.base import Technique
from foretrace.techniques.compute.batching import with_facts
from foretrace.techniques.distributed.exchange import Message, Stop, exchange, without_exchange
from foretrace.techniques.distributed.messages import ExchangePlan, buffer_messages, plan_of

Parts = Sequence[tuple[CollectiveKind, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """What happens to one bucket: collectives one after the other, their bytes as `cost.network` counts them."""

    parts: Parts
    encode_s: float = 0.0
    decode_s: float = 0.0


def bucket_shapes(graph: TaskGraph, plan: ExchangePlan) -> list[tuple[tuple[int, ...], ...]]:
    """Return shapes of the gradients of every bucket."""
    gradients = plan.gradients(graph)
    return [tuple(gradients[i].shape for i in part.gradients) for part in plan.parts]


def compressible(graph: TaskGraph, technique: Technique) -> ExchangePlan:
    """Return the plan of the messages in a graph; refuses, in the name of `technique`, where no hook could
    change them.
    """
    plan = plan_of(graph, technique, only_all_reduce=True)
    if plan.prioritised:
        raise technique.refuse("hooks of DistributedDataParallel send buckets in their order; leave priority out.")
    gradients = plan.gradients(graph)
    if len(gradients) <= max(index for part in plan.parts for index in part.gradients):
        raise technique.refuse("the graph no longer shows when gradients become ready.")
    if any(each.itemsize != 4 for each in gradients):
        raise technique.refuse("the gradients are not float32, which the compressors are for.")
    whole = [index for part in plan.parts for index in part.gradients]
    if len(set(whole)) != len(whole):
        raise technique.refuse("gradients are cut into pieces; a hook gets whole ones, so leave tensor-partition out.")
    nbytes = [sum(4 * prod(gradients[i].shape) for i in part.gradients) for part in plan.parts]
    if nbytes != [part.nbytes for part in plan.parts]:
        raise technique.refuse("the messages are not those of whole buckets; put it directly behind data-parallel.")
    return plan


def compressed(
    graph: TaskGraph,
    plan: ExchangePlan,
    buckets: Sequence[Compressed],
    technique: Technique,
    *,
    crowding: float = 0.0,
    in_turn: bool = False,
) -> TaskGraph:
    """Return the graph with these messages instead of the plan's.

    Encoding comes behind the gradient of a bucket that is ready last, on the lane of the backward pass, and the message
    behind it. Decoding belongs to the message: it holds one of the places in flight, not the link; the share
    `crowding` of it is also taken from the backward pass, where that still runs. `in_turn` is for methods whose
    messages follow one another on a thread of their own: one bucket at a time, encoding included.
    """
    base = without_exchange(graph)
    gradients, steps, net = plan.gradients(base), base.n_steps, plan.net()
    on_device = bool(base.on_device.any())
    ready = [np.max([gradients[i].ready for i in part.gradients], axis=0) for part in plan.parts]
    device = [np.max([gradients[i].device for i in part.gradients], axis=0) for part in plan.parts]
    last, last_device = np.max(ready, axis=0), np.max(device, axis=0)
    tasks: list[HostTask | DeviceTask] = []
    place: dict[tuple[int, int], int] = {}
    size = 0
    for i, bucket in enumerate(buckets):
        former = buckets[i - 1] if i else Compressed(parts=())
        own = (
            crowding * (former.encode_s + former.decode_s) if in_turn else bucket.encode_s + crowding * former.decode_s
        )
        dur = round(1e9 * own)
        for step in range(steps if dur else 0):
            row, name = int(ready[i][step]), f"beside bucket {i}" if in_turn else f"encode bucket {i}"
            if on_device and device[i][step] >= 0:
                tasks.append(DeviceTask(after=int(device[i][step]), launched_after=row, name=name, dur_ns=dur))
                place[i, step] = size + 1
                size += 2
            else:
                tasks.append(HostTask(after=row, name=name, dur_ns=dur, phase=Phase.BACKWARD))
                place[i, step] = size
                size += 1
    encoded, new = insert_at(base, tasks)
    old = len(base)

    def behind(rows: Any, i: int, *, of_device: bool) -> Any:
        """Return new rows of these, or of the encoder that stands behind them."""
        moved = np.where(rows >= 0, new[np.maximum(rows, 0)], -1)
        for step in range(steps):
            if (at := place.get((i, step))) is not None:
                row = new[old + at]
                if bool(encoded.on_device[row]) == of_device:
                    moved[step] = row
        return moved

    final = len(buckets) - 1
    waits = behind(last, final, of_device=False)
    messages: list[Message] = []
    # Sizes of the messages ahead of the forward pass are those of the plan; their rows are of the graph as it is now.
    ahead, stops = buffer_messages(encoded, plan)
    messages += ahead
    for i, bucket in enumerate(buckets):
        seconds = [net.cost(kind, nbytes).seconds * plan.transfer for kind, nbytes in bucket.parts]
        fixed = [net.cost(kind, 0).seconds for kind, _ in bucket.parts]
        # On gloo the first messages of all buckets are started by the backward pass; the others follow on its threads.
        whole = sum(seconds) + bucket.decode_s + (bucket.encode_s if in_turn else 0.0)
        wire = whole if in_turn else max(sum(seconds) - sum(fixed), 0.0)
        messages.append(
            Message(
                name=f"compressed bucket {i}",
                nbytes=round(sum(nbytes for _, nbytes in bucket.parts)),
                dur_ns=round(1e9 * whole),
                wire_ns=round(1e9 * wire),
                after=behind(ready[i], i, of_device=False),
                device=behind(device[i], i, of_device=True) if on_device else None,
                waits=waits,
                lag_ns=round(1e6 * plan.waiting_ms),
                host_ns=round(1e3 * plan.launch_us),
            )
        )
    stop_device = behind(last_device, final, of_device=True) if on_device else None
    stops.append(Stop(waits=waits, then_ns=plan.copied_ns, device=stop_device))
    in_flight = 1 if in_turn else plan.in_flight
    changed = exchange(encoded, messages, stops, in_flight=in_flight)
    facts = {**plan.facts, "compression": str(technique), "sent": [message.nbytes for message in messages]}
    return with_facts(changed, distributed=facts)
