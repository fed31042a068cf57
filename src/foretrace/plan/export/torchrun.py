"""`torchrun`: one process per device, on every machine; what they run is given behind it."""

from __future__ import annotations

from foretrace.plan.export.launch import LaunchedPlan, options


def write(launch: LaunchedPlan) -> str:
    """Return a script for Bash, to be started on every machine, with the training script and its arguments
    behind it.
    """
    where = "" if launch.nodes == 1 else "# Start it on every machine, with MASTER_ADDR the name of the first.\n"
    return f"#!/bin/bash\n# {launch.title}\n{where}exec {line(launch)}\n"


def line(launch: LaunchedPlan) -> str:
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
