"""`Scene`: everything a question about a fleet is asked of, made from what a user writes.

A `Spec` holds plain values only, so that it can be stored beside answers and sent to workers of a sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet import formats, policies
from foretrace.fleet.cluster import ClusterTree, parse_cluster
from foretrace.fleet.comparison import jitter
from foretrace.fleet.policies.registry import words_of
from foretrace.fleet.policy import Policy
from foretrace.fleet.result import FleetResult
from foretrace.fleet.setup import Costs, checkpoint_cost
from foretrace.fleet.simulate import simulate
from foretrace.fleet.speeds import Speeds
from foretrace.fleet.speeds.closed_form import ClosedFormSpeeds, ConstantSpeeds
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
    """Return the first `jobs`, denser by `load`, each shifted by up to `jitter_s`."""
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
    return jitter(workload, spec.seed, spec.jitter_s) if spec.jitter_s else workload


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
    first, *words = words_of("speeds", text, f"names no model of speed; there are {SPEEDS}")
    kind, _, value = first.partition("=")
    given: dict[str, str] = {}
    for word in words:
        key, equals, said = word.partition("=")
        if not equals or key in given:
            what = "is given twice" if key in given else "is no key=value"
            raise ForetraceError(f"`speeds={kind}`: {word!r} {what}; correct it.")
        given[key] = said
    makers: Mapping[str, Callable[[str, dict[str, str], ClusterTree], Speeds]] = {
        "constant": _constant,
        "closed-form": _closed_form,
        "table": _table,
        "throughputs": _throughputs,
        "goodput": _goodput,
        "graphs": _graphs,
    }
    kind = resolve(kind, makers) or kind
    if kind not in makers:
        raise ForetraceError(f"there is no model of speed {kind!r}; there are {SPEEDS}.")
    made = makers[kind](value, given, cluster)
    if given:
        raise ForetraceError(f"`speeds={kind}` has no {sorted(given)[0]!r}; see foretrace fleet run --help.")
    return made


def _constant(value: str, given: dict[str, str], cluster: ClusterTree) -> Speeds:
    if value:
        raise ForetraceError(f"`speeds=constant={value}`: constant takes nothing; write `speeds=constant`.")
    return ConstantSpeeds()


def _numbers(kind: str, key: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(each) for each in text.split(","))
    except ValueError:
        raise ForetraceError(f"`speeds={kind}`: {key}={text} is no list of numbers; write as in 300,50,25.") from None


def _closed_form(value: str, given: dict[str, str], cluster: ClusterTree) -> Speeds:
    parameters: dict[str, Any] = {}
    if "congestion" in given:
        parameters["congestion"] = _numbers("closed-form", "congestion", given.pop("congestion"))[0]
    if "latency-us" in given:
        parameters["latency_us"] = _numbers("closed-form", "latency-us", given.pop("latency-us"))
    if "compute" in given:
        said = given.pop("compute")
        named = said in ("full", "published")
        parameters["compute_scale"] = said if named else _numbers("closed-form", "compute", said)[0]
    if "unknown" in given:
        parameters["unknown"] = given.pop("unknown")
    if "gb-s" in given:
        rates = _numbers("closed-form", "gb-s", given.pop("gb-s"))
        if len(rates) != len(cluster.levels):
            raise ForetraceError(
                f"`speeds=closed-form`: gb-s has {len(rates)} bandwidths, the cluster {len(cluster.levels)} levels; "
                f"give one for each of {', '.join(cluster.levels)}, in GB/s."
            )
        return ClosedFormSpeeds(bandwidth_gb_s=rates, levels=cluster.levels, **parameters)
    return ClosedFormSpeeds.on(cluster, **parameters)


def _table(value: str, given: dict[str, str], cluster: ClusterTree) -> Speeds:
    from foretrace.fleet.speeds.table import TableSpeeds

    parameters: dict[str, Any] = {}
    if "reference" in given:
        parameters["reference_type"] = given.pop("reference")
    if "interpolate" in given:
        parameters["interpolate"] = given.pop("interpolate") in ("yes", "true")
    return TableSpeeds.read(value, levels=cluster.levels, **parameters)


def _throughputs(value: str, given: dict[str, str], cluster: ClusterTree) -> Speeds:
    from foretrace.fleet.speeds.throughputs import ThroughputTable

    table = ThroughputTable.read(value, reference=given.pop("reference", "v100"))
    if given.pop("pairs", "no") in ("yes", "true"):
        from foretrace.fleet.policies.packing import TablePairs

        return TablePairs(table=table)
    return table


def _goodput(value: str, given: dict[str, str], cluster: ClusterTree) -> Speeds:
    from foretrace.fleet.pollux.goodput import GoodputSpeeds

    adapt = given.pop("adapt", "no") in ("yes", "true")
    return GoodputSpeeds(Path(value), per_node=cluster.per_node, adapt=adapt)


def _graphs(value: str, given: dict[str, str], cluster: ClusterTree) -> Speeds:
    from foretrace.fleet.speeds.graph import GraphSpeeds

    links = given.pop("links", "")
    graphs = {name: Path(path) for name, path in given.items()}
    given.clear()
    if links:
        networks = links.split(",")
        if len(networks) != len(cluster.levels):
            raise ForetraceError(
                f"`speeds=graphs`: links has {len(networks)} networks, the cluster {len(cluster.levels)} levels; give "
                f"one for each of {', '.join(cluster.levels)}."
            )
        return GraphSpeeds(networks, graphs)
    return GraphSpeeds.on(cluster, graphs)


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
