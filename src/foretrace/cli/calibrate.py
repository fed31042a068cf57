"""`foretrace calibrate`: what operators cost on this machine, for predictions that are measured instead of assumed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretrace.cli import options
from foretrace.cli.answers import Reply, answers, asked
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.report.views import Result

_AGAIN = "FORETRACE_CALIBRATES_AGAIN"  # set for the process that runs in the environment of a recording

calibrate = typer.Typer(
    name="calibrate",
    help="Time operators on this machine, for better predictions.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Threads = Annotated[int | None, typer.Option("--threads", metavar="N", min=1, help="Threads of an operator.")]
Seconds = Annotated[
    float, typer.Option("--seconds", metavar="S", min=1.0, help="At most this many seconds for all operators.")
]


@calibrate.command("device")
@answers
def device(
    threads: Threads = None,
    seconds: Seconds = 30.0,
    like: Annotated[
        Path | None,
        typer.Option("--like", metavar="TRACE", help="With the threads and allocator settings of this recording."),
    ] = None,
    operators: Annotated[
        int | None,
        typer.Option("--operators", metavar="K", help="Only the K most informative operators, e.g. 50."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", help="16-bit products of a GPU instead, by name; `here` for this one."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="Only write the products to be timed, as CSV.")
    ] = None,
    times: Annotated[
        Path | None, typer.Option("--times", metavar="FILE", help="Such a file with its times filled in.")
    ] = None,
) -> Reply | None:
    """Time the operators that training consists of, in all sizes and precisions, and keep the times.

    With --operators a few are timed, and the prices that foretrace comes with are adapted to them: enough to predict
    steps on this processor that were never run. With --gpu they are the 16-bit products that say most of a GPU that
    nobody measured, 50 of them; --plan and --times carry them to another machine and back.
    Example: foretrace calibrate device --operators 50 --threads 1
    """
    if gpu is not None:
        return _products(gpu, operators, plan, times, seconds)
    if plan is not None or times is not None:
        raise ForetraceError("--plan and --times are of a GPU's products; name it, e.g. --gpu b200.")
    if like is not None:
        recorded = _machine_of(like)
        few = [] if operators is None else ["--operators", str(operators)]
        if _elsewhere(recorded["allocator"], ["device", "--seconds", str(seconds), "--like", str(like), *few]):
            return None
        threads = threads or recorded["threads"]
    if operators is not None:
        return _few(operators, threads, seconds)
    from foretrace.cost.operators import bench, store
    from foretrace.cost.operators.grid import grid
    from foretrace.cost.operators.machine import fingerprint
    from foretrace.report.calibrate import calibrated

    with _threads(threads), options.progress("timing operators") as report:
        machine = fingerprint()
        measured = bench.measure(
            [each for point in grid() for each in point.operators], budget_s=seconds, progress=report
        )
    path = store.save(machine, measured.seconds)
    return Reply(result=calibrated("device", machine, path, measured.seconds, measured.failed))


def _few(operators: int, threads: int | None, seconds: float) -> Reply:
    """The most informative operators, timed in several turns and kept."""
    with _threads(threads):
        from foretrace.cost.operators import store
        from foretrace.cost.operators.machine import fingerprint
        from foretrace.model import on_processor

        on_processor.operators(operators)  # says so where they are too few
        with options.progress("timing operators") as report:
            machine = fingerprint()
            measured = on_processor.calibrated(operators, budget_s=seconds, progress=report).measured
        if not any(key.startswith("aten::") for key in measured.seconds):
            raise ForetraceError(f"no operator could be timed within {seconds:g} s; give --seconds more.")
        path = store.save(machine, measured.seconds)
        rates = on_processor.Processor.of(measured.seconds).rates()
    from foretrace.report.calibrate import calibrated

    return Reply(
        result=calibrated("device", machine, path, measured.seconds, measured.failed),
        how={"said": [rates.headline, *rates.lines], "following": "foretrace calibrate device"},
    )


def _products(gpu: str, operators: int | None, plan: Path | None, times: Path | None, seconds: float) -> Reply:
    """The 16-bit products of a GPU that say most of all others: named, timed here, or read."""
    from foretrace.cost.devices.learned import gpu_products
    from foretrace.hardware.devices import named

    if plan is not None and times is not None:
        raise ForetraceError("--plan writes what is to be timed, --times reads what was; give one of them.")
    if gpu == "here" or (plan is None and times is None):
        with _threads(None):  # says so where there is no PyTorch
            device = gpu_products.here()
        if gpu != "here" and named(gpu) is not device:
            raise ForetraceError(f"the GPU of this machine is {device.short}, not {named(gpu).short}; use --plan.")
    else:
        device = named(gpu)
    rows = gpu_products.plan(device, operators or gpu_products.COUNT)
    found = None
    if times is not None:
        rows, found = gpu_products.read_times(times, device)
    elif plan is None:
        with options.progress("timing products") as report:
            found = gpu_products.seconds(rows, budget_s=seconds, progress=report)
        rows = rows[: len(found)]
    if found is None:
        assert plan is not None
        gpu_products.write_plan(plan, device, rows)
        stored = plan
    else:
        stored = gpu_products.keep(device, rows, found)
    from foretrace.report.calibrate import CalibrateGpuView

    timed = None if found is None else found.tolist()
    view = CalibrateGpuView(gpu=device.short, stored=str(stored), products=rows.tolist(), seconds=timed)
    return Reply(result=view, how={"device": device.name})


@calibrate.command("run")
@answers
def run(
    source: options.Source,
    do: options.Do,
    seconds: Seconds = 30.0,
    trust: Annotated[
        list[str] | None,
        typer.Option("--trust", metavar="PACKAGE", help="Let the recording's operators call this package's functions."),
    ] = None,
) -> Reply | None:
    """Time the very operators of a recording, as they are and as techniques would change them.

    It must run on the machine of the recording, and takes over its threads and allocator settings.
    Example: foretrace calibrate run run/ --do mixed-precision
    """
    from foretrace.techniques.arguments import parse_all

    do = do or []
    techniques = parse_all(do)
    recorded = _machine_of(source)
    words = ["run", str(source), *(word for each in do or () for word in ("--do", each)), "--seconds", str(seconds)]
    words += [word for each in trust or () for word in ("--trust", each)]
    if _elsewhere(recorded["allocator"], words):
        return None
    from foretrace.cost.operators import bench, store
    from foretrace.cost.operators.calibration import Calibration
    from foretrace.cost.operators.machine import differences, fingerprint
    from foretrace.deadline import Deadline
    from foretrace.techniques.measuring import calibrated

    with _threads(recorded["threads"]):
        machine = fingerprint()
        if other := differences(recorded, machine):
            raise ForetraceError(f"{source} was recorded elsewhere: {', '.join(other)}; calibrate there.")
        graph = options.scenario(source).graph
        graph = Calibration.load_for(graph).on(graph)
        until = Deadline(seconds)  # for all techniques together
        with options.progress("timing operators") as report:
            found = calibrated(
                graph,
                techniques,
                partial(bench.measure, progress=report, trust=trust or ()),
                until,
            )
    path = store.save(machine, found.seconds) if found.seconds else store.path_for(machine)
    from foretrace.report.calibrate import calibrated as view_of

    following = shlex.join(
        ["foretrace", "whatif", str(source), *(word for each in do or () for word in ("--do", each))]
    )
    return Reply(
        result=view_of("run", machine, path, found.seconds, found.failed),
        how={"source": source.name, "following": following},
    )


@calibrate.command("network")
@answers
def network(
    workers: Annotated[
        int, typer.Option("--workers", metavar="N", min=0, help="Processes; by default the GPUs, or 2 without any.")
    ] = 0,
    backend: Annotated[
        str, typer.Option("--backend", metavar="gloo|nccl", help="By default nccl where there are GPUs.")
    ] = "",
    kinds: Annotated[
        str, typer.Option("--kinds", metavar="KIND,...", help="all-reduce, all-gather, reduce-scatter, ...")
    ] = "all-reduce",
    least: Annotated[int, typer.Option("--from", metavar="BYTES", min=4, help="Smallest size.")] = 4096,
    most: Annotated[int, typer.Option("--to", metavar="BYTES", min=4, help="Largest size.")] = 16 << 20,
    count: Annotated[int, typer.Option("--sizes", metavar="N", min=1, max=256, help="Sizes between them.")] = 13,
    repetitions: Annotated[int, typer.Option("--repetitions", metavar="N", min=15, help="Per size, at least 15.")] = 15,
    accept_noise: Annotated[
        bool, typer.Option("--accept-noise", help="Keep times that vary by over 10 %; intervals get wider.")
    ] = False,
    limit: Annotated[float, typer.Option("--limit", metavar="S", min=1.0, help="Stop after S seconds.")] = 600.0,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where to keep the table (.json).")] = None,
) -> Result:
    """Time real collectives between processes of this machine, and keep them as a table for predictions.

    Example: foretrace calibrate network --workers 2 --to 4194304 --out gloo.json --accept-noise
    """
    from math import isfinite

    if not isfinite(limit):
        raise ForetraceError(f"--limit {limit} never ends; give a number of seconds, e.g. --limit 600.")
    with _threads(None):  # says so where there is no PyTorch
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    from foretrace.experiment import collectives

    chosen = backend or ("nccl" if gpus > 1 else "gloo")
    with options.progress("timing collectives") as report:
        table = collectives.calibrate(
            workers=workers or max(gpus, 2),
            sizes=collectives.sizes_between(least, most, count),
            kinds=[each.strip() for each in kinds.split(",")],
            repetitions=repetitions,
            backend=chosen,
            limit_s=limit,
            progress=report,
        )
    if not accept_noise:
        collectives.refuse_noise(table)
    path = out or collectives.default_path(table)
    if out is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    table.save(path)
    from foretrace.report import network as report_network

    return report_network.calibrated(table, path)


def _machine_of(source: Path) -> dict[str, Any]:
    """The fingerprint of a recording. Raises ForetraceError where it does not say enough, or says of a GPU."""
    from foretrace.cost.operators.machine import fingerprint_of

    graph = options.scenario(source).graph
    found = fingerprint_of(graph.info.recording)
    if not found:
        raise ForetraceError(
            f"{source} does not say on which machine and with how many threads it was recorded, so no time measured "
            "here would fit; record it with foretrace record."
        )
    if found["device"] != "cpu":
        raise ForetraceError(f"{source} was recorded on {found['device']}; calibrations are for processors so far.")
    return found


def _elsewhere(allocator: Mapping[str, str], words: list[str]) -> bool:
    """Run this command again with the allocator settings of a recording, which a process only takes at its start.

    True where it did so. Raises ForetraceError where the settings cannot be had.
    """
    from foretrace.cost.operators.machine import ALLOCATOR, allocator_settings

    mine = allocator_settings()
    if mine == dict(allocator):
        return False
    if _AGAIN in os.environ or mine.get("LD_PRELOAD") != allocator.get("LD_PRELOAD"):
        wanted = " ".join(f"{key}={value}" for key, value in sorted(allocator.items())) or "none"
        raise ForetraceError(f"the recording ran with other allocator settings ({wanted}); set these and run again.")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ALLOCATOR) or key == "LD_PRELOAD"}
    command = [sys.executable, "-m", "foretrace", "calibrate", *words, *asked()]
    sys.stdout.flush()
    ended = subprocess.run(command, env={**kept, **allocator_words(allocator), _AGAIN: "1"}, check=False)
    if ended.returncode:
        raise typer.Exit(ended.returncode)
    return True


def allocator_words(allocator: Mapping[str, str]) -> dict[str, str]:
    """The settings that can be given to another process: a preloaded library is known by its name only."""
    return {key: value for key, value in allocator.items() if key != "LD_PRELOAD"}


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """So many threads per operator meanwhile; as many as PyTorch takes where none is given."""
    try:
        import torch
    except ImportError:
        from foretrace.errors import MissingExtraError

        raise MissingExtraError("calibrate needs PyTorch; install it in this environment.") from None
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
