"""What is said of served requests: latencies, rates, use; each with its range.

Definitions:
- TTFT: from arrival to the first token, and what a request takes beside the engines (`StepTimes.request_s`); of a
  closed loop the arrival is when the client sends;
- TPOT: (last token - first token) / (tokens - 1), of requests with two tokens or more;
- ITL: each time between two tokens of a request, those of all requests together;
- E2E: from arrival to the last token;
- goodput: requests per second that keep every limit, each by itself;
- tokens per second: tokens that came out / time until the last step ended;
- MFU: FLOPs that the answered requests need once / (that time x peak of all devices); what is computed again after a
  preemption does not count, nor does what a prefix cache has;
- KV use: blocks in use / blocks there are, mean over that time, and largest; blocks of the prefix cache that nobody
  uses count as free.

A range goes from the least to the largest of several simulations: with all step times at both ends of their 80 %
range, and, where requests are drawn, with other draws of them.

A `Limit` is what latency a service has promised, e.g. "ttft.p99=0.5s tpot.p99=50ms".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from foretrace.arrays import Float64, Mask
from foretrace.errors import ForetraceError
from foretrace.names import keyed
from foretrace.serving.llm.engine import Served
from foretrace.serving.llm.scheduler import bin_seconds
from foretrace.serving.llm.step_times import StepTimes

LATENCIES = {
    "ttft": "first token", "tpot": "per output token", "itl": "between tokens", "e2e": "whole answer",
}  # fmt: skip
_LEVELS = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
STATISTICS = (*_LEVELS, "mean")
_TIME = re.compile(r"(\d+\.?\d*|\.\d+)(e-?\d+)?(s|ms|us|)")
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "": 1.0}
_POINTS, _CURVE = 128, 64  # of curves over time, and of a distribution
_FALLS_BEHIND = 2.0  # times the wait of earlier requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A latency must be at most this. `of` says which statistic of it, of STATISTICS."""

    latency: str  # of LATENCIES
    of: str
    seconds: float

    @property
    def name(self) -> str:
        """As in "ttft.p99"."""
        return f"{self.latency}.{self.of}"


def limits(text: str) -> tuple[Limit, ...]:
    """Return limits from NAME[.STATISTIC]=TIME, several with spaces, by default of p99. Raises ForetraceError."""
    known = [*LATENCIES, *(f"{latency}.{of}" for latency in LATENCIES for of in STATISTICS)]
    words = text.lower().split()
    if bare := next((each for each in words if "=" not in each), ""):
        raise ForetraceError(f"`slo=`: {bare!r} is no limit; write ttft.p99=0.5s or tpot=50ms.")
    found = []
    for name, value in keyed(words, known, "`slo=`").items():
        match = _TIME.fullmatch(value)
        seconds = float(match[1] + (match[2] or "")) * _UNITS[match[3]] if match else 0.0
        if not 0 < seconds < 1e9:
            raise ForetraceError(
                f"`slo=`: {name}={value} must be a time above 0; write e.g. {name}=0.5s or {name}=50ms."
            )
        latency, _, of = name.partition(".")
        found.append(Limit(latency=latency, of=of or "p99", seconds=seconds))
    return tuple(found)


class RangedFigure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure and its range; None where nothing has it, e.g. TPOT of answers of one token."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """A latency of all answered requests, seconds."""

    p50: RangedFigure
    p90: RangedFigure
    p99: RangedFigure
    mean: RangedFigure


class LimitMet(msgspec.Struct, frozen=True, kw_only=True):
    """A limit, what was found, and whether the whole range keeps it (yes), a part (maybe), or none (no)."""

    limit: str
    most_s: float
    found_s: RangedFigure
    met: str


class ServingFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Everything said of one simulation."""

    requests: int
    answered: int
    refused: int
    latencies: dict[str, Latency]  # by LATENCIES
    rates: dict[str, RangedFigure]  # all others, by the names of `_rates`; see the module
    limits: tuple[LimitMet, ...]


class LatencyCurve(msgspec.Struct, frozen=True, kw_only=True):
    """The share of the answered requests that took so long or less."""

    seconds: tuple[float, ...]
    share: tuple[float, ...]


class EngineCurves(msgspec.Struct, frozen=True, kw_only=True):
    """Means over equal stretches of time: share of the cache in use, running and waiting sequences of all engines."""

    end_s: tuple[float, ...]
    kv_use: tuple[float, ...]
    running: tuple[float, ...]
    waiting: tuple[float, ...]


def measure(runs: Sequence[Served], steps: StepTimes, limits: Sequence[Limit] = ()) -> ServingFigures:
    """Return the figures of the first run; the others give the ranges."""

    def ranged(values: Sequence[float | None]) -> RangedFigure:
        known = [each for each in values if each is not None]
        return RangedFigure() if values[0] is None else RangedFigure(value=values[0], low=min(known), high=max(known))

    latencies = {}
    for name in LATENCIES:
        each = [latency_statistics(run, name) for run in runs]
        latencies[name] = Latency(**{of: ranged([one[of] for one in each]) for of in STATISTICS})
    rates = [_rates(each, steps, limits) for each in runs]
    asked, done = len(runs[0].prompt), int(answered(runs[0]).sum())
    return ServingFigures(
        requests=asked, answered=done, refused=asked - done, latencies=latencies,
        rates={name: ranged([each[name] for each in rates]) for name in rates[0]},
        limits=tuple(_met(each, getattr(latencies[each.latency], each.of)) for each in limits),
    )  # fmt: skip


def answered(run: Served) -> Mask:
    """Return (n,) which requests got all their tokens."""
    return ~np.isnan(run.finish_s)


def latencies_of(run: Served) -> dict[str, Float64]:
    """Return seconds of each answered request, by the name of the latency; TPOT is NaN of answers of one token."""
    rows = answered(run)
    first, finish, arrival = run.first_s[rows], run.finish_s[rows], run.arrival_s[rows]
    gaps = run.output[rows] - 1
    tpot = np.where(gaps > 0, (finish - first) / np.maximum(gaps, 1), np.nan)
    sent = arrival - run.request_s
    return {"ttft": first - sent, "tpot": tpot, "e2e": finish - sent}


def latency_statistics(run: Served, latency: str) -> dict[str, float | None]:
    """Return the STATISTICS of a latency in one simulation, seconds; None where nothing has it.

    Percentiles of times between tokens come from a histogram, whose bins are 0.5 to 0.8 % wide; the mean is exact.
    """
    levels = list(_LEVELS.values())
    if latency == "itl":
        if not (count := int(run.gaps.sum())):
            return dict.fromkeys(STATISTICS)
        found = bin_seconds(np.searchsorted(np.cumsum(run.gaps) / count, levels))
        mean = float((run.finish_s - run.first_s)[answered(run)].sum()) / count
    else:
        values = latencies_of(run)[latency]
        values = values[~np.isnan(values)]
        if not len(values):
            return dict.fromkeys(STATISTICS)
        found, mean = np.quantile(values, levels), float(values.mean())
    return dict(zip(STATISTICS, [*found.tolist(), mean], strict=True))


def falls_behind(run: Served) -> bool:
    """Return whether the queue grows: the last quarter of the requests waits much longer than the second one."""
    waits = latencies_of(run)["ttft"]
    quarter = len(waits) // 4
    return bool(quarter and waits[-quarter:].mean() > max(_FALLS_BEHIND * waits[quarter : 2 * quarter].mean(), 1.0))


def goodput(run: Served, limits: Sequence[Limit]) -> float:
    """Return requests per second that keep every limit, each by itself; times between tokens by their mean."""
    each = latencies_of(run)
    kept = np.ones(int(answered(run).sum()), np.bool_)
    for limit in limits:
        values = each["tpot" if limit.latency == "itl" else limit.latency]
        kept &= np.isnan(values) | (values <= limit.seconds)
    return float(kept.sum()) / max(run.seconds, 1e-9)


def distribution(run: Served, latency: str) -> LatencyCurve:
    """Return how a latency is distributed over the answered requests."""
    values, levels = latencies_of(run)[latency], np.linspace(0, 1, _CURVE)
    values = values[~np.isnan(values)]
    return LatencyCurve(
        seconds=_short(np.quantile(values, levels) if len(values) else np.zeros(_CURVE)), share=_short(levels)
    )


def over_time(run: Served) -> EngineCurves:
    """Return what the engines held while they ran."""
    used = max(int(np.ceil(run.seconds / run.interval_s)), 1)
    together = -(-used // _POINTS)
    rows = run.over_time[: -(-used // together) * together]
    rows = np.vstack([rows, np.zeros((-len(rows) % together, 3))]).reshape(-1, together, 3).sum(1)
    ends = np.minimum(np.arange(1, len(rows) + 1) * together * run.interval_s, run.seconds)
    means = rows / np.maximum(np.diff(ends, prepend=0.0), 1e-12)[:, None]
    kv, running, waiting = means.T / np.array([[run.blocks * run.replicas], [1], [1]])
    return EngineCurves(end_s=_short(ends), kv_use=_short(kv), running=_short(running), waiting=_short(waiting))


def _short(values: Float64) -> tuple[float, ...]:
    return tuple(float(f"{each:.5g}") for each in values.tolist())


def _rates(run: Served, steps: StepTimes, limits: Sequence[Limit]) -> dict[str, float | None]:
    rows, seconds = answered(run), max(run.seconds, 1e-9)
    prompt, output, had = (each[rows].astype(float) for each in (run.prompt, run.output, run.found))
    needed = prompt + output - 1
    pairs = (needed * (needed + 1) - had * (had + 1)) / 2
    flops = steps.flops_per_token * (needed - had).sum() + steps.flops_per_output * output.sum()
    flops += steps.flops_per_pair * pairs.sum()
    peak = steps.peak_flops * run.replicas * seconds
    return {
        "goodput": goodput(run, limits) if limits else None,
        "requests_per_s": float(rows.sum()) / seconds,
        "tokens_per_s": run.emitted / seconds,
        "prompt_tokens_per_s": float(prompt.sum()) / seconds,
        "mfu": float(flops) / peak if peak else None,
        "kv_use": run.used_s / (run.blocks * run.replicas * seconds),
        "kv_most": run.kv_most,
        "busy": run.busy_s / (run.replicas * seconds),
        "preemptions": float(run.preemptions),
        "prefix_hits": float(had.sum() / max(prompt.sum(), 1.0)),
        "seconds": run.seconds,
    }


def _met(limit: Limit, found: RangedFigure) -> LimitMet:
    met = "yes"
    if found.high is not None and found.low is not None and found.high > limit.seconds:
        met = "no" if found.low > limit.seconds else "maybe"
    return LimitMet(limit=limit.name, most_s=limit.seconds, found_s=found, met=met)
