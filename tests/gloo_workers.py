"""Real gloo processes on this machine for tests: a function of a module, run by every worker."""

from __future__ import annotations

import pickle
import queue
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing as mp


def together(function: Callable[..., Any], workers: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """What `function(rank, *args)` returns on every worker; fails the test where one dies or time is up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([])  # and what conftest.py adds
    answers: Any = context.Queue()
    processes = [
        context.Process(target=_work, args=(function, rank, workers, port, answers, args), daemon=True)
        for rank in range(workers)
    ]
    for each in processes:
        each.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < workers:
            rank, result, error = answers.get(timeout=timeout_s)
            assert not error, f"worker {rank}: {error}"
            found[rank] = pickle.loads(result)
    except queue.Empty:
        pytest.fail(f"{workers - len(found)} of {workers} workers gave no answer in {timeout_s:g} s")
    finally:
        for each in processes:
            each.join(timeout=5 if len(found) == workers else 0)
            if each.is_alive():
                each.kill()
                each.join()
    return [found[rank] for rank in range(workers)]


def _work(
    function: Callable[..., Any], rank: int, workers: int, port: int, answers: Any, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=workers,
            timeout=timedelta(seconds=60),
        )
        result = function(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        answers.put((rank, pickle.dumps(result), ""))  # tensors by value: the sender may be gone when they are read
    except Exception as error:
        answers.put((rank, None, f"{type(error).__name__}: {error}"))
