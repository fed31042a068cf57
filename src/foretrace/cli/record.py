"""`foretrace record`: run a training command unchanged and record a few of its steps."""

from __future__ import annotations

import shlex
import textwrap
from pathlib import Path

import typer

from foretrace.cli.options import flag, option, say
from foretrace.report.units import nbytes, seconds, things
from foretrace.trace.autorecord.launch import Launch, LaunchOutcome, RankRecording
from foretrace.trace.recorder import RecordOptions

_DEFAULT = RecordOptions()


def record(
    context: typer.Context,
    out: Path = option(Path("run"), "", "Folder for the files, one per rank.", "--out", "-o"),
    steps: int = option(_DEFAULT.active, "", "Steps to record."),
    wait: int = option(_DEFAULT.wait, "", "Unprofiled steps timed on each side."),
    warmup: int = option(_DEFAULT.warmup, "", "Steps with the profiler prepared."),
    skip_first: int = option(_DEFAULT.skip_first, "", "First steps to leave alone."),
    rehearse: bool = option(_DEFAULT.rehearse, "", "Throw the first profile away."),
    shapes: bool = option(_DEFAULT.shapes, "", "Store input sizes."),
    memory: bool = option(_DEFAULT.memory, "", "Store allocations."),
    modules: bool = option(_DEFAULT.modules, "", "Store nn.Module calls."),
    stop_after: bool = flag("--stop-after", "End the script when recorded."),
    keep_memory: bool = flag("--keep-memory", "Make malloc keep memory: no page faults (CPU runs)."),
    overwrite: bool = flag("--overwrite", "Replace an older recording."),
) -> None:
    """Record a few steps of a training command, without changing the script.

    Write the command after --, as it is: -- torchrun train.py.

    Example: foretrace record --out run -- python train.py
    """
    options = RecordOptions(
        wait=wait, warmup=warmup, active=steps, skip_first=skip_first, rehearse=rehearse, shapes=shapes, memory=memory,
        modules=modules,
    )  # fmt: skip
    launch = Launch(
        context.args, out, options, stop_after=stop_after, keep_memory=keep_memory, overwrite=overwrite,
    )  # fmt: skip
    first = options.phases(in_hook=True).index("active") + 2  # counted from 1, after the one that starts it
    command = textwrap.shorten(shlex.join(context.args), 80, placeholder=" ...")
    which = f"steps {first} to {first + steps - 1}" if steps > 1 else f"step {first}"
    say(f"will record {which} of `{command}` into {out}")
    outcome = launch.run()
    for line in _report(outcome, out):
        say(line)
    raise typer.Exit(outcome.exit_code)


def _report(outcome: LaunchOutcome, out: Path) -> list[str]:
    if not outcome.recordings:
        return [outcome.trouble]
    ranks, first = len(outcome.recordings), outcome.recordings[0]
    size = sum(recording.path.stat().st_size for recording in outcome.recordings)
    what = f"{first.path}" if ranks == 1 else f"{ranks} ranks in {out}"
    return [
        f"recorded {things(first.steps, 'step')}: {what} ({nbytes(size)}). {_overhead(first)}",
        *_memory_state(first),
        f"next: foretrace show {shlex.quote(str(out))}",
    ]


def _overhead(recording: RankRecording) -> str:
    if "unprofiled" not in recording.overhead:
        return "Nothing to compare with: no unprofiled step was timed (--wait 0)."
    recorded = recording.overhead["profiled"]["wall_ns"]
    beside = recording.overhead["unprofiled"]["wall_ns"]
    return (
        f"A recorded step takes {seconds(recorded / 1e9)}, its unprofiled neighbours {seconds(beside / 1e9)} "
        f"({100 * (recorded / beside - 1):+.0f} %)."
    )


def _memory_state(recording: RankRecording) -> list[str]:
    """Return a line where profiling has changed how fast the process is when it is not profiled."""
    before, after = recording.overhead.get("untouched"), recording.overhead.get("unprofiled")
    if before is None or after is None:
        return []
    changed = abs(after["wall_ns"] / before["wall_ns"] - 1) > 0.05
    if not changed or abs(after["page_faults"] - before["page_faults"]) < 200:
        return []
    return [
        f"before profiling, a step took {seconds(before['wall_ns'] / 1e9)} with {before['page_faults']:,} page faults; "
        f"after it {seconds(after['wall_ns'] / 1e9)} with {after['page_faults']:,}: malloc now keeps memory. "
        "--keep-memory makes it do so from the start"
    ]
