"""Predicted beside measured, as answers: `foretrace verify`, `rig` on shaped links, and the `ledger`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from foretrace.experiment import statistics
from foretrace.experiment.job import Assumed, Job, Outcome
from foretrace.experiment.ledger import Row, Summary, floor_of, summaries
from foretrace.experiment.statistics import Ratio, Verdict
from foretrace.report import shared
from foretrace.report.blocks import Block, Column, Line, Next, listing
from foretrace.report.names import command
from foretrace.report.units import binary, count, digits, ranged, seconds, share, signed, speed, things
from foretrace.report.views import Report, Result, taken

if TYPE_CHECKING:
    from foretrace.experiment.links.calibrate import LinkCalibration
    from foretrace.experiment.links.job import ArmOutcome, LinkOutcome
    from foretrace.experiment.links.netns import Capability

SHOWN_ASSUMPTIONS, SHOWN_RESIDUALS = 3, 6
_ARMS = {"before": "baseline", "after": "with it", "again": "baseline again"}
_CLOCKS = {"cpu": "CPU time", "wall": "wall clock"}


class RigCheckView(Result, frozen=True, kw_only=True):
    """`foretrace rig check`: whether this machine can have a rig."""

    command: str = "rig check"
    headline: str
    ok: bool
    missing: tuple[str, ...]
    delay: bool  # whether links can have a latency
    cores: int
    leftovers: tuple[str, ...]  # namespaces of rigs that were killed

    def shown(self, top: int) -> Iterator[Block]:
        yield f"{self.cores} cores: real computation with up to {self.cores} workers, emulated with any number"
        if self.leftovers:
            yield f"left by killed rigs: {', '.join(self.leftovers)}; foretrace rig clean removes them"
        if self.ok:
            yield Next("foretrace rig calibrate --link 300mbit --workers 2")


class RigCleanView(Result, frozen=True, kw_only=True):
    """`foretrace rig clean`: what killed rigs had left."""

    command: str = "rig clean"
    headline: str
    removed: tuple[str, ...]

    def shown(self, top: int) -> Iterator[Block]:
        yield from self.removed


class RigPointView(msgspec.Struct, frozen=True, kw_only=True):
    """One size of one collective."""

    kind: str
    nbytes: float
    seconds: float
    spread: float  # quartile distance of the repetitions over their median


class RigCalibrateView(Result, frozen=True, kw_only=True):
    """`foretrace rig calibrate`: what collectives take on a shaped link."""

    command: str = "rig calibrate"
    headline: str
    link: str
    workers: int
    stated_mbit_s: float
    mbit_s: float  # payload of the largest all-reduce, as bus bandwidth
    repetitions: int
    spread: float  # largest of the sizes that matter
    points: tuple[RigPointView, ...]
    hosts: dict[str, tuple[float, float, float]]  # what workers take beside it: value, low, high by parameter
    stored: str  # file; "" where none was asked for
    next: str

    def shown(self, top: int) -> Iterator[Block]:
        yield listing(
            self.points, ("kind", "collective"), ("nbytes", "size", "binary"), ("seconds", "time", "seconds"),
            ("spread", "spread", "share"),
        )  # fmt: skip
        yield f"{self.repetitions} repetitions of each, sizes in turns; spread is quartile distance over median"
        for name, (value, low, high) in self.hosts.items():
            yield f"workers beside it: {name} {ranged(value, low, high)}"
        if self.stored:
            yield f"stored in {self.stored}"


class RigArmView(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one arm, wall clock."""

    name: str  # "before", "after", "again" (the baseline's second copy)
    median_s: float
    p10_s: float
    p90_s: float
    spread: float


class RigVerifyView(Report, frozen=True, kw_only=True):
    """`foretrace rig verify`: the predicted step of a distributed training beside the measured one."""

    command: str = "rig verify"
    techniques: tuple[str, ...]
    against: tuple[str, ...]  # techniques of the baseline; empty: every worker by itself
    work: str
    size: str
    workers: int
    link: str
    link_mbit_s: float
    link_spread: float
    verdict: str
    covered: bool
    uncertain: str
    recorded_s: float  # step of one worker alone
    predicted_s: float = msgspec.field(name="predicted_step_s")
    predicted_low_s: float = msgspec.field(name="predicted_step_low_s")
    predicted_high_s: float = msgspec.field(name="predicted_step_high_s")
    foretold_s: float = msgspec.field(name="foretold_step_s")  # predicted step before anything of this ran
    measured_step_s: float
    step_error: float  # predicted / measured step − 1
    predicted: Ratio  # over the baseline's step
    measured: Ratio
    same: Ratio
    error: float  # predicted / measured ratio − 1
    predicted_buckets: tuple[int, ...]
    buckets: tuple[int, ...]
    arms: tuple[RigArmView, ...]
    rounds: int
    steps_per_block: int
    losses: tuple[float | None, ...]
    assumptions: tuple[Assumed, ...]
    ledger: str
    row: str

    def shown(self, top: int) -> Iterator[Block]:
        against = " + ".join(self.against) or "each worker by itself"
        names = {"before": against, "after": " + ".join(self.techniques), "again": f"{against}, second copy"}
        yield listing(
            self.arms, (lambda arm: names[arm.name], "arm"), ("median_s", "step", "seconds"),
            ("p10_s p90_s", "p10 – p90", "seconds"), ("spread", "spread", "share"),
        )  # fmt: skip
        link = f"{digits(self.link_mbit_s)} Mbit/s of payload measured on {self.link}, {self.workers} workers"
        yield Line(f"{link}, within {share(self.link_spread)}", label="link")
        yield Line(f"one worker alone: {seconds(self.recorded_s)} per step", label="recorded")
        said = [f"{_speed(each)} ({_numbers(each)})" for each in (self.predicted, self.measured)]
        over = f"predicted {said[0]}, measured {said[1]}, off by {signed(self.error)}"
        yield Line(over, label="over the baseline")
        yield Line(f"the baseline against itself came to {_numbers(self.same)}", label="same")
        rounds = f"{count(self.rounds)} rounds of {count(self.steps_per_block)} steps per arm in turns"
        yield Line(f"wall, {rounds}", label="measured")
        if self.buckets or self.predicted_buckets:
            yield Line(_buckets(self), label="buckets")
        for each in self.assumptions[:SHOWN_ASSUMPTIONS]:
            yield Line(shared.assumption_text(each, replaced=False), label="assumed")
        yield _row(self)


class ArmView(RigArmView, frozen=True, kw_only=True):
    """Blocks of one arm of a verification: seconds per step on the clock that decides; `spread` is IQR over median."""

    wall_s: float  # medians on both clocks
    cpu_s: float


class ResidualView(msgspec.Struct, frozen=True, kw_only=True):
    """One layer of the treated step, as predicted and as recorded: busy seconds per step."""

    layer: str = msgspec.field(name="name")
    phase: str
    predicted_s: float
    recorded_s: float
    difference_s: float  # recorded − predicted


class VerifyView(Report, frozen=True, kw_only=True):
    """`foretrace verify`: the predicted change beside the measured one."""

    command: str = "verify"
    name: str  # the techniques, joined
    techniques: tuple[str, ...]
    model: str
    size: str
    threads: int
    batches: str
    device: str
    verdict: str
    covered: bool
    uncertain: str  # why nothing was concluded, if nothing was
    predicted: Ratio
    measured: Ratio
    same: Ratio  # the baseline against itself
    floor: float  # smallest change that could be seen
    error: float  # predicted / measured − 1
    recorded_s: float
    arms: tuple[ArmView, ...]
    clock: str
    rounds: int
    repeated_rounds: int
    disturbed_rounds: int
    steps_per_block: int
    samples_before: int
    samples_after: int
    losses_before: tuple[float | None, ...]
    losses_after: tuple[float | None, ...]
    calibrated: int
    assumptions: tuple[Assumed, ...]
    residual: tuple[ResidualView, ...]
    treated_recorded_s: float
    ledger: str  # file that the row went to; "" where none was written
    row: str  # its id

    def shown(self, top: int) -> Iterator[Block]:
        yield listing(
            self.arms, (lambda arm: _ARMS[arm.name], "arm"), ("median_s", "step", "time"),
            ("p10_s p90_s", "p10 – p90", "seconds"), ("wall_s", "wall", "time"), ("cpu_s", "CPU", "time"),
        )  # fmt: skip
        same = f"the baseline against itself came to {_numbers(self.same)}, 80 % interval"
        yield Line(f"{share(self.floor)}; {same}", label="floor")
        yield Line(_how(self), label="measured")
        if self.samples_before != self.samples_after:
            yield Line(f"{count(self.samples_before)} → {count(self.samples_after)}", label="samples per step")
        if self.losses_before:
            yield Line(f"{_losses(self.losses_before)}; with it {_losses(self.losses_after)}", label="first losses")
        for each in self.assumptions[:SHOWN_ASSUMPTIONS]:
            yield Line(shared.assumption_text(each, replaced=False), label="assumed")
        if self.residual:
            yield listing(
                self.residual[:SHOWN_RESIDUALS], ("layer", "where the treated step differs most", "name"), "phase",
                ("predicted_s", "predicted", "time"), ("recorded_s", "recorded", "time"),
                ("difference_s", "difference", "change"),
            )  # fmt: skip
            yield Line(
                f"The prediction starts from a step of {seconds(self.recorded_s)}; the treated step was recorded once "
                f"({seconds(self.treated_recorded_s)}) and scaled to {seconds(self.measured.value * self.recorded_s)}, "
                "the share that the arms measured.",
                soft=True,
            )
        yield _row(self)


class LedgerRowView(msgspec.Struct, frozen=True, kw_only=True):
    """One verification as the ledger keeps it."""

    id: str
    time: str
    techniques: str
    model: str
    size: str
    threads: int
    device: str
    predicted: Ratio
    measured: Ratio
    before_s: float
    after_s: float
    error: float
    covered: bool
    floor: float
    verdict: str


class LedgerView(Report, frozen=True, kw_only=True):
    """`foretrace ledger`: what was verified so far."""

    command: str = "ledger"
    source: str
    rows: tuple[LedgerRowView, ...]
    summary: tuple[Summary, ...]

    def shown(self, top: int) -> Iterator[Block]:
        yield listing(
            self.rows[::-1], "techniques", "model",  # the newest first
            (lambda row: _numbers(row.predicted), Column("predicted", right=True)),
            ("measured.value", "measured", "digits"), ("error", "error", "signed"),
            ("floor", "floor", "share"), "verdict", top=top, noun="older row", how="--top",
        )  # fmt: skip
        yield listing(
            self.summary, ("name", "technique"), ("concluded", "concluded", "count"), ("rows", "of rows", "count"),
            ("median_error", "median error", "share"), ("worst_error", "worst", "share"),
            ("coverage", "covered", "share"),
        )  # fmt: skip


def verify(outcome: Outcome, ledger: str = "", row: str = "") -> VerifyView:
    """Return a verification: what was predicted, what was measured, and where the row went."""
    job = outcome.job
    return taken(
        VerifyView, outcome, outcome.trial, job, headline=headline(outcome), name=" + ".join(outcome.techniques),
        techniques=tuple(outcome.parameters), batches="loader" if job.loads else "ready",
        floor=statistics.floor(outcome.trial.same),
        arms=tuple(
            taken(ArmView, arm, name=name, wall_s=outcome.walls[name].median_s, cpu_s=outcome.cpus[name].median_s)
            for name, arm in (("before", outcome.before), ("after", outcome.trial.after), ("again", outcome.again))
        ),
        ledger=ledger, row=row, next=_next(outcome, ledger),
    )  # fmt: skip


def headline(outcome: Outcome) -> str:
    """Return text such as "Predicted 1.42× faster (0.700, 0.660 – 0.750 of the step), measured 1.38× …: …."."""
    trial = outcome.trial
    predicted = f"Predicted {_speed(trial.predicted)} ({_numbers(trial.predicted)} of the step)"
    floor = statistics.floor(trial.same)
    off = f"off by {signed(trial.error)}"
    if trial.verdict == Verdict.INCONCLUSIVE:
        return f"{predicted}; nothing can be concluded: {trial.uncertain}."
    if trial.measured.effect <= floor:
        measured = f"measured no change above the floor of {share(floor)} ({_numbers(trial.measured)})"
        agrees = "agrees" if trial.verdict == Verdict.NO_CHANGE else "missed"
        return f"{predicted}, {measured}: {agrees}, {off}."
    return f"{predicted}, measured {_speed(trial.measured)} ({_numbers(trial.measured)}): {trial.verdict}, {off}."


def ledger(rows: Sequence[Row], *, source: str, summary_only: bool = False) -> LedgerView:
    """Return rows of a ledger and how well they were predicted; `summary_only` leaves the single rows out."""
    found = summaries(rows)
    shown = [
        taken(
            LedgerRowView, row, floor=floor_of(row),
            predicted=Ratio(value=row.predicted, low=row.predicted_low, high=row.predicted_high),
            measured=Ratio(value=row.measured, low=row.measured_low, high=row.measured_high),
        )
        for row in ([] if summary_only else rows)
    ]  # fmt: skip
    return LedgerView(
        headline=_ledger_headline(found[-1] if found else None), source=source, rows=tuple(shown),
        summary=found, notes=(), next="" if summary_only or not found else "foretrace ledger --summary",
    )  # fmt: skip


def _how(view: VerifyView) -> str:
    """Return text such as "CPU time, 24 rounds of 3 steps per arm, 1 thread, batches ready in memory"."""
    parts = [
        _CLOCKS[view.clock],
        f"{count(view.rounds)} rounds of {count(view.steps_per_block)} steps per arm",
        things(view.threads, "thread"),
        "batches from the loader" if view.batches == "loader" else "batches ready in memory",
        f"{count(view.calibrated)} operators timed alone for the prediction",
    ]
    if view.repeated_rounds:
        parts.append(f"{things(view.repeated_rounds, 'round')} run once more because others used the cores")
    if view.disturbed_rounds:
        parts.append(f"{things(view.disturbed_rounds, 'round')} disturbed by others")
    return ", ".join(parts)


def _row(view: VerifyView | RigVerifyView) -> Line:
    return Line(f"row {view.row[:8]} added to {view.ledger}" if view.ledger else "no row was written", soft=True)


def _numbers(ratio: Ratio) -> str:
    return f"{digits(ratio.value)}, {digits(ratio.low)} – {digits(ratio.high)}"


def _losses(values: Sequence[float | None]) -> str:
    return ", ".join("not finite" if value is None else f"{value:.4g}" for value in values)


def _speed(ratio: Ratio) -> str:
    return speed(1.0, ratio.value)


def _next(outcome: Outcome, ledger: str) -> str:
    if outcome.trial.verdict == Verdict.INCONCLUSIVE:
        job, usual = outcome.job, Job(techniques=(), model="")
        kept = ("size", "threads", "batches", "device", "steps")
        same = {name: getattr(job, name) for name in kept if getattr(job, name) != getattr(usual, name)}
        return command("verify", *job.techniques, model=job.model, **same, seconds=f"{3 * job.seconds:g}")
    return command("ledger", ledger=ledger) if ledger else ""


def _ledger_headline(total: Summary | None) -> str:
    if total is None:
        return "No verification matches."
    verified = things(total.rows, "verification")
    if total.median_error is None or total.worst_error is None or total.coverage is None:
        return f"{verified}, none of them conclusive."
    return (
        f"{verified}: predictions are off by {share(total.median_error)} of the step (median; worst "
        f"{share(total.worst_error)}), and {share(total.coverage)} of their intervals cover what was measured."
    )


def rig_check(able: Capability, *, cores: int, leftovers: Sequence[str]) -> RigCheckView:
    """Return what this machine can do."""
    headline = f"No rig here: {'; '.join(able.missing)}."
    if not able.missing:
        latency = "bandwidth and latency" if able.delay else "bandwidth; for latency the kernel lacks netem"
        headline = f"A rig can be made here: links of a stated {latency}."
    return taken(RigCheckView, able, headline=headline, ok=not able.missing, cores=cores, leftovers=tuple(leftovers))


def rig_clean(removed: Sequence[str]) -> RigCleanView:
    """Return what was removed."""
    headline = f"Removed {things(len(removed), 'namespace')}." if removed else "Nothing was left."
    return RigCleanView(headline=headline, removed=tuple(removed))


def rig_calibrate(found: LinkCalibration, *, link: str, workers: int, stored: str) -> RigCalibrateView:
    """Return a measured link."""
    headline = (
        f"The link carries {digits(found.mbit_s)} of {digits(found.stated_mbit_s)} Mbit/s as payload of an all-reduce "
        f"among {workers} workers; times repeat within {share(found.spread)}."
    )
    return taken(
        RigCalibrateView, found, headline=headline, link=link, workers=workers, repetitions=found.table.repetitions,
        hosts=dict(found.table.hosts),
        points=tuple(
            RigPointView(kind=str(each.kind), nbytes=nbytes, seconds=time_s, spread=spread)
            for each, nbytes, time_s, spread in found.table.times()
        ),
        stored=stored,
        next='foretrace rig verify "data-parallel bucket_mb=4" '
        f"--workers {workers} --link {link} --emulate 12x1mb/20ms",
    )  # fmt: skip


def rig_verify(outcome: LinkOutcome, arm: ArmOutcome, ledger: str = "", row: str = "") -> RigVerifyView:
    """Return one arm of a session, and where its row went."""
    job = outcome.job
    known = ledger and not job.work.endswith(".py")
    return taken(
        RigVerifyView, arm, arm.trial, job, outcome, headline=_rig_headline(arm), link_mbit_s=outcome.link.mbit_s,
        link_spread=outcome.link.spread, measured_step_s=arm.trial.after.median_s,
        arms=tuple(
            taken(RigArmView, each, name=name)
            for name, each in (("before", outcome.before), ("after", arm.trial.after), ("again", outcome.again))
        ),
        ledger=ledger, row=row, next=command("ledger", model=job.work) if known else "",
    )  # fmt: skip


def _rig_headline(arm: ArmOutcome) -> str:
    """Return text such as "Predicted a step of 443 ms (431 ms – 455 ms), measured 440 ms (…): covered, off by …"."""
    steps = ranged(arm.predicted_s, arm.predicted_low_s, arm.predicted_high_s, seconds)
    predicted = f"Predicted a step of {steps}"
    if arm.trial.uncertain:
        return f"{predicted}; nothing can be concluded: {arm.trial.uncertain}."
    found = arm.trial.after
    measured = f"measured {ranged(found.median_s, found.p10_s, found.p90_s, seconds)}"
    return f"{predicted}, {measured}: {arm.trial.verdict}, off by {signed(arm.step_error)}."


def _buckets(view: RigVerifyView) -> str:
    real = ", ".join(binary(each) for each in view.buckets[:6]) + (", ..." if len(view.buckets) > 6 else "")
    if view.buckets == view.predicted_buckets:
        return f"{len(view.buckets)} as predicted: {real}"
    return f"{len(view.buckets)} ({real}), and {len(view.predicted_buckets)} were predicted"
