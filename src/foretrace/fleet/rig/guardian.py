"""The process that owns the daemons of a private Slurm: when its input closes, it ends them, their jobs and the folder.

It needs the standard library only, and is started by `cluster.private` with the folder as its argument. Closing its
standard input is what ends it, so that it does its work also when whoever started it was killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

DAEMONS = "daemons.json"  # in the folder: a list of commands
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_LIBC = ctypes.CDLL(None, use_errno=True)
_SWEEPS, _SWEEP_S = 200, 0.05


def main(folder: Path) -> None:
    """Start the daemons, say their process numbers, and wait for the end of standard input."""
    # what daemons leave behind (job steps detach from them) becomes ours, so that it can be found and ended
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, lambda *_: sys.exit(0))
    with suppress(PermissionError):
        os.nice(-10)  # daemons need little, but at once: a late launch would be taken for the scheduler's doing
    try:
        made = []
        for at, command in enumerate(json.loads((folder / DAEMONS).read_text())):
            with (folder / f"daemon{at}.txt").open("wb") as said:
                made.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=said,
                        stderr=said,
                        preexec_fn=_dies_with_us,  # noqa: PLW1509  # one thread
                    )
                )
        print(json.dumps([each.pid for each in made]), flush=True)
        while True:
            ready, _, _ = select.select([0], [], [], 1.0)
            if ready and not os.read(0, 4096):
                return
            _reap()
    finally:
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)
        end_all()
        shutil.rmtree(folder, ignore_errors=True)


def _dies_with_us() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _reap() -> None:
    """Take note of children that ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_all() -> None:
    """Kill all that descends from this process, until nothing does."""
    for _ in range(_SWEEPS):
        found = descendants(os.getpid())
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_SWEEP_S)
        _reap()


def descendants(root: int) -> list[int]:
    """Return processes below this one, whichever sessions they made."""
    children: dict[int, list[int]] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            with suppress(OSError):
                # the name in parentheses may hold blanks; the parent is the second word behind it
                parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(each.name))
    found, left = [], [root]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
