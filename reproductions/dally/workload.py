"""The 500 jobs of the Dally study made anew by seed: the published job list has no licence, its marginals are facts.

Known (fleet-scheduling 2.8): how many jobs there are of each model and of each number of GPUs, and the sum of ideal run
time × GPUs. Not known here: which model goes with which number of GPUs, and how the work is spread over jobs. Taken
instead: all three independent, and GPU-seconds of work log-normal, its standard deviation a parameter that is varied.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.workload import Float64, Origin, Workload

MODELS = {"mobilenetv3": 125, "bert": 125, "resnet50": 125, "alexnet": 53, "resnet18": 38, "vgg": 34}
DEMANDS = {1: 270, 8: 109, 4: 52, 16: 42, 2: 13, 32: 11, 40: 1, 48: 1, 56: 1}
JOBS = 500
GPU_HOURS = 13_054.0
# Standard deviation of the logarithm of a job's GPU-seconds. 1.5: the largest job has 7 % of all work. At that of the
# run times in the Philly trace (2.16) it has 17 %, and every makespan is the run time of one job; both are run.
SPREAD = 1.5
PHILLY_SPREAD = 2.16
PER_DAY = {"100/day": 100.0, "100/week": 100.0 / 7}
LOADS: tuple[str, ...] = ("all-at-0", *PER_DAY)


def published_like(
    load: str = "100/day", *, largest: int | None = None, spread: float = SPREAD, draw: int = 0
) -> Workload:
    """500 jobs with the published marginals. `work_s` is the ideal run time: GPU-seconds of work over GPUs.

    load: "all-at-0", or "100/day" and "100/week", Poisson arrivals of that rate. largest: jobs that ask for more GPUs
    ask for so many, with their work unchanged. spread: standard deviation of log work; the work of the jobs is the
    quantiles of that distribution at (i + ½) / 500, scaled to 13,054 GPU-hours, so that only who has how much is drawn.
    draw: seed of what goes with what and of arrivals. Raises ForetraceError for an unknown load or a negative spread.
    """
    if load not in LOADS:
        raise ForetraceError(f"there is no load {load!r}; there are {', '.join(LOADS)}.")
    if not 0 <= spread < 10 or (largest is not None and largest < 1):
        raise ForetraceError("the spread of work is from 0 to 10, and the largest job asks for 1 GPU or more.")
    random = np.random.default_rng([draw, 0x64616C])
    model = random.permutation(np.repeat(list(MODELS), list(MODELS.values())))
    gpus = random.permutation(np.repeat(list(DEMANDS), list(DEMANDS.values())))
    gpu_s = random.permutation(quantiles(spread))
    submit = np.zeros(JOBS)
    if load in PER_DAY:
        submit = np.cumsum(random.exponential(86400 / PER_DAY[load], JOBS))
        submit -= submit[0]
    if largest is not None:
        gpus = np.minimum(gpus, largest)
    return Workload.of(
        submit_s=submit,
        gpus=gpus,
        work_s=gpu_s / gpus,
        model=model.tolist(),
        name=f"500 jobs, {load}" + (f", none above {largest} GPUs" if largest else ""),
        origin=Origin(format="generated", rows=JOBS, notes=("made from published marginals",)),
    )


def quantiles(spread: float) -> Float64:
    """(500,) GPU-seconds of work, ascending, 13,054 GPU-hours in all."""
    normal = NormalDist()
    score = np.array([normal.inv_cdf((i + 0.5) / JOBS) for i in range(JOBS)])
    weight = np.exp(spread * score)
    scaled: Float64 = weight / weight.sum() * GPU_HOURS * 3600
    return scaled


def consecutive(log: Workload, *, jobs: int, gpus_from: int = 1, draw: int = 0) -> Workload:
    """So many consecutive jobs from the middle of a log, from time zero, each with one of the six models at random.

    gpus_from: only jobs of so many GPUs or more. draw: seed of the models, all equally likely (logs name none).
    Raises ForetraceError where there are not so many jobs.
    """
    wide = log.take((log.gpus >= gpus_from) & np.isfinite(log.work_s))
    if len(wide) < jobs:
        raise ForetraceError(
            f"{log.origin.path or log.name} has {len(wide):,} jobs with {gpus_from} GPUs or more, and {jobs:,} are "
            "needed; name a longer trace."
        )
    first = (len(wide) - jobs) // 2
    part = wide.take(np.arange(first, first + jobs))
    random = np.random.default_rng([draw, 0x6C6F67])
    gone = np.full(jobs, -1, np.int64)
    return part.with_columns(
        submit_ns=part.submit_ns - part.submit_ns[0],
        model=random.choice(np.array(list(MODELS), object), jobs),
        tenant=np.full(jobs, "", object),
        logged_start_ns=gone,
        logged_end_ns=gone,
    )
