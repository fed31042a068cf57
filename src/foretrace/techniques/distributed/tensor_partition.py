"""`tensor-partition`: gradients are sent in slices, each as soon as its gradient is ready."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from foretrace.graph.edit import retime
from foretrace.graph.taskgraph import TaskGraph
from foretrace.techniques.base import Prior, Technique, derived, parameter
from foretrace.techniques.distributed.gradients import Gradient
from foretrace.techniques.distributed.messages import MessagePart, plan_of, replanned

MOST = 20_000  # slices of a step


def slices(gradients: tuple[Gradient, ...], elements: int) -> tuple[MessagePart, ...]:
    """Return every gradient in slices of at most so many numbers, in the order in which gradients become ready."""
    return tuple(
        MessagePart(gradients=(i,), nbytes=min(elements, each.elements - begin) * each.itemsize)
        for i, each in enumerate(gradients)
        for begin in range(0, each.elements, elements)
    )


@dataclass(frozen=True, kw_only=True)
class TensorPartition(Technique):
    """Cut gradients into slices that are sent by themselves."""

    summary = "gradients cut into slices that are sent by themselves"
    source = "Jayarajan et al., P3 (MLSys 2019), parameter slicing; dPRO (MLSys 2022), tensor partition"
    not_applied = "DistributedDataParallel sends whole gradients; it cannot cut one."

    elements: int = parameter(50_000, doc="numbers of a slice, at most")
    slice_us: float | None = derived(unit="µs", doc="host time of a slice beside starting its message")

    def change(self, graph: TaskGraph) -> TaskGraph:
        if self.elements < 1:
            raise self.refuse(f"elements={self.elements} is no size of a slice; give 1 or more.")
        plan = plan_of(graph, self)
        gradients = plan.gradients(graph)
        count = sum(-(-each.elements // self.elements) for each in gradients)
        if count > MOST:
            raise self.refuse(f"{count} slices per step are more than {MOST}; give more elements=.")
        parts = slices(gradients, self.elements)
        number = np.zeros(len(graph))
        for part in parts:
            number[gradients[part.gradients[0]].ready] += 1
        busier = number > 0
        longer = graph.dur[busier] + number[busier] * 1e3 * self.values(graph)["slice_us"]
        slower = retime(graph, busier, longer, what="added the handling of slices to {}")
        return replanned(slower, replace(plan, parts=parts), self)

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        return {"slice_us": Prior(5.0, 1.0, 20.0, unit="µs", why="a view of the gradient and a queue")}
