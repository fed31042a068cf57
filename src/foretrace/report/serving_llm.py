"""`foretrace llm simulate` as an answer: latencies, rates and use of simulated engines, with their ranges."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from foretrace.report.blocks import About, Block, Chart, Column, Curve, Grid, Line, table
from foretrace.report.units import between, count, digits, in_unit, seconds, share, unit_for
from foretrace.report.views import Report, taken
from foretrace.serving.llm import metrics
from foretrace.serving.llm.metrics import Latency, LimitMet, RangedFigure
from foretrace.serving.llm.simulation import PoolSplit, Simulated

POINTS = 128  # of curves over time
_LATENCIES = {"ttft_s": "first token", "tpot_s": "per output token", "itl_s": "between tokens", "e2e_s": "whole answer"}


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


class LlmSimulateView(Report, frozen=True, kw_only=True):
    """`foretrace llm simulate`: engines of a large language model under requests."""

    command: str = "llm simulate"
    model: str
    device: str
    devices: int  # of one engine
    replicas: int
    policy: str
    router: str
    source: str
    kv_tokens: int  # that fit into the cache of one engine
    requests: int
    answered: int
    refused: int
    ttft_s: Latency
    tpot_s: Latency
    itl_s: Latency
    e2e_s: Latency
    goodput: RangedFigure
    requests_per_s: RangedFigure
    tokens_per_s: RangedFigure
    prompt_tokens_per_s: RangedFigure
    mfu: RangedFigure
    kv_use: RangedFigure
    kv_most: RangedFigure
    busy: RangedFigure
    preemptions: RangedFigure
    prefix_hits: RangedFigure
    seconds: RangedFigure
    limits: tuple[LimitMet, ...]
    runs: int  # that the ranges come from
    pools: PoolSplit | None
    pools_tried: tuple[PoolSplit, ...]
    ttft_distribution: LatencyCurve
    tpot_distribution: LatencyCurve
    over_time: EngineCurves

    def shown(self, top: int) -> Iterator[Block]:
        """Latencies, rates, limits, splits, and charts."""
        engines = f"{count(self.replicas)} × " if self.replicas > 1 else ""
        yield About((f"{self.model} on {engines}{self.devices} × {self.device}", self.policy, self.source))
        yield _latencies(self)
        yield _rates(self)
        if self.limits:
            rows = [(each.limit, seconds(each.most_s), _ranged(each.found_s), each.met) for each in self.limits]
            yield table(["limit", Column("at most", right=True), Column("found", right=True), "kept"], rows)
        if len(self.pools_tried) > 1:
            tried = sorted(self.pools_tried, key=lambda each: -each.goodput)
            words = Column("engines for prompts : decoding"), Column("goodput, 1/s", "digits")
            columns = [*words, Column("TTFT p50", "time"), Column("TPOT p50", "time")]
            split = [
                (f"{each.prefill} : {each.decode}", each.goodput, each.ttft_p50_s, each.tpot_p50_s) for each in tried
            ]
            yield table(columns, split, top=top, noun="split", how="--top")
        for title, curve in (("time to first token", self.ttft_distribution), ("per token", self.tpot_distribution)):
            if curve.seconds[-1] > 0:
                line = Curve(name="share of requests", x=curve.seconds, y=curve.share)
                yield Chart(title=title, x_kind="seconds", y_kind="share", curves=(line,), log_x=True)
        times = self.over_time
        yield Chart(title="KV cache in use", x_kind="long", y_kind="share",
                    curves=(Curve(name="share of the blocks", x=times.end_s, y=times.kv_use),))  # fmt: skip
        lines = tuple(Curve(name=name, x=times.end_s, y=getattr(times, name)) for name in ("running", "waiting"))
        yield Chart(title="sequences", x_kind="long", y_kind="count", curves=lines)
        yield Line(f"ranges: {count(self.runs)} simulations, step times at both ends of their 80 % range", soft=True)


def llm_simulated(found: Simulated) -> LlmSimulateView:
    """The answer to a simulation."""
    config, run, steps = found.config, found.run, found.steps
    engines = run.replicas
    notes = [*found.requests.notes, *(f"step times: {why}" for why in steps.whys)]
    if found.figures.refused:
        notes.append(f"{count(found.figures.refused)} requests need more than the whole cache and are refused.")
    if engines > 1 and len(run.log):
        notes.append("the steps kept are those of the first engine.")
    return taken(
        LlmSimulateView,
        found.figures,
        headline=headline(found),
        model=steps.model,
        device=steps.device,
        devices=steps.devices,
        replicas=engines,
        policy=config.rules.policy,
        router=config.router,
        source=found.requests.source,
        kv_tokens=run.blocks * config.rules.block,
        runs=found.runs,
        pools=found.split,
        pools_tried=found.tried,
        ttft_distribution=_curve(found, "ttft"),
        tpot_distribution=_curve(found, "tpot"),
        over_time=_over_time(found),
        notes=tuple(notes),
    )


def headline(found: Simulated) -> str:
    """As in "2.01 requests per second are answered: the first token after 91 ms (p99 236 ms), then one every 20 ms"."""
    figures = found.figures
    ttft, tpot = figures.ttft_s, figures.tpot_s
    first = f"{digits(figures.requests_per_s.value or 0)} requests per second are answered"
    if _falls_behind(found):
        first = f"The engines fall behind: {digits(figures.requests_per_s.value or 0)} requests per second are answered"
    text = f"{first}: the first token after {seconds(ttft.p50.value or 0)} (p99 {seconds(ttft.p99.value or 0)})"
    return f"{text}, then one every {seconds(tpot.p50.value)}." if tpot.p50.value else f"{text}."


def _falls_behind(found: Simulated) -> bool:
    """Whether the queue of an open loop grows."""
    open_loop = not found.requests.concurrency and bool(np.ptp(found.requests.arrival_s))
    return open_loop and metrics.falls_behind(found.run)


def _curve(found: Simulated, latency: str) -> LatencyCurve:
    values, levels = metrics.distribution(found.run, latency)
    return LatencyCurve(seconds=_short(values), share=_short(levels))


def _over_time(found: Simulated) -> EngineCurves:
    run = found.run
    used = max(int(np.ceil(run.seconds / run.interval_s)), 1)
    together = -(-used // POINTS)
    rows = run.over_time[: -(-used // together) * together]
    rows = np.vstack([rows, np.zeros((-len(rows) % together, 3))]).reshape(-1, together, 3).sum(1)
    ends = np.minimum(np.arange(1, len(rows) + 1) * together * run.interval_s, run.seconds)
    means = rows / np.maximum(np.diff(ends, prepend=0.0), 1e-12)[:, None]
    kv, running, waiting = means.T / np.array([[run.blocks * run.replicas], [1], [1]])
    return EngineCurves(end_s=_short(ends), kv_use=_short(kv), running=_short(running), waiting=_short(waiting))


def _short(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> tuple[float, ...]:
    return tuple(float(f"{each:.5g}") for each in values.tolist())


def _latencies(view: LlmSimulateView) -> Grid:
    rows: list[tuple[str, ...]] = []
    for name, word in _LATENCIES.items():
        each: Latency = getattr(view, name)
        values = (each.p50, each.p90, each.p99, each.mean)
        rows.append((f"{name[:-2].upper()}  {word}", *(_value(one) for one in values)))
        rows.append(("", *(_range(one) for one in values)))
    return table(["", *(Column(title, right=True) for title in ("p50", "p90", "p99", "mean"))], rows)


def _value(figure: RangedFigure) -> str:
    return "–" if figure.value is None else seconds(figure.value)


def _range(figure: RangedFigure) -> str:
    if figure.value is None or figure.low is None or figure.high is None:
        return ""
    unit = unit_for(figure.value)
    return f"{between(figure.low, figure.high, unit)} {unit.name}"


def _ranged(figure: RangedFigure) -> str:
    if figure.value is None or figure.low is None or figure.high is None:
        return "–"
    unit = unit_for(figure.value)
    return f"{in_unit(figure.value, unit)} ({between(figure.low, figure.high, unit)}) {unit.name}"


def _rates(view: LlmSimulateView) -> Grid:
    rows = []
    named = (
        ("goodput", "requests/s within the limits"), ("requests_per_s", "requests/s"), ("tokens_per_s", "tokens/s"),
        ("mfu", "MFU"), ("kv_use", "KV cache in use"), ("kv_most", "at most"), ("busy", "engines busy"),
        ("prefix_hits", "prompts from prefix cache"), ("preemptions", "preemptions"),
    )  # fmt: skip
    for name, word in named:
        each: RangedFigure = getattr(view, name)
        if each.value is None or each.low is None or each.high is None or (name == "prefix_hits" and not each.high):
            continue
        text = share if name in ("mfu", "kv_use", "kv_most", "busy", "prefix_hits") else digits
        rows.append((word, text(each.value), f"{text(each.low)} – {text(each.high)}"))
    return table(["", Column("", right=True), Column("range", right=True)], rows)
