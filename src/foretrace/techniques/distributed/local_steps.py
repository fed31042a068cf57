"""`local-steps`: workers train by themselves and average their parameters every K steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

import numpy as np

from foretrace.arrays import Int64
from foretrace.cost.network.network import CollectiveKind, Network
from foretrace.graph.taskgraph import Change, Phase, TaskGraph, TaskKind
from foretrace.techniques.base import Prior, Technique, derived, parameter
from foretrace.techniques.compute.batching import with_facts
from foretrace.techniques.compute.updates import find_update, step_tasks
from foretrace.techniques.distributed import one_worker
from foretrace.techniques.distributed.exchange import Message, Stop, exchange
from foretrace.techniques.distributed.gradients import find_gradients
from foretrace.training.training import Training

PASSES = 6  # over the parameters: into one array, divided, back; each read and written


@dataclass(frozen=True, kw_only=True)
class LocalSteps(Technique):
    """Average parameters every few steps in place of gradients in every step."""

    summary = "several workers by themselves, parameters averaged every K steps"
    source = "Lin et al., post-local SGD (ICLR 2020); PyTorch, PostLocalSGDOptimizer"
    effort = "a few lines; convergence to check"
    needs = "as many processes as workers"

    workers: int = parameter(doc="processes, each with a copy of the model and a batch of its own")
    network: str = parameter(doc="link between workers (1gbit/50us), or a file of a cluster or of measured collectives")
    every: int = parameter(4, doc="steps between two averages")
    backend: str = parameter("", doc="what exchanges messages", choices=("", "gloo", "nccl"))
    parameter_mb: float = parameter(0.0, doc="size of all parameters, where the recording does not show it", unit="MB")
    copy_gb_s: float | None = derived(unit="GB/s", doc="bandwidth of copying parameters into one array and back")
    step_us: float | None = derived(unit="µs", doc="host time of one average beside its copies")
    waiting_ms: float | None = derived(unit="ms", doc="how much later the last worker is than this one, after one step")
    transfer: float | None = derived(doc="time of transfers relative to what the network's model says")

    def change(self, graph: TaskGraph) -> TaskGraph:
        self._check()
        one_worker.required(self, graph)
        nbytes, values = self._nbytes(graph), self.values(graph)
        rows, device = self._ends(graph)
        cost = self._net(graph).cost(CollectiveKind.ALL_REDUCE, nbytes).seconds * values["transfer"]
        copied_s = PASSES * nbytes / (values["copy_gb_s"] * 1e9)
        # Delays of single steps add up as a random walk until the workers meet.
        late_ns = values["waiting_ms"] * 1e6 * sqrt(self.every)
        message = Message(
            name=f"all-reduce of parameters, 1/{self.every} of it",
            nbytes=round(nbytes / self.every),
            dur_ns=round(cost * 1e9 / self.every),
            wire_ns=round(cost * 1e9 / self.every),
            after=rows,
            device=device,
            waits=rows,
            lag_ns=round(late_ns / self.every),
            host_ns=round(values["step_us"] * 1e3 / self.every),
        )
        stop = Stop(waits=rows, then_ns=round(copied_s * 1e9 / self.every), device=device)
        result = exchange(graph, [message], [stop], in_flight=1)
        what = (
            f"every step carries 1/{self.every} of an average; in the run, one step in {self.every} carries all of it "
            f"({1e3 * (cost + copied_s):.3g} ms)"
        )
        facts = {
            "workers": self.workers,
            "network": self.network,
            "backend": one_worker.back_end(graph, self.backend),
            "every": self.every,
        }
        return with_facts(result.noted(Change(what=what, tasks=len(rows))), distributed=facts)

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        return {
            "copy_gb_s": one_worker.copying(graph),
            "step_us": Prior(300.0, 100.0, 1000.0, unit="µs", why="Python over all parameters, one call"),
            "waiting_ms": one_worker.waiting(graph, self.workers),
            "transfer": one_worker.transfer(self._net(graph)),
        }

    def _net(self, graph: TaskGraph) -> Network:
        return one_worker.network_between(graph, self.network, self.workers, self.backend)

    def _check(self) -> None:
        if self.workers < 2:
            raise self.refuse("workers must be 2 or more.")
        if self.every < 1:
            raise self.refuse(f"every={self.every} is no number of steps; give 1 or more.")
        if not 0 <= self.parameter_mb < 1e9:
            raise self.refuse(f"parameter_mb={self.parameter_mb} is no size; give MB above 0.")

    def _nbytes(self, graph: TaskGraph) -> int:
        """Bytes of all parameters that are trained."""
        if self.parameter_mb:
            return round(self.parameter_mb * 1e6)
        update = find_update(graph)
        found = sum(each.nbytes for each in find_gradients(graph)) or (update.nbytes if update else 0)
        if not found:
            raise self.refuse("the recording does not tell how large the parameters are; give parameter_mb=.")
        return found

    def _ends(self, graph: TaskGraph) -> tuple[Int64, Int64 | None]:
        """Per step the last host task of the update, and the last device task there."""
        live = ~graph.gone & ~np.isin(graph.kind, (TaskKind.MARK, TaskKind.JOIN))
        update = step_tasks(graph) & live
        update = update if update.any() else (graph.phase == Phase.OPTIMIZER) & live
        rows, device = np.full((2, graph.n_steps), -1, dtype=np.int64)
        for found, where in ((rows, ~graph.on_device), (device, graph.on_device)):
            mine = np.flatnonzero(update & where & (graph.step >= 0) & (graph.step < graph.n_steps))
            found[graph.step[mine]] = mine  # of several the last
        if np.any(rows < 0):
            raise self.refuse("the recording shows no optimizer step (no Optimizer.step ranges).")
        return rows, device if np.all(device >= 0) else None

    def realise(self, training: Training) -> Training:
        from foretrace.training.data_parallel import averaged_every, need_group, sharing

        self._check()
        need_group(self.name, self.workers)
        shared = sharing(training, self.name)
        optimizers = tuple(averaged_every(each, self.every) for each in shared.optimizers)
        return replace(shared, optimizers=optimizers)
