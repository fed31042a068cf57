"""Answers about compiled code: `foretrace program`, `kernels`, and `rewrite` to faster operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from foretrace.cost.programs.rank import RankedSchedule, Ranking
from foretrace.experiment.kernels import CompiledStep, GeneratedKernel
from foretrace.experiment.statistics import Ratio
from foretrace.plan.rewrite.measure import Check
from foretrace.plan.rewrite.session import RewriteRequest, Rewritten, RuleUse
from foretrace.report.blocks import About, Bar, BarPart, Bars, Block, Column, Line, listing, table
from foretrace.report.units import digits, ranged, scaled, seconds, share, signed, span, speed, things, within
from foretrace.report.views import Report, Result, taken


class ProgramView(Report, frozen=True, kw_only=True):
    """`foretrace program`: schedules of a task, the fastest first."""

    command: str = "program"
    kind: str
    sizes: dict[str, int]
    flops: int
    predictor: str
    other_processor: bool
    candidates: tuple[RankedSchedule, ...]

    def shown(self, top: int) -> Iterator[Block]:
        yield About((f"{self.kind} {' '.join(f'{name}={value}' for name, value in self.sizes.items())}", "one thread"))
        yield listing(
            self.candidates,
            ("loops", "loops from the outermost in", "name"),
            ("predicted_s", "predicted", "time"),
            ("low_s high_s", "range", "seconds"),
            ("measured_s", "measured", "time"),
            ("binds", "what binds"),
            top=top, noun="schedule", how="--top",
        )  # fmt: skip
        yield f"predicted by {self.predictor}"


def program(found: Ranking) -> ProgramView:
    """Return the answer about one task."""
    best, slowest = found.candidates[0], found.candidates[-1]
    told = "measured" if best.measured_s is not None else span(best.low_s, best.high_s)
    binding = Counter(each.binds for each in found.candidates).most_common(1)[0]
    notes = [f"{binding[0]} binds {binding[1]} of them; loops marked v are vector lanes, u are unrolled."]
    if found.foreign:
        notes.append("nothing was measured on this processor, so ranges are wide: --calibrate 30s fits them to it.")
    return taken(
        ProgramView, found,
        headline=(
            f"The best of {things(len(found.candidates), 'schedule')} takes {seconds(best.time_s)} ({told}), "
            f"{scaled(found.flops / best.time_s, 'FLOP/s')}; the slowest {digits(slowest.time_s / best.time_s)} times "
            f"as long. {best.binds.capitalize() if best.binds[0].islower() else best.binds} binds it."
        ),
        notes=tuple(notes), kind=found.task.kind, sizes=dict(found.task.sizes), predictor=found.predictor.about,
        other_processor=found.foreign,
    )  # fmt: skip


class KernelsView(Report, frozen=True, kw_only=True):
    """`foretrace kernels`: a compiled training step and its parts."""

    command: str = "kernels"
    model: str
    threads: int
    steps: int
    step_s: float
    interval_s: tuple[float, float]
    eager_s: float
    kernels_s: float
    framework_s: float
    pages_s: float
    sum_s: float
    compile_s: float
    kernels: tuple[GeneratedKernel, ...]
    modules: tuple[str, ...]

    def shown(self, top: int) -> Iterator[Block]:
        yield About((self.model, things(self.threads, "thread"), f"{things(self.steps, 'step')} of each kind in turns"))
        fused = sum(each.time_s for each in self.kernels if each.fused)
        parts = (
            BarPart("compute", "fused", fused), BarPart("exposed_copy", "library", self.kernels_s - fused),
            BarPart("idle", "framework, loss, optimizer", self.framework_s),
            BarPart("synchronisation", "pages", self.pages_s),
        )  # fmt: skip
        yield Bars((Bar("step", parts),), legend=True)
        rows = sorted(self.kernels, key=lambda each: -each.time_s)
        yield listing(
            rows, ("name", "kernel", "name"), (lambda each: "fused" if each.fused else "library", "made by"),
            ("calls", "calls", "count"), ("time_s", "time", "time"),
            (lambda each: each.time_s / self.step_s, "of the step", "share"), ("page_faults", "page faults", "count"),
            top=top, noun="kernel", how="--top",
        )  # fmt: skip
        for each in self.modules[:3]:
            yield Line(each, label="code", soft=True, whole=True)


def kernels(found: CompiledStep, model: str) -> KernelsView:
    """Return the answer about one training."""
    step, off = found.step_s, found.sum_s / found.step_s - 1
    return taken(
        KernelsView,
        found,
        model=model,
        interval_s=(found.low_s, found.high_s),
        headline=(
            f"The compiled step takes {within(step, (found.low_s, found.high_s))}: kernels {seconds(found.kernels_s)}, "
            f"framework, loss and optimizer {seconds(found.framework_s)}, pages {seconds(found.pages_s)}; their sum is "
            f"{signed(off)} off the step."
        ),
        notes=(
            f"a step without the compiler takes {seconds(found.eager_s)}.",
            f"compiling took {seconds(found.compile_s)}; kernels are {share(found.kernels_s / step)} of the step.",
        ),
    )  # fmt: skip


class RulesView(msgspec.Struct, frozen=True, kw_only=True):
    """Rules of which the search could choose."""

    verified: int  # hold in float64 on random examples, and are used
    unusable: dict[str, str]  # rule -> why it is left out
    idle: tuple[str, ...]  # imported ones that hold but find nothing in graphs in normal form


class RewriteTimesView(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds per run of one model."""

    median_s: float
    p10_s: float
    p90_s: float


class RewriteMeasuredView(msgspec.Struct, frozen=True, kw_only=True):
    """Models that ran in turns: the original, its operators without its Python code, the rewritten one."""

    clock: str  # "cpu" or "wall"
    threads: int
    rounds: int
    times: dict[str, RewriteTimesView]  # original, captured, rewritten
    gains: dict[str, Ratio]  # captured, rewritten: time of the original over theirs, 80 % interval


class RewriteView(Result, frozen=True, kw_only=True):
    """`foretrace rewrite`: a model rewritten into an equal, faster one."""

    command: str = "rewrite"
    headline: str
    source: str
    size: str
    batch: int
    alpha: float
    budget: int
    costs: str  # "measured" or the model and device
    before_s: float  # sum of operators, original
    after_s: float
    predicted: float  # before over after
    measured: RewriteMeasuredView | None
    check: Check
    operators_before: int
    operators_after: int
    used: tuple[RuleUse, ...]
    rules: RulesView
    parts: int
    alike: int  # parts that equal one searched before
    steps: int  # graphs expanded
    seen: int = msgspec.field(name="graphs")  # graphs priced
    priced: int = msgspec.field(name="operators_priced")
    complete: bool  # no search ended early
    search_s: float
    notes: tuple[str, ...]
    wrote: str  # "" where nothing was

    def shown(self, top: int) -> Iterator[Block]:
        yield About(tuple(filter(None, (self.source, self.size, f"batch {self.batch}", f"alpha {self.alpha:g}"))))
        yield table(["", Column(wide=True)], _figures(self))
        rule, what = ("name", "rule"), ("what", Column(wide=True))
        yield listing(self.used, rule, ("uses", "places", "count"), ("sweeps", "sweeps", "count"), what)
        yield (
            f"searched {self.seen:,} graphs in {self.parts} parts ({self.alike} alike) with {self.rules.verified} "
            f"verified rules; {self.priced:,} distinct operators priced; {seconds(self.search_s)}"
        )
        if self.rules.unusable:
            yield Line(f"{len(self.rules.unusable)} rules that do not hold; --json says why", label="left out")


def rewriting(
    found: Rewritten, wanted: RewriteRequest, *, source: str, size: str, batch: int, wrote: str = ""
) -> RewriteView:
    """Return the view of a rewriting."""
    done = found.rewriting
    measured = None
    if found.gain is not None:
        times = {name: taken(RewriteTimesView, arm) for name, arm in found.gain.arms.items()}
        measured = taken(RewriteMeasuredView, found.gain, times=times)
    return taken(
        RewriteView, found, done, wanted, headline=_headline(found, measured), source=source, size=size, batch=batch,
        measured=measured, operators_before=len(done.before.order()), operators_after=len(done.after.order()),
        rules=RulesView(
            verified=sum(each.holds for each in found.verdicts),
            unusable={each.name: each.why for each in found.verdicts if not each.holds},
            idle=found.idle,
        ),
        notes=_notes(found), wrote=wrote,
    )  # fmt: skip


def _headline(found: Rewritten, measured: RewriteMeasuredView | None) -> str:
    if not found.check.equal:
        return "The rewritten model is not equal to the original within the tolerances; do not use it."
    if not found.rewriting.rules:
        return "No rule makes this model faster here."
    done = found.rewriting
    if measured is None:
        return f"{_sentence(speed(done.before_s, done.after_s))} as its operators add up ({found.costs}); not measured."
    gain = measured.gains["rewritten"]
    before, after = measured.times["original"].median_s, measured.times["rewritten"].median_s
    interval = f"{digits(gain.low)} – {digits(gain.high)}×"
    if gain.low <= 1.0 <= gain.high:
        return f"No measurable change: {seconds(before)} before, {seconds(after)} after ({interval})."
    return f"{_sentence(speed(gain.value, 1.0))}: {seconds(before)} → {seconds(after)} per run ({interval}, measured)."


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _notes(found: Rewritten) -> tuple[str, ...]:
    notes = []
    if found.untimed:
        names = ", ".join(f"{op} ({why})" for op, why in sorted(found.untimed.items())[:4])
        notes.append(f"without a cost, left out before and after: {names}")
    if found.near is not None:
        notes.append(
            f"operators find {100 * found.near:.0f} % of their data in warm caches, from one run of the original"
        )
    if not found.rewriting.complete:
        notes.append("the search ended by its budget or time; --budget more graphs may find more")
    if found.check.response < 1e-6:
        notes.append("the output hardly depends on the input, so the check of equality says little")
    if found.costs != "measured":
        notes.append("costs are those of another device than the one that the models ran on")
    return tuple(notes)


def _figures(view: RewriteView) -> Iterator[tuple[str, str]]:
    times = f"{seconds(view.before_s)} → {seconds(view.after_s)}"
    yield "operators", f"{view.operators_before} → {view.operators_after}"
    yield "predicted", f"{speed(view.before_s, view.after_s)}: {times} (sum of operators, {view.costs})"
    if view.measured is not None:
        measured = view.measured
        runs = f"{measured.rounds} rounds in turns, {measured.threads} thread{'s' * (measured.threads != 1)}"
        yield "measured", f"{runs}, {'CPU' if measured.clock == 'cpu' else 'wall'} clock, 80 % intervals"
        for name, each in measured.times.items():
            gain = measured.gains.get(name)
            ratio = f"   {ranged(gain.value, gain.low, gain.high)} times as fast" if gain else ""
            yield f"  {name}", f"{seconds(each.median_s)}{ratio}"
    check = view.check
    yield (
        "equal",
        f"{'yes' if check.equal else 'NO'}: float64 within {check.float64:.1g} (tolerance "
        f"{check.float64_tolerance:.0e}), float32 within {check.float32:.1g} (tolerance {check.float32_tolerance:.0e}; "
        f"the original's own rounding {check.float32_original:.1g})",
    )
