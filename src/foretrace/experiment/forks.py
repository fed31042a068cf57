"""Processes that are forked from one that has imported PyTorch: `python -m foretrace.experiment.forks` is that server.

Importing PyTorch and its compiler takes seconds of a core, a fork of a process that has done so milliseconds, and its
memory is shared. The server computes nothing, so that no fork copies a lock that a thread of it would have to release.
There is one per set of variables that libraries read when they are loaded; it ends with the process that started it,
and what it forked ends with it. The standard library's fork server would not do: a process has one of those, with the
environment of its first use, and what it forks runs the user's script again.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module, invalidate_caches
from multiprocessing.connection import wait
from pathlib import Path
from threading import Lock, Thread
from typing import IO

import msgspec

from foretrace.errors import ForetraceError
from foretrace.executor import how_ended

PRELOADED = ("torch", "torch._dynamo", "torch.distributed", "foretrace.experiment.measure")
NETWORKS = Path("/var/run/netns")  # where `ip netns` names networks
# Beginnings of the variables that libraries read when they are loaded; all others are given to each fork.
_READ_AT_LOAD = (
    "ATEN_", "CUDA_", "DNNL_", "GOMP_", "HIP_", "KMP_", "LD_", "MALLOC_", "MKL_", "NCCL_", "NUMBA_", "OMP_", "ONEDNN_",
    "OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH",
)  # fmt: skip
_SET_LATER = "TORCHINDUCTOR_CACHE_DIR"  # by PyTorch itself when it compiles, and read each time
_START_S = 300.0  # importing PyTorch on a very busy machine
_END_S = 5.0  # from the end of its socket to its own
_PID_DIGITS = 20
_PR_SET_PDEATHSIG, _CLONE_NEWNET = 1, 0x40000000  # of prctl(2) and setns(2)


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a fork becomes: a worker behind these words, with this environment, in a folder and a network (or ours)."""

    words: tuple[str, ...]
    environ: dict[str, str]
    folder: str
    network: str = ""


class Fork:
    """A forked process, with what `subprocess.Popen` offers of one that was started."""

    def __init__(self, pid: int, stdin: IO[bytes], stdout: IO[bytes], ended: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout, self._ended = pid, stdin, stdout, ended
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not wait([self._ended.fileno()], timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            code = self._ended.read()
            self._ended.close()
            self.returncode = int(code or -signal.SIGKILL)
            if not code:  # the server was killed, and on Linux this one with it
                self._kill()
        return self.returncode

    def kill(self) -> None:
        """End it at once, if it runs."""
        if self.poll() is None:
            self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def fork(words: Sequence[str], environ: Mapping[str, str], errors: IO[bytes], *, network: str = "") -> Fork:
    """Return a worker behind these words, its errors in a file. Raises ForetraceError where none can be forked."""
    request = ForkRequest(words=tuple(words), environ=dict(environ), folder=str(Path.cwd()), network=network)
    with ExitStack() as stack:
        given = stack.enter_context(tempfile.TemporaryFile(buffering=0))
        given.write(msgspec.json.encode(request))
        given.seek(0)
        pipes = [os.pipe() for _ in range(3)]
        (inbox, stdin), (stdout, out), (ended, status) = pipes
        theirs = (inbox, out, errors.fileno(), status)
        ours = [os.fdopen(each, mode, buffering=0) for each, mode in ((stdin, "wb"), (stdout, "rb"), (ended, "rb"))]
        try:
            for last in (False, True):
                server = _server(environ)
                if pid := server.fork([given.fileno(), *theirs]):
                    return Fork(pid, *ours)
                why = server.ended()
                if last or server.why:  # else somebody ended it, perhaps long ago
                    break
            raise ForetraceError(f"the process that workers are forked from {why}")
        except BaseException:
            for each in ours:
                each.close()
            raise
        finally:
            for number in (inbox, out, status):
                os.close(number)


class _Server:
    """Our side of one: the process, and the socket by which it is asked."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_START_S)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  (for the life of the server)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__], env=dict(environ), stdin=theirs.fileno(), stdout=subprocess.DEVNULL,
                stderr=self._said,
            )  # fmt: skip
        self._lock, self._pid, self.why = Lock(), os.getpid(), ""

    def fork(self, files: Sequence[int]) -> int:
        """Return the pid of a fork that has these files; 0 where the server has ended, and why is known then."""
        try:
            with self._lock:
                socket.send_fds(self._control, [b"f"], list(files))
                return int(self._control.recv(_PID_DIGITS, socket.MSG_WAITALL) or 0)
        except TimeoutError:
            self.why = f"gave no answer within {_START_S:.0f} s; is the machine very busy?"
        except OSError:
            pass
        return 0

    def ended(self) -> str:
        """Say how it ended, which it does by now if it is not silent."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.0 if self.why else _END_S)
        self._process.kill()
        how = how_ended(self._process.wait())
        self._said.seek(0)
        words = " / ".join(self._said.read().decode("utf-8", errors="replace").strip().splitlines()[-4:])
        return self.why or f"{how}; its last words: {words}."

    def ready(self) -> bool:
        """Return whether it runs."""
        return self._process.poll() is None

    def end(self) -> None:
        """End it, and what it forked; in a process that was forked from ours, nothing."""
        if self._pid != os.getpid():
            return
        self._process.kill()
        self._process.wait()
        self._said.close()
        self._control.close()


_servers: dict[tuple[object, ...], _Server] = {}
_starting = Lock()


def _server(environ: Mapping[str, str]) -> _Server:
    """Return the server for such an environment, of this process and not of one that it was forked from."""
    read = tuple(
        sorted(pair for pair in environ.items() if pair[0].startswith(_READ_AT_LOAD) and pair[0] != _SET_LATER)
    )
    key = (os.getpid(), sys.executable, *read)
    with _starting:
        if (server := _servers.get(key)) and not server.ready():
            server.end()
            server = None
        if not server:
            server = _servers[key] = _Server(environ)
            atexit.register(server.end)
        return server


# --- the server ----------------------------------------------------------------------------------------------


def main() -> int:
    """Fork what is asked for until nobody is left to ask; in a fork, be a worker."""
    control = socket.socket(fileno=os.dup(0))
    gc.disable()  # modules stay: looking for garbage among them takes a fifth of the time, and in forks copies pages
    with _ending_with(control):
        for name in PRELOADED:
            with suppress(ImportError):  # a worker says what it misses
                import_module(name)
    gc.freeze()
    gc.enable()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    statuses: dict[int, int] = {}
    while True:
        for ready in select.select([control.fileno(), woken], [], [])[0]:
            if ready == woken:
                os.read(woken, 4096)
                _reap(statuses)
                continue
            asked, files, *_ = socket.recv_fds(control, 1, 5)
            if not asked:
                os._exit(0)
            pid = os.fork()
            if not pid:
                for each in (woken, wake, *statuses.values()):
                    os.close(each)
                control.close()
                return _become(*files)
            statuses[pid] = files.pop()
            for each in files:
                os.close(each)
            control.sendall(f"{pid:{_PID_DIGITS}}".encode())


@contextmanager
def _ending_with(control: socket.socket) -> Iterator[None]:
    """End this process meanwhile when nobody is left who could ask it; a thread sees that, which is gone afterwards."""
    done, finish = os.pipe()
    poll = select.poll()
    poll.register(control, 0)  # its end is always told
    poll.register(done, 0)

    def watch() -> None:
        if any(number == control.fileno() for number, _ in poll.poll()):
            os._exit(0)

    watching = Thread(target=watch)
    watching.start()
    yield
    os.close(finish)
    watching.join()
    os.close(done)


def _reap(statuses: dict[int, int]) -> None:
    """Tell how each fork that has ended did."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            status = statuses.pop(found[0])
            with suppress(BrokenPipeError):
                os.write(status, str(os.waitstatus_to_exitcode(found[1])).encode())
            os.close(status)


def _become(given: int, inbox: int, out: int, errors: int, status: int) -> int:
    """Take over, in a fork, what makes a process, and be a worker."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    libc = ctypes.CDLL(None, use_errno=True)
    with suppress(AttributeError):  # Linux alone has it
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for theirs, ours in ((inbox, 0), (out, 1), (errors, 2)):
        os.dup2(theirs, ours)
        os.close(theirs)
    os.close(status)
    with os.fdopen(given, "rb") as file:
        request = msgspec.json.decode(file.read(), type=ForkRequest)
    os.environ.clear()
    os.environ.update(request.environ)
    os.chdir(request.folder)
    if not sys.flags.safe_path:
        sys.path[0] = request.folder
    invalidate_caches()
    if request.network:
        with (NETWORKS / request.network).open("rb") as network:
            if libc.setns(network.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), request.network)
    sys.argv[1:] = request.words
    return import_module("foretrace.experiment.worker").main()  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main())
