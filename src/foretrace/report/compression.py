"""What `foretrace compression advise` answers: its view, sentences and terminal text."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from foretrace.report.blocks import Block, Column, Headline, shown, table
from foretrace.report.blocks import notes as remarks
from foretrace.report.units import MINUS, column, digits, seconds, share, speed
from foretrace.report.views import Result, taken

if TYPE_CHECKING:
    from foretrace.plan.compression_advice import CompressionAdvice, Method


class CompressionMethodView(msgspec.Struct, frozen=True, kw_only=True):
    """What one method is predicted to do to the data-parallel step. Seconds and bytes per step and worker."""

    name: str  # as it is written behind --do
    ratio: float  # bytes of the gradients relative to what a worker sends
    sent_bytes: float
    encode_s: float
    decode_s: float
    measured: bool  # encoding and decoding were timed on the recorded machine; else they are a stated prior
    step_s: float
    interval_s: tuple[float, float]
    gain_s: float  # off the uncompressed step; below 0 the method loses
    gain_interval_s: tuple[float, float]
    verdict: str  # pays, does not, cannot tell
    pays_below_gbit_s: float | None  # by the central prediction, on slower links than this; null: none, or a file


class CompressionAdviseView(Result, frozen=True, kw_only=True):
    """`foretrace compression advise`: whether compressing gradients pays."""

    command: str = "compression advise"
    headline: str
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
    interval_level: float
    free_s: float  # step if messages took no time
    tolerance: float
    required_ratio: float | None  # smallest ratio for a step within `tolerance` of free_s, at no cost; null: none
    required_interval: tuple[float | None, float | None]  # with transfers at the fast and slow end of their range
    methods: tuple[CompressionMethodView, ...]
    notes: tuple[str, ...]
    next: str


def advise(advice: CompressionAdvice, *, source: str, notes: Sequence[str] = ()) -> CompressionAdviseView:
    """The view of an advice."""
    from foretrace.plan.compression_advice import CANNOT_TELL, DOES_NOT, PAYS

    paying = advice.paying
    open_ = any(each.verdict == CANNOT_TELL for each in advice.methods)
    best = paying[0] if paying else None
    do = [str(advice.parallel), *([str(best.technique)] if best else [])]
    return taken(
        CompressionAdviseView,
        advice,
        headline=headline(advice),
        source=source,
        verdict=PAYS if best else CANNOT_TELL if open_ else DOES_NOT,
        best=str(best.technique) if best else None,
        workers=advice.parallel.workers,
        network=advice.parallel.network,
        interval_level=advice.level,
        required_ratio=advice.required,
        methods=tuple(_method(each) for each in advice.methods),
        notes=(*_notes(advice), *notes),
        next=shlex.join(["foretrace", "whatif", source, *(word for each in do for word in ("--do", each))]),
    )


def _method(method: Method) -> CompressionMethodView:
    return taken(CompressionMethodView, method, name=str(method.technique))


def headline(advice: CompressionAdvice) -> str:
    """As in "Compression pays: powersgd takes 41 ms (35 – 47) off a step of 120 ms …; 2.3× is needed, …"."""
    from foretrace.plan.compression_advice import CANNOT_TELL

    where = f"{advice.parallel.workers} workers on {advice.parallel.network}"
    needed = _needed(advice)
    if advice.paying:
        best = advice.paying[0]
        low, high = best.gain_interval_s
        return (
            f"Compression pays for {where}: {_short(best)} takes {seconds(best.gain_s)} ({_signed(low)} – "
            f"{_signed(high)}) off a step of {seconds(advice.step_s)}, {speed(advice.step_s, best.step_s)}; {needed}."
        )
    nearest = max(advice.methods, key=lambda each: each.gain_s)
    low, high = nearest.gain_interval_s
    if nearest.gain_s > 0:
        most = (
            f"{_short(nearest)} comes nearest, {seconds(nearest.gain_s)} ({_signed(low)} – {_signed(high)}) off a step"
        )
    else:
        most = (
            f"every method is predicted to lose, {_short(nearest)} least, {seconds(-nearest.gain_s)} "
            f"({_signed(-high)} – {_signed(-low)}) on top of a step"
        )
    if any(each.verdict == CANNOT_TELL for each in advice.methods):
        return f"Whether compression pays for {where} cannot be told: {most} of {seconds(advice.step_s)}; {needed}."
    return f"Compression does not pay for {where}: {most} of {seconds(advice.step_s)}; {needed}."


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


def _signed(value_s: float) -> str:
    return f"{MINUS}{seconds(-value_s)}" if value_s < 0 else seconds(value_s)


def _short(method: Method) -> str:
    """Without the name of the technique: "topk share=0.1"."""
    return str(method.technique).split("method=", 1)[1]


def _notes(advice: CompressionAdvice) -> list[str]:
    found = [f"left out {each}" for each in advice.left_out]
    guessed = [_short(each) for each in advice.methods if not each.measured]
    if guessed:
        found.append(
            f"encoding and decoding of {', '.join(guessed)} were not timed on the recorded machine but are stated "
            "priors, with wide intervals"
        )
    if advice.gbit_s is None:
        found.append("the network is a file, so it is not said from which bandwidth down a method gains")
    else:
        found.append(
            "gains below: links on which the central prediction is a gain; the verdict asks the whole interval of the "
            "gain to be one"
        )
    return found


@shown.register
def _(view: CompressionAdviseView, top: int) -> Iterator[Block]:
    low, high = view.interval_s
    yield Headline(view.headline)
    yield ""
    yield (
        f"one worker {seconds(view.alone_s)} per step; {view.workers} workers {seconds(view.step_s)} "
        f"({seconds(low)} – {seconds(high)}, {share(view.interval_level)} interval); with free messages "
        f"{seconds(view.free_s)}; gradients {digits(view.gradient_bytes / 1e6)} MB"
    )
    yield ""
    codings = column([each.encode_s + each.decode_s for each in view.methods])
    yield table(
        [
            "method", Column("ratio", right=True), Column("coding", right=True), Column("step", "time"),
            Column("gain", right=True), Column("interval of the gain", right=True), "verdict", "gains below",
        ],
        [
            (
                each.name.split("method=", 1)[1], f"{digits(each.ratio)}×", coding + (" " if each.measured else "*"),
                each.step_s, _signed(each.gain_s), " – ".join(map(_signed, each.gain_interval_s)), each.verdict,
                None if each.pays_below_gbit_s is None else f"{digits(each.pays_below_gbit_s)} Gbit/s",
            )
            for each, coding in zip(view.methods, codings, strict=True)
        ],
    )  # fmt: skip
    yield ""
    yield from remarks(f"{'* ' if note.startswith('encoding') else ''}{note}" for note in view.notes)
