"""`foretrace profile`: how much of the device a training uses, and what holds its memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from foretrace.cli import options
from foretrace.cli.answers import Reply
from foretrace.cli.options import argument, option
from foretrace.errors import ForetraceError

if TYPE_CHECKING:
    from foretrace.report.profile import ProfileView

_WAIT = 3  # unprofiled steps on each side: enough for the CPU time beside the recorded steps


def profile(
    what: str = argument(..., "NAME|SCRIPT|TRACE", "A zoo model, a script with training(), or a recording."),
    size: options.Size = "tiny",
    steps: int = option(8, "N", "Steps to record.", least=1),
    threads: int = option(1, "N", "Intra-op threads.", least=1),
    batch: int | None = option(None, "N", "Samples per step, where the recording lacks it.", least=1),
    out: Path | None = option(None, "FOLDER", "Keep the recording there.", "--out", "-o"),
    peak_gflops: float | None = option(None, "X", "Peak of the device, GFLOP/s.", least=1e-3),
    peak_gb_s: float | None = option(None, "X", "Peak of its memory, GB/s.", least=1e-3),
    rank: options.Rank = None,
    salvage: options.Salvage = False,
    top: options.Top = 8,
) -> Reply:
    """Compare a job's rates with the peaks, and split its memory.

    Example: foretrace profile resnet50, or foretrace profile run/
    """
    limits = peak_gflops, peak_gb_s
    if options.is_recording(what):
        view = _of_trace(Path(what), limits, rank=rank, salvage=salvage, batch=batch)
    else:
        with _folder(out) as folder:
            name = _record(what, size, steps, threads, folder)
            view = _of_trace(folder, limits, batch=batch, name=name, kept=out is not None)
    return Reply(result=view, files={out: lambda path: None})  # the recorder has written it


def _of_trace(
    path: Path,
    limits: tuple[float | None, float | None],
    *,
    rank: int | None = None,
    salvage: bool = False,
    batch: int | None = None,
    name: str = "",
    kept: bool = True,
) -> ProfileView:
    """Analyse a recording or, without its memory, a saved graph; `limits` are GFLOP/s and GB/s that the user gave."""
    from foretrace.report import profile as report
    from foretrace.simulate.memory import split
    from foretrace.techniques.compute.rates import peaks_of

    run = options.scenario(path, rank=rank, salvage=salvage)
    memory, trace = None, run.trace
    if trace is not None:
        lowest = min((each.rank for each in trace.ranks), default=None) if rank is None else rank
        memory = split(trace.of_rank(lowest) if lowest is not None and len(trace.ranks) > 1 else trace)
    peaks = peaks_of(run.graph, gflops=limits[0], gb_s=limits[1])
    return report.profile(
        run.simulate(), peaks=peaks, memory=memory, samples=batch, path=str(path) if kept else "", name=name
    )


def _record(what: str, size: str, steps: int, threads: int, folder: Path) -> str:
    """Run the job in this process and record it; returns what to call it."""
    from foretrace.hardware.probe import cpu_peaks
    from foretrace.trace.recorder import RecordOptions, record
    from foretrace.zoo.registry import job

    training = job(what, size)()
    name = what if what.endswith(".py") else f"{what} ({size})"
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        total = len(RecordOptions(wait=_WAIT, active=steps).phases(in_hook=False))
        options.say(f"recording {steps} of {total} steps of {name} with {threads} thread{'s' if threads > 1 else ''}")
        recorder = record(folder, wait=_WAIT, active=steps, samples=training.batch_size)
        if training.device == "cpu":
            recorder.extra["peaks"] = cpu_peaks(threads).as_dict()
        with recorder, options.progress(f"running {name}") as report, redirect_stdout(sys.stderr):
            for _ in training.steps():
                recorder.step()
                if report is not None:
                    report(recorder.steps_seen / total)
                if recorder.over:
                    break
    finally:
        torch.set_num_threads(before)
    if recorder.path is None:
        raise ForetraceError(f"{name} ended before a step was recorded; let its loader give batches.")
    return name


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is None:
        with TemporaryDirectory(prefix="foretrace-") as made:
            yield Path(made)
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ForetraceError(f"{out} is not an empty folder; give another one for the recording.")
    yield out
