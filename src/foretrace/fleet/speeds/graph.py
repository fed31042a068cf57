"""`GraphSpeeds`: every job carries a recording of itself, and its speed in a placement is simulated from it.

A step of the recorded graph on one device, over the step that `data-parallel` predicts among the placement's GPUs. So
how much of the communication hides behind the backward pass comes out of the replay and is not assumed. Placements
that give the same collectives over the same networks share one simulation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.cluster import ClusterTree
from foretrace.fleet.speeds import Shape, Speed, alone, dimensions
from foretrace.fleet.speeds.closed_form import cluster_gbit_s
from foretrace.fleet.workload import Float64, Int64, Workload, codes

if TYPE_CHECKING:
    from foretrace.graph.taskgraph import TaskGraph
    from foretrace.simulate.timeline import Timeline
    from foretrace.techniques.base import Technique

LEVELS, RING = "levels", "ring"
_RECORDINGS = (".graph", ".json", ".gz", ".pb", ".zip", ".tar", ".tgz")


@dataclass(frozen=True, slots=True)
class Exchange:
    """How the gradients of one placement go around: (workers, network) of every dimension, innermost first."""

    dims: tuple[tuple[int, str], ...]

    @property
    def workers(self) -> int:
        """GPUs of all dimensions together."""
        return int(np.prod([size for size, _ in self.dims], dtype=np.int64))


class GraphSpeeds:
    """Speeds simulated from recordings, one simulation per (graph, kind of GPU, exchange); kept for the object's life.

    networks: what joins GPUs inside a unit of each level, innermost (a node) first, whole cluster last, each as
    `foretrace.cost.network.parse.network` reads it: a link ("2400gbit/3us"), a measured table, NCCL's model. graphs:
    graphs, or paths of graphs and recordings, by the `model` of the jobs; a model that is not in it is taken as such a
    path. scheme: "levels", reduce-scatter and all-gather inside, all-reduce across (`hierarchical-allreduce`), one
    bucket after the other unless options say backend=nccl; or "ring", one ring over all GPUs on the network of the
    widest level used. Uneven placements are such a ring always. gpu_types: techniques that turn the recording into one
    of that kind of GPU, e.g. {"h100": [FasterDevice(...)], "a100": []}; with it, other kinds are refused, without it,
    every kind is taken for the recorded one. options: further parameters of `data-parallel` (bucket_mb, gradient_mb,
    backend, transfer, ...).

    Progress is the recorded step on one device over the simulated one, times GPUs held over GPUs asked for: every GPU
    keeps the recorded batch. So a job's `work_s` is steps × `step_s(model)`. `Speed.communication` is the share of the
    simulated step in which messages are on the wire and nothing is computed. What else data-parallel costs (copies
    into buckets, waiting for the slowest worker) lowers progress only. Raises ForetraceError where a recording cannot
    be read or does not show its gradients, naming the model.
    """

    def __init__(
        self,
        networks: Sequence[str],
        graphs: Mapping[str, TaskGraph | Path | str] | None = None,
        *,
        scheme: str = LEVELS,
        gpu_types: Mapping[str, Sequence[Technique]] | None = None,
        options: Mapping[str, Any] | None = None,
        name: str = "recorded graphs",
    ) -> None:
        from foretrace.cost.network.parse import network

        if scheme not in (LEVELS, RING):
            raise ForetraceError(f"scheme={scheme} must be {LEVELS} or {RING}.")
        if not networks:
            raise ForetraceError("there is no network; give one per level, innermost first, e.g. 2400gbit and 100gbit.")
        for text in networks:
            network(text, 2)  # says now what cannot be read
        self.name = name
        self.networks = tuple(networks)
        self.scheme = scheme
        self.simulations = 0  # steps among several GPUs that were simulated so far
        self._graphs = dict(graphs or {})
        self._types = None if gpu_types is None else {kind: tuple(made) for kind, made in gpu_types.items()}
        self._options = dict(options or {})
        self._loaded: dict[str, TaskGraph] = {}
        self._on: dict[tuple[str, str], TaskGraph] = {}
        self._alone_s: dict[tuple[str, str], float] = {}
        self._among: dict[tuple[str, str, Exchange], tuple[float, float]] = {}
        self._said: dict[str, None] = {}

    @classmethod
    def on(
        cls,
        cluster: ClusterTree,
        graphs: Mapping[str, TaskGraph | Path | str] | None = None,
        *,
        latency_us: Sequence[float] = (),
        congestion: float = 1.0,
        **parameters: Any,
    ) -> GraphSpeeds:
        """Return it over links with the bandwidths that a cluster gives (gbit_s), latency per level 0 unless stated.

        congestion divides the bandwidth of all levels above the innermost. Raises ForetraceError where a level has no
        bandwidth.
        """
        rates = cluster_gbit_s(cluster)
        late = tuple(latency_us) or (0.0,) * len(rates)
        if len(late) != len(rates) or not all(0 <= each < float("inf") for each in late):
            raise ForetraceError(
                f"latencies must be microseconds, 0 or more, one for each of {', '.join(cluster.levels)}."
            )
        if not 1 <= congestion < float("inf"):
            raise ForetraceError(f"congestion={congestion} must be 1 (none) or more.")
        pairs = enumerate(zip(rates, late, strict=True))
        texts = [link_text(rate / (congestion if level else 1.0), us) for level, (rate, us) in pairs]
        return cls(texts, graphs, **parameters)

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the speeds asked so far rest on, one sentence each; more are added as more are asked."""
        found = [
            "every GPU keeps the recorded batch, and jobs do not share links.",
            "networks, innermost level first: " + ", ".join(self.networks) + ".",
        ]
        if self._types is None:
            found.append("every kind of GPU is as fast as the recorded device.")
        return (*found, *self._said)

    def kinds(self, workload: Workload) -> Int64:
        """Return (n,) equal for jobs of one recording and number of GPUs. Raises ForetraceError for a job without."""
        sources = {str(model): self._source(str(model)) for model in dict.fromkeys(workload.model.tolist())}
        most = np.maximum(workload.gpus, workload.max_gpus)
        keys = []
        for job, (model, gpus) in enumerate(zip(workload.model.tolist(), workload.gpus.tolist(), strict=True)):
            if sources[model] is None and (most[job] > 1 or self._types is not None):
                raise self._refusal(workload, job)
            keys.append((sources[model], gpus))
        return codes(keys)[0]

    def speed(self, workload: Workload, job: int, shape: Shape) -> Speed:
        """Return recorded step over simulated step, times GPUs held over GPUs asked for."""
        alone(self.name, shape)
        share = shape.gpus / int(workload.gpus[job])
        kind = self._kind(shape)
        if shape.gpus == 1 and self._types is None:
            return Speed(share)
        model = str(workload.model[job])
        source = self._source(model)
        if source is None:
            raise self._refusal(workload, job)
        try:
            step_s = self._step_alone_s(source, "")
            if shape.gpus == 1:
                return Speed(share * step_s / self._step_alone_s(source, kind))
            among_s, exposed = self._step_among(source, kind, self.exchange(shape), model)
        except ForetraceError as error:
            raise ForetraceError(f"model {model!r} of job {workload.job[job]!r}: {error}") from error
        return Speed(share * step_s / among_s, exposed)

    def interval(self, workload: Workload, job: int, shape: Shape) -> tuple[float, float]:
        """Return where `speed`'s progress lies in eight of ten cases: noise, and what both kinds of change assume.

        Raises ForetraceError as `speed` does.
        """
        from foretrace.techniques.whatif import whatif

        progress, kind = self.speed(workload, job, shape).progress, self._kind(shape)
        chain = [*(self._types or {}).get(kind, ()), *(self._chain(self.exchange(shape)) if shape.gpus > 1 else ())]
        if not chain:
            return progress, progress
        made = whatif(self._graph(str(self._source(str(workload.model[job]))), ""), chain)
        low, high = (end * made.before_s / made.after_s for end in made.ratio_interval)
        return progress / high, progress / low if low > 0 else inf

    def step_s(self, model: str) -> float:
        """Return median step of the recording behind a model on one device, in seconds. Raises ForetraceError."""
        source = self._source(model)
        if source is None:
            raise ForetraceError(f"there is no recording of the model {model!r}; name a graph or a recording.")
        return self._step_alone_s(source, "")

    def run_times(self, workload: Workload) -> Float64:
        """Return (n,) seconds of each job whose `iterations` are known, one recorded step each; nan else."""
        steps = {model: self.step_s(str(model)) for model in dict.fromkeys(workload.model.tolist())}
        times: Float64 = workload.iterations * np.array([steps[model] for model in workload.model.tolist()])
        return times

    def exchange(self, shape: Shape) -> Exchange:
        """Return how gradients go around among the GPUs of this shape (2 or more)."""
        if len(shape.units) != len(self.networks):
            raise ForetraceError(
                f"the cluster has {len(shape.units)} levels and networks are given for {len(self.networks)}; give one "
                "per level, innermost first."
            )
        dims = dimensions(shape) if self.scheme == LEVELS else ((shape.level - 1, shape.gpus),)
        return Exchange(tuple((size, self.networks[level]) for level, size in dims))

    # --- simulated once --------------------------------------------------------------------------------------

    def _step_alone_s(self, source: str, kind: str) -> float:
        from foretrace.simulate.timeline import simulate

        if (source, kind) not in self._alone_s:
            self._alone_s[source, kind] = simulate(self._graph(source, kind)).step_time_s
        return self._alone_s[source, kind]

    def _step_among(self, source: str, kind: str, exchange: Exchange, model: str) -> tuple[float, float]:
        """Return (step in seconds, share of it in which communication is exposed)."""
        key = (source, kind, exchange)
        if key not in self._among:
            timeline = self._simulated(self._graph(source, kind), exchange, model)
            self.simulations += 1
            step_s = timeline.step_time_s
            self._among[key] = step_s, timeline.breakdown().median_s()["exposed_communication"] / step_s
        return self._among[key]

    def _chain(self, exchange: Exchange) -> list[Technique]:
        from foretrace.techniques.distributed.data_parallel import DataParallel
        from foretrace.techniques.distributed.hierarchical_allreduce import HierarchicalAllreduce

        sizes, texts = zip(*exchange.dims, strict=True)
        # One communicator takes one bucket after the other through all levels, which is how `messages` plans gloo's.
        # Groups of their own per level (nccl's plan) overlap, and what overlaps can get slower by a faster network.
        options = {"backend": "gloo", **self._options} if len(sizes) > 1 else self._options
        chain: list[Technique] = [DataParallel(workers=exchange.workers, network=texts[-1], **options)]
        if len(sizes) > 1:
            chain.append(HierarchicalAllreduce(levels="x".join(map(str, sizes)), networks=";".join(texts)))
        return chain

    def _simulated(self, graph: TaskGraph, exchange: Exchange, model: str) -> Timeline:
        from foretrace.simulate.timeline import simulate

        changed = graph
        for technique in self._chain(exchange):
            changed = technique.predict(changed)
        self._note(model, changed, len(graph.assumptions))
        return simulate(changed)

    def _note(self, model: str, changed: TaskGraph, known: int) -> None:
        """Note what this prediction took for granted."""
        buckets = changed.info.recording["distributed"]["buckets"]
        given = "stated" if self._options.get("gradient_mb") else "from the recording"
        what = f"{sum(buckets) / 1e6:.4g} MB of gradients in {len(buckets)} bucket{'s' * (len(buckets) != 1)}"
        self._said[f"{model}: {what}, {given}."] = None
        for each in changed.assumptions[known:]:
            number = f"{each.value:.4g} ({each.low:.4g} to {each.high:.4g}) {each.unit}".rstrip()
            self._said[f"{model}: {each.technique}, {each.name} {number}: {each.why}."] = None

    # --- recordings ------------------------------------------------------------------------------------------

    def _kind(self, shape: Shape) -> str:
        """Return what tells graphs of different kinds of GPU apart; "" where all are the recorded one."""
        if self._types is None:
            return ""
        if shape.gpu_type not in self._types:
            known = ", ".join(map(repr, self._types)) or "none"
            raise ForetraceError(
                f"gpu_types says nothing of GPUs of kind {shape.gpu_type!r} (it has {known}); add the techniques that "
                "lead there from the recording, none where it is the recorded kind."
            )
        return shape.gpu_type

    def _source(self, model: str) -> str | None:
        """Return what tells recordings apart: where each lies, or its name among those given; None unknown."""
        given = self._graphs.get(model)
        if given is None:
            try:
                found = model.endswith(_RECORDINGS) and Path(model).is_file()
            except (OSError, ValueError):  # too long for a path, or a zero byte in it
                found = False
            if not found:
                return None
            given = Path(model)
        if isinstance(given, str | Path):
            return str(Path(given).resolve())
        return f"graph {id(given)}"

    def _graph(self, source: str, kind: str) -> TaskGraph:
        """Return the recording on a kind of GPU; as it is for ""."""
        if (source, kind) not in self._on:
            if source not in self._loaded:
                kept = (each for each in self._graphs.values() if not isinstance(each, str | Path))
                self._loaded[source] = next((g for g in kept if f"graph {id(g)}" == source), None) or _load(
                    Path(source)
                )
            graph = self._loaded[source]
            for technique in (self._types or {}).get(kind, ()) if kind else ():
                graph = technique.predict(graph)
            self._on[source, kind] = graph
        return self._on[source, kind]

    def _refusal(self, workload: Workload, job: int) -> ForetraceError:
        known = ", ".join(self._graphs) or "none are named"
        return ForetraceError(
            f"job {workload.job[job]!r} is of the model {workload.model[job]!r}, which is neither a named recording "
            f"({known}) nor a file; name the graph or recording of that model."
        )


def link_text(gbit_s: float, latency_us: float = 0.0) -> str:
    """Return a link as `foretrace.cost.network.parse.network` reads it."""
    rate, late = (f"{each:.9f}".rstrip("0").rstrip(".") for each in (gbit_s, latency_us))
    return f"{rate}gbit/{late}us" if latency_us else f"{rate}gbit"


def _load(path: Path) -> TaskGraph:
    """Return a graph from its file, or built from a recording without the cost of having been recorded."""
    from foretrace.graph.builder import build
    from foretrace.graph.store import MAGIC, load
    from foretrace.simulate.overhead import unprofiled
    from foretrace.trace.read import read

    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                return load(path)
    return unprofiled(build(read(path)))
