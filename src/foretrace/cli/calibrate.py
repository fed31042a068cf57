"""`foretrace calibrate`: what operators cost on this machine, for predictions that are measured instead of assumed."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from foretrace import experiment, report
from foretrace.cli import options
from foretrace.cli.answers import Reply, Result, asked, group, writable
from foretrace.cli.options import flag, option
from foretrace.errors import ForetraceError

Seconds = Annotated[float, option(..., "S", "At most this many seconds for all operators.", least=1.0)]


def device(
    threads: int | None = option(None, "N", "Intra-op threads.", least=1, most=1024),
    seconds: Seconds = 30.0,
    like: Path | None = option(None, "TRACE", "With the threads and allocator settings of this recording."),
    operators: int | None = option(None, "K", "Only the K most informative operators, e.g. 50."),
    gpu: str | None = option(None, "NAME", "16-bit products of a GPU instead, by name; `here` for this one."),
    plan: Path | None = option(None, "FILE", "Only write the products to be timed, as CSV."),
    times: Path | None = option(None, "FILE", "Such a file with its times filled in."),
) -> Reply | None:
    """Time the operators that training consists of.

    In all sizes and precisions; the times are kept.

    With --operators a few are timed, and the prices that foretrace comes with are adapted to them: enough to predict
    steps on this processor that were never run. With --gpu they are the 16-bit products that say most of a GPU that
    nobody measured, 50 of them; --plan and --times carry them to another machine and back.
    Example: foretrace calibrate device --operators 50 --threads 1
    """
    if gpu is not None:
        from foretrace.cost.devices.learned.gpu_products import calibrate

        with options.progress("timing products") as tell:
            products = calibrate(gpu, operators=operators, plan=plan, times=times, budget_s=seconds, progress=tell)
        return Reply(result=report.calibrate.products(products), how={"device": products.device.name})
    if plan is not None or times is not None:
        raise ForetraceError("--plan and --times are of a GPU's products; name it, e.g. --gpu b200.")
    if like is not None:
        recorded = _machine_of(like)
        few = [] if operators is None else ["--operators", str(operators)]
        if _elsewhere(recorded["allocator"], ["device", "--seconds", str(seconds), "--like", str(like), *few]):
            return None
        threads = threads or recorded["threads"]

    with options.progress("timing operators") as tell:
        if operators is None:
            return Reply(
                result=report.calibrate.calibrated("device", experiment.every_operator(threads, seconds, tell))
            )
        found = experiment.few_operators(operators, threads, seconds, tell)
    how = {"said": found.said, "following": "foretrace calibrate device"}
    return Reply(result=report.calibrate.calibrated("device", found), how=how)


def run(
    source: options.Source,
    do: options.Do,
    seconds: Seconds = 30.0,
    trust: list[str] | None = option(None, "PACKAGE", "Let the recording's operators call this package's functions."),
) -> Reply | None:
    """Time the operators of a recording.

    As they are, and as techniques would change them.

    It must run on the machine of the recording, and takes over its threads and allocator settings.
    Example: foretrace calibrate run run/ --do mixed-precision
    """
    techniques = options.parsed(do)
    asking = [str(source), *(word for each in do or () for word in ("--do", each))]
    trusted = [word for each in trust or () for word in ("--trust", each)]
    if _elsewhere(_machine_of(source)["allocator"], ["run", *asking, "--seconds", str(seconds), *trusted]):
        return None

    graph = options.scenario(source).graph
    with options.progress("timing operators") as tell:
        found = experiment.recorded_operators(
            graph, techniques, seconds, source=str(source), trust=trust or (), tell=tell
        )
    following = shlex.join(["foretrace", "whatif", *asking])
    return Reply(result=report.calibrate.calibrated("run", found), how={"source": source.name, "following": following})


def network(
    workers: int = option(0, "N", "Processes; by default the GPUs, or 2 without any.", least=0),
    backend: str = option("", "gloo|nccl", "By default nccl where there are GPUs."),
    kinds: str = option("all-reduce", "KIND,...", "all-reduce, all-gather, reduce-scatter, ..."),
    least: int = option(4096, "BYTES", "Smallest size.", "--from", least=4),
    most: int = option(16 << 20, "BYTES", "Largest size.", "--to", least=4),
    count: int = option(13, "N", "Sizes between them.", "--sizes", least=1, most=256),
    repetitions: int = option(15, "N", "Per size, at least 15.", least=15),
    accept_noise: bool = flag("--accept-noise", "Keep times that vary by over 10 %; intervals get wider."),
    limit: float = option(600.0, "S", "Stop after S seconds.", least=1.0),
    out: Path | None = option(None, "FILE", "Where to keep the table (.json)."),
) -> Result:
    """Return time collectives between processes of this machine.

    The times are kept as a table for predictions.

    Example: foretrace calibrate network --workers 2 --to 4194304 --out gloo.json --accept-noise
    """
    writable(out)
    gpus = experiment.collectives.gpus()
    with options.progress("timing collectives") as tell:
        table = experiment.collectives.calibrate(
            workers=workers or max(gpus, 2), backend=backend or ("nccl" if gpus > 1 else "gloo"),
            sizes=experiment.collectives.sizes_between(least, most, count), repetitions=repetitions, limit_s=limit,
            kinds=[each.strip() for each in kinds.split(",")], progress=tell,
        )  # fmt: skip
    if not accept_noise:
        experiment.collectives.refuse_noise(table)
    return report.calibrate.calibrated_network(table, experiment.collectives.keep(table, out))


def _machine_of(source: Path) -> dict[str, Any]:

    return experiment.machine_of(options.scenario(source).graph, str(source))


def _elsewhere(allocator: dict[str, str], words: list[str]) -> bool:
    """Run this command again with the allocator settings of a recording, which a process only takes at its start.

    True where it did so. Raises ForetraceError where the settings cannot be had.
    """
    environment = experiment.environment_like(allocator)
    if environment is None:
        return False
    sys.stdout.flush()
    ended = subprocess.run(
        [sys.executable, "-m", "foretrace", "calibrate", *words, *asked()], env=environment, check=False
    )
    if ended.returncode:
        raise typer.Exit(ended.returncode)
    return True


calibrate = group(
    "calibrate", "Time operators on this machine, for better predictions.", device=device, run=run, network=network
)
