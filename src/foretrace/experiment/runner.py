"""`check` and `run`: one verification in a process of its own."""

from __future__ import annotations

from math import inf

from foretrace.deadline import ending
from foretrace.errors import ForetraceError
from foretrace.experiment.job import Job, Outcome
from foretrace.experiment.messages import Verified, Verify
from foretrace.experiment.processes import DeadError, Tell, WorkerError, alone
from foretrace.techniques.arguments import parse_all
from foretrace.zoo.registry import job as find_job


class ScriptError(ForetraceError):
    """The user's own training raised something: `trace` is its traceback, the message one sentence."""

    def __init__(self, sentence: str, trace: str) -> None:
        super().__init__(sentence)
        self.trace = trace


def check(job: Job) -> None:
    """Raises ForetraceError for what can be seen to be wrong before anything is run."""
    ending("seconds", job.seconds, 20)
    if job.batches not in ("", "ready", "loader"):
        raise ForetraceError(f"`batches={job.batches}` does not exist; choose ready or loader.")
    for technique in parse_all(job.techniques):
        if not technique.can_apply():
            raise technique.refuse(technique.not_applied or "it can be predicted but not applied.")
    find_job(job.model, job.size)


def run(job: Job, progress: Tell | None = None) -> Outcome:
    """Run one verification in a process of its own; `progress` is called with what it does and how far it is.

    Raises ForetraceError where something that was asked for cannot be, NotApplicableError among them, ScriptError
    where the user's script fails, and WorkerError for a bug of ours. The process ends with this one.
    """
    try:
        with alone(threads=job.threads, first=False) as worker:
            (found,) = worker.ask_each([Verify(job=job)], "verifying", Verified, patience_s=inf, tell=progress)
            worker.leave()
    except WorkerError as error:
        if error.crash.script:
            what = f"{job.model} raised {error.crash.error.splitlines()[0]} while {error.crash.during}"
            raise ScriptError(f"{what}; its traceback is above.", error.crash.trace) from None
        raise
    except DeadError as error:
        if not error.signal:
            raise
        raise ForetraceError(
            f"the process that measures was ended by {error.signal}; if nobody did that, it had too little memory: "
            "use `size=tiny` or a smaller batch."
        ) from None
    return found.outcome
