"""What `foretrace kernels` answers: the kernels that a compiler generated for a step, each with its time."""

from __future__ import annotations

from collections.abc import Iterator

from foretrace.experiment.kernels import CompiledStep, GeneratedKernel
from foretrace.report.blocks import About, Bar, BarPart, Bars, Block, Line, listing
from foretrace.report.units import seconds, share, signed, things, within
from foretrace.report.views import Report, taken


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
