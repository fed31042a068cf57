"""Plans as people launch them: what starts processes, and the settings of training software.

A target is a file of this folder and a row of `TARGETS`. What a target has no words for is refused, never left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from foretrace.errors import ForetraceError
from foretrace.names import question, resolve
from foretrace.plan.export import deepspeed, dtensor, megatron, slurm, torchrun, torchtitan
from foretrace.plan.export.launch import InexpressiblePlanError, LaunchedPlan


@dataclass(frozen=True, kw_only=True)
class LaunchTarget:
    """What a plan can be written for: usual name of the file, and what makes its text."""

    file: str
    write: Callable[[LaunchedPlan], str]
    splits: bool = True  # says how the model is split, and does not start processes alone


TARGETS = {
    "torchrun": LaunchTarget(file="torchrun.sh", write=torchrun.write, splits=False),
    "slurm": LaunchTarget(file="plan.sbatch", write=slurm.write, splits=False),
    "megatron": LaunchTarget(file="megatron.args", write=megatron.write),
    "megatron-bridge": LaunchTarget(file="megatron_bridge.yaml", write=megatron.write_bridge),
    "deepspeed": LaunchTarget(file="deepspeed.json", write=deepspeed.write),
    "torchtitan": LaunchTarget(file="torchtitan.toml", write=torchtitan.write),
    "dtensor": LaunchTarget(file="parallelize.py", write=dtensor.write),
}


def target(name: str) -> str:
    """Return the target of this name. Raises ForetraceError with names that come near."""
    found = resolve(name, TARGETS)
    if not found:
        raise ForetraceError(f"`export=` must be one of {', '.join(TARGETS)}, got {name!r}; {question(name, TARGETS)}")
    return found


def export(launch: LaunchedPlan, to: str) -> str:
    """Return the text of a plan for a target. Raises ForetraceError, with targets that can, where this one cannot."""
    name = target(to)
    try:
        return _text(name, launch)
    except InexpressiblePlanError as error:
        able = [each for each in TARGETS if TARGETS[each].splits and _can(each, launch)]
        other = f", or export to {' or '.join(able)}" if able else ""
        raise ForetraceError(f"{name} cannot express {error.what}; {error.change}{other}.") from None


def path_of(out: Path, to: str) -> Path:
    """Return where the file goes: `out`, or in it under its usual name where it is a folder."""
    return out / TARGETS[target(to)].file if out.is_dir() else out


def _text(name: str, launch: LaunchedPlan) -> str:
    if TARGETS[name].splits:
        launch.without("versions", at="its pipelines have a flush")
    return TARGETS[name].write(launch)


def _can(name: str, launch: LaunchedPlan) -> bool:
    try:
        _text(name, launch)
    except InexpressiblePlanError:
        return False
    return True
