"""The surroundings of a measurement: settings of its process, and how many cores the machine has left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

PRIORITY = -10  # nice value of processes that measure; it needs CAP_SYS_NICE
ENOUGH = 0.9  # share of the cores that a measurement needs
PATIENCE_S = 10.0  # for others to leave them
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

# glibc gives large blocks back to the kernel and faults them in again, which costs up to a quarter of a step and
# depends on the history of the process. 32 MiB is the largest threshold that glibc accepts (a larger one is ignored
# without a word); it takes the settings only from the environment, before the process starts.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}


def environment(threads: int) -> dict[str, str]:
    """Return the environment of a process that measures: ours, with its threads and allocator settled."""
    return os.environ | ALLOCATOR | dict.fromkeys(THREAD_VARIABLES, str(threads))


def bounded_environment() -> dict[str, str]:
    """Return the environment of a process whose memory is limited: one thread, one heap that keeps what it has."""
    heap = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), ALLOCATOR["MALLOC_MMAP_THRESHOLD_"])
    return os.environ | dict.fromkeys((*THREAD_VARIABLES, "MALLOC_ARENA_MAX"), "1") | heap


def go_first() -> None:
    """Take precedence over what else runs on the machine, where that is allowed: a rig should not measure it."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    with suppress(OSError):  # where the kernel groups processes by session, the session's value counts
        os.setsid()
        Path("/proc/self/autogroup").write_text(str(PRIORITY), encoding="ascii")


@contextmanager
def ahead() -> Iterator[None]:
    """Let this thread take precedence meanwhile, where that is allowed."""
    with suppress(OSError):
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    yield
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, usual)


def free_cores(seconds: float = 0.3, most: int = 2) -> float:
    """Return how many cores (up to `most`) a job would get now: so many processes spin, their CPU time is counted."""
    spin = (
        "import time\n"
        f"end = time.perf_counter() + {seconds}\n"
        "while time.perf_counter() < end: pass\n"
        "print(time.process_time())"
    )
    bare = [sys.executable, "-S", "-E", "-c", spin]
    spinning = [subprocess.Popen(bare, stdout=subprocess.PIPE, text=True) for _ in range(most)]
    return sum(float(each.communicate()[0]) for each in spinning) / seconds


def wait_for_cores(needed: int, most_s: float) -> float:
    """Wait until so many cores are free, but not forever; what is free then."""
    end = time.monotonic() + most_s
    while (free := free_cores(most=needed)) < ENOUGH * needed and time.monotonic() < end:
        time.sleep(1.0)
    return free


def taken(needed: int, free: Sequence[float]) -> str:
    """Return why measurements on so many cores are uncertain, given those free before and after; "" if they are not."""
    if min(free) >= ENOUGH * needed:
        return ""
    return f"{needed} cores are needed and the machine had {min(free):.1f} left"


def queued_s(threads: str = "self/task/*") -> float:
    """Return seconds for which these threads (below /proc) waited for a core since they began; 0 where unknown."""
    total = 0
    for each in Path("/proc").glob(f"{threads}/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # one that has just ended
            total += int(each.read_text(encoding="ascii").split()[1])
    return total / 1e9


def allocator() -> dict[str, str]:
    """Return the settings of the allocator that this process began with."""
    return {name: os.environ[name] for name in ALLOCATOR if name in os.environ}
