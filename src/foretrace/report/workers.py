"""Many workers, as answers: `foretrace compression advise`, `stash` and `cloud advise`, with its plot."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from math import log10
from typing import TYPE_CHECKING

import msgspec

from foretrace.experiment.stalls import Stall, Stalls
from foretrace.plan.cloud import Offer, money
from foretrace.plan.compression_advice import CANNOT_TELL, CompressionAdvice, Method
from foretrace.report.blocks import Block, Column, listing, notes, table, text
from foretrace.report.page import filled
from foretrace.report.units import digits, long_time, ranged, seconds, share, span, speed
from foretrace.report.views import Report, Result, taken
from foretrace.techniques.distributed.coding import PRIOR, SIZES, TRAFFIC

if TYPE_CHECKING:
    from foretrace.experiment.differential import Compared
    from foretrace.plan.cloud import RentalAdvice, RentalRequest


class CompressionAdviseView(Report, frozen=True, kw_only=True):
    """`foretrace compression advise`: whether compressing gradients pays."""

    command: str = "compression advise"
    source: str
    verdict: str  # of the best method: pays, does not, cannot tell
    best: str | None  # the method that pays most
    workers: int
    network: str
    gbit_s: float | None  # of the link; null for a file
    gradient_bytes: int
    alone_s: float  # step of one worker
    step_s: float  # with uncompressed messages
    interval_s: tuple[float, float]
    level: float = msgspec.field(name="interval_level")
    free_s: float  # step if messages took no time
    tolerance: float
    # Smallest ratio for a step within `tolerance` of free_s, at no cost; null: none.
    required: float | None = msgspec.field(name="required_ratio")
    required_interval: tuple[float | None, float | None]  # with transfers at the fast and slow end of their range
    methods: tuple[Method, ...]

    def shown(self, top: int) -> Iterator[Block]:
        yield (
            f"one worker {seconds(self.alone_s)} per step; {self.workers} workers {seconds(self.step_s)} "
            f"({span(*self.interval_s)}, {share(self.level)} interval); with free messages "
            f"{seconds(self.free_s)}; gradients {digits(self.gradient_bytes / 1e6)} MB"
        )
        yield listing(
            self.methods, ("short", "method"), ("ratio", "ratio", "ratio"),
            (lambda each: each.encode_s + each.decode_s, "coding", "time"), ("step_s", "step", "time"),
            ("gain_s", "gain", "seconds"),
            ("gain_interval_s", "interval of the gain", "seconds"), "verdict",
            ("pays_below_gbit_s", "gains below, Gbit/s", "digits"),
        )  # fmt: skip


def compression(
    advice: CompressionAdvice, *, source: str, note: str = "", asked: Mapping[str, object] | None = None
) -> CompressionAdviseView:
    """Return the view of an advice; `asked` is what was said of a model that was estimated."""
    best = advice.paying[0].name if advice.paying else None
    do = [str(advice.parallel), *([best] if best else [])]
    words = ["whatif", source, *(word for each in do for word in ("--do", each))]
    if asked:
        words = ["estimate", source, *(f"--{name}={each}" for name, each in asked.items() if each and each != "full")]
    return taken(
        CompressionAdviseView, advice, advice.parallel, headline=_compression_headline(advice), source=source,
        best=best, notes=tuple(filter(None, (*_notes(advice), note))), next=shlex.join(["foretrace", *words]),
    )  # fmt: skip


def _compression_headline(advice: CompressionAdvice) -> str:
    """Return text such as "Compression pays: powersgd takes 41 ms (35 – 47) off a step of 120 ms …; 2.3× is
    needed, …".
    """
    where = f"{advice.parallel.workers} workers on {advice.parallel.network}"
    needed, step = _needed(advice), seconds(advice.step_s)
    if advice.paying:
        best = advice.paying[0]
        return (
            f"Compression pays for {where}: {best.short} takes {seconds(best.gain_s)} ({span(*best.gain_interval_s)}) "
            f"off a step of {step}, {speed(advice.step_s, best.step_s)}; {needed}."
        )
    nearest = max(advice.methods, key=lambda each: each.gain_s)
    low, high = nearest.gain_interval_s
    if nearest.gain_s > 0:
        most = f"{nearest.short} comes nearest, {seconds(nearest.gain_s)} ({span(low, high)}) off a step"
    else:
        lost = f"{seconds(-nearest.gain_s)} ({span(-high, -low)}) on top of a step"
        most = f"every method is predicted to lose, {nearest.short} least, {lost}"
    if advice.verdict == CANNOT_TELL:
        return f"Whether compression pays for {where} cannot be told: {most} of {step}; {needed}."
    return f"Compression does not pay for {where}: {most} of {step}; {needed}."


def _needed(advice: CompressionAdvice) -> str:
    if advice.required is None:
        return f"no ratio brings the step within {share(advice.tolerance)} of free messages, latency alone takes longer"
    if advice.required <= 1:
        return f"it is within {share(advice.tolerance)} of a step with free messages already"
    low, high = advice.required_interval
    span = f" ({_ratio(low)} – {_ratio(high)})"
    return f"near-linear scaling needs a ratio of {_ratio(advice.required)}{span} at no cost"


def _ratio(value: float | None) -> str:
    return "none" if value is None else f"{digits(value)}×"


_CODED = {
    SIZES: "were timed here on buckets of other sizes and interpolated",
    TRAFFIC: "were not timed on this device but follow from their passes over its memory, with wide intervals",
    PRIOR: "were not timed on the recorded machine but are stated priors, with wide intervals",
}


def _notes(advice: CompressionAdvice) -> list[str]:
    found = [f"left out {each}" for each in advice.left_out]
    for how, said in _CODED.items():
        if of := [each.short for each in advice.methods if each.coding == how]:
            found.append(f"encoding and decoding of {', '.join(of)} {said}")
    if advice.gbit_s is None:
        found.append("the network is a file, so it is not said from which bandwidth down a method gains")
    else:
        found.append(
            "gains below: links on which the central prediction is a gain of 1 % of the step or more, to 5 %; the "
            "verdict asks the whole interval of the gain to be one"
        )
    return found


_SHOWN = 12  # offers printed beside those on the front


class StashView(Report, frozen=True, kw_only=True):
    """`foretrace stash`: stalls from one recording, and by differential runs where a script was given."""

    command: str = "stash"
    source: str
    workers: int
    alone_s: float  # step of one worker whose batches lie ready
    recorded_s: float
    interval_s: tuple[float, float]  # of `recorded_s`, 80 %
    predicted: tuple[Stall, ...]
    measured: tuple[Stall, ...]  # empty for a recording
    runs_s: dict[str, tuple[float, ...]]  # seconds per step by run and round
    unknown: tuple[str, ...]

    def shown(self, top: int) -> Iterator[Block]:
        yield f"one worker, batches ready {seconds(self.alone_s)} · as recorded {seconds(self.recorded_s)} per step"
        measured = {bar.name: bar for bar in self.measured}
        predicted = {bar.name: bar for bar in self.predicted}
        rows = []
        for name in dict.fromkeys([*predicted, *measured]):
            sides = [predicted.get(name), *([measured.get(name)] if measured else [])]
            why = next(bar.why for bar in sides if bar is not None)
            rows.append((name, *("–" if bar is None else _said(bar) for bar in sides), why))
        columns = [Column("predicted", right=True), *([Column("measured", right=True)] if measured else [])]
        yield table([Column("stall"), *columns, Column("how", wide=True)], rows)
        yield from notes(self.unknown, "not known")


class CloudAdviseView(Result, frozen=True, kw_only=True):
    """`foretrace cloud advise`: what training would take on rented machines, fastest first."""

    command: str = "cloud advise"
    headline: str
    source: str
    chosen: str  # "" where nothing fits
    samples: int
    epochs: int
    batch: int
    offers: tuple[Offer, ...]
    left_out: tuple[str, ...]
    assumptions: tuple[str, ...]
    next: str

    def shown(self, top: int) -> Iterator[Block]:
        kept = [offer for offer in self.offers if offer.on_front or offer.name == self.chosen]
        rest = [offer for offer in self.offers if offer not in kept][: max(_SHOWN - len(kept), 0)]
        yield listing(
            [offer for offer in self.offers if offer in kept or offer in rest],
            (lambda offer: "»" if offer.name == self.chosen else "*" if offer.on_front else "", ""),
            ("name", "machines"), "device", ("step_s", "step", "seconds"), ("compute_s", "computing", "seconds"),
            ("communication_s", "others", "seconds"), ("data_s", "data", "seconds"),
            (_time, Column("time (80 %)", right=True)),
            (lambda offer: f"{digits(offer.dollars)} {money(offer.currency)}", Column("price", right=True)),
        )  # fmt: skip
        dates = sorted({offer.price_date for offer in self.offers if offer.price_date}) or ["your file"]
        where = ", ".join(sorted({offer.region for offer in self.offers if offer.region}))
        yield f"* nothing else is both faster and cheaper; list prices of {', '.join(dates)}{where and f' in {where}'}"
        yield from notes(self.left_out, "left out")
        yield from notes(self.assumptions, "assumed")


def stash(found: Stalls | Compared, *, source: str, workers: int) -> StashView:
    """Return the view of stalls that were predicted, or predicted and measured."""
    from foretrace.experiment.differential import Compared

    compared = found if isinstance(found, Compared) else None
    predicted: Stalls = found.predicted if isinstance(found, Compared) else found
    bars = compared.measured if compared else predicted.bars
    worst = max(bars, key=lambda bar: bar.share, default=None)
    how = "measured" if compared else "predicted from the recording"
    headline = "No stall can be told."
    if worst is not None and worst.share < 0.01:
        headline = f"Nothing stalls the step by 1 % or more ({how})."
    elif worst is not None:
        headline = f"{worst.name.capitalize()} takes {seconds(worst.seconds)}, {_part(worst)} ({how})."
    return taken(
        StashView, predicted, headline=headline, source=source, workers=workers, predicted=predicted.bars,
        measured=compared.measured if compared else (), runs_s=compared.runs_s if compared else {},
        notes=compared.notes if compared else (),
        next=f"foretrace advise {shlex.quote(source)}" if compared is None else "foretrace rig check",
    )  # fmt: skip


def _said(bar: Stall) -> str:
    return f"{ranged(bar.seconds, bar.low_s, bar.high_s, seconds)}, {_part(bar)}"


def _part(bar: Stall) -> str:
    """Return its share and of which step; each stall is in a step of its own."""
    return share(bar.share) + (f" of a step of {seconds(bar.seconds / bar.share)}" if bar.share > 0 else "")


def cloud(found: RentalAdvice, wanted: RentalRequest, *, source: str) -> CloudAdviseView:
    """Return the view of an advice."""
    chosen = found.chosen
    if chosen is None:
        headline = found.why[0].upper() + found.why[1:] + "."
    else:
        epochs = "an epoch" if wanted.epochs == 1 else f"{wanted.epochs} epochs"
        headline = (
            f"{chosen.name}: {epochs} in {_time(chosen)} for {digits(chosen.dollars)} {money(chosen.currency)} "
            f"({digits(chosen.dollars_low)} – {digits(chosen.dollars_high)}), {found.why}."
        )
    return taken(
        CloudAdviseView, found, wanted, headline=headline, source=source, chosen=chosen.name if chosen else "",
        assumptions=found.assumed, next=f"foretrace advise {shlex.quote(source)}",
    )  # fmt: skip


def _time(offer: Offer) -> str:
    return ranged(offer.hours, offer.hours_low, offer.hours_high, _hours)


def _hours(value: float) -> str:
    return f"{digits(value)} h" if value >= 1 else long_time(3600 * value)


def pareto_svg(view: CloudAdviseView) -> str:
    """Return time against money of every offer, both logarithmic; the front is drawn and named."""
    hours, prices = ([getattr(offer, name) for offer in view.offers] for name in ("hours", "dollars"))
    places = zip(_places(hours), _places(prices), view.offers, strict=True)
    across = f"time of all epochs, {text((min(hours), max(hours)), 'digits')} h"
    up = f"price, {text((min(prices), max(prices)), 'digits')} {money(view.offers[0].currency)}"
    return filled("pareto.svg.j2", [], view=view, dots=[*places], across=across, up=up, time=_time, money=money)


def _places(values: Sequence[float]) -> list[float]:
    """Return where values lie on a logarithmic axis from the least to the most, from 0 to 1."""
    low, high = log10(min(values)), log10(max(values))
    return [(log10(each) - low) / (high - low) if high > low else 0.5 for each in values]
