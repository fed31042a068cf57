"""How long jobs run: what the history of the same user's jobs, and the time limit, say about one that waits or runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from foretrace.fleet.live.snapshot import QueuedJob
from foretrace.fleet.workload import Float64, Workload

MOST_ROWS = 4000  # the latest
# How much more a past job counts for each thing that it shares with the one asked about, and how many past jobs the
# guess from the limit alone counts for. Chosen on the workloads of `reproductions/slurm_live` that are not scored.
SAME = {"user": 30.0, "account": 30.0, "name": 10.0, "limit": 6.0, "gpus": 2.0}
PRIOR = 2.0
AT_LIMIT = 0.1  # of the guess: jobs that run into their limit; the others end anywhere below it, in proportion


@dataclass(frozen=True, slots=True, kw_only=True)
class PastJob:
    """A job that ended: who, what it asked for, and how long it ran, seconds."""

    user: str
    account: str
    name: str
    gpus: int
    limit_s: float
    ran_s: float


def stem(name: str) -> str:
    """The name of a job without the numbers that tell runs of it apart."""
    return re.sub(r"\d+", "#", name)


def of_log(log: Workload) -> list[PastJob]:
    """The jobs of a log that ended."""
    account = log.details.get("account", log.tenant)
    name = log.details.get("name", log.model)
    rows = zip(log.user, account, name, log.gpus, log.estimate_s, log.work_s, strict=True)
    return [
        PastJob(user=str(u), account=str(a), name=str(n), gpus=int(g), limit_s=float(e), ran_s=float(w))
        for u, a, n, g, e, w in rows
        if np.isfinite(w)
    ][-MOST_ROWS:]


def of_queue(jobs: Iterable[QueuedJob]) -> list[PastJob]:
    """Those of a queue that ended by themselves and are still shown."""
    return [
        PastJob(user=j.user, account=j.account, name=j.name, gpus=j.gpus, limit_s=j.limit_s, ran_s=j.ran_s)
        for j in jobs
        if j.state in ("COMPLETED", "TIMEOUT", "FAILED", "OUT_OF_MEMORY") and j.ran_s > 0
    ]


def drawn(
    jobs: Sequence[QueuedJob], limits_s: Float64, past: Sequence[PastJob], draws: int, random: np.random.Generator
) -> Float64:
    """(draws, jobs) run times in seconds, each above what the job has run already and at most its limit.

    A draw is a run time of a past job, the more likely the more it shares (`SAME`), or a share of the limit. Within a
    draw past jobs carry random weights (Rubin's Bayesian bootstrap, 1981), the same for all jobs, so that what is not
    known of a user is not known of all of that user's jobs alike.
    """
    past = list(past)[-MOST_ROWS:]
    ran = np.array([max(each.ran_s, 1.0) for each in past])
    columns = {
        "user": [each.user for each in past], "account": [each.account for each in past],
        "name": [stem(each.name) for each in past], "limit": [each.limit_s for each in past],
        "gpus": [each.gpus for each in past],
    }  # fmt: skip
    rows = {key: np.array(values, object) for key, values in columns.items()}
    noise = random.exponential(size=(draws, len(past)))
    own = random.exponential(size=draws)
    made = np.empty((draws, len(jobs)))
    alike: dict[tuple[object, ...], Float64] = {}
    for at, job in enumerate(jobs):
        key = (job.user, job.account, stem(job.name), float(limits_s[at]), job.gpus)
        if key not in alike:
            weight = np.ones(len(past))
            for (column, factor), value in zip(SAME.items(), (*key[:3], key[3], key[4]), strict=True):
                weight[rows[column] == value] *= factor
            alike[key] = weight / max(weight.max(initial=0.0), 1.0)
        limit, elapsed = float(limits_s[at]), job.ran_s
        can = ran > elapsed if job.running else np.ones(len(past), bool)
        where = np.flatnonzero(can)
        weight = alike[key][where]
        guess = _of_limit(elapsed, limit, random, draws)
        if len(where):
            sums = np.cumsum(noise[:, where] * weight, axis=1)
            whole = sums[:, -1] + PRIOR * own
            point = random.random(draws) * whole
            picked = np.array([np.searchsorted(row, p) for row, p in zip(sums, point, strict=True)])
            inside = picked < len(where)
            guess = np.where(inside, ran[where[np.minimum(picked, len(where) - 1)]], guess)
        made[:, at] = np.clip(guess, min(elapsed + 1.0, max(limit, elapsed + 1.0)), max(limit, elapsed + 1.0))
    return made


def _of_limit(elapsed: float, limit: float, random: np.random.Generator, draws: int) -> Float64:
    """Where nothing is known but the limit: anywhere between what it has run and the limit, or the limit itself."""
    low, high = max(elapsed, 1.0), max(min(limit, 1e8), elapsed + 1.0)
    anywhere = low + (high - low) * random.random(draws) if limit < 1e8 else low * (1 / (1 - random.random(draws) * 0.999))
    return np.where(random.random(draws) < AT_LIMIT, high, anywhere)
