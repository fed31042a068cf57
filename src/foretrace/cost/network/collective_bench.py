"""`measure_collectives`: times of real collectives, run by every process of a group together.

    table = measure_collectives(rank, workers, sizes=[1 << 20, 4 << 20], kinds=["all-reduce"], repetitions=15)

Every member calls it with the same arguments, and every member gets the same table. It uses the default process group
where there is one; else it joins one itself (`init_method`) and leaves it afterwards. Nothing here starts
processes (`cost/network/collectives.py` does), so it can run in network namespaces, containers or on several
machines.

Sizes take turns, so that a disturbance of the machine meets all of them a little instead of one wholly. Where all
members share a clock, a repetition lasts from the last arrival to the last end; else it is the longest of the members'
own times after a barrier. Kept is the median of the repetitions without their slowest fifth, and as spread the
quartile distance of the same, relative.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.cost.network.collective_table import CollectiveSeries, CollectiveTable, series_of, table_of
from foretrace.cost.network.network import CollectiveKind
from foretrace.cost.operators.bench import no_collection
from foretrace.errors import ForetraceError, needing
from foretrace.names import resolve

LEAST_REPETITIONS = 15
_SLOWEST_DROPPED = 0.2
_ROUNDS = 3  # of all repetitions, at most: sizes whose spread is too large are measured again
_WORD_BYTES = 4  # float32

Progress = Callable[[float], None]


def measure_collectives(
    rank: int,
    workers: int,
    *,
    sizes: Sequence[int],
    kinds: Sequence[str] = (CollectiveKind.ALL_REDUCE,),
    repetitions: int = LEAST_REPETITIONS,
    per_node: int = 0,
    init_method: str = "",
    backend: str = "gloo",
    timeout_s: float = 60.0,
    wanted_spread: float = 0.10,
    busy: bool = False,
    progress: Progress | None = None,
) -> CollectiveTable:
    """Return times of every kind and size among the `workers` processes that call this, the same table on each of them.

    Args:
        rank: of this process, 0 to `workers` - 1.
        workers: processes that call this together; at least 2.
        sizes: bytes, as `foretrace.cost.network.network` counts them; rounded up to whole float32 per worker.
        kinds: names of `CollectiveKind`. A kind that the backend lacks is left out, with the reason in `missing`.
        repetitions: of every size, at least 15.
        per_node: workers of one machine; 0 where all share one.
        init_method: as of `torch.distributed.init_process_group`, e.g. "tcp://10.0.0.1:29500"; not needed where this
            process has a default group.
        backend: "gloo" (processor) or "nccl" (GPU `rank` modulo the GPUs of this machine).
        timeout_s: after which a collective that a dead member never joins fails.
        wanted_spread: sizes that vary more are measured again, up to three times in all, and the calmest kept.
        busy: time each collective right behind another one of its size. A link that saves up credit while it is idle
            (a token bucket) has none left then, as in the middle of a training step.
        progress: told the share done, 0 to 1.

    Raises:
        ForetraceError: arguments that cannot be; a member died or never came.

    """
    chosen = checked(rank, workers, sizes, kinds, repetitions)
    dist = _distributed()
    own = not dist.is_initialized()
    if own and not init_method:
        raise ForetraceError("measure_collectives has no process group; initialise one, or give init_method.")
    try:
        if own:
            limit = timedelta(seconds=timeout_s)
            dist.init_process_group(backend, rank=rank, world_size=workers, timeout=limit, init_method=init_method)
        if dist.get_world_size() != workers or dist.get_rank() != rank:
            raise ForetraceError(
                f"the process group has {dist.get_world_size()} members and this is number {dist.get_rank()}, not "
                f"{workers} and {rank}."
            )
        bench = _Bench(dist, rank, workers, busy=busy)
        return bench.table(sorted(set(sizes)), chosen, repetitions, per_node or workers, wanted_spread, progress)
    except (RuntimeError, ValueError) as error:  # what torch.distributed raises when a peer is gone or never came
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ForetraceError(f"worker {rank} of {workers} had to stop, a member died or never came: {line}.") from (
            error
        )
    finally:
        if own and dist.is_initialized():
            dist.destroy_process_group()


def checked(
    rank: int, workers: int, sizes: Sequence[int], kinds: Sequence[str], repetitions: int
) -> tuple[CollectiveKind, ...]:
    """Return the kinds that are meant. Raises ForetraceError on arguments that cannot be."""
    if workers < 2:
        raise ForetraceError(f"{workers} workers have nothing to communicate; two are the least.")
    if not 0 <= rank < workers:
        raise ForetraceError(f"rank {rank} is none of {workers} workers; ranks count from 0.")
    if not sizes or min(sizes) < 1:
        raise ForetraceError("sizes are whole bytes above 0, one at least.")
    if repetitions < LEAST_REPETITIONS:
        raise ForetraceError(f"{repetitions} repetitions are too few for a median; {LEAST_REPETITIONS} are the least.")
    try:
        return tuple(dict.fromkeys(CollectiveKind(resolve(kind, CollectiveKind) or kind) for kind in kinds))
    except ValueError as error:
        raise ForetraceError(f"{error}; choose from {', '.join(CollectiveKind)}.") from None


def _distributed() -> Any:
    with needing("measuring collectives"):
        import torch.distributed as dist
    if not dist.is_available():
        raise ForetraceError("this PyTorch was built without torch.distributed; install one that has it.")
    return dist


class _Bench:
    """One member of the group."""

    def __init__(self, dist: Any, rank: int, workers: int, *, busy: bool) -> None:
        import torch

        self.dist, self.torch, self.rank, self.workers = dist, torch, rank, workers
        self.busy = busy
        self.backend = str(dist.get_backend())
        self.device = "cpu"
        if self.backend == "nccl":
            self.device = f"cuda:{rank % torch.cuda.device_count()}"
            torch.cuda.set_device(self.device)
        self.shared_clock = len(set(self._gathered(_clock_of()))) == 1

    def table(
        self,
        sizes: Sequence[int],
        kinds: Sequence[CollectiveKind],
        repetitions: int,
        per_node: int,
        wanted_spread: float,
        progress: Progress | None,
    ) -> CollectiveTable:
        found: list[CollectiveSeries] = []
        missing: dict[str, str] = {}
        for at, kind in enumerate(kinds):
            reason = self._reason_against(kind)
            if reason:
                missing[str(kind)] = reason
                continue

            def tell(share: float, at: int = at) -> None:
                if progress is not None:
                    progress((at + share) / len(kinds))

            points = self._sweep(kind, sizes, repetitions, wanted_spread, tell)
            found.append(
                series_of("the measurement", kind=kind, workers=self.workers, per_node=per_node, points=points)
            )
        return table_of(
            f"{self.backend} here",
            found,
            backend=self.backend,
            device=self.torch.cuda.get_device_name(self.device) if self.device != "cpu" else "cpu",
            measured=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
            repetitions=repetitions,
            missing=missing,
        )

    def _sweep(
        self,
        kind: CollectiveKind,
        sizes: Sequence[int],
        repetitions: int,
        wanted_spread: float,
        tell: Progress,
    ) -> list[tuple[float, float, float]]:
        best: dict[int, tuple[float, float]] = {}
        left = list(sizes)
        settle = self._call(kind, sizes[0])
        for round_ in range(_ROUNDS):
            calls = {size: self._call(kind, size) for size in left}
            samples: dict[int, list[tuple[float, float]]] = {size: [] for size in left}
            with no_collection():
                for repetition in range(-2, repetitions):  # two warm up connections and memory
                    for size in left:
                        settle()  # a small one, so that the tail of a large one is in nobody's time
                        stamps = self._timed(calls[size])
                        if repetition >= 0:
                            samples[size].append(stamps)
                    tell((round_ + max(repetition, 0) / repetitions) / _ROUNDS)
            times = self._durations(samples)
            for size in left:
                kept = _robust(times[size])
                if size not in best or kept[1] < best[size][1]:
                    best[size] = kept
            left = [size for size in left if best[size][1] > wanted_spread]  # the same on every member
            if not left:
                break
        return [(float(self._call_bytes(kind, size)), *best[size]) for size in sizes]

    def _timed(self, call: Callable[[], object]) -> tuple[float, float]:
        self.dist.barrier()
        if self.busy:
            call()
        start = time.perf_counter()
        call()
        if self.device != "cpu":
            self.torch.cuda.synchronize()
        return start, time.perf_counter()

    def _durations(self, samples: dict[int, list[tuple[float, float]]]) -> dict[int, NDArray[np.float64]]:
        """Return seconds of every repetition, from the stamps of all members."""
        mine = self.torch.tensor([samples[size] for size in samples], dtype=self.torch.float64, device=self.device)
        everyone = [self.torch.empty_like(mine) for _ in range(self.workers)]
        self.dist.all_gather(everyone, mine)
        stamps = np.stack([each.cpu().numpy() for each in everyone])  # member, size, repetition, start or end
        if self.shared_clock:
            seconds = stamps[..., 1].max(axis=0) - stamps[..., 0].max(axis=0)
        else:
            seconds = (stamps[..., 1] - stamps[..., 0]).max(axis=0)
        return {size: np.maximum(seconds[at], 1e-9) for at, size in enumerate(samples)}

    def _call_bytes(self, kind: CollectiveKind, size: int) -> int:
        """Return the size rounded up to what can be split among the members."""
        unit = _WORD_BYTES * (self.workers if kind in _SPLIT else 1)
        return -(-size // unit) * unit

    def _call(self, kind: CollectiveKind, size: int) -> Callable[[], object]:
        dist, torch, rank, workers = self.dist, self.torch, self.rank, self.workers
        words = self._call_bytes(kind, size) // _WORD_BYTES
        whole = torch.zeros(words, dtype=torch.float32, device=self.device)  # sums of zeros never overflow
        if kind == CollectiveKind.ALL_REDUCE:
            return lambda: dist.all_reduce(whole)
        if kind == CollectiveKind.BROADCAST:
            return lambda: dist.broadcast(whole, src=0)
        if kind == CollectiveKind.REDUCE:
            return lambda: dist.reduce(whole, dst=0)
        if kind == CollectiveKind.SEND:
            if rank > 1:
                return lambda: None
            return (lambda: dist.send(whole, dst=1)) if rank == 0 else (lambda: dist.recv(whole, src=0))
        part = torch.zeros(words // workers, dtype=torch.float32, device=self.device)
        if kind == CollectiveKind.ALL_GATHER:
            gather = _renamed(dist, "all_gather_single", "all_gather_into_tensor")
            return lambda: gather(whole, part)
        if kind == CollectiveKind.REDUCE_SCATTER:
            scatter = _renamed(dist, "reduce_scatter_single", "reduce_scatter_tensor")
            return lambda: scatter(part, whole)
        other = torch.empty_like(whole)
        return lambda: dist.all_to_all_single(other, whole)

    def _reason_against(self, kind: CollectiveKind) -> str:
        """Return why the backend cannot do this, "" where it can; the same on every member."""
        reason = ""
        try:
            self._call(kind, _WORD_BYTES * self.workers)()
        except (RuntimeError, NotImplementedError) as error:
            text = str(error).strip().splitlines()
            reason = f"{self.backend} has no {kind}: {text[0] if text else type(error).__name__}"
        return next((each for each in self._gathered(reason) if each), "")

    def _gathered(self, mine: str) -> list[str]:
        found: list[Any] = [None] * self.workers
        self.dist.all_gather_object(found, mine)
        return [str(each) for each in found]


_SPLIT = (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)


def _renamed(dist: Any, name: str, before: str) -> Callable[..., object]:
    """Return a function that newer versions of PyTorch call otherwise, and warn of by its old name."""
    found: Callable[..., object] = getattr(dist, name, None) or getattr(dist, before)
    return found


def _clock_of() -> str:
    """Return the same text in processes whose `perf_counter` counts from the same moment; else one of its own."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text(encoding="ascii").strip() if boot.exists() else f"process {time.time_ns()}"


def _robust(times: NDArray[np.float64]) -> tuple[float, float]:
    """Return the median of the repetitions without their slowest fifth, and their quartile distance relative to it."""
    kept = np.sort(times)[: max(len(times) - int(_SLOWEST_DROPPED * len(times)), 1)]
    low, middle, high = np.quantile(kept, [0.25, 0.5, 0.75])
    return float(middle), float((high - low) / middle)
