"""`foretrace zoo` as an answer: the models there are, or some steps of one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from foretrace.report import units
from foretrace.report.blocks import About, Block, Headline, Line, Next, table
from foretrace.report.views import Result, taken

if TYPE_CHECKING:
    from foretrace.zoo.registry import ZooModel
    from foretrace.zoo.trial import Trial


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
            TrialView,
            run,
            size=size,
            seed=seed,
            step_time_s=TrialTimeView(median=median, p10=low, p90=high),
            steps=len(run.step_s),
            loading_s=run.median_loading_s,
        )
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
