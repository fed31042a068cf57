"""`capacities`: how many requests per second each deployment of a model serves within limits, and at what cost.

For every deployment (devices of an engine, policy, budget of a step, sequences) the highest rate that keeps all limits
is found by bisection. The same requests come at every rate, only faster or slower. It is found three times: with step
times as they are, and at both ends of their range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from foretrace import executor
from foretrace.deadline import Deadline, ending
from foretrace.errors import ForetraceError
from foretrace.files import write_text
from foretrace.hardware.devices import named
from foretrace.hardware.instances import instances
from foretrace.reading import read_struct
from foretrace.serving.llm.deployment import step_times
from foretrace.serving.llm.engine import Served, simulate
from foretrace.serving.llm.metrics import falls_behind, latency_statistics, limits
from foretrace.serving.llm.simulation import SimulationConfig
from foretrace.serving.llm.step_times import HIGH, LOW, MIDDLE
from foretrace.serving.requests import TIMED, Requests, requests

RULES = (("chunked", 512), ("chunked", 2048), ("chunked", 8192), ("prefill-first", 0))
SEQUENCES = (32, 128, 512)
FEW_REQUESTS = 300  # of fewer, rates were up to a third below those of 20,000 requests
_STAGES = (1, 2, 4)
_HALVINGS = 9  # of eight octaves: rates are known to 1.1 %
_LEAST = 2.0**-8  # of the rate at which the engine is always busy; below it nothing is worth serving
_TOGETHER = 4  # deployments for each core between two looks at the clock
_Rate = Annotated[float, msgspec.Meta(ge=0, lt=1e15)]


class Deployed(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One engine: its devices and the rules of its scheduler."""

    tp: Annotated[int, msgspec.Meta(ge=1)]
    pp: Annotated[int, msgspec.Meta(ge=1)]
    policy: str
    token_budget: int
    sequences: int

    @property
    def devices(self) -> int:
        """Of the engine."""
        return self.tp * self.pp


class EngineCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine serves within the limits. Rates are per second; 0 and a reason where it serves nothing."""

    engine: Deployed
    requests_per_s: _Rate = 0.0
    requests_low: _Rate = 0.0  # with step times at the slow end of their range
    requests_high: _Rate = 0.0
    tokens_per_s_device: _Rate = 0.0  # tokens that come out, over the devices
    tokens_per_s_user: _Rate = 0.0  # of a median request after its first token
    ttft_p99_s: _Rate = 0.0
    tpot_p99_s: _Rate = 0.0
    kv_most: _Rate = 0.0
    busy: _Rate = 0.0  # share of the time in which the engine works
    preemptions: Annotated[int, msgspec.Meta(ge=0)] = 0
    bound_by: str = ""  # what the next higher rate breaks: names of limits, or "queue" where it grows without end
    reason: str = ""
    best: bool = False  # whether no other one beats it in both tokens per second and device, and per user
    usd_per_million_tokens: float | None = None

    @property
    def rules(self) -> str:
        """As in "chunked 512"."""
        return f"{self.engine.policy} {self.engine.token_budget or ''}".rstrip()


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """A file of what was found, and the question that it answers."""

    question: str
    found: tuple[EngineCapacity, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """What each deployment serves, best first by tokens per second and device."""

    config: SimulationConfig
    requests: Requests
    engines: tuple[EngineCapacity, ...]
    left: int  # deployments that the time did not suffice for
    price_per_h: float | None  # of a device of the first engine, US dollars
    price_source: str


def capacities(
    config: SimulationConfig, *, devices: int = 8, seconds: float = 60.0, price: float = 0.0, state: Path | None = None,
    progress: Callable[[float], None] | None = None,
) -> Capacities:  # fmt: skip
    """Find what each deployment serves within `config.slo`; those looked at when the time is over.

    Args:
        config: model, device, requests (their rate does not matter), limits, seed; layout and rules are searched.
        devices: most that one engine has.
        seconds: for the search.
        price: of a device per hour, US dollars; 0: the cheapest machine of the catalog that holds an engine.
        state: a file of what was found; it is read first, and written after each round.
        progress: called with the share of the deployments that are done.

    Raises:
        ForetraceError: no limits, a closed loop, a device number below 1, or a file of another question.

    """
    ending("seconds", seconds, 60)
    if not limits(config.slo):
        raise ForetraceError('`slo=` must have a limit, e.g. `slo="ttft.p99=0.5s tpot.p99=50ms"`.')
    if devices < 1:
        raise ForetraceError(f"`devices=` must be 1 or more, got {devices}.")
    asked = _paced(config)
    question = repr(replace(config, on="here"))
    done = {each.engine: each for each in read_state(state, question)}
    order = np.random.default_rng(config.seed).permutation(len(every := list(deployments(devices))))
    todo = [every[i] for i in order if every[i] not in done]
    limit, step = Deadline(seconds), int(_TOGETHER * executor.cores())
    with executor.place(config.on) as processes:
        while todo and (limit.allows("round") or not done):
            batch, todo = todo[:step], todo[step:]
            with limit.part("round"):
                items = [(config, asked, one) for one in batch]
                played = executor.map(_capacity, items, on=config.on, pool=processes, again=1)
                done |= {one.engine: one for one in played}
            if state is not None:
                kept = _Kept(question=question, found=tuple(sorted(done.values(), key=lambda one: one.engine)))
                write_text(state, msgspec.json.format(msgspec.json.encode(kept)).decode())
            if progress is not None:
                progress(len(done) / len(every))
    found = [done[each] for each in every if each in done]
    sizes = {each.engine.devices for each in found}
    prices = {size: (price, "as given") if price else _price(config.device, size) for size in sizes}
    engines = tuple(_ranked(found, {size: per_h for size, (per_h, _) in prices.items()}))
    per_h, source = prices[engines[0].engine.devices]
    return Capacities(
        config=config, requests=asked, engines=engines, left=len(todo), price_per_h=per_h, price_source=source
    )


def _ranked(found: Sequence[EngineCapacity], prices: Mapping[int, float | None]) -> Iterator[EngineCapacity]:
    """Yield those first that serve most per device, with costs; mark those that no other one beats in both rates."""
    fastest = 0.0
    for one in sorted(found, key=lambda one: (-one.tokens_per_s_device, one.engine)):
        best = bool(one.requests_per_s) and one.tokens_per_s_user > fastest
        fastest = one.tokens_per_s_user if best else fastest
        price = prices[one.engine.devices]
        cost = price / 3600 / one.tokens_per_s_device * 1e6 if price and one.tokens_per_s_device else None
        yield msgspec.structs.replace(one, best=best, usd_per_million_tokens=cost)


def deployments(devices: int) -> Iterator[Deployed]:
    """Yield all that are tried."""
    shared = [1 << k for k in range(devices.bit_length()) if 1 << k <= devices]
    for tp, pp, (policy, budget), sequences in product(shared, _STAGES, RULES, SEQUENCES):
        if tp * pp <= devices:
            yield Deployed(tp=tp, pp=pp, policy=policy, token_budget=budget, sequences=sequences)


def _paced(config: SimulationConfig) -> Requests:
    """Return the requests, whose arrivals are then stretched. Raises ForetraceError for a closed loop."""
    timed = config.asked.lower().startswith(TIMED) and "qps=" not in config.asked
    asked = requests(config.asked + " qps=1" if timed else config.asked, seconds=config.seconds, seed=config.seed)
    if asked.concurrency or not np.ptp(asked.arrival_s):
        raise ForetraceError(f"`requests=` must come at a rate that can be changed: {', '.join(TIMED)} or a trace.")
    return asked


def _capacity(item: tuple[SimulationConfig, Requests, Deployed]) -> EngineCapacity:
    """Return what one deployment serves; in a worker."""
    config, asked, one = item
    promised = limits(config.slo)
    rules = replace(config.rules, policy=one.policy, token_budget=one.token_budget, sequences=one.sequences)
    try:
        steps = step_times(config.model, config.device, **(config.layout | {"tp": one.tp, "pp": one.pp}))
        burst = simulate(replace(asked, arrival_s=np.zeros(len(asked))), steps, rules)
    except ForetraceError as error:
        return EngineCapacity(engine=one, reason=str(error))
    if np.isnan(burst.finish_s).any():
        return EngineCapacity(engine=one, reason="the longest request needs more than the whole cache")
    gaps = asked.arrival_s - asked.arrival_s[0]
    own = (len(asked) - 1) / float(gaps[-1])

    def run(rate: float, end: int) -> tuple[Served, list[str]]:
        """Return what happens at a rate, and what it breaks: names of limits, "queue" where that grows without end."""
        found = simulate(replace(asked, arrival_s=gaps * (own / rate)), steps, rules, end=end)
        names = [
            each.name for each in promised
            if (latency_statistics(found, each.latency)[each.of] or 0.0) > each.seconds
        ]  # fmt: skip
        return found, [*names, "queue"] if falls_behind(found) else names

    def most(end: int) -> tuple[float, list[str]]:
        """Return the highest rate that keeps the limits, 0 if none does, and what the next one breaks."""
        high = len(asked) / burst.seconds * {MIDDLE: 1.0, LOW: 1 / steps.table.low, HIGH: 1 / steps.table.high}[end]
        low, (_, broken) = high * _LEAST, run(high, end)
        if not broken:  # the engine is always busy: at any higher rate the queue grows, if slowly
            return high, ["queue"]
        if first := run(low, end)[1]:
            return 0.0, first
        for _ in range(_HALVINGS):
            middle = float(np.sqrt(low * high))
            if found := run(middle, end)[1]:
                high, broken = middle, found
            else:
                low = middle
        return low, broken

    (rate, broken), (rate_high, _) = most(MIDDLE), most(LOW)
    bound_by = ", ".join(broken)
    if not rate:
        return EngineCapacity(engine=one, bound_by=bound_by, reason=f"breaks {bound_by} at any rate",
                              requests_high=rate_high)  # fmt: skip
    served, _ = run(rate, MIDDLE)
    tpot, ttft_p99, tpot_p99 = (
        latency_statistics(served, name)[of] or 0.0 for name, of in (("tpot", "p50"), ("ttft", "p99"), ("tpot", "p99"))
    )
    return EngineCapacity(
        engine=one, requests_per_s=rate, requests_low=min(most(HIGH)[0], rate), requests_high=max(rate_high, rate),
        tokens_per_s_device=served.emitted / len(asked) * rate / one.devices,
        tokens_per_s_user=1 / tpot if tpot else 0.0, ttft_p99_s=ttft_p99, tpot_p99_s=tpot_p99,
        kv_most=served.kv_most, busy=served.busy_s / max(served.seconds, 1e-9), preemptions=served.preemptions,
        bound_by=bound_by,
    )  # fmt: skip


def _price(device: str, devices: int) -> tuple[float | None, str]:
    """Return US dollars of a device per hour on the cheapest machine that has so many, else most, and which that is."""
    offers = [each for each in instances() if each.kind == named(device)]
    needed = min(devices, max((each.devices for each in offers), default=0))
    least = min(
        (each for each in offers if each.devices >= needed), key=lambda each: each.price_per_h / each.devices,
        default=None,
    )  # fmt: skip
    if least is None:
        return None, ""
    return least.price_per_h / least.devices, f"{least.name} of {least.provider}, {least.date}"


def read_state(state: Path | None, question: str) -> tuple[EngineCapacity, ...]:
    """Return what a search has kept, if there is a file. Raises ForetraceError for one of another question."""
    if state is None or not state.exists():
        return ()
    kept = read_struct(state, _Kept, "state of a capacity search", "give another file")
    if kept.question != question:
        raise ForetraceError(f"{state} answers another question; give another `state=`, or remove that file.")
    return kept.found
