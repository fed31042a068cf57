"""`foretrace llm simulate` as an answer: latencies, rates and use of simulated engines, with their ranges."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from foretrace.report.blocks import About, Block, Chart, Column, Curve, Grid, Headline, Line, shown, table
from foretrace.report.blocks import notes as remarks
from foretrace.report.units import between, count, digits, in_unit, seconds, share, unit_for
from foretrace.report.views import Result, taken
from foretrace.serving.llm import metrics
from foretrace.serving.llm.ask import Simulated
from foretrace.serving.llm.metrics import Latency, LimitMet, RangedFigure

POINTS = 128  # of curves over time
_LATENCIES = {"ttft_s": "first token", "tpot_s": "per output token", "itl_s": "between tokens", "e2e_s": "whole answer"}
_FALLS_BEHIND = 2.0  # times the wait of earlier requests


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


class SplitView(msgspec.Struct, frozen=True, kw_only=True):
    """Engines for prompts and for decoding."""

    prefill: int
    decode: int
    goodput: float
    ttft_p50_s: float
    tpot_p50_s: float


class LlmSimulateView(Result, frozen=True, kw_only=True):
    """`foretrace llm simulate`: engines of a large language model under requests."""

    command: str = "llm simulate"
    headline: str
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
    pools: SplitView | None
    pools_tried: tuple[SplitView, ...]
    ttft_distribution: LatencyCurve
    tpot_distribution: LatencyCurve
    over_time: EngineCurves
    notes: tuple[str, ...]
    next: str


def llm_simulated(found: Simulated, *, next_: str = "") -> LlmSimulateView:
    """The answer to a simulation."""
    ask, run, steps = found.ask, found.run, found.steps
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
        policy=ask.rules.policy,
        router=ask.router,
        source=found.requests.source,
        kv_tokens=run.blocks * ask.rules.block,
        runs=found.runs,
        pools=None if found.split is None else taken(SplitView, found.split),
        pools_tried=tuple(taken(SplitView, each) for each in found.tried),
        ttft_distribution=_curve(found, "ttft"),
        tpot_distribution=_curve(found, "tpot"),
        over_time=_over_time(found),
        notes=tuple(notes),
        next=next_,
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
    """Whether the last quarter of an open loop waits much longer than the second one."""
    waits = metrics.latencies_of(found.run)["ttft"]
    quarter = len(waits) // 4
    if found.requests.concurrency or not quarter or not np.ptp(found.requests.arrival_s):
        return False
    return bool(waits[-quarter:].mean() > max(_FALLS_BEHIND * waits[quarter : 2 * quarter].mean(), 1.0))


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


@shown.register
def _(view: LlmSimulateView, top: int) -> Iterator[Block]:
    engines = f"{count(view.replicas)} × " if view.replicas > 1 else ""
    yield About((f"{view.model} on {engines}{view.devices} × {view.device}", view.policy, view.source))
    yield ""
    yield Headline(view.headline)
    yield ""
    yield _latencies(view)
    yield ""
    yield _rates(view)
    if view.limits:
        yield ""
        rows = [(each.limit, seconds(each.most_s), _ranged(each.found_s), each.met) for each in view.limits]
        yield table(["limit", Column("at most", right=True), Column("found", right=True), "kept"], rows)
    if len(view.pools_tried) > 1:
        yield ""
        tried = sorted(view.pools_tried, key=lambda each: -each.goodput)
        words = Column("engines for prompts : decoding"), Column("goodput, 1/s", "digits")
        columns = [*words, Column("TTFT p50", "time"), Column("TPOT p50", "time")]
        split = [(f"{each.prefill} : {each.decode}", each.goodput, each.ttft_p50_s, each.tpot_p50_s) for each in tried]
        yield table(columns, split, top=top, noun="split", how="--top")
    yield ""
    for title, curve in (("time to first token", view.ttft_distribution), ("per token", view.tpot_distribution)):
        if curve.seconds[-1] > 0:
            line = Curve(name="share of requests", x=curve.seconds, y=curve.share)
            yield Chart(title=title, x_kind="seconds", y_kind="share", curves=(line,), log_x=True)
    times = view.over_time
    yield Chart(title="KV cache in use", x_kind="long", y_kind="share",
                curves=(Curve(name="share of the blocks", x=times.end_s, y=times.kv_use),))  # fmt: skip
    lines = tuple(Curve(name=name, x=times.end_s, y=getattr(times, name)) for name in ("running", "waiting"))
    yield Chart(title="sequences", x_kind="long", y_kind="count", curves=lines)
    yield Line(f"ranges: {count(view.runs)} simulations, step times at both ends of their 80 % range", soft=True)
    yield from remarks(view.notes)


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
