"""What meets a real scheduler: `foretrace fleet live`, a queue played on; `fleet rig`, to check simulations against."""

from __future__ import annotations

from pathlib import Path

from foretrace import fleet as fleets
from foretrace import report
from foretrace.cli import completion, options
from foretrace.cli.answers import Result
from foretrace.cli.fleet_options import Seed
from foretrace.cli.options import argument, option
from foretrace.errors import ForetraceError


def live(
    job: str = argument("", "JOB", "The number of a job that waits; by default all of them."),
    *,
    from_: Path | None = option(None, "FOLDER", "Saved outputs, instead of the Slurm that answers here.", "--from"),
    save: Path | None = option(None, "FOLDER", "Save what Slurm's commands print, for --from."),
    history: list[Path] | None = option(None, "LOG", "Past jobs (sacct -P, jobcomp/filetxt, any log); repeat it."),
    add_rack: int = option(0, "N", "Also: what so many more leaf switches of nodes would do.", least=0),
    set_: list[str] | None = option(
        None, "NAME=VALUE", "Also: what bf_interval, bf_window, bf_max_job_test or max_switch_wait would do.", "--set"
    ),
    draws: int = option(200, "N", "How often the queue is played on.", least=20, most=10_000),
    seed: Seed = 0,
) -> Result:
    """Say when jobs of a Slurm queue start.

    And why they wait, and what would start one sooner. Reads scontrol and squeue here (read-only), or saved outputs,
    and plays the queue on with run times drawn from past jobs and time limits.

    Example: foretrace fleet live 41 --from slurm --history slurm/history.txt
    """
    if from_ is not None and save is not None:
        raise ForetraceError("--save keeps what Slurm prints now, --from reads what was kept; give one of them.")
    past = [each for log in history or [] for each in fleets.read_past(log)]
    seen = fleets.read_folder(from_) if from_ is not None else fleets.ask_slurm(save=save)
    with options.progress("playing the queue on") as tell:
        found = fleets.ask_queue(
            seen, past, job=job or None, draws=draws, seed=seed, racks=add_rack, progress=tell,
            settings=set_ or (),
        )  # fmt: skip
    return report.fleet_slurm.live(
        found, next_=report.fleet_slurm.following(found, [] if from_ is None else ["--from", str(from_)])
    )


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
    if on not in ("slurm", "ray"):
        raise ForetraceError(f"--on must be slurm or ray, got {on!r}.")
    if lacks := fleets.missing_ray() if on == "ray" else fleets.missing_slurm():
        raise ForetraceError(lacks)
    setup = fleets.SlurmSetup(nodes=nodes, gpus=gpus, racks=racks)
    setup.validate()
    drawn = trace.split()[:1] == [fleets.rig_against.SYNTHETIC] and not Path(trace).exists()
    work = fleets.rig_against.synthetic(trace, setup) if drawn else fleets.workload_of(trace)
    work = work.take(work.submit_ns.argsort(kind="stable")[:jobs]) if jobs else work
    failures = [one for each in fail or () for one in fleets.windows("fail", each)]
    with options.progress("playing jobs in real time") as tell:
        found = fleets.rig_against.against(
            work, setup, policy, speedup=speedup, repeats=repeats, failures=failures, progress=tell, on=on
        )
    next_ = report.names.command("fleet", "rig", on=on, nodes=nodes, gpus=gpus, racks=racks, trace=trace, policy=policy,
                    speedup=f"{speedup:g}", repeats=3)  # fmt: skip
    return report.fleet_slurm.rig(
        found, on=on, source=trace, policy=policy, speedup=speedup, next_=next_ if repeats == 1 else ""
    )
