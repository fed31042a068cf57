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
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import IO, Any, Generic, TypeVar, get_type_hints

import msgspec

from foretrace.deadline import ending
from foretrace.errors import ForetraceError, NotApplicableError
from foretrace.executor import how_ended
from foretrace.experiment.cores import bounded_environment, environment
from foretrace.experiment.forks import Fork, fork
from foretrace.experiment.job import Job, Outcome
from foretrace.experiment.messages import Answer, Crashed, Join, Progress, Refusal, Request, Returned, meet
from foretrace.experiment.worker import CORES, FIRST, MEMORY
from foretrace.techniques.arguments import parse_all
from foretrace.zoo.registry import job as find_job

Given = TypeVar("Given")
Made = TypeVar("Made")
Tell = Callable[[str, float], None]
Process = Fork | subprocess.Popen[bytes]

START_S = 120.0  # importing PyTorch on a busy machine
PATIENCE_S = 120.0  # of one request beyond the time that it should take
_SETTLE_S = {Refusal: 0.3, Crashed: 2.0}  # when a worker complains: time for the end of another one to be seen
_GOODBYE_S = 5.0
_END_S = 0.1  # from the end of a process's pipe to its own
_MOST_LIMITED_S = 3600.0
# Stages in which nothing of ours has been applied: what a user's script raises there is the script's own.
USERS_STAGES = ("making the training", "recording the baseline")
_LINES = 4  # of what a worker that died had to say


@dataclass(frozen=True, slots=True)
class AskedCall(Generic[Made]):
    """A function of a module, of one thing and of the `Worker` where it wants that, and what it is given."""

    function: Callable[..., Made]
    given: Any


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

    def __init__(self, processes: Sequence[Process], said: Sequence[IO[bytes]]) -> None:
        self.processes = tuple(processes)
        self._said = tuple(said)
        self._rest = [b""] * len(processes)
        self._decoder = msgspec.json.Decoder(Answer)

    def __len__(self) -> int:
        return len(self.processes)

    def ask(
        self, function: Callable[..., Made], given: Any, what: str, *, seconds: float = 0.0, first: bool = False
    ) -> list[Made]:
        """Call a function of a module in every worker, or in the `first` one alone; what it returned, by rank.

        `what` is said when it fails; it should take `seconds`, and PATIENCE_S more are waited. Raises ForetraceError
        where a worker dies, is silent for too long or refuses, WorkerError for a bug of ours. All workers have ended
        then.
        """
        calls = [AskedCall(function, given)] * (1 if first else len(self))
        return self.ask_each(calls, what, patience_s=seconds + PATIENCE_S)

    def ask_each(
        self,
        calls: Sequence[AskedCall[Made]],
        what: str,
        *,
        patience_s: float,
        first: bool = False,
        tell: Tell | None = None,
        may_end: Collection[int] = (),
    ) -> list[Made]:
        """Ask as `ask` does, with a call of its own for every worker; those that are given none wait.

        What those return that `may_end` is missing where they have.

        With `first`, only the first one's answer is awaited, and nothing more can be asked of the others. `tell` is
        called with what they do and how far they are, where they say so.
        """
        self.submit(calls, what)
        return self.collect(calls[:1] if first else calls, what, patience_s=patience_s, tell=tell, may_end=may_end)

    def submit(self, calls: Sequence[AskedCall[Made]], what: str) -> None:
        """Give calls to the workers without waiting for what they return. Raises as `ask`."""
        with self._together():
            for rank, call in enumerate(calls):
                name = f"{call.function.__module__}:{call.function.__qualname__}"
                self._send(rank, Request(function=name, given=msgspec.Raw(msgspec.json.encode(call.given))), what)

    def collect(
        self, calls: Sequence[AskedCall[Made]], what: str, *, patience_s: float = PATIENCE_S, tell: Tell | None = None,
        may_end: Collection[int] = (),
    ) -> list[Made]:  # fmt: skip
        """Return what submitted calls returned, by rank. Raises as `ask`."""
        with self._together():
            answers = self._listen(what, patience_s, len(calls), tell, may_end)
        kinds = [get_type_hints(call.function)["return"] for call in calls]
        return [msgspec.json.decode(made, type=kinds[rank]) for rank, made in sorted(answers.items())]

    @contextmanager
    def _together(self) -> Iterator[None]:
        """End all where one ends."""
        try:
            yield
        except BaseException:
            self.end()
            raise

    def leave(self) -> None:
        """Let workers end by themselves, with their own children, for a while."""
        for rank, process in enumerate(self.processes):
            self._send(rank, Request(function=""), "leaving")
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
        self, what: str, patience_s: float, count: int, tell: Tell | None, may_end: Collection[int]
    ) -> dict[int, msgspec.Raw]:
        """Return one answer of each of the first `count` workers; the end of a worker is an error, unless it may."""
        gone: set[int] = set()
        end = time.monotonic() + patience_s
        answers: dict[int, msgspec.Raw] = {}
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
                        if isinstance(answer, Returned):
                            answers[rank] = answer.made
                        elif tell is not None:
                            tell(answer.what, answer.share)
        return answers

    def _ended(self, rank: int) -> bool:
        """Return whether a process whose pipe has something to read has ended: then that is the pipe's end."""
        try:
            self.processes[rank].wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _lines(self, rank: int, what: str) -> list[bytes]:
        """Return the lines that a worker has completed; raises where its pipe has come to its end."""
        stream = self.processes[rank].stdout
        assert stream is not None
        chunk = os.read(stream.fileno(), 2**16)
        if not chunk:
            raise self._died(rank, what)
        *lines, self._rest[rank] = (self._rest[rank] + chunk).split(b"\n")
        return lines

    def _checked(self, rank: int, line: bytes, what: str) -> Progress | Returned:
        """Return the answer in a line; raises what it complains of, or the death of another worker that explains it."""
        answer: Answer = self._decoder.decode(line)
        if isinstance(answer, Refusal | Crashed) and (dead := self._dead(rank, _SETTLE_S[type(answer)])) is not None:
            raise self._died(dead, what)
        match answer:
            case Refusal():
                raise NotApplicableError(answer.sentence)
            case Crashed():
                raise WorkerError(f"worker {rank}, while {answer.during or what}:\n{answer.trace}", answer)
            case _:
                return answer

    def _dead(self, complaining: int, settle_s: float) -> int | None:
        """Return a worker that ended while another one complained of a broken connection."""
        end = time.monotonic() + settle_s
        while len(self) > 1 and time.monotonic() < end:
            for rank, process in enumerate(self.processes):
                if rank != complaining and process.poll() is not None:
                    return rank
            time.sleep(0.02)
        return None

    def _died(self, rank: int, what: str) -> DeadError:
        """Return what to say of a worker that ended although it was still needed."""
        process = self.processes[rank]
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_GOODBYE_S)
        code = process.returncode
        ended_by = signal.Signals(-code).name if code and code < 0 else ""
        self._said[rank].seek(0)
        words = self._said[rank].read().decode("utf-8", errors="replace").strip().splitlines()[-_LINES:]
        last = f"; its last words: {' / '.join(words)}" if words else ""
        said = f"worker {rank} {how_ended(code)} while {what}, and the others were ended{last}."
        return DeadError(said, rank, ended_by)


@contextmanager
def together(count: int, *, threads: int = 1, backend: str = "gloo", first: bool = True) -> Iterator[Workers]:
    """Start so many workers on this machine's own network, joined; ended with the block."""
    with alone(count, threads=threads, first=first) as workers:
        join(workers, "127.0.0.1", _free_port(), threads, backend)
        yield workers


@contextmanager
def alone(
    count: int = 1, *, threads: int = 1, first: bool = True, memory_bytes: int = 0, cores: Sequence[int] = (),
    forked: bool = True,
) -> Iterator[Workers]:  # fmt: skip
    """Start workers that have joined no other, on these cores; ended with the block.

    `memory_bytes` is what each may have beyond its libraries, as the system enforces it (RLIMIT_DATA); 0: no limit.
    Without `forked` they are children of this process, which import their libraries by themselves.
    """
    with started([""] * count, threads, first=first, memory_bytes=memory_bytes, cores=cores, forked=forked) as workers:
        yield workers


def limited(function: Callable[[Given], Made], given: Given, *, memory_bytes: int = 0) -> Made:
    """Return what a function returns in a process of its own that may have so many bytes beyond its libraries (0: any).

    Raises ForetraceError for what the function refuses, where its memory does not suffice, and where it is killed.
    """
    with alone(first=False, memory_bytes=memory_bytes) as workers:
        return workers.ask(function, given, "measuring within its memory", seconds=_MOST_LIMITED_S)[0]


def join(workers: Workers, address: str, port: int, threads: int, backend: str = "gloo") -> None:
    """Let workers meet at the address of the first one."""
    common = {"address": address, "port": port, "threads": threads, "patience_s": PATIENCE_S, "backend": backend}
    joins = [msgspec.convert({**common, "rank": rank, "workers": len(workers)}, Join) for rank in range(len(workers))]
    workers.ask_each([AskedCall(meet, each) for each in joins], "joining the others", patience_s=START_S)


def _free_port() -> int:
    """Return a port that nothing listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def started(
    networks: Sequence[str], threads: int, *, interface: str = "lo", first: bool = True, memory_bytes: int = 0,
    cores: Sequence[int] = (), forked: bool = True,
) -> Iterator[Workers]:  # fmt: skip
    """Start a process per network ("": the machine's own); ended with the block. `first`: ahead of all else on the
    machine.

    One whose memory is limited imports its libraries by itself, so that it has the pages of its own use alone; so do
    all where a process must not fork once it has loaded system libraries (macOS).
    """
    environ = bounded_environment() if memory_bytes else environment(threads)
    environ |= {"GLOO_SOCKET_IFNAME": interface, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    words = [FIRST] * first + [f"{CORES}{','.join(map(str, cores))}"] * bool(cores) + [f"{MEMORY}{memory_bytes}"]
    own = [sys.executable, "-m", "foretrace.experiment.worker", *words]
    processes: list[Process] = []
    with ExitStack() as stack:
        said = [stack.enter_context(tempfile.TemporaryFile()) for _ in networks]
        try:
            for network, errors in zip(networks, said, strict=True):
                if forked and not memory_bytes and sys.platform == "linux":
                    processes.append(fork(words, environ, errors, network=network))
                    continue
                pipe = subprocess.PIPE
                processes.append(subprocess.Popen(own, env=environ, bufsize=0, stdin=pipe, stdout=pipe, stderr=errors))
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
    """Raise ForetraceError for what can be seen to be wrong before anything is run."""
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
    from foretrace.experiment.measure import verify

    try:
        with alone(threads=job.threads, first=False) as worker:
            (found,) = worker.ask_each([AskedCall(verify, job)], "verifying", patience_s=inf, tell=progress)
            worker.leave()
    except WorkerError as error:
        if _is_the_users(job, error.crash):
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
    return found


def _is_the_users(job: Job, crash: Crashed) -> bool:
    """Return whether a script of the user raised this: before anything was applied, or with a frame of its own file."""
    if not job.model.endswith(".py"):
        return False
    script = Path(job.model).resolve()
    return crash.during in USERS_STAGES or any(Path(each).resolve() == script for each in crash.files)
