"""A function in a process of its own, whose memory the operating system limits.

`run(train, job, TrainedGraph, memory_bytes=...)` asks `python -m foretrace.experiment.limited`, which imports the
function, takes its limit (RLIMIT_DATA: what libraries have by then does not count), calls it, and answers in JSON.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar, get_type_hints

import msgspec

from foretrace.errors import ForetraceError
from foretrace.training.rows.out_of_core import environment, limit_memory

Given = TypeVar("Given", bound=msgspec.Struct)
Made = TypeVar("Made", bound=msgspec.Struct)
_MOST_S = 3600.0


class _Answer(msgspec.Struct):
    """JSON of what was made, or what was wrong."""

    made: msgspec.Raw = msgspec.Raw(b"null")
    refused: str = ""


def run(function: Callable[[Given], Made], given: Given, kind: type[Made], *, memory_bytes: int = 0) -> Made:
    """What `function(given)` returns; `memory_bytes` is what it may have beyond its libraries (0: no limit).

    Raises ForetraceError for what the function refuses, where its memory does not suffice, and where it is killed.
    """
    words = [f"{function.__module__}:{function.__qualname__}", str(memory_bytes)]
    command = [sys.executable, "-m", "foretrace.experiment.limited", *words]
    done = subprocess.run(
        command, input=msgspec.json.encode(given), capture_output=True, env=environment(), timeout=_MOST_S, check=False
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise ForetraceError(
            f"The process with limited memory ended with code {done.returncode} ({' '.join(said[-1:]) or 'no words'})."
        )
    answer = msgspec.json.decode(done.stdout, type=_Answer)
    if answer.refused:
        raise ForetraceError(answer.refused)
    return msgspec.json.decode(answer.made, type=kind)


def main(name: str, memory: str) -> None:
    """Do what `run` requests."""
    import threading

    import torch

    torch.set_num_threads(1)
    threading.stack_size(512 * 1024)  # of threads that read ahead: what is reserved for a stack counts as data
    module, _, wanted = name.partition(":")
    function: Any = getattr(import_module(module), wanted)
    hints = get_type_hints(function)
    given = msgspec.json.decode(sys.stdin.buffer.read(), type=next(iter(hints.values())))
    try:
        if int(memory):
            limit_memory(int(memory))
        answer = _Answer(made=msgspec.Raw(msgspec.json.encode(function(given))))
    except ForetraceError as error:
        answer = _Answer(refused=str(error))
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate" not in str(error):  # how PyTorch says it
            raise
        answer = _Answer(refused=f"{int(memory) / 1e6:.0f} MB do not suffice for this training; give it more memory.")
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
