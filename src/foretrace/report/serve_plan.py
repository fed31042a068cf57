"""What `foretrace serve plan` answers: the best split of a batch over cores, and what became of it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import msgspec

from foretrace.experiment.statistics import MOST_SPREAD, Arm, Ratio
from foretrace.report.blocks import About, Block, Column, Line, listing, notes
from foretrace.report.units import between, digits, share, span, speed, things, unit_for
from foretrace.report.views import Report, taken
from foretrace.serving.server.models import ModelSource
from foretrace.serving.server.plan import FAT, INTERFERENCE, NOISE, PlannedSplit, RejectedSplit, SplitPlan
from foretrace.serving.server.trial import AGAIN, ALONE, SplitTrial

_ARMS = {AGAIN: f"{FAT}, second copy", ALONE: "PyTorch alone"}


class ServeTrialView(msgspec.Struct, frozen=True, kw_only=True):
    """Splits that were run in turns after the plan was made. Ratios are latencies over fat's."""

    after: str  # the split that is compared with fat
    quickest: str
    predicted: Ratio
    measured: Ratio
    same: Ratio  # fat against itself
    over_alone: Ratio | None  # latency over that of PyTorch without a server; null with ONNX Runtime
    error: float
    verdict: str
    uncertain: str
    arms: dict[str, Arm]

    def shown(self) -> Iterator[Block]:
        """Yield arms, ratios and verdict."""
        yield listing(
            self.arms.items(),
            (lambda arm: _ARMS.get(arm[0], arm[0]), "run in turns"),
            (lambda arm: arm[1].median_s, "latency", "seconds"),
            (lambda arm: span(arm[1].p10_s, arm[1].p90_s), Column("p10 – p90", right=True)),
            (lambda arm: arm[1].spread, "spread", "share"),
        )
        yield Line(
            f"{self.after} takes {_numbers(self.measured)} of fat's latency, predicted {_numbers(self.predicted)}; fat "
            f"against itself came to {_numbers(self.same)}; the quickest was {self.quickest}",
            label="measured",
        )
        if self.over_alone is not None:
            yield f"{self.after} takes {_numbers(self.over_alone)} of PyTorch's latency on all cores without a server"
        yield Line(f"{self.verdict}: {self.uncertain}" if self.uncertain else self.verdict, label="verdict")


class ServePlanView(Report, frozen=True, kw_only=True):
    """`foretrace serve plan`: how to split cores among instances of a model."""

    command: str = "serve plan"
    model: str
    batch: int
    threads: int
    quantile: float  # of the latency that is least
    origin: str  # where the profile was measured, and of what; "": recorded elsewhere
    profile: str  # its file
    points: int
    chosen: PlannedSplit
    splits: tuple[PlannedSplit, ...]  # the best first
    rejected: tuple[RejectedSplit, ...]
    trial: ServeTrialView | None  # null where nothing was run for comparison
    ledger: str
    row: str

    def shown(self, top: int) -> Iterator[Block]:
        what = f"{self.model} · batch {self.batch} · {things(self.threads, 'thread')} · {things(self.points, 'point')}"
        yield About((what, self.origin or f"recorded in {self.profile}"))
        unit = unit_for(max(each.high_s for each in self.splits[:top]))
        yield listing(
            self.splits,
            (lambda each: each.split + f" ({each.name})" * (each.name != each.split), "instances x threads : batch"),
            ("latency_s", "latency", "time"),
            (lambda each: between(each.low_s, each.high_s, unit), Column(f"range, {unit.name}", right=True)),
            ("alone_s", Column("alone", "time", least=80)),
            (_interfered, Column("interference", right=True, least=100)),
            (lambda each: _numbers(each.over_fat), Column("over fat", right=True, least=100, under=True)),
            top=top,
            noun="split",
        )
        if self.trial is not None:
            yield from self.trial.shown()
        yield from notes((f"{each.name}: {each.why}" for each in self.rejected), "left out")
        if self.trial is not None:
            yield f"row {self.row[:8]} added to {self.ledger}" if self.ledger else "no row was written"


def planned(plan: SplitPlan, trial: SplitTrial | None = None, ledger: str = "", row: str = "") -> ServePlanView:
    """Return the answer about a plan, with what became of it and where its row went."""
    return taken(
        ServePlanView,
        plan,
        headline=_headline(plan),
        model=plan.profile.model,
        origin=plan.profile.origin,
        profile=str(plan.path or ""),
        points=len(plan.profile.samples_s),
        trial=None if trial is None else taken(ServeTrialView, trial.trial, trial, after=trial.after.name),
        ledger=ledger,
        row=row,
        notes=(*plan.notes, *_unmeasured(plan), *(() if trial else _sleeping(plan))),
        next="" if plan.source is None else _serve(plan.source, plan.chosen.split),
    )


def _serve(source: ModelSource, split: str) -> str:
    """Return the command that serves the model so."""
    words = [source.name, *(["--size", source.size] if source.size != "full" else [])]
    for each in source.inputs:
        words += ["--input", f"{each.name}={each.dtype}[{','.join(map(str, each.sizes))}]"]
    return shlex.join(["foretrace", "serve", *words, "--split", split])


def _headline(plan: SplitPlan) -> str:
    """Return text such as "2 × (1 thread, batch 32): 15.2 ms (10.8 – 21.1) per batch of 64, 1.43× faster than one
    instance …".
    """
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
        ratio = best.over_fat if plan.quantile == 0.5 else None  # it is of means, not of a tail
        after_s = fat.latency_s * ratio.value if ratio else best.latency_s
        gain = f"{speed(fat.latency_s, after_s)} than one instance with {things(plan.threads, 'thread')}"
        if ratio is not None and ratio.high >= 1:
            gain += f", within noise (latency {_numbers(ratio)} of its)"
    return f"{best.instances}: {time}{kind} per batch of {plan.batch}; {gain}."


def _unmeasured(plan: SplitPlan) -> Iterator[str]:
    """Yield what the ranges rest on where it was not measured."""
    if plan.source is None:
        low, high = INTERFERENCE
        yield (
            f"The profile was recorded elsewhere: instances that run at once are assumed to take {digits(low)} – "
            f"{digits(high)}× as long as alone, and a latency without its spread to be known to {share(NOISE)}."
        )
        return
    if odd := [each for each in plan.splits if (each.interference or 1) < 1 / (1 + MOST_SPREAD)]:
        yield (
            f"{odd[0].name} took {_interfered(odd[0])} what its profile says: others disturbed the profile; "
            f"remove {plan.path} to measure it again."
        )
    if left := sum(each.interference is None for each in plan.splits):
        yield (
            f"{things(left, 'split')} did not run: alone, one of its instances takes longer than the best split, or "
            "enough others ran."
        )


def _sleeping(plan: SplitPlan) -> Iterator[str]:
    """Yield what one instance of a server is slower than, unless that was run."""
    if plan.source is not None and "torch" in plan.source.libraries and plan.threads > 1:
        yield (
            "One instance is as the server runs it: its threads sleep while they wait, so PyTorch by itself may be "
            "quicker; --run compares with both."
        )


def _interfered(each: PlannedSplit) -> str:
    return "not run" if each.interference is None else f"{digits(each.interference)}×"


def _numbers(ratio: Ratio | None) -> str:
    return "–" if ratio is None else f"{digits(ratio.value)} ({digits(ratio.low)} – {digits(ratio.high)})"
