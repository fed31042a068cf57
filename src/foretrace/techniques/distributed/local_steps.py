"""`local-steps`: workers train by themselves and every K steps average their parameters, or only some updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any

import numpy as np

from foretrace.arrays import Int64
from foretrace.cost.network.network import CollectiveKind, Network
from foretrace.cost.operators.calibration import Calibration
from foretrace.cost.operators.operator import Operator
from foretrace.graph.taskgraph import Change, Phase, TaskGraph, TaskKind
from foretrace.techniques.base import Prior, Technique, derived, parameter
from foretrace.techniques.compute.batching import with_facts
from foretrace.techniques.compute.updates import ends_by_step, find_update, step_tasks
from foretrace.techniques.distributed import one_worker
from foretrace.techniques.distributed.compressors import rates
from foretrace.techniques.distributed.exchange import Message, Stop, exchange
from foretrace.techniques.distributed.gradients import find_gradients
from foretrace.training.compression.settings import CompressionSettings
from foretrace.training.compression.timing import stand_in
from foretrace.training.training import Training
from foretrace.training.workers.timing import exchange_operator, tried_exchanges

PASSES = 6  # over the parameters: into one array, divided, back; each read and written
SPARSE_PASSES = 20  # also what changed, added to what waits, and taken up after the exchange
_INDEX = 2  # a value and its index take twice the bytes of a value
_NONE = 1e-9  # of the elements
_COUNT = 8  # bytes that say how many values follow
_FLOAT = 4  # bytes
SENT, COUNTED = "sent", 12  # shares that were sent in so many exchanges, by `_sending`: value, low, high
_ALONE = Prior(1.0, 0.6, 1.6, why="it was timed apart; in a step it meets other caches, and others at other moments")
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

    workers: int = parameter(
        doc="processes, each with a copy of the model and a batch of its own", least=2,
        hint="one has nobody to agree with",
    )  # fmt: skip
    network: str = parameter(doc="link between workers (1gbit/50us), or a file of a cluster or of measured collectives")
    every: int = parameter(4, doc="steps between two averages", least=1)
    updates: str = parameter(
        "all", doc="what is sent: all, those large beside their weight, or the largest share", choices=("all", *_SHARES)
    )
    threshold: float = parameter(
        0.1, doc="gaia: least update relative to its weight that is sent", least=0, most=1e6,
        hint="0.1 sends updates of a tenth",
    )  # fmt: skip
    backend: str = parameter("", doc="what exchanges messages", choices=("", "gloo", "nccl"))
    parameter_mb: float = parameter(
        0.0, doc="size of all parameters, where the recording does not show it", unit="MB", least=0, most=1e9
    )
    copy_gb_s: float | None = derived(unit="GB/s", doc="bandwidth of copying parameters into one array and back")
    share: float | None = derived(doc="gaia, dgc: share of the elements that a worker sends")
    select_gb_s: float | None = derived(unit="GB/s", doc="gaia, dgc: speed of choosing, by bytes of parameters")
    step_us: float | None = derived(unit="µs", doc="host time of one average beside its copies")
    measured: float | None = derived(doc="time of what stands around an exchange in a step relative to timed alone")
    waiting_ms: float | None = derived(unit="ms", doc="how much later the last worker is than this one, after one step")
    transfer: float | None = derived(doc="time of transfers relative to what the network's model says")

    @property
    def period(self) -> int:
        """As `Technique.period`."""
        return self.every

    @property
    def tries(self) -> int:
        """As `Technique.tries`."""
        return COUNTED * self.every

    def wants(self, graph: TaskGraph) -> tuple[Operator, ...]:
        self._check()
        return (self._beside(graph),) if graph.info.platform == "cpu" else ()

    def change(self, graph: TaskGraph) -> TaskGraph:
        self._check()
        one_worker.required(self, graph)
        nbytes, values = self._nbytes(graph), self.values(graph)
        rows, device = self._ends(graph)
        kind, sent = self._exchanged(nbytes, values)
        copied_s = self._beside_s(graph, nbytes, values)
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
            host_ns=round(values.get("step_us", 0.0) * 1e3 / self.every),
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

    def _exchanged(self, nbytes: int, values: dict[str, float]) -> tuple[CollectiveKind, float]:
        """Return the collective of one exchange, and its bytes as `cost.network` counts them."""
        if self.updates == "all" or _INDEX * values["share"] >= 1:  # then values without indices are less
            return CollectiveKind.ALL_REDUCE, nbytes
        return CollectiveKind.ALL_GATHER, self.workers * (_INDEX * values["share"] * nbytes + _COUNT)

    def _beside(self, graph: TaskGraph) -> Operator:
        """Return what workers do around an exchange, to be timed alone."""
        elements = [each.nbytes // _FLOAT for each in find_gradients(graph)] or [self._nbytes(graph) // _FLOAT]
        if self.parameter_mb:
            elements = [self._nbytes(graph) // _FLOAT]
        share = 1.0 if self.updates == "all" else self._share(graph).value if self.share is None else self.share
        return exchange_operator(self.updates, elements, self.workers, share)

    def _timed_s(self, graph: TaskGraph) -> float | None:
        """Return seconds of it, as timed on this machine; None where it was not, or speeds are given."""
        given = (self.copy_gb_s, self.step_us, self.select_gb_s)
        if graph.info.platform != "cpu" or any(each is not None for each in given):
            return None
        timed = Calibration.of(graph)
        own = timed.time_s(self._beside(graph))  # of this share, else of the likely one, which hardly differs
        return own if own is not None else timed.time_s(replace(self, share=None)._beside(graph))

    def _beside_s(self, graph: TaskGraph, nbytes: int, values: dict[str, float]) -> float:
        if (timed_s := self._timed_s(graph)) is not None:
            return values["measured"] * timed_s
        copied_s = nbytes / (values["copy_gb_s"] * 1e9)
        if self.updates == "all":
            return PASSES * copied_s
        return SPARSE_PASSES * copied_s + nbytes / (values["select_gb_s"] * 1e9)

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found = {"share": self._share(graph)} if self.updates != "all" else {}
        if self._timed_s(graph) is not None:
            found["measured"] = _ALONE
        else:
            found |= {
                "copy_gb_s": one_worker.copying(graph, self._net(graph)),
                "step_us": Prior(300.0, 100.0, 1000.0, unit="µs", why="Python over all parameters, one call"),
            } | ({"select_gb_s": self._selecting(graph)} if self.updates != "all" else {})
        return found | {
            "waiting_ms": one_worker.waiting(graph, self.workers),
            "transfer": one_worker.transfer(self._net(graph)),
        }

    def _share(self, graph: TaskGraph) -> Prior:
        """Return the share of the elements that is sent: as counted on one worker alone, else as assumed."""
        counted = graph.info.recording.get(SENT, {}).get(self._sending)
        if counted and self.updates == "gaia":
            return Prior(*counted, why=f"counted in {COUNTED} exchanges of workers by themselves")
        return _SHARES[self.updates]

    @property
    def _sending(self) -> str:
        return f"gaia threshold={self.threshold:g} every={self.every}"

    def tried(self, training: Training, meet: Callable[[], object] = lambda: None) -> list[tuple[float, float]]:
        exchanging = partial(self._exchanging, group=stand_in(self.workers))
        return tried_exchanges(training, exchanging, self.every, COUNTED, meet)[COUNTED // 2 :]  # at first little waits

    def with_tried(self, graph: TaskGraph, tried: Sequence[Sequence[tuple[float, float]]]) -> TaskGraph:
        every = [each for one in tried for each in one]
        if self.updates == "gaia" and self.share is None:
            shares = [max(sent / (_INDEX * self._nbytes(graph)), _NONE) for sent, _ in every]
            shown = {self._sending: (float(np.mean(shares)), min(shares), max(shares))}
            graph = with_facts(graph, **{SENT: graph.info.recording.get(SENT, {}) | shown})
        seconds = {self._beside(graph).key: float(np.median([each for _, each in every]))}
        return Calibration.of(graph).extended(seconds).on(graph)

    def _exchanging(self, optimizer: Any, group: Any = None) -> Any:
        """Return an optimizer that exchanges with the workers of a group; None is the default one."""
        from foretrace.training.data_parallel import averaged_every
        from foretrace.training.workers.committing import Committing
        from foretrace.training.workers.policies import DeepCompression, Gaia

        if self.updates == "all":
            return averaged_every(optimizer, self.every, group)
        share = _SHARES["dgc"].value if self.share is None else self.share
        policy = DeepCompression(share=share) if self.updates == "dgc" else Gaia(threshold=self.threshold)
        return Committing(optimizer, policy, self.every, group)

    def _selecting(self, graph: TaskGraph) -> Prior:
        if self.updates == "dgc":
            return rates(CompressionSettings(method="topk"), self.workers, cpu=graph.info.platform == "cpu")[0]
        return Prior(1.0, 0.3, 4.0, unit="GB/s", why="comparing every update with its weight takes about ten passes")

    def _net(self, graph: TaskGraph) -> Network:
        return one_worker.network_between(graph, self.network, self.workers, self.backend)

    def _check(self) -> None:
        if self.updates == "dgc" and self.every != 1:
            raise self.refuse(f"every must be 1 with updates=dgc, which trains on no own update, got {self.every}.")
        for name, of in (("share", _SHARES), ("select_gb_s", _SHARES), ("threshold", ("gaia",))):
            if self.updates not in of and getattr(self, name) != getattr(type(self), name):
                raise self.refuse(f"{name} is of updates={' or '.join(of)}, got updates={self.updates}; leave it out.")
        if self.share is not None and not 0 < self.share <= 1:
            raise self.refuse(f"share must be above 0 and at most 1, got {self.share:g}; 0.01 is one in a hundred.")

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
        from foretrace.training.data_parallel import need_group, sharing

        self._check()
        need_group(self.name, self.workers)
        shared = sharing(training, self.name)
        return replace(shared, optimizers=tuple(self._exchanging(each) for each in shared.optimizers))
