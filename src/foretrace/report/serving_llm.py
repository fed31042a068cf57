"""`foretrace llm simulate` as an answer: latencies, rates and use of simulated engines, with their ranges."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from foretrace.arrays import Float64
from foretrace.hardware.devices import named
from foretrace.hardware.power import SERVING_SHARES
from foretrace.report import power
from foretrace.report.blocks import About, Block, Chart, Column, Curve, Grid, Line, listing, table
from foretrace.report.power import EnergyView
from foretrace.report.units import count, digits, seconds, share, span
from foretrace.report.views import Report, taken
from foretrace.serving.llm import metrics
from foretrace.serving.llm.metrics import LATENCIES, STATISTICS, Latency, LimitMet, RangedFigure
from foretrace.serving.llm.simulation import PoolSplit, Simulated
from foretrace.serving.speculative.drafts import ServedDraft, served_draft

POINTS = 128  # of curves over time
_RATES: dict[str, tuple[str, Callable[[float], str]]] = {
    "goodput": ("requests/s within the limits", digits), "requests_per_s": ("requests/s", digits),
    "tokens_per_s": ("tokens/s", digits), "mfu": ("MFU", share), "kv_use": ("KV cache in use", share),
    "kv_most": ("at most", share), "busy": ("engines busy", share),
    "prefix_hits": ("prompts from prefix cache", share), "preemptions": ("preemptions", digits),
}  # fmt: skip


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
    speculation: ServedDraft | None  # null without a draft
    energy: EnergyView | None  # of all engines; null where there is no power model
    ttft_distribution: LatencyCurve
    tpot_distribution: LatencyCurve
    over_time: EngineCurves

    def shown(self, top: int) -> Iterator[Block]:
        """Yield latencies, rates, limits, splits, and charts."""
        engines = f"{count(self.replicas)} × " if self.replicas > 1 else ""
        yield About((f"{self.model} on {engines}{self.devices} × {self.device}", self.policy, self.source))
        yield _latencies(self)
        yield _rates(self)
        if self.limits:
            yield listing(
                self.limits, "limit", ("most_s", "at most", "seconds"), ("found_s.value", "found", "seconds"),
                (lambda each: _range(each.found_s), Column("range", right=True)), ("met", "kept"),
            )  # fmt: skip
        if self.speculation:
            yield from _speculation(self.speculation)
        yield from power.shown(self.energy, per="in all")
        if len(self.pools_tried) > 1:
            yield listing(
                sorted(self.pools_tried, key=lambda each: -each.goodput),
                (lambda each: f"{each.prefill} : {each.decode}", "engines for prompts : decoding"),
                ("goodput", "goodput, 1/s", "digits"), ("ttft_p50_s", "TTFT p50", "time"),
                ("tpot_p50_s", "TPOT p50", "time"), top=top, noun="split", how="--top",
            )  # fmt: skip
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


def llm_simulated(found: Simulated, *, grid: float | None = None) -> LlmSimulateView:
    """Return the answer to a simulation; `grid`: grams of CO2 per kWh."""
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
        speculation=served_draft(found),
        energy=_energy(found, grid),
        ttft_distribution=_curve(found, "ttft"),
        tpot_distribution=_curve(found, "tpot"),
        over_time=_over_time(found),
        notes=tuple(notes),
    )


def headline(found: Simulated) -> str:
    """Return text such as "2.01 requests per second are answered: the first token after 91 ms (p99 236 ms), then one
    every 20 ms".
    """
    figures, asked = found.figures, found.requests
    ttft, tpot, rate = figures.ttft_s, figures.tpot_s, digits(figures.requests_per_s.value or 0)
    open_loop = not asked.concurrency and bool(np.ptp(asked.arrival_s))
    behind = "The engines fall behind: " if open_loop and metrics.falls_behind(found.run) else ""
    first = f"the first token after {seconds(ttft.p50.value or 0)} (p99 {seconds(ttft.p99.value or 0)})"
    then = f", then one every {seconds(tpot.p50.value)}" if tpot.p50.value else ""
    return f"{behind}{rate} requests per second are answered: {first}{then}."


def _energy(found: Simulated, grid: float | None) -> EnergyView | None:
    """Return the energy of all engines until the last step has ended; between steps their devices wait."""
    ends = found.figures.seconds, found.figures.busy
    seconds, busy = ((each.low or 0.0, each.value or 0.0, each.high or 0.0) for each in ends)
    devices = found.steps.devices * found.run.replicas
    return power.energy(
        named(found.config.device), seconds[1], (seconds[0], seconds[2]), busy[1] * seconds[1], devices, grid,
        busy_range=(busy[0], busy[2]), working=SERVING_SHARES,
    )  # fmt: skip


def _speculation(found: ServedDraft) -> Iterator[Block]:
    """Yield what rounds gain at the mean batch, from which batch on they hurt, and what the engines do without them."""
    one, without = found.rounds, found.tpot_without_s.p50
    hurts = f"it hurts from batch {count(one.hurts_from_batch)}" if one.hurts_from_batch else "it hurts at no batch"
    yield Line(
        f"{found.draft} proposes {count(one.k)} tokens, {digits(one.tau)} come out of a round: at the mean batch of "
        f"{count(found.batch)}, {digits(one.speedup)} times as fast ({digits(one.speedup_low)} – "
        f"{digits(one.speedup_high)}); {hurts}", label="draft",
    )  # fmt: skip
    if without.value:
        tokens = found.tokens_per_s_without.value or 0.0
        yield Line(f"one token every {seconds(without.value)} ({_range(without)}), {digits(tokens)} tokens/s",
                   label="without")  # fmt: skip
    yield listing(
        found.by_batch, ("batch", "batch", "count"), ("speedup", "speed-up", "digits"),
        (lambda each: f"{digits(each.speedup_low)} – {digits(each.speedup_high)}", Column("range", right=True)),
    )  # fmt: skip


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


def _short(values: Float64) -> tuple[float, ...]:
    return tuple(float(f"{each:.5g}") for each in values.tolist())


def _latencies(view: LlmSimulateView) -> Grid:
    rows: list[tuple[str, ...]] = []
    for name, word in LATENCIES.items():
        latency: Latency = getattr(view, f"{name}_s")
        each = [getattr(latency, of) for of in STATISTICS]
        rows.append((f"{name.upper()}  {word}", *("–" if one.value is None else seconds(one.value) for one in each)))
        rows.append(("", *(_range(one) for one in each)))
    return table(["", *(Column(title, right=True) for title in STATISTICS)], rows)


def _range(figure: RangedFigure) -> str:
    return "" if figure.low is None or figure.high is None else span(figure.low, figure.high)


def _rates(view: LlmSimulateView) -> Grid:
    rows = []
    for name, (word, text) in _RATES.items():
        each: RangedFigure = getattr(view, name)
        if each.value is None or each.low is None or each.high is None or (name == "prefix_hits" and not each.high):
            continue
        rows.append((word, text(each.value), f"{text(each.low)} – {text(each.high)}"))
    return table(["", Column("", right=True), Column("range", right=True)], rows)
