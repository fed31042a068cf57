"""Plans as people launch them: what starts processes, and the settings of training software.

A target is a row of `TARGETS`. What a target has no words for is refused, never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from foretrace.errors import ForetraceError
from foretrace.names import chosen
from foretrace.plan.export import launch, settings
from foretrace.plan.export.launch import LaunchedPlan, UnsupportedSetting, lacking


@dataclass(frozen=True, kw_only=True)
class LaunchTarget:
    """What a plan can be written for: usual name of the file, what makes its text, and what it has no words for."""

    file: str
    write: Callable[[LaunchedPlan], str]
    refuses: Sequence[UnsupportedSetting] = ()
    splits: bool = True  # says how the model is split, and does not start processes alone

    def refusal(self, launch: LaunchedPlan) -> UnsupportedSetting | None:
        """Return the first reason why it cannot express a plan."""
        rules = [*lacking("versions", why="its pipelines have a flush"), *self.refuses] if self.splits else []
        return next((each for each in rules if each.when(launch)), None)


TARGETS = {
    "torchrun": LaunchTarget(file="torchrun.sh", write=launch.torchrun, splits=False),
    "slurm": LaunchTarget(file="plan.sbatch", write=launch.slurm, splits=False),
    "megatron": LaunchTarget(file="megatron.args", write=settings.megatron, refuses=settings.MEGATRON_REFUSES),
    "megatron-bridge": LaunchTarget(
        file="megatron_bridge.yaml", write=settings.megatron_bridge, refuses=settings.MEGATRON_REFUSES
    ),
    "deepspeed": LaunchTarget(file="deepspeed.json", write=settings.deepspeed, refuses=settings.DEEPSPEED_REFUSES),
    "torchtitan": LaunchTarget(file="torchtitan.toml", write=settings.torchtitan, refuses=settings.TORCHTITAN_REFUSES),
    "dtensor": LaunchTarget(file="parallelize.py", write=settings.dtensor, refuses=settings.DTENSOR_REFUSES),
}


def target(name: str) -> str:
    """Return the target of this name. Raises ForetraceError with names that come near."""
    return chosen(name, TARGETS, f"`export=` must be one of {', '.join(TARGETS)}, got {name!r}")


def export(launch: LaunchedPlan, to: str) -> str:
    """Return the text of a plan for a target. Raises ForetraceError, with targets that can, where this one cannot."""
    name = target(to)
    if refusal := TARGETS[name].refusal(launch):
        able = [name for name, each in TARGETS.items() if each.splits and not each.refusal(launch)]
        what, change = refusal.said(launch)
        other = f", or export to {' or '.join(able)}" if able else ""
        raise ForetraceError(f"{name} cannot express {what}; {change}{other}.")
    return TARGETS[name].write(launch)


def path_of(out: Path, to: str) -> Path:
    """Return where the file goes: `out`, or in it under its usual name where it is a folder."""
    return out / TARGETS[target(to)].file if out.is_dir() else out
