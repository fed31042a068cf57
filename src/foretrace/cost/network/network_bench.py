"""`calibrate`: real collectives between processes started on this machine, timed; nothing hangs if one of them dies.

    python -m foretrace.cost.network.network_bench RANK < orders     # one worker; started by `calibrate` alone

Each worker joins a process group on this machine and calls `measure_collectives`; the first writes the table. A worker
that ends badly, or a limit in time, ends all of them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path

import msgspec

from foretrace.cost.network.collective_bench import LEAST_REPETITIONS, checked, measure_collectives
from foretrace.cost.network.collective_files import read
from foretrace.cost.network.collective_table import CollectiveTable
from foretrace.cost.network.network import CollectiveKind
from foretrace.cost.operators import store
from foretrace.cost.operators.machine import fingerprint
from foretrace.errors import ForetraceError
from foretrace.executor import end_with

MOST_SPREAD = 0.10
_BACKENDS = ("gloo", "nccl")
_MOST_WORKERS = 64

Progress = Callable[[float], None]


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker is told."""

    workers: int
    sizes: tuple[int, ...]
    kinds: tuple[str, ...]
    repetitions: int
    backend: str
    store: str  # file that the workers meet at
    table: str  # file that the first worker writes
    progress: str  # file that it keeps the share done in
    timeout_s: float


def sizes_between(least: int, most: int, count: int) -> tuple[int, ...]:
    """Sizes at even distances on a logarithmic scale, whole float32s. Raises ForetraceError."""
    if not 4 <= least <= most or count < 1:
        raise ForetraceError(f"sizes from {least} to {most} bytes cannot be; start at 4 or more and end not below it.")
    if count == 1 or least == most:
        return (most // 4 * 4,)
    ratio = (most / least) ** (1 / (count - 1))
    return tuple(sorted({round(least * ratio**at) // 4 * 4 for at in range(count)}))


def calibrate(
    *,
    workers: int,
    sizes: Sequence[int],
    kinds: Sequence[str] = (CollectiveKind.ALL_REDUCE,),
    repetitions: int = LEAST_REPETITIONS,
    backend: str = "gloo",
    limit_s: float = 600.0,
    progress: Progress | None = None,
) -> CollectiveTable:
    """The table of collectives between so many processes of this machine.

    Raises ForetraceError where a worker dies, the limit passes, or the backend cannot have so many workers.
    """
    _check(workers, backend)
    checked(0, workers, sizes, kinds, repetitions)
    with tempfile.TemporaryDirectory(prefix="foretrace-network-") as name:
        folder = Path(name)
        orders = Orders(
            workers=workers,
            sizes=tuple(sizes),
            kinds=tuple(str(kind) for kind in kinds),
            repetitions=repetitions,
            backend=backend,
            store=str(folder / "store"),
            table=str(folder / "table.json"),
            progress=str(folder / "progress"),
            timeout_s=min(60.0, limit_s),
        )
        _run(orders, folder, limit_s, progress)
        found = read(folder / "table.json")
    return replace(found, name=f"{backend}, {workers} workers", machine={**fingerprint(), "threads": 1})


def refuse_noise(table: CollectiveTable, most: float = MOST_SPREAD) -> None:
    """Raise ForetraceError where a time repeats worse than `most`, naming the size."""
    worst = table.noisiest()
    if worst is not None and worst[2] > most:
        series, size, spread = worst
        raise ForetraceError(
            f"the {series.kind} of {size:,.0f} bytes varies by {100 * spread:.0f} % (quartiles of {table.repetitions} "
            f"repetitions), and more than {100 * most:.0f} % is no basis for predictions; leave the machine alone "
            "meanwhile, choose larger sizes, or keep it with a wider interval by `accept_noise=`."
        )


def default_path(table: CollectiveTable) -> Path:
    """Where a table is kept if nobody names a file: beside the calibrations of operators."""
    workers = max(each.workers for each in table.series)
    return store.folder().parent / "network" / f"{table.backend}-{workers}.json"


def _check(workers: int, backend: str) -> None:
    if backend not in _BACKENDS:
        raise ForetraceError(f"backend {backend} is unknown; choose {' or '.join(_BACKENDS)}.")
    if not 2 <= workers <= _MOST_WORKERS:
        raise ForetraceError(f"{workers} workers cannot be measured; choose from 2 to {_MOST_WORKERS}.")
    if backend == "nccl":
        import torch

        if (found := torch.cuda.device_count()) < workers:
            raise ForetraceError(
                f"nccl needs a GPU per worker, and this machine has {found} for {workers}; use fewer, or gloo."
            )


def _run(orders: Orders, folder: Path, limit_s: float, progress: Progress | None) -> None:
    words = msgspec.json.encode(orders)
    running: list[subprocess.Popen[bytes]] = []
    # One thread each: workers of one machine compete for its cores, and a collective needs little of them.
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    try:
        for rank in range(orders.workers):
            with (folder / f"error-{rank}").open("wb") as errors:
                worker = subprocess.Popen(
                    [sys.executable, "-m", "foretrace.cost.network.network_bench", str(rank)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=environment,
                )
            running.append(worker)
            assert worker.stdin is not None
            worker.stdin.write(words + b"\n")
            worker.stdin.flush()  # and left open: the worker ends when this end is closed
        _wait(running, orders, folder, limit_s, progress)
    finally:
        for worker in running:
            if worker.poll() is None:
                worker.kill()
            worker.wait()
            assert worker.stdin is not None
            with suppress(BrokenPipeError):
                worker.stdin.close()


def _wait(
    running: Sequence[subprocess.Popen[bytes]],
    orders: Orders,
    folder: Path,
    limit_s: float,
    progress: Progress | None,
) -> None:
    end = time.monotonic() + limit_s
    while any(worker.poll() is None for worker in running):
        if bad := [rank for rank, worker in enumerate(running) if worker.poll() not in (None, 0)]:
            time.sleep(0.3)  # others may say more about who went first
            raise _death(running, bad, folder)
        if time.monotonic() > end:
            raise ForetraceError(
                f"measuring took longer than {limit_s:g} s and was stopped; give fewer or smaller sizes, or `limit=`."
            )
        if progress is not None:
            told = Path(orders.progress)
            progress(float(told.read_text() or 0) if told.exists() else 0.0)
        time.sleep(0.05)
    if bad := [rank for rank, worker in enumerate(running) if worker.poll() != 0]:
        raise _death(running, bad, folder)


def _death(running: Sequence[subprocess.Popen[bytes]], bad: Sequence[int], folder: Path) -> ForetraceError:
    """Who died first and of what: one that was killed before those that merely noticed."""
    rank = next((each for each in bad if (running[each].poll() or 0) < 0), bad[0])
    code = running[rank].poll() or 0
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    else:
        lines = (folder / f"error-{rank}").read_text(errors="replace").strip().splitlines()
        how = f"ended with: {lines[-1] if lines else f'exit code {code}'}"
    return ForetraceError(f"worker {rank} of {len(running)} {how}; nothing was stored.")


def _worker(rank: int) -> int:
    inbox = FileIO(0, "rb", closefd=False)
    orders = msgspec.json.decode(inbox.readline(), type=Orders)
    end_with(0)
    import torch
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    torch.set_num_threads(1)

    def tell(share: float) -> None:
        if rank == 0:
            Path(orders.progress).write_text(f"{share:.3f}")

    try:
        table = measure_collectives(
            rank,
            orders.workers,
            sizes=orders.sizes,
            kinds=orders.kinds,
            repetitions=orders.repetitions,
            store=FileStore(orders.store, orders.workers),
            backend=orders.backend,
            timeout_s=orders.timeout_s,
            wanted_spread=MOST_SPREAD,
            progress=tell,
        )
    except ForetraceError as error:
        print(str(error), file=sys.stderr)
        return 2
    if rank == 0:
        table.save(Path(orders.table))
    return 0


if __name__ == "__main__":
    sys.exit(_worker(int(sys.argv[1])))
