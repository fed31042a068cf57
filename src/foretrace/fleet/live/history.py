"""How long jobs run: what the history of the same user's jobs, and the time limit, say about one that waits or runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foretrace.fleet.formats import read
from foretrace.fleet.formats.slurm_cluster import pairs
from foretrace.fleet.formats.source import load
from foretrace.fleet.live.records import QueuedJob, job_of, stamp
from foretrace.fleet.workload import Float64

MOST_ROWS = 4000  # the latest
# How much more a past job counts for each thing that it shares with the one asked about, and how many past jobs the
# guess from the limit alone counts for. PRIOR and DRIFT were chosen on workloads that are not scored, for ranges that
# hold a little over 80 % (`reproductions/slurm_live`).
SAME = {"user": 30.0, "account": 30.0, "name": 10.0, "limit": 6.0, "gpus": 2.0}
PRIOR = 1.0
DRIFT = 0.8  # standard deviation of the logarithm of how much a user's jobs run longer today than in the history
ENDED = ("COMPLETED", "TIMEOUT", "FAILED", "OUT_OF_MEMORY")  # by itself; others say little about how long it would run
AT_LIMIT = 0.1  # of the guess: jobs that run into their limit; the others end anywhere below it, in proportion


def stem(name: str) -> str:
    """Return the name of a job without the numbers that tell runs of it apart."""
    return re.sub(r"\d+", "#", name)


def read_past(path: str | Path) -> list[QueuedJob]:
    """Return past jobs of jobcomp/filetxt, or of any log (docs/fleet-formats.md). Raises ForetraceError."""
    source = load(path)
    if not (source.first.startswith("JobId=") and "JobState=" in source.first and "EndTime=" in source.first):
        log = read(path)
        account, name = log.details.get("account", log.tenant), log.details.get("name", log.model)
        rows = zip(log.job, log.user, account, name, log.gpus, log.estimate_s, log.work_s, strict=True)
        return ended(
            QueuedJob(job=str(j), state="COMPLETED", user=str(u), account=str(a), name=str(n), gpus=int(g),
                      limit_s=float(limit), ran_s=float(ran))
            for j, u, a, n, g, limit, ran in rows
        )  # fmt: skip
    found = []
    for said in pairs(source.text, "JobId"):
        try:
            ran = stamp(said["EndTime"]) - stamp(said["StartTime"])
        except (KeyError, ValueError):
            where = said.get("JobId", "")[:20]
            raise source.fail(f"job {where!r} has no times; is this the file of jobcomp/filetxt?") from None
        named = {"JobName": said.get("Name", ""), "TRES": said.get("Tres", ""), "NodeList": ""}
        found.append(replace(job_of(said | named), ran_s=ran))
    return ended(found)


def ended(jobs: Iterable[QueuedJob]) -> list[QueuedJob]:
    """Return those that ended by themselves, the latest."""
    return [each for each in jobs if each.state in ENDED and each.ran_s > 0][-MOST_ROWS:]


def with_queue(past: Sequence[QueuedJob], jobs: Iterable[QueuedJob]) -> list[QueuedJob]:
    """Return past jobs and those of a queue that ended by themselves, each once, as the queue has it."""
    shown = ended(jobs)
    known = {each.job for each in shown}
    return [*(each for each in past if each.job not in known or not each.job), *shown]


def drawn(
    jobs: Sequence[QueuedJob], past: Sequence[QueuedJob], draws: int, random: np.random.Generator
) -> Float64:  # fmt: skip
    """Return (draws, jobs) run times in seconds, each above what the job has run already and at most its limit.

    A draw is a run time of a past job, the more likely the more it shares (`SAME`), or a share of the limit. Jobs that
    run now count, too: each passes its weight on to the past jobs that ran longer (Efron's redistribution to the right,
    1967), so that a burst of long jobs of which only short ones have ended is not taken for one of short jobs. Within a
    draw past jobs carry random weights (Rubin's Bayesian bootstrap, 1981), and each user's run times a common factor
    (`DRIFT`), the same for all jobs: what is not known of a user is not known of all of that user's jobs alike.
    """
    past = list(past)[-MOST_ROWS:]
    ran = np.array([max(each.ran_s, 1.0) for each in past])
    going = [job for job in jobs if job.running]
    columns = np.array([_said(each) for each in (*past, *going)], object).reshape(-1, len(SAME))
    elapsed = np.array([each.ran_s for each in going])
    noise = random.exponential(size=(draws, len(past)))
    own = PRIOR * random.exponential(size=draws)
    factors: dict[tuple[object, ...], Float64] = {}
    alike: dict[tuple[object, ...], Float64] = {}
    made = np.empty((draws, len(jobs)))
    for at, job in enumerate(jobs):
        key = _said(job)
        if key not in alike:
            alike[key] = _weights(key, columns, ran, elapsed)
        if key[:2] not in factors:
            factors[key[:2]] = np.exp(DRIFT * random.standard_normal((draws, 1)) - DRIFT**2 / 2)
        limit = max(job.limit_s, job.ran_s + 1.0)
        least = job.ran_s if job.running else 0.0
        guess = _of_limit(least, limit, random, draws)
        if len(past):
            times = ran * factors[key[:2]]
            sums = np.cumsum(noise * alike[key] * (times > least), axis=1)
            point = random.random(draws) * (sums[:, -1] + own)
            picked = (sums < point[:, None]).sum(axis=1)
            found = np.take_along_axis(times, np.minimum(picked, len(past) - 1)[:, None], axis=1)[:, 0]
            guess = np.where(picked < len(past), found, guess)
        made[:, at] = np.clip(guess, min(least + 1.0, limit), limit)
    return made


def _said(job: QueuedJob) -> tuple[object, ...]:
    """Return what two jobs may share, in the order of `SAME`."""
    return (job.user, job.account, stem(job.name), job.limit_s, job.gpus)


def _weights(
    key: tuple[object, ...], columns: npt.NDArray[np.object_], ran: Float64, elapsed: Float64
) -> Float64:  # fmt: skip
    """Return (past,) how much each past job counts for `key`; rows of `columns`: past jobs, then running ones."""
    same = columns == np.array(key, object)
    weight = np.prod(np.where(same, list(SAME.values()), 1.0), axis=1)
    whole, kept = weight.max(initial=1.0), weight[: len(ran)].copy()
    for each in np.argsort(elapsed, kind="stable"):
        longer = kept * (ran > elapsed[each])
        if longer.sum() > 0:
            kept += weight[len(ran) + each] * longer / longer.sum()
    made: Float64 = kept / whole
    return made


def _of_limit(elapsed: float, limit: float, random: np.random.Generator, draws: int) -> Float64:
    """Return run times where only the limit is known: anywhere between what it has run and the limit, or the limit."""
    low, high = max(elapsed, 1.0), max(min(limit, 1e8), elapsed + 1.0)
    share = random.random(draws)
    anywhere = low + (high - low) * share if limit < 1e8 else low / (1 - 0.999 * share)
    return np.where(random.random(draws) < AT_LIMIT, high, anywhere)
