"""`Scene`: everything a question about a fleet is asked of, made from what a user writes.

A `Spec` holds plain values only, so that it can be stored beside answers and sent to workers of a sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet import formats, policies
from foretrace.fleet.cluster import ClusterTree, parse_cluster
from foretrace.fleet.comparison import jitter
from foretrace.fleet.policies.packing import TablePairs
from foretrace.fleet.policies.registry import arguments, words_of
from foretrace.fleet.policies.slurm_options import tasks_of
from foretrace.fleet.policy import Policy
from foretrace.fleet.result import FleetResult
from foretrace.fleet.setup import Costs, checkpoint_cost
from foretrace.fleet.simulate import simulate
from foretrace.fleet.speeds import Speeds
from foretrace.fleet.speeds.closed_form import ClosedFormSpeeds, ConstantSpeeds
from foretrace.fleet.speeds.table import TableSpeeds
from foretrace.fleet.speeds.throughputs import ThroughputTable
from foretrace.fleet.workload import FARTHEST_S, SECOND, Int64, Workload
from foretrace.names import resolve

DEFAULT_CLUSTER = "4x4x8"
RECORD_UP_TO = 20_000  # jobs for which it is cheap to keep who ran where
SPEEDS = "constant, closed-form, table=FILE, throughputs=FILE, goodput=FOLDER, graphs MODEL=RECORDING"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """What to play, in a user's words. `jobs`: the first so many in order of submission (0 all)."""

    trace: str
    format: str = "auto"
    salvage: bool = False
    jobs: int = 0
    cluster: str = DEFAULT_CLUSTER
    add: int = 0  # further outermost units
    policy: str = "fifo"
    speeds: str = "constant"
    restart_s: float = 0.0
    restart_s_per_gpu: float = 0.0
    checkpoint_s: float = 0.0
    checkpoint_gb: str = ""  # MODEL=GB,...: a restart of these models takes what moving their state takes
    storage_gb_s: float = 2.0
    mtbf_h: float = 0.0
    mttr_h: float = 1.0
    load: float = 1.0  # arrivals so many times as dense
    jitter_s: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A workload, a cluster, a policy, speeds and costs, ready to play."""

    workload: Workload
    cluster: ClusterTree
    policy: Policy
    speeds: Speeds
    costs: Costs
    seed: int = 0

    def play(self, **options: Any) -> FleetResult:
        """Return `simulate` with options `record`, `explain`, `until_s`, `max_events`."""
        return simulate(
            self.workload, self.cluster, self.policy, speeds=self.speeds, costs=self.costs, seed=self.seed, **options
        )


def scene(spec: Spec) -> Scene:
    """Read and combine; raises ForetraceError for whatever cannot be."""
    workload = shaped(workload_of(spec.trace, spec.format, salvage=spec.salvage), spec)
    cluster = cluster_of(spec.cluster)
    if spec.add:
        cluster = cluster.bigger(spec.add)
    speeds = parse_speeds(spec.speeds, cluster)
    moved = _moved(spec)
    for model, _ in moved:
        if not (workload.model == model).any():
            known = ", ".join(dict.fromkeys(each for each in workload.model.tolist() if each)) or "no model"
            raise ForetraceError(f"`checkpoint_gb=`: no job trains {model!r}; the log has {known[:200]}.")
    return Scene(
        workload=timed(workload, speeds),
        cluster=cluster,
        policy=policies.parse(spec.policy),
        speeds=speeds,
        costs=Costs(
            restart_s=spec.restart_s,
            restart_s_per_gpu=spec.restart_s_per_gpu,
            restart_s_by_model=moved,
            checkpoint_s=spec.checkpoint_s,
            mtbf_h=spec.mtbf_h,
            mttr_h=spec.mttr_h,
        ),
        seed=spec.seed,
    )


def played(scene: Scene, workload: Workload) -> FleetResult:
    """Return another workload in the same scene."""
    return replace(scene, workload=workload).play()


def _moved(spec: Spec) -> tuple[tuple[str, float], ...]:
    """Return restarts by model, from the size of a checkpoint: written, read again, and `restart_s` besides."""
    found = []
    for part in filter(None, spec.checkpoint_gb.split(",")):
        model, equals, size = part.rpartition("=")
        try:
            gb = float(size)
        except ValueError:
            gb = float("nan")
        if not equals or not model or not 0 <= gb < float("inf"):
            raise ForetraceError(f"`checkpoint_gb={part}`: write MODEL=GB, as in bert=12,resnet50=0.3.")
        rate = spec.storage_gb_s
        if not 0 < rate < float("inf"):
            raise ForetraceError(f"`storage_gb_s={rate:g}` is no bandwidth; give GB/s above 0.")
        found.append((model, checkpoint_cost(gb * 1e9, write_gb_s=rate, read_gb_s=rate, start_s=spec.restart_s)))
    return tuple(found)


def workload_of(path: str, format: str = "auto", *, salvage: bool = False) -> Workload:
    """Return the jobs of a log; the last few that were read are kept."""
    try:
        changed = Path(path).stat().st_mtime_ns
    except (OSError, ValueError):
        changed = 0  # reading it says why
    return _read(path, format, salvage, changed)


@lru_cache(maxsize=4)
def _read(path: str, format: str, salvage: bool, changed: int) -> Workload:
    return formats.read(path, format, salvage=salvage)


def shaped(workload: Workload, spec: Spec) -> Workload:
    """Return the first `jobs`, denser by `load`, each shifted by up to `jitter_s`; of an array every task is one."""
    if spec.jobs < 0:
        raise ForetraceError(f"`jobs={spec.jobs}` takes none; give a number above 0, or leave it out for all.")
    if spec.jobs and spec.jobs < len(workload):
        workload = workload.take(np.arange(spec.jobs))
    if not (np.isfinite(spec.load) and spec.load > 0):
        raise ForetraceError(f"`load={spec.load:g}` is no load; 2 lets jobs come twice as densely.")
    if spec.load != 1:
        first = workload.submit_ns.min() if len(workload) else 0
        after = workload.submit_ns - first
        if (after > FARTHEST_S * SECOND * spec.load).any():
            raise ForetraceError(f"`load={spec.load:g}` spreads the jobs over centuries; give a number nearer to 1.")
        denser = first + np.rint(after / spec.load).astype(np.int64)
        workload = workload.with_columns(submit_ns=denser)
    if not (np.isfinite(spec.jitter_s) and spec.jitter_s >= 0):
        raise ForetraceError(f"`jitter_s={spec.jitter_s:g}` is no time; give seconds from 0 up.")
    return tasks_of(jitter(workload, spec.seed, spec.jitter_s) if spec.jitter_s else workload)


def cluster_of(text: str) -> ClusterTree:
    """Return a cluster from its short form, YAML, or a file of a scheduler (topology.conf, nodes)."""
    path = Path(text)
    if path.is_file() or path.suffix in (".conf", ".csv", ".json", ".gz", ".txt"):
        return formats.read_cluster(path)
    return parse_cluster(text)


def timed(workload: Workload, speeds: Speeds) -> Workload:
    """Return it with run times from the table of speeds where the log says iterations only."""
    unknown = np.isnan(workload.work_s)
    reckon: Callable[[Workload], Any] | None = getattr(speeds, "run_times", None)
    if not unknown.any() or reckon is None:
        return workload
    work = np.where(unknown, reckon(workload), workload.work_s)
    made = replace(workload, work_s=work)
    made.validate()
    return made


def parse_speeds(text: str, cluster: ClusterTree) -> Speeds:
    """Return a model of speed from `constant`, `closed-form gb-s=300,50,25 congestion=10 compute=full
    unknown=uniform:0`, `table=FILE`, `throughputs=FILE`, `goodput=FOLDER` or `graphs NAME=RECORDING ...
    links=2400gbit,400gbit`.
    """
    words = words_of("speeds", text, f"names no model of speed; there are {SPEEDS}")
    said, given, _ = words[0].partition("=")
    kind = resolve(said, _MODELS) or said
    if kind == "graphs":
        return _graphs(cluster, words[1:])
    if kind not in _MODELS:
        raise ForetraceError(f"there is no model of speed {said!r}; there are {SPEEDS}.")
    return _MODELS[kind](cluster, **arguments(_MODELS[kind], words[not given :], f"`speeds={kind}`"))


def _constant(cluster: ClusterTree, /) -> Speeds:
    return ConstantSpeeds()


def _closed_form(
    cluster: ClusterTree, /, *, gb_s: tuple[float, ...] = (), latency_us: tuple[float, ...] = (),
    congestion: float = 1.0, compute: str = "full", unknown: str = "refuse",
) -> Speeds:  # fmt: skip
    try:
        scale: str | float = float(compute)
    except ValueError:
        scale = compute
    given: dict[str, Any] = {
        "latency_us": latency_us, "congestion": congestion, "compute_scale": scale, "unknown": unknown,
    }  # fmt: skip
    if not gb_s:
        return ClosedFormSpeeds.on(cluster, **given)
    if len(gb_s) != len(cluster.levels):
        raise ForetraceError(
            f"`speeds=closed-form`: gb-s has {len(gb_s)} bandwidths, the cluster {len(cluster.levels)} levels; "
            f"give one for each of {', '.join(cluster.levels)}, in GB/s."
        )
    return ClosedFormSpeeds(bandwidth_gb_s=gb_s, levels=cluster.levels, **given)


def _table(cluster: ClusterTree, /, *, table: str, reference: str | None = None, interpolate: bool = False) -> Speeds:
    return TableSpeeds.read(table, levels=cluster.levels, reference_type=reference, interpolate=interpolate)


def _throughputs(cluster: ClusterTree, /, *, throughputs: str, reference: str = "v100", pairs: bool = False) -> Speeds:
    return (TablePairs if pairs else ThroughputTable).read(throughputs, reference=reference)


def _goodput(cluster: ClusterTree, /, *, goodput: str, adapt: bool = False) -> Speeds:
    from foretrace.fleet.pollux.goodput import GoodputSpeeds

    return GoodputSpeeds(Path(goodput), per_node=cluster.per_node, adapt=adapt)


_MODELS: Mapping[str, Callable[..., Speeds]] = {
    "constant": _constant, "closed-form": _closed_form, "table": _table, "throughputs": _throughputs,
    "goodput": _goodput,
}  # fmt: skip


def _graphs(cluster: ClusterTree, words: Sequence[str]) -> Speeds:
    from foretrace.fleet.speeds.graph import GraphSpeeds

    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key in given:
            what = "is given twice" if key in given else "is no key=value"
            raise ForetraceError(f"`speeds=graphs`: {word!r} {what}; correct it.")
        given[key] = value
    networks = given.pop("links", "").split(",")
    graphs = {name: Path(path) for name, path in given.items()}
    if networks == [""]:
        return GraphSpeeds.on(cluster, graphs)
    if len(networks) != len(cluster.levels):
        raise ForetraceError(
            f"`speeds=graphs`: links has {len(networks)} networks, the cluster {len(cluster.levels)} levels; give "
            f"one for each of {', '.join(cluster.levels)}."
        )
    return GraphSpeeds(networks, graphs)


def measured(text: str, workload: Workload) -> Int64 | None:
    """Return positions of the jobs to measure: `4000-4999` by name where names are numbers; None for all."""
    if not text:
        return None
    low, dash, high = text.partition("-")
    if not (low.isdecimal() and (high.isdecimal() if dash else not high)):
        raise ForetraceError(f"`measure={text}`: write the first and last job, as in 4000-4999.")
    first, last = int(low), int(high or low)
    chosen = [at for at, name in enumerate(workload.job) if str(name).isdecimal() and first <= int(name) <= last]
    if not chosen:
        raise ForetraceError(f"`measure={text}`: no job has such a number; jobs are called {workload.job[0]}, ...")
    return np.array(chosen, np.int64)
