"""`Launch`: start a training command so that its processes record themselves, and gather the result."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foretrace.errors import ForetraceError
from foretrace.trace.autorecord import guard
from foretrace.trace.recorder import RecordOptions

_KEEP_MEMORY = {  # 32 MiB is the largest threshold that glibc accepts
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_TOP_PAD_": str(128 << 20),
}
_NOTHING_RECORDED = 2


@dataclass(frozen=True, kw_only=True)
class RankRecording:
    """One file that was written: `overhead` has the medians of `Recorder.overhead`."""

    rank: int
    path: Path
    steps: int
    overhead: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, kw_only=True)
class LaunchOutcome:
    """How a recorded command ended. `trouble` is a sentence where nothing was recorded, else empty."""

    exit_code: int
    recordings: tuple[RankRecording, ...]
    trouble: str


class Launch:
    """A training command, checked and ready to be run with the recorder in it.

    `stop_after` ends the script once the recording is complete; `keep_memory` tells glibc's malloc to keep
    freed memory, which removes page faults; `overwrite` replaces an older recording in `folder`.

    Raises ForetraceError if the command cannot be recorded, or `folder` holds another recording.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        options: RecordOptions,
        *,
        stop_after: bool = False,
        keep_memory: bool = False,
        overwrite: bool = False,
    ) -> None:
        _check_command(command)
        self._command = command
        self._folder = folder.absolute()
        self._old = sorted(self._folder.glob("rank*.json.gz"))
        if self._old and not overwrite:
            found = self._old[0].name
            raise ForetraceError(f"{folder} already holds {found}; give another `out=`, or `overwrite=`")
        self._options = options
        self._stop_after = stop_after
        self._keep_memory = keep_memory

    def run(self) -> LaunchOutcome:
        """Run the command to its end and gather one file per rank.

        The exit code is the command's own (128 + n for signal n), or 2 where it succeeded but nothing was
        recorded. Raises ForetraceError if the command cannot be started.
        """
        with tempfile.TemporaryDirectory(prefix="foretrace-") as status:
            config = {
                "out": str(self._folder),
                "options": asdict(self._options),
                "status": status,
                "stop_after": self._stop_after,
                "package": str(Path(__file__).resolve().parents[2]),
            }
            environment = _environment(config, keep_memory=self._keep_memory)
            code = _run(self._command, environment, guarded=(status, str(self._folder)))
            guard.clear(str(self._folder))
            told = [json.loads(file.read_text()) for file in sorted(Path(status).glob("*.json"))]
        recordings = sorted(
            (_recording(process) for process in told if process["state"] == "recorded"),
            key=lambda recording: recording.rank,
        )
        if not recordings:
            return LaunchOutcome(exit_code=code or _NOTHING_RECORDED, recordings=(), trouble=_trouble(told))
        for path in set(self._old) - {recording.path for recording in recordings}:
            path.unlink()  # ranks of the older recording
        return LaunchOutcome(exit_code=code, recordings=tuple(recordings), trouble="")


def _recording(told: dict[str, Any]) -> RankRecording:
    return RankRecording(rank=told["rank"], path=Path(told["file"]), steps=told["recorded"], overhead=told["overhead"])


def _environment(config: dict[str, Any], *, keep_memory: bool) -> dict[str, str]:
    shim = str(Path(__file__).resolve().parent / "shim")
    before = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        **(_KEEP_MEMORY if keep_memory else {}),
        "PYTHONPATH": f"{shim}{os.pathsep}{before}" if before else shim,
        "FORETRACE_RECORD": json.dumps(config),
    }


def _run(command: Sequence[str], environment: dict[str, str], *, guarded: tuple[str, str]) -> int:
    """Run the command to its end; a guard ends it where this process does not live to see that."""
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        hint = "; write `python` before it" if command[0].endswith(".py") else ""
        reason = (error.strerror or str(error)).lower()
        raise ForetraceError(f"{command[0]} cannot be started: {reason}{hint}") from error
    words = [sys.executable, "-I", "-S", str(Path(guard.__file__)), str(process.pid), *guarded]
    with _signals_passed_to(process), subprocess.Popen(words, stdin=subprocess.PIPE) as watching:
        code = process.wait()
        watching.communicate(b"ended")
    return code if code >= 0 else 128 - code


@contextmanager
def _signals_passed_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass signals to the command, which ends by itself; this process only waits for it."""
    terminal = sys.stdin is not None and sys.stdin.isatty()

    def received(number: int, _frame: object) -> None:
        # A terminal sends Ctrl-C to the whole group: passing it on would interrupt the script twice.
        if not (terminal and number == signal.SIGINT):
            process.send_signal(number)

    usual = {number: signal.signal(number, received) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def _check_command(command: Sequence[str]) -> None:
    """Raise ForetraceError for a command in which the recorder cannot work."""
    if not command:
        raise ForetraceError("nothing to run; write the command after --: foretrace record -- python train.py")
    words = list(command) if _is_python(command[0]) else _shebang(command[0])
    if not words or not _is_python(words[0]):
        return
    for word in words[1:]:
        if not word.startswith("-") or word in ("-", "-c", "-m") or word.startswith("--"):
            return
        flag = next((c for c in word[1:] if c in "IES"), None)
        if flag and word[1] not in "WX":
            raise ForetraceError(
                f"python -{flag} ignores what the recorder needs to enter the script (PYTHONPATH, site); "
                f"run it without -{flag}, or put `with foretrace.record(...)` into the script"
            )


def _is_python(program: str) -> bool:
    return re.fullmatch(r"(python|pypy)[\d.]*", Path(program).name) is not None


def _shebang(program: str) -> list[str]:
    """Return the interpreter line of a script, [] for anything else."""
    path = shutil.which(program)
    if path is None:
        return []
    with Path(path).open("rb") as file:
        first = file.readline(256)
    words = first[2:].decode("utf-8", "replace").split() if first.startswith(b"#!") else []
    return words[1:] if words and Path(words[0]).name == "env" else words


def _trouble(told: list[dict[str, Any]]) -> str:
    """Return why nothing was recorded, from what the processes of the command reported."""
    for process in told:
        if process["sentence"]:
            return str(process["sentence"])
    steps = max((process["steps"] for process in told), default=-1)
    if steps > 0:
        return (
            "nothing was recorded: the script was ended from outside or by os._exit, after "
            f"{steps} steps or more; let it run longer or end by itself"
        )
    if steps == 0:
        return (
            "nothing was recorded: the script made 0 optimizer steps, and steps are found from torch.optim "
            "optimizers; put `with foretrace.record(...)` into a script that has none"
        )
    return (
        "nothing was recorded: no Python process of the command imported torch.optim with the recorder in "
        "it; is it a PyTorch script, and does it keep PYTHONPATH?"
    )
