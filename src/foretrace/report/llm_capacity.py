"""`foretrace llm capacity` as an answer: what each deployment of a model serves within limits, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from foretrace.hardware.devices import named
from foretrace.hardware.power import SERVING_SHARES
from foretrace.report import power
from foretrace.report.blocks import About, Block, Chart, Column, Curve, Line, listing
from foretrace.report.power import EnergyView
from foretrace.report.units import count, digits, things
from foretrace.report.views import Report, taken
from foretrace.serving.llm.capacity import Capacities, EngineCapacity


class LlmCapacityView(Report, frozen=True, kw_only=True):
    """`foretrace llm capacity`: deployments, best first by tokens per second and device."""

    command: str = "llm capacity"
    model: str
    device: str
    slo: str
    source: str
    engines: tuple[EngineCapacity, ...]
    left: int  # deployments that the time did not suffice for
    price_per_h: float | None  # of a device, US dollars
    energy: EnergyView | None  # of a million tokens of the first engine; null where there is no power model

    def shown(self, top: int) -> Iterator[Block]:
        yield About((f"{self.model} on {self.device}", self.slo, self.source))
        best = [each for each in self.engines if each.best]
        if best:
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
        yield from power.shown(self.energy, per="a million tokens of the first")
        for reason, number in Counter(each.reason for each in others if each.reason).most_common(3):
            yield Line(f"{count(number)} serve nothing: {reason}", soft=True)


def llm_capacity(found: Capacities, *, grid: float | None = None) -> LlmCapacityView:
    """Return the answer to a search; `grid`: grams of CO2 per kWh."""
    notes = [*found.requests.notes, "a range: step times at both ends of their 80 % range."]
    first, energy = next(iter(found.engines), None), None
    if first and first.requests_low and first.busy:
        each_s = 1e6 / first.tokens_per_s_device
        ends = first.requests_per_s / first.requests_high, first.requests_per_s / first.requests_low
        energy = power.energy(named(found.config.device), each_s, (ends[0] * each_s, ends[1] * each_s),
                              first.busy * each_s, 1, grid, working=SERVING_SHARES)  # fmt: skip
    if found.left:
        notes.append(f"the time did not suffice for {count(found.left)} deployments; give more `--seconds`.")
    if found.price_source:
        notes.append(f"price: {digits(found.price_per_h or 0)} USD per device and hour ({found.price_source}).")
    return taken(
        LlmCapacityView, found, found.config, found.requests, headline=_headline(found.engines), energy=energy,
        notes=tuple(notes), next=_next(found, found.engines),
    )  # fmt: skip


def _headline(engines: tuple[EngineCapacity, ...]) -> str:
    served = [each for each in engines if each.requests_per_s]
    if not served:
        return "No deployment serves anything within the limits."
    first = served[0]
    return (
        f"An engine of {things(first.engine.devices, 'device')} ({first.rules}, {first.engine.sequences} sequences) "
        f"serves {_rate(first)} requests per second: {digits(first.tokens_per_s_device)} tokens per second and device."
    )


def _rate(one: EngineCapacity) -> str:
    return f"{digits(one.requests_per_s)} ({digits(one.requests_low)} – {digits(one.requests_high)})"


def _next(found: Capacities, engines: tuple[EngineCapacity, ...]) -> str:
    if not engines or not engines[0].requests_per_s:
        return ""
    one, asked = engines[0].engine, found.config
    budget = f" --token-budget {one.token_budget}" if one.token_budget else ""
    rules = f"--policy {one.policy}{budget} --sequences {one.sequences}"
    return f"foretrace llm simulate {asked.model} --device {asked.device} --tp {one.tp} --pp {one.pp} {rules}"
