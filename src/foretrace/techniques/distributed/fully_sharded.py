"""`fully-sharded`: every worker keeps a share of parameters, gradients and optimizer state (FSDP, ZeRO).

A unit (one repeated block; what is left is a unit of its own) is gathered before its forward pass, again before its
backward pass, and its gradients are reduced and scattered after it. NCCL gathers one unit ahead, beside computing;
gloo's collectives of this kind return when they are done, so nothing overlaps there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.cost.network.network import CollectiveKind
from foretrace.graph.edit import retime
from foretrace.graph.taskgraph import Change, EdgeKind, Phase, TaskGraph, TaskKind
from foretrace.techniques.base import Prior, Technique, derived, parameter
from foretrace.techniques.compute.batching import with_facts
from foretrace.techniques.compute.updates import find_update, runs, step_tasks
from foretrace.techniques.distributed import one_worker
from foretrace.techniques.distributed.exchange import Message, Stop, exchange
from foretrace.techniques.distributed.gradients import Gradient, ahead_of, find_gradients
from foretrace.techniques.distributed.messages import ExchangePlan
from foretrace.techniques.memory.blocks import AUTO, choose, layer_prefixes, modules_of, recorded_modules
from foretrace.training.training import Training

_OPERATORS = {"Adam": 8, "AdamW": 8, "Adagrad": 4, "SGD": 3}  # of an update, per parameter


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardedUnit:
    """Parameters that are gathered together, and where; rows per step."""

    name: str
    nbytes: int  # of its gradients, as large as its parameters
    forward: Int64  # host row ahead of its forward pass
    backward: Int64  # host row ahead of its backward pass
    ready: Int64  # host row at whose end its gradients are ready
    device: Int64  # device row likewise, −1 on a processor
    root: bool = False  # what no block holds; it stays gathered until the end of the backward pass


@dataclass(frozen=True, kw_only=True)
class FullySharded(Technique):
    """Share parameters, gradients and optimizer state out among workers."""

    summary = "parameters, gradients and optimizer state shared out among workers, gathered unit by unit"
    source = "Rajbhandari et al., ZeRO (SC 2020), section 5; Zhao et al., PyTorch FSDP (VLDB 2023)"
    effort = "more devices, a process group and wrapped modules"
    needs = "as many processes as workers"

    workers: int = parameter(doc="processes, each with a share of the model and a batch of its own", least=2)
    network: str = parameter(doc="link between workers (1gbit/50us), or a file of a cluster or of measured collectives")
    blocks: str = parameter(
        AUTO, doc="modules that are units: a pattern over paths or classes; auto is the repeated one"
    )
    reshard: bool = parameter(True, doc="drop gathered parameters after the forward pass (ZeRO-3); else keep (ZeRO-2)")
    backend: str = parameter("", doc="what exchanges messages", choices=("", "gloo", "nccl"))
    copy_gb_s: float | None = derived(unit="GB/s", doc="bandwidth of copying parameters and gradients through buffers")
    unit_us: float | None = derived(unit="µs", doc="host time of hooks per unit and pass")
    operator_us: float | None = derived(unit="µs", doc="time of an operator of the update that does not depend on size")
    sharded_us: float | None = derived(unit="µs", doc="host time of an operator of the update on a sharded tensor")
    waiting_ms: float | None = derived(unit="ms", doc="how much later the last worker is than this one")
    company: float | None = derived(doc="slow-down of computing while messages are exchanged")
    transfer: float | None = derived(doc="time of transfers relative to what the network's model says")

    def change(self, graph: TaskGraph) -> TaskGraph:
        units = self._units(graph)
        values, plan = self.values(graph), self._plan(graph)
        note = self._memory(graph, units)
        graph = self._update(graph, values)
        messages, stops = self._messages(graph, units, plan, values)
        busy_s = sum(each.dur_ns for each in messages) / 1e9
        if plan.backend == "nccl":
            first, last = units[-1].backward, np.max([each.ready for each in units], axis=0)
            graph = one_worker.slowed_beside(graph, first, last, values["company"], busy_s)
        result = exchange(graph, messages, stops, in_flight=1, as_issued=True)
        facts = {
            "workers": self.workers,
            "network": self.network,
            "backend": plan.backend,
            "units": [each.nbytes for each in units],
        }
        return with_facts(result.noted(note), distributed=facts)

    def _messages(
        self, graph: TaskGraph, units: Sequence[ShardedUnit], plan: ExchangePlan, values: dict[str, float]
    ) -> tuple[list[Message], list[Stop]]:
        """Return gathers and scatters of a step, in the order in which they are issued."""
        net, ahead = plan.net(), plan.backend == "nccl"
        on_device = bool(graph.on_device.any())
        wait_ns, host_ns = round(values["waiting_ms"] * 1e6), round(values["unit_us"] * 1e3)
        last = np.max([each.ready for each in units], axis=0)
        messages, stops = list[Message](), dict[tuple[int, ...], tuple[Int64, int, Int64 | None]]()

        def stop(rows: Int64, then_ns: int) -> None:
            key = tuple(rows.tolist())
            behind = _device_behind(graph, rows) if on_device else None
            stops[key] = (rows, stops[key][1] + then_ns if key in stops else then_ns, behind)

        def message(kind: CollectiveKind, what: str, unit: ShardedUnit, after: Int64, waits: Int64) -> None:
            leg = plan.collective(kind, unit.nbytes, net, f"{kind} {unit.name}{what}")
            scattered = kind == CollectiveKind.REDUCE_SCATTER
            behind = (unit.device if scattered else _device_behind(graph, after)) if on_device else None
            copied = round(2 * unit.nbytes / values["copy_gb_s"])
            stop(waits, 0 if scattered else copied)
            messages.append(
                Message(
                    name=leg.name,
                    nbytes=leg.nbytes,
                    dur_ns=round(leg.seconds * 1e9) + (copied if scattered else 0),
                    wire_ns=round(leg.seconds * 1e9),
                    after=after,
                    waits=waits,
                    device=behind,
                    lag_ns=wait_ns if scattered else 0,
                    host_ns=host_ns,
                )
            )

        for i, unit in enumerate(units):
            issued = np.minimum(units[max(i - 1, 0)].forward, unit.forward) if ahead else unit.forward
            message(CollectiveKind.ALL_GATHER, "", unit, issued, unit.forward)
        order = list(reversed(units))
        for i, unit in enumerate(order):
            if self.reshard and not unit.root:
                issued = np.minimum(order[max(i - 1, 0)].backward, unit.backward) if ahead else unit.backward
                message(CollectiveKind.ALL_GATHER, " again", unit, issued, unit.backward)
            if i and ahead:  # the gather of the next unit is issued before the scatter of the former one
                former = order[i - 1]
                message(CollectiveKind.REDUCE_SCATTER, "", former, former.ready, last)
            if not ahead:
                message(CollectiveKind.REDUCE_SCATTER, "", unit, unit.ready, unit.ready)
        if ahead:
            message(CollectiveKind.REDUCE_SCATTER, "", order[-1], order[-1].ready, last)
        made = [Stop(waits=rows, then_ns=ns, device=behind) for rows, ns, behind in stops.values()]
        return messages, made

    def _update(self, graph: TaskGraph, values: dict[str, float]) -> TaskGraph:
        """Return the optimizer on a share of the parameters: as many operators on shorter arrays."""
        own = step_tasks(graph) & ~graph.gone & np.isin(graph.kind, (TaskKind.OPERATOR, TaskKind.KERNEL))
        if not own.any():
            return graph
        dur = graph.dur[own].astype(np.float64)
        fixed = np.minimum(dur, 1e3 * values["operator_us"])
        shorter: Float64 = fixed + (dur - fixed) / self.workers
        result = retime(graph, own, shorter, what=f"a share of 1/{self.workers} in {{}}")
        update = find_update(graph)
        if update is None or "sharded_us" not in values:
            return result
        more = 1e3 * values["sharded_us"] * update.tensors * _OPERATORS.get(update.optimizer, 8)
        first = graph.mask([run.host[0] for run in runs(graph, step_tasks(graph))])
        return retime(result, first, (result.dur[first] + more).astype(np.float64), what="dispatch on shards in {}")

    def _memory(self, graph: TaskGraph, units: Sequence[ShardedUnit]) -> Change:
        """Return what a worker still holds of parameters, gradients and optimizer state."""
        update = find_update(graph)
        states = {"Adam": 2, "AdamW": 2, "SGD": 0, "Adagrad": 1}.get(update.optimizer if update else "", 0)
        if update and update.optimizer == "SGD" and update.settings.get("momentum"):
            states = 1
        whole = (2 + states) * sum(each.nbytes for each in units)
        largest = 2 * max(each.nbytes for each in units)
        kept = 0 if self.reshard else sum(each.nbytes for each in units)
        what = (
            f"{whole / 1e6:.4g} MB of parameters, gradients and optimizer state shrink to "
            f"{(whole / self.workers + kept) / 1e6:.4g} MB, and {largest / 1e6:.4g} MB for the unit at work"
        )
        return Change(what=what, tasks=len(units))

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found = {
            "copy_gb_s": one_worker.copying(graph, self._plan(graph).net()),
            "unit_us": Prior(400.0, 150.0, 1200.0, unit="µs", why="Python of FSDP's hooks around a unit"),
            "operator_us": Prior(3.0, 1.0, 8.0, unit="µs", why="calls on small arrays"),
            "waiting_ms": one_worker.waiting(graph, self.workers),
            "transfer": one_worker.transfer(self._plan(graph).net()),
        }
        update = find_update(graph)
        if update is not None and update.tensors and not update.fused:
            why = "dispatch of a DTensor operator on its shard, measured with PyTorch 2.13 on a server core"
            found["sharded_us"] = Prior(20.0, 8.0, 40.0, unit="µs", why=why)
        if self._plan(graph).backend == "nccl":
            found["company"] = one_worker.company(graph)
        return found

    def _plan(self, graph: TaskGraph) -> ExchangePlan:
        transfer, backend = 1.0 if self.transfer is None else self.transfer, one_worker.back_end(graph, self.backend)
        return ExchangePlan(workers=self.workers, network=self.network, backend=backend, parts=(), transfer=transfer)

    def _units(self, graph: TaskGraph) -> list[ShardedUnit]:
        """Return units in the order of their forward passes."""
        one_worker.required(self, graph)
        gradients = find_gradients(graph)
        facts = graph.info.recording
        modules = recorded_modules(facts.get("modules", []))
        if not gradients or not modules or any(not each.name for each in gradients):
            raise self.refuse(
                "the recording does not show which module each gradient belongs to; record with `foretrace record`, "
                "with shapes, modules and operators."
            )
        chosen = choose(modules, self.blocks)
        if not chosen:
            raise self.refuse(f"the model has no modules that fit blocks={self.blocks}; name them by path or class.")
        start = ahead_of(graph, Phase.FORWARD)
        if start is None:
            raise self.refuse("the recording shows no forward pass.")
        inside: dict[str, list[Gradient]] = {each.path: [] for each in chosen}
        left: list[Gradient] = []
        for each in gradients:
            path = next((path for path in inside if each.name.startswith(f"{path}.")), None)
            (left if path is None else inside[path]).append(each)
        units = []
        for module, layers in zip(chosen, layer_prefixes(chosen, facts, graph.layers), strict=True):
            if inside[module.path]:
                forward = ahead_of(graph, Phase.FORWARD, layers)
                backward = ahead_of(graph, Phase.BACKWARD, layers)
                if backward is None:  # behind the gradient that is ready before its own
                    place = min(gradients.index(each) for each in inside[module.path])
                    backward = gradients[place - 1].ready if place else ahead_of(graph, Phase.BACKWARD)
                if forward is None or backward is None:
                    raise self.refuse("the recording shows no forward and backward of these modules; record modules.")
                units.append(_unit(module.path, inside[module.path], forward, backward))
        units.sort(key=lambda each: int(each.forward[0]))
        if left:
            whole = ahead_of(graph, Phase.BACKWARD)
            if whole is None:
                raise self.refuse("the recording shows no backward pass.")
            rest = _unit("the rest", left, start, whole)
            # Its hook runs when all of the backward pass is over.
            ready, device = (
                np.max([getattr(each, of) for each in (rest, *units)], axis=0) for of in ("ready", "device")
            )
            units.insert(0, replace(rest, root=True, ready=ready, device=device))
        if not units:
            raise self.refuse("the modules that fit hold no parameter with a gradient.")
        return units

    def realise(self, training: Training) -> Training:
        from foretrace.training.data_parallel import need_group, sharded, sharing

        need_group(self.name, self.workers)
        chosen = choose(modules_of(training.model), self.blocks)
        if not chosen:
            raise self.refuse(f"the model has no modules that fit blocks={self.blocks}; name them by path or class.")
        return sharded(sharing(training, self.name), [each.path for each in chosen], self.name, reshard=self.reshard)


def _unit(name: str, gradients: Sequence[Gradient], forward: Int64, backward: Int64) -> ShardedUnit:
    return ShardedUnit(
        name=name,
        nbytes=sum(each.nbytes for each in gradients),
        forward=forward,
        backward=backward,
        ready=np.max([each.ready for each in gradients], axis=0),
        device=np.max([each.device for each in gradients], axis=0),
    )


def _device_behind(graph: TaskGraph, rows: Int64) -> Int64:
    """Return per step the last device task launched at or before a host row; −1 where there is none."""
    launch = np.flatnonzero((graph.edge_kind == EdgeKind.LAUNCH) & ~graph.gone[graph.dst])
    order = launch[np.argsort(graph.src[launch], kind="stable")]
    place = np.searchsorted(graph.src[order], rows, side="right") - 1
    if not len(order):
        return np.full(len(rows), -1, dtype=np.int64)
    return np.where(place >= 0, graph.dst[order[np.maximum(place, 0)]], -1).astype(np.int64)
