"""Where independent work runs: in this process, on its cores, or on a Ray cluster.

The same function on the same items gives the same list everywhere, in the order of the items. A mistake that a
worker finds (ForetraceError) is raised here as if there were no worker; a worker that dies is an error, too.
"""

from __future__ import annotations

import copy
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, nullcontext, redirect_stdout
from multiprocessing import get_all_start_methods, get_context, parent_process
from multiprocessing.connection import wait
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from foretrace.errors import ForetraceError, needing
from foretrace.hardware.processor import usable_cores

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[float], None] | None

PLACES = ("here", "ray")
_ANSWER_S = 5.0  # a cluster answers sooner


def check_place(on: str) -> None:
    """Raise ForetraceError unless `on` is one of PLACES."""
    if on not in PLACES:
        raise ForetraceError(f"`on={on}` does not exist; choose {' or '.join(PLACES)}.")


def cores() -> int:
    """Return whole processor cores that this process may use, at least 1."""
    return max(int(usable_cores()), 1)


def map(  # called as executor.map
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    on: str = "here",
    pool: ProcessPool | bool = True,
    again: int = 0,
    progress: Progress = None,
) -> list[Result]:
    """Return `function` of every item, in their order; `progress` is called with the share of the items that are done.

    Args:
        function: of a module (workers import it); what it returns is pickled.
        items: independent of each other.
        on: "here" uses a process per core, "ray" the Ray cluster that this process is connected to, else the one
            that RAY_ADDRESS names or that runs on this machine, else one that is started for this call.
        pool: False where the work is too little to start processes for; "here" is then a plain loop. Those of
            `place`, where several calls follow each other.
        again: how often an item is begun again whose worker died.
        progress: see above.

    Raises:
        ForetraceError: the first one that a worker raised; a worker was killed; or Ray cannot be reached.
        MissingExtraError: "ray" where Ray is not installed.

    """
    check_place(on)
    if on == "ray":
        return _on_ray(function, items, again, progress)
    if pool and min(cores(), len(items)) > 1:
        with nullcontext(pool) if isinstance(pool, ProcessPool) else closing(ProcessPool()) as processes:
            return _in_pool(function, items, processes, again, progress)
    results = []
    for item in items:
        results.append(function(item))
        _tell(progress, len(results), len(items))
    return results


@contextmanager
def place(on: str) -> Iterator[ProcessPool]:
    """Keep what each call of `map` would start and stop by itself: processes, its `pool`; on "ray" the cluster."""
    check_place(on)
    with _cluster() if on == "ray" else nullcontext(), closing(ProcessPool()) as processes:
        yield processes


def _tell(progress: Progress, done: int, total: int) -> None:
    if progress is not None:
        progress(done / total)


def _died(done: int, total: int, what: str) -> ForetraceError:
    return ForetraceError(
        f"a worker process died after {done} of {total} parts ({what}); if memory ran out, keep fewer ranks or steps, "
        "else run it again."
    )


# --- processes of this machine -------------------------------------------------------------------------------


class ProcessPool:
    """Processes, started when they are first needed, and again after one of them died."""

    def __init__(self) -> None:
        self._running: ProcessPoolExecutor | None = None

    def started(self, module: str) -> ProcessPoolExecutor:
        """Return the processes, with `module` imported where that comes at no cost."""
        if self._running is None:
            # A fork server forks from a process without threads; a plain fork may copy a lock that nobody will release.
            method = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"
            context = get_context(method)
            if method == "forkserver":
                context.set_forkserver_preload([module])
            self._running = ProcessPoolExecutor(cores(), mp_context=context, initializer=_end_with_caller)
        return self._running

    def close(self) -> None:
        """Leave no process and no work behind."""
        if self._running is not None:
            self._running.shutdown(wait=True, cancel_futures=True)
            self._running = None


def _in_pool(
    function: Callable[[Item], Result], items: Sequence[Item], pool: ProcessPool, again: int, progress: Progress
) -> list[Result]:  # fmt: skip
    results: dict[int, Result] = {}
    for left in range(again, -1, -1):
        try:
            submit = pool.started(function.__module__).submit
            place = {submit(function, item): i for i, item in enumerate(items) if i not in results}
            for future in as_completed(place):
                results[place[future]] = future.result()
                _tell(progress, len(results), len(items))
            break
        except BrokenProcessPool:
            pool.close()
            if not left:
                raise _died(len(results), len(items), "killed, or unable to start") from None
        except BaseException:
            pool.close()
            raise
    return [results[i] for i in range(len(items))]


def how_ended(code: int | None) -> str:
    """Return how a process ended by its exit code, negative for a signal, in words for a sentence."""
    if code is None:
        return "answers no more"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _end_with_caller() -> None:
    """End this worker of a pool when the process that started it is gone; nobody else would."""
    caller = parent_process()
    assert caller is not None

    def watch() -> None:
        wait([caller.sentinel])
        os._exit(1)

    Thread(target=watch, daemon=True).start()


# --- Ray -----------------------------------------------------------------------------------------------------


def _on_ray(
    function: Callable[[Item], Result], items: Sequence[Item], again: int, progress: Progress
) -> list[Result]:  # fmt: skip
    with _cluster() as ray:
        # Unless asked otherwise, a worker that died is not retried: it would most likely die again.
        call = ray.remote(max_retries=again)(_call)
        place = {call.remote(function, item): i for i, item in enumerate(items)}
        results: dict[int, Result] = {}
        waiting = list(place)
        try:
            while waiting:
                (done,), waiting = ray.wait(waiting, num_returns=1)
                # Ray's objects lie in memory shared with the cluster, read-only, and go when it goes.
                results[place[done]] = copy.deepcopy(ray.get(done))
                del place[done]
                _tell(progress, len(results), len(items))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ForetraceError):
                raise error.cause from None
            raise
        except (ray.exceptions.WorkerCrashedError, ray.exceptions.OutOfMemoryError) as error:
            raise _died(len(results), len(items), type(error).__name__) from None
        except ray.exceptions.RayError as error:
            raise ForetraceError(
                f"the Ray cluster failed after {len(results)} of {len(items)} parts "
                f"({str(error).splitlines()[0] or type(error).__name__}); look at its logs, or use `on=here`."
            ) from None
        finally:
            for left in waiting:
                ray.cancel(left, force=True)
    return [results[i] for i in range(len(items))]


def _call(function: Callable[[Item], Result], item: Item) -> Result:
    # Read-only arrays, as Ray hands them over, would be other types to `njit`: each loop would be compiled once more.
    return function(copy.deepcopy(item))


@contextmanager
def _cluster() -> Iterator[Any]:
    """Connect to Ray; a connection that was made here is closed again."""
    # A private cluster tells nobody of itself, and leaves the accelerators of its tasks as they are.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with needing("`on=ray`"):
        ray: Any = importlib.import_module("ray")
    if ray.is_initialized():
        yield ray
        return
    with redirect_stdout(sys.stderr):  # Ray tells there of workers that died; standard output is for answers
        yield from _started(ray)


def _started(ray: Any) -> Iterator[Any]:
    try:
        ray.init(address=_address(), include_dashboard=False, log_to_driver=False, configure_logging=False)
    except (ConnectionError, OSError, RuntimeError, TimeoutError, ValueError) as error:
        raise ForetraceError(
            f"Ray cannot be started ({str(error).splitlines()[0] or type(error).__name__}); use `on=here`."
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _address() -> str:
    """Return where the cluster runs: as RAY_ADDRESS says, else as `ray start` left it on this machine, else "local".

    Ray itself tries for minutes to reach a cluster that is not there.
    """
    given = os.environ.get("RAY_ADDRESS", "")
    if given:
        if not _reachable(given):
            raise ForetraceError(f"no Ray cluster answers at RAY_ADDRESS={given}; correct it, or use `on=here`.")
        return given
    left = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    started = left.read_text(encoding="utf-8").strip() if left.is_file() else ""
    return started if started and _reachable(started) else "local"


def _reachable(address: str) -> bool:
    """Return whether something listens at host:port; what is no such address ("auto") is left for Ray to resolve."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return True
    try:
        with socket.create_connection((host, int(port)), timeout=_ANSWER_S):
            return True
    except (OSError, OverflowError):
        return False
