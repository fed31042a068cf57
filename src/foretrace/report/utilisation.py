"""What `foretrace utilisation` answers: its view, its sentences and its text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from foretrace.report.units import between, digits, in_unit, share, unit_for
from foretrace.report.views import SCHEMA_VERSION

if TYPE_CHECKING:
    from foretrace.cost.utilisation import Column, Study
    from foretrace.model.usage import ModelUsage

_LEVEL = 0.8


class ModelUsageView(msgspec.Struct, frozen=True, kw_only=True):
    """What one model makes of a device, without having run. Shares are of the device's peaks over the whole step."""

    model: str
    device: str
    precision: str  # in which most FLOPs run
    training: bool
    batch: int  # samples per step; 0 if unknown
    flops: float  # of products, per step
    bytes: float  # read and written by all operators, per step
    step_time_s: float
    interval_s: tuple[float, float]
    interval_level: float
    of_peak_flops: float
    of_peak_flops_range: tuple[float, float]
    of_peak_bandwidth: float
    busy: float  # share of the step in which the device runs any kernel
    intensity: float  # aggregate: FLOPs over bytes of products
    ridge: float  # FLOPs per byte of the device
    bound: str  # "bandwidth" or "compute", by intensity against ridge
    cost_sources: dict[str, float]


class SearchView(msgspec.Struct, frozen=True, kw_only=True):
    """A way to choose which networks to measure."""

    strategy: str  # "random", "FLOPs" or "utilisation"
    regret: float  # share of the best network's FLOPs that is lost, mean over latency budgets and draws
    worst: float  # the worst budget, mean over draws


class ColumnView(msgspec.Struct, frozen=True, kw_only=True):
    """One device and batch of the measured space. Correlations are Spearman's."""

    name: str
    device: str
    batch: int
    peak_tflops: float
    utilisation: tuple[float, float, float]  # 10th, 50th, 90th percentile over networks
    highest: float
    left_out: int  # networks above the peak
    spread: float  # 90th over 10th percentile among networks of equal FLOPs
    with_latency: float  # of utilisation with latency; the cost of an inference is latency times price
    with_flops: float
    with_intensity: float
    flops_with_latency: float
    below_ridge: float  # share of networks whose aggregate intensity is below the ridge
    searches: tuple[SearchView, ...]


class SpaceView(msgspec.Struct, frozen=True, kw_only=True):
    """Utilisation over a space of networks with measured latencies."""

    space: str
    networks: int
    measured: int  # networks that a search measures
    columns: tuple[ColumnView, ...]
    between: dict[str, dict[str, float]]  # rank correlation of latency between columns


class UtilisationView(msgspec.Struct, frozen=True, kw_only=True):
    """`foretrace utilisation`: of a model, or over a space of networks; the other one is null."""

    schema_version: int = SCHEMA_VERSION
    command: str = "utilisation"
    headline: str
    usage: ModelUsageView | None
    study: SpaceView | None
    notes: tuple[str, ...]
    next: str


def of_model(
    found: ModelUsage, *, model: str, training: bool, again: str, notes: Sequence[str] = ()
) -> UtilisationView:
    """The view of one model."""
    used, step = found.usage, found.step
    unit = unit_for(step.step_time_s)
    low, high = found.of_peak_flops_range
    side = "below" if used.bound == "bandwidth" else "above"
    sentence = (
        f"{model} is predicted to reach {share(used.of_peak_flops)} ({share(low)} – {share(high)}) of the peak of "
        f"{found.device.short}: a step takes {in_unit(step.step_time_s, unit)} {unit.name}, the device works in "
        f"{share(used.busy)} of it, and {digits(used.intensity)} FLOPs per byte are {side} its ridge of "
        f"{digits(used.peaks.ridge)}."
    )
    return UtilisationView(
        headline=sentence,
        usage=ModelUsageView(
            model=model,
            device=found.device.name,
            precision=used.precision.name.lower(),
            training=training,
            batch=found.operators.batch,
            flops=used.flops,
            bytes=used.nbytes,
            step_time_s=step.step_time_s,
            interval_s=step.interval_s,
            interval_level=_LEVEL,
            of_peak_flops=used.of_peak_flops,
            of_peak_flops_range=found.of_peak_flops_range,
            of_peak_bandwidth=used.of_peak_bandwidth,
            busy=used.busy,
            intensity=used.intensity,
            ridge=used.peaks.ridge,
            bound=used.bound,
            cost_sources=dict(step.cost_sources),
        ),
        study=None,
        notes=(*step.warnings, *notes),
        next=again,
    )


def of_space(found: Study, *, space: str) -> UtilisationView:
    """The view of a space."""
    large = max(found.columns, key=lambda each: each.batch)
    first = next((each for each in found.columns if each.batch == 1), large)
    lost = {each.strategy: each.regret for each in large.searches}
    shown = [large] if first is large else [large, first]
    used = " and ".join(
        f"{share(each.utilisation[0])} – {share(each.utilisation[2])} on {each.peaks.name} at batch {each.batch}"
        for each in shown
    )
    sentence = (
        f"Over {found.networks:,} networks of {space}, utilisation is {used}; with {found.measured} measurements, a "
        f"search guided by it loses {share(lost['utilisation'])} of the best network's FLOPs within the same latency, "
        f"one guided by FLOPs {share(lost['FLOPs'])}, a random one {share(lost['random'])}."
    )
    return UtilisationView(
        headline=sentence,
        usage=None,
        study=SpaceView(
            space=space,
            networks=found.networks,
            measured=found.measured,
            columns=tuple(_column(each) for each in found.columns),
            between={a: dict(row) for a, row in found.between.items()},
        ),
        notes=found.inferred,
        next="foretrace utilisation resnet50 --device h100 --batch 32",
    )


def _column(found: Column) -> ColumnView:
    return ColumnView(
        name=found.name,
        device=found.peaks.name,
        batch=found.batch,
        peak_tflops=found.peaks.flops_per_s / 1e12,
        utilisation=found.utilisation,
        highest=found.highest,
        left_out=found.left_out,
        spread=found.spread,
        with_latency=found.with_latency,
        with_flops=found.with_flops,
        with_intensity=found.with_intensity,
        flops_with_latency=found.flops_with_latency,
        below_ridge=found.below_ridge,
        searches=tuple(
            SearchView(strategy=each.strategy, regret=each.regret, worst=each.worst) for each in found.searches
        ),
    )


def lines(view: UtilisationView) -> Iterator[str]:
    """Text for people."""
    yield view.headline
    yield ""
    if view.usage is not None:
        yield from _model_lines(view.usage)
    if view.study is not None:
        yield from _space_lines(view.study)
    for note in view.notes:
        yield f"  note: {note}"
    yield f"  next: {view.next}"


def _model_lines(found: ModelUsageView) -> Iterator[str]:
    unit = unit_for(found.step_time_s)
    rows = [
        ("step", f"{in_unit(found.step_time_s, unit)} {unit.name} ({between(*found.interval_s, unit)})"),
        (f"peak FLOP/s ({found.precision})", share(found.of_peak_flops)),
        ("peak bandwidth", share(found.of_peak_bandwidth)),
        ("device busy", share(found.busy)),
        ("FLOPs per byte", f"{digits(found.intensity)}, ridge {digits(found.ridge)}: {found.bound}-bound as a whole"),
        ("costs from", ", ".join(f"{name} {share(part)}" for name, part in found.cost_sources.items())),
    ]
    width = max(len(name) for name, _ in rows)
    yield from (f"  {name.ljust(width)}  {value}" for name, value in rows)
    yield ""


def _space_lines(found: SpaceView) -> Iterator[str]:
    header = (
        *("", "utilisation %", "same FLOPs", "rank correlation of utilisation", "", "", "of FLOPs"),
        *("lost by a search, %", "", ""),
    )
    below = (
        "",
        "p10 – median – p90",
        "p90 / p10",
        "latency",
        "FLOPs",
        "FLOPs/B",
        "latency",
        "random",
        "FLOPs",
        "utilisation",
    )
    rows: list[tuple[str, ...]] = [header, below]
    for each in found.columns:
        lost = {search.strategy: f"{100 * search.regret:.1f}" for search in each.searches}
        figures = (each.with_latency, each.with_flops, each.with_intensity, each.flops_with_latency)
        rows.append((
            each.name,
            " – ".join(digits(100 * value) for value in each.utilisation),
            f"{each.spread:.2f}",
            *(f"{value:.2f}" for value in figures),
            lost["random"], lost["FLOPs"], lost["utilisation"],
        ))  # fmt: skip
    yield from _table(rows)
    yield ""
    yield "  rank correlation of latency between columns"
    names = list(found.between)
    yield from _table([("", *names), *((a, *(f"{found.between[a][b]:.2f}" for b in names)) for a in names)])


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows with columns aligned; a header wider than its column runs over the empty ones behind it."""
    body = [row for row in rows if all(row[1:])] or list(rows)
    widths = [max(len(row[i]) for row in body) for i in range(len(rows[0]))]
    for row in rows:
        text = "  " + row[0].ljust(widths[0])
        for i, cell in enumerate(row[1:], start=1):
            start = 2 + widths[0] + sum(width + 2 for width in widths[1:i])
            if cell:
                text = text.ljust(start) + "  " + (cell.rjust(widths[i]) if all(row[1:]) and i > 0 else cell)
        yield text.rstrip()
    yield ""
