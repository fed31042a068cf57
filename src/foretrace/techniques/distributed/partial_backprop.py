"""`partial-backprop`: data-parallel workers that back-propagate through a share of the layers each (SPB).

Layers are cut into L groups of equal backward time, from the output. Worker i of K runs the whole forward pass and
back-propagates ceil(i L / K) groups; a gradient is averaged over the c workers that computed it. Who goes how deep
changes with every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.cost.network.network import CollectiveKind, Network
from foretrace.cost.network.parse import network
from foretrace.graph.edit import scale
from foretrace.graph.taskgraph import Change, Phase, TaskGraph, TaskKind
from foretrace.techniques.base import Prior, Technique, derived, parameter
from foretrace.techniques.compute.batching import with_facts
from foretrace.techniques.distributed import one_worker
from foretrace.techniques.distributed.exchange import Message, Stop, exchange
from foretrace.techniques.distributed.gradients import Gradient, find_gradients
from foretrace.techniques.memory.saved import find_saved
from foretrace.training.partial import PartialStep, contributors, find_chain, grouped
from foretrace.training.training import Training


@dataclass(frozen=True, kw_only=True)
class PartialBackprop(Technique):
    """Workers that back-propagate to different depths."""

    summary = "every worker back-propagates a share of the layers, gradients averaged by layer"
    source = "SPB and JigSaw (DistributedML 2021, arXiv 2111.10672)"
    effort = "a loop of its own; convergence to check"
    needs = "as many processes as workers, a model that is a chain of blocks"

    workers: int = parameter(doc="processes, each with a copy of the model and a batch of its own", least=1)
    network: str = parameter("", doc="link between workers (1gbit/50us), or a file; not for one worker")
    groups: int = parameter(0, doc="parts that the layers are cut into; 0 is as many as workers")
    barrier: str = parameter(
        "max",
        doc="max: all wait for the deepest worker; mean: the mean worker, as where other jobs fill the time",
        choices=("max", "mean"),
    )
    backend: str = parameter("", doc="what exchanges messages", choices=("", "gloo", "nccl"))
    copy_gb_s: float | None = derived(unit="GB/s", doc="bandwidth of copying gradients into messages and back")
    waiting_ms: float | None = derived(unit="ms", doc="how much later the last worker is than this one")
    transfer: float | None = derived(doc="time of transfers relative to what the network's model says")

    @property
    def parts(self) -> int:
        """Groups of layers."""
        return self.groups or self.workers

    def contributors(self, group: int) -> int:
        """Return workers that compute the gradients of a group, 0 at the output."""
        return contributors(group, self.parts, self.workers)

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        if self.workers < 2:
            return {}
        return {
            "copy_gb_s": one_worker.copying(graph),
            "waiting_ms": one_worker.waiting(graph, self.workers),
            "transfer": one_worker.transfer(self._network()),
        }

    def change(self, graph: TaskGraph) -> TaskGraph:
        self._check()
        gradients = self._gradients(graph)
        cost = backward_costs(graph, gradients)
        group = grouped(cost, self.parts)
        shares = [self.contributors(each) / self.workers for each in range(self.parts)]
        if self.workers == 1:
            return graph.noted(Change(what="one worker back-propagates through all layers", tasks=0))
        kept = sum(float(cost[group == each].sum()) * shares[each] for each in range(self.parts)) / max(cost.sum(), 1)
        changed = _scaled(graph, gradients, group, shares) if self.barrier == "mean" else graph
        values = self.values(graph)
        messages, sent = self._messages(graph, gradients, group, values)
        last = np.max([each.ready for each in gradients], axis=0)
        total = sum(each.nbytes for each in gradients)
        stop = Stop(waits=last, then_ns=round(4 * total / values["copy_gb_s"]))
        result = exchange(changed, messages, [stop], in_flight=1)
        what = (
            f"back-propagated {100 * kept:.3g} % of the layers' time on the mean worker; gradients cross the network "
            f"{sent / max(total, 1):.3g} times on their way into averages ({self.workers} times without it)"
        )
        noted = [Change(what=what, tasks=len(messages) * graph.n_steps)]
        noted += self._memory(graph, gradients, group, shares)
        facts = {"workers": self.workers, "network": self.network, "backend": one_worker.back_end(graph, self.backend)}
        return with_facts(result.noted(*noted), distributed={**facts, "partial": str(self)})

    def _messages(
        self, graph: TaskGraph, gradients: Sequence[Gradient], group: Int64, values: dict[str, float]
    ) -> tuple[list[Message], int]:
        """Return one message per group behind the backward pass, and bytes that workers have computed in all."""
        last = np.max([each.ready for each in gradients], axis=0)
        device = np.max([each.device for each in gradients], axis=0) if graph.on_device.any() else None
        messages, sent, net = list[Message](), 0, self._network()
        for each in range(self.parts):
            nbytes = sum(gradients[i].nbytes for i in np.flatnonzero(group == each).tolist())
            many = self.contributors(each)
            if not nbytes:
                continue
            sent += many * nbytes
            kind = CollectiveKind.BROADCAST if many == 1 else CollectiveKind.ALL_REDUCE
            dur = round(1e9 * values["transfer"] * net.cost(kind, nbytes).seconds)
            messages.append(
                Message(
                    name=f"{kind} group {each}",
                    nbytes=nbytes,
                    dur_ns=dur,
                    wire_ns=dur,
                    after=last,
                    waits=last,
                    device=device,
                    lag_ns=0 if messages else round(1e6 * values["waiting_ms"]),
                )
            )
        return messages, sent

    def _memory(
        self, graph: TaskGraph, gradients: Sequence[Gradient], group: Int64, shares: Sequence[float]
    ) -> list[Change]:
        """Return what the mean worker does not keep for its backward pass."""
        saved = [each for each in find_saved(graph).tensors if each.use >= 0 and graph.step[each.row] >= 0]
        if not saved:
            return []
        on_device = bool(graph.on_device[saved[0].use])
        freed = total = 0.0
        for each in saved:
            step = int(graph.step[each.row])
            ends = np.array([(g.device if on_device else g.ready)[step] for g in gradients])
            place = min(int(np.searchsorted(np.maximum.accumulate(ends), each.use)), len(gradients) - 1)
            total += each.nbytes
            freed += each.nbytes * (1 - shares[int(group[place])])
        what = (
            f"{freed / graph.n_steps / 1e6:.4g} of {total / graph.n_steps / 1e6:.4g} MB of saved activations are not "
            "kept on the mean worker; the deepest keeps all"
        )
        return [Change(what=what, tasks=len(saved))]

    def _gradients(self, graph: TaskGraph) -> tuple[Gradient, ...]:
        if graph.info.recording.get("distributed") or bool((graph.kind == TaskKind.COLLECTIVE).any()):
            raise self.refuse(
                "it exchanges gradients itself, by layer; leave data-parallel out and record one worker alone."
            )
        found = find_gradients(graph)
        if not found:
            raise self.refuse(
                "the recording does not show when gradients become ready; record with `foretrace record`, with shapes "
                "and operators."
            )
        if self.parts > len(found):
            raise self.refuse(f"there are {len(found)} gradients and {self.parts} groups; give fewer.")
        return found

    def _check(self) -> None:
        if self.groups and self.groups < self.workers:
            raise self.refuse("groups must be as many as workers or more.")
        if self.workers > 1 and not self.network:
            raise self.refuse("say which link joins the workers, e.g. network=1gbit/50us.")

    def _network(self) -> Network:
        return network(self.network, self.workers, in_flight=1)

    def realise(self, training: Training) -> Training:
        if self.groups and self.groups < self.workers:
            self._check()
        from torch import distributed

        from foretrace.training.data_parallel import need_group, plain, same_start, sharing

        plain(training, self.name)
        rank = 0
        if self.workers > 1:
            need_group(self.name, self.workers)
            rank = distributed.get_rank()
        if training.run is not None:
            raise self.refuse("the model is data-parallel already; leave data-parallel out.")
        chain = find_chain(training, self.name)
        if len(chain.blocks) < self.parts:
            raise self.refuse(
                f"the model is no chain of blocks that could be cut into {self.parts} groups "
                f"({len(chain.blocks)} found)."
            )
        if self.workers > 1:
            told = [chain]
            distributed.broadcast_object_list(told, src=0)  # all cut where the first worker's times say
            chain = told[0]
            training = sharing(training, self.name)
            same_start(training.model)
        return replace(training, run=PartialStep(training.model, chain, self.parts, self.workers, rank))


def backward_costs(graph: TaskGraph, gradients: Sequence[Gradient]) -> Float64:
    """Return backward time from one gradient to the next, ns per step, on the lane that computes."""
    cost = np.zeros(len(gradients))
    for step in range(graph.n_steps):
        rows, places = _between(graph, gradients, step, device=bool(gradients[0].device[step] >= 0))
        np.add.at(cost, places, graph.dur[rows])
    return cost / max(graph.n_steps, 1)


def _between(graph: TaskGraph, gradients: Sequence[Gradient], step: int, *, device: bool) -> tuple[Int64, Int64]:
    """Return backward rows of a step on the lane of the gradients, and which gradient each works towards."""
    ends = np.array([(each.device if device else each.ready)[step] for each in gradients])
    lane = graph.lane[ends[0]]
    rows = np.flatnonzero((graph.lane == lane) & (graph.step == step) & (graph.phase == Phase.BACKWARD) & ~graph.gone)
    places = np.searchsorted(np.maximum.accumulate(ends), rows)
    inside = places < len(gradients)
    return rows[inside], places[inside]


def _scaled(graph: TaskGraph, gradients: Sequence[Gradient], group: Int64, shares: Sequence[float]) -> TaskGraph:
    """Return backward work of every group times the share of the workers that do it."""
    factors = np.ones(len(graph))
    share = np.array(shares)
    for step in range(graph.n_steps):
        for device in (False, True) if gradients[0].device[step] >= 0 else (False,):
            rows, places = _between(graph, gradients, step, device=device)
            factors[rows] = share[group[places]]
    mask = factors != 1.0
    return scale(graph, mask, factors[mask]) if mask.any() else graph
