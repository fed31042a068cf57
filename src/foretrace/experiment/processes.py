"""Processes that measure: asked all at once, and ended together when one of them fails.

Every wait has an end. A worker that dies, answers nothing in time or raises ends the others, and the error says which
one it was, what it was doing, and its last words.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import inf, isfinite
from typing import IO, TypeVar

import msgspec

from foretrace.deadline import ending
from foretrace.errors import ForetraceError, NotApplicableError
from foretrace.experiment.cores import environment
from foretrace.experiment.job import Job, Outcome
from foretrace.experiment.messages import Answer, Crashed, Done, Join, Progress, Refusal, Request, Verified, Verify
from foretrace.techniques.arguments import parse_all
from foretrace.zoo.registry import job as find_job

A = TypeVar("A", bound=Answer)
Tell = Callable[[str, float], None]

START_S = 120.0  # importing PyTorch on a busy machine
PATIENCE_S = 120.0  # of one request beyond the time that it should take
_SETTLE_S = {Refusal: 0.3, Crashed: 2.0}  # when a worker complains: time for the end of another one to be seen
_GOODBYE_S = 5.0
_END_S = 0.1  # from the end of a process's pipe to its own
_LINES = 4  # of what a worker that died had to say


class WorkerError(RuntimeError):
    """A bug of ours in a worker, or of the user's script; the message is its traceback."""

    def __init__(self, message: str, crash: Crashed) -> None:
        super().__init__(message)
        self.crash = crash


class DeadError(ForetraceError):
    """A worker that ended although it was still needed; `signal` is what ended it, "" if it ended by itself."""

    def __init__(self, message: str, rank: int, signal: str) -> None:
        super().__init__(message)
        self.rank, self.signal = rank, signal


class SilentError(ForetraceError):
    """A worker that gave no answer in time."""


class Workers:
    """Processes in the order of their ranks. Made by `running`, `together` and `alone`."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], said: Sequence[IO[bytes]]) -> None:
        self.processes = tuple(processes)
        self._said = tuple(said)
        self._rest = [b""] * len(processes)
        self._decoder = msgspec.json.Decoder(Answer)

    def __len__(self) -> int:
        return len(self.processes)

    def ask(self, request: Request, what: str, answer: type[A], *, seconds: float = 0.0) -> list[A]:
        """Give every worker the same request and take their answers, by rank; `what` is said when it fails.

        `seconds` is what the request should take; PATIENCE_S more are waited. Raises ForetraceError where a worker
        dies, is silent for too long or refuses, WorkerError for a bug of ours. All workers have ended then.
        """
        return self.ask_each([request] * len(self), what, answer, patience_s=seconds + PATIENCE_S)

    def ask_first(self, request: Request, what: str, answer: type[A], *, seconds: float = 0.0) -> list[A]:
        """As `ask`, for the first worker only; the others wait."""
        return self.ask_each([request], what, answer, patience_s=seconds + PATIENCE_S)

    def ask_each(
        self, requests: Sequence[Request], what: str, answer: type[A], *, patience_s: float, first: bool = False,
        tell: Tell | None = None, may_end: Collection[int] = (),
    ) -> list[A]:  # fmt: skip
        """As `ask`, with a request of its own for every worker; those that are given none wait.

        The answers of those that `may_end` are missing where they have.

        With `first`, only the first one's answer is awaited, and nothing more can be asked of the others. `tell` is
        called with what they do and how far they are, where they say so.
        """
        try:
            for rank, request in enumerate(requests):
                self._send(rank, request, what)
            answers = self._listen(what, patience_s, 1 if first else len(requests), tell, may_end)
        except BaseException:
            self.end()
            raise
        found: list[A] = [each for each in answers if isinstance(each, answer)]
        assert len(found) == len(answers), f"{what}: unexpected answers {answers}"
        return found

    def leave(self) -> None:
        """Let workers that were asked for nothing more end by themselves, with their own children, for a while."""
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_GOODBYE_S)

    def end(self) -> None:
        """End every worker at once."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait(timeout=_GOODBYE_S)

    def _send(self, rank: int, request: Request, what: str) -> None:
        stream = self.processes[rank].stdin
        assert stream is not None
        try:
            stream.write(msgspec.json.encode(request) + b"\n")
            stream.flush()
        except BrokenPipeError:
            raise self._died(rank, what) from None

    def _listen(
        self, what: str, patience_s: float, count: int, tell: Tell | None, may_end: Collection[int] = ()
    ) -> list[Answer]:
        """One answer of each of the first `count` workers; the end of a worker is an error, unless it may."""
        gone: set[int] = set()
        end = time.monotonic() + patience_s
        answers: dict[int, Answer] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers.keys() | gone) < count:
                ready = selector.select(max(end - time.monotonic(), 0.0) if isfinite(end) else None)
                if not ready:
                    silent = [rank for rank in range(count) if rank not in answers]
                    raise SilentError(
                        f"{_workers(silent)} gave no answer within {patience_s:.0f} s while {what}; all workers were "
                        "ended. Is the machine very busy, or the link very slow for so many bytes?"
                    )
                for key, _ in ready:
                    rank = key.data
                    if rank in may_end and self._ended(rank):
                        gone.add(rank)
                        selector.unregister(key.fileobj)
                        continue
                    for line in self._lines(rank, what):
                        if rank >= count:
                            continue
                        answer = self._checked(rank, line, what)
                        if not isinstance(answer, Progress):
                            answers[rank] = answer
                        elif tell is not None:
                            tell(answer.what, answer.share)
        return [answers[rank] for rank in range(count) if rank in answers]

    def _ended(self, rank: int) -> bool:
        """Whether a process whose pipe has something to read has ended: then that is the pipe's end."""
        try:
            self.processes[rank].wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _lines(self, rank: int, what: str) -> list[bytes]:
        """The lines that a worker has completed; raises where its pipe has come to its end."""
        stream = self.processes[rank].stdout
        assert stream is not None
        chunk = os.read(stream.fileno(), 2**16)
        if not chunk:
            raise self._died(rank, what)
        *lines, self._rest[rank] = (self._rest[rank] + chunk).split(b"\n")
        return lines

    def _checked(self, rank: int, line: bytes, what: str) -> Answer:
        """The answer in a line; raises what it complains of, or the death of another worker that explains it."""
        answer: Answer = self._decoder.decode(line)
        if isinstance(answer, Refusal | Crashed) and (dead := self._dead(rank, _SETTLE_S[type(answer)])) is not None:
            raise self._died(dead, what)
        match answer:
            case Refusal():
                raise NotApplicableError(answer.sentence)
            case Crashed():
                raise WorkerError(f"worker {rank}, while {answer.during or what}:\n{answer.trace}", answer)
        return answer

    def _dead(self, complaining: int, settle_s: float) -> int | None:
        """A worker that ended while another one complained of a broken connection."""
        end = time.monotonic() + settle_s
        while len(self) > 1 and time.monotonic() < end:
            for rank, process in enumerate(self.processes):
                if rank != complaining and process.poll() is not None:
                    return rank
            time.sleep(0.02)
        return None

    def _died(self, rank: int, what: str) -> DeadError:
        """What to say of a worker that ended although it was still needed."""
        process = self.processes[rank]
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GOODBYE_S)
        code = process.returncode
        ended_by = signal.Signals(-code).name if code and code < 0 else ""
        how = f"was ended by {ended_by}" if ended_by else f"ended with code {code}"
        self._said[rank].seek(0)
        words = self._said[rank].read().decode("utf-8", errors="replace").strip().splitlines()[-_LINES:]
        last = f"; its last words: {' / '.join(words)}" if words else ""
        return DeadError(f"worker {rank} {how} while {what}, and the others were ended{last}.", rank, ended_by)


@contextmanager
def together(count: int, *, threads: int = 1, backend: str = "gloo", first: bool = True) -> Iterator[Workers]:
    """So many workers on this machine's own network, joined; ended with the block."""
    with started([()] * count, threads, "lo", first=first) as workers:
        join(workers, "127.0.0.1", _free_port(), threads, backend)
        yield workers


@contextmanager
def alone(count: int = 1, *, threads: int = 1, first: bool = True) -> Iterator[Workers]:
    """Workers that have joined no other, in the same environment; ended with the block."""
    with started([()] * count, threads, "lo", first=first) as workers:
        yield workers


def join(workers: Workers, address: str, port: int, threads: int, backend: str = "gloo") -> None:
    """Let workers meet at the address of the first one."""
    common = {"address": address, "port": port, "threads": threads, "patience_s": PATIENCE_S, "backend": backend}
    joins = [msgspec.convert({**common, "rank": rank, "workers": len(workers)}, Join) for rank in range(len(workers))]
    workers.ask_each(joins, "joining the others", Done, patience_s=START_S)


def _free_port() -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def started(
    before: Sequence[tuple[str, ...]], threads: int, interface: str, *, first: bool = True
) -> Iterator[Workers]:
    """A process per item, each behind its words; ended with the block. `first`: ahead of what else the machine runs."""
    environ = environment(threads) | {"GLOO_SOCKET_IFNAME": interface, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        said = [stack.enter_context(tempfile.TemporaryFile()) for _ in before]
        try:
            for words, errors in zip(before, said, strict=True):
                command = [*words, sys.executable, "-m", "foretrace.experiment.worker", *(["first"] if first else [])]
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
                processes.append(subprocess.Popen(command, env=environ, bufsize=0, **pipes))  # type: ignore[call-overload]
            yield Workers(processes, said)
        finally:
            for process in processes:
                process.kill()
                process.wait(timeout=_GOODBYE_S)
                for stream in (process.stdin, process.stdout):
                    assert stream is not None
                    with suppress(BrokenPipeError):
                        stream.close()


def _workers(ranks: Sequence[int]) -> str:
    return f"worker{'s' * (len(ranks) > 1)} {', '.join(str(rank) for rank in ranks)}"


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
