"""A batch script for Slurm.

`--switches=N@wait` is the delay timer of delay scheduling: the job stays pending until its nodes lie below N leaf
switches or the wait is over (sbatch(1)). The site's `SchedulerParameters=max_switch_wait` (300 s unless set)
bounds every wait.
"""

from __future__ import annotations

import math
import re
import shlex

from foretrace.errors import ForetraceError
from foretrace.fleet.export.ask import Ask, clock

PARTITION = re.compile(r"[\w.,-]+", re.ASCII)


def script(ask: Ask) -> dict[str, str]:
    """Return one script, NAME.sbatch."""
    kind = f"{ask.gpu_type}:" if ask.gpu_type and "|" not in ask.gpu_type else ""
    lines = [f"#SBATCH --job-name={ask.name}"]
    notes = [f"{ask.within} (job {ask.job!r})"]
    queue = ask.queue
    if queue and not PARTITION.fullmatch(queue):
        raise ForetraceError(f"job {ask.job!r}: {queue!r} cannot be a partition; rename the job's tenant.")
    if queue:
        lines.append(f"#SBATCH --partition={queue}")
    if ask.level == 0 and ask.wait_s == 0 and ask.gpus > 1:
        lines += [f"#SBATCH --nodes=1-{ask.gpus}", f"#SBATCH --gpus={kind}{ask.gpus}"]
    elif ask.per_node:
        lines += [f"#SBATCH --nodes={ask.nodes}", f"#SBATCH --gpus-per-node={kind}{ask.per_node}"]
    else:
        lines += [f"#SBATCH --nodes={ask.nodes}", f"#SBATCH --gpus={kind}{ask.gpus}"]
    if not ask.anywhere and ask.level > 0:
        lines.append(f"#SBATCH --switches={_switches(ask)}")
        if ask.level > 1:
            notes.append(
                f"Slurm counts leaf switches only, so a {ask.level_name} becomes the fewest of them that hold it"
            )
        if math.isinf(ask.wait_s):
            notes.append("without a time after @ Slurm waits as long as max_switch_wait of the site lets it")
        elif ask.wait_s > 300:
            notes.append("waits above max_switch_wait of the site (300 s unless set) are cut down to it")
    if ask.level == 0 and 0 < ask.wait_s < math.inf and ask.gpus > 1:
        notes.append("Slurm has no timer for one node or several; once it has waited long enough, let it spread by")
        notes.append(f"  scontrol update JobId=... NumNodes=1-{ask.gpus}")
    if "|" in ask.gpu_type:
        notes.append(
            f"it may use {ask.gpu_type.replace('|', ' or ')}; gres takes one type, so name nodes by --constraint"
        )
    if ask.share < 1:
        notes.append(f"it needs {ask.share:g} of a GPU; whole ones are asked for")
    if ask.estimate_s > 0:
        lines.append(f"#SBATCH --time={clock(ask.estimate_s)}")
    body = "srun " + " ".join(shlex.quote(word) for word in ask.command)
    text = "\n".join(["#!/bin/bash", *lines, *(f"# {note}" for note in notes), "", body, ""])
    return {f"{ask.name}.sbatch": text}


def _switches(ask: Ask) -> str:
    count = 1 if ask.level == 1 else ask.leaves
    if math.isinf(ask.wait_s):
        return str(count)
    return f"{count}@{clock(ask.wait_s)}"
