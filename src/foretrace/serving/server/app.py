"""The server's HTTP interface: health, metadata, inference, the split, metrics, and the description of all that."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from time import perf_counter
from typing import Any

import msgspec
from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from foretrace.errors import ForetraceError
from foretrace.serving.server import protocol
from foretrace.serving.server.dispatcher import Dispatcher
from foretrace.serving.server.models import Array, ModelFacts
from foretrace.serving.server.openapi import Operation, description
from foretrace.serving.server.protocol import Asked, RequestError
from foretrace.serving.server.split import CoreSplit

_BODY_S = 30.0  # a client that takes longer to send a request is given up
_BODIES = 16  # times the largest body: what all bodies together may hold
_GONE = 499  # no status of HTTP: nobody reads it, but metrics count it
_LOCAL = ("127.0.0.1", "localhost", "[::1]")
_MODEL = "/v2/models/{name}"

Read = Callable[[bytes, ModelFacts], Asked]
Write = Callable[[Asked, Mapping[str, Array], ModelFacts], tuple[bytes, dict[str, str]]]


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


class ServerApp:
    """Routes over a dispatcher. `app` is what an ASGI server runs; a client may ask for less than `deadline_s`."""

    def __init__(
        self, dispatcher: Dispatcher, *, deadline_s: float = 60.0, body_bytes: int = 64 << 20, token: str = ""
    ) -> None:
        self.dispatcher, self.deadline_s, self.body_bytes, self.token = dispatcher, deadline_s, body_bytes, token
        self._held = 0  # bytes of bodies
        plain = protocol.PlainTensors
        self.operations = [
            Operation("GET", "/v2/health/live", self._live, "Whether the server runs.", dict[str, bool], open=True),
            Operation("GET", "/v2/health/ready", self._ready, "Whether it would answer.", dict[str, bool], open=True),
            Operation("GET", "/v2", self._server, "Name and version of the server.", dict[str, Any]),
            Operation("POST", "/predict", self._predict, "Run the model on nested lists by input.", plain, plain),
            Operation("GET", "/split", self._split, "The split of cores that serves now.", SplitState),
            Operation("PUT", "/split", self._change, "Change it, drop no request.", SplitState, SplitChange),
            Operation("GET", "/metrics", self._metrics, "Counts and times for Prometheus.", str),
            Operation("GET", "/openapi.json", self._openapi, "This document.", dict[str, Any]),
        ]
        for prefix in (_MODEL, f"{_MODEL}/versions/{{version}}"):
            self.operations += [
                Operation("GET", prefix, self._model, "Inputs and outputs of the model.", protocol.ModelMetadata),
                Operation("GET", f"{prefix}/ready", self._model_ready, "Whether it would answer.", dict[str, bool]),
                Operation("POST", f"{prefix}/infer", self._infer, "Run the model on named tensors.",
                          protocol.InferResponse, protocol.InferRequest),
            ]  # fmt: skip
        self.app = Starlette(
            routes=[Route(each.path, self._guarded(each), methods=[each.method]) for each in self.operations],
            exception_handlers={HTTPException: _as_error},
        )

    # --- what surrounds every request

    def _guarded(self, operation: Operation) -> Callable[[Request], Awaitable[Response]]:
        """Return who may ask, what a refusal looks like, and how long it took."""

        async def guarded(request: Request) -> Response:
            began = perf_counter()
            try:
                if not operation.open:
                    self._authorise(request)
                response = await operation.call(request)
            except RequestError as error:
                response = _error(error.status, error.reason, error.retry_s)
            except ClientDisconnect:
                response = Response(status_code=_GONE)
            except Exception:
                logging.getLogger(__name__).exception("a bug of the server, in %s", request.url.path)
                response = _error(500, "a bug of the server, which its log tells more of.")
            if request.method == "POST":
                self.dispatcher.metrics.requests.labels(str(response.status_code)).inc()
                self.dispatcher.metrics.request_s.observe(perf_counter() - began)
            return response

        return guarded

    def _authorise(self, request: Request) -> None:
        """Check the token, where there is one; otherwise a name of this machine, which no foreign web page
        can claim.
        """
        host = request.headers.get("host", "")
        if self.token:
            given = request.headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
                raise RequestError(401, "the request must have the header Authorization: Bearer TOKEN, with the token.")
        elif host not in _LOCAL and host.rpartition(":")[0] not in _LOCAL:
            raise RequestError(403, "without a token the server answers to 127.0.0.1 and localhost alone.")

    @asynccontextmanager
    async def _body(self, request: Request) -> AsyncIterator[bytes]:
        """Read all of a body that is not too large and does not come too slowly; its bytes count until the
        block ends.
        """
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestError(415, "the body must not be compressed.")
        pieces, size = list[bytes](), 0
        try:
            try:
                async with asyncio.timeout(_BODY_S):
                    async for piece in request.stream():
                        size += len(piece)
                        self._held += len(piece)
                        if size > self.body_bytes:
                            raise RequestError(413, f"the body must have at most {self.body_bytes} bytes.")
                        if self._held > _BODIES * self.body_bytes:
                            raise RequestError(429, "too many bytes of requests are held at once.", 1)
                        pieces.append(piece)
            except TimeoutError:
                raise RequestError(408, f"the body did not come within {_BODY_S:g} s.") from None
            yield b"".join(pieces)
        finally:
            self._held -= size

    @property
    def _facts(self) -> ModelFacts:
        if self.dispatcher.facts is None:
            raise RequestError(503, "no model is loaded yet.", 1)
        return self.dispatcher.facts

    # --- routes

    async def _live(self, _: Request) -> Response:
        return _json({"live": True})

    async def _ready(self, _: Request) -> Response:
        if not self.dispatcher.ready:
            raise RequestError(503, "no instance runs yet, or none any more.", 1)
        return _json({"ready": True})

    async def _server(self, _: Request) -> Response:
        about = {"name": "foretrace", "version": version("foretrace"), "extensions": ["binary_tensor_data"]}
        return _json(about | {"models": [self._facts.name]})

    async def _openapi(self, _: Request) -> Response:
        return _json(description(self._facts, self.operations))

    async def _metrics(self, _: Request) -> Response:
        text = generate_latest(self.dispatcher.metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _model(self, request: Request) -> Response:
        self._check_name(request)
        return _json(protocol.metadata(self._facts))

    async def _model_ready(self, request: Request) -> Response:
        self._check_name(request)
        return await self._ready(request)

    async def _infer(self, request: Request) -> Response:
        self._check_name(request)
        length = request.headers.get(protocol.HEADER_LENGTH)
        return await self._answered(
            request, lambda body, facts: protocol.read_infer(body, length, facts), protocol.write_infer
        )

    async def _predict(self, request: Request) -> Response:
        return await self._answered(request, protocol.read_plain, protocol.write_plain)

    async def _split(self, _: Request) -> Response:
        now = self.dispatcher
        return _json(
            SplitState(
                split=now.active.split.text if now.active else "", changing=now.changing, samples_waiting=now.waiting,
                samples_running=now.running,
                processes=sorted(each.pid for each in now.active.alive) if now.active else [],
            )
        )  # fmt: skip

    async def _change(self, request: Request) -> Response:
        try:
            async with self._body(request) as body:
                split = CoreSplit.parse(msgspec.json.decode(body, type=SplitChange).split)
            if split.batch > self.dispatcher.limit:
                raise ForetraceError(f"a split must run at most {self.dispatcher.limit} samples at once.")
            if self.dispatcher.changing:
                raise RequestError(409, "another split is being started; ask again when it serves.", 1)
            await self.dispatcher.reconfigure(split)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RequestError(400, f'the body must be as {{"split": "2x1:4"}}: {error}.') from None
        except ForetraceError as error:
            raise RequestError(422, str(error)) from None
        return await self._split(request)

    # --- helpers

    async def _answered(self, request: Request, read: Read, write: Write) -> Response:
        """Read a request, wait for its answer for as long as the client does, and write it."""
        facts = self._facts
        async with self._body(request) as body:
            asked = read(body, facts)
            deadline_s = min(asked.deadline_s or self.deadline_s, self.deadline_s)
            serving = asyncio.ensure_future(self.dispatcher.infer(asked.inputs, deadline_s))
            leaving = asyncio.ensure_future(request.receive())  # after the body: the client has left
            try:
                await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not serving.done():
                    raise ClientDisconnect
                content, headers = write(asked, serving.result(), facts)
            finally:
                for each in (serving, leaving):
                    each.cancel()
                    with suppress(asyncio.CancelledError, RequestError):
                        await each
        return Response(content, headers=headers)

    def _check_name(self, request: Request) -> None:
        name, number = request.path_params["name"], request.path_params.get("version", protocol.VERSION)
        if (name, number) != (self._facts.name, protocol.VERSION):
            raise RequestError(404, f"the model is {self._facts.name}, version {protocol.VERSION}.")


def _json(answer: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(answer), status, headers, "application/json")


def _error(status: int, reason: str, retry_s: int | None = None) -> Response:
    """Return an error as Triton words it; `retry_s` becomes Retry-After."""
    headers = {"retry-after": str(retry_s)} if retry_s is not None else {}
    return _json({"error": reason}, status, headers | ({"www-authenticate": "Bearer"} if status == 401 else {}))


async def _as_error(_: Request, error: Exception) -> Response:
    """Return a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    response = _error(error.status_code, f"{error.detail}.")
    response.headers.update(error.headers or {})
    return response
