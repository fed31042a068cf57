"""`foretrace fleet rig`: a real scheduler on this machine, to check simulations against."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from foretrace.cli import completion, options
from foretrace.cli.options import option
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.report.views import Result


def rig(
    nodes: int = option(64, "N", "Virtual nodes.", least=1),
    gpus: int = option(4, "N", "GPUs of each.", least=1),
    racks: int = option(4, "N", "Leaf switches, each with as many nodes.", least=1),
    trace: str = option("synthetic jobs=40 seed=7", "TRACE|synthetic", "A log of jobs, or how to draw some."),
    policy: str = option(
        "backfill slurm=yes", "NAME [KEY=VALUE ...]", "fifo, backfill or priority, with slurm=; on Ray fifo-skip.",
        complete=completion.policies,
    ),
    speedup: float = option(600.0, "FACTOR", "Seconds of the workload in one of the rig's."),
    jobs: int = option(0, "N", "Only the first N jobs. 0: all.", least=0),
    repeats: int = option(1, "N", "Runs, each on a Slurm of its own.", least=1),
    on: str = option("slurm", "slurm|ray", "What plays them: a private Slurm, or a private Ray's placement groups."),
    fail: list[str] | None = option(None, "NODES@S[-S]", "Nodes fail (and come back); repeat it."),
) -> Result:  # fmt: skip
    """Play jobs on a private Slurm or Ray, and simulate them.

    In real time, in a folder and on ports of its own; it ends with the command. slurm= is on the rig's clock.

    Example: foretrace fleet rig --nodes 8 --racks 2 --trace "synthetic jobs=10 seed=7 run-s=1200" --speedup 600
    """
    from pathlib import Path

    from foretrace.fleet.policies.slurm_options import windows
    from foretrace.fleet.rig import against, on_ray
    from foretrace.fleet.rig.cluster import SlurmSetup, missing
    from foretrace.fleet.scene import workload_of
    from foretrace.report import fleet_rig as report

    if on not in ("slurm", "ray"):
        raise ForetraceError(f"--on must be slurm or ray, got {on!r}.")
    if lacks := on_ray.missing() if on == "ray" else missing():
        raise ForetraceError(lacks)
    setup = SlurmSetup(nodes=nodes, gpus=gpus, racks=racks)
    setup.validate()
    drawn = trace.split()[:1] == [against.SYNTHETIC] and not Path(trace).exists()
    work = against.synthetic(trace, setup) if drawn else workload_of(trace)
    work = work.take(work.submit_ns.argsort(kind="stable")[:jobs]) if jobs else work
    failures = [one for each in fail or () for one in windows("fail", each)]
    with options.progress("playing jobs in real time") as tell:
        found = against.against(
            work, setup, policy, speedup=speedup, repeats=repeats, failures=failures, progress=tell, on=on
        )
    said = ["foretrace", "fleet", "rig", "--on", on, "--nodes", str(nodes), "--gpus", str(gpus), "--racks", str(racks)]
    next_ = shlex.join([*said, "--trace", trace, "--policy", policy, "--speedup", f"{speedup:g}", "--repeats", "3"])
    return report.rig(found, on=on, source=trace, policy=policy, speedup=speedup, next_=next_ if repeats == 1 else "")
