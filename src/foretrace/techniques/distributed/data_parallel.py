"""`data-parallel`: several workers with a copy of the model each, gradients averaged while the backward pass runs.

PyTorch's `DistributedDataParallel` puts gradients into buckets in the order in which they become ready; a bucket is
sent once it is full, and the update waits for all. Workers do the same thing, so one of them stands for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foretrace.graph.taskgraph import TaskGraph
from foretrace.model.messages import CAP_MB, FIRST_MB, MIB, bucketed
from foretrace.techniques.base import Prior, Technique, derived, parameter
from foretrace.techniques.compute.updates import find_update
from foretrace.techniques.distributed import one_worker
from foretrace.techniques.distributed.gradients import Gradient, find_gradients, spread_gradients
from foretrace.techniques.distributed.messages import ExchangePlan, by_size, lay_out
from foretrace.training.training import Training


@dataclass(frozen=True, kw_only=True)
class DataParallel(Technique):
    """Train on several workers with averaged gradients."""

    summary = "several workers, gradients averaged in buckets while the backward pass runs"
    source = "Li et al., PyTorch Distributed (VLDB 2020), section 4; PyTorch, DistributedDataParallel"
    effort = "more devices, a launcher and a process group"
    needs = "as many processes as workers"

    workers: int = parameter(doc="processes, each with a copy of the model and a batch of its own", least=2)
    network: str = parameter(doc="link between workers (1gbit/50us), or a file of a cluster or of measured collectives")
    backend: str = parameter("", doc="what exchanges messages", choices=("", "gloo", "nccl"))
    bucket_mb: float | None = parameter(
        None, doc="size at which a bucket is sent; 25 with a first one of 1 by default", unit="MiB"
    )
    buckets_mb: str = parameter("", doc="sizes of the first buckets, the last one for all further: 1,4,8", unit="MiB")
    views: bool = parameter(False, doc="gradients are views of buckets (gradient_as_bucket_view): no copies back")
    unused: bool = parameter(False, doc="look for parameters without a gradient (find_unused_parameters)")
    gradient_mb: float = parameter(
        0.0, doc="size of all gradients, where the recording does not show them", unit="MB", least=0, below=1e9
    )
    skew: float | None = derived(unit="", doc="a share x of unknown gradients is ready after x^skew of the pass")
    copy_gb_s: float | None = derived(unit="GB/s", doc="bandwidth of copying gradients into buckets and back")
    gradient_us: float | None = derived(unit="µs", doc="host time of a gradient beside its copies")
    step_us: float | None = derived(unit="µs", doc="host time of a step in the reducer")
    launch_us: float | None = derived(unit="µs", doc="host time of starting one collective")
    waiting_ms: float | None = derived(unit="ms", doc="how much later the last worker is than this one")
    company: float | None = derived(doc="slow-down of computing while messages are exchanged")
    stretch: float | None = derived(doc="slow-down of messages while this worker computes")
    delay_us: float | None = derived(unit="µs", doc="added to a message while this worker computes, whatever its size")
    transfer: float | None = derived(doc="time of transfers relative to what the network's model says")

    def change(self, graph: TaskGraph) -> TaskGraph:
        gradients = self._gradients(graph)
        plan = self.plan(graph, gradients)
        return lay_out(self.slowed(graph, gradients, plan), plan, self)

    def buckets(self, nbytes: Sequence[int], types: Sequence[object] | None = None) -> list[list[int]]:
        """Return gradients (in the order in which they become ready) that are sent together."""
        return bucketed(nbytes, [int(cap * MIB) for cap in self._caps()], types)

    def _caps(self) -> tuple[float, ...]:
        """Return sizes (MiB) at which buckets are closed."""
        if self.buckets_mb:
            try:
                caps = tuple(float(each) for each in self.buckets_mb.split(","))
            except ValueError:
                caps = ()
            if not caps or not all(0 < cap < 1e6 for cap in caps):
                raise self.refuse(f"buckets_mb={self.buckets_mb} is no list of sizes; write 1,4,8 (MiB above 0).")
            return caps
        if self.bucket_mb is None:
            return FIRST_MB, CAP_MB
        if not 0 < self.bucket_mb < 1e6:
            raise self.refuse(f"bucket_mb={self.bucket_mb} is no size; give MiB above 0.")
        return (self.bucket_mb,)

    def plan(self, graph: TaskGraph, gradients: Sequence[Gradient]) -> ExchangePlan:
        values = self.values(graph)
        sizes = [each.nbytes for each in gradients]
        total, recording = sum(sizes), graph.info.recording
        out_ns = 0 if self.views else round(2 * total / values["copy_gb_s"])
        met = "stretch" in values  # what meets was measured, and is known task by task
        normed = sum("BatchNorm" in each.get("class", "") for each in recording.get("modules", []))
        return ExchangePlan(
            workers=self.workers,
            network=self.network,
            backend=one_worker.back_end(graph, self.backend),
            parts=by_size(sizes, self.assigned(gradients)),
            transfer=values["transfer"],
            waiting_ms=values["waiting_ms"],
            launch_us=values["launch_us"],
            copied_ns=out_ns,
            buffer_bytes=int(recording.get("buffer_bytes") or 0),
            buffer_types=1 + bool(normed),  # batch norm counts its batches in an int64
            buffers=3 * normed,
            buffer_us=values["gradient_us"] if met else 0.0,
            company=values["company"] if met else 1.0,
            stretch=values.get("stretch", 1.0),
            delay_us=values.get("delay_us", 0.0),
            gradient_mb=self.gradient_mb,
            skew=values.get("skew", 1.0),
        )

    def assigned(self, gradients: Sequence[Gradient]) -> list[list[int]]:
        """Return gradients per bucket, as the reducer assigns them from the second step on."""
        sizes, types = [each.nbytes for each in gradients], [each.itemsize for each in gradients]
        if not self.unused:
            return self.buckets(sizes, types)
        # Buckets that may lack gradients stay as they were made: in the reverse order of registration.
        if any(each.parameter < 0 for each in gradients):
            raise self.refuse("unused=yes needs the order of the parameters; record with `foretrace record`.")
        registered = sorted(range(len(gradients)), key=lambda i: gradients[i].parameter)
        found = self.buckets([sizes[i] for i in registered], [types[i] for i in registered])
        found.sort(key=min)
        return [[registered[i] for i in bucket] for bucket in reversed(found)]

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found: dict[str, Prior] = {}
        if self.gradient_mb:
            why = "gradients become ready evenly; early in the pass or late, if large layers come last or first"
            found["skew"] = Prior(1.0, 0.5, 2.0, unit="", why=why)
        found["copy_gb_s"] = one_worker.copying(graph)
        found["gradient_us"] = Prior(
            3.5, 1.5, 10.0, unit="µs", why="the reducer's hook, measured with PyTorch 2.13 on a server core"
        )
        found["step_us"] = Prior(
            240.0, 80.0, 600.0, unit="µs", why="DistributedDataParallel around a step, measured likewise"
        )
        found["launch_us"] = Prior(
            40.0, 15.0, 100.0, unit="µs", why="a call of the process group and its end, measured likewise"
        )
        found["waiting_ms"] = one_worker.waiting(graph, self.workers)
        found["company"] = one_worker.company(graph)
        net = one_worker.network_between(graph, self.network, self.workers, self.backend)
        found["transfer"] = one_worker.transfer(net)
        return found | one_worker.measured(graph, net)

    def slowed(self, graph: TaskGraph, gradients: Sequence[Gradient], plan: ExchangePlan) -> TaskGraph:
        """Return computing beside messages, and what the reducer adds to every gradient."""
        values = self.values(graph)
        first = np.min([each.ready for each in gradients], axis=0)
        last = np.max([each.ready for each in gradients], axis=0)
        busy_s = sum(leg.seconds for i in range(len(plan.parts)) for leg in plan.legs(i))
        if "stretch" not in values:
            graph = one_worker.slowed_beside(graph, first, last, values["company"], busy_s)
        dur = graph.dur.copy()
        on_host = graph.info.platform == "cpu"
        for each in gradients:
            copied = 2 * each.nbytes / values["copy_gb_s"]  # into the bucket, divided by the workers
            np.add.at(dur, each.ready, round(on_host * copied + 1e3 * values["gradient_us"]))
            if not on_host and np.all(each.device >= 0):
                np.add.at(dur, each.device, round(copied))
        np.add.at(dur, first, round(1e3 * values["step_us"]))
        return graph.with_columns(dur=dur)

    def _gradients(self, graph: TaskGraph) -> tuple[Gradient, ...]:
        self._check()
        one_worker.required(self, graph)
        if self.gradient_mb:
            found = spread_gradients(graph, self.gradient_mb * 1e6, skew=self.values(graph)["skew"])
            if not found:
                raise self.refuse("the recording shows no backward pass.")
            return found
        found = find_gradients(graph)
        if not found:
            update = find_update(graph)
            size = f"gradient_mb={update.nbytes / 1e6:.4g}" if update and update.nbytes else "gradient_mb=MB"
            raise self.refuse(
                "the recording does not show when gradients become ready; record with `foretrace record`, with shapes "
                f"and operators, or give the size of all gradients in MB ({size})."
            )
        return found

    def _check(self) -> None:
        self._caps()
        if self.bucket_mb is not None and self.buckets_mb:
            raise self.refuse("bucket_mb= and buckets_mb= exclude each other; keep one.")
        if self.stretch == 0:
            raise self.refuse("stretch must be above 0, got 0; 1 is none.")

    def realise(self, training: Training) -> Training:
        from foretrace.training.data_parallel import in_replicas, need_group, sharing

        self._check()
        need_group(self.name, self.workers)
        options: dict[str, Any] = {"gradient_as_bucket_view": self.views, "find_unused_parameters": self.unused}
        if self.buckets_mb:
            options["bucket_cap_mb_list"] = list(self._caps())
        elif self.bucket_mb is not None:
            options["bucket_cap_mb"] = self.bucket_mb
        return in_replicas(sharing(training, self.name), self.name, **options)
