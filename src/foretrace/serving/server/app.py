"""The server's HTTP interface: health, metadata, inference, the split, metrics, and the description of all that."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from time import perf_counter
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from foretrace.errors import ForetraceError
from foretrace.serving.server import protocol
from foretrace.serving.server.dispatcher import Dispatcher, RequestError
from foretrace.serving.server.models import ModelFacts
from foretrace.serving.server.openapi import description
from foretrace.serving.server.protocol import Asked
from foretrace.serving.server.split import CoreSplit

_BODY_S = 30.0  # a client that takes longer to send a request is given up
_BODIES = 16  # times the largest body: what all bodies together may hold
_GONE = 499  # no status of HTTP: nobody reads it, but metrics count it
_LOCAL = ("127.0.0.1", "localhost", "[::1]")

Handler = Callable[[Request], Awaitable[Response]]
Write = Callable[[Asked, Any, ModelFacts], tuple[bytes, dict[str, str]]]


class SplitState(msgspec.Struct, kw_only=True):
    """What serves now. `samples_waiting` and `samples_running` add up to the queue of the estimator."""

    split: str
    changing: bool
    samples_waiting: int
    samples_running: int
    processes: list[int]


class SplitChange(msgspec.Struct, kw_only=True):
    """A split to change to, as 2x1:4."""

    split: str


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What a client may ask for."""

    deadline_s: float = 60.0  # of every request; a client may ask for less
    body_bytes: int = 64 << 20


class ServerApp:
    """Routes over a dispatcher. `app` is what an ASGI server runs."""

    def __init__(self, dispatcher: Dispatcher, *, limits: RequestLimits | None = None, token: str = "") -> None:
        self.dispatcher, self.limits, self.token = dispatcher, limits or RequestLimits(), token
        self.metrics = _Metrics(dispatcher)
        self._held = 0  # bytes of bodies
        model = "/v2/models/{name}"
        routes: list[tuple[str, str, Handler, bool]] = [
            ("GET", "/v2/health/live", self._live, True),
            ("GET", "/v2/health/ready", self._ready, True),
            ("GET", "/v2", self._server, False),
            ("GET", "/openapi.json", self._openapi, False),
            ("GET", "/metrics", self._metrics, False),
            ("GET", "/split", self._split, False),
            ("PUT", "/split", self._change, False),
            ("POST", "/predict", self._predict, False),
        ]
        for prefix in (model, f"{model}/versions/{{version}}"):
            routes += [
                ("GET", prefix, self._model, False),
                ("GET", f"{prefix}/ready", self._model_ready, False),
                ("POST", f"{prefix}/infer", self._infer, False),
            ]
        self.app = Starlette(
            routes=[Route(path, self._guarded(handler, open_), methods=[way]) for way, path, handler, open_ in routes],
            exception_handlers={HTTPException: _as_error},
        )

    # --- what surrounds every request

    def _guarded(self, handler: Handler, open_: bool) -> Handler:
        """Who may ask, what a refusal looks like, and how long it took."""

        async def guarded(request: Request) -> Response:
            began = perf_counter()
            try:
                if not open_:
                    self._authorise(request)
                response = await handler(request)
            except RequestError as error:
                response = _error(error.status, error.reason, error.retry_s)
            except ClientDisconnect:
                response = Response(status_code=_GONE)
            except Exception:
                logging.getLogger(__name__).exception("a bug of the server, in %s", request.url.path)
                response = _error(500, "a bug of the server, which its log tells more of.")
            if request.method == "POST":
                self.metrics.answered(response.status_code, perf_counter() - began)
            return response

        return guarded

    def _authorise(self, request: Request) -> None:
        """The token, where there is one; otherwise a name of this machine, which no foreign web page can claim."""
        if self.token:
            given = request.headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
                raise RequestError(401, "the request must have the header Authorization: Bearer TOKEN, with the token.")
        elif request.headers.get("host", "").rpartition(":")[0] not in _LOCAL and (
            request.headers.get("host") not in _LOCAL
        ):
            raise RequestError(403, "without a token the server answers to 127.0.0.1 and localhost alone.")

    async def _body(self, request: Request) -> bytes:
        """All of a body that is not too large and does not come too slowly; `held` is what it adds to `_held`."""
        request.state.held = 0
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestError(415, "the body must not be compressed.")
        pieces, size, most = list[bytes](), 0, self.limits.body_bytes
        try:
            async with asyncio.timeout(_BODY_S):
                async for piece in request.stream():
                    size += len(piece)
                    self._held += len(piece)
                    if size > most:
                        raise RequestError(413, f"the body must have at most {most} bytes.")
                    if self._held > _BODIES * most:
                        raise RequestError(429, "too many bytes of requests are held at once.", 1)
                    pieces.append(piece)
        except TimeoutError:
            raise RequestError(408, f"the body did not come within {_BODY_S:g} s.") from None
        finally:
            request.state.held = size
        return b"".join(pieces)

    @property
    def _facts(self) -> ModelFacts:
        facts = self.dispatcher.facts
        if facts is None:
            raise RequestError(503, "no model is loaded yet.", 1)
        return facts

    # --- routes

    async def _live(self, _: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, _: Request) -> Response:
        ready = self.dispatcher.ready
        return _json({"ready": ready}, 200 if ready else 503, {} if ready else {"retry-after": "1"})

    async def _server(self, _: Request) -> Response:
        return _json(
            {
                "name": "foretrace",
                "version": version("foretrace"),
                "extensions": ["binary_tensor_data"],
                "models": [self._facts.name],
            }
        )

    async def _openapi(self, _: Request) -> Response:
        return _json(description(self._facts, SplitState, SplitChange))

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _model(self, request: Request) -> Response:
        self._check_name(request)
        return _json(protocol.metadata(self._facts))

    async def _model_ready(self, request: Request) -> Response:
        self._check_name(request)
        return await self._ready(request)

    async def _infer(self, request: Request) -> Response:
        self._check_name(request)
        return await self._answered(
            request,
            lambda body, facts: protocol.read_infer(body, request.headers.get(protocol.HEADER_LENGTH), facts),
            protocol.write_infer,
        )

    async def _predict(self, request: Request) -> Response:
        return await self._answered(
            request, protocol.read_plain, lambda asked, found, _: protocol.write_plain(asked, found)
        )

    async def _split(self, _: Request) -> Response:
        dispatcher = self.dispatcher
        active = dispatcher.active
        return _json(
            SplitState(
                split=active.split.text if active else "",
                changing=dispatcher.changing,
                samples_waiting=dispatcher.waiting,
                samples_running=dispatcher.running,
                processes=sorted(each.pid for each in active.alive) if active else [],
            )
        )

    async def _change(self, request: Request) -> Response:
        try:
            wanted = msgspec.json.decode(await self._body(request), type=SplitChange)
            split = CoreSplit.parse(wanted.split)
            if split.batch > self.dispatcher.limit:
                raise ForetraceError(f"a split must run at most {self.dispatcher.limit} samples at once.")
            if self.dispatcher.changing:
                raise RequestError(409, "another split is being started; ask again when it serves.", 1)
            await self.dispatcher.reconfigure(split)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RequestError(400, f'the body must be as {{"split": "2x1:4"}}: {error}.') from None
        except ForetraceError as error:
            raise RequestError(422, str(error)) from None
        finally:
            self._held -= request.state.held
        return await self._split(request)

    # --- helpers

    async def _answered(
        self, request: Request, read: Callable[[bytes, ModelFacts], Asked], write: Write
    ) -> Response:  # fmt: skip
        """Read a request, wait for its answer for as long as the client does, and write it."""
        facts = self._facts
        try:
            asked = read(await self._body(request), facts)
            deadline_s = min(asked.deadline_s or self.limits.deadline_s, self.limits.deadline_s)
            serving = asyncio.ensure_future(self.dispatcher.infer(asked.inputs, deadline_s))
            leaving = asyncio.ensure_future(request.receive())  # after the body: the client has left
            try:
                await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not serving.done():
                    raise ClientDisconnect
                body, headers = write(asked, serving.result(), facts)
            finally:
                for each in (serving, leaving):
                    each.cancel()
                    with suppress(asyncio.CancelledError, RequestError):
                        await each
        finally:
            self._held -= request.state.held
        return Response(body, headers=headers)

    def _check_name(self, request: Request) -> None:
        name, version = request.path_params["name"], request.path_params.get("version", protocol.VERSION)
        if (name, version) != (self._facts.name, protocol.VERSION):
            raise RequestError(404, f"the model is {self._facts.name}, version {protocol.VERSION}.")


class _Metrics(Collector):
    """Counts and times for Prometheus."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher, self.registry = dispatcher, CollectorRegistry()
        kept, sizes = self.registry, [float(1 << i) for i in range(11)]
        self._requests = Counter("foretrace_requests", "Requests by status.", ["status"], registry=kept)
        self._seconds = Histogram("foretrace_request_seconds", "Time to answer a request.", registry=kept)
        self._batch = Histogram(
            "foretrace_batch_samples", "Samples that an instance ran at once.", buckets=sizes, registry=kept
        )
        self._run = Histogram("foretrace_batch_seconds", "Time of the model for these.", registry=kept)
        dispatcher.tally.batch = self._ran
        self.registry.register(self)

    def answered(self, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(str(status)).inc()
        self._seconds.observe(seconds)

    def _ran(self, samples: int, seconds: float) -> None:
        self._batch.observe(samples)
        self._run.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """What the dispatcher counts itself."""
        now = self._dispatcher
        tally = now.tally
        samples = GaugeMetricFamily("foretrace_samples", "Samples in the server.", labels=["state"])
        samples.add_metric(["waiting"], now.waiting)
        samples.add_metric(["running"], now.running)
        yield samples
        alive = len(now.active.alive) if now.active else 0
        yield GaugeMetricFamily("foretrace_instances", "Processes that run the model.", value=alive)
        yield CounterMetricFamily("foretrace_worker_deaths", "Processes that died at work.", value=tally.deaths)
        yield CounterMetricFamily("foretrace_retries", "Parts of requests that were run again.", value=tally.retries)
        yield CounterMetricFamily("foretrace_reconfigurations", "Changes of the split.", value=tally.reconfigurations)


def _json(answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(answer), status, headers, "application/json")


def _error(status: int, reason: str, retry_s: int | None = None) -> Response:
    """As Triton words it; `retry_s` becomes Retry-After."""
    headers = {"retry-after": str(retry_s)} if retry_s is not None else {}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return _json({"error": reason}, status, headers)


async def _as_error(_: Request, error: Exception) -> Response:
    """A path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    response = _error(error.status_code, f"{error.detail}.")
    response.headers.update(error.headers or {})
    return response
