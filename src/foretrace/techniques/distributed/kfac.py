"""`kfac`: gradients preconditioned by Kronecker factors before the update, shared out over workers as KAISA does.

In the run, factors are taken every so many steps and decomposed more rarely; in the graph every step carries its share
of that. Behind `data-parallel`, factors are averaged over all workers, and inverses or gradients sent as the
gradient-worker fraction says; alone, one worker does it all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import lcm
from typing import TYPE_CHECKING

import numpy as np

from foretrace.cost.network.network import CollectiveKind
from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.errors import ForetraceError, NotApplicableError
from foretrace.graph.insert import HostTask, insert_at
from foretrace.graph.select import previous_on_lane
from foretrace.graph.taskgraph import Change, Phase, TaskGraph
from foretrace.graph.work import is_product
from foretrace.techniques.base import Prior, Technique, derived, parameter
from foretrace.techniques.compute.batching import micro_batches, with_facts
from foretrace.techniques.compute.updates import ends_by_step, step_tasks
from foretrace.techniques.distributed import one_worker
from foretrace.techniques.distributed.exchange import Message, Stop, exchange
from foretrace.techniques.distributed.messages import ExchangePlan, plan_of
from foretrace.techniques.distributed.recorded_layers import RecordedLayer, factored_layers, operator_of
from foretrace.training.second_order.grid import SecondOrderShares, share_out
from foretrace.training.second_order.timed import FACTORS, GRADIENTS, INVERSES, PACKING, PARTS
from foretrace.training.training import Training

if TYPE_CHECKING:
    from foretrace.training.second_order.preconditioner import SecondOrderSettings

_FACT = "second_order"


@dataclass(frozen=True, kw_only=True)
class Kfac(Technique):
    """Precondition gradients of linear layers and convolutions by K-FAC."""

    summary = "gradients preconditioned by Kronecker factors, shared out over workers"
    source = "Pauloski et al., KAISA (SC 2021); Martens and Grosse, K-FAC (ICML 2015)"
    effort = "a few lines; damping, clip and rate to tune"

    fraction: float = parameter(1.0, doc="gradient-worker fraction: share of the workers that precondition a layer")
    factors_every: int = parameter(
        1, doc="steps between two updates of the factors", least=1, hint="it is a number of steps"
    )
    inverses_every: int = parameter(10, doc="steps between two decompositions", least=1, hint="it is a number of steps")
    damping: float = parameter(
        0.003, doc="added to the eigenvalues of a layer's curvature", above=0, hint="0.003 is usual"
    )
    clip: float = parameter(
        0.001, doc="bound of the update's length in the metric of the curvature; 0 is none", least=0, hint="0 is none"
    )
    decay: float = parameter(0.95, doc="of the running factors", least=0, below=1, hint="0.95 is usual")
    scaling: str = parameter("sample", doc="of factors: gradients of one sample, or of the mean loss as kfac-pytorch",
                             choices=("sample", "mean"))  # fmt: skip
    skip: str = parameter("", doc="layers that are left to the optimizer: globs of their names, with commas")
    gflops: float | None = derived(unit="GFLOP/s", doc="rate of matrix products of K-FAC", larger_is="faster")
    work: float | None = derived(doc="time of K-FAC's work relative to what is known of it")
    layer_us: float | None = derived(unit="µs", doc="host time per layer and step beside its work")

    @property
    def period(self) -> int:
        """As `Technique.period`."""
        return lcm(self.factors_every, self.inverses_every)

    def change(self, graph: TaskGraph) -> TaskGraph:
        layers = self.layers(graph)
        plan = self._plan(graph)
        parts = self._parts(graph, layers, plan)
        first = ends_by_step(graph, step_tasks(graph) & ~graph.gone & ~graph.on_device)[0]
        anchor = np.where(first >= 0, previous_on_lane(graph)[first], -1)
        if np.any(anchor < 0):
            raise self.refuse(
                "the recording shows no optimizer step (no Optimizer.step ranges), or nothing ahead of one."
            )
        tasks = [
            HostTask(after=row, name=name, dur_ns=round(1e9 * seconds), phase=Phase.OPTIMIZER)
            for name, seconds, _, _ in parts
            for row in anchor.tolist()
        ]
        changed, new = insert_at(graph, tasks)
        rows = new[len(graph) :].reshape(len(parts), -1)
        messages = [
            Message(
                name=f"{name} between workers", nbytes=round(nbytes), dur_ns=round(1e9 * sent_s),
                wire_ns=round(1e9 * sent_s), after=at, waits=at, link="exchange of second order",
            )
            for (name, _, sent_s, nbytes), at in zip(parts, rows, strict=True)
            if sent_s
        ]  # fmt: skip
        if messages and plan:
            stops = [Stop(waits=each.after) for each in messages]
            changed = exchange(changed, messages, stops, in_flight=1)
            changed = with_facts(changed, distributed={**plan.facts, "kfac": self.fraction})
        left = [each.layer.name for each in layers if each.forward is None]
        what = (
            f"{len(layers)} layers, factors of 1/{self.factors_every} and inverses of 1/{self.inverses_every} of the "
            "steps spread over all"
        )
        if left:
            what += f"; {len(left)} of them without a recorded forward pass ({', '.join(left[:3])})"
        return with_facts(changed.noted(Change(what=what, tasks=len(tasks))), **{_FACT: str(self)})

    def layers(self, graph: TaskGraph) -> tuple[RecordedLayer, ...]:
        """Return the layers that are preconditioned. Refuses a graph that has none, or too little to tell."""
        if graph.info.platform != "cpu":
            raise self.refuse("what its work takes on a device was never measured; record a step on a processor.")
        if graph.info.recording.get(_FACT):
            raise self.refuse("gradients are preconditioned already.")
        if micro_batches(graph) > 1:
            raise self.refuse("micro-batches would each give factors of their own; leave out gradient-accumulation.")
        try:
            return factored_layers(graph, self.skip)
        except NotApplicableError as error:
            raise self.refuse(str(error)) from None

    def shares(self, graph: TaskGraph) -> SecondOrderShares:
        """Return the layers shared out over the workers of a graph, one where it is not data-parallel."""
        plan = self._plan(graph)
        try:
            return share_out(
                [each.layer for each in self.layers(graph)], workers=plan.workers if plan else 1, fraction=self.fraction
            )
        except ForetraceError as error:
            raise self.refuse(str(error)) from None

    def _parts(
        self, graph: TaskGraph, layers: Sequence[RecordedLayer], plan: ExchangePlan | None
    ) -> tuple[tuple[str, float, float, float], ...]:
        """Return parts of it by name: seconds of work, of messages and their bytes in a step, of the worker
        with most.
        """
        values, shares = self.values(graph), self.shares(graph)
        rate, calibration = 1e9 * values.get("gflops", 1.0), Calibration.of(graph)

        def shared(part: str) -> list[float]:
            """Return seconds by layer: what was timed for all together, or is known of the rate, by their
            operations.
            """
            counts = [each.operations(part) for each in layers]
            timed_s = calibration.time_s(operator_of(layers, part))
            whole_s = values["work"] * (sum(counts) / rate if timed_s is None else timed_s)
            return [whole_s * each / sum(counts) for each in counts]

        inverse_s, gradient_s = shared(INVERSES), shared(GRADIENTS)
        ranks = range(shares.workers)
        factors_s = sum(shared(FACTORS)) + (sum(shared(PACKING)) if plan else 0.0)
        inverses_s = max(sum(inverse_s[i] for i in shares.decomposes(rank)) for rank in ranks)
        gradients_s = max(sum(gradient_s[i] for i in shares.preconditions(rank)) for rank in ranks)
        gradients_s += 1e-6 * values["layer_us"] * len(layers)
        sent_s, traffic = self._sent_s(graph, shares, plan) if plan else (0.0, 0.0, 0.0), shares.traffic(0)
        times_s = (factors_s, inverses_s, gradients_s)
        sent_bytes = (traffic.factors, max(shares.traffic(rank).inverses for rank in ranks), traffic.gradients)
        often = {"factors": self.factors_every, "inverses": self.inverses_every, "gradients": 1}
        return tuple(
            (f"K-FAC {name}", work_s / every, message_s / every, nbytes / every)
            for (name, every), work_s, message_s, nbytes in zip(often.items(), times_s, sent_s, sent_bytes, strict=True)
        )

    def _sent_s(self, graph: TaskGraph, shares: SecondOrderShares, plan: ExchangePlan) -> tuple[float, float, float]:
        """Return seconds of messages each time they are due: factors, inverses, gradients; copies around them with
        them.
        """
        net, copy_s = plan.net(), 2 / (1e9 * one_worker.copying(graph).value)
        reduce, send = (
            partial(net.cost, kind) for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.BROADCAST)
        )  # fmt: skip

        def broadcasts(ranks: Sequence[int], nbytes: Sequence[int]) -> float:
            return sum(
                send(each, workers=len(ranks)).seconds * plan.transfer + copy_s * each for each in nbytes if each
            )  # fmt: skip

        columns = [shares.column(rank) for rank in range(shares.columns)]
        layers = shares.layers
        inverses = [
            broadcasts(ranks, [sum(layers[i].inverse_bytes for i in shares.decomposes(rank)) for rank in ranks])
            for ranks in columns
        ]
        gradients = [sum(layers[i].gradient_bytes for i in shares.preconditions(rank)) for rank in shares.row(0)]
        return (
            sum(reduce(each).seconds * plan.transfer for each in shares.bucket_bytes()),
            max(inverses) if shares.sends_inverses else 0.0,
            broadcasts(shares.row(0), gradients) if shares.sends_gradients else 0.0,
        )

    def _plan(self, graph: TaskGraph) -> ExchangePlan | None:
        return plan_of(graph, self) if graph.info.recording.get("distributed") else None

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        layers = self.layers(graph)
        found = {
            "layer_us": Prior(
                25.0, 10.0, 80.0, unit="µs", why="two hooks and two dozen calls, measured with PyTorch 2.13 on a core"
            )
        }
        if not Calibration.of(graph).lacking(self._operators(layers)):
            found["work"] = Prior(1.15, 0.95, 2.0, why="it was timed alone; in a step it took up to twice as long")
            return found
        found["work"] = Prior(1.0, 0.6, 2.5, why="it was not timed but counted in operations; foretrace calibrate run")
        found["gflops"] = _rate(graph)
        return found

    def wants(self, graph: TaskGraph) -> tuple[Operator, ...]:
        return self._operators(self.layers(graph))

    def _operators(self, layers: Sequence[RecordedLayer]) -> tuple[Operator, ...]:
        return tuple(operator_of(layers, part) for part in PARTS)

    def settings(self) -> SecondOrderSettings:
        """Return what the preconditioner takes."""
        from foretrace.training.second_order.preconditioner import SecondOrderSettings

        names = SecondOrderSettings.__dataclass_fields__
        return SecondOrderSettings(**{name: getattr(self, name) for name in names})

    def realise(self, training: Training) -> Training:
        from torch import distributed
        from torch.nn.parallel import DistributedDataParallel

        from foretrace.training.data_parallel import plain
        from foretrace.training.second_order.preconditioner import Preconditioned, Preconditioner

        plain(training, self.name)
        if len(training.optimizers) != 1:
            raise self.refuse(f"it preconditions one optimizer, and the training has {len(training.optimizers)}.")
        if training.micro_batches > 1 or training.scaler is not None:
            raise self.refuse(
                "it takes whole batches with gradients in their true scale, not micro-batches or float16."
            )
        model, workers, rank = training.model, 1, 0
        if isinstance(model, DistributedDataParallel):
            model, workers, rank = model.module, distributed.get_world_size(), distributed.get_rank()
        try:
            made = Preconditioner(model, self.settings(), workers=workers, rank=rank)
        except ForetraceError as error:
            raise self.refuse(str(error)) from None
        return replace(training, optimizers=(Preconditioned(training.optimizers[0], made),))  # type: ignore[arg-type]


def _rate(graph: TaskGraph) -> Prior:
    """Return the rate of the recorded matrix products; those of K-FAC are alike."""
    named = np.array([is_product(name) for name in graph.names], dtype=np.bool_)[graph.name]
    mine = named & ~graph.gone & (graph.flops > 0) & (graph.dur > 0)
    if not mine.any():
        return Prior(40.0, 5.0, 150.0, unit="GFLOP/s", why="a core of a server")
    value = float(graph.flops[mine].sum() / graph.dur[mine].sum())
    why = f"{int(mine.sum())} recorded products reach it together; small matrices reach less"
    return Prior(value, 0.4 * value, 2.0 * value, unit="GFLOP/s", why=why)
