"""What `foretrace llm` answers: engines under requests, capacities, a calibration, drafts; each with its ranges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from foretrace.hardware.devices import named
from foretrace.hardware.power import SERVING_SHARES
from foretrace.report import shared
from foretrace.report.blocks import About, Block, Chart, Column, Curve, Grid, Line, listing, table
from foretrace.report.shared import EnergyView
from foretrace.report.units import count, digits, seconds, share, span, things
from foretrace.report.views import Report, taken
from foretrace.serving.llm import metrics
from foretrace.serving.llm.calibration import CalibratedRun, EngineCalibration
from foretrace.serving.llm.capacity import FEW_REQUESTS, Capacities, EngineCapacity
from foretrace.serving.llm.metrics import LATENCIES, STATISTICS, Latency, LimitMet, RangedFigure
from foretrace.serving.llm.simulation import PoolSplit, Simulated, SimulationConfig
from foretrace.serving.speculative.drafts import DraftSetting, RankedDraft, ServedDraft, served_draft

_RATES: dict[str, tuple[str, Callable[[float], str]]] = {
    "goodput": ("requests/s within the limits", digits), "requests_per_s": ("requests/s", digits),
    "tokens_per_s": ("tokens/s", digits), "mfu": ("MFU", share), "kv_use": ("KV cache in use", share),
    "kv_most": ("at most", share), "busy": ("engines busy", share),
    "prefix_hits": ("prompts from prefix cache", share), "preemptions": ("preemptions", digits),
}  # fmt: skip


class LlmSimulateView(Report, frozen=True, kw_only=True):
    """`foretrace llm simulate`: engines of a large language model under requests."""

    command: str = "llm simulate"
    model: str
    device: str
    devices: int  # of one engine
    server: str  # all that its step times depend on, in words
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
    ttft_distribution: metrics.LatencyCurve
    tpot_distribution: metrics.LatencyCurve
    over_time: metrics.EngineCurves

    def shown(self, top: int) -> Iterator[Block]:
        """Yield latencies, rates, limits, splits, and charts."""
        engines = f"{count(self.replicas)} × " if self.replicas > 1 else ""
        yield About((f"{self.model} on {engines}{self.devices} × {self.device}", self.policy, self.source))
        yield _latencies(self)
        yield _rates(self)
        yield listing(
            self.limits, "limit", ("most_s", "at most", "seconds"), ("found_s.value", "found", "seconds"),
            (lambda each: _range(each.found_s), Column("range", right=True)), ("met", "kept"),
        )  # fmt: skip
        if self.speculation:
            yield from _speculation(self.speculation)
        yield from shared.energy_lines(self.energy, per="in all")
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
    config, run = found.config, found.run
    notes = [*found.requests.notes, *(f"step times: {why}" for why in found.steps.whys)]
    if found.figures.refused:
        notes.append(f"{count(found.figures.refused)} requests need more than the whole cache and are refused.")
    if run.replicas > 1 and len(run.log):
        notes.append("the steps kept are those of the first engine.")
    latencies = {f"{name}_s": each for name, each in found.figures.latencies.items()}
    curves = {f"{name}_distribution": metrics.distribution(run, name) for name in ("ttft", "tpot")}
    return taken(
        LlmSimulateView, found.figures, found.steps, run, config.rules, config, found.requests, found,
        headline=headline(found), kv_tokens=run.blocks * config.rules.block, pools=found.split,
        pools_tried=found.tried, speculation=served_draft(found), energy=_energy(found, grid),
        over_time=metrics.over_time(run), notes=tuple(notes), **latencies, **curves, **found.figures.rates,
    )  # fmt: skip


def headline(found: Simulated) -> str:
    """Return text such as "2.01 requests per second are answered: the first token after 91 ms (p99 236 ms), ..."."""
    figures, asked = found.figures, found.requests
    ttft, tpot = figures.latencies["ttft"], figures.latencies["tpot"]
    rate = digits(figures.rates["requests_per_s"].value or 0)
    open_loop = not asked.concurrency and bool(np.ptp(asked.arrival_s))
    behind = "The engines fall behind: " if open_loop and metrics.falls_behind(found.run) else ""
    first = f"the first token after {seconds(ttft.p50.value or 0)} (p99 {seconds(ttft.p99.value or 0)})"
    then = f", then one every {seconds(tpot.p50.value)}" if tpot.p50.value else ""
    return f"{behind}{rate} requests per second are answered: {first}{then}."


def _energy(found: Simulated, grid: float | None) -> EnergyView | None:
    """Return the energy of all engines until the last step has ended; between steps their devices wait."""
    ends = (found.figures.rates[name] for name in ("seconds", "busy"))
    seconds, busy = ((each.low or 0.0, each.value or 0.0, each.high or 0.0) for each in ends)
    devices = found.steps.devices * found.run.replicas
    return shared.energy(
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
        ("speedup_low speedup_high", "range", "digits"),
    )  # fmt: skip


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


# --- capacity --------------------------------------------------------------------------------------------------------


class LlmCapacityView(Report, frozen=True, kw_only=True):
    """`foretrace llm capacity`: deployments, best first by tokens per second and device."""

    command: str = "llm capacity"
    model: str
    device: str
    slo: str
    source: str
    engines: tuple[EngineCapacity, ...]
    left: int  # deployments that the time did not suffice for
    price_per_h: float | None  # of a device of the first engine, US dollars
    energy: EnergyView | None  # of a million tokens of the first engine; null where there is no power model

    def shown(self, top: int) -> Iterator[Block]:
        yield About((f"{self.model} on {self.device}", self.slo, self.source))
        best = [each for each in self.engines if each.best]
        yield listing(
            best, ("engine.tp", "tp", "count"), ("engine.pp", "pp", "count"), ("rules", "scheduler"),
            ("engine.sequences", "sequences", "count"), (_rate, Column("requests/s", right=True)),
            ("tokens_per_s_device", "tokens/s each", "digits"), ("tokens_per_s_user", "per user", "digits"),
            ("usd_per_million_tokens", "USD/M", "digits"), top=top, noun="engine", how="--top",
        )  # fmt: skip
        if len(best) > 1:
            front = sorted((each.tokens_per_s_user, each.tokens_per_s_device) for each in best)
            users, devices = zip(*front, strict=True)
            yield Chart(title="tokens/s of each device, by tokens/s of a user",
                        curves=(Curve(name="best engines", x=users, y=devices),))  # fmt: skip
        others = [each for each in self.engines if not each.best]
        beaten = sum(bool(each.requests_per_s) for each in others)
        if beaten:
            yield Line(
                f"{count(beaten)} other engines serve fewer tokens per second and device, and per user", soft=True
            )
        yield from shared.energy_lines(self.energy, per="a million tokens of the first")
        for reason, number in Counter(each.reason for each in others if each.reason).most_common(3):
            yield Line(f"{count(number)} serve nothing: {reason}", soft=True)


def llm_capacity(found: Capacities, *, grid: float | None = None) -> LlmCapacityView:
    """Return the answer to a search; `grid`: grams of CO2 per kWh."""
    notes = [*found.requests.notes, "a range: step times at both ends of their 80 % range."]
    first, energy = next(iter(found.engines), None), None
    if first and first.requests_low and first.busy:
        each_s = 1e6 / first.tokens_per_s_device
        ends = first.requests_per_s / first.requests_high, first.requests_per_s / first.requests_low
        energy = shared.energy(named(found.config.device), each_s, (ends[0] * each_s, ends[1] * each_s),
                              first.busy * each_s, 1, grid, working=SERVING_SHARES)  # fmt: skip
    if len(found.requests) < FEW_REQUESTS:
        notes.append(
            f"{count(len(found.requests))} requests are few: an engine is not full while they come and go, so a steady "
            f"stream may be served at a higher rate; give {count(FEW_REQUESTS)} or more."
        )
    if found.left:
        notes.append(f"the time did not suffice for {count(found.left)} deployments; give more `--seconds`.")
    if found.price_source:
        notes.append(f"price: {digits(found.price_per_h or 0)} USD per device and hour ({found.price_source}).")
    return taken(
        LlmCapacityView, found, found.config, found.requests, headline=_headline(first), energy=energy,
        notes=tuple(notes), next=_next(found.config, first),
    )  # fmt: skip


def _headline(first: EngineCapacity | None) -> str:
    if not first or not first.requests_per_s:
        return "No deployment serves anything within the limits."
    return (
        f"An engine of {things(first.engine.devices, 'device')} ({first.rules}, {first.engine.sequences} sequences) "
        f"serves {_rate(first)} requests per second: {digits(first.tokens_per_s_device)} tokens per second and device."
    )


def _rate(one: EngineCapacity) -> str:
    return f"{digits(one.requests_per_s)} ({digits(one.requests_low)} – {digits(one.requests_high)})"


def _next(asked: SimulationConfig, first: EngineCapacity | None) -> str:
    if not first or not first.requests_per_s:
        return ""
    one = first.engine
    budget = f" --token-budget {one.token_budget}" if one.token_budget else ""
    rules = f"--policy {one.policy}{budget} --sequences {one.sequences}"
    return f"foretrace llm simulate {asked.model} --device {asked.device} --tp {one.tp} --pp {one.pp} {rules}"


# --- calibrate -------------------------------------------------------------------------------------------------------


class LlmCalibrateView(Report, frozen=True, kw_only=True):
    """`foretrace llm calibrate`: overheads of a server, from measured runs of it."""

    command: str = "llm calibrate"
    model: str
    device: str
    devices: int
    stages: int
    level: float  # factor on the time of the devices
    host_s: float  # of a step
    request_s: float  # of a request beside steps
    low: float  # 80 % range of a step's time at other loads, as factors
    high: float
    runs: tuple[CalibratedRun, ...]

    def shown(self, top: int) -> Iterator[Block]:
        """Yield runs before and after, and the range."""
        yield listing(
            self.runs, ("source", "run"), ("load", "load", "digits"), ("ttft_s", "TTFT", "seconds"),
            ("ttft_before_s", "before", "seconds"), ("ttft_after_s", "now", "seconds"), ("tpot_s", "TPOT", "seconds"),
            ("tpot_before_s", "before", "seconds"), ("tpot_after_s", "now", "seconds"), top=top, noun="run",
        )  # fmt: skip
        yield Line(f"{digits(self.low)} to {digits(self.high)} times, 4 times out of 5, for a step at other loads",
                   label="range")  # fmt: skip


def llm_calibrated(found: EngineCalibration, saved: Path | None = None) -> LlmCalibrateView:
    """Return the answer to a calibration."""
    runs = things(len(found.runs), "run")
    sentence = (
        f"This server of {found.model} takes {digits(found.level)} times the predicted time of its devices, "
        f"{seconds(found.host_s)} of host per step and {seconds(found.request_s)} per request, by {runs}."
    )
    simulate = f"foretrace llm simulate {found.model} --device {found.device} --calibration {saved}"
    return taken(LlmCalibrateView, found, headline=sentence, next=simulate if saved else "")


# --- draft -----------------------------------------------------------------------------------------------------------


class LlmDraftView(Report, frozen=True, kw_only=True):
    """`foretrace llm draft`: drafts for speculative decoding, the one that gains most first."""

    command: str = "llm draft"
    target: str
    device: str
    batch: int
    context: int
    drafts: tuple[RankedDraft, ...]

    def shown(self, top: int) -> Iterator[Block]:
        """Yield one row per draft."""
        yield About((f"{self.target} on {self.device}", f"batch {count(self.batch)}", f"context {count(self.context)}"))
        yield listing(
            self.drafts,
            (lambda each: f"{each.layers} x {each.width}", "layers x width"), ("parameters", "parameters", "count"),
            ("latency_s", "latency", "time"), ("acceptance", "accepted"), ("k", "k", "count"),
            ("tau", "tokens", "digits"), ("speedup", "speed-up", "digits"),
            ("speedup_low speedup_high", Column("range", "digits", right=False)),
            (lambda each: seconds(each.must_be_below_s) if each.must_be_below_s else "none", "must be below"),
            (lambda each: count(each.hurts_from_batch) if each.hurts_from_batch else "–", "hurts from batch"),
            top=top, noun="draft", how="--top",
        )  # fmt: skip
        yield Line("tokens: of a round of k proposals; must be below: latency at which they gain nothing", soft=True)


def llm_drafts(setting: DraftSetting, found: tuple[RankedDraft, ...], *, stated: bool) -> LlmDraftView:
    """Return the answer to a search; `stated`: the user said what the target accepts."""
    one = found[0]
    fast = f"{digits(one.speedup)} times as fast"
    gain = (
        f"A draft with {things(one.layers, 'layer')} of {one.width} decodes {fast}" if one.speedup > 1
        else f"No draft gains; the best makes decoding {fast}"
    )  # fmt: skip
    published = "a range of published pairs by parameters (Leviathan et al., 2023, table 3): measure a draft's own"
    source = f"acceptance is {'what you stated, for every draft' if stated else published}."
    return LlmDraftView(
        headline=f"{gain} ({digits(one.speedup_low)} – {digits(one.speedup_high)}) with k = {one.k}.",
        target=setting.target.name, device=setting.device, batch=setting.batch, context=setting.context, drafts=found,
        notes=(source, "latencies are the law of a step; drafts run on one device; nothing was trained or run."),
    )  # fmt: skip
