"""`SimulationConfig`: engines and the requests that they serve; `simulated` gives figures of them, with ranges."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from foretrace.errors import ForetraceError
from foretrace.serving.llm.deployment import beside, step_times
from foretrace.serving.llm.drafted import drafted_steps, read_draft
from foretrace.serving.llm.engine import DoesNotFitError, EngineRules, Served, disaggregate, simulate
from foretrace.serving.llm.metrics import Limit, ServingFigures, goodput, latency_statistics, limits, measure
from foretrace.serving.llm.served_model import served_model
from foretrace.serving.llm.step_times import HIGH, LOW, MIDDLE, StepTimes
from foretrace.serving.requests import Requests, of, requests
from foretrace.techniques.compute.acceptance import Acceptance

DRAWS = 3  # of drawn requests, for the range
MOST_DRAWN = 200_000  # requests above which one draw is as good as any
_MOST_SHARED = 64  # devices that are tried for a model that does not fit
_MOST_SPLIT = 1000  # engines of which every split is tried: a simulation of all requests each


@dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """What is simulated."""

    model: str  # a decoder by name or `config.json`
    device: str  # a name of the catalog
    asked: str  # requests, as `requests.requests` reads them
    seconds: float = 0.0  # how long they come; 0: all of a trace
    layout: dict[str, Any] = field(default_factory=dict)  # of one engine: further arguments of `step_times`
    rules: EngineRules = field(default_factory=EngineRules)
    replicas: int = 1
    router: str = "round-robin"
    pools: str = ""  # "2:6": two engines for prompts, six that decode; "best": try all; "": engines do both
    draft: str = ""  # of speculative decoding, as `drafted.read_draft` reads it; "": none
    k: int = 4  # tokens that it proposes in a round
    acceptance: str = "0.7"  # what the target accepts of them, as `Acceptance` reads it
    slo: str = ""  # limits, as `metrics.limits` reads them
    seed: int = 0
    log: int = 0  # steps of the first engine to keep
    on: str = "here"  # or "ray"


class PoolSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Engines for prompts and for decoding, and what they answer within the limits (all, without limits)."""

    prefill: int
    decode: int
    goodput: float
    ttft_p50_s: float
    tpot_p50_s: float


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The answer: `run` is what was asked, `figures` have the ranges of all runs."""

    config: SimulationConfig
    requests: Requests
    steps: StepTimes
    run: Served
    runs: int
    figures: ServingFigures
    split: PoolSplit | None
    tried: tuple[PoolSplit, ...]
    plain: ServingFigures | None  # of the same engines without the draft

    @property
    def decoding(self) -> tuple[int, int]:
        """Sequences that an engine runs while it runs any, and the tokens that one attends to; means."""
        running, rows = self.run.over_time[:, 1].sum() / max(self.run.busy_s, 1e-9), self.requests
        context = (rows.prompt + rows.output / 2) @ rows.output / rows.output.sum()
        return max(round(running), 1), round(context)


def simulated(config: SimulationConfig) -> Simulated:
    """Simulate engines under requests.

    Raises ForetraceError for a model that does not fit, with what would hold it, for a limit that not even an empty
    engine keeps, and for requests that cannot be.
    """
    times, found = {end: _steps(config, end) for end in (MIDDLE, LOW, HIGH)}, limits(config.slo)
    steps = times[MIDDLE]
    asked = requests(config.asked, seconds=config.seconds, seed=config.seed)
    longest = int(asked.prompt.max())
    try:
        config.rules.blocks(steps, longest)
    except DoesNotFitError as error:
        raise ForetraceError(f"{error}; {_would_fit(config, longest)}.") from None
    if not config.draft:  # with one, the shortest answer is not the one with the least time per token
        _check_possible(config, asked, steps, found)
    tried = tuple(_tried(config, asked, steps, pools, found) for pools in _pools(config))
    best = max(tried, key=lambda each: (each.goodput, -each.ttft_p50_s), default=None)
    pools = None if best is None else (best.prefill, best.decode)
    run = _run(config, asked, steps, pools, log=config.log)
    if np.isnan(run.finish_s).all():
        most = run.blocks * config.rules.block
        raise ForetraceError(f"no request fits: {most:,} tokens fit into the cache; use more devices (`tp=`, `pp=`).")
    runs = [run]
    for draw in range(DRAWS if asked.drawn and len(asked) <= MOST_DRAWN else 1):
        again = requests(config.asked, seconds=config.seconds, seed=config.seed + draw)
        runs += [_run(config, again, times[end], pools, end) for end in (LOW, HIGH)]
    plain = None
    if config.draft:
        own = _steps(replace(config, draft=""), MIDDLE)
        plain = measure([_run(config, asked, own, pools, end) for end in (MIDDLE, LOW, HIGH)], own, found)
    return Simulated(config=config, requests=asked, steps=steps, run=run, runs=len(runs), plain=plain,
                     figures=measure(runs, steps, found), split=best, tried=tried)  # fmt: skip


def _steps(config: SimulationConfig, end: int, **more: int) -> StepTimes:
    """Return step times of an engine, with its draft at an end of the ranges of that; `more` of the layout."""
    target, layout = served_model(config.model), config.layout | more
    steps = step_times(target, config.device, **layout)
    if not config.draft:
        return steps
    draft = read_draft(config.draft, target)
    small = step_times(draft, config.device, **beside(layout, draft))
    return drafted_steps(steps, small, Acceptance.of(config.acceptance), config.k, end)


def _run(
    config: SimulationConfig, asked: Requests, steps: StepTimes, pools: tuple[int, int] | None, end: int = MIDDLE,
    log: int = 0,
) -> Served:  # fmt: skip
    how: dict[str, Any] = {"router": config.router, "end": end, "on": config.on}
    if pools is None:
        return simulate(asked, steps, config.rules, replicas=config.replicas, log=log, **how)
    return disaggregate(asked, steps, config.rules, prefill=pools[0], decode=pools[1], **how)


def _pools(config: SimulationConfig) -> Sequence[tuple[int, int]]:
    """Return the engines for prompts and for decoding that are tried."""
    if not config.pools:
        return ()
    if config.pools == "best":
        if config.replicas < 2:
            raise ForetraceError(f"two pools need two engines or more, got `replicas={config.replicas}`.")
        if config.replicas > _MOST_SPLIT:
            raise ForetraceError(
                f"`pools=best` tries every split of at most {_MOST_SPLIT} engines, got `replicas={config.replicas}`; "
                f"give one split as `pools={config.replicas // 4}:{config.replicas - config.replicas // 4}`."
            )
        return [(prefill, config.replicas - prefill) for prefill in range(1, config.replicas)]
    if not (found := re.fullmatch(r"(\d{1,6}):(\d{1,6})", config.pools)) or not int(found[1]) * int(found[2]):
        raise ForetraceError(f"`pools={config.pools}` must be engines for prompts and for decoding as 2:6, or best.")
    prefill, decode = int(found[1]), int(found[2])
    if config.replicas not in (1, prefill + decode):
        raise ForetraceError(f"`pools={config.pools}` are {prefill + decode} engines, `replicas={config.replicas}`.")
    return [(prefill, decode)]


def _tried(
    config: SimulationConfig, asked: Requests, steps: StepTimes, pools: tuple[int, int], found: Sequence[Limit]
) -> PoolSplit:  # fmt: skip
    run = _run(config, asked, steps, pools)
    ttft, tpot = (latency_statistics(run, latency)["p50"] or 0.0 for latency in ("ttft", "tpot"))
    return PoolSplit(
        prefill=pools[0], decode=pools[1], goodput=goodput(run, found), ttft_p50_s=ttft, tpot_p50_s=tpot
    )  # fmt: skip


def _would_fit(config: SimulationConfig, longest: int) -> str:
    """Return which number of tensor-parallel devices would hold the model."""
    shared = int(config.layout.get("tp", 1))
    with suppress(ForetraceError):  # until it cannot be divided so
        while (shared := 2 * shared) <= _MOST_SHARED:
            with suppress(DoesNotFitError):
                config.rules.blocks(_steps(config, MIDDLE, tp=shared), longest)
                return f"`tp={shared}` is the smallest number of devices that holds it"
    return "no number of tensor-parallel devices holds it: use more stages (`pp=`) or a device with more memory"


def _check_possible(config: SimulationConfig, asked: Requests, steps: StepTimes, found: Sequence[Limit]) -> None:
    """Raise ForetraceError where even the shortest request alone, with the quickest steps, exceeds a limit."""
    # What a prefix cache has of a prompt need not be computed.
    prompt = 1 if config.rules.prefix_cache and len(asked.hashes) else int(asked.prompt.min())
    for limit in found:
        least_output = 2 if limit.latency in ("tpot", "itl") else 1  # an answer of one token has none of these
        output = max(int(asked.output.min()), least_output)
        alone = simulate(of([0.0], [prompt], [output]), steps, config.rules, end=LOW)
        least = latency_statistics(alone, limit.latency)[limit.of]
        if least is not None and least > limit.seconds:
            raise ForetraceError(
                f"`slo={limit.name}={limit.seconds:g}s` cannot be kept: a prompt of {prompt:,} tokens alone on an "
                f"engine takes {least:.3g} s at the least; allow more, or use quicker devices."
            )
