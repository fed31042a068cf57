"""`local-steps`: workers train by themselves and every K steps average their parameters, or only some updates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

import numpy as np

from foretrace.arrays import Int64
from foretrace.cost.network.network import CollectiveKind, Network
from foretrace.graph.taskgraph import Change, Phase, TaskGraph, TaskKind
from foretrace.techniques.base import Prior, Technique, derived, parameter
from foretrace.techniques.compute.batching import with_facts
from foretrace.techniques.compute.updates import ends_by_step, find_update, step_tasks
from foretrace.techniques.distributed import one_worker
from foretrace.techniques.distributed.compressors import rates
from foretrace.techniques.distributed.exchange import Message, Stop, exchange
from foretrace.techniques.distributed.gradients import find_gradients
from foretrace.training.compression.settings import CompressionSettings
from foretrace.training.training import Training

PASSES = 6  # over the parameters: into one array, divided, back; each read and written
SPARSE_PASSES = 20  # also what changed, added to what waits, and taken up after the exchange
_INDEX = 2  # a value and its index take twice the bytes of a value
_SHARES = {
    "gaia": Prior(
        0.1, 0.0001, 1.0, why="how many updates are large beside their weight depends on model, rate and progress"
    ),
    "dgc": Prior(0.01, 0.01, 0.01, why="the policy's default"),
}


@dataclass(frozen=True, kw_only=True)
class LocalSteps(Technique):
    """Average parameters every few steps in place of gradients in every step."""

    summary = "several workers by themselves, parameters or the largest updates averaged every K steps"
    source = (
        "Lin et al., post-local SGD (ICLR 2020); PyTorch, PostLocalSGDOptimizer; Hsieh et al., Gaia (NSDI 2017); "
        "Lin et al., Deep Gradient Compression (ICLR 2018)"
    )
    effort = "a few lines; convergence to check"
    needs = "as many processes as workers"

    workers: int = parameter(doc="processes, each with a copy of the model and a batch of its own")
    network: str = parameter(doc="link between workers (1gbit/50us), or a file of a cluster or of measured collectives")
    every: int = parameter(4, doc="steps between two averages")
    updates: str = parameter(
        "all", doc="what is sent: all, those large beside their weight, or the largest share", choices=("all", *_SHARES)
    )
    threshold: float = parameter(0.1, doc="gaia: least update relative to its weight that is sent")
    backend: str = parameter("", doc="what exchanges messages", choices=("", "gloo", "nccl"))
    parameter_mb: float = parameter(0.0, doc="size of all parameters, where the recording does not show it", unit="MB")
    copy_gb_s: float | None = derived(unit="GB/s", doc="bandwidth of copying parameters into one array and back")
    share: float | None = derived(doc="gaia, dgc: share of the elements that a worker sends")
    select_gb_s: float | None = derived(unit="GB/s", doc="gaia, dgc: speed of choosing, by bytes of parameters")
    step_us: float | None = derived(unit="µs", doc="host time of one average beside its copies")
    waiting_ms: float | None = derived(unit="ms", doc="how much later the last worker is than this one, after one step")
    transfer: float | None = derived(doc="time of transfers relative to what the network's model says")

    @property
    def period(self) -> int:
        """As `Technique.period`."""
        return self.every

    def change(self, graph: TaskGraph) -> TaskGraph:
        self._check()
        one_worker.required(self, graph)
        nbytes, values = self._nbytes(graph), self.values(graph)
        rows, device = self._ends(graph)
        kind, sent, copied_s = self._exchanged(nbytes, values)
        cost = self._net(graph).cost(kind, sent).seconds * values["transfer"]
        own = sent / self.workers if kind == CollectiveKind.ALL_GATHER else sent
        # Delays of single steps add up as a random walk until the workers meet.
        late_ns = values["waiting_ms"] * 1e6 * sqrt(self.every)
        message = Message(
            name=f"{kind} of parameters, 1/{self.every} of it",
            nbytes=round(sent / self.every),
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
            f"({1e3 * (cost + copied_s):.3g} ms); a worker sends {own / self.every / 1e6:.3g} MB a step, "
            f"{self.every * nbytes / own:.3g} times less than all its gradients"
        )
        facts: dict[str, object] = {
            "workers": self.workers,
            "network": self.network,
            "backend": one_worker.back_end(graph, self.backend),
            "every": self.every,
        }
        facts |= {} if self.updates == "all" else {"updates": self.updates, "share": values["share"]}
        return with_facts(result.noted(Change(what=what, tasks=len(rows))), distributed=facts)

    def _exchanged(self, nbytes: int, values: dict[str, float]) -> tuple[CollectiveKind, float, float]:
        """Return the collective of one exchange, its bytes as `cost.network` counts them, and seconds of host work
        beside.
        """
        copied_s = nbytes / (values["copy_gb_s"] * 1e9)
        if self.updates == "all":
            return CollectiveKind.ALL_REDUCE, nbytes, PASSES * copied_s
        beside_s = SPARSE_PASSES * copied_s + nbytes / (values["select_gb_s"] * 1e9)
        if _INDEX * values["share"] >= 1:  # then values without indices are less
            return CollectiveKind.ALL_REDUCE, nbytes, beside_s
        return CollectiveKind.ALL_GATHER, self.workers * _INDEX * values["share"] * nbytes, beside_s

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        sparse = (
            {"share": _SHARES[self.updates], "select_gb_s": self._selecting(graph)} if self.updates != "all" else {}
        )
        return sparse | {
            "copy_gb_s": one_worker.copying(graph, self._net(graph)),
            "step_us": Prior(300.0, 100.0, 1000.0, unit="µs", why="Python over all parameters, one call"),
            "waiting_ms": one_worker.waiting(graph, self.workers),
            "transfer": one_worker.transfer(self._net(graph)),
        }

    def _selecting(self, graph: TaskGraph) -> Prior:
        if self.updates == "dgc":
            return rates(CompressionSettings(method="topk"), self.workers, cpu=graph.info.platform == "cpu")[0]
        return Prior(1.0, 0.3, 4.0, unit="GB/s", why="comparing every update with its weight takes about ten passes")

    def _net(self, graph: TaskGraph) -> Network:
        return one_worker.network_between(graph, self.network, self.workers, self.backend)

    def _check(self) -> None:
        if self.workers < 2:
            raise self.refuse(f"workers must be 2 or more, got {self.workers}; one has nobody to agree with.")
        if self.every < 1:
            raise self.refuse(f"every must be 1 or more, got {self.every}; it is steps between two averages.")
        if self.updates == "dgc" and self.every != 1:
            raise self.refuse(f"every must be 1 with updates=dgc, which trains on no own update, got {self.every}.")
        for name, of in (("share", _SHARES), ("select_gb_s", _SHARES), ("threshold", ("gaia",))):
            if self.updates not in of and getattr(self, name) != getattr(type(self), name):
                raise self.refuse(f"{name} is of updates={' or '.join(of)}, got updates={self.updates}; leave it out.")
        if self.share is not None and not 0 < self.share <= 1:
            raise self.refuse(f"share must be above 0 and at most 1, got {self.share:g}; 0.01 is one in a hundred.")
        if not 0 <= self.threshold <= 1e6:
            raise self.refuse(f"threshold must be 0 to 1e6, got {self.threshold:g}; 0.1 sends updates of a tenth.")
        self.need_positive("select_gb_s")
        if not 0 <= self.parameter_mb < 1e9:
            raise self.refuse(f"parameter_mb must be 0 to 1e9, got {self.parameter_mb:g}; it is MB of all parameters.")

    def _nbytes(self, graph: TaskGraph) -> int:
        """Return bytes of all parameters that are trained."""
        if self.parameter_mb:
            return round(self.parameter_mb * 1e6)
        update = find_update(graph)
        found = sum(each.nbytes for each in find_gradients(graph)) or (update.nbytes if update else 0)
        if not found:
            raise self.refuse("the recording does not tell how large the parameters are; give parameter_mb=.")
        return found

    def _ends(self, graph: TaskGraph) -> tuple[Int64, Int64 | None]:
        """Return per step the last host task of the update, and the last device task there."""
        live = ~graph.gone & ~np.isin(graph.kind, (TaskKind.MARK, TaskKind.JOIN))
        update = step_tasks(graph) & live
        update = update if update.any() else (graph.phase == Phase.OPTIMIZER) & live
        rows, device = (ends_by_step(graph, update & where)[1] for where in (~graph.on_device, graph.on_device))
        if np.any(rows < 0):
            raise self.refuse("the recording shows no optimizer step (no Optimizer.step ranges).")
        return rows, device if np.all(device >= 0) else None

    def realise(self, training: Training) -> Training:
        from foretrace.training.data_parallel import averaged_every, need_group, sharing
        from foretrace.training.workers.committing import Committing
        from foretrace.training.workers.policies import DeepCompression, Gaia

        self._check()
        need_group(self.name, self.workers)
        shared = sharing(training, self.name)
        if self.updates == "all":
            optimizers = tuple(averaged_every(each, self.every) for each in shared.optimizers)
        else:
            share = _SHARES["dgc"].value if self.share is None else self.share
            dgc = self.updates == "dgc"
            policy = DeepCompression(share=share) if dgc else Gaia(threshold=self.threshold)
            optimizers = tuple(Committing(each, policy, self.every) for each in shared.optimizers)
        return replace(shared, optimizers=optimizers)
