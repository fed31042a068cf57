"""Count the files that a command walks through, and how often the walk climbs.

    python benchmarks/walk.py                                   # show, estimate and fleet run
    python benchmarks/walk.py blame tests/data/cnn.json.gz      # any other command

A file counts when one of its functions runs, in the order of first calls; helpers that every room uses (errors, files,
names, ...) do not. A climb is a file whose room stands before the room of the file entered last, on the way that a
reader follows: cli, flow, sources, what is read, what is built of it, simulate, report.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = f"{Path(__file__).resolve().parents[1] / 'src' / 'foretrace'}/"
WAY = (
    "cli", "flow", "sources", "trace", "zoo", "training", "model", "graph", "fleet", "cost", "techniques", "plan",
    "experiment", "simulate", "report",
)  # fmt: skip
COMMANDS = (
    "show tests/data/cnn.json.gz",
    "estimate gpt2 --device h100 --batch 1",
    "fleet run examples/jobs.csv --cluster 2x4x8",
)


def walk(command: list[str]) -> list[str]:
    """Run a command in this process; its files below the package, in the order in which they were entered."""
    from foretrace.cli.app import run

    seen: dict[str, None] = {}

    def entered(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT) and name[len(ROOT) :] not in seen and not _importing(frame):
            seen[name[len(ROOT) :]] = None

    said = io.StringIO()
    threading.setprofile(entered)
    sys.setprofile(entered)
    try:
        with contextlib.redirect_stdout(said):
            code = run(command)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if code:
        sys.exit(f"foretrace {' '.join(command)} ended with {code}")
    return [each for each in seen if room(each) in WAY]


def _importing(frame: FrameType | None) -> bool:
    """Whether this call is part of loading a module."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def room(file: str) -> str:
    """The room of a file: its folder, or itself where it stands alone."""
    return Path(file).parts[0].removesuffix(".py")


def climbs(files: list[str]) -> list[tuple[str, str]]:
    """Each file from which the walk goes back to an earlier room, and where it goes."""
    pairs = itertools.pairwise(files)
    return [(a, b) for a, b in pairs if WAY.index(room(b)) < WAY.index(room(a))]


def main() -> None:
    """Print the walks."""
    for command in [" ".join(sys.argv[1:])] if sys.argv[1:] else COMMANDS:
        files = walk(command.split())
        up = climbs(files)
        print(f"foretrace {command}: {len(files)} files, {len(up)} climbs")
        print("  " + " -> ".join(files))
        for a, b in up:
            print(f"  climb: {a} -> {b}")


if __name__ == "__main__":
    main()
