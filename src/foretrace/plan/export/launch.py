"""`LaunchedPlan`: what a target needs of a plan; `UnsupportedSetting`: what one has no words for.

`torchrun` starts one process per device on every machine, what they run is given behind it; Slurm one on each machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from foretrace.errors import ForetraceError
from foretrace.plan.transformers.model import NODE, RECOMPUTATIONS, Parallelism
from foretrace.plan.transformers.shape import TransformerSizes
from foretrace.plan.transformers.space import multiple


@dataclass(frozen=True, kw_only=True)
class LaunchedPlan:
    """A model, how it is split, and samples per step. Raises ForetraceError where they do not fit together."""

    model: TransformerSizes
    at: Parallelism
    batch: int
    node: int = NODE  # devices of a machine

    def __post_init__(self) -> None:
        at, samples, stages = self.at, self.at.data * self.at.micro, self.at.pipeline * self.at.virtual
        for wrong, said in (
            (self.batch < 1 or self.batch % samples,
             f"batch must be a multiple of {samples} (data degree times micro-batch), got {self.batch}; give "
             f"{multiple(self.batch, samples)}."),
            (at.devices > self.node and at.devices % self.node,
             f"devices must be a multiple of the {self.node} of a machine to be launched by torchrun, got "
             f"{at.devices}; give {multiple(at.devices, self.node)}."),
            (at.virtual > 1 and at.pipeline == 1,
             f"virtual must be 1 where pipeline is 1, got {at.virtual}; give a pipeline degree."),
            (self.model.layers % stages,
             f"layers must be a multiple of {stages} stages, got {self.model.layers}; give degrees that divide them."),
        ):  # fmt: skip
            if wrong:
                raise ForetraceError(said)

    @property
    def nodes(self) -> int:
        """Machines that it runs on."""
        return max(self.at.devices // self.node, 1)

    @property
    def per_node(self) -> int:
        """Processes of a machine, one per device."""
        return min(self.at.devices, self.node)

    @property
    def per_replica(self) -> int:
        """Samples of a step for each data-parallel replica."""
        return self.batch // self.at.data

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step for each data-parallel replica."""
        return self.per_replica // self.at.micro

    @property
    def title(self) -> str:
        return f"{self.model.name} on {self.at.devices} devices: {self.at}, {self.batch} samples per step"


class UnsupportedSetting(NamedTuple):
    """What a target has no words for, and the change of the plan that it takes; with fields of `at` and `model`."""

    when: Callable[[LaunchedPlan], bool]
    what: str
    change: str

    def said(self, launch: LaunchedPlan) -> tuple[str, str]:
        what, change = (each.format(at=launch.at, model=launch.model) for each in (self.what, self.change))
        return what, change


def lacking(*names: str, why: str) -> list[UnsupportedSetting]:
    """Return refusals of fields of `Parallelism` that are not the default; `why`: what the target does about them."""

    def refusal(name: str, usual: int) -> UnsupportedSetting:
        what = f"{name}={{at.{name}}} ({why})"
        return UnsupportedSetting(lambda launch: getattr(launch.at, name) != usual, what, f"fix {name}={usual}")

    return [refusal(name, getattr(Parallelism(), name)) for name in names]


def selective(why: str) -> UnsupportedSetting:
    """Return the refusal of selective recomputation."""
    return UnsupportedSetting(lambda launch: RECOMPUTATIONS[launch.at.recompute] == "selective",
                   f"selective recomputation ({why})", "fix recompute=0 or 2")  # fmt: skip


SHARDS_ALL = UnsupportedSetting(
    lambda plan: plan.at.zero == 1, "zero=1 (FSDP shards gradients and weights, too)", "fix zero=2 or 3"
)


def options(values: Mapping[str, object], join: str = " ") -> list[str]:
    """Return options as a command line has them: True is a flag alone, False and None are left out."""
    return [
        f"--{name}" if value is True else f"--{name}{join}{value}"
        for name, value in values.items()
        if value is not None and value is not False
    ]


def torchrun(launch: LaunchedPlan) -> str:
    """Return a script for Bash, to be started on every machine, with the training script and its arguments behind."""
    where = "" if launch.nodes == 1 else "# Start it on every machine, with MASTER_ADDR the name of the first.\n"
    return f"#!/bin/bash\n# {launch.title}\n{where}exec {_line(launch)}\n"


def slurm(launch: LaunchedPlan) -> str:
    """Return a script for sbatch, with the same behind it. Options as sbatch(1) names them."""
    asked = options({
        "job-name": launch.model.name, "nodes": launch.nodes, "ntasks-per-node": 1, "gpus-per-node": launch.per_node,
        "exclusive": launch.per_node == launch.node,
    }, "=")  # fmt: skip
    lines = ["#!/bin/bash", *(f"#SBATCH {each}" for each in asked), f"# {launch.title}"]
    if launch.nodes > 1:
        lines.append('export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"')
    return "\n".join([*lines, f"srun {_line(launch)}", ""])


def _line(launch: LaunchedPlan) -> str:
    """Return the command, options as torch.distributed.run names them."""
    meeting: dict[str, object] = {"standalone": True}
    if launch.nodes > 1:
        meeting = {
            "rdzv-backend": "c10d",
            "rdzv-endpoint": '"$MASTER_ADDR:${MASTER_PORT:-29500}"',
            "rdzv-id": '"${SLURM_JOB_ID:-foretrace}"',
        }
    words = options({"nnodes": launch.nodes, "nproc-per-node": launch.per_node, **meeting}, "=")
    return " ".join(["torchrun", *words, '"$@"'])
