"""One process that measures: `python -m foretrace.experiment.worker [first]`, spoken to by `processes` over pipes.

Requests come on standard input, one answer each goes to standard output. When the other end of the pipe is gone the
process ends, whatever it waits for. A whole verification happens in one such process, with the threads and the
allocator settled before it began, so that the recording, the calibration and both arms live in the same state. The
order matters: the treated model runs for the first time after the prediction has been made.
"""

from __future__ import annotations

import gc
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from foretrace.cost.operators.bench import lacks
from foretrace.errors import ForetraceError
from foretrace.experiment.cores import go_first
from foretrace.experiment.job import Job
from foretrace.experiment.messages import (
    Answer,
    Buckets,
    Collectives,
    Crashed,
    Done,
    ExchangedRows,
    ExchangeRows,
    HashRows,
    Inspect,
    InspectSecondOrder,
    Join,
    Listening,
    ListenRows,
    Make,
    MeetRows,
    Progress,
    Record,
    Recorded,
    Refusal,
    Request,
    RunSteps,
    SecondOrderState,
    ServeRows,
    TimedSteps,
    TimeRows,
    TrainRows,
    Verified,
    Verify,
)

if TYPE_CHECKING:
    from foretrace.experiment.rows.role import RowRole

RowRequests = ServeRows | ListenRows | MeetRows | TimeRows | TrainRows | HashRows
FIRST = "first"  # the word that needs precedence
# Stages in which nothing of ours has been applied: what a user's script raises there is the script's own.
USERS_STAGES = ("making the training", "recording the baseline")


def main() -> int:
    """Answer requests until there are no more, or a verification is over."""
    inbox, out = _streams()
    if FIRST in sys.argv:
        go_first()
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(inbox, lines), daemon=True).start()
    decoder, encoder = msgspec.json.Decoder(Request), msgspec.json.Encoder()

    def say(answer: Answer) -> None:
        out.write(encoder.encode(answer) + b"\n")
        out.flush()

    worker = Worker(say)
    while True:
        request: Request = decoder.decode(lines.get())
        say(_answer(worker, request))
        if isinstance(request, Verify):
            return 0  # in order: the loaders of its arms have processes of their own


def _streams() -> tuple[FileIO, BufferedWriter]:
    """Our ends of the two pipes; what the job itself prints goes to standard error, and it has nothing to read."""
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


def _answer(worker: Worker, request: Request) -> Answer:
    try:
        match request:
            case Verify():
                return worker.verify(request)
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
            case InspectSecondOrder():
                return worker.second_order(request)
            case ExchangeRows():
                return worker.exchange_rows(request)
            case _:
                return worker.rows(request)
    except ForetraceError as error:
        return Refusal(sentence=str(error))
    except Exception as error:
        return Crashed(
            trace=traceback.format_exc(),
            error=f"{type(error).__name__}: {error}",
            during=worker.during,
            script=isinstance(request, Verify) and _is_the_users(error, request.job, worker.during),
        )


def _is_the_users(error: Exception, job: Job, during: str) -> bool:
    """Whether a script of the user raised this: before anything was applied, or with a frame of its own file."""
    if not job.model.endswith(".py"):
        return False
    script = Path(job.model).resolve()
    frames = traceback.extract_tb(error.__traceback__)
    return during in USERS_STAGES or any(Path(frame.filename).resolve() == script for frame in frames)


class Worker:
    """What a worker keeps between two requests: its arms, and what it does."""

    def __init__(self, say: Callable[[Progress], None]) -> None:
        from foretrace.experiment.links.arms import RunningArm

        self.say, self.during = say, ""
        self.rank, self.workers = 0, 1
        self.arms: dict[str, RunningArm] = {}
        self.row_role: RowRole | None = None

    def tell(self, what: str, share: float) -> None:
        """Say what is done now, and how far it has come."""
        self.during = what
        self.say(Progress(what=what, share=share))

    def verify(self, request: Verify) -> Verified:
        """Run a verification."""
        from foretrace.experiment.measure import measure

        try:
            return Verified(outcome=measure(request.job, self.tell))
        except RuntimeError as error:
            if lacking := lacks(error):
                raise ForetraceError(f"{' + '.join(request.job.techniques)} cannot run: {lacking}.") from error
            raise

    def join(self, request: Join) -> Done:
        """Settle threads and meet the others."""
        import torch
        import torch.distributed as dist

        torch.set_num_threads(request.threads)
        self.rank, self.workers = request.rank, request.workers
        dist.init_process_group(
            request.backend,
            init_method=f"tcp://{request.address}:{request.port}",
            rank=request.rank,
            world_size=request.workers,
            timeout=timedelta(seconds=request.patience_s),
        )
        if request.backend == "gloo":  # NCCL would take every worker to have the first GPU
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
            per_node=request.per_node,
            wanted_spread=request.wanted_spread,
            busy=request.busy,
            progress=(lambda share: self.tell("timing collectives", share)) if request.told and not self.rank else None,
        )
        if self.rank == 0:
            msgspec.structs.replace(table, name=request.name).save(Path(request.table))
        return Done()

    def record(self, request: Record) -> Recorded:
        """Record this worker alone."""
        from foretrace.experiment.links.arms import record

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

    def rows(self, request: RowRequests) -> Answer:
        """Do what a trainer of rows or its server does."""
        from foretrace.experiment.rows.role import begin

        if isinstance(request, ServeRows | ListenRows):
            self.row_role = begin(request)
            return Listening(ports=self.row_role.ports)
        assert self.row_role is not None
        return self.row_role.answer(request)

    def inspect(self, request: Inspect) -> Buckets:
        """The buckets of an arm."""
        return self.arms[request.name].buckets()

    def second_order(self, request: InspectSecondOrder) -> SecondOrderState:
        """What K-FAC of an arm keeps and has sent."""
        return self.arms[request.name].second_order()

    def exchange_rows(self, request: ExchangeRows) -> ExchangedRows:
        """Exchange rows of embedding tables."""
        from foretrace.experiment.rows.placed import exchange

        return exchange(request, self.rank)


if __name__ == "__main__":
    sys.exit(main())
