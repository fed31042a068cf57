"""`train_here`: a pipeline in processes of this machine, which ends in one sentence whatever happens to one of them.

Every process has a pipe of its own (a queue that a killed process holds locked can hang) and says several times a
second that it lives. One that ends, or is silent for `timeout_s`, ends the training within two seconds more.

A checkpoint is a file per process of one number of updates; without all of them it is none. Nothing is drained: a
process keeps its state when it has made that many updates, while micro-batches of the next batch are under way. They
are computed again from the first micro-batch of that batch, on the same weights.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, cast

import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from foretrace.errors import ForetraceError
from foretrace.executor import how_ended
from foretrace.files import write_bytes
from foretrace.training.pipeline.job import PipelineJob
from foretrace.training.pipeline.runtime import StageWorker, Trained
from foretrace.training.pipeline.schedule import PipelineSchedule
from foretrace.training.pipeline.transport import LostError

SETTLE_S = 2.0  # from the first complaint until the culprit is known, or not
_PRELOAD = ["torch.distributed", "torch._dynamo", __name__]
_FILE = re.compile(r"update-(\d+)-process-(\d+)-of-(\d+)\.pt")


def train_here(
    job: PipelineJob, schedule: PipelineSchedule, *, timeout_s: float = 60.0, folder: Path | None = None,
    every: int = 0, backend: str = "gloo", worker: type[StageWorker] = StageWorker,
    watch: Callable[[int, int, int], None] | None = None,
) -> tuple[Trained, ...]:  # fmt: skip
    """Return what each process has in the end, one per row of the schedule.

    With `folder`, every so many updates are kept there, and a schedule that begins later continues from what was kept.
    `watch(process, its process id, its updates)` is called whenever one says that it lives. No action may take
    `timeout_s` or longer. Raises ForetraceError where a process ends or is silent, RuntimeError with its traceback
    where the user's functions raise.
    """
    count = len(schedule.rows)
    if backend == "nccl" and torch.cuda.device_count() < count:
        raise ForetraceError(
            f"nccl needs a GPU per process, and this machine has {torch.cuda.device_count()} for {count}; use gloo."
        )
    # The store lives here, where no stage can take it along, at a port that the system finds.
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)
    task: dict[str, Any] = {"schedule": schedule, "timeout_s": timeout_s, "folder": folder}
    given = {**task, "job": job, "port": store.port, "every": every, "backend": backend, "worker": worker}
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    pipes: list[Any] = []
    processes: list[Any] = []
    try:
        for rank in range(count):
            mine, its = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(rank, its), kwargs=given, daemon=True)
            process.start()
            its.close()
            pipes.append(mine)
            processes.append(process)
        return _watched(processes, pipes, watch, **task)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _watched(
    processes: list[Any], pipes: list[Any], watch: Callable[[int, int, int], None] | None, schedule: PipelineSchedule,
    timeout_s: float, folder: Path | None,
) -> tuple[Trained, ...]:  # fmt: skip
    """Listen until all are done. Raises as `train_here`."""
    count, found = len(processes), dict[int, Trained]()
    heard = [time.monotonic() + SETTLE_S] * count  # starting takes a moment
    updates = [schedule.first] * count
    complaints, decide = dict[int, LostError](), float("inf")
    while len(found) < count:
        left = [rank for rank in range(count) if rank not in found and rank not in complaints]
        ready: Any
        for ready in connection.wait([pipes[rank] for rank in left], timeout=min(0.2, timeout_s / 10)):
            rank = pipes.index(ready)
            heard[rank] = time.monotonic()
            try:
                what, value = pickle.loads(ready.recv_bytes())
            except (EOFError, OSError):
                processes[rank].join(SETTLE_S)
                raise _over(rank, how_ended(processes[rank].exitcode), updates[rank], schedule, folder) from None
            if what == "alive":
                updates[rank] = value
                if watch:
                    watch(rank, processes[rank].pid, value)
            elif what == "done":
                found[rank] = value
            elif isinstance(value, LostError):
                complaints[rank], decide = value, min(decide, time.monotonic() + SETTLE_S)
            else:
                raise value
        now = time.monotonic()
        for rank in left:
            if rank not in found and rank not in complaints and now - heard[rank] > timeout_s:
                raise _over(rank, f"gave no sign of life for {timeout_s:g} s", updates[rank], schedule, folder)
        if now > decide or (complaints and len(complaints) + len(found) == count):
            raise next(iter(complaints.values()))
    return tuple(found[rank] for rank in range(count))


def _over(rank: int, how: str, updates: int, schedule: PipelineSchedule, folder: Path | None) -> ForetraceError:
    count = len(schedule.rows)
    then = "keep checkpoints with `folder=` and `every=` to continue after such an end"
    if folder is not None:
        then = f"continue after the {latest(folder, count)} updates that are kept in {folder}"
    return ForetraceError(
        f"process {rank} of {count} (stage {', '.join(map(str, schedule.stages_of[rank]))}) {how} after {updates} "
        f"updates, and the others were ended; {then}."
    )


def _work(
    rank: int, pipe: Any, *, job: PipelineJob, schedule: PipelineSchedule, port: int, timeout_s: float,
    folder: Path | None, every: int, backend: str, worker: type[StageWorker],
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    lock, mine = threading.Lock(), cast("StageWorker | None", None)

    def tell(what: str, value: Any) -> None:
        try:
            with lock:
                pipe.send_bytes(pickle.dumps((what, value)))
        except OSError:  # nobody listens any more
            os._exit(1)

    def live() -> None:
        while True:
            tell("alive", mine.done if mine else schedule.first)
            time.sleep(min(0.25, timeout_s / 10))

    def after(updates: int) -> None:
        if mine and folder is not None and every and updates % every == 0:
            keep(folder, mine)

    threading.Thread(target=live, daemon=True).start()
    try:
        limit, count = timedelta(seconds=timeout_s), len(schedule.rows)
        store = TCPStore("127.0.0.1", port, None, False, limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=limit)
        device = f"cuda:{rank}" if backend == "nccl" else "cpu"
        state = kept(folder, job, schedule, rank) if schedule.first and folder else None
        mine = worker(job, schedule, rank, device=device, state=state, after=after)
        tell("done", mine.run())
        with contextlib.suppress(RuntimeError):  # our part is done, whatever becomes of the others
            dist.barrier()
            dist.destroy_process_group()
    except ForetraceError as error:
        tell("error", error)
    except Exception:
        tell("error", RuntimeError(f"process {rank} of the pipeline raised:\n{traceback.format_exc()}"))


def keep(folder: Path, worker: StageWorker) -> None:
    """Write the state of a process, whole or not at all."""
    kept = {"like": _like(worker.job, worker.schedule), **worker.state()}
    buffer = io.BytesIO()
    torch.save(kept, buffer)
    write_bytes(_path(folder, worker.done, worker.rank, len(worker.schedule.rows)), buffer.getvalue())


def latest(folder: Path, processes: int) -> int:
    """Return the largest number of updates of which every process has kept its state; 0 where there is none."""
    found: dict[int, int] = {}
    for path in folder.glob("update-*.pt"):
        name = _FILE.fullmatch(path.name)
        if name and int(name[3]) == processes:
            found[int(name[1])] = found.get(int(name[1]), 0) + 1
    return max((updates for updates, files in found.items() if files == processes), default=0)


def kept(folder: Path, job: PipelineJob, schedule: PipelineSchedule, rank: int) -> dict[str, Any]:
    """Return the state of a process before the schedule's first batch.

    Raises ForetraceError where a process kept none, or another job or schedule did.
    """
    processes = len(schedule.rows)
    missing = [r for r in range(processes) if not _path(folder, schedule.first, r, processes).is_file()]
    if missing:
        raise ForetraceError(
            f"{folder} has no file of process {missing[0]} of {processes} after {schedule.first} updates; the last "
            f"checkpoint of all processes is that of {latest(folder, processes)} updates."
        )
    path = _path(folder, schedule.first, rank, processes)
    try:
        found: dict[str, Any] = torch.load(path, weights_only=True)
        like = found.pop("like")
    except Exception as error:
        raise ForetraceError(f"{path} is no checkpoint of a pipeline ({type(error).__name__}); remove it.") from None
    if like != _like(job, schedule):
        raise ForetraceError(
            f"{path} was kept by a pipeline of {like}, not of {_like(job, schedule)}; cut and schedule it as then."
        )
    return found


def _like(job: PipelineJob, schedule: PipelineSchedule) -> str:
    return (
        f"layers {list(job.cut)}, {schedule.micro_batches} micro-batches, versions {list(schedule.versions)}, seed "
        f"{job.seed}"
    )


def _path(folder: Path, updates: int, rank: int, processes: int) -> Path:
    return folder / f"update-{updates}-process-{rank}-of-{processes}.pt"
