"""Load for a server of the Open Inference Protocol: when requests are sent, and what becomes of them.

In an open loop requests are sent when they are due, however slow the server is, and a latency counts from that moment:
a stall of the server or of this generator shows in every request that it held up (Tene, "How NOT to Measure Latency").
In a closed loop so many clients wait for one answer before they ask again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError, needing
from foretrace.serving.requests import arrivals_in, requests
from foretrace.serving.server import protocol
from foretrace.serving.server.models import Array, said
from foretrace.serving.server.protocol import DATATYPES, InferRequest, ModelMetadata, RequestTensor

if TYPE_CHECKING:
    from aiohttp import ClientSession

_PATTERNS = ("constant", "poisson", "diurnal")
_MOST = 10_000_000  # requests of one run
_BODIES = 8  # different ones, sent in turns
_KEPT_S = 2.0  # that an idle connection is kept: servers close theirs later
_LONGEST_S = 60.0  # that an answer is waited for


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
    if pattern not in _PATTERNS:
        recorded = arrivals_in(Path(pattern))
        return recorded[recorded < seconds]
    if rate * seconds > _MOST:
        raise ForetraceError(f"`rate={rate:g}` for {seconds:g} s must be at most {_MOST:,} requests; take fewer.")
    return requests(f"{pattern} qps={rate!r}", seconds=seconds, seed=seed).arrival_s


def load(
    url: str, *, due: Float64 | None = None, clients: int = 0, seconds: float = 10.0, samples: int = 1, token: str = "",
    seed: int = 0, progress: Callable[[float], None] | None = None,
) -> LoadResult:  # fmt: skip
    """Send requests when they are `due` (open loop), or from so many clients (closed loop) for `seconds`.

    Every request holds `samples` random samples of the model that the URL names, else of the first one that is served.
    Raises ForetraceError where the server does not answer, or has no such model; MissingExtraError without aiohttp.
    """
    with needing("loading a server"):
        import aiohttp

    statuses, latencies, late = Counter[str](), list[float](), list[float]()

    async def run() -> LoadResult:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT_S),
            timeout=aiohttp.ClientTimeout(total=_LONGEST_S),
            headers={"Authorization": f"Bearer {token}"} if token else {},
        ) as session:
            try:
                base, about = await _described(session, url)
            except (aiohttp.ClientError, TimeoutError, ValueError, AttributeError) as error:
                raise ForetraceError(
                    f"{url[:80]} must be the address of a server of the Open Inference Protocol, as "
                    f"http://127.0.0.1:8000, got {said(error)}; is one running there?"
                ) from None
            draws = np.random.default_rng(seed)
            bodies = cycle([_body(about, samples, draws) for _ in range(_BODIES)])
            now = asyncio.get_running_loop().time
            began = now()

            async def ask(due_s: float) -> None:
                late.append(now() - due_s)
                body, headers = next(bodies)
                try:
                    async with session.post(f"{base}/infer", data=body, headers=headers) as answered:
                        await answered.read()
                    status = str(answered.status)
                except TimeoutError:
                    status = "timeout"
                except aiohttp.ClientError:
                    status = "no connection"
                statuses[status] += 1
                if status == "200":
                    latencies.append(now() - due_s)
                if progress is not None:
                    progress(min((now() - began) / seconds, 1.0))

            async def client() -> None:
                while now() < began + seconds and len(late) < _MOST:
                    await ask(now())

            async with asyncio.TaskGroup() as tasks:
                for _ in range(clients if due is None else 0):
                    tasks.create_task(client())
                for each in [] if due is None else due.tolist():
                    await asyncio.sleep(max(began + each - now(), 0))
                    tasks.create_task(ask(began + each))
            return LoadResult(
                model=about.name, seconds=now() - began, sent=len(late), statuses=dict(statuses),
                latency_s=np.sort(np.array(latencies)), late_s=float(np.quantile(late, 0.99)) if late else 0.0,
            )  # fmt: skip

    return asyncio.run(run())


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


def _body(about: ModelMetadata, samples: int, draws: np.random.Generator) -> tuple[bytes, dict[str, str]]:
    """Return a request with random samples: normal numbers, and zeros and ones for integers, which every table has."""
    kinds, behind = {word: name for name, word in DATATYPES.items()}, list[bytes]()
    tensors = list[RequestTensor]()
    for each in about.inputs:
        if each.datatype not in kinds:
            raise ForetraceError(f"input {each.name} must be numbers, got {each.datatype}; choose another model.")
        shape = [samples, *(max(size, 1) for size in each.shape[1:])]
        floats = each.datatype.startswith("FP")
        drawn: Array = draws.standard_normal(shape) if floats else draws.integers(0, 2, shape)
        tensors.append(protocol.as_tensor(RequestTensor, each.name, drawn.astype(kinds[each.datatype]), behind))
    return protocol.packed(InferRequest(inputs=tensors, parameters={"binary_data_output": True}), behind)
