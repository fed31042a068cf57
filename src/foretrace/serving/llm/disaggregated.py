"""Prompts on some engines and decoding on others: keys and values travel between them.

As DistServe (Zhong et al., OSDI 2024) and Splitwise (Patel et al., ISCA 2024): a request computes its prompt on an
engine of the first pool, which gives the first token; its keys and values go to an engine of the second pool, whose
scheduler lets it in as any other. Each device of an engine sends its own part, one request after the other; a transfer
is not overlapped with the prompt, and does not slow the engines down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.errors import ForetraceError
from foretrace.serving.llm.engine import EngineRules, Served, merged, simulate
from foretrace.serving.llm.pace import MIDDLE
from foretrace.serving.llm.step_times import StepTimes
from foretrace.serving.requests import Requests


def disaggregate(
    requests: Requests,
    steps: StepTimes,
    rules: EngineRules | None = None,
    *,
    prefill: int,
    decode: int,
    router: str = "round-robin",
    end: int = MIDDLE,
    on: str = "here",
) -> Served:
    """Serve requests with so many engines for prompts and so many for decoding; else as `simulate`.

    Raises:
        ForetraceError: as `simulate`, a pool is empty, the loop is closed, or nobody knows how fast caches travel.

    """
    if min(prefill, decode) < 1:
        raise ForetraceError(f"each pool must have an engine, got `prefill={prefill}` and `decode={decode}`.")
    if requests.concurrency:
        raise ForetraceError("prompts and decoding on engines of their own need open arrivals, not a closed loop.")
    if not steps.transfer_bytes_per_s > 0:
        raise ForetraceError(
            f"`transfer_bytes_per_s=` must be above 0 to send caches, got {steps.transfer_bytes_per_s}."
        )
    rules = rules or EngineRules()
    first = simulate(
        replace(requests, output=np.ones_like(requests.output)), steps, rules, replicas=prefill, router=router,
        end=end, on=on,
    )  # fmt: skip
    more = np.flatnonzero((requests.output > 1) & ~np.isnan(first.first_s))
    if not len(more):
        return replace(first, output=requests.output, replicas=prefill + decode)
    finish = np.where(requests.output > 1, np.nan, first.finish_s)
    arrival = _sent(first.first_s[more], requests.prompt[more], more % prefill, steps)
    order = np.argsort(arrival, kind="stable")
    more = more[order]
    empty = np.zeros(len(requests) + 1, np.int64)
    asked = replace(replace(requests, hash_first=empty, hashes=empty[:0]).take(more), arrival_s=arrival[order])
    second = simulate(
        asked, steps, rules, replicas=decode, router="round-robin" if router == "prefix-aware" else router, end=end,
        begun_s=first.first_s[more], on=on,
    )  # fmt: skip
    finish[more] = second.finish_s
    preempted = first.preempted.copy()
    preempted[more] += second.preempted
    both = merged([first, second], [np.arange(len(requests)), more], prefill + decode)
    return replace(
        both, arrival_s=requests.arrival_s, first_s=first.first_s, finish_s=finish, prompt=requests.prompt,
        output=requests.output, preempted=preempted,
    )  # fmt: skip


def _sent(ready_s: Float64, prompt: Int64, engine: Int64, steps: StepTimes) -> Float64:
    """Return when keys and values have arrived that were ready then; each engine sends one after the other.

    `engine` is whose they are: as round robin shares requests out, also where another router did.
    """
    takes = prompt * steps.kv_bytes_per_token / steps.transfer_bytes_per_s
    arrived = np.empty(len(ready_s))
    for each in np.unique(engine):
        rows = np.flatnonzero(engine == each)
        rows = rows[np.argsort(ready_s[rows], kind="stable")]
        work = np.cumsum(takes[rows])
        arrived[rows] = work + np.maximum.accumulate(ready_s[rows] - (work - takes[rows]))
    return arrived


def splits(engines: int) -> Sequence[tuple[int, int]]:
    """Return all ways to share out engines over the two pools. Raises ForetraceError where there are none."""
    if engines < 2:
        raise ForetraceError(f"two pools need two engines or more, got `replicas={engines}`.")
    return [(prefill, engines - prefill) for prefill in range(1, engines)]
