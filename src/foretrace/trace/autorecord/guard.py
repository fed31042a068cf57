"""End a recorded command when `foretrace record` itself is gone, however that ended (SIGKILL, out of memory).

Started as `python -I -S guard.py PID STATUS FOLDER` beside the command. Standard input is a pipe whose other end only
`foretrace record` holds: a byte says that all is well, its end without one that nobody waits for the command any more.
Then the command and all of its descendants are asked to end (SIGTERM, upon which a recording is completed), what is
left after a few seconds is killed, and temporary files are removed. Standard library only, since it runs by itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

PATIENCE_S = 5.0


def main(pid: int, status: str, folder: str) -> None:
    """Wait for the end of standard input, and clean up where it came unannounced."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # meant for the command, not for its guard
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if os.read(0, 1):
        return
    family = descendants(pid)
    for number in (signal.SIGTERM, signal.SIGKILL):
        _send(family, number)
        end = time.monotonic() + PATIENCE_S
        while any(map(_alive, family)) and time.monotonic() < end:
            time.sleep(0.05)
            family |= set().union(*map(descendants, family))
    clear(folder)
    shutil.rmtree(status, ignore_errors=True)


def clear(folder: str) -> None:
    """Remove what processes that were killed had not written to its end."""
    for part in Path(folder).glob(".rank*.part"):
        with contextlib.suppress(OSError):
            part.unlink()


def descendants(pid: int) -> set[int]:
    """Return a process, its children, their children, and so on."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found, waiting = {pid}, [pid]
    while waiting:
        new = [each for each in children.get(waiting.pop(), ()) if each not in found]
        found.update(new)
        waiting += new
    return found


def _parents() -> Iterable[tuple[int, int]]:
    """Yield all processes with the number of their parent."""
    if not Path("/proc/self/stat").exists():
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
        for line in listing.splitlines():
            child, parent = map(int, line.split())
            yield child, parent
        return
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                stat = Path(entry.path, "stat").read_text(errors="replace")
                yield int(entry.name), int(stat.rpartition(")")[2].split()[1])


def _send(family: Iterable[int], number: int) -> None:
    for pid in family:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    with contextlib.suppress(OSError):  # what only waits to be buried has ended
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
