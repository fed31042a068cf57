"""What `foretrace serve plan` answers: the best split of a batch over cores, and what became of it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import msgspec

from foretrace.experiment.statistics import MOST_SPREAD, Arm, Ratio
from foretrace.report.blocks import About, Block, Column, Headline, Line, notes, shown, table
from foretrace.report.units import between, digits, seconds, share, speed, things, unit_for
from foretrace.report.views import Result, taken
from foretrace.serving.server.models import ModelSource
from foretrace.serving.server.plan import FAT, INTERFERENCE, NOISE, PlannedSplit, RejectedSplit, SplitPlan
from foretrace.serving.server.trial import AGAIN, SplitTrial


class ServeSplitView(msgspec.Struct, frozen=True, kw_only=True):
    """A split and the latency of a batch that is predicted of it."""

    name: str  # fat: one instance; thin: one per thread; or the split as text
    split: str  # 2x4:16+1x1:8 are two instances with 4 threads and batch 16, one with 1 thread and batch 8
    alone_s: float  # if its instances did not disturb each other
    latency_s: float
    low_s: float
    high_s: float
    interference: float | None  # latency over `alone_s`; null where the split was not run
    over_fat: Ratio | None  # latency over fat's in the same minutes; null where they did not run together


class ServeTrialView(msgspec.Struct, frozen=True, kw_only=True):
    """Splits that were run in turns after the plan was made. Ratios are latencies over fat's."""

    after: str  # the split that is compared with fat
    quickest: str
    predicted: Ratio
    measured: Ratio
    same: Ratio  # fat against itself
    error: float
    verdict: str
    uncertain: str
    arms: dict[str, Arm]


class ServePlanView(Result, frozen=True, kw_only=True):
    """`foretrace serve plan`: how to split cores among instances of a model."""

    command: str = "serve plan"
    headline: str
    model: str
    batch: int
    threads: int
    quantile: float  # of the latency that is least
    origin: str  # where the profile was measured, and of what; "": recorded elsewhere
    profile: str  # its file
    points: int
    chosen: ServeSplitView
    splits: tuple[ServeSplitView, ...]  # the best first
    rejected: tuple[RejectedSplit, ...]
    trial: ServeTrialView | None  # null where nothing was run for comparison
    ledger: str
    row: str
    notes: tuple[str, ...]
    next: str


def planned(plan: SplitPlan, trial: SplitTrial | None = None, ledger: str = "", row: str = "") -> ServePlanView:
    """The answer about a plan, with what became of it and where its row went."""
    splits = tuple(_split(each, plan) for each in plan.splits)
    return taken(
        ServePlanView,
        plan,
        headline=_headline(plan),
        model=plan.profile.model,
        origin=plan.profile.origin,
        profile=str(plan.path or ""),
        points=len(plan.profile.samples_s),
        chosen=splits[0],
        splits=splits,
        trial=None
        if trial is None
        else taken(ServeTrialView, trial, after=trial.after.name, verdict=str(trial.verdict)),
        ledger=ledger,
        row=row,
        notes=(*plan.notes, *_unmeasured(plan)),
        next="" if plan.source is None else _serve(plan.source, plan.chosen.split.text),
    )


def _serve(source: ModelSource, split: str) -> str:
    """The command that serves the model so."""
    words = [source.name, *(["--size", source.size] if source.size != "full" else [])]
    for each in source.inputs:
        words += ["--input", f"{each.name}={each.dtype}[{','.join(map(str, each.sizes))}]"]
    return shlex.join(["foretrace", "serve", *words, "--split", split])


def _split(each: PlannedSplit, plan: SplitPlan) -> ServeSplitView:
    return taken(
        ServeSplitView,
        each,
        split=each.split.text,
        interference=None if each.run is None else each.interference,
        over_fat=plan.ratios.get(each.name),
    )


def _headline(plan: SplitPlan) -> str:
    """As in "2 × (1 thread, batch 32): 15.2 ms (10.8 – 21.1) per batch of 64, 1.43× faster than one instance …"."""
    best, fat = plan.chosen, plan.named(FAT)
    unit = unit_for(best.latency_s)
    time = f"{digits(best.latency_s / unit.seconds)} {unit.name} ({between(best.low_s, best.high_s, unit)})"
    kind = "" if plan.quantile == 0.5 else f" at p{100 * plan.quantile:g}"
    if fat is None:
        gain = "one instance with all threads could not be predicted"
    elif best is fat:
        others = [each for each in plan.splits if each is not fat]
        gain = f"the next best takes {digits(others[0].latency_s / fat.latency_s)}×" if others else "the only one"
    else:
        ratio = plan.ratios.get(best.name) if plan.quantile == 0.5 else None  # it is of means, not of a tail
        after_s = fat.latency_s * ratio.value if ratio else best.latency_s
        gain = f"{speed(fat.latency_s, after_s)} than one instance with {things(plan.threads, 'thread')}"
        if ratio is not None and ratio.high >= 1:
            gain += f", within noise (latency {_numbers(ratio)} of its)"
    return f"{best.split}: {time}{kind} per batch of {plan.batch}; {gain}."


def _unmeasured(plan: SplitPlan) -> Iterator[str]:
    """What the ranges rest on where it was not measured."""
    if plan.source is None:
        low, high = INTERFERENCE
        yield (
            f"The profile was recorded elsewhere: instances that run at once are assumed to take {digits(low)} – "
            f"{digits(high)}× as long as alone, and a latency without its spread to be known to {share(NOISE)}."
        )
        return
    if odd := [each for each in plan.splits if each.run is not None and each.interference < 1 / (1 + MOST_SPREAD)]:
        yield (
            f"{odd[0].name} took {digits(odd[0].interference)}× what its profile says: others disturbed the profile; "
            f"remove {plan.path} to measure it again."
        )
    if left := sum(each.run is None for each in plan.splits):
        yield (
            f"{things(left, 'split')} did not run: alone, one of its instances takes longer than the best split, or "
            "enough others ran."
        )


@shown.register
def _(view: ServePlanView, top: int) -> Iterator[Block]:
    what = f"{view.model} · batch {view.batch} · {things(view.threads, 'thread')} · {things(view.points, 'point')}"
    yield About((what, view.origin or f"recorded in {view.profile}"))
    yield ""
    yield Headline(view.headline)
    yield ""
    unit = unit_for(max(each.high_s for each in view.splits[:top]))
    yield table(
        [
            "instances x threads : batch", Column("latency", "time"), Column(f"range, {unit.name}", right=True),
            Column("alone", "time", least=80), Column("interference", right=True, least=100),
            Column("over fat", right=True, least=100, under=True),
        ],
        [
            (
                each.split if each.name == each.split else f"{each.split} ({each.name})", each.latency_s,
                between(each.low_s, each.high_s, unit), each.alone_s,
                "not run" if each.interference is None else f"{digits(each.interference)}×",
                "–" if each.over_fat is None else _numbers(each.over_fat),
            )
            for each in view.splits
        ],
        top=top, noun="split",
    )  # fmt: skip
    if view.trial is not None:
        yield from _trial(view.trial)
    yield from notes((f"{each.name}: {each.why}" for each in view.rejected), "left out")
    yield from notes(view.notes)
    if view.trial is not None:
        yield f"row {view.row[:8]} added to {view.ledger}" if view.ledger else "no row was written"


def _trial(trial: ServeTrialView) -> Iterator[Block]:
    yield ""
    yield table(
        ["run in turns", Column("latency", "seconds"), Column("p10 – p90", right=True), Column("spread", "share")],
        [
            (
                name if name != AGAIN else f"{FAT}, second copy", arm.median_s,
                f"{seconds(arm.p10_s)} – {seconds(arm.p90_s)}", arm.spread,
            )
            for name, arm in trial.arms.items()
        ],
    )  # fmt: skip
    yield Line(
        f"{trial.after} takes {_numbers(trial.measured)} of fat's latency, predicted {_numbers(trial.predicted)}; fat "
        f"against itself came to {_numbers(trial.same)}; the quickest was {trial.quickest}",
        label="measured",
    )
    yield Line(f"{trial.verdict}: {trial.uncertain}" if trial.uncertain else trial.verdict, label="verdict")


def _numbers(ratio: Ratio) -> str:
    return f"{digits(ratio.value)} ({digits(ratio.low)} – {digits(ratio.high)})"
