"""One process that does what it is asked: `python -m foretrace.experiment.worker [first] [cores=0,1] [memory=BYTES]`.

Spoken to by `processes` over pipes: a request on standard input names a function and what to give it, one answer goes
to standard output. When the other end of the pipe is gone the process ends, whatever it waits for. Threads, allocator,
cores and memory are settled before the first request, so that all that is measured lives in the same state.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from io import BufferedWriter, FileIO
from typing import Any, get_type_hints

import msgspec

from foretrace.errors import ForetraceError, needing
from foretrace.experiment.cores import go_first
from foretrace.experiment.messages import Answer, Crashed, Progress, Refusal, Request, Returned, Worker

FIRST, CORES, MEMORY = "first", "cores=", "memory="  # the words that it understands
_STACK_BYTES = 512 * 1024  # of threads where memory is limited: what is reserved for a stack counts as data


def main() -> int:
    """Answer requests until there are no more, or one asks to leave."""
    inbox, out = _streams()
    if FIRST in sys.argv:
        go_first()
    given = {name: word.removeprefix(name) for name in (CORES, MEMORY) for word in sys.argv if word.startswith(name)}
    if CORES in given:
        os.sched_setaffinity(0, map(int, given[CORES].split(",")))
    memory = int(given.get(MEMORY, 0))
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(inbox, lines), daemon=True).start()
    decoder, encoder = msgspec.json.Decoder(Request), msgspec.json.Encoder()

    def say(answer: Answer) -> None:
        out.write(encoder.encode(answer) + b"\n")
        out.flush()

    worker, limited = Worker(lambda what, share: say(Progress(what=what, share=share))), False
    while (request := decoder.decode(lines.get())).function:
        module, _, name = request.function.partition(":")
        function = getattr(import_module(module), name)
        if memory and not limited:
            _limit(memory)
            limited = True
        say(_answer(function, request.given, worker, memory))
    return 0  # in order: what was started here has processes of its own


def _limit(memory: int) -> None:
    """Take the limit: what libraries have by now does not count."""
    import torch

    from foretrace.training.rows.out_of_core import limit_memory

    torch.set_num_threads(1)
    threading.stack_size(_STACK_BYTES)
    limit_memory(memory)


def _streams() -> tuple[FileIO, BufferedWriter]:
    """Return our ends of the two pipes; what the job itself prints goes to standard error, and it has nothing
    to read.
    """
    inbox, out = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115, PTH123  (for the life of the process)
    return FileIO(inbox, "rb"), os.fdopen(out, "wb")


def _read(inbox: FileIO, lines: queue.SimpleQueue[bytes]) -> None:
    """Hand lines over; the end of them ends this process, even in the middle of a collective nobody else joins."""
    for line in inbox:
        lines.put(line)
    os._exit(0)


def _answer(function: Callable[..., Any], given: msgspec.Raw, worker: Worker, memory: int) -> Answer:
    names = list(signature(function).parameters)
    try:
        decoded = msgspec.json.decode(given, type=get_type_hints(function)[names[0]])
        with needing("a worker"):
            made = function(decoded, worker) if len(names) > 1 else function(decoded)
        return Returned(made=msgspec.Raw(msgspec.json.encode(made)))
    except ForetraceError as error:
        return Refusal(sentence=str(error))
    except Exception as error:
        if memory and (isinstance(error, MemoryError) or "allocate" in str(error)):  # how PyTorch says it
            return Refusal(sentence=f"{memory / 1e6:.0f} MB do not suffice for this training; give it more memory.")
        return Crashed(
            trace=traceback.format_exc(), error=f"{type(error).__name__}: {error}", during=worker.during,
            files=tuple(frame.filename for frame in traceback.extract_tb(error.__traceback__)),
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
