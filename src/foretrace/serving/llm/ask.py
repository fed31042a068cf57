"""`Serving`: what a user asks of a simulated engine; `simulated` answers it, with ranges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.serving.llm.deployment import step_times
from foretrace.serving.llm.disaggregated import disaggregate, splits
from foretrace.serving.llm.engine import DoesNotFitError, EngineRules, Served, simulate
from foretrace.serving.llm.metrics import ServingFigures, goodput, measure
from foretrace.serving.llm.pace import HIGH, LOW, MIDDLE
from foretrace.serving.llm.slo import Limit, limits
from foretrace.serving.llm.step_times import StepTimes
from foretrace.serving.requests import Requests, of, requests

DRAWS = 3  # of drawn requests, for the range
MOST_DRAWN = 200_000  # requests above which one draw is as good as any
_MOST_SHARED = 64  # devices that are tried for a model that does not fit


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A question.

    Attributes:
        model: a decoder by name or `config.json`.
        device: a name of the catalog.
        asked: requests, as `requests.requests` reads them.
        seconds: how long they come; 0: all of a trace.
        layout: of one engine and how its step times are known: further arguments of `step_times`.
        rules: of its scheduler.
        replicas: engines.
        router: of ROUTERS.
        pools: "" for engines that do both, "2:6" for two that compute prompts and six that decode, "best" to try all.
        slo: limits, as `slo.limits` reads them.
        seed: of what is drawn.
        log: steps of the first engine to keep.
        on: "here" or "ray".

    """

    model: str
    device: str
    asked: str
    seconds: float = 0.0
    layout: dict[str, Any] = field(default_factory=dict)
    rules: EngineRules = field(default_factory=EngineRules)
    replicas: int = 1
    router: str = "round-robin"
    pools: str = ""
    slo: str = ""
    seed: int = 0
    log: int = 0
    on: str = "here"


@dataclass(frozen=True, kw_only=True)
class PoolSplit:
    """Engines for prompts and for decoding, and what they answer within the limits (all, without limits)."""

    prefill: int
    decode: int
    goodput: float
    ttft_p50_s: float
    tpot_p50_s: float


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The answer: `run` is what was asked, `figures` have the ranges of all runs."""

    ask: Serving
    requests: Requests
    steps: StepTimes
    limits: tuple[Limit, ...]
    run: Served
    runs: int
    figures: ServingFigures
    split: PoolSplit | None
    tried: tuple[PoolSplit, ...]


def simulated(ask: Serving) -> Simulated:
    """Simulate engines under requests.

    Raises:
        ForetraceError: with the sentence that says what is wrong: a model that does not fit and what would hold it, a
            limit that not even an empty engine keeps, requests that cannot be.

    """
    steps, found = step_times(ask.model, ask.device, **ask.layout), limits(ask.slo)
    asked = requests(ask.asked, seconds=ask.seconds, seed=ask.seed)
    try:
        ask.rules.blocks(steps, int(asked.prompt.max()))
    except DoesNotFitError as error:
        raise ForetraceError(f"{error}; {_would_fit(ask, int(asked.prompt.max()))}.") from None
    _check_possible(ask, asked, steps, found)
    tried = [_tried(ask, asked, steps, pools, found) for pools in _pools(ask)]
    best = max(tried, key=lambda each: (each.goodput, -each.ttft_p50_s)) if tried else None
    run = _run(ask, asked, steps, best)
    if np.isnan(run.finish_s).all():
        most = run.blocks * ask.rules.block
        raise ForetraceError(f"no request fits: {most:,} tokens fit into the cache; use more devices (`tp=`, `pp=`).")
    runs = [run]
    draws = DRAWS if asked.drawn and len(asked) <= MOST_DRAWN else 1
    for draw in range(draws):
        again = requests(ask.asked, seconds=ask.seconds, seed=ask.seed + draw)
        runs += [_run(replace(ask, log=0), again, steps, best, end) for end in (LOW, HIGH)]
    return Simulated(
        ask=ask, requests=asked, steps=steps, limits=found, run=run, runs=len(runs),
        figures=measure(runs, steps, found), split=best, tried=tuple(tried),
    )  # fmt: skip


def _run(ask: Serving, asked: Requests, steps: StepTimes, split: PoolSplit | None, end: int = MIDDLE) -> Served:
    if split is not None:
        found = disaggregate(
            asked, steps, ask.rules, prefill=split.prefill, decode=split.decode, router=ask.router, end=end, on=ask.on
        )
    else:
        found = simulate(
            asked, steps, ask.rules, replicas=ask.replicas, router=ask.router, end=end, log=ask.log, on=ask.on
        )
    return replace(found, request_s=steps.request_s)


def _pools(ask: Serving) -> Sequence[tuple[int, int]]:
    if not ask.pools or ask.pools == "best":
        return splits(ask.replicas) if ask.pools else ()
    first, _, second = ask.pools.partition(":")
    if not (first.isdecimal() and second.isdecimal() and len(ask.pools) < 12 and int(first) and int(second)):
        raise ForetraceError(f"`pools={ask.pools}` must be engines for prompts and for decoding as 2:6, or best.")
    if ask.replicas not in (1, int(first) + int(second)):
        raise ForetraceError(f"`pools={ask.pools}` are {int(first) + int(second)} engines, `replicas={ask.replicas}`.")
    return [(int(first), int(second))]


def _tried(
    ask: Serving, asked: Requests, steps: StepTimes, pools: tuple[int, int], found: Sequence[Limit]
) -> PoolSplit:  # fmt: skip
    prefill, decode = pools
    run = disaggregate(asked, steps, ask.rules, prefill=prefill, decode=decode, router=ask.router, on=ask.on)
    figures = measure([run], steps, found)
    ttft, tpot = figures.ttft_s.p50.value, figures.tpot_s.p50.value
    return PoolSplit(prefill=prefill, decode=decode, goodput=goodput(run, found), ttft_p50_s=ttft or 0.0,
                 tpot_p50_s=tpot or 0.0)  # fmt: skip


def _would_fit(ask: Serving, longest: int) -> str:
    """Which number of tensor-parallel devices would hold the model."""
    shared = 2 * int(ask.layout.get("tp", 1))
    while shared <= _MOST_SHARED:
        try:
            ask.rules.blocks(step_times(ask.model, ask.device, **(ask.layout | {"tp": shared})), longest)
        except DoesNotFitError:
            shared *= 2
        except ForetraceError:  # it cannot be divided so
            break
        else:
            return f"`tp={shared}` is the smallest number of devices that holds it"
    return "no number of tensor-parallel devices holds it: use more stages (`pp=`) or a device with more memory"


def _check_possible(ask: Serving, asked: Requests, steps: StepTimes, found: Sequence[Limit]) -> None:
    """Raise ForetraceError where even the shortest request alone, with the quickest steps, exceeds a limit."""
    prompt, output = int(asked.prompt.min()), int(max(asked.output.min(), 2))
    alone = simulate(of([0.0], [prompt], [output]), steps, ask.rules, end=LOW)
    figures = measure([alone], steps)
    for limit in found:
        least = getattr(getattr(figures, f"{limit.latency}_s"), limit.of).value
        if least is not None and least > limit.seconds:
            raise ForetraceError(
                f"`slo={limit.name}={limit.seconds:g}s` cannot be kept: a prompt of {prompt:,} tokens alone on an "
                f"engine takes {least:.3g} s at the least; allow more, or use quicker devices."
            )
