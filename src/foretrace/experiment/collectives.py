"""`calibrate`: real collectives between processes started on this machine, timed; nothing hangs if one of them dies."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from foretrace.cost.network.collective_bench import LEAST_REPETITIONS, checked, measure_collectives
from foretrace.cost.network.collective_files import read
from foretrace.cost.network.collective_table import CollectiveTable
from foretrace.cost.network.network import CollectiveKind
from foretrace.cost.operators import store
from foretrace.cost.operators.machine import fingerprint
from foretrace.deadline import ending
from foretrace.errors import ForetraceError, needing
from foretrace.experiment.messages import Collectives, Worker
from foretrace.experiment.processes import AskedCall, DeadError, SilentError, together

MOST_SPREAD = 0.10
_BACKENDS = ("gloo", "nccl")
_MOST_WORKERS = 64


def time_collectives(given: Collectives, worker: Worker) -> None:
    """Time collectives in a worker; the first one writes their table."""
    table = measure_collectives(
        worker.rank,
        worker.workers,
        sizes=given.sizes,
        kinds=given.kinds,
        repetitions=given.repetitions,
        per_node=given.per_node,
        wanted_spread=given.wanted_spread,
        busy=given.busy,
        progress=(lambda share: worker.tell("timing collectives", share)) if given.told and not worker.rank else None,
    )
    if worker.rank == 0:
        msgspec.structs.replace(table, name=given.name).save(Path(given.table))


def sizes_between(least: int, most: int, count: int) -> tuple[int, ...]:
    """Return sizes at even distances on a logarithmic scale, whole float32s. Raises ForetraceError."""
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
    progress: Callable[[float], None] | None = None,
) -> CollectiveTable:
    """Return the table of collectives between so many processes of this machine.

    Raises ForetraceError where a worker dies, the limit passes, or the backend cannot have so many workers.
    """
    ending("limit", limit_s, 600)
    _check(workers, backend)
    end = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix="foretrace-network-") as name:
        table = Path(name) / "table.json"
        request = Collectives(
            kinds=checked(0, workers, sizes, kinds, repetitions),
            sizes=tuple(sizes),
            repetitions=repetitions,
            wanted_spread=MOST_SPREAD,
            name=f"{backend}, {workers} workers",
            table=str(table),
            per_node=workers,
            busy=False,
            told=True,
        )
        try:
            # One thread each: workers of one machine compete for its cores, and a collective needs little of them.
            with together(workers, backend=backend, first=False) as members:
                left_s = max(end - time.monotonic(), 0.0)
                members.ask_each(
                    [AskedCall(time_collectives, request)] * workers, "timing collectives", patience_s=left_s,
                    tell=None if progress is None else lambda _, share: progress(share),
                )  # fmt: skip
        except SilentError:
            raise ForetraceError(
                f"measuring took longer than {limit_s:g} s and was stopped; give fewer or smaller sizes, or `limit=`."
            ) from None
        except DeadError as error:
            raise ForetraceError(f"{error} Nothing was stored.") from None
        found = read(table)
    return msgspec.structs.replace(found, machine={**fingerprint(), "threads": 1})


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


def keep(table: CollectiveTable, path: Path | None = None) -> Path:
    """Write a table and return its file: if nobody names one, beside the calibrations of operators."""
    if path is None:
        workers = max(each.workers for each in table.series)
        path = store.folder().parent / "network" / f"{table.backend}-{workers}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
    table.save(path)
    return path


def gpus() -> int:
    """Return GPUs of this machine. Raises MissingExtraError without PyTorch."""
    with needing("calibrate"):
        import torch
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


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
