"""`LoaderWatch`: settings and cost of the data loaders that a run iterates.

The trace shows how long the training thread waited in `DataLoader.__next__`, but never the loader's worker
processes; what a batch costs them is what decides a what-if on workers.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any


class LoaderWatch:
    """Times every `DataLoader.__next__` of this process between `install` and `remove` (about 30 µs each)."""

    def __init__(self) -> None:
        self._original: Any = None
        self._wrapper: Any = None
        self._thread = threading.get_ident()
        self._loaders: dict[int, _Loader] = {}
        self._step = [0, 0, 0, 0]

    def install(self) -> None:
        """Wrap `__next__` of PyTorch's loader iterators, also of those which already run."""
        base = _iterator_class()
        original = base.__next__

        def __next__(iterator: Any) -> Any:
            queued, wall, cpu = _queued(), time.perf_counter_ns(), time.thread_time_ns()
            try:
                return original(iterator)
            finally:
                if self._original is not None:
                    spent = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
                    self._saw(iterator, *spent, _queued() - queued)

        self._original, self._wrapper = original, __next__
        base.__next__ = __next__

    def remove(self) -> None:
        """Undo `install`."""
        base = _iterator_class()
        # If somebody wrapped it after us, our wrapper must stay below theirs; it then only passes through.
        if self._original is not None and base.__next__ is self._wrapper:
            base.__next__ = self._original
        self._original = None
        for loader in self._loaders.values():
            loader.sampler = None  # it holds the data set

    def take_step(self) -> dict[str, int]:
        """Return batches that the step's thread took since the last call; ns of wall, CPU, waiting for a core."""
        batches, wall, cpu, queued = self._step
        self._step = [0, 0, 0, 0]
        if not batches:
            return {}
        return {"batches": batches, "loader_wall_ns": wall, "loader_cpu_ns": cpu, "loader_queued_ns": queued}

    def sample_workers(self) -> None:
        """Read the CPU clocks of live worker processes (about 10 µs each; Linux only)."""
        for loader in self._loaders.values():
            for pid in loader.workers:
                now = _schedstat(pid)
                if now is not None:
                    loader.clocks.setdefault(pid, (now, now))
                    loader.clocks[pid] = (loader.clocks[pid][0], now)
            loader.sampled = loader.batches

    def facts(self) -> list[dict[str, Any]]:
        """Return one dictionary per loader, in the order in which they were first iterated."""
        return [loader.facts() for loader in self._loaders.values()]

    def _saw(self, iterator: Any, wall: int, cpu: int, queued: int) -> None:
        own = threading.get_ident() == self._thread
        if own:
            self._step[0] += 1
            self._step[1] += wall
            self._step[2] += cpu
            self._step[3] += queued
        sampler = getattr(iterator, "_index_sampler", None)  # one object per loader, over all its epochs
        loader = self._loaders.get(id(sampler))
        if loader is None:
            loader = self._loaders[id(sampler)] = _Loader(iterator, sampler, own)
        loader.saw(iterator)


class _Loader:
    """One `DataLoader`: its settings and what its workers used."""

    def __init__(self, iterator: Any, sampler: Any, own_thread: bool) -> None:
        self.sampler: Any = sampler  # kept alive, so that its id stays its own
        self.batches = 0
        self.sampled = 0
        self.sampled_from = 0
        self.workers: tuple[int, ...] = ()
        self.clocks: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}
        self._iterator_id = 0
        processes = getattr(iterator, "_workers", ())
        workers = int(getattr(iterator, "_num_workers", 0))
        self.settings: dict[str, Any] = {
            "dataset": type(getattr(iterator, "_dataset", None)).__name__,
            "num_workers": workers,
            "batch_size": getattr(sampler, "batch_size", None),
            "prefetch_factor": getattr(iterator, "_prefetch_factor", None) if workers else None,
            "persistent_workers": bool(getattr(iterator, "_persistent_workers", False)),
            "pin_memory": bool(getattr(iterator, "_pin_memory", False)),
            "start_method": _start_method(processes[0]) if processes else None,
            "read_by_step_thread": own_thread,
        }

    def saw(self, iterator: Any) -> None:
        self.batches += 1
        if id(iterator) != self._iterator_id:
            self._iterator_id = id(iterator)
            self.workers = tuple(p.pid for p in getattr(iterator, "_workers", ()) if p.pid)
            for pid in self.workers:
                now = _schedstat(pid)
                if now is not None:
                    self.clocks.setdefault(pid, (now, now))
            self.sampled_from = self.sampled_from or self.batches

    def facts(self) -> dict[str, Any]:
        facts = {**self.settings, "batches": self.batches}
        if self.clocks:
            facts["workers"] = {
                "processes": len(self.clocks),
                "batches": self.sampled - self.sampled_from,
                "cpu_ns": sum(last[0] - first[0] for first, last in self.clocks.values()),
                "queued_ns": sum(last[1] - first[1] for first, last in self.clocks.values()),
            }
        return facts


def _iterator_class() -> Any:
    """Return what all of PyTorch's loader iterators inherit `__next__` from."""
    from torch.utils.data import dataloader

    return dataloader._BaseDataLoaderIter


def _start_method(process: Any) -> str:
    name = type(process).__name__.removesuffix("Process").lower()  # ForkProcess, SpawnProcess, ...
    return name or multiprocessing.get_start_method()


def _queued() -> int:
    """Return the time that this thread waited for a core since it began, in ns; 0 where that is unknown (not Linux)."""
    return (_schedstat("thread-self") or (0, 0))[1]


def _schedstat(pid: int | str) -> tuple[int, int] | None:
    """Return CPU time and time waited for a core of a process's main thread, in ns; None if unknown."""
    try:
        cpu, queued, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return int(cpu), int(queued)
