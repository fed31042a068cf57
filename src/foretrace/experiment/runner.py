"""The other end of `worker`: start the process that measures, follow it, and take its answer."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress

import msgspec

from foretrace.errors import ForetraceError, NotApplicableError
from foretrace.experiment.cores import environment
from foretrace.experiment.job import Crashed, Finished, Job, Message, Outcome, Progress, Refusal

_GOODBYE_S = 5.0
_WORDS = 2_000  # of what a process that died had to say


class WorkerError(RuntimeError):
    """A bug of ours in the process that measures; the message is its traceback."""


class ScriptError(ForetraceError):
    """The user's own training raised something: `trace` is its traceback, the message one sentence."""

    def __init__(self, sentence: str, trace: str) -> None:
        super().__init__(sentence)
        self.trace = trace


def run(job: Job, progress: Callable[[str, float], None] | None = None) -> Outcome:
    """Run one verification in a process of its own; `progress` is told what it does and how far it is.

    Raises ForetraceError where something that was asked for cannot be, NotApplicableError among them, ScriptError
    where the user's script fails, and WorkerError for a bug of ours. The process ends with this one.
    """
    with tempfile.TemporaryFile() as said:
        command = [sys.executable, "-m", "foretrace.experiment.worker"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, env=environment(job.threads)
        ) as process:
            try:
                ended = _follow(process, job, progress)
                with suppress(subprocess.TimeoutExpired):  # its own children want to be ended in order
                    process.wait(timeout=_GOODBYE_S)
            finally:
                process.kill()
        said.seek(0)
        words = said.read().decode("utf-8", errors="replace").strip()[-_WORDS:]
    match ended:
        case Finished():
            return ended.outcome
        case Refusal():
            raise NotApplicableError(ended.sentence)
        case Crashed(script=True):
            sentence = f"{job.model} raised {ended.error.splitlines()[0]} while {ended.during}; its traceback is above."
            raise ScriptError(sentence, ended.trace)
        case Crashed():
            raise WorkerError(f"while {ended.during}:\n{ended.trace}")
    code = process.returncode
    if code < 0:
        name = signal.Signals(-code).name
        raise ForetraceError(
            f"the process that measures was ended by {name}; if nobody did that, it had too little memory: "
            "use `size=tiny` or a smaller batch."
        )
    raise WorkerError(f"the process that measures ended with code {code} and no answer:\n{words}")


def _follow(
    process: subprocess.Popen[bytes], job: Job, progress: Callable[[str, float], None] | None
) -> Message | None:
    """Hand over the job and listen until the last message, or the end of the process."""
    assert process.stdin is not None and process.stdout is not None
    decoder = msgspec.json.Decoder(Message)
    try:
        process.stdin.write(msgspec.json.encode(job) + b"\n")
        process.stdin.flush()
    except BrokenPipeError:  # it is gone already; its exit code says why
        process.wait()
        return None
    for line in process.stdout:
        message: Message = decoder.decode(line)
        if not isinstance(message, Progress):
            return message
        if progress is not None:
            progress(message.what, message.share)
    process.wait()
    return None
