"""`torchrun`: one process per device on every machine; what they run is given behind it. Slurm: one on each machine."""

from __future__ import annotations

from foretrace.plan.export.launch import LaunchedPlan, options


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
