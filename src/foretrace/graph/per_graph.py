"""`per_graph`: what is asked of one graph again and again is worked out once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

from foretrace.graph.taskgraph import TaskGraph

_Answer = TypeVar("_Answer")


def per_graph(question: Callable[[TaskGraph], _Answer]) -> Callable[[TaskGraph], _Answer]:
    """The same question, whose answer is kept as long as the graph lives; neither may be written to afterwards.

    The answer must not hold the graph, which would never end then. A graph that another was made from is another
    graph: what an edit changes is never answered from before.
    """
    known: WeakKeyDictionary[TaskGraph, _Answer] = WeakKeyDictionary()

    @wraps(question)
    def asked(graph: TaskGraph) -> _Answer:
        if graph not in known:
            known[graph] = question(graph)
        return known[graph]

    return asked
