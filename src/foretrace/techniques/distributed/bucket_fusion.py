"""`bucket-fusion`: gradients are sent in fewer, larger messages.

On the messages that `data-parallel` put into a graph it is another cap of the buckets. On a recording of several
workers it joins the recorded all-reduces: every message has a fixed time that is then paid once per bucket.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from foretrace.graph.taskgraph import TaskGraph
from foretrace.model.messages import MIB, bucketed
from foretrace.techniques.base import Prior, Technique, derived, parameter
from foretrace.techniques.distributed.messages import by_size, plan_of, replanned
from foretrace.techniques.distributed.recorded_messages import RecordedAllReduces, fuse, recorded_all_reduces
from foretrace.training.training import Training


@dataclass(frozen=True, kw_only=True)
class BucketFusion(Technique):
    """Send gradients in buckets of another size."""

    summary = "gradients in fewer, larger messages: buckets of another size, or all in one"
    source = "Hu et al., dPRO (MLSys 2022), tensor fusion; Sergeev and Del Balso, Horovod (2018)"
    effort = "one argument (bucket_cap_mb); memory for the larger buckets"
    needs = "as many processes as workers"

    cap_mb: float = parameter(0.0, doc="size at which a bucket is sent; 0 sends all gradients in one", unit="MiB")
    total_mb: float = parameter(0.0, doc="gradients of a recorded step, if the recording does not say", unit="MB")
    fixed_us: float | None = derived(unit="µs", doc="time of a recorded all-reduce that does not depend on its size")
    waiting: float | None = derived(unit="", doc="share of recorded waiting inside all-reduces that stays")
    copy_gb_s: float | None = derived(unit="GB/s", doc="bandwidth of copying recorded gradients into a bucket and back")
    host_share: float | None = derived(
        unit="", doc="share of host work around a removed launch that goes with it", larger_is="faster"
    )

    def change(self, graph: TaskGraph) -> TaskGraph:
        self._check()
        found = self._recorded(graph)
        if found is None:
            plan = plan_of(graph, self)
            sizes = [each.nbytes for each in plan.gradients(graph)]
            types = [each.itemsize for each in plan.gradients(graph)]
            parts = by_size(sizes, bucketed(sizes, [int(self.cap_mb * MIB) or float("inf")], types))
            return replanned(graph, replace(plan, parts=parts), self)
        if self.cap_mb and not found.total(self.total_mb * 1e6):
            raise self.refuse("the recording does not tell how large its messages are; give total_mb= or cap_mb=0.")
        values = self.values(graph)
        return fuse(
            graph,
            found,
            cap=self.cap_mb * MIB,
            total=found.total(self.total_mb * 1e6),
            fixed_ns=1e3 * values["fixed_us"],
            waiting=values["waiting"],
            copy_gb_s=values["copy_gb_s"],
            host_share=values["host_share"],
            technique=self.name,
        )

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found = self._recorded(graph)
        return found.priors(graph) if found is not None else {}

    def _recorded(self, graph: TaskGraph) -> RecordedAllReduces | None:
        """Messages of a recording of several workers; None where `data-parallel` put them in."""
        if graph.info.recording.get("distributed"):
            return None
        return recorded_all_reduces(graph)

    def _check(self) -> None:
        if not 0 <= self.cap_mb < 1e6:
            raise self.refuse(f"cap_mb={self.cap_mb} is no size; give MiB above 0, or 0 for all in one.")
        if not 0 <= self.total_mb < 1e9:
            raise self.refuse(f"total_mb={self.total_mb} is no size; give MB above 0.")

    def realise(self, training: Training) -> Training:
        from foretrace.training.workers import in_replicas, replicas, unwrapped

        self._check()
        wrapped = replicas(training, self.name)
        cap = self.cap_mb or 1e6
        options = {
            "bucket_cap_mb": cap,
            "gradient_as_bucket_view": wrapped.gradient_as_bucket_view,
            "find_unused_parameters": wrapped.find_unused_parameters,
        }
        return in_replicas(unwrapped(training, self.name), self.name, **options)
