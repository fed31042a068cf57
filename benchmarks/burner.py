"""Take a core whenever a loader that runs there asks for it: `python burner.py BOARD CORE`, with few imports."""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path

_SLOT = 32  # bytes per core
ASKED, BURNT, LOADS, READY = range(4)  # numbers of a slot; BURNT is in CPU ns


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


def new_board(path: Path) -> None:
    """A board of nothing."""
    path.write_bytes(bytes(_SLOT * (os.cpu_count() or 1)))


def burn(board: str, core: int) -> None:
    """Take the core for as long as it is asked for, each time; without end."""
    with suppress(OSError):  # as the workers do (`foretrace.experiment.cores.go_first`); else they would hardly notice
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    with suppress(OSError):
        os.setsid()
        Path("/proc/self/autogroup").write_text("-10", encoding="ascii")
    os.sched_setaffinity(0, {core})
    own = Board(board)
    own.put(core, READY, 1)
    while True:
        while not own.get(core, ASKED):
            time.sleep(2e-4)
        begin = time.thread_time_ns()
        while own.get(core, ASKED):
            pass
        own.put(core, BURNT, own.get(core, BURNT) + time.thread_time_ns() - begin)


if __name__ == "__main__":
    burn(sys.argv[1], int(sys.argv[2]))
