"""Load for a server of the Open Inference Protocol: when requests are sent, and what becomes of them.

In an open loop requests are sent when they are due, however slow the server is, and a latency counts from that moment:
a stall of the server or of this generator shows in every request that it held up (Tene, "How NOT to Measure Latency").
In a closed loop so many clients wait for one answer before they ask again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError, MissingExtraError
from foretrace.serving.requests import column, moment, read_rows
from foretrace.serving.server.protocol import DATATYPES, HEADER_LENGTH, ModelMetadata

if TYPE_CHECKING:
    from aiohttp import ClientSession

PATTERNS = ("constant", "poisson", "diurnal")
_DAY = (0.25, 0.5, 1.0, 0.5, 0.25)  # Packrat's diurnal load, 8, 16, 32, 16, 8: shares of the peak in fifths of the time
_COLUMNS = ("arrival_s", "arrived_at", "arrival", "timestamp")
_MOST = 10_000_000  # requests of one run
_BODIES = 8  # different ones, sent in turns
_KEPT_S = 2.0  # that an idle connection is kept: servers close theirs later


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """What became of the requests. Latencies are those of answers with status 200."""

    model: str
    seconds: float  # from the first to the last answer
    sent: int
    statuses: Mapping[str, int]  # "200", "429", ..., "no connection", "timeout"
    latency_s: Float64 = field(repr=False)  # (answers,), sorted
    late_s: float  # 99th percentile of how late this generator sent; large means that it could not keep up


def arrivals(pattern: str, *, rate: float, seconds: float, seed: int = 0) -> Float64:
    """Return (requests,) seconds from the start at which requests are due.

    `pattern` is constant, poisson, diurnal (`rate` is the peak's) or a CSV file with a column of arrivals,
    of which the first `seconds` are used. Raises ForetraceError.
    """
    if pattern not in PATTERNS:
        recorded = _recorded(Path(pattern))
        return recorded[recorded < seconds]
    if rate * seconds > _MOST:
        raise ForetraceError(f"`rate={rate:g}` for {seconds:g} s must be at most {_MOST:,} requests; take fewer.")
    if pattern == "poisson":
        draws = np.random.default_rng(seed)
        count = draws.poisson(rate * seconds)  # given their number, the times are uniform
        return np.sort(draws.uniform(0, seconds, count))
    parts = _DAY if pattern == "diurnal" else (1.0,)
    span = seconds / len(parts)
    return np.concatenate(
        [i * span + np.arange(int(rate * each * span)) / (rate * each) for i, each in enumerate(parts)]
    )


def _recorded(path: Path) -> Float64:
    """Return arrivals in a file, from 0 on. Raises ForetraceError."""
    rows = read_rows(path)
    names = {each.strip().lower(): each for each in rows[0]}
    name = next((names[each] for each in _COLUMNS if each in names), None)
    if name is None:
        raise ForetraceError(f"{path} must have a column of arrivals; call it {' or '.join(_COLUMNS)}.")
    found = column(path, rows, name, moment)
    if not np.isfinite(found).all() or (np.diff(found) < 0).any() or len(found) > _MOST:
        raise ForetraceError(f"{path}: arrivals must be at most {_MOST:,} numbers in order, none NaN; sort them.")
    found -= found[0]
    return found


def load(
    url: str, *, due: Float64 | None = None, clients: int = 0, seconds: float = 10.0, diurnal: bool = False,
    samples: int = 1, token: str = "", timeout_s: float = 60.0, seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> LoadResult:  # fmt: skip
    """Send requests when they are `due` (open loop), or from so many clients (closed loop) for `seconds`.

    Every request holds `samples` random samples of the model that the URL names, else of the first one that is served.
    Raises ForetraceError where the server does not answer, or has no such model; MissingExtraError without aiohttp.
    """
    try:
        import aiohttp
    except ImportError:
        raise MissingExtraError("load needs aiohttp, which is not installed: pip install 'foretrace[serve]'") from None

    async def run() -> LoadResult:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            headers={"Authorization": f"Bearer {token}"} if token else {},
        ) as session:
            try:
                base, about = await _described(session, url)
            except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError):
                raise ForetraceError(f"{url[:80]} must be a URL; write http://127.0.0.1:8000.") from None
            except (aiohttp.ClientConnectionError, TimeoutError) as error:
                raise ForetraceError(f"{url} does not answer ({error}); is a server running there?") from None
            except (aiohttp.ClientError, ValueError, AttributeError) as error:
                raise ForetraceError(
                    f"{url} does not speak the Open Inference Protocol ({error}); name one that does."
                ) from None
            bodies = _bodies(about, samples, seed)

            async def ask(number: int) -> str:
                """Return the status of a request, once its answer is here."""
                body, headers = bodies[number % len(bodies)]
                try:
                    async with session.post(f"{base}/infer", data=body, headers=headers) as answered:
                        await answered.read()
                    return str(answered.status)
                except TimeoutError:
                    return "timeout"
                except aiohttp.ClientError:
                    return "no connection"

            return await _load(ask, about.name, due, clients, seconds, diurnal, progress)

    return asyncio.run(run())


async def _load(
    ask: Callable[[int], Any], model: str, due: Float64 | None, clients: int, seconds: float, diurnal: bool,
    progress: Callable[[float], None] | None,
) -> LoadResult:  # fmt: skip
    loop = asyncio.get_running_loop()
    statuses, latencies, late, sent = Counter[str](), list[float](), list[float](), 0
    began = loop.time()

    async def one(due_s: float) -> None:
        nonlocal sent
        sent += 1
        late.append(loop.time() - due_s)
        status = await ask(sent)
        statuses[status] += 1
        if status == "200":
            latencies.append(loop.time() - due_s)

    async def waiting_client(share: float) -> None:
        """Run a client of a closed loop, which is there for the parts of the day that need so many."""
        while (now := loop.time()) < began + seconds and sent < _MOST:
            part = int((now - began) / seconds * len(_DAY))
            if diurnal and _DAY[part] <= share:
                await asyncio.sleep(0.01)
            else:
                await one(now)

    async def watch() -> None:
        while progress is not None:
            progress(min((loop.time() - began) / max(seconds, 1e-9), 1.0))
            await asyncio.sleep(0.2)

    watching = asyncio.create_task(watch())
    async with asyncio.TaskGroup() as asked:
        for i in range(clients if due is None else 0):
            asked.create_task(waiting_client(i / clients))
        for each in [] if due is None else due.tolist():
            await asyncio.sleep(max(began + each - loop.time(), 0))
            asked.create_task(one(began + each))
    watching.cancel()
    return LoadResult(
        model=model, seconds=loop.time() - began, sent=sent, statuses=dict(statuses),
        latency_s=np.sort(np.array(latencies)), late_s=float(np.quantile(late, 0.99)) if late else 0.0,
    )  # fmt: skip


async def _described(session: ClientSession, url: str) -> tuple[str, ModelMetadata]:
    """Return where the model is, and what it takes."""
    root, _, path = (url if "://" in url else f"http://{url}").rstrip("/").partition("/v2/models/")
    name = path.partition("/")[0]
    if not name:
        async with session.get(f"{root}/v2") as answered:
            name = (msgspec.json.decode(await answered.read()).get("models") or [""])[0]
    if not name:
        raise ForetraceError(f"{url} does not say what it serves; name it: {root}/v2/models/NAME.")
    async with session.get(f"{root}/v2/models/{name}") as answered:
        if answered.status != 200:
            raise ForetraceError(
                f"{url} answers {answered.status} when asked for the model {name}; is it served there?"
            )
        return f"{root}/v2/models/{name}", msgspec.json.decode(await answered.read(), type=ModelMetadata)


def _bodies(about: ModelMetadata, samples: int, seed: int) -> Sequence[tuple[bytes, Mapping[str, str]]]:
    """Return random samples as binary tensors: normal numbers, and zeros and ones for integers, which every
    table has.
    """
    names, draws = {word: name for name, word in DATATYPES.items()}, np.random.default_rng(seed)
    found = list[tuple[bytes, Mapping[str, str]]]()
    for _ in range(_BODIES):
        tensors, behind = list[dict[str, Any]](), list[bytes]()
        for each in about.inputs:
            if each.datatype not in names:
                raise ForetraceError(f"input {each.name} must be numbers, got {each.datatype}; choose another model.")
            shape, kind = [samples, *(max(size, 1) for size in each.shape[1:])], np.dtype(names[each.datatype])
            drawn = draws.standard_normal(shape) if kind.kind == "f" else draws.integers(0, 2, shape)
            behind.append(drawn.astype(kind).tobytes())
            tensors.append(
                {"name": each.name, "shape": shape, "datatype": each.datatype,
                 "parameters": {"binary_data_size": len(behind[-1])}}
            )  # fmt: skip
        head = msgspec.json.encode({"inputs": tensors, "parameters": {"binary_data_output": True}})
        headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(head))}
        found.append((b"".join([head, *behind]), headers))
    return found
