"""Gavel's generator of jobs, draw for draw, so that a seed gives the list of jobs that it gives there.

Source of the mechanism: stanford-futuredata/gavel, scheduler/utils.py and scheduler.py, revision c4fa400 (OSDI'20).
Two generators of random numbers are used: seed + 2 draws jobs, seed + 3 draws the times between arrivals. What is drawn
does not depend on how jobs are scheduled, so that a list of any length can be made ahead.
"""

from __future__ import annotations

import math
import random

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.speeds.throughputs import ThroughputTable
from foretrace.fleet.workload import Origin, Workload

# What is drawn from: models by batch size, and whether they may run on several GPUs.
_CATALOG = (
    ("ResNet-18", (16, 32, 64, 128, 256), True),
    ("ResNet-50", (16, 32, 64, 128), True),
    ("Transformer", (16, 32, 64, 128, 256), True),
    ("LM", (5, 10, 20, 40, 80), True),
    ("Recommendation", (512, 1024, 2048, 4096, 8192), False),
)
TEMPLATES: tuple[tuple[str, bool], ...] = (
    *((f"{model} (batch size {size})", several) for model, sizes, several in _CATALOG for size in sizes),
    ("A3C", False),
    ("CycleGAN", False),
)


def generate(
    table: ThroughputTable,
    *,
    seed: int,
    mean_interarrival_s: float,
    jobs: int,
    several_gpus: bool = False,
    priorities: bool = False,
    duration_s: float | None = None,
) -> Workload:
    """The first `jobs` jobs of a seed; the first arrives at 0.

    mean_interarrival_s: what Gavel calls lambda; 0 lets all arrive at once. several_gpus: one, two, four or eight GPUs
    as in the Philly log, else one. priorities: a fifth of the jobs weighs 5. duration_s: every job lasts as long on its
    GPUs of the reference type, else it is drawn log-uniformly from 32 min to 17 h (four of five) or 17 h to 167 h.

    Columns: model (job type), gpus (scale factor), iterations (steps, not whole), work_s (duration on the reference
    type), priority (weight). Raises ForetraceError where an argument cannot be, or the table lacks a job type.
    """
    if jobs < 1 or mean_interarrival_s < 0 or not math.isfinite(mean_interarrival_s):
        raise ForetraceError(
            "a generated workload needs at least one job and a mean time between arrivals of 0 or more."
        )
    if duration_s is not None and not duration_s > 0:
        raise ForetraceError("the duration of generated jobs must be above zero seconds.")
    draws, gaps = random.Random(seed + 2), random.Random(seed + 3)
    arrivals, models, gpus, steps, durations, weights = [], [], [], [], [], []
    arrival = 0.0
    for _ in range(jobs):
        size = _size(draws)
        duration = _duration(draws) if duration_s is None else duration_s
        size = size if several_gpus else 1
        model, distributed = draws.choice(TEMPLATES)
        while size > 1 and not distributed:
            model, distributed = draws.choice(TEMPLATES)
        models.append(model)
        gpus.append(size)
        durations.append(duration)
        steps.append(duration * table.rate(table.reference, model, size))
        weights.append(5.0 if priorities and draws.uniform(0, 1) <= 0.2 else 1.0)
        arrivals.append(arrival)
        if mean_interarrival_s:
            arrival = -math.log(1.0 - gaps.random()) / (1.0 / mean_interarrival_s) + arrival
    return Workload.of(
        submit_s=arrivals,
        gpus=gpus,
        work_s=durations,
        model=models,
        iterations=steps,
        priority=weights,
        name=f"gavel seed {seed}",
        origin=Origin(path=table.path, format="gavel-generated", rows=jobs),
        details={"slo": np.full(jobs, np.nan), "mode": np.full(jobs, "static", object)},
    )


def _size(draws: random.Random) -> int:
    at = draws.uniform(0, 1)
    return 8 if at > 0.95 else 4 if at > 0.8 else 2 if at >= 0.7 else 1


def _duration(draws: random.Random) -> float:
    low, high = (3.0, 4.0) if draws.random() >= 0.8 else (1.5, 3.0)
    return float(60 * (10 ** draws.uniform(low, high)))
