"""What `foretrace serve plan` and `serve load` answer: the best split of a batch over cores, and times of a server."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from foretrace.experiment.statistics import MOST_SPREAD, Ratio
from foretrace.report.blocks import About, Block, Column, Line, listing, notes, table
from foretrace.report.names import command
from foretrace.report.units import between, count, digits, seconds, share, span, speed, things, unit_for
from foretrace.report.views import Report, Result, taken
from foretrace.serving.server import plan as plans
from foretrace.serving.server.load import LoadResult
from foretrace.serving.server.models import ModelSource
from foretrace.serving.server.plan import FAT, PlannedSplit, RejectedSplit, SplitPlan, SplitTrial

_ARMS = {plans.AGAIN: f"{FAT}, second copy", plans.ALONE: "PyTorch alone"}
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
_LATE = 0.1  # of the median latency: from then on the generator is part of what it measures


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
    trial: SplitTrial | None  # null where nothing was run for comparison
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
            ("alone_s", Column("alone", "time", extra=True)),
            (_interfered, Column("interference", right=True, extra=True)),
            (lambda each: _numbers(each.over_fat), Column("over fat", right=True)),
            top=top, noun="split",
        )  # fmt: skip
        if self.trial is not None:
            yield from _trial(self.trial)
        yield from notes((f"{each.name}: {each.why}" for each in self.rejected), "left out")
        if self.trial is not None:
            yield f"row {self.row[:8]} added to {self.ledger}" if self.ledger else "no row was written"


def _trial(found: SplitTrial) -> Iterator[Block]:
    """Yield arms, ratios and verdict."""
    yield listing(
        found.arms.items(), (lambda arm: _ARMS.get(arm[0], arm[0]), "run in turns"),
        (lambda arm: arm[1].median_s, "latency", "seconds"),
        (lambda arm: span(arm[1].p10_s, arm[1].p90_s), Column("p10 – p90", right=True)),
        (lambda arm: arm[1].spread, "spread", "share"),
    )  # fmt: skip
    yield Line(
        f"{found.after} takes {_numbers(found.measured)} of fat's latency, predicted {_numbers(found.predicted)}; fat "
        f"against itself came to {_numbers(found.same)}; the quickest was {found.quickest}", label="measured",
    )  # fmt: skip
    if found.over_alone is not None:
        yield f"{found.after} takes {_numbers(found.over_alone)} of PyTorch's latency on all cores without a server"
    yield Line(f"{found.verdict}: {found.uncertain}" if found.uncertain else found.verdict, label="verdict")


def planned(plan: SplitPlan, trial: SplitTrial | None = None, ledger: str = "", row: str = "") -> ServePlanView:
    """Return the answer about a plan, with what became of it and where its row went."""
    return taken(
        ServePlanView, plan, headline=_headline(plan), model=plan.profile.model, origin=plan.profile.origin,
        profile=str(plan.path or ""), points=len(plan.profile.samples_s), trial=trial, ledger=ledger, row=row,
        notes=(*plan.notes, *_unmeasured(plan, tried=trial is not None)),
        next="" if plan.source is None else _serve(plan.source, plan.chosen.split),
    )  # fmt: skip


def _serve(source: ModelSource, split: str) -> str:
    """Return the command that serves the model so."""
    inputs = [f"{each.name}={each.dtype}[{','.join(map(str, each.sizes))}]" for each in source.inputs]
    size = source.size if source.size != "full" else ""
    return command("serve", source.name, size=size, input=inputs, split=split)


def _headline(plan: SplitPlan) -> str:
    """Return text such as "2 × (1 thread, batch 32): 15.2 ms (10.8 – 21.1) per batch of 64, 1.43× faster than …"."""
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


def _unmeasured(plan: SplitPlan, *, tried: bool) -> Iterator[str]:
    """Yield what the answer rests on where it was not measured."""
    if plan.source is None:
        low, high = plans.INTERFERENCE
        yield (
            f"The profile was recorded elsewhere: instances that run at once are assumed to take {digits(low)} – "
            f"{digits(high)}× as long as alone, and a latency without its spread to be known to {share(plans.NOISE)}."
        )
        return
    if odd := [each for each in plan.splits if (each.interference or 1) < 1 / (1 + MOST_SPREAD)]:
        yield (
            f"{odd[0].name} took {_interfered(odd[0])} what its profile says: others disturbed the profile; "
            f"remove {plan.path} to measure it again."
        )
    if left := sum(each.interference is None for each in plan.splits):
        yield f"{things(left, 'split')} did not run: others take less by their instances alone."
    if "torch" in plan.source.libraries and plan.threads > 1 and not tried:
        yield (
            "One instance is as the server runs it: its threads sleep while they wait, so PyTorch by itself may be "
            "quicker; --run compares with both."
        )


def _interfered(each: PlannedSplit) -> str:
    return "not run" if each.interference is None else f"{digits(each.interference)}×"


def _numbers(ratio: Ratio | None) -> str:
    return "–" if ratio is None else f"{digits(ratio.value)} ({digits(ratio.low)} – {digits(ratio.high)})"


class ServeLoadView(Result, frozen=True, kw_only=True):
    """`foretrace serve load`: what became of requests."""

    command: str = "serve load"
    headline: str
    url: str
    model: str
    arrivals: str  # constant, poisson, diurnal, or the file
    clients: int  # of a closed loop; 0: open
    samples: int  # of a request
    seconds: float
    sent: int
    statuses: dict[str, int]  # 200 is an answer
    answers_per_s: float
    latency_s: dict[str, float | None]  # from when a request was due to its answer; null where nothing was answered
    late_s: float  # 99th percentile of how late requests were sent
    ok: bool  # whether all were answered

    def shown(self, top: int) -> Iterator[Block]:
        words = {"p999": "p99.9", "max": "largest"}
        rows = [(words.get(name, name), value) for name, value in self.latency_s.items()]
        yield table(["latency", Column("", "time")], rows)
        for status, number in self.statuses.items():
            if status != "200":
                yield Line(f"{count(number)} requests: {status}", label="refused")
        if self.late_s > _LATE * (self.latency_s["p50"] or np.inf):
            yield Line(
                f"1 % of the requests were sent {seconds(self.late_s)} late or more, which the latencies hold: this "
                "machine did not keep up", label="note",
            )  # fmt: skip


def loaded(found: LoadResult, *, url: str, arrivals: str, clients: int, samples: int) -> ServeLoadView:
    """Return the view of one run."""
    times, rate = found.latency_s, len(found.latency_s) / found.seconds if found.seconds else 0.0
    headline = f"{found.model} answered {count(len(times))} of {count(found.sent)} requests, {digits(rate)} per second"
    latency_s = dict[str, float | None].fromkeys(("mean", *_QUANTILES, "max"))
    if len(times):
        middle = np.quantile(times, list(_QUANTILES.values())).tolist()
        latency_s = dict(zip(latency_s, (float(times.mean()), *middle, float(times[-1])), strict=True))
        headline += f", half of them within {seconds(middle[0])} and 99 % within {seconds(middle[2])}"
    return taken(
        ServeLoadView, found, headline=f"{headline}.", url=url, arrivals=arrivals, clients=clients, samples=samples,
        statuses=dict(sorted(found.statuses.items())), answers_per_s=rate, latency_s=latency_s,
        ok=len(times) == found.sent,
    )  # fmt: skip
