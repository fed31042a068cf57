"""Slurm: a batch script with one torchrun on each machine."""

from __future__ import annotations

from foretrace.plan.export.launch import LaunchedPlan, options
from foretrace.plan.export.torchrun import line


def write(launch: LaunchedPlan) -> str:
    """Return a script for sbatch, with the training script and its arguments behind it. Options as sbatch(1) names
    them.
    """
    asked = options(
        {
            "job-name": launch.model.name,
            "nodes": launch.nodes,
            "ntasks-per-node": 1,
            "gpus-per-node": launch.per_node,
            "exclusive": launch.per_node == launch.node,
        },
        "=",
    )
    lines = ["#!/bin/bash", *(f"#SBATCH {each}" for each in asked), f"# {launch.title}"]
    if launch.nodes > 1:
        lines.append('export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"')
    return "\n".join([*lines, f"srun {line(launch)}", ""])
