"""What `foretrace compression advise` answers: its view, sentences and terminal text."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

import msgspec

from foretrace.plan.compression_advice import CANNOT_TELL, CompressionAdvice, Method
from foretrace.report.blocks import Block, listing
from foretrace.report.units import digits, seconds, share, span, speed
from foretrace.report.views import Report, taken
from foretrace.techniques.distributed.coding import PRIOR, SIZES, TRAFFIC


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


def advise(
    advice: CompressionAdvice, *, source: str, note: str = "", asked: Mapping[str, object] | None = None
) -> CompressionAdviseView:
    """Return the view of an advice; `asked` is what was said of a model that was estimated."""
    best = advice.paying[0].name if advice.paying else None
    do = [str(advice.parallel), *([best] if best else [])]
    words = ["whatif", source, *(word for each in do for word in ("--do", each))]
    if asked:
        words = ["estimate", source, *(f"--{name}={each}" for name, each in asked.items() if each and each != "full")]
    return taken(
        CompressionAdviseView, advice, advice.parallel, headline=headline(advice), source=source, best=best,
        notes=tuple(filter(None, (*_notes(advice), note))), next=shlex.join(["foretrace", *words]),
    )  # fmt: skip


def headline(advice: CompressionAdvice) -> str:
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


_SAID = {
    SIZES: "were timed here on buckets of other sizes and interpolated",
    TRAFFIC: "were not timed on this device but follow from their passes over its memory, with wide intervals",
    PRIOR: "were not timed on the recorded machine but are stated priors, with wide intervals",
}


def _notes(advice: CompressionAdvice) -> list[str]:
    found = [f"left out {each}" for each in advice.left_out]
    for how, said in _SAID.items():
        if of := [each.short for each in advice.methods if each.coding == how]:
            found.append(f"encoding and decoding of {', '.join(of)} {said}")
    if advice.gbit_s is None:
        found.append("the network is a file, so it is not said from which bandwidth down a method gains")
    else:
        found.append(
            "gains below: links on which the central prediction is a gain; the verdict asks the whole interval of the "
            "gain to be one"
        )
    return found
