"""Load for a server of the Open Inference Protocol: when requests are sent, and what becomes of them.

In an open loop requests are sent when they are due, however slow the server is, and a latency counts from that moment:
a stall of the server or of this generator shows in every request that it held up (Tene, "How NOT to Measure Latency").
In a closed loop so many clients wait for one answer before they ask again.
"""

from __future__ import annotations

import asyncio
import csv
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError
from foretrace.reading import read_text
from foretrace.serving.server.client import HttpClient
from foretrace.serving.server.protocol import DATATYPES, HEADER_LENGTH, ModelMetadata

PATTERNS = ("constant", "poisson", "diurnal")
_DAY = (0.25, 0.5, 1.0, 0.5, 0.25)  # Packrat's diurnal load, 8, 16, 32, 16, 8: shares of the peak in fifths of the time
_COLUMNS = ("arrival_s", "arrived_at", "arrival", "timestamp")
_MOST = 10_000_000  # requests of one run
_BODIES = 8  # different ones, sent in turns


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """What became of the requests. Latencies are those of answers with status 200."""

    model: str
    open_loop: bool
    seconds: float  # from the first to the last answer
    sent: int
    statuses: Mapping[str, int]  # "200", "429", ..., "no connection", "timeout"
    latency_s: Float64 = field(repr=False)  # (answers,), sorted
    late_s: float  # 99th percentile of how late this generator sent; large means that it could not keep up


def arrivals(pattern: str, *, rate: float, seconds: float, seed: int = 0) -> Float64:
    """(requests,) seconds from the start at which requests are due.

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


def load(
    url: str,
    *,
    due: Float64 | None = None,
    clients: int = 0,
    seconds: float = 10.0,
    diurnal: bool = False,
    samples: int = 1,
    model: str = "",
    token: str = "",
    timeout_s: float = 60.0,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> LoadResult:
    """Send requests when they are `due` (open loop), or from so many clients (closed loop) for `seconds`.

    Every request holds `samples` random samples. Raises ForetraceError where the server does not answer, or has no such
    model.
    """
    return asyncio.run(_load(url, due, clients, seconds, diurnal, samples, model, token, timeout_s, seed, progress))


async def _load(
    url: str, due: Float64 | None, clients: int, seconds: float, diurnal: bool, samples: int, model: str, token: str,
    timeout_s: float, seed: int, progress: Callable[[float], None] | None,
) -> LoadResult:  # fmt: skip
    client = HttpClient(url, token=token)
    name, bodies = await _requests(client, url, model, samples, seed)
    path = f"/v2/models/{name}/infer"
    loop = asyncio.get_running_loop()
    statuses, latencies, late, sent = Counter[str](), list[float](), list[float](), 0

    async def one(due_s: float) -> None:
        nonlocal sent
        body, headers = bodies[sent % len(bodies)]
        sent += 1
        late.append(loop.time() - due_s)
        try:
            async with asyncio.timeout(timeout_s):
                answered = await client.request("POST", path, body, headers)
            status = str(answered.status)
        except TimeoutError:
            status = "timeout"
        except (OSError, EOFError, ValueError):
            status = "no connection"
        statuses[status] += 1
        if status == "200":
            latencies.append(loop.time() - due_s)

    began = loop.time()

    async def waiting_client(share: float) -> None:
        """A client of a closed loop, which is there for the parts of the day that need so many."""
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
    if due is None:
        await asyncio.gather(*(waiting_client(i / clients) for i in range(clients)))
    else:
        asked = set[asyncio.Task[None]]()
        for each in due.tolist():
            await asyncio.sleep(max(began + each - loop.time(), 0))
            task = asyncio.create_task(one(began + each))
            asked.add(task)
            task.add_done_callback(asked.discard)
        await asyncio.gather(*asked)
    watching.cancel()
    client.close()
    return LoadResult(
        model=name, open_loop=due is not None, seconds=loop.time() - began, sent=sent, statuses=dict(statuses),
        latency_s=np.sort(np.array(latencies)), late_s=float(np.quantile(late, 0.99)) if late else 0.0,
    )  # fmt: skip


async def _requests(
    client: HttpClient, url: str, model: str, samples: int, seed: int
) -> tuple[str, Sequence[tuple[bytes, Mapping[str, str]]]]:
    """The model's name, and bodies with headers for it. Raises ForetraceError."""
    try:
        name = model or client.path.partition("/v2/models/")[2].partition("/")[0]
        if not name:
            listed = msgspec.json.decode((await client.request("GET", "/v2")).body).get("models") or [""]
            name = listed[0]
        if not name:
            raise ForetraceError(f"{url} does not say what it serves; give `model=NAME`.")
        answered = await client.request("GET", f"/v2/models/{name}")
        if answered.status != 200:
            raise ForetraceError(
                f"{url} answers {answered.status} when asked for the model {name}; is it served there?"
            )
        about = msgspec.json.decode(answered.body, type=ModelMetadata)
    except (OSError, EOFError) as error:
        raise ForetraceError(f"{url} does not answer ({error}); is a server running there?") from None
    except (ValueError, AttributeError) as error:
        raise ForetraceError(
            f"{url} does not speak the Open Inference Protocol ({error}); name one that does."
        ) from None
    draws = np.random.default_rng(seed)
    return name, [_body(about, samples, draws) for _ in range(_BODIES)]


def _body(about: ModelMetadata, samples: int, draws: np.random.Generator) -> tuple[bytes, Mapping[str, str]]:
    """Random samples as binary tensors: normal numbers, and zeros and ones for integers, which every table has."""
    names = {word: name for name, word in DATATYPES.items()}
    tensors, behind = list[dict[str, Any]](), list[bytes]()
    for each in about.inputs:
        if each.datatype not in names:
            raise ForetraceError(f"input {each.name} must be numbers, got {each.datatype}; choose another model.")
        shape = [samples, *(max(size, 1) for size in each.shape[1:])]
        kind = np.dtype(names[each.datatype])
        drawn = draws.standard_normal(shape) if kind.kind == "f" else draws.integers(0, 2, shape)
        behind.append(drawn.astype(kind).tobytes())
        tensors.append(
            {"name": each.name, "shape": shape, "datatype": each.datatype,
             "parameters": {"binary_data_size": len(behind[-1])}}
        )  # fmt: skip
    head = msgspec.json.encode({"inputs": tensors, "parameters": {"binary_data_output": True}})
    return b"".join([head, *behind]), {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(head))}


def _recorded(path: Path) -> Float64:
    """Arrivals in a CSV file, from 0 on. Raises ForetraceError."""
    rows = csv.DictReader(read_text(path, mend=f"give a CSV file, or {', '.join(PATTERNS)}").splitlines())
    columns = {each.strip().lower(): each for each in rows.fieldnames or ()}
    column = next((columns[each] for each in _COLUMNS if each in columns), None)
    if column is None:
        raise ForetraceError(f"{path} must have a column of arrivals; call it {' or '.join(_COLUMNS)}.")
    found: Float64 = np.array(list(_times(path, column, rows)))
    if not len(found) or not np.isfinite(found).all() or (np.diff(found) < 0).any() or len(found) > _MOST:
        raise ForetraceError(f"{path}: arrivals must be at most {_MOST:,} numbers in order, none NaN; sort them.")
    found -= found[0]
    return found


def _times(path: Path, column: str, rows: csv.DictReader[str]) -> Iterator[float]:
    for number, row in enumerate(rows, 2):
        text = (row[column] or "").strip()
        try:
            yield (
                float(text) if text[:1].isdigit() and "-" not in text[:8] else datetime.fromisoformat(text).timestamp()
            )
        except ValueError:
            raise ForetraceError(
                f"{path} line {number}: {text[:40]!r} is no time; give seconds, or ISO 8601."
            ) from None
