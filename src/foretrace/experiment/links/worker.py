"""One worker of a rig: `python -m foretrace.experiment.links.worker`, spoken to by `processes` over pipes.

Requests come on standard input, one answer each goes to standard output. When the other end of the pipe is gone the
process ends, whatever it waits for.
"""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from io import FileIO
from pathlib import Path

import msgspec

from foretrace.errors import ForetraceError
from foretrace.experiment.job import Crashed, Refusal
from foretrace.experiment.links.messages import (
    Answer,
    Buckets,
    Collectives,
    Done,
    Inspect,
    Join,
    Make,
    Record,
    Recorded,
    Request,
    RunSteps,
    TimedSteps,
)
from foretrace.experiment.worker import streams

PRIORITY = -10  # nice value; it needs CAP_SYS_NICE


def main() -> int:
    """Answer requests until there are no more."""
    inbox, out = streams()
    _go_first()
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(inbox, lines), daemon=True).start()
    decoder, encoder = msgspec.json.Decoder(Request), msgspec.json.Encoder()
    worker = Worker()
    while True:
        request: Request = decoder.decode(lines.get())
        out.write(encoder.encode(_answer(worker, request)) + b"\n")
        out.flush()


def _go_first() -> None:
    """Take precedence over what else runs on the machine, where that is allowed: a rig should not measure it."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    with suppress(OSError):  # where the kernel groups processes by session, the session's value counts
        os.setsid()
        Path("/proc/self/autogroup").write_text(str(PRIORITY), encoding="ascii")


def _read(inbox: FileIO, lines: queue.SimpleQueue[bytes]) -> None:
    """Hand lines over; the end of them ends this process, even in the middle of a collective nobody else joins."""
    for line in inbox:
        lines.put(line)
    os._exit(0)


def _answer(worker: Worker, request: Request) -> Answer:
    try:
        match request:
            case Join():
                return worker.join(request)
            case Collectives():
                return worker.collectives(request)
            case Record():
                return worker.record(request)
            case Make():
                return worker.make(request)
            case RunSteps():
                return worker.steps(request)
            case Inspect():
                return worker.inspect(request)
    except ForetraceError as error:
        return Refusal(sentence=str(error))
    except Exception as error:
        return Crashed(error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())


class Worker:
    """What a worker keeps between two requests: its arms."""

    def __init__(self) -> None:
        from foretrace.experiment.links.arms import RunningArm

        self.rank, self.workers = 0, 1
        self.arms: dict[str, RunningArm] = {}

    def join(self, request: Join) -> Done:
        """Settle threads and meet the others."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(request.threads)
        self.rank, self.workers = request.rank, request.workers
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{request.address}:{request.port}",
            rank=request.rank,
            world_size=request.workers,
            timeout=timedelta(seconds=request.patience_s),
        )
        dist.barrier()
        gc.collect()
        gc.freeze()
        return Done()

    def collectives(self, request: Collectives) -> Done:
        """Time collectives; the first worker writes their table."""
        from foretrace.cost.network.collective_bench import measure_collectives

        table = measure_collectives(
            self.rank,
            self.workers,
            sizes=request.sizes,
            kinds=request.kinds,
            repetitions=request.repetitions,
            per_node=1,
            wanted_spread=request.wanted_spread,
            busy=True,
        )
        if self.rank == 0:
            replace(table, name=request.name).save(Path(request.table))
        return Done()

    def record(self, request: Record) -> Recorded:
        """Record this worker alone."""
        from foretrace.experiment.links.alone import record

        return record(request)

    def make(self, request: Make) -> Done:
        """Make an arm."""
        from foretrace.experiment.links.arms import RunningArm

        self.arms[request.name] = RunningArm(request.setup)
        gc.collect()
        gc.freeze()
        return Done()

    def steps(self, request: RunSteps) -> TimedSteps:
        """Run steps of an arm."""
        return self.arms[request.name].block(request.discarded, request.steps, together=request.together)

    def inspect(self, request: Inspect) -> Buckets:
        """The buckets of an arm."""
        return self.arms[request.name].buckets()


if __name__ == "__main__":
    sys.exit(main())
