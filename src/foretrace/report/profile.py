"""What `foretrace profile` answers: TBD's metrics, the roofline per class and operator, and the split of memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from foretrace.hardware.probe import Peaks
from foretrace.report import runs
from foretrace.report.blocks import About, Block, Column, Grid, listing, table
from foretrace.report.blocks import notes as remarks
from foretrace.report.units import between, count, digits, in_unit, level, nbytes, scaled, share, things, unit_for
from foretrace.report.views import Report, StepTimeView, taken
from foretrace.simulate.memory import CATEGORIES, MemorySplit
from foretrace.simulate.timeline import Timeline
from foretrace.simulate.utilisation import CpuUse, GroupRates, cpu_use, samples_per_step
from foretrace.techniques.compute.rates import rates

_SINGULAR = ("communication", "attention", "normalisation", "pooling")
_NO_ARITHMETIC = ("communication", "copies to and from the device")
_LITTLE = 0.01  # rows with less than this share of the work are left to --json


class PeaksView(msgspec.Struct, frozen=True, kw_only=True):
    """What the device can reach, FLOP/s and bytes/s; null where not known. `source`: catalog, measured or given."""

    name: str
    source: str
    fp32_flops_per_s: float | None
    tf32_flops_per_s: float | None
    fp16_flops_per_s: float | None
    bf16_flops_per_s: float | None
    bytes_per_s: float | None
    ridge: float | None  # FLOP/B above which float32 work is bound by arithmetic


class ProfileView(Report, frozen=True, kw_only=True):
    """`foretrace profile`: how much of the device a step uses, and what holds its memory."""

    command: str = "profile"
    source: str
    device: str
    platform: str
    steps: int
    step_time_s: StepTimeView
    interval_s: tuple[float, float]
    interval_level: float
    samples_per_step: float | None
    samples_per_s: float | None
    samples_per_s_p10: float | None
    samples_per_s_p90: float | None
    busy_share: float
    peaks: PeaksView | None
    total: GroupRates
    step_flops_per_s: float  # over the whole step, idle time included
    compute_bound_share: float | None
    bandwidth_bound_share: float | None
    cpu: CpuUse | None
    threads_busy: dict[str, float]  # CPU thread -> share of the time with recorded work
    classes: tuple[GroupRates, ...]
    operators: tuple[GroupRates, ...]  # longest first, at most 100
    memory: MemorySplit | None

    def shown(self, top: int) -> Iterator[Block]:
        yield About((self.source, self.device, things(self.steps, "step")))
        yield table(["metric", Column("value", right=True), Column(wide=True)], _metrics(self))
        yield _rates_table("class", [row for row in self.classes if row.share >= _LITTLE])
        yield _rates_table("operator" if self.platform == "cpu" else "kernel", self.operators[:top])
        if self.memory is not None:
            yield from _memory_blocks(self.memory)


def profile(
    timeline: Timeline,
    *,
    peaks: Peaks | None,
    memory: MemorySplit | None,
    samples: float | None = None,
    path: str = "",
    name: str = "",
) -> ProfileView:
    """Return TBD's metrics of a recording; `samples` per step replace the recorder's, `name` is what was run."""
    graph = timeline.graph
    info = graph.info
    found = rates(timeline, peaks)
    step = runs.step_time(timeline)
    interval = timeline.interval_s()
    per_step = samples or samples_per_step(info.recording)
    use = cpu_use(info.recording)
    notes = list(runs.corrections(graph))
    computing = [each for each in found.classes if each.name not in _NO_ARITHMETIC]
    computing_s = sum(each.time_s for each in computing)
    covered = sum(each.known_share * each.time_s for each in computing) / computing_s if computing_s else 1.0
    if covered < 0.98:
        notes.append(f"FLOPs and bytes are known for {share(covered)} of the work; rates are those of this part.")
    if peaks is None:
        notes.append(
            "The peaks of this device are not known: give --peak-gflops and --peak-gb-s, "
            "or profile where it runs (foretrace profile NAME or SCRIPT measures a CPU)."
        )
    if any(each.of_peak_bandwidth is not None and each.of_peak_bandwidth > 1 for each in found.classes):
        notes.append("Rates above the peak of the memory: these arrays were found in a cache.")
    if any(each.of_peak_flops is not None and each.of_peak_flops > 1 for each in found.classes):
        notes.append(
            "Arithmetic above its peak: the peak is too low, or the machine was disturbed when it was measured."
        )
    if per_step is None:
        notes.append("The recording does not tell how many samples a step has: give --batch N for the throughput.")
    if use is None:
        notes.append("The recording does not tell the process's CPU time; threads show what it recorded.")
    if memory is None:
        notes.append("The recording holds no allocations with addresses (profile_memory), so memory is not split.")
    platform = info.platform
    return taken(
        ProfileView, found, headline=_headline(platform, found.total, found.busy_share, found.classes, peaks),
        source=name or runs.source(path, info.source),
        device=(peaks.name if peaks and peaks.threads else "") or graph.device_name or _who(platform),
        platform=platform, steps=graph.n_steps, step_time_s=step, interval_s=(interval.low_s, interval.high_s),
        interval_level=interval.level, samples_per_step=per_step,
        samples_per_s=per_step / step.median if per_step and step.median else None,
        samples_per_s_p10=per_step / step.p90 if per_step and step.p90 else None,
        samples_per_s_p90=per_step / step.p10 if per_step and step.p10 else None,
        peaks=None if peaks is None else _peaks(peaks), cpu=use, threads_busy=found.lane_busy, memory=memory,
        notes=tuple(notes),
        next=f"foretrace show {runs.quoted(path)}" if path else f"foretrace profile {name.partition(' ')[0]} --out run",
    )  # fmt: skip


def _peaks(peaks: Peaks) -> PeaksView:
    flops = {f"{name}_flops_per_s": getattr(peaks, name) or None for name in ("fp32", "tf32", "fp16", "bf16")}
    return taken(PeaksView, peaks, bytes_per_s=peaks.bytes_per_s or None, ridge=peaks.ridge or None, **flops)


def _who(platform: str) -> str:
    return "CPU" if platform == "cpu" else "GPU"


def _headline(
    platform: str, total: GroupRates, busy: float, classes: tuple[GroupRates, ...], peaks: Peaks | None
) -> str:
    """Return text such as "The CPU computes at 61.0 % of its peak: convolutions hold 74.0 % of its work."."""
    who = _who(platform)
    verb = "holds" if classes and classes[0].name in _SINGULAR else "hold"
    held = f"{classes[0].name} {verb} {share(classes[0].share)} of its work" if classes else "it has no work"
    computing = [each for each in classes if each.name not in _NO_ARITHMETIC]
    known = sum(each.known_share * each.time_s for each in computing)
    if 2 * known < sum(each.time_s for each in computing) or not total.flops:
        return f"The {who} is busy {share(busy)} of the step; what it computes the recording does not tell: {held}."
    if total.of_peak_flops is None:
        reason = "whose peak is not known" if peaks is None else "of a precision whose peak is not known"
        rate = scaled(total.flops_per_s, "FLOP/s")
        return f"The {who} computes {rate}, {reason}, and is busy {share(busy)} of the step: {held}."
    moves = "" if total.of_peak_bandwidth is None else f", moves {share(total.of_peak_bandwidth)} of its bandwidth"
    reached = f"computes at {share(total.of_peak_flops)} of its peak{moves}"
    return f"The {who} {reached} and is busy {share(busy)} of the step: {held}."


# --- blocks ----------------------------------------------------------------------------------------------------


def _metrics(view: ProfileView) -> Iterator[tuple[str, str, str]]:
    """Yield name, value and remark of every metric."""
    unit = unit_for(view.step_time_s.median)
    time = view.step_time_s
    spread = f"p10 {in_unit(time.p10, unit)} – p90 {in_unit(time.p90, unit)}"
    interval = f"{level(view.interval_level)} interval {between(*view.interval_s, unit)}"
    yield "step", f"{in_unit(time.median, unit)} {unit.name}", f"{spread}; {interval}"
    if view.samples_per_s is not None:
        assert view.samples_per_s_p10 is not None and view.samples_per_s_p90 is not None
        spread = f"p10 {digits(view.samples_per_s_p10)} – p90 {digits(view.samples_per_s_p90)}"
        per_step = f"{count(view.samples_per_step or 0)} samples per step"
        yield "throughput", f"{digits(view.samples_per_s)} samples/s", f"{spread}; {per_step}"
    total, peaks = view.total, view.peaks
    if total.flops:
        yield "arithmetic", scaled(total.flops_per_s, "FLOP/s"), _of(total.of_peak_flops, _flop_peaks(peaks))
    else:
        yield "arithmetic", "–", "not known: no shapes were recorded (record_shapes)"
    memory = scaled(peaks.bytes_per_s, "B/s") if peaks and peaks.bytes_per_s else ""
    yield "memory traffic", scaled(total.bytes_per_s, "B/s"), _of(total.of_peak_bandwidth, memory)
    where = "of the step with device work" if view.platform != "cpu" else "of the step inside operators"
    yield "busy", share(view.busy_share), where
    bound = ""
    if peaks and peaks.ridge and view.compute_bound_share is not None and view.bandwidth_bound_share is not None:
        bound = (
            f"ridge of float32 {digits(peaks.ridge)}; at each one's precision {share(view.compute_bound_share)} of the "
            f"time compute-bound, {share(view.bandwidth_bound_share)} bandwidth-bound"
        )
    yield "intensity", f"{digits(total.intensity)} FLOP/B", bound
    if view.cpu is not None:
        cores = f"{digits(view.cpu.busy_cores)} of {view.cpu.cores} cores"
        yield "CPU", share(view.cpu.share), f"{cores}, over {view.cpu.steps} steps beside the recorded"
    else:
        busiest = sorted(view.threads_busy.items(), key=lambda item: -item[1])[:3]
        yield "CPU", "–", ", ".join(f"{name} {share(value)} at work" for name, value in busiest)


def _rates_table(title: str, rows: Sequence[GroupRates]) -> Grid:
    return listing(
        rows, ("name", Column(title, "name")), ("time_s", "time", "time"), ("share", "share", "share"),
        ("flops_per_s", "FLOP/s", "FLOP/s"), ("of_peak_flops", "of peak", "share"),
        ("bytes_per_s", Column("B/s", "B/s", extra=True)),
        ("of_peak_bandwidth", Column("of peak", "share", extra=True)),
        ("of_roofline", "roofline", "share"),
    )  # fmt: skip


def _memory_blocks(memory: MemorySplit) -> Iterator[Block]:
    rows = []
    for name in CATEGORIES:
        size, course = memory.at_peak_bytes[name], memory.over_time_bytes[name]
        if size or any(course):
            whole = max(memory.peak_bytes, 1)
            rows.append((name, size, size / whole, tuple(each / whole for each in course)))
    columns: list[Column | str] = [
        f"memory at the peak ({memory.device})", Column("size", "bytes"), Column("share", "share", unknown=""),
        Column(f"over step {memory.step}", "course", extra=True),
    ]  # fmt: skip
    yield table(columns, [*rows, ("all", memory.peak_bytes, None, ())])
    where = f"peak in {memory.peak_phase or 'no phase'}" + (f", {memory.peak_operator}" if memory.peak_operator else "")
    line = (
        f"{where}; {count(round(memory.allocations_per_step))} allocations of "
        f"{nbytes(memory.allocated_per_step_bytes)} per step."
    )
    if memory.recorded_peak_bytes is not None:
        line += f" The allocator's own peak: {nbytes(memory.recorded_peak_bytes)}."
    yield from remarks([line, *(note[:1].upper() + note[1:] for note in memory.notes)])


def _of(part: float | None, whole: str) -> str:
    return "peak not known" if part is None or not whole else f"{share(part)} of {whole}"


def _flop_peaks(peaks: PeaksView | None) -> str:
    if peaks is None:
        return ""
    known = {"fp32": peaks.fp32_flops_per_s, "TF32": peaks.tf32_flops_per_s, "fp16": peaks.fp16_flops_per_s}
    known["bf16"] = peaks.bf16_flops_per_s if peaks.bf16_flops_per_s != peaks.fp16_flops_per_s else None
    return ", ".join(f"{scaled(v, 'FLOP/s')} {k}" for k, v in known.items() if v) + f" ({peaks.source})"
