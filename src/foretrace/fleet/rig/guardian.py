"""The process that owns the daemons of a private Slurm: when its input closes, it ends them, their jobs and the folder.

`cluster.guarded` starts it with the folder as its argument. Closing its standard input is what ends it, so that it does
its work also when whoever started it was killed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from foretrace.trace.autorecord.guard import descendants

DAEMONS = "daemons.sh"  # in the folder: a line for each
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_LIBC = ctypes.CDLL(None, use_errno=True)
_SWEEPS, _SWEEP_S = 200, 0.05


def main(folder: Path) -> None:
    """Start the daemons, say their process numbers, and wait for the end of standard input."""
    # what daemons leave behind (job steps detach from them) becomes ours, so that it can be found and ended
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, lambda *_: sys.exit(0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for children that end
    with suppress(PermissionError):
        os.nice(-10)  # daemons need little, but at once: a late launch would be taken for the scheduler's doing
    try:
        made = []
        for at, command in enumerate((folder / DAEMONS).read_text().splitlines()):
            with (folder / f"daemon{at}.txt").open("wb") as said:
                started = subprocess.Popen(
                    command, shell=True, stdin=subprocess.DEVNULL, stdout=said, stderr=said, preexec_fn=_daemon  # noqa: PLW1509  # one thread
                )  # fmt: skip
                made.append(started.pid)
        print(*made, flush=True)
        sys.stdin.read()
    finally:
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)
        for _ in range(_SWEEPS):
            for pid in (found := descendants(os.getpid()) - {os.getpid()}):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not found:
                break
            time.sleep(_SWEEP_S)
        shutil.rmtree(folder, ignore_errors=True)


def _daemon() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
