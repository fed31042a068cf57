"""The published Tiresias simulator, event by event, so that its answers can be had exactly.

Source of the mechanism: SymbioticLab/Tiresias, simulator, revision 959f9b0 (NSDI'19).
Time is whole seconds. A job has all its GPUs or none, and preemption costs nothing.

Order of things at one moment: completions, then arrivals in order of the file, then one pass that gives out GPUs.

fifo, fjf: no preemption; fifo stops at the first job that does not fit, fjf passes over it.
sjf, shortest, shortest-gpu, shortest-expected: at every event all active jobs are sorted (GPUs; remaining seconds;
remaining GPU seconds; remaining seconds as samples of other jobs let expect), ties keep the order of the last event,
and GPUs are given out anew, passing over what does not fit.
dlas, dlas-gpu: three queues, limits 3,250 and 7,200 of executed seconds (or executed seconds x GPUs), one step down
per event; queues are served in order, passing over what does not fit; afterwards waiting jobs of a queue move behind
running ones. dlas-gpu-N promotes a job to the first queue once it has waited N x its executed seconds.
dlas-gpu-gittins: the same, each queue sorted by the Gittins rank over samples of GPU time (option `samples`).

What the original does on failure, and what happens here:
- `gittins` stops with a TypeError on any input (its samples are never stored where the rank looks): refused here.
- dlas-gpu-gittins-N tests its name for exactly "dlas-gpu-gittins" and so never ranks: it is dlas-gpu-N, also here.
- dlas keeps the completions of an arrival's moment even if a queue crossing before it changes who runs. Such jobs end
  although they are not done (`facts["early_ends"]`); where they have ended already, the original stops with a
  ValueError, here they are left out (`facts["stale_ends"]`).
- shortest-expected writes new estimates to the job that arrived last, whichever job ran; so here.
- dlas ignores the placement scheme. `yarn` under shortest never returns memory of jobs that are placed anew, so that
  nodes run out of it and jobs stay for ever; so here.
- The program asks for Python 2.7, where the time to the next crossing of dlas-gpu is rounded down (a job is looked at
  too early, then again later than its true crossing); option `python` = "3" rounds up as Python 3 would.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from foretrace import reading
from foretrace.errors import ForetraceError
from foretrace.fleet.result import FleetResult
from foretrace.fleet.workload import LONGEST_S, SECOND, Workload
from reproductions.results import simple
from reproductions.tiresias.cluster import NEVER, Cluster, Count, Job, Scheme, Yarn
from reproductions.tiresias.events import Queues, Samples, in_order, shortest

PROMOTING = {"05": 0.5, "1": 1, "2": 2, "4": 4, "8": 8, "10": 10, "100": 100, "1000": 1000}


class Tiresias:
    """The published simulator; options: scheme (count, yarn), python (2.7, 3), samples (file of GPU times)."""

    name = "tiresias"
    policies: tuple[str, ...] = (
        "fifo", "fjf", "sjf", "shortest", "shortest-gpu", "shortest-expected", "dlas", "dlas-gpu",
        *(f"dlas-gpu-{n}" for n in PROMOTING), "dlas-gpu-gittins", *(f"dlas-gpu-gittins-{n}" for n in (1, 2, 4, 8)),
    )  # fmt: skip
    default_cluster = "1x32x4"

    def run(
        self, workload: Workload, *, policy: str, cluster: str, seed: int, options: Mapping[str, str]
    ) -> FleetResult:
        """Simulate; `seed` is not used, nothing here is drawn. facts: the original's counters per job, (n,) int64.

        Raises ForetraceError for an unknown policy, cluster or option, for times that are not whole seconds, and where
        a file of samples is wanted and cannot be found.
        """
        self._check(policy, options)
        tree = Cluster.read(cluster)
        python3 = options.get("python", "2.7") == "3"
        jobs = _jobs(workload)
        scheme: Scheme = Yarn(tree) if options.get("scheme", "count") == "yarn" else Count(tree.total)
        facts: dict[str, object] = {"scheme": options.get("scheme", "count")}
        samples = None
        if policy in ("shortest-expected", "dlas-gpu-gittins"):
            path = _samples_file(workload, options)
            samples = Samples(_read_samples(path), python3)
            facts["samples"] = str(path)
        if policy in ("fifo", "fjf"):
            events = in_order(jobs, scheme, skip=policy == "fjf")
        elif policy.startswith("dlas"):
            tail = policy.rpartition("-")[2]
            queues = Queues(
                jobs, tree.total, policy != "dlas", PROMOTING.get(tail, 0), samples, python3
            )  # fmt: skip
            events = queues.run()
            facts |= {"early_ends": queues.early, "stale_ends": queues.stale}
        else:
            events = shortest(jobs, scheme, _KEYS[policy], samples)
        return _result(workload, jobs, policy, cluster, tree.total, facts, events)

    def _check(self, policy: str, options: Mapping[str, str]) -> None:
        if policy == "gittins":
            raise ForetraceError(
                "the published program stops with an error in its policy gittins, so there is no answer to"
                " agree with; take dlas-gpu-gittins."
            )
        if policy not in self.policies:
            raise ForetraceError(f"tiresias has no policy {policy!r}; choose one of {', '.join(self.policies)}.")
        allowed = {"scheme": ("count", "yarn"), "python": ("2.7", "3"), "samples": None}
        for key, value in options.items():
            if key not in allowed:
                raise ForetraceError(f"tiresias has no option {key!r}; there are {', '.join(allowed)}.")
            among = allowed[key]
            if among is not None and value not in among:
                raise ForetraceError(f"option {key}={value} is unknown; write one of {', '.join(among)}.")


_KEYS: dict[str, Callable[[Job], float]] = {
    "sjf": lambda job: job.gpus,
    "shortest": lambda job: job.remaining,
    "shortest-gpu": lambda job: job.remaining * job.gpus,
    "shortest-expected": lambda job: job.expected,
}


def _jobs(workload: Workload) -> list[Job]:
    where = workload.origin.path or workload.name or "workload"
    seconds, rest = np.divmod(workload.submit_ns, SECOND)
    duration = np.floor(workload.work_s)  # the original cuts fractions of a duration off
    for bad, why in (
        (rest != 0, "is submitted at a fraction of a second"),
        (np.isnan(workload.work_s), "has no duration"),
        (duration < 1, "lasts less than a second"),
    ):
        if bad.any():
            job = workload.job[int(np.flatnonzero(bad)[0])]
            raise ForetraceError(
                f"{where}: job {job!r} {why}, and tiresias counts whole seconds; change or leave it out."
            )
    return [
        Job(at, gpus, submit, int(lasts))
        for at, (gpus, submit, lasts) in enumerate(
            zip(workload.gpus.tolist(), seconds.tolist(), duration.tolist(), strict=True)
        )
    ]


def _samples_file(workload: Workload, options: Mapping[str, str]) -> Path:
    if "samples" in options:
        return Path(options["samples"])
    beside = Path(workload.origin.path or ".").parent
    for folder in (beside, beside.parent, beside.parent / "tiresias"):
        if (folder / "yarn-gput1000.csv").is_file():
            return folder / "yarn-gput1000.csv"
    raise ForetraceError("this policy learns from GPU times of past jobs; name a file by -o samples=FILE.csv.")


def _read_samples(path: Path) -> list[int]:
    try:
        rows = csv.DictReader(io.StringIO(reading.read_text(path), newline=""))
        seconds = [int(row["duration"]) for row in rows]
    except (KeyError, TypeError, ValueError, csv.Error):
        seconds = []
    if len(seconds) < 2 or min(seconds) < 1 or max(seconds) > LONGEST_S:
        raise ForetraceError(
            f"{path}: samples of GPU time are two or more whole seconds under the head 'duration'; give such a file."
        )
    return seconds


def _result(
    workload: Workload, jobs: list[Job], policy: str, cluster: str, gpus: int, facts: dict[str, object], events: int
) -> FleetResult:
    def column(of: Callable[[Job], int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array([of(job) for job in jobs], np.int64)

    counters = {
        "preempt": column(lambda job: job.preempted),
        "resume": column(lambda job: job.resumed),
        "promote": column(lambda job: job.promoted),
        "pending_s": column(lambda job: job.pending),
    }
    return simple(
        workload,
        policy=policy,
        cluster=cluster,
        gpus=gpus,
        start_ns=column(lambda job: -1 if job.start == NEVER else job.start * SECOND),
        end_ns=column(lambda job: -1 if job.end < 0 else job.end * SECOND),
        held_ns=column(lambda job: job.total * SECOND),
        starts=column(lambda job: max(job.resumed, int(job.start != NEVER))),
        preempted=counters["preempt"],
        never=workload.gpus > gpus,
        facts=facts | counters,
        events=events,
    )
