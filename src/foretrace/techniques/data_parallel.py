"""`data-parallel`: several workers with a copy of the model each, gradients averaged while the backward pass runs.

PyTorch's `DistributedDataParallel` puts gradients into buckets in the order in which they become ready; a bucket is
sent once it is full, and the update waits for all. Workers do the same thing, so one of them stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import erf, sqrt
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from foretrace.cost.network import CollectiveKind, Network, network
from foretrace.graph.edit import scale
from foretrace.graph.taskgraph import Phase, TaskGraph, TaskKind
from foretrace.simulate.timeline import simulate
from foretrace.techniques.base import Prior, Technique, derived, parameter
from foretrace.techniques.batching import with_facts
from foretrace.techniques.exchange import Message, Stop, exchange, timed
from foretrace.techniques.gradients import Gradient, find_gradients
from foretrace.techniques.updates import update_bandwidth

if TYPE_CHECKING:
    from foretrace.training.training import Training

MIB = 1024 * 1024
FIRST_MB, CAP_MB = 1.0, 25.0  # of DistributedDataParallel where the user sets no size


def bucketed(nbytes: Sequence[int], caps_bytes: Sequence[float]) -> list[list[int]]:
    """Tensors in buckets: one is closed once it holds at least its cap; the last cap holds for all further ones.

    The rule of `compute_bucket_assignment_by_size` in PyTorch's reducer for tensors of one type on one device.
    """
    buckets: list[list[int]] = [[]]
    size, number = 0, 0
    for i, each in enumerate(nbytes):
        buckets[-1].append(i)
        size += each
        if size >= caps_bytes[min(number, len(caps_bytes) - 1)]:
            buckets.append([])
            size, number = 0, number + 1
    return [bucket for bucket in buckets if bucket]


@dataclass(frozen=True, kw_only=True)
class DataParallel(Technique):
    """Train on several workers with averaged gradients."""

    name: ClassVar[str] = "data-parallel"
    summary: ClassVar[str] = "several workers, gradients averaged in buckets while the backward pass runs"
    source: ClassVar[str] = "Li et al., PyTorch Distributed (VLDB 2020), section 4; PyTorch, DistributedDataParallel"
    needs: ClassVar[str] = "as many processes as workers"

    workers: int = parameter(doc="processes, each with a copy of the model and a batch of its own")
    network: str = parameter(doc="link between workers (1gbit/50us), or a file of a cluster or of measured collectives")
    backend: str = parameter("", doc="what exchanges messages", choices=("", "gloo", "nccl"))
    bucket_mb: float | None = parameter(
        None, doc="size at which a bucket is sent; 25 with a first one of 1 by default", unit="MiB"
    )
    views: bool = parameter(False, doc="gradients are views of buckets (gradient_as_bucket_view): no copies")
    copy_gb_s: float | None = derived(unit="GB/s", doc="bandwidth of copying gradients into buckets and back")
    gradient_us: float | None = derived(unit="µs", doc="host time of a gradient beside its copies")
    step_us: float | None = derived(unit="µs", doc="host time of a step in the reducer")
    waiting_ms: float | None = derived(unit="ms", doc="how much later the last worker is than this one")
    company: float | None = derived(doc="slow-down of computing while messages are exchanged")
    transfer: float | None = derived(doc="time of transfers relative to what the network's model says")

    def change(self, graph: TaskGraph) -> TaskGraph:
        gradients, net = self._gradients(graph), self._network(graph)
        values = self.values(graph)
        buckets = self.buckets([each.nbytes for each in gradients])
        last = np.max([each.ready for each in gradients], axis=0)
        graph = self._slowed(graph, gradients, last, values)
        wait_ns = round(values["waiting_ms"] * 1e6)
        messages = []
        for i, bucket in enumerate(buckets):
            nbytes = sum(gradients[j].nbytes for j in bucket)
            cost = net.cost(CollectiveKind.ALL_REDUCE, nbytes)
            nothing = net.cost(CollectiveKind.ALL_REDUCE, 0)
            messages.append(
                Message(
                    name=f"all-reduce bucket {i}",
                    nbytes=nbytes,
                    dur_ns=timed(cost, scale=values["transfer"]),
                    wire_ns=max(timed(cost, scale=values["transfer"]) - timed(nothing), 0),
                    after=np.max([gradients[j].ready for j in bucket], axis=0),
                    device=np.max([gradients[j].device for j in bucket], axis=0),
                    waits=last,
                    lag_ns=wait_ns,
                )
            )
        total = sum(each.nbytes for each in gradients)
        copied = 0 if self.views else round(2 * total / values["copy_gb_s"]) if graph.info.platform == "cpu" else 0
        result = exchange(
            graph, messages, [Stop(waits=last, then_ns=copied)], in_flight=net.in_flight, technique=self.name
        )
        sizes = [message.nbytes for message in messages]
        facts = {"workers": self.workers, "network": self.network, "backend": self._backend(graph), "buckets": sizes}
        return with_facts(result, distributed=facts)

    def buckets(self, nbytes: Sequence[int]) -> list[list[int]]:
        """Gradients (in the order in which they become ready) that are sent together."""
        caps = (FIRST_MB, CAP_MB) if self.bucket_mb is None else (self.bucket_mb,)
        return bucketed(nbytes, [cap * MIB for cap in caps])

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found: dict[str, Prior] = {}
        if graph.info.platform == "cpu" and not self.views:
            found["copy_gb_s"] = update_bandwidth(graph) or Prior(
                value=10.0, low=4.0, high=30.0, unit="GB/s", why="one core copies so much"
            )
        found["gradient_us"] = Prior(
            value=6.0, low=2.0, high=15.0, unit="µs", why="the reducer's hook and the call that copies"
        )
        found["step_us"] = Prior(
            value=150.0, low=50.0, high=500.0, unit="µs", why="DistributedDataParallel before and after a step"
        )
        found["waiting_ms"] = self._waiting(graph)
        cpu = graph.info.platform == "cpu"
        found["company"] = Prior(
            value=1.02 if cpu else 1.03,
            low=1.0,
            high=1.10,
            unit="×",
            why="messages take memory bandwidth and, on a device, multiprocessors from computing",
        )
        typical = self._network(graph).cost(CollectiveKind.ALL_REDUCE, 4 * MIB)
        share = typical.seconds or 1.0
        found["transfer"] = Prior(
            value=1.0, low=typical.low_s / share, high=typical.high_s / share, unit="×", why=typical.why
        )
        return found

    def _waiting(self, graph: TaskGraph) -> Prior:
        """The last of W workers whose steps vary as the recorded ones do, relative to the mean (order statistics)."""
        times = simulate(graph).step_times_ns / 1e9
        spread = float(np.std(times, ddof=1)) if len(times) > 2 else 0.02 * float(np.mean(times))
        late = 1e3 * spread * _expected_max(self.workers)
        why = f"the last of {self.workers} workers whose steps vary as the {len(times)} recorded ones do"
        return Prior(value=late, low=0.0, high=2.5 * late, unit="ms", why=why)

    def _slowed(
        self, graph: TaskGraph, gradients: Sequence[Gradient], last: npt.NDArray[np.int64], values: dict[str, float]
    ) -> TaskGraph:
        """Computing beside messages, and what the reducer adds to every gradient."""
        first = np.min([each.ready for each in gradients], axis=0)
        begin, end = graph.recorded[first], graph.recorded[last] + graph.dur[last]
        step = np.clip(graph.step, 0, None)
        beside = (graph.step >= 0) & (graph.phase == Phase.BACKWARD) & ~graph.gone
        beside &= (graph.recorded >= begin[step]) & (graph.recorded <= end[step])
        beside &= ~np.isin(graph.kind, (TaskKind.MARK, TaskKind.JOIN, TaskKind.COLLECTIVE))
        graph = scale(graph, beside, values["company"], technique=self.name)
        dur = graph.dur.copy()
        for each in gradients:
            copied = 2 * each.nbytes / values["copy_gb_s"] if "copy_gb_s" in values else 0.0
            np.add.at(dur, each.ready, round(copied + 1e3 * values["gradient_us"]))
        np.add.at(dur, first, round(1e3 * values["step_us"]))
        return graph.with_columns(dur=dur)

    def _gradients(self, graph: TaskGraph) -> tuple[Gradient, ...]:
        if self.workers < 2:
            raise self.refuse("workers must be 2 or more.")
        if self.bucket_mb is not None and not 0 < self.bucket_mb < 1e6:
            raise self.refuse(f"bucket_mb={self.bucket_mb} is no size; give MiB above 0.")
        if graph.info.recording.get("distributed") or bool((graph.kind == TaskKind.COLLECTIVE).any()):
            raise self.refuse("the recording already exchanges messages between workers; record one worker alone.")
        found = find_gradients(graph)
        if not found:
            raise self.refuse(
                "the recording does not show when gradients become ready; record with `foretrace record`, "
                "with shapes and operators."
            )
        return found

    def _backend(self, graph: TaskGraph) -> str:
        return self.backend or ("gloo" if graph.info.platform == "cpu" else "nccl")

    def _network(self, graph: TaskGraph) -> Network:
        return network(self.network, self.workers, in_flight=2 if self._backend(graph) == "gloo" else 1)

    def realise(self, training: Training) -> Training:
        from torch import distributed
        from torch.nn.parallel import DistributedDataParallel

        if not distributed.is_available() or not distributed.is_initialized():
            raise self.refuse(
                f"there is no process group; start {self.workers} processes (torchrun) that call init_process_group, "
                "or use `foretrace rig verify`."
            )
        if distributed.get_world_size() != self.workers:
            raise self.refuse(f"{distributed.get_world_size()} processes run, and workers={self.workers}.")
        options: dict[str, Any] = {} if self.bucket_mb is None else {"bucket_cap_mb": self.bucket_mb}
        wrapped = DistributedDataParallel(training.model, gradient_as_bucket_view=self.views, **options)
        return replace(training, model=wrapped)


def _expected_max(count: int) -> float:
    """Expected largest of so many independent standard normal numbers (David & Nagaraja, Order Statistics, 2003)."""
    x = np.linspace(-9.0, 9.0, 3601)
    below = np.array([0.5 * (1 + erf(each / sqrt(2))) for each in x.tolist()])
    return float(np.sum(x[1:] * np.diff(below**count)))
