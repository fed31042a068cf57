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
from functools import cached_property
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretrace.graph.alignment import ClockOffsets
    from foretrace.graph.matching import Matching
    from foretrace.graph.taskgraph import TaskGraph
    from foretrace.plan.advise import Advice
    from foretrace.simulate.check import CheckReport
    from foretrace.simulate.compare import Comparison
    from foretrace.simulate.folding import Scaling
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

    def global_graph(self, *, alone: bool = False) -> Scenario:
        """What depends on what on all ranks of the recording, tied together by their collectives, on one clock.

        The cost of having been recorded stays in; what is not the only step's is left out, as on one rank. With
        `alone`, the lowest rank alone where no collective ties two ranks together; its notes say so. Raises GraphError
        where the ranks cannot be of one job.
        """
        return joined(self._rank_graphs(), alone=alone)

    def alignment(self) -> tuple[Matching, ClockOffsets]:
        """Which collectives of the ranks are one, and how far the rank's clocks are apart. Raises GraphError."""
        return alignment(self._rank_graphs())

    def _rank_graphs(self) -> list[TaskGraph]:
        from foretrace.graph.builder import build

        return [build(self.trace, info.rank) for info in self.trace.ranks]


# --- 1b. ranks apart: each rank of a run read and built by itself, on all cores or on a cluster ---------------


def rank_graphs(
    path: str | Path | Sequence[str | Path],
    *,
    ranks: Collection[int] | None = None,
    steps: Collection[int] | slice | None = None,
    salvage: bool = False,
    on: str = "here",
    progress: Callable[[float], None] | None = None,
) -> tuple[TaskGraph, ...]:
    """The graph of every rank of a run, as recorded, on one clock; see `foretrace.graph.ranks`.

    `on` is "here" or "ray". Raises TraceError and GraphError as `read` and `Run.graph` do, and ForetraceError where
    a worker dies or Ray cannot be had.
    """
    from foretrace.graph.ranks import rank_graphs as read_graphs

    return read_graphs(path, ranks=ranks, steps=steps, salvage=salvage, on=on, progress=progress)


def joined(graphs: Sequence[TaskGraph], *, alone: bool = False, as_recorded: bool = False) -> Scenario:
    """The graphs of several ranks as one, see `Run.global_graph`; the only one, without the cost of its recording.

    `as_recorded` keeps what is not the only step's.
    """
    from foretrace.graph.join import join
    from foretrace.simulate.overhead import unprofiled
    from foretrace.simulate.own_step import alone as own_step

    if len(graphs) == 1:
        return Scenario(graph=unprofiled(graphs[0]))
    steps = list(graphs) if as_recorded else [own_step(each) for each in graphs]
    # What is not the step's tells of the clocks, too.
    clock = alignment(graphs)[1] if any(a is not b for a, b in zip(steps, graphs, strict=True)) else None
    graph = join(steps, clock=clock)
    if not alone or graph.info.collectives["what"]:
        return Scenario(graph=graph)
    one, ranks = unprofiled(graphs[0]), len(graphs)
    left = f"rank {one.lanes[0].rank} of {ranks} recorded ranks; other ranks are not in this graph."
    notes = (f"no collective ties the {ranks} ranks together.", left, *(n for n in one.info.notes if n != left))
    return Scenario(graph=replace(one, info=replace(one.info, notes=notes, collectives=graph.info.collectives)))


def alignment(graphs: Sequence[TaskGraph]) -> tuple[Matching, ClockOffsets]:
    """See `Run.alignment`."""
    from foretrace.graph.collectives import collective_calls
    from foretrace.graph.one_run import match_and_align

    return match_and_align([collective_calls(graph) for graph in graphs])


def scale(
    graphs: Sequence[TaskGraph],
    ranks: int,
    *,
    network: str = "",
    samples: int | None = None,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> Scaling:
    """Predict a run of so many ranks from the graphs of a few recorded ones; see `foretrace.simulate.folding`.

    `network` is as `foretrace.cost.network.parse.network` reads it; without it links are as fast as recorded, and
    latency is not counted. Raises NotApplicableError where the recorded ranks cannot stand for more, ForetraceError
    where the network cannot be.
    """
    from foretrace.simulate import folding

    price = None
    if network:
        from foretrace.cost.network.parse import network as parse_network
        from foretrace.cost.network.pricing import price as price_of

        price = price_of(parse_network(network, max(ranks, 1)))
    count = folding.SAMPLES if samples is None else samples
    return folding.scale(graphs, ranks, price=price, samples=count, seed=seed, progress=progress)


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
        from foretrace.cost.operators.calibration import Calibration

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
        return self._whatif

    @cached_property
    def _whatif(self) -> WhatIf:
        from foretrace.techniques.whatif import whatif

        return whatif(self.graph if self.recorded is None else self.recorded, self.techniques)

    def advise(self, *, exact: bool = False) -> Advice:
        """What to do first: every technique tried, ranked, weighed, the best put together; `exact` however long."""
        from foretrace.plan import advise

        return advise.advise(self.graph, work=inf if exact else advise.WORK)

    def save(self, path: str | Path) -> Path:
        """Store the graph and the range of its step in one file, for `load` and `foretrace compare`."""
        from foretrace.graph.store import save

        return save(self._whatif.saved() if self.techniques else self.graph, path)


# --- 5. compare ----------------------------------------------------------------------------------------------


def compare(before: Scenario, after: Scenario) -> Comparison:
    """Where the difference between two runs lies, recorded or predicted, layer by layer."""
    from foretrace.simulate.compare import compare as compare_timelines

    return compare_timelines(before.simulate(), after.simulate())
