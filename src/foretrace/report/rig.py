"""What `foretrace rig` answers: results, sentences and blocks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from foretrace.experiment.job import Assumed
from foretrace.experiment.statistics import Ratio
from foretrace.report.blocks import Block, Column, Next, listing, table
from foretrace.report.units import binary, count, digits, seconds, share, signed, span, speed, things
from foretrace.report.views import Report, Result, taken

if TYPE_CHECKING:
    from foretrace.experiment.links.calibrate import LinkCalibration
    from foretrace.experiment.links.job import ArmOutcome, LinkOutcome
    from foretrace.experiment.links.netns import Capability

SHOWN_ASSUMPTIONS = 3


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
            yield f"workers beside it: {name} {digits(value)} ({digits(low)} – {digits(high)})"
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
            (lambda arm: span(arm.p10_s, arm.p90_s), Column("p10 – p90", right=True)), ("spread", "spread", "share"),
        )  # fmt: skip
        yield table(["", Column(wide=True)], _figures(self))
        yield f"row {self.row[:8]} added to {self.ledger}" if self.ledger else "no row was written"


def check(able: Capability, *, cores: int, leftovers: Sequence[str]) -> RigCheckView:
    """Return what this machine can do."""
    headline = f"No rig here: {'; '.join(able.missing)}."
    if not able.missing:
        latency = "bandwidth and latency" if able.delay else "bandwidth; for latency the kernel lacks netem"
        headline = f"A rig can be made here: links of a stated {latency}."
    return taken(RigCheckView, able, headline=headline, ok=not able.missing, cores=cores, leftovers=tuple(leftovers))


def clean(removed: Sequence[str]) -> RigCleanView:
    """Return what was removed."""
    headline = f"Removed {things(len(removed), 'namespace')}." if removed else "Nothing was left."
    return RigCleanView(headline=headline, removed=tuple(removed))


def calibrate(found: LinkCalibration, *, link: str, workers: int, stored: str) -> RigCalibrateView:
    """Return a measured link."""
    headline = (
        f"The link carries {digits(found.mbit_s)} of {digits(found.stated_mbit_s)} Mbit/s as payload of an all-reduce "
        f"among {workers} workers; times repeat within {share(found.spread)}."
    )
    return taken(
        RigCalibrateView,
        found,
        headline=headline,
        link=link,
        workers=workers,
        repetitions=found.table.repetitions,
        hosts=dict(found.table.hosts),
        points=tuple(
            RigPointView(kind=str(each.kind), nbytes=nbytes, seconds=time_s, spread=spread)
            for each, nbytes, time_s, spread in found.table.times()
        ),
        stored=stored,
        next='foretrace rig verify "data-parallel bucket_mb=4" '
        f"--workers {workers} --link {link} --emulate 12x1mb/20ms",
    )


def verify(outcome: LinkOutcome, arm: ArmOutcome, ledger: str = "", row: str = "") -> RigVerifyView:
    """Return one arm of a session, and where its row went."""
    job = outcome.job
    known = ledger and not job.work.endswith(".py")
    return taken(
        RigVerifyView,
        arm,
        arm.trial,
        job,
        outcome,
        headline=headline(arm),
        link_mbit_s=outcome.link.mbit_s,
        link_spread=outcome.link.spread,
        measured_step_s=arm.trial.after.median_s,
        arms=tuple(
            taken(RigArmView, each, name=name)
            for name, each in (("before", outcome.before), ("after", arm.trial.after), ("again", outcome.again))
        ),
        ledger=ledger,
        row=row,
        next=f"foretrace ledger --model {shlex.quote(job.work)}" if known else "",
    )


def headline(arm: ArmOutcome) -> str:
    """Return text such as "Predicted a step of 443 ms (431 ms – 455 ms), measured 440 ms (438 ms – 447 ms): covered,
    off by …".
    """
    predicted = f"Predicted a step of {seconds(arm.predicted_s)} ({span(arm.predicted_low_s, arm.predicted_high_s)})"
    if arm.trial.uncertain:
        return f"{predicted}; nothing can be concluded: {arm.trial.uncertain}."
    found = arm.trial.after
    measured = f"measured {seconds(found.median_s)} ({span(found.p10_s, found.p90_s)})"
    return f"{predicted}, {measured}: {arm.trial.verdict}, off by {signed(arm.step_error)}."


def _figures(view: RigVerifyView) -> Iterator[tuple[str, str]]:
    link = f"{digits(view.link_mbit_s)} Mbit/s of payload measured on {view.link}, {view.workers} workers"
    yield "link", f"{link}, within {share(view.link_spread)}"
    yield "recorded", f"one worker alone: {seconds(view.recorded_s)} per step"
    ratios = f"predicted {_numbers(view.predicted)}, measured {_numbers(view.measured)}"
    yield "over it", f"{ratios} ({speed(1.0, view.measured.value)}), off by {signed(view.error)}"
    yield "same", f"the baseline against itself came to {_numbers(view.same)}"
    yield "measured", f"wall, {count(view.rounds)} rounds of {count(view.steps_per_block)} steps per arm in turns"
    if view.buckets or view.predicted_buckets:
        yield "buckets", _buckets(view)
    for each in view.assumptions[:SHOWN_ASSUMPTIONS]:
        range_ = (
            f"{digits(each.low)} – {digits(each.high)} {each.unit}: {span(each.step_at_low_s, each.step_at_high_s)}"
        )
        yield "assumed", f"{each.name} {digits(each.value)} ({range_}); {each.why}"


def _buckets(view: RigVerifyView) -> str:
    real = ", ".join(binary(each) for each in view.buckets[:6]) + (", ..." if len(view.buckets) > 6 else "")
    if view.buckets == view.predicted_buckets:
        return f"{len(view.buckets)} as predicted: {real}"
    return f"{len(view.buckets)} ({real}), and {len(view.predicted_buckets)} were predicted"


def _numbers(ratio: Ratio) -> str:
    return f"{digits(ratio.value)} ({digits(ratio.low)} – {digits(ratio.high)})"
