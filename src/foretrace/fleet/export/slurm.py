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
from foretrace.shipped import filled

PARTITION = re.compile(r"[\w.,-]+", re.ASCII)


def script(ask: Ask) -> dict[str, str]:
    """Return one script, NAME.sbatch."""
    if ask.queue and not PARTITION.fullmatch(ask.queue):
        raise ForetraceError(f"job {ask.job!r}: {ask.queue!r} cannot be a partition; rename the job's tenant.")
    text = filled(
        "foretrace.fleet.export", "job.sbatch.j2", ask=ask, job=repr(ask.job), share=f"{ask.share:g}",
        command=shlex.join(ask.command), clock=clock, inf=math.inf,
    )  # fmt: skip
    return {f"{ask.name}.sbatch": text}
