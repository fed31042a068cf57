"""Jobs for the rig: run times and users of the Philly trace on a clock of its own, with time limits as users set them.

The trace has no time limits. Each user (virtual cluster) has one limit per size of job, as users do (Tsafrir, Etsion,
Feitelson, JSSPP 2005): a quantile of that user's earlier run times, 75 to 95 % by user, times 1 to 2, rounded up to a
usual value. A job that would run longer ends at its limit. Limits come from the first part of the trace, the history;
the jobs that are played come from behind it.
"""

from __future__ import annotations

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np

USUAL_MIN = (1, 2, 3, 4, 5, 6, 8, 10, 15)
SCALE, SHORTEST_S, LONGEST_S, LARGEST = 60.0, 4.0, 240.0, 32  # a second of the rig is a minute of the trace
USERS = 8


@dataclass(frozen=True, slots=True)
class RigJob:
    """One job: submission (seconds after the first), user, GPUs, run time in seconds, limit in minutes."""

    submit_s: float
    user: str
    gpus: int
    run_s: float
    limit_min: int


def jobs(
    trace: Path, *, count: int, load: float, gpus: int, seed: int, part: tuple[float, float] = (0.6, 1.0)
) -> tuple[list[RigJob], list[RigJob]]:
    """(to play, history): users, sizes and run times of the trace, more of its larger jobs than of its small ones.

    Submissions are uniform at random, so that the work offered is `load` of the GPUs. `part` of the trace is played;
    what lies before it is the history.
    """
    random = np.random.default_rng(seed)
    with gzip.open(trace, "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["num_gpus"] and float(row["duration"]) > 0]
    rows.sort(key=lambda row: row["timestamp"])
    names = [row["cluster"] for row in rows]
    frequent = sorted(set(names), key=lambda name: -names.count(name))[:USERS]
    kept = [
        (row["cluster"], int(row["num_gpus"]), float(row["duration"]) / SCALE)
        for row in rows
        if row["cluster"] in frequent
        and int(row["num_gpus"]) in (1, 2, 4, 8, 16, LARGEST)
        and SHORTEST_S <= float(row["duration"]) / SCALE <= LONGEST_S  # whole seconds still tell, and runs end today
    ]
    # one in twelve of those with one GPU, which are 93 % of the trace and hardly wait for each other
    kept = [each for each in kept if each[1] > 1 or random.random() < 1 / 12]
    begin, end = (int(len(kept) * share) for share in part)
    past, later = kept[:begin], kept[begin:end]
    limits = _limits(past, np.random.default_rng(7))
    first = int(random.integers(0, max(len(later) - 4 * count, 1)))
    # within a stretch of the trace users come and go as they did; every third job is left to others
    chosen = [later[first + int(i)] for i in np.sort(random.choice(4 * count, count, replace=False))]
    whole = [_job(0.0, *each, limits) for each in chosen]
    lasts = sum(each.gpus * each.run_s for each in whole) / gpus / load
    times = np.sort(random.random(count)) * lasts
    played = [_job(float(at), *each, limits) for at, each in zip(times, chosen, strict=True)]
    return played, [_job(0.0, *each, limits) for each in past]


def _limits(past: list[tuple[str, int, float]], random: np.random.Generator) -> dict[tuple[str, int], int]:
    found = {}
    for user, gpus in sorted({each[:2] for each in past}):
        runs = [each[2] for each in past if each[:2] == (user, gpus)]
        wanted = float(np.quantile(runs, random.choice([0.75, 0.85, 0.95]))) * random.uniform(1, 2) / 60
        found[user, gpus] = next((each for each in USUAL_MIN if each >= wanted), USUAL_MIN[-1])
    return found


def _job(submit: float, user: str, gpus: int, run: float, limits: dict[tuple[str, int], int]) -> RigJob:
    limit = limits.get((user, gpus), 10)
    return RigJob(submit, user, gpus, min(run, limit * 60.0 - 1), limit)


def as_sacct(past: list[RigJob]) -> str:
    """The history as `sacct -P` prints it."""
    lines = ["JobID|User|Account|Partition|State|Submit|Start|End|ElapsedRaw|TimelimitRaw|ReqTRES"]
    for i, job in enumerate(past):
        stamp = f"2026-{1 + i // 2000 % 12:02d}-{1 + i // 100 % 20:02d}T00:"
        end = f"{int(job.run_s) // 60:02d}:{int(job.run_s) % 60:02d}"
        lines.append(
            f"{100000 + i}|root|{job.user}|all|COMPLETED|{stamp}00:00|{stamp}00:00|{stamp}{end}|{int(job.run_s)}|"
            f"{job.limit_min}|gres/gpu={job.gpus}"
        )
    return "\n".join(lines) + "\n"
