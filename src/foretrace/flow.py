"""The whole program, to be read top to bottom: read, build, simulate, change, compare.

    run = read("run.json.gz")                            # Trace: what happened
    recorded = run.graph()                               # TaskGraph: what depends on what
    recorded.simulate().step_time_s                      # Timeline: when everything runs
    faster = recorded.apply(PrefetchData(workers=4))     # another TaskGraph, with what was changed and assumed
    faster.whatif().interval_s                           # before, after, how sure
    compare(recorded, faster).rows                       # where the difference lies

The command line and Python users walk through the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretrace.graph.taskgraph import TaskGraph
    from foretrace.simulate.check import CheckReport
    from foretrace.simulate.compare import Comparison
    from foretrace.simulate.timeline import Timeline
    from foretrace.techniques.base import Technique
    from foretrace.techniques.whatif import WhatIf
    from foretrace.trace.trace import Trace


# --- 1. read -------------------------------------------------------------------------------------------------


def read(
    path: str | Path | Sequence[str | Path],
    *,
    ranks: Collection[int] | None = None,
    steps: Collection[int] | slice | None = None,
    salvage: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Run:
    """Read the recordings of one run: a file, an archive or folder of ranks, or a list of files.

    `ranks` and `steps` keep a part of it, `salvage` the good part of a damaged file; `progress` is told the share
    of the bytes that were read. Raises TraceError with the file, the place and the mend.
    """
    from foretrace.trace.read import read as read_trace

    trace = read_trace(path, ranks=ranks, steps=steps, salvage=salvage, progress=progress)
    return Run(trace=trace)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One recorded run."""

    trace: Trace

    # --- 2. build --------------------------------------------------------------------------------------------

    def graph(self, *, rank: int | None = None, as_recorded: bool = False) -> Scenario:
        """What depends on what on one rank (the lowest by default), without the cost of having been recorded.

        `as_recorded` keeps that cost: the graph then reproduces the recording to the nanosecond. Raises GraphError
        where the recording has no such rank, or nothing that could become a task.
        """
        from foretrace.graph.builder import build
        from foretrace.simulate.overhead import unprofiled

        graph = build(self.trace, rank)
        return Scenario(graph=graph if as_recorded else unprofiled(graph))


def load(path: str | Path) -> Scenario:
    """A graph that `Scenario.save` stored, memory-mapped. Raises GraphError."""
    from foretrace.graph.store import load as load_graph

    return Scenario(graph=load_graph(path))


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run to ask questions of: as it was recorded, or with techniques applied."""

    graph: TaskGraph
    techniques: tuple[Technique, ...] = ()
    recorded: TaskGraph | None = None  # before the techniques; None where there are none

    # --- 2b. calibrate: what operators take on the recorded machine, where that was measured -----------------

    def calibrated(self) -> Scenario:
        """With the operator times that `foretrace calibrate` stored for the recorded machine, threads and allocator.

        The same scenario where there are none. Raises ForetraceError where the stored file is damaged.
        """
        from foretrace.cost.calibration import Calibration

        found = Calibration.load_for(self.graph)
        return replace(self, graph=found.on(self.graph)) if found else self

    # --- 3. simulate -----------------------------------------------------------------------------------------

    def simulate(self) -> Timeline:
        """When everything runs: step time, breakdown, critical path, slack, sensitivity, blame."""
        from foretrace.simulate.timeline import simulate

        return simulate(self.graph)

    def check(self) -> CheckReport:
        """Whether the graph stands up to being changed: invariants and counterfactuals."""
        from foretrace.simulate.check import check

        return check(self.graph)

    # --- 4. change -------------------------------------------------------------------------------------------

    def apply(self, *techniques: Technique) -> Scenario:
        """The run as it would be with these techniques, in this order; this one stays as it is.

        Raises NotApplicableError where one of them does not fit, with the reason.
        """
        graph = self.graph
        for technique in techniques:
            graph = technique.predict(graph)
        return replace(
            self,
            graph=graph,
            techniques=self.techniques + techniques,
            recorded=self.graph if self.recorded is None else self.recorded,
        )

    def whatif(self) -> WhatIf:
        """Step time before and after the techniques applied, its interval, and what every one of them gave."""
        from foretrace.techniques.whatif import whatif

        return whatif(self.graph if self.recorded is None else self.recorded, self.techniques)

    def save(self, path: str | Path) -> Path:
        """Store the graph in one file, for `load` and `foretrace compare`."""
        from foretrace.graph.store import save

        return save(self.graph, path)


# --- 5. compare ----------------------------------------------------------------------------------------------


def compare(before: Scenario, after: Scenario) -> Comparison:
    """Where the difference between two runs lies, recorded or predicted, layer by layer."""
    from foretrace.simulate.compare import compare as compare_timelines

    return compare_timelines(before.simulate(), after.simulate())
