"""`priority`: messages of early layers overtake the others, and the next step waits for them layer by layer.

In the backward pass the last layers' gradients are ready first, in the next forward pass the first layers' are needed
first. With a queue ordered by need, and no wait for all messages between two steps, late messages hide behind the
forward pass as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from foretrace.graph.edit import scale
from foretrace.graph.taskgraph import TaskGraph
from foretrace.techniques.base import Prior, Technique, derived
from foretrace.techniques.compute.updates import step_tasks
from foretrace.techniques.distributed.messages import plan_of, replanned


@dataclass(frozen=True, kw_only=True)
class Priority(Technique):
    """Send first what the next step needs first; a layer waits for its own messages only."""

    summary = "messages of early layers go first, and the next step waits layer by layer"
    source = "Jayarajan et al., P3 (MLSys 2019); Peng et al., ByteScheduler (SOSP 2019)"
    not_applied = (
        "DistributedDataParallel sends buckets in one order and PyTorch's optimizers update all parameters at once."
    )

    update: float | None = derived(unit="share", doc="share of the update that the worker still does at its place")

    def change(self, graph: TaskGraph) -> TaskGraph:
        plan = plan_of(graph, self)
        share = self.values(graph).get("update", 1.0)
        own = step_tasks(graph) & ~graph.gone
        lighter = scale(graph, own, share) if own.any() and share != 1 else graph
        return replanned(lighter, replace(plan, prioritised=True), self)

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        if not np.any(step_tasks(graph) & ~graph.gone):
            return {}
        why = "each parameter is updated when its sum arrives: by this worker, beside its computing, or by a server"
        return {"update": Prior(1.0, 0.0, 1.0, unit="share", why=why)}
