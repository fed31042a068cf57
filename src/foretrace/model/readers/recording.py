"""The operators of one recorded step, as an `OperatorGraph`.

A call counts once, where its work is done: `linear` hands its work to `addmm`. On a GPU, kernels belong to the operator
that launched them.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from foretrace.cost.calls import Family, family_of
from foretrace.errors import GraphError
from foretrace.graph.taskgraph import Phase, TaskGraph, TaskKind
from foretrace.model.operator_graph import OperatorGraph
from foretrace.model.readers.calls import Called, from_calls
from foretrace.simulate.utilisation import samples_per_step

_WITH_WORK = (TaskKind.OPERATOR, TaskKind.KERNEL, TaskKind.COPY, TaskKind.COLLECTIVE)


def from_recording(graph: TaskGraph, name: str = "", *, step: int | None = None) -> OperatorGraph:
    """Return the operators of one step of a recording.

    `step` is its number as the recording counts; without it, the last one. Raises GraphError where there is no such
    step, or no operator with its inputs.
    """
    at = _step(graph, step)
    inside = graph.step == at if graph.n_steps else np.ones(len(graph), dtype=np.bool_)
    if len(set(graph.rank.tolist())) > 1:
        inside &= graph.rank == graph.rank.min()
    kinds = np.isin(graph.kind, _WITH_WORK) & inside & ~graph.gone
    rows, without = [], Counter[str]()
    order = np.flatnonzero(kinds)
    for task in order[np.argsort(graph.recorded[order], kind="stable")].tolist():
        kind, nbytes, flops = TaskKind(graph.kind[task]), int(graph.nbytes[task]), float(graph.flops[task])
        op = graph.names[graph.op[task]] if graph.op[task] >= 0 else ""
        text = graph.shapes[graph.shape[task]] if graph.shape[task] >= 0 else ""
        if kind == TaskKind.COLLECTIVE:
            op, text = op or graph.names[graph.name[task]], text if op else ""
        elif kind == TaskKind.OPERATOR and not text:
            if op and family_of(op) not in (Family.NONE, Family.OTHER) and graph.dur[task] > 0:
                without[op] += 1
            continue
        elif not op or not text:
            without[op or graph.names[graph.name[task]]] += 1
            continue
        elif family_of(op) == Family.NONE or (nbytes <= 0 and flops <= 0):
            continue
        layer = graph.layers[graph.layer[task]] if graph.layer[task] >= 0 else ""
        phase = Phase(graph.phase[task])
        rows.append(Called(op=op, text=text, phase=phase, layer=layer, nbytes=float(max(nbytes, 0)), flops=flops))
    if not rows:
        raise GraphError(
            f"{name or graph.info.source or 'the recording'} has no operator with the sizes of its inputs in that "
            "step; record with record_shapes=True."
        )
    notes = list(graph.info.notes)
    if without:
        most = ", ".join(f"{op[:60]} ({count})" for op, count in without.most_common(3))
        notes.append(f"{sum(without.values())} calls have no recorded inputs and are left out: {most}.")
    source = f"recording of {graph.info.devices[0] if graph.info.devices else graph.info.platform}"
    samples = int(samples_per_step(graph.info.recording) or 0)
    return from_calls(rows, name or graph.info.source, source=source, batch=samples, notes=notes)


def _step(graph: TaskGraph, step: int | None) -> int:
    """Return the index of the step."""
    if step is None:
        return graph.n_steps - 1
    numbers = list(graph.info.steps)
    if step not in numbers:
        shown = ", ".join(map(str, numbers)) or "none"
        raise GraphError(f"the recording has no step {step}; its steps are {shown}.")
    return numbers.index(step)
