"""What `foretrace energy` answers, and energy beside a time in other answers."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from foretrace.report.blocks import About, Block, Line, listing
from foretrace.report.shared import carbon, co2_g
from foretrace.report.units import digits, scaled, seconds, share, things
from foretrace.report.views import Report, taken
from foretrace.serving.energy.colocate import ColocatedArm, Colocation
from foretrace.serving.energy.command import CommandEnvironment
from foretrace.serving.energy.tune import EnergyUse, Knob, Tuned, words


class SettingView(msgspec.Struct, frozen=True, kw_only=True):
    """A setting that was measured, and what the work took."""

    setting: dict[str, float]
    energy_j: float
    time_s: float
    within_slo: bool


class EnergyTuneView(Report, frozen=True, kw_only=True):
    """`foretrace energy tune`: the setting that takes the least energy and keeps the limit of the time."""

    command: str = "energy tune"
    target: str
    slo: str
    dry_run: bool  # nothing was run: it would have changed settings of the machine
    knobs: tuple[Knob, ...]
    limit_s: float | None
    best: dict[str, float] | None
    energy_j: float | None
    time_s: float | None
    evaluations: int  # settings that were measured
    default: dict[str, float]
    default_energy_j: float | None
    default_time_s: float | None
    optimum: dict[str, float] | None  # by enumeration; null where not everything was recorded
    optimum_j: float | None
    optimum_time_s: float | None
    measured: tuple[SettingView, ...]  # in order

    def shown(self, top: int) -> Iterator[Block]:
        limit = f" = {seconds(self.limit_s)}" if self.limit_s else ""
        yield About((self.target, f"limit {self.slo}{limit}"))
        if self.dry_run:
            yield listing(
                self.knobs, ("name", "setting"), (lambda each: f"{each.default:g} {each.unit}".rstrip(), "now"),
                (lambda each: ", ".join(f"{level:g}" for level in each.levels), "would be"),
            )  # fmt: skip
            return
        order = sorted(self.measured, key=lambda each: (not each.within_slo, each.energy_j))
        yield listing(
            order, (lambda each: words(each.setting), "setting"), ("energy_j", "energy", "J"),
            ("time_s", "time", "seconds"), ("within_slo", "within limit", "yes"), top=top, noun="setting", how="--top",
        )  # fmt: skip
        if self.optimum_j and self.energy_j:
            more = self.energy_j / self.optimum_j - 1
            yield Line(
                f"{scaled(self.optimum_j, 'J')} at {words(self.optimum or {})}, by enumeration; the best here takes "
                f"{share(more)} more",
                label="optimum",
            )


class EnergyMeasureView(Report, frozen=True, kw_only=True):
    """`foretrace energy measure`: joules of a command, counted by hardware."""

    command: str = "energy measure"
    target: str
    energy_j: float
    time_s: float
    power_w: float
    meters: tuple[str, ...]
    co2_g: float | None  # null where no grid was stated
    grid_g_per_kwh: float | None

    def shown(self, top: int) -> Iterator[Block]:
        yield About((self.target, *self.meters))
        if self.co2_g is not None:
            yield Line(carbon(self.co2_g, self.grid_g_per_kwh))


class HeldPair(msgspec.Struct, frozen=True, kw_only=True):
    """A request beside a fine-tuning step, neither of which the law was fitted to."""

    request: int  # samples
    step: int
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float  # the median
    covered: bool


class EnergyColocateView(Report, frozen=True, kw_only=True):
    """`foretrace energy colocate`: fine-tuning beside inference on one core, admitted by predicted latency."""

    command: str = "energy colocate"
    model: str
    tuned: str
    slo: str
    limit_s: float
    alone_s: dict[int, float]  # latency by samples of a request
    pairs: tuple[HeldPair, ...]
    arms: tuple[ColocatedArm, ...]
    ledger: str
    rows: int  # that were added to it

    def shown(self, top: int) -> Iterator[Block]:
        yield About((self.model, f"beside fine-tuning {self.tuned}", f"limit {self.slo} = {seconds(self.limit_s)}"))
        yield listing(
            self.arms,
            ("name", "fine-tuning"), ("p50_s", "p50", "time"), ("p99_s", "p99", "time"),
            ("within", "within limit", "share"), ("tuned_per_s", "samples tuned/s", "digits"),
        )  # fmt: skip
        yield listing(
            self.pairs, (lambda each: f"{each.request} + {each.step}", "request + step, samples"),
            ("predicted_s", "predicted", "time"), ("low_s high_s", "range", "seconds"),
            ("measured_s", "measured", "time"), ("covered", "covered", "yes"),
        )  # fmt: skip
        yield f"{things(self.rows, 'row')} added to {self.ledger}" if self.ledger else "no row was written"


def colocated(found: Colocation, ledger: str = "", rows: int = 0) -> EnergyColocateView:
    """Return the answer about fine-tuning beside inference."""
    always, admitted = (next(each for each in found.arms if each.name == name) for name in ("always", "admitted"))
    return taken(
        EnergyColocateView, found, ledger=ledger, rows=rows,
        headline=(
            f"Fine-tuning {found.tuned} where the predicted latency allows it keeps {share(admitted.within)} of "
            f"requests within {seconds(found.limit_s)} (always: {share(always.within)}) and tunes "
            f"{digits(admitted.tuned_per_s)} samples/s (always: {digits(always.tuned_per_s)})."
        ),
        pairs=tuple(
            HeldPair(
                request=request, step=step, predicted_s=each.before_s, low_s=each.before_s * each.predicted.low,
                high_s=each.before_s * each.predicted.high, measured_s=each.after.median_s, covered=each.covered,
            )
            for (request, step), each in found.pairs.items()
        ),
    )  # fmt: skip


def tuned(found: Tuned, *, slo: str) -> EnergyTuneView:
    """Return the answer of a search."""
    environment, best, before = found.environment, found.at_best, found.measured[found.default]
    optimum = None if found.optimum is None else environment.measure(found.optimum)
    saved = 1 - best.energy_j / before.energy_j
    than = f"{share(abs(saved))} {'less' if saved > 0 else 'more'} than the default's {scaled(before.energy_j, 'J')}"
    return EnergyTuneView(
        headline=(
            f"{words(environment.named(found.best))} takes {scaled(best.energy_j, 'J')} and {seconds(best.time_s)}: "
            f"{than if found.best != found.default else 'the default is best'}, after "
            f"{things(len(found.measured), 'setting')}."
        ),
        target=environment.name, slo=slo, dry_run=False, knobs=environment.knobs, limit_s=found.limit_s,
        best=environment.named(found.best), energy_j=best.energy_j, time_s=best.time_s,
        evaluations=len(found.measured), default=environment.named(found.default), default_energy_j=before.energy_j,
        default_time_s=before.time_s, optimum=None if found.optimum is None else environment.named(found.optimum),
        optimum_j=optimum.energy_j if optimum else None, optimum_time_s=optimum.time_s if optimum else None,
        measured=tuple(
            taken(SettingView, each, setting=environment.named(at), within_slo=each.time_s <= found.limit_s)
            for at, each in found.measured.items()
        ),
    )  # fmt: skip


def dry_run(environment: CommandEnvironment, *, slo: str) -> EnergyTuneView:
    """Return what a search would change; nothing was run."""
    meters = ", ".join(each.name for each in environment.meters)
    return EnergyTuneView(
        headline=f"Nothing was run: tuning would change {' and '.join(environment.setters)} of this machine.",
        notes=(
            "Add --apply to change them; they are restored at the end, however it ends.",
            f"Energy would be read from {meters or 'no counter: this machine has none that can be read'}.",
        ),
        target=environment.name, slo=slo, dry_run=True, knobs=environment.knobs, limit_s=None, best=None,
        energy_j=None, time_s=None, evaluations=0, default={each.name: each.default for each in environment.knobs},
        default_energy_j=None, default_time_s=None, optimum=None, optimum_j=None, optimum_time_s=None, measured=(),
    )  # fmt: skip


def measured(target: str, found: EnergyUse, meters: tuple[str, ...], grid: float | None) -> EnergyMeasureView:
    """Return the answer about one run."""
    power_w = found.energy_j / found.time_s
    return EnergyMeasureView(
        headline=f"{target} took {scaled(found.energy_j, 'J')} in {seconds(found.time_s)}, {digits(power_w)} W.",
        target=target, energy_j=found.energy_j, time_s=found.time_s, power_w=power_w, meters=meters,
        co2_g=co2_g(found.energy_j, grid), grid_g_per_kwh=grid,
    )  # fmt: skip
