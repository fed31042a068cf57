"""foretrace: record one deep-learning run, replay it as a task graph, and ask what if.

    import foretrace as ft

    run = ft.read("run.json.gz")
    print(run.graph().apply(ft.techniques.PrefetchData()).simulate().step_time_s)

Names are loaded when they are first used, so that `import foretrace` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretrace import graph, report, simulate, techniques, trace
    from foretrace.errors import ForetraceError
    from foretrace.flow import Run, Scenario, compare, estimate, load, read, scenario
    from foretrace.graph.taskgraph import TaskGraph
    from foretrace.simulate.timeline import Timeline
    from foretrace.trace.recorder import record
    from foretrace.trace.trace import Trace
    from foretrace.training.training import Training

__all__ = [
    "ForetraceError",
    "Run",
    "Scenario",
    "TaskGraph",
    "Timeline",
    "Trace",
    "Training",
    "compare",
    "estimate",
    "graph",
    "load",
    "read",
    "record",
    "report",
    "scenario",
    "simulate",
    "techniques",
    "trace",
]

_HOME = {
    "ForetraceError": "foretrace.errors",
    "Run": "foretrace.flow",
    "Scenario": "foretrace.flow",
    "TaskGraph": "foretrace.graph.taskgraph",
    "Timeline": "foretrace.simulate.timeline",
    "Trace": "foretrace.trace.trace",
    "Training": "foretrace.training.training",
    "compare": "foretrace.flow",
    "estimate": "foretrace.flow",
    "load": "foretrace.flow",
    "read": "foretrace.flow",
    "record": "foretrace.trace.recorder",
    "scenario": "foretrace.flow",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("foretrace")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in __all__:
        return import_module(f"foretrace.{name}")
    raise AttributeError(f"module 'foretrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
