"""Lists of what there is, as answers: techniques, models of the zoo, devices; or one of them with all that it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, get_type_hints

import msgspec

from foretrace.hardware.devices import Device
from foretrace.report import units
from foretrace.report.blocks import About, Block, Column, Headline, Line, Next, listing, table
from foretrace.report.units import digits
from foretrace.report.views import Result, taken
from foretrace.techniques.base import Prior

if TYPE_CHECKING:
    from foretrace.techniques.base import Technique
    from foretrace.zoo.registry import ZooModel
    from foretrace.zoo.trial import Trial

Models = Mapping[str, tuple[str, ...]]  # by technique


class ParameterView(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of a technique."""

    name: str
    type: str
    doc: str
    unit: str
    default: str | float | bool | None
    required: bool
    choices: tuple[str, ...]
    prior: Prior | None


class TechniqueView(msgspec.Struct, frozen=True, kw_only=True):
    """One technique."""

    name: str
    summary: str
    source: str
    apply: bool
    not_applied: str  # why it cannot be, "" where it can
    effort: str  # what it costs to do
    needs: str
    verified_on: tuple[str, ...]  # models with a conclusive row in the ledger
    shipped_on: tuple[str, ...]  # the same in the ledger that docs/accuracy/techniques.md is made of
    parameters: tuple[ParameterView, ...]


class TechniquesView(Result, frozen=True, kw_only=True):
    """`foretrace techniques`: all of them, or the one that was named."""

    command: str = "techniques"
    techniques: tuple[TechniqueView, ...]

    def shown(self, top: int) -> Iterator[Block]:
        if len(self.techniques) == 1:
            yield from _one(self.techniques[0])
            return
        applied = sum(each.apply for each in self.techniques)
        yield Headline(f"{len(self.techniques)} techniques can be predicted, {applied} of them applied and measured.")
        for each in self.techniques:
            where = _listed(each.verified_on) or (
                f"{_listed(each.shipped_on)} (docs/accuracy.md, not here yet)" if each.shipped_on else "no model yet"
            )
            yield Line(f"verified on {where}" if each.apply else "only predicted", label=each.name)
            yield Line(each.summary, soft=True)
        yield Next("foretrace techniques prefetch-data")


def techniques(known: Iterable[type[Technique]], *, verified: Models, shipped: Models) -> TechniquesView:
    """Return techniques, and the models on which they were verified here and in docs/accuracy.md."""
    return TechniquesView(
        techniques=tuple(
            taken(
                TechniqueView,
                each,
                apply=each.can_apply(),
                verified_on=verified.get(each.name, ()),
                shipped_on=shipped.get(each.name, ()),
                parameters=tuple(taken(ParameterView, parameter) for parameter in each.parameters()),
            )
            for each in known
        )
    )


def _one(technique: TechniqueView) -> Iterator[Block]:
    yield Headline(f"{technique.name}  {technique.summary}")
    yield Line(technique.source, label="rule")
    if technique.apply:
        yield Line(f"yes{f', needs {technique.needs}' if technique.needs else ''}", label="apply")
        yield Line(technique.effort or "not said", label="costs")
        yield Line(", ".join(technique.verified_on) or "no model yet", label="verified here on")
        yield Line(", ".join(technique.shipped_on) or "no model yet", label="verified in docs/accuracy.md on")
    else:
        yield Line(f"no, {technique.not_applied}", label="apply")
    yield ""
    for parameter in technique.parameters:
        yield f"{parameter.name}=  {parameter.doc}{_value(parameter)}"


def _listed(models: tuple[str, ...]) -> str:
    return ", ".join(models[:3]) + (f" and {len(models) - 3} more" if len(models) > 3 else "")


def _value(parameter: ParameterView) -> str:
    if parameter.required:
        return " (required)"
    if parameter.prior is not None:
        prior = parameter.prior
        return f" (assumed {prior.value:g}, {prior.low:g} – {prior.high:g} {prior.unit}: {prior.why})"
    given = parameter.default is not None and parameter.default != ""
    default = f"default {parameter.default} {parameter.unit}".rstrip() if given else parameter.unit
    choices = f"one of {', '.join(filter(None, parameter.choices))}" if parameter.choices else ""
    text = ", ".join(filter(None, (default, choices)))
    return f" ({text})" if text else ""


class ParametersView(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of trained parameters in both sizes."""

    tiny: int
    full: int


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the zoo."""

    name: str
    task: str
    summary: str
    source: str  # paper
    needs: str  # a package beside torch; "" if none
    parameters: ParametersView


class TrialTimeView(msgspec.Struct, frozen=True, kw_only=True):
    """Step times of a trial, seconds."""

    median: float
    p10: float
    p90: float


class TrialView(msgspec.Struct, frozen=True, kw_only=True):
    """Some steps of one model."""

    size: str
    seed: int
    step_time_s: TrialTimeView
    steps: int  # that were timed
    loading_s: float  # of the median step, until its batch was there
    batch_size: int
    samples_per_s: float
    threads: int
    losses: tuple[float, ...]  # of the warm-up, too


class ZooView(Result, frozen=True, kw_only=True):
    """`foretrace zoo`: the models there are, or one of them with `run`."""

    command: str = "zoo"
    models: tuple[ModelView, ...]
    run: TrialView | None

    def shown(self, top: int) -> Iterator[Block]:
        if self.run is not None:
            yield from _trial(self.models[0], self.run)
            return
        sizes = "tiny takes 20 to 170 ms per step on one core, full is as published"
        yield Headline(f"{len(self.models)} models in two sizes: {sizes}.")
        for each in self.models:
            needs = f" (needs {each.needs})" if each.needs else ""
            parameters = (
                f"{units.scaled(each.parameters.tiny)} or {units.scaled(each.parameters.full)} parameters{needs}"
            )
            yield Line(f"{each.task}, {parameters}", label=each.name)
            yield Line(each.summary, soft=True)
        yield Next(f"foretrace zoo {min(self.models, key=lambda each: each.parameters.tiny).name}")


def zoo(entries: Iterable[ZooModel], run: Trial | None = None, *, size: str = "", seed: int = 0) -> ZooView:
    """Return the models of the zoo, or one of them as it ran."""
    trial = None
    if run is not None:
        low, median, high = run.quantiles_s()
        trial = taken(
            TrialView, run, size=size, seed=seed, step_time_s=TrialTimeView(median=median, p10=low, p90=high),
            steps=len(run.step_s), loading_s=run.median_loading_s,
        )  # fmt: skip
    models = (
        taken(ModelView, each, parameters=ParametersView(tiny=each.parameters[0], full=each.parameters[1]))
        for each in entries
    )
    return ZooView(models=tuple(models), run=trial)


def _trial(model: ModelView, run: TrialView) -> Iterator[Block]:
    time = run.step_time_s
    unit = units.unit_for(time.median)
    yield About((model.name, model.task, run.size, units.things(run.threads, "thread")))
    rate = units.digits(run.samples_per_s)
    yield Headline(f"A step of {run.batch_size} samples takes {units.seconds(time.median)}: {rate} samples per second.")
    change = "falls" if run.losses[-1] < run.losses[0] else "does not fall yet"
    spread = f"p10 {units.in_unit(time.p10, unit)} – p90 {units.in_unit(time.p90, unit)}, {run.steps} steps"
    parameters = model.parameters.tiny if run.size == "tiny" else model.parameters.full
    yield table(
        ["", ""],
        [
            ("step", f"{units.seconds(time.median)} ({spread})"),
            ("of which", f"{units.seconds(run.loading_s)} data loading"),
            ("parameters", f"{parameters:,}"),
            ("loss", f"{change}: {run.losses[0]:.3f} → {run.losses[-1]:.3f} in {len(run.losses)} steps"),
        ],
    )
    yield model.summary
    yield model.source
    yield Next(f"foretrace verify fused-optimizer --model {model.name}")


class DeviceView(msgspec.Struct, frozen=True, kw_only=True):
    """One device of the catalog; null where a figure does not exist or is not known."""

    name: str
    short: str
    vendor: str
    arch: str
    launch_year: int
    fp32_tflops: Annotated[float | None, "fp32", "TFLOP/s"]
    tf32_tflops: Annotated[float | None, "tf32", "TFLOP/s"]
    fp16_tflops: Annotated[float | None, "fp16", "TFLOP/s"]
    bf16_tflops: Annotated[float | None, "bf16", "TFLOP/s"]
    fp8_tflops: Annotated[float | None, "fp8", "TFLOP/s"]
    int8_tops: Annotated[float | None, "int8", "TOP/s"]
    memory_gb: Annotated[float | None, "memory", "GB"]
    memory_gb_s: Annotated[float | None, "memory bandwidth", "GB/s"]
    l2_mb: Annotated[float | None, "L2", "MB"]
    sms: int
    boost_mhz: Annotated[float | None, "clock", "MHz"]
    scaleup_link: str
    scaleup_gb_s: Annotated[float | None, "links, both ways", "GB/s"]  # both directions
    pcie: str
    pcie_gb_s: Annotated[float | None, "PCIe, one way", "GB/s"]  # one direction
    tdp_w: Annotated[float | None, "power", "W"]
    node_devices: Annotated[int | None, "usual machine", "devices"]
    network_gb_s: Annotated[
        float | None, "network per device", "GB/s"
    ]  # one direction, to other machines, for each device
    confirmed: dict[str, str]  # figure -> device tables that give the same; the others are unconfirmed
    source: str
    note: str


class DevicesView(Result, frozen=True, kw_only=True):
    """`foretrace devices`: the catalog, or the device that was named."""

    command: str = "devices"
    devices: tuple[DeviceView, ...]

    def shown(self, top: int) -> Iterator[Block]:
        if len(self.devices) == 1:
            yield from _one_device(self.devices[0])
            return
        yield Headline(f"{len(self.devices)} devices; dense peak rates of vendors, links count both directions.")
        yield listing(
            self.devices, ("short", "device"), ("launch_year", Column("year", right=True)),
            ("bf16_tflops", "bf16 TFLOP/s", "digits"), ("memory_gb", "memory GB", "digits"),
            ("memory_gb_s", "GB/s", "digits"), ("scaleup_gb_s", "links GB/s", "digits"),
            ("pcie_gb_s", "PCIe GB/s", "digits"), ("tdp_w", "W", "digits"),
            (lambda each: each.scaleup_link or None, "links"),
        )  # fmt: skip
        yield Next(f"foretrace devices {self.devices[0].short}")


def devices(found: Iterable[Device]) -> DevicesView:
    """Return devices of the catalog."""
    return DevicesView(devices=tuple(_device(each) for each in found))


def _device(each: Device) -> DeviceView:
    """Return a device; figures that do not exist or are not known are 0 in the catalog and None here."""
    optional = [field.name for field in msgspec.structs.fields(DeviceView) if "None" in str(field.type)]
    return taken(
        DeviceView, each, confirmed=dict(each.confirmed), **{name: getattr(each, name) or None for name in optional}
    )


def _one_device(each: DeviceView) -> Iterator[Block]:
    yield Headline(f"{each.name} ({each.arch}, {each.launch_year}), in cluster files: {each.short}")
    rows = []
    for field, kind in get_type_hints(DeviceView, include_extras=True).items():
        value = getattr(each, field)
        if hasattr(kind, "__metadata__") and value is not None:
            source = each.confirmed.get(field, "")
            said = "vendor's figure, unconfirmed" if each.source != "designed" else "designed"
            said = f"confirmed by {source.replace('+', ', ')}" if source else said
            word, unit = kind.__metadata__
            rows.append((word, str(value) if field == "node_devices" else digits(value), unit, said))
    yield table(["", Column(right=True), "", Column(wide=True)], rows)
    links = [text for text in (each.scaleup_link, f"PCIe {each.pcie}" if each.pcie else "") if text]
    yield Line(", ".join(links), label="links")
    yield Line(each.note, label="note")
