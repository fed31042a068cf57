"""How long jobs run: what the history of the same user's jobs, and the time limit, say about one that waits or runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foretrace.fleet.formats import read
from foretrace.fleet.formats.source import load
from foretrace.fleet.live.records import gpus_in, pairs, stamp
from foretrace.fleet.live.snapshot import QueuedJob
from foretrace.fleet.workload import Float64, Workload

MOST_ROWS = 4000  # the latest
# How much more a past job counts for each thing that it shares with the one asked about, and how many past jobs the
# guess from the limit alone counts for. Chosen on the workloads of `reproductions/slurm_live` that are not scored.
SAME = {"user": 30.0, "account": 30.0, "name": 10.0, "limit": 6.0, "gpus": 2.0}
PRIOR = 2.0
ENDED = ("COMPLETED", "TIMEOUT", "FAILED", "OUT_OF_MEMORY")  # by itself; others say little about how long it would run
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
    job: str = ""  # its number, where that is known


def stem(name: str) -> str:
    """The name of a job without the numbers that tell runs of it apart."""
    return re.sub(r"\d+", "#", name)


def read_past(path: str | Path) -> list[PastJob]:
    """Past jobs of a file of Slurm's jobcomp/filetxt, or of any log of jobs (docs/fleet-formats.md). ForetraceError."""
    source = load(path)
    if not (source.first.startswith("JobId=") and "JobState=" in source.first and "EndTime=" in source.first):
        return of_log(read(path))
    found = []
    for said in pairs(source.text, "JobId"):
        if said.get("JobState") not in ENDED:
            continue
        try:
            ran = stamp(said["EndTime"]) - stamp(said["StartTime"])
            limit = float(said["TimeLimit"]) * 60 if said.get("TimeLimit", "").isdecimal() else math.inf
        except (KeyError, ValueError):
            where = said.get("JobId", "")[:20]
            raise source.fail(f"job {where!r} has no times; is this the file of jobcomp/filetxt?") from None
        if ran > 0:
            user, gpus = re.sub(r"\(.*", "", said.get("UserId", "")), gpus_in(said.get("Tres", ""))
            account, name = (said.get(key, "") for key in ("Account", "Name"))
            found.append(
                PastJob(user=user, account=account, name=name, gpus=gpus, limit_s=limit, ran_s=ran, job=said["JobId"])
            )
    return found[-MOST_ROWS:]


def of_log(log: Workload) -> list[PastJob]:
    """The jobs of a log that ended."""
    account = log.details.get("account", log.tenant)
    name = log.details.get("name", log.model)
    rows = zip(log.user, account, name, log.gpus, log.estimate_s, log.work_s, log.job, strict=True)
    return [
        PastJob(user=str(u), account=str(a), name=str(n), gpus=int(g), limit_s=float(e), ran_s=float(w), job=str(j))
        for u, a, n, g, e, w, j in rows
        if np.isfinite(w)
    ][-MOST_ROWS:]


def with_queue(past: Sequence[PastJob], jobs: Iterable[QueuedJob]) -> list[PastJob]:
    """Past jobs, and those of a queue that ended by themselves, are still shown, and are not among them."""
    known = {each.job for each in past}
    ended = [each for each in jobs if each.state in ENDED and each.ran_s > 0 and each.job not in known]
    made = [
        PastJob(user=j.user, account=j.account, name=j.name, gpus=j.gpus, limit_s=j.limit_s, ran_s=j.ran_s, job=j.job)
        for j in ended
    ]
    return [*past, *made]


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
    share = random.random(draws)
    anywhere = low + (high - low) * share if limit < 1e8 else low / (1 - 0.999 * share)
    return np.where(random.random(draws) < AT_LIMIT, high, anywhere)
