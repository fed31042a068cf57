"""`foretrace profile`: how much of the device a training uses, and what holds its memory."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from foretrace.cli import options
from foretrace.cli.answers import Reply
from foretrace.cli.options import argument, option
from foretrace.errors import ForetraceError

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
    from foretrace.report.profile import profile
    from foretrace.techniques.compute.rates import peaks_of

    recorded, name = options.is_recording(what), what if what.endswith(".py") else f"{what} ({size})"
    if not recorded and out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ForetraceError(f"{out} is not an empty folder; give another one for the recording.")
    with TemporaryDirectory(prefix="foretrace-") as made:
        if recorded:
            run = options.scenario(Path(what), rank=rank, salvage=salvage)
        else:
            _record(what, size, name, steps, threads, out or Path(made))
            run, rank = options.scenario(out or Path(made)), None
        peaks = peaks_of(run.graph, gflops=peak_gflops, gb_s=peak_gb_s)
        view = profile(
            run.simulate(),
            peaks=peaks,
            memory=run.memory(rank),
            samples=batch,
            path=what if recorded else str(out or ""),
            name="" if recorded else name,
        )
    return Reply(result=view, files={out: lambda path: None})  # the recorder has written it


def _record(what: str, size: str, name: str, steps: int, threads: int, folder: Path) -> None:
    """Run the job in this process and record it; of a processor, with its peaks."""
    from foretrace.hardware.probe import cpu_peaks
    from foretrace.hardware.processor import operator_threads
    from foretrace.trace.recorder import RecordOptions
    from foretrace.training.recording import record_training
    from foretrace.zoo.registry import job

    training = job(what, size)()
    total = len(RecordOptions(wait=_WAIT, active=steps).phases(in_hook=False))
    options.say(f"recording {steps} of {total} steps of {name} with {threads} thread{'s' if threads > 1 else ''}")
    with operator_threads(threads), options.progress(f"running {name}") as bar, redirect_stdout(sys.stderr):
        peaks = {"peaks": cpu_peaks(threads).as_dict()} if training.device == "cpu" else {}
        tell = bar and (lambda seen: bar(seen / total))
        record_training(training, folder, facts=peaks, tell=tell, wait=_WAIT, active=steps)
