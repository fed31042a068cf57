"""The critical path in a few words: what the step goes through, in the order in which it does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretrace.graph.taskgraph import Phase, TaskKind
from foretrace.report.views import PathPart
from foretrace.simulate.timeline import Timeline

MOVED = 0.15  # the path moved if this share of it now lies elsewhere

_WORDS = {
    TaskKind.CPU: "host work",
    TaskKind.CALL: "host work",
    TaskKind.RETURN: "host work",
    TaskKind.JOIN: "host work",
    TaskKind.MARK: "host work",
    TaskKind.PYTHON: "Python",
    TaskKind.OPERATOR: "operators",
    TaskKind.DATA: "data loading",
    TaskKind.KERNEL: "kernels",
    TaskKind.COPY: "copies",
    TaskKind.MEMSET: "copies",
    TaskKind.COLLECTIVE: "collectives",
}
_WITH_PHASE = {"host work", "Python", "operators", "kernels"}


def path_parts(timeline: Timeline) -> tuple[PathPart, ...]:
    """Time on the critical path (waits for a task included) by what the task does, per step, in order of the step."""
    path = timeline.critical_path()
    graph = timeline.graph
    words: dict[str, int] = {}
    labels = np.empty(len(path), dtype=np.int64)
    for i, task in enumerate(path.task.tolist()):
        word = _WORDS[TaskKind(graph.kind[task])]
        phase = Phase(graph.phase[task])
        if word in _WITH_PHASE and phase not in (Phase.NONE, Phase.DATA):
            word = f"{phase.name.lower()} {word}"
        labels[i] = words.setdefault(word, len(words))
    spent = path.lag_ns + path.delay_ns + path.work_ns
    time = np.bincount(labels, weights=spent, minlength=len(words)) / 1e9 / graph.n_steps
    # Where in its step a part lies: the mean distance of its tasks from the step's beginning.
    marks = timeline.end[graph.marks]
    step = np.clip(np.searchsorted(marks, timeline.start[path.task], side="right") - 1, 0, graph.n_steps - 1)
    into = (timeline.start[path.task] - marks[step]).astype(np.float64)
    place = np.bincount(labels, weights=into, minlength=len(words)) / np.maximum(np.bincount(labels), 1)
    order = sorted(range(len(words)), key=lambda i: (place[i], i))
    names = list(words)
    return tuple(PathPart(name=names[i], time_s=float(time[i])) for i in order)


def path_moved(before: Sequence[PathPart], after: Sequence[PathPart]) -> bool:
    """Whether another kind of work than before decides the step."""
    shares = []
    for parts in (before, after):
        total = sum(part.time_s for part in parts) or 1.0
        shares.append({part.name: part.time_s / total for part in parts})
    names = shares[0].keys() | shares[1].keys()
    return sum(abs(shares[0].get(name, 0.0) - shares[1].get(name, 0.0)) for name in names) / 2 > MOVED
