"""The published Gavel simulator: its policies in its round mechanism, on job lists and measured speeds.

Source of the mechanism: stanford-futuredata/gavel, scheduler/policies and scheduler.py, revision c4fa400 (OSDI'20);
oracles in fleet-scheduling.md 7.3. The rounds, and the oddities that are kept, are in `gavel_rounds`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.result import FleetResult
from foretrace.fleet.speeds.throughputs import ThroughputTable
from foretrace.fleet.workload import Workload, nanoseconds
from reproductions.gavel.policies import ALLOTTERS
from reproductions.gavel.rounds import OFFERED, ROUND, Allotter, Member, Outcome, Rounds
from reproductions.results import simple

FILE = "simulation_throughputs.json"  # what the original's drivers read unless told otherwise, physical traces included


class Gavel:
    """The published simulator. Options:

    profiles: throughput file; else simulation_throughputs.json[.gz] beside the job list or in the folder above it.
    window: A:B, measure jobs A to B - 1 (numbered by arrival) and stop when they are done; else all jobs.
    round: seconds of a round (360). alpha: of AlloX (1).
    """

    name = "gavel"
    policies: tuple[str, ...] = tuple(ALLOTTERS)
    default_cluster = "36:36:36"

    def run(
        self, workload: Workload, *, policy: str, cluster: str, seed: int, options: Mapping[str, str]
    ) -> FleetResult:
        """Simulate on `v100:p100:k80` GPUs. facts: utilisation and average_jct_s as the original prints them.

        Raises ForetraceError for an unknown policy, cluster or option, for a job without steps or speeds, and where no
        throughput file is found.
        """
        for key in options:
            if key not in ("profiles", "window", "round", "alpha"):
                raise ForetraceError(f"gavel has no option {key!r}; there are profiles, window, round and alpha.")
        if policy not in ALLOTTERS:
            raise ForetraceError(f"gavel has no policy {policy!r}; choose one of {', '.join(self.policies)}.")
        workers = _cluster(cluster)
        path = _profiles(workload, options)
        table = ThroughputTable.read(path)
        jobs = _jobs(workload, workers, cluster)
        window = _window(options.get("window"), len(jobs))
        allotter = ALLOTTERS[policy](seed, _above_zero(options, "alpha", 1.0))
        if policy == "allox" and (workload.gpus > 1).any():
            raise ForetraceError("allox is for jobs on one GPU; leave the others out or take another policy.")
        rounds = Rounds(jobs, table, workers, allotter, seed, window, _above_zero(options, "round", ROUND))
        return _result(workload, policy, cluster, workers, rounds.run(), window, str(path), allotter)


def _cluster(text: str) -> dict[str, int]:
    parts = text.split(":")
    if len(parts) != 3 or not all(part.strip().isdigit() for part in parts) or not any(map(int, parts)):
        raise ForetraceError(f"cluster {text!r} is not written V100S:P100S:K80S, such as 36:36:36.")
    return dict(zip(OFFERED, map(int, parts), strict=True))


def _profiles(workload: Workload, options: Mapping[str, str]) -> Path:
    if "profiles" in options:
        return Path(options["profiles"])
    folder = Path(workload.origin.path or ".").parent
    for place in (folder, folder.parent):
        for name in (FILE, FILE + ".gz"):
            if (place / name).is_file():
                return place / name
    raise ForetraceError(f"no {FILE} beside the jobs or in the folder above; name one by -o profiles=FILE.")


def _jobs(workload: Workload, workers: Mapping[str, int], cluster: str) -> list[Member]:
    where = workload.origin.path or workload.name or "workload"
    for bad, why in (
        (~(workload.iterations > 0), "does not say how many steps it has"),
        (workload.gpus > max(workers.values()), f"asks for more GPUs than any one type of {cluster} has"),
    ):
        if bad.any():
            raise ForetraceError(
                f"{where}: job {workload.job[int(np.flatnonzero(bad)[0])]!r} {why}; mend it or leave it out."
            )
    weights = np.where(workload.priority > 0, workload.priority, 1.0)
    return [
        Member(at, model, gpus, steps, submit / 1e9, weight)
        for at, (model, gpus, steps, submit, weight) in enumerate(
            zip(
                workload.model.tolist(), workload.gpus.tolist(), workload.iterations.tolist(),
                workload.submit_ns.tolist(), weights.tolist(), strict=True,
            )
        )
    ]  # fmt: skip


def _window(text: str | None, jobs: int) -> range | None:
    if text is None:
        return None
    first, colon, last = text.partition(":")
    if not colon or not first.isdigit() or not last.isdigit() or not int(first) < int(last) <= jobs:
        raise ForetraceError(f"window {text!r} is not written FIRST:BEHIND_LAST within the {jobs} jobs.")
    return range(int(first), int(last))


def _above_zero(options: Mapping[str, str], key: str, default: float) -> float:
    try:
        value = float(options.get(key, default))
    except ValueError:
        value = float("nan")
    if not 0 < value < float("inf"):
        raise ForetraceError(f"option {key}={options[key]} must be a number above zero.")
    return value


def _result(
    workload: Workload,
    policy: str,
    cluster: str,
    workers: Mapping[str, int],
    out: Outcome,
    window: range | None,
    profiles: str,
    allotter: Allotter,
) -> FleetResult:
    def instants(seconds: list[float]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        values = np.array(seconds, np.float64)
        return np.where(np.isnan(values), -1, nanoseconds(np.nan_to_num(values)))

    gpus = sum(workers.values())
    end = np.array(out.end, np.float64)
    starts = np.array(out.starts, np.int64)
    held = nanoseconds(np.array(out.held, np.float64))
    measured = np.arange(len(end)) if window is None else np.arange(window.start, window.stop)
    jct = (end - workload.submit_ns / 1e9)[measured]
    facts: dict[str, object] = {
        "profiles": profiles,
        "average_jct_s": float(jct[~np.isnan(jct)].mean()) if (~np.isnan(jct)).any() else float("nan"),
        "utilisation": out.busy / (gpus * out.now) if out.now > 0 else float("nan"),
        "rounds": out.rounds,
        "allotments": out.allotments,
        "arrived": out.arrived,
        "total_s": out.now,
        "given_up": tuple(str(workload.job[at]) for at in out.given_up),
    }
    if window is not None:
        facts["window"] = f"{window.start}:{window.stop}"
    return simple(
        workload,
        policy=policy,
        cluster=cluster,
        gpus=gpus,
        start_ns=instants(out.start),
        end_ns=instants(out.end),
        held_ns=held,
        gpu_ns=(held - nanoseconds(np.array(out.shared, np.float64)) / 2.0) * workload.gpus,
        starts=starts,
        preempted=np.maximum(starts - 1, 0),
        facts=facts,
        stopped_ns=int(nanoseconds(out.now)) if window is not None else None,
        events=out.rounds,
    )
