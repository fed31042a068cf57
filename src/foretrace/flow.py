"""The whole program in four chapters, to be read top to bottom; commands and Python users call the same functions.

run = read("run.json.gz")                            # 1. recorded. Trace: what happened
recorded = run.graph()                               # TaskGraph: what depends on what
recorded.simulate().step_time_s                      # Timeline: when everything runs
faster = recorded.apply(PrefetchData(workers=4))     # another TaskGraph, with what was changed and assumed
faster.whatif().interval_s                           # before, after, how sure
compare(recorded, faster).rows                       # where the difference lies

estimate("llama-2-7b", device="h100").step.step_time_s  # 2. modelled: OperatorGraph, costs, TaskGraph, Timeline

fleet("jobs.csv", cluster="2x4x8", policy="las").play().jct_s  # 3. fleet: Workload, Policy, FleetResult

simulate_llm(model="llama-3-8b", device="h100", asked="poisson qps=2", seconds=60).figures  # 4. served: Served
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.fleet.scene import Scene
    from foretrace.graph.alignment import ClockOffsets
    from foretrace.graph.matching import Matching
    from foretrace.graph.taskgraph import TaskGraph
    from foretrace.model.estimate import Estimate
    from foretrace.plan.advise import Advice
    from foretrace.plan.optimise import Tell
    from foretrace.plan.pipelines.cut import CutModel
    from foretrace.plan.placement.place import Placement
    from foretrace.plan.result import Answer, OptimiseRequest
    from foretrace.serving.llm.simulation import Simulated
    from foretrace.simulate.check import CheckReport
    from foretrace.simulate.compare import Comparison
    from foretrace.simulate.folding import Scaling
    from foretrace.simulate.memory import MemorySplit
    from foretrace.simulate.timeline import Timeline
    from foretrace.techniques.base import Technique
    from foretrace.techniques.whatif import WhatIf
    from foretrace.trace.trace import Trace


# === 1. recorded =============================================================================================

# --- 1a. read -------------------------------------------------------------------------------------------------


def read(
    path: str | Path | Sequence[str | Path],
    *,
    ranks: Collection[int] | None = None,
    steps: Collection[int] | slice | None = None,
    salvage: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Run:
    """Read the recordings of one run: a file, an archive or folder of ranks, or a list of files.

    `ranks` and `steps` keep a part of it, `salvage` the good part of a damaged file; `progress` is called with
    the share of the bytes that were read. Raises TraceError with the file, the place and what to do.
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
        """Return what depends on what on one rank (the lowest by default), without the cost of having been recorded.

        `as_recorded` keeps that cost: the graph then reproduces the recording to the nanosecond. Raises GraphError
        where the recording has no such rank, or nothing that could become a task.
        """
        from foretrace.graph.builder import build
        from foretrace.simulate.overhead import unprofiled

        graph = build(self.trace, rank)
        return Scenario(graph=graph if as_recorded else unprofiled(graph))

    def global_graph(self, *, alone: bool = False) -> Scenario:
        """Return what depends on what on all ranks of the recording, tied together by their collectives, on one clock.

        The cost of having been recorded stays in; what is not the only step's is left out, as on one rank. `alone`:
        the lowest rank where no collective ties two together, as its notes say. Raises GraphError for unlike jobs.
        """
        return joined(self._rank_graphs(), alone=alone)

    def alignment(self) -> tuple[Matching, ClockOffsets]:
        """Return which collectives of the ranks are one, and how far the rank's clocks are apart. Raises GraphError."""
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
    """Return the graph of every rank of a run, as recorded, on one clock; see `foretrace.graph.ranks`.

    `on` is "here" or "ray". Raises TraceError and GraphError as `read` and `Run.graph` do, and ForetraceError where
    a worker dies or Ray cannot be had.
    """
    from foretrace.graph.ranks import rank_graphs as read_graphs

    return read_graphs(path, ranks=ranks, steps=steps, salvage=salvage, on=on, progress=progress)


def joined(graphs: Sequence[TaskGraph], *, alone: bool = False, as_recorded: bool = False) -> Scenario:
    """Return the graphs of several ranks as one (`Run.global_graph`), or the only one without its recording's cost.

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
        from foretrace.cost.network.network import price as price_of
        from foretrace.cost.network.parse import network as parse_network

        price = price_of(parse_network(network, max(ranks, 1)))
    count = folding.SAMPLES if samples is None else samples
    return folding.scale(graphs, ranks, price=price, samples=count, seed=seed, progress=progress)


def scenario(
    path: str | Path,
    *,
    rank: int | None = None,
    steps: Collection[int] | None = None,
    salvage: bool = False,
    as_recorded: bool = False,
    all_ranks: bool | None = False,
    on: str = "here",
    progress: Callable[[float], None] | None = None,
) -> Scenario:
    """Return the run in a path, whatever that is: a recording, which is read and built, or a saved graph.

    `all_ranks` is all recorded ranks as one graph, or refused where no collective ties them together; None takes the
    lowest rank alone then. Raises ForetraceError for what the path does not have, and as `read` and `Run.graph` do.
    """
    path = Path(path)
    if all_ranks and rank is not None:
        raise ForetraceError(f"`all_ranks=` and `rank={rank}` contradict each other; give one of them.")
    if is_graph(path):
        return _saved(path, rank=rank, steps=steps, salvage=salvage, all_ranks=all_ranks, on=on)
    if rank is not None and on != "here":
        raise ForetraceError(f"{path} is read for rank {rank} alone, which needs no `on={on}`; leave it out.")
    if all_ranks or (all_ranks is None and rank is None and (path.is_dir() or on != "here")):
        graphs = rank_graphs(path, steps=steps, salvage=salvage, on=on, progress=progress)
        if all_ranks and len(graphs) < 2:
            raise ForetraceError(f"{path} is a recording of one rank; leave `all_ranks=` out.")
        found = joined(graphs, alone=not all_ranks, as_recorded=bool(all_ranks) and as_recorded)
        if all_ranks and not found.graph.info.collectives["what"]:
            raise ForetraceError(
                f"no collective ties the {len(graphs)} ranks of {path} together; look at one of them with `rank=`."
            )
        return replace(found, left_out=left_out(graphs) if salvage else ())
    run = read(path, ranks=None if rank is None else [rank], steps=steps, salvage=salvage, progress=progress)
    if all_ranks is None and rank is None and len(run.trace.ranks) > 1:
        found = run.global_graph(alone=True)
    else:
        found = run.graph(rank=rank, as_recorded=as_recorded)
    lost = tuple(
        f"{each.where}: left out {each.count:,} events ({each.reason})" if each.count else each.reason
        for each in (run.trace.dropped if salvage else ())
    )
    return replace(found, trace=run.trace, left_out=lost)


def is_graph(path: Path) -> bool:
    """Return whether a file holds a saved graph."""
    from foretrace.graph.store import MAGIC
    from foretrace.reading import opened

    try:
        with opened(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, ValueError):  # whoever reads it says why it cannot be read
        return False


def _saved(
    path: Path, *, rank: int | None, steps: Collection[int] | None, salvage: bool, all_ranks: bool | None, on: str
) -> Scenario:
    given = {"`rank=`": rank is not None, "`steps=`": bool(steps), "`salvage=`": salvage}
    if unfit := [name for name, used in given.items() if used]:
        raise ForetraceError(f"{path} is a saved graph, which {' and '.join(unfit)} cannot change; leave it out.")
    if on != "here":
        raise ForetraceError(f"{path} is a saved graph, which needs no `on={on}`; leave it out.")
    found = load(path)
    if all_ranks and len({lane.rank for lane in found.graph.lanes if lane.rank >= 0}) < 2:
        raise ForetraceError(f"{path} is a saved graph of one rank; leave `all_ranks=` out.")
    return found


def left_out(graphs: Sequence[TaskGraph]) -> tuple[str, ...]:
    """Return what salvaging left out of ranks that were read apart, one sentence each."""
    return tuple(
        f"{graph.info.source}: {note}"
        for graph in graphs
        for note in graph.info.notes
        if "left out" in note or "tells no rank" in note
    )


def load(path: str | Path) -> Scenario:
    """Return a graph that `Scenario.save` stored, memory-mapped. Raises GraphError."""
    from foretrace.graph.store import load as load_graph

    return Scenario(graph=load_graph(path))


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run to ask questions of: as it was recorded, or with techniques applied."""

    graph: TaskGraph
    techniques: tuple[Technique, ...] = ()
    recorded: TaskGraph | None = None  # before the techniques; None where there are none
    trace: Trace | None = None  # what it was built from, where that is one reading
    left_out: tuple[str, ...] = ()  # what salvaging a damaged recording left out, one sentence each

    # --- 2b. calibrate: what operators take on the recorded machine, where that was measured -----------------

    def calibrated(self) -> Scenario:
        """Return it with the operator times that `foretrace calibrate` stored for the machine, threads and allocator.

        The same scenario where there are none. Raises ForetraceError where the stored file is damaged.
        """
        from foretrace.cost.operators.calibration import Calibration

        found = Calibration.load_for(self.graph)
        return replace(self, graph=found.on(self.graph)) if found else self

    def memory(self, rank: int | None = None) -> MemorySplit | None:
        """Return what holds the memory of a recorded rank, by default the lowest; None where it is not recorded."""
        from foretrace.simulate.memory import split

        if self.trace is None:
            return None
        lowest = min((each.rank for each in self.trace.ranks), default=None) if rank is None else rank
        return split(self.trace if lowest is None or len(self.trace.ranks) < 2 else self.trace.of_rank(lowest))

    # --- 3. simulate -----------------------------------------------------------------------------------------

    def simulate(self) -> Timeline:
        """Return when everything runs: step time, breakdown, critical path, slack, sensitivity, blame."""
        from foretrace.simulate.timeline import simulate

        return _shown(simulate(self.graph))

    def check(self) -> CheckReport:
        """Return whether the graph stands up to being changed: invariants and counterfactuals."""
        from foretrace.simulate.check import check

        return _shown(check(self.graph))

    # --- 4. change -------------------------------------------------------------------------------------------

    def apply(self, *techniques: Technique) -> Scenario:
        """Return the run as it would be with these techniques, in this order; this one stays as it is.

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
        """Predict the step before and after the techniques applied, its interval, and what each of them gave."""
        return _shown(self._whatif)

    @cached_property
    def _whatif(self) -> WhatIf:
        from foretrace.techniques.whatif import whatif

        return whatif(self.graph if self.recorded is None else self.recorded, self.techniques)

    def advise(self, *, exact: bool = False) -> Advice:
        """Return what to do first: every technique tried, ranked, weighed, the best combined; `exact` however long."""
        from foretrace.plan import advise

        return _shown(advise.advise(self.graph, work=inf if exact else advise.WORK))

    def optimise(
        self, wanted: OptimiseRequest, *, seconds: float = inf, state: Path | None = None, tell: Tell | None = None
    ) -> Answer:
        """Search techniques and buckets with the shortest step for so many seconds; `state` continues."""
        from foretrace.plan.optimise import Optimiser
        from foretrace.plan.predictions import Peak
        from foretrace.simulate.memory import split

        memory = None if self.trace is None else split(self.trace)
        peak = None if memory is None else Peak.of(memory)
        return Optimiser(recorded=self.graph, wanted=wanted, peak=peak, state=state, tell=tell).run(seconds)

    def save(self, path: str | Path) -> Path:
        """Store the graph and the range of its step in one file, for `load` and `foretrace compare`."""
        from foretrace.graph.store import save

        return save(self._whatif.saved() if self.techniques else self.graph, path)


# --- 5. compare ----------------------------------------------------------------------------------------------


def compare(before: Scenario, after: Scenario) -> Comparison:
    """Return where the difference between two runs lies, recorded or predicted, layer by layer."""
    from foretrace.simulate.compare import compare as compare_timelines

    return compare_timelines(before.simulate(), after.simulate())


# === 2. modelled =============================================================================================


def estimate(
    model: str,
    *,
    device: str,
    batch: int | None = None,
    precision: str = "",
    inference: bool = False,
    size: str = "full",
    techniques: Sequence[Technique] = (),
    recompute: int = 0,
    reentrant: bool = False,
    accumulate: int = 1,
    zero: int = 0,
    workers: int = 1,
    gpus: int | None = None,
    tensor: int = 1,
    network: str = "",
    optimizer: str = "",
    attention: str = "",
    loss: str = "",
    length: int | None = None,
    dims: Mapping[str, int] | None = None,
    threads: int | None = None,
    measure: int = 0,
    progress: Callable[[float], None] | None = None,
) -> Estimate:
    """Predict a step's time and memory from a model alone, on a device that need not be available.

    - `model` is a model of the zoo, a decoder by name, a script with training(), or a file (ONNX, Chakra, JSON) with
      `dims` for its open dimensions; `device` a name of the catalog, or "here" for this processor with `threads`,
      of which `measure` operators are timed first.
    - `batch` is samples per step and worker, `length` words of a sequence, `accumulate` micro-batches per update.
    - `recompute` N runs every N-th block forward again before its backward pass (0: none), `reentrant` to its end.
    - `zero` is the stage of ZeRO among the `workers` (3 is FSDP), `tensor` how many devices share every layer; `gpus`
      are all devices, instead of `workers`. `network` joins workers as `foretrace.cost.network.parse.network` reads it,
      by default as machines usually do.

    Raises ForetraceError for what contradicts itself, cannot be found or cannot be costed.
    """
    from foretrace.model.capture.capture import precision_named
    from foretrace.model.capture.like import ATTENTION, UPDATES
    from foretrace.model.estimate import estimate as predict
    from foretrace.model.memory.memory import Sharding
    from foretrace.model.target import HERE, networks_of, target
    from foretrace.zoo.operators import is_decoder, operators_of

    if gpus is not None:
        if workers > 1 or gpus % tensor:
            raise ForetraceError(f"`gpus={gpus}` must be `workers=` times `tensor={tensor}`; give one of the two.")
        workers = gpus // tensor
    if zero and workers == 1:
        raise ForetraceError(f"`zero={zero}` shares among several workers; say how many with `workers=`.")
    if threads is not None and device != HERE:
        raise ForetraceError(f"`threads=` is for `device=here`, not for {device}; leave it out.")
    on = target(device, threads=threads, measure=measure)
    here = on.processor is not None
    if here and (workers > 1 or tensor > 1 or network):
        raise ForetraceError(
            "`workers=`, `tensor=` and `network=` are for devices of the catalog, not for `device=here`."
        )
    for name, said, known in (("attention", attention, ATTENTION), ("optimizer", optimizer, UPDATES)):
        if said not in ("", *known):
            raise ForetraceError(f"`{name}=` is {', '.join(known)}, not {said!r}.")
    if network and workers == 1:
        raise ForetraceError("`network=` is between workers; say how many with `workers=`.")
    if reentrant and not recompute:
        raise ForetraceError("`reentrant=` is how blocks are recomputed; add `recompute=`.")
    precision = precision_named(precision) if precision else ""
    # What shares out the state of an optimizer keeps it in float32, and computes on 16-bit copies.
    if zero and precision in ("bf16", "fp16") and is_decoder(model):
        precision += "-master"
    sharding = Sharding(workers=workers, stage=zero, tensor=tensor, master=precision.endswith("-master"))
    networks = networks_of(on.device, sharding, network)
    operators = operators_of(
        model, size=size, batch=batch, precision=precision, tensor=tensor, update=optimizer, attention=attention,
        loss=loss, training=not inference, like="cpu" if here else "gpu", techniques=techniques, dims=dims,
        length=length, progress=progress,
    )  # fmt: skip
    return predict(
        operators, device=on.device, costs=on.costs, own_processor=here, sharding=sharding, recompute=recompute,
        reentrant=reentrant, network=networks, accumulate=accumulate, techniques=tuple(map(str, techniques)),
    )  # fmt: skip


def place(
    source: str, *, objective: str = "throughput", contiguous: bool = True, seconds: float = 30.0, **how: Any
) -> Placement:
    """Share operators out over devices so that a full pipeline is fastest, or one batch, with a bound.

    `source` is a model as `estimate` takes it, a recording, or a placement problem; `how` is as
    `foretrace.plan.placement.source.of_model` says (device="h100", devices=4, memory_limit=None, link="", batch=None,
    precision="", training=True, size="full"). Without `contiguous`, a device may run several pieces of the graph.
    Raises ForetraceError where nothing fits, with what would.
    """
    from foretrace.plan.placement import problem as problems
    from foretrace.plan.placement.place import place as best
    from foretrace.plan.placement.source import of_model

    if problems.is_problem(Path(source)):
        found = problems.load(Path(source)).changed(**how)
    else:
        found = of_model(source, **how).problem()
    return best(found, objective=objective, contiguous=contiguous, seconds=seconds)


def pipeline(
    model: str, *, micro_batches: int, schedules: Sequence[str] = (), planner: str = "placement", **how: Any
) -> CutModel:
    """Cut a model into a stage per device by a planner, and simulate schedules; `how` and errors are as in `place`."""
    from foretrace.plan.pipelines.cut import cut
    from foretrace.plan.placement.source import of_model

    return cut(of_model(model, **how), micro_batches=micro_batches, names=schedules, planner=planner)


# === 3. fleet ================================================================================================


def fleet(log: str | Path, **how: Any) -> Scene:
    """Return many jobs on one cluster: a log of jobs, the cluster, the policy and the speeds, ready to `play`.

    `how` is as the fields of `foretrace.fleet.scene.Spec` say: cluster="2x4x8", policy="las", speeds="constant",
    jobs=0 (all), load=1.0, seed=0, and what moving, saving and failing cost. Raises ForetraceError.
    """
    from foretrace.fleet.scene import Spec, scene

    return scene(Spec(trace=str(log), **how))


# === 4. served ===============================================================================================
def simulate_llm(**how: Any) -> Simulated:
    """Return engines of a large language model under requests; `how` is as `SimulationConfig` of `serving.llm` says."""
    from foretrace.serving.llm.simulation import SimulationConfig, simulated

    return simulated(SimulationConfig(**how))


# --- in a notebook, a result shows what the command that asks the same prints ------------------------------

Found = TypeVar("Found")


def _shown(found: Found) -> Found:
    """Let notebooks show a result; the room that makes it knows nothing of reports."""
    kind: Any = type(found)
    if "_repr_html_" not in vars(kind):
        kind._repr_html_ = _html
        kind._repr_pretty_ = _pretty
    return found


def _html(found: object) -> str:
    from foretrace.report import notebook

    return notebook.html(found)


def _pretty(found: object, printer: Any, cycle: bool) -> None:
    from foretrace.report import notebook

    printer.text(notebook.text(found))
