"""Take a core whenever a loader that runs there asks for it: `python burner.py BOARD CORE`, with few imports.

Until then it sleeps: one that looked 5,000 times a second made every step on its core a fifth longer.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

_SLOT = 32  # bytes per core
ASKED, LOADS, READY = range(3)  # numbers of a slot; READY is the burner's process


class Board:
    """What loaders and burners tell each other: a file of one slot per core."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:  # noqa: PTH123
            self._map = mmap.mmap(file.fileno(), 0)

    def get(self, core: int, place: int) -> int:
        """A number of a core's slot."""
        return int(struct.unpack_from("q", self._map, _SLOT * core + 8 * place)[0])

    def put(self, core: int, place: int, value: int) -> None:
        struct.pack_into("q", self._map, _SLOT * core + 8 * place, value)

    def ask(self, core: int) -> None:
        """Let the burner take its core until it is asked no more."""
        self.put(core, ASKED, 1)
        os.kill(self.get(core, READY), signal.SIGUSR1)

    def leave(self, core: int) -> None:
        """Let the burner leave its core; a load is over."""
        self.put(core, ASKED, 0)
        self.put(core, LOADS, self.get(core, LOADS) + 1)


def new_board(path: Path) -> None:
    """A board of nothing."""
    path.write_bytes(bytes(_SLOT * (os.cpu_count() or 1)))


def burnt_s(board: Path, core: int) -> list[float]:
    """CPU seconds that the burner of a core took of every load there."""
    taken = [0.0] * Board(str(board)).get(core, LOADS)
    for number, ns in struct.iter_unpack("qq", Path(f"{board}.{core}").read_bytes()):
        taken[min(number, len(taken) - 1)] += ns / 1e9
    return taken


def burn(board: str, core: int) -> None:
    """Take the core for as long as it is asked for, each time; without end."""
    with suppress(OSError):  # as the workers do (`foretrace.experiment.cores.go_first`); else they would hardly notice
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    with suppress(OSError):
        os.setsid()
        Path("/proc/self/autogroup").write_text("-10", encoding="ascii")
    os.sched_setaffinity(0, {core})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    own = Board(board)
    with Path(f"{board}.{core}").open("wb", buffering=0) as log:
        own.put(core, READY, os.getpid())
        while signal.sigwait({signal.SIGUSR1}):
            number, begin = own.get(core, LOADS), time.thread_time_ns()
            while own.get(core, ASKED):
                pass
            log.write(struct.pack("qq", number, time.thread_time_ns() - begin))


if __name__ == "__main__":
    burn(sys.argv[1], int(sys.argv[2]))
