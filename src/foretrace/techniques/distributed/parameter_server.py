"""`parameter-server`: gradients are pushed to servers that add them up, and the results pulled."""

from __future__ import annotations

from dataclasses import dataclass, replace

from foretrace.graph.taskgraph import TaskGraph
from foretrace.techniques.base import Prior, Technique, derived, parameter
from foretrace.techniques.distributed.messages import SERVERS, plan_of, replanned


@dataclass(frozen=True, kw_only=True)
class ParameterServer(Technique):
    """Workers push gradients to servers and pull sums, in place of all-reduces."""

    summary = "gradients pushed to servers and sums pulled back, servers shared by all workers"
    source = "Li et al., parameter server (OSDI 2014); Jiang et al., BytePS (OSDI 2020), section 3"
    not_applied = "PyTorch has no parameter server; one would have to be written on torch.distributed.rpc."

    servers: int = parameter(1, doc="processes that add up gradients, each with a link like a worker's", least=1)
    colocated: bool = parameter(False, doc="servers run on the workers' machines and share their links")
    sharded: bool = parameter(True, doc="every bucket over all servers; else bucket i goes to server i mod servers")
    sum_gb_s: float | None = derived(unit="GB/s", doc="gradients that a server adds up")

    def change(self, graph: TaskGraph) -> TaskGraph:
        plan = plan_of(graph, self, only_all_reduce=True)
        if self.colocated and self.servers > plan.workers:
            raise self.refuse(f"{self.servers} servers cannot run on the machines of {plan.workers} workers.")
        rate = self.values(graph)["sum_gb_s"]
        changed = replace(
            plan, scheme=SERVERS, servers=self.servers, colocated=self.colocated, sharded=self.sharded, sum_gb_s=rate
        )
        return replanned(graph, changed, self)

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        why = "adding streams two arrays in and one out; a core or two of a server's memory bandwidth"
        return {"sum_gb_s": Prior(8.0, 3.0, 30.0, unit="GB/s", why=why)}
