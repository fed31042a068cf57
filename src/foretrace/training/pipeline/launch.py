"""`train_here`: a pipeline in processes of this machine, which ends in one sentence whatever happens to one of them.

Every process has a pipe of its own (a queue that a killed process holds locked can hang) and says several times a
second that it lives. One that ends, or is silent for `timeout_s`, ends the training within two seconds more.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

from foretrace.errors import ForetraceError
from foretrace.executor import how_ended
from foretrace.training.pipeline.job import PipelineJob
from foretrace.training.pipeline.runtime import StageWorker, Trained
from foretrace.training.pipeline.schedule import PipelineSchedule

SETTLE_S = 2.0  # from the first complaint until the culprit is known, or not
_PRELOAD = ["torch.distributed", "torch._dynamo", __name__]


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What every process gets."""

    job: PipelineJob
    schedule: PipelineSchedule
    port: int
    timeout_s: float
    folder: Path | None
    every: int
    measure: bool
    backend: str


def train_here(
    job: PipelineJob, schedule: PipelineSchedule, *, timeout_s: float = 60.0, folder: Path | None = None,
    every: int = 0, measure: bool = False, backend: str = "gloo", watch: Callable[[int, int, int], None] | None = None,
) -> tuple[Trained, ...]:  # fmt: skip
    """Return what each process has in the end, one per row of the schedule.

    With `folder`, every so many updates are kept there, and a schedule that begins later continues from what was kept.
    `watch(process, its process id, its updates)` is called whenever one says that it lives. No action may take
    `timeout_s` or longer. Raises ForetraceError where a process ends or is silent, RuntimeError with its traceback
    where the user's functions raise.
    """
    from torch import multiprocessing as mp
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if backend == "nccl":
        import torch

        if torch.cuda.device_count() < len(schedule.rows):
            raise ForetraceError(
                f"nccl needs a GPU per process, and this machine has {torch.cuda.device_count()} for "
                f"{len(schedule.rows)}; use gloo."
            )
    count = len(schedule.rows)
    # The store lives here, where no stage can take it along, at a port that the system finds.
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)
    task = _Task(job=job, schedule=schedule, port=store.port, timeout_s=timeout_s, folder=folder, every=every,
                 measure=measure, backend=backend)  # fmt: skip
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    pipes: list[Any] = []
    processes: list[Any] = []
    try:
        for rank in range(count):
            mine, its = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(rank, task, its), daemon=True)
            process.start()
            its.close()
            pipes.append(mine)
            processes.append(process)
        return _watched(processes, pipes, task, watch)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _watched(
    processes: list[Any], pipes: list[Any], task: _Task, watch: Callable[[int, int, int], None] | None
) -> tuple[Trained, ...]:
    """Listen until all are done. Raises as `train_here`."""
    count, found = len(processes), dict[int, Trained]()
    heard = [time.monotonic() + SETTLE_S] * count  # starting takes a moment
    updates = [task.schedule.first] * count
    complaints, decide = dict[int, str](), float("inf")
    while len(found) < count:
        left = [rank for rank in range(count) if rank not in found and rank not in complaints]
        ready: Any
        for ready in connection.wait([pipes[rank] for rank in left], timeout=min(0.2, task.timeout_s / 10)):
            rank = pipes.index(ready)
            heard[rank] = time.monotonic()
            try:
                what, value = pickle.loads(ready.recv_bytes())
            except (EOFError, OSError):
                processes[rank].join(SETTLE_S)
                raise _over(rank, how_ended(processes[rank].exitcode), updates, task) from None
            if what == "alive":
                updates[rank] = value
                if watch:
                    watch(rank, processes[rank].pid, value)
            elif what == "done":
                found[rank] = value
            elif what == "failed":
                raise RuntimeError(f"process {rank} of the pipeline raised:\n{value}")
            elif what == "refused":
                raise ForetraceError(value)
            else:
                complaints[rank], decide = value, min(decide, time.monotonic() + SETTLE_S)
        now = time.monotonic()
        for rank in left:
            if rank not in found and rank not in complaints and now - heard[rank] > task.timeout_s:
                raise _over(rank, f"gave no sign of life for {task.timeout_s:g} s", updates, task)
        if now > decide or (complaints and len(complaints) + len(found) == count):
            raise ForetraceError(next(iter(complaints.values())))
    return tuple(found[rank] for rank in range(count))


def _over(rank: int, how: str, updates: list[int], task: _Task) -> ForetraceError:
    from foretrace.training.pipeline.checkpoints import latest

    count = len(task.schedule.rows)
    stages = [str(s) for s, process in task.schedule.process_of.items() if process == rank]
    then = "keep checkpoints with `folder=` and `every=` to continue after such an end"
    if task.folder is not None:
        then = f"continue after the {latest(task.folder, count)} updates that are kept in {task.folder}"
    return ForetraceError(
        f"process {rank} of {count} (stage {', '.join(stages)}) {how} after {updates[rank]} updates, and the others "
        f"were ended; {then}."
    )


def _work(rank: int, task: _Task, pipe: Any) -> None:
    """Do the work of a process."""
    import torch
    from torch import distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from foretrace.training.pipeline.checkpoints import keep, kept
    from foretrace.training.pipeline.transport import LostError

    torch.set_num_threads(1)
    lock, worker = threading.Lock(), None

    def tell(what: str, value: Any) -> None:
        try:
            with lock:
                pipe.send_bytes(pickle.dumps((what, value)))
        except OSError:  # nobody listens any more
            os._exit(1)

    def live() -> None:
        while True:
            tell("alive", worker.done if worker else task.schedule.first)
            time.sleep(min(0.25, task.timeout_s / 10))

    def after(updates: int) -> None:
        if worker and task.folder is not None and task.every and updates % task.every == 0:
            keep(task.folder, worker)

    threading.Thread(target=live, daemon=True).start()
    try:
        limit, count = timedelta(seconds=task.timeout_s), len(task.schedule.rows)
        store = TCPStore("127.0.0.1", task.port, None, False, limit)
        dist.init_process_group(task.backend, store=store, rank=rank, world_size=count, timeout=limit)
        device = f"cuda:{rank}" if task.backend == "nccl" else "cpu"
        state = kept(task.folder, task.job, task.schedule, rank) if task.schedule.first and task.folder else None
        worker = StageWorker(
            task.job, task.schedule, rank, device=device, measure=task.measure, state=state, after=after
        )
        tell("done", worker.run())
        with contextlib.suppress(RuntimeError):  # our part is done, whatever becomes of the others
            dist.barrier()
            dist.destroy_process_group()
    except LostError as error:
        tell("lost", str(error))
    except ForetraceError as error:
        tell("refused", str(error))
    except Exception:
        tell("failed", traceback.format_exc())
