"""`hierarchical-allreduce`: sums within machines first, then between them, each on its own link."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import TaskGraph
from foretrace.techniques.base import Prior, Technique, derived, parameter
from foretrace.techniques.distributed import one_worker
from foretrace.techniques.distributed.messages import HIERARCHICAL, ExchangePlan, level_count, plan_of, replanned
from foretrace.training.training import Training


@dataclass(frozen=True, kw_only=True)
class HierarchicalAllreduce(Technique):
    """Reduce-scatter inside, all-reduce of the shares across, all-gather inside."""

    summary = "all-reduce along the levels of a cluster: reduce-scatter inside, across, all-gather back"
    source = "Cho et al., BlueConnect (MLSys 2019), section 3"
    effort = "a communication hook and process groups by level"
    needs = "as many processes as workers"

    levels: str = parameter(doc="workers of every level, innermost first: 8x4 is 4 machines of 8 workers")
    networks: str = parameter(
        "", doc="network of every level, innermost first: 200gbit;25gbit; else that of all workers"
    )
    groups: float | None = derived(doc="time of collectives of a level relative to what the networks' models say")

    def change(self, graph: TaskGraph) -> TaskGraph:
        plan = self._by_levels(graph)
        plan = replace(plan, transfer=plan.transfer * self.values(graph)["groups"])
        return replanned(graph, plan, self)

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        plan = self._by_levels(graph)
        try:
            found = [one_worker.transfer(plan.net(text, size)) for size, text in plan.levels]
        except ForetraceError as error:
            raise self.refuse(f"networks={self.networks}: {error}") from error
        # What is known of all workers may say little of some of them; the level of which the least is known counts.
        return {"groups": max(found, key=lambda each: each.high - each.low)}

    def _by_levels(self, graph: TaskGraph) -> ExchangePlan:
        """Return the plan that stands in the graph, along the levels."""
        plan = plan_of(graph, self, only_all_reduce=True)
        sizes = self._sizes(plan.workers)
        texts = self.networks.split(";") if self.networks else [plan.network] * len(sizes)
        if len(texts) != len(sizes):
            raise self.refuse(f"networks={self.networks} names {len(texts)} links for {len(sizes)} levels.")
        return replace(plan, scheme=HIERARCHICAL, levels=tuple(zip(sizes, texts, strict=True)))

    def _sizes(self, workers: int) -> list[int]:
        try:
            sizes = [int(each) for each in self.levels.lower().split("x")]
        except ValueError:
            sizes = []
        if len(sizes) < 2 or min(sizes) < 2:
            raise self.refuse(f"levels={self.levels} names no levels; write 8x4: 8 workers inside each of 4 machines.")
        if level_count([(size, "") for size in sizes]) != workers:
            raise self.refuse(f"levels={self.levels} are not the {workers} workers of data-parallel.")
        return sizes

    def realise(self, training: Training) -> Training:
        from foretrace.training.data_parallel import replicas, sums_by_levels

        wrapped = replicas(training, self.name)
        sizes = self._sizes(wrapped.process_group.size())
        if len(sizes) != 2:
            raise self.refuse("the real thing has two levels; give two, like 8x4.")
        sums_by_levels(wrapped, sizes[0])
        return training
