"""The process that measures: `python -m foretrace.experiment.worker`, spoken to by `runner`.

A `Job` comes on standard input, messages go to standard output. Everything happens in this one process, with the
threads and the allocator settled before it began, so that the recording, the calibration and both arms live in the
same state. The order matters: the treated model runs for the first time after the prediction has been made.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from io import BufferedWriter, FileIO
from pathlib import Path

import msgspec

from foretrace.cost.operators.bench import lacks
from foretrace.errors import ForetraceError
from foretrace.executor import end_with
from foretrace.experiment.job import Crashed, Finished, Job, Message, Progress, Refusal

# Stages in which nothing of ours has been applied: what a user's script raises there is the script's own.
USERS_STAGES = ("making the training", "recording the baseline")


def main() -> int:
    """Read one job, run it and say how it ended; 0 if a message says so, whatever it is."""
    inbox, out = streams()
    line = inbox.readline()
    if not line:
        return 1
    job = msgspec.json.decode(line, type=Job)
    end_with(inbox.fileno())
    encoder = msgspec.json.Encoder()
    during = [""]

    def say(message: Message) -> None:
        if isinstance(message, Progress):
            during[0] = message.what
        out.write(encoder.encode(message) + b"\n")
        out.flush()

    try:
        say(_answer(job, say, during))
    except BrokenPipeError:  # nobody listens any more
        return 1
    return 0


def _answer(job: Job, say: Callable[[Message], None], during: list[str]) -> Message:
    try:
        from foretrace.experiment.measure import measure

        return Finished(outcome=measure(job, lambda what, share: say(Progress(what=what, share=share))))
    except BrokenPipeError:
        raise
    except ForetraceError as error:
        return Refusal(sentence=str(error))
    except Exception as error:
        if isinstance(error, RuntimeError) and (lacking := lacks(error)):
            return Refusal(sentence=f"{' + '.join(job.techniques)} cannot run: {lacking}.")
        return Crashed(
            trace=traceback.format_exc(),
            error=f"{type(error).__name__}: {error}",
            during=during[0],
            script=_is_the_users(error, job, during[0]),
        )


def _is_the_users(error: Exception, job: Job, during: str) -> bool:
    """Whether a script of the user raised this: before anything was applied, or with a frame of its own file."""
    if not job.model.endswith(".py"):
        return False
    script = Path(job.model).resolve()
    frames = traceback.extract_tb(error.__traceback__)
    return during in USERS_STAGES or any(Path(frame.filename).resolve() == script for frame in frames)


def streams() -> tuple[FileIO, BufferedWriter]:
    """Our ends of the two pipes; what the job itself prints goes to standard error, and it has nothing to read."""
    inbox, out = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115, PTH123  (for the life of the process)
    return FileIO(inbox, "rb"), os.fdopen(out, "wb")


if __name__ == "__main__":
    sys.exit(main())
