"""The server's HTTP interface: health, metadata, inference, the split, metrics, and the description of all that."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from importlib.metadata import version
from inspect import isawaitable
from time import perf_counter
from typing import Any, NamedTuple

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
from foretrace.serving.server.models import ModelFacts
from foretrace.serving.server.protocol import DATATYPES, VERSION, Asked, PlainTensors, RequestError
from foretrace.serving.server.split import CoreSplit

_BODY_S = 30.0  # a client that takes longer to send a request is given up
_BODY_BYTES = 64 << 20
_GONE = 499  # no status of HTTP: nobody reads it, but metrics count it
_LOCAL = ("127.0.0.1", "localhost", "[::1]")
_REFUSALS = (400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 503, 504)
_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


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


class Operation(NamedTuple):
    """A method of a path: what answers it, and the types of answer and body (a str is text, others are JSON)."""

    method: str
    path: str
    call: Callable[[Request], Any]  # returns a response, or what is JSON, or a coroutine that does
    summary: str
    answer: Any
    body: Any = None
    open: bool = False  # without a token


class ServerApp:
    """Routes over a dispatcher. `app` is what an ASGI server runs; a client may ask for less than `deadline_s`."""

    def __init__(self, dispatcher: Dispatcher, *, deadline_s: float, token: str) -> None:
        self.dispatcher, self.deadline_s, self.token = dispatcher, deadline_s, token
        self.operations = [
            Operation("GET", "/v2/health/live", lambda _: {"live": True}, "Whether the server runs.", dict[str, bool],
                      open=True),
            Operation("GET", "/v2/health/ready", self._ready, "Whether it would answer.", dict[str, bool], open=True),
            Operation("GET", "/v2", self._server, "Name and version of the server.", dict[str, Any]),
            Operation("POST", "/predict", self._predict, "Run the model on nested lists by input.", PlainTensors,
                      PlainTensors),
            Operation("GET", "/split", self._split, "The split of cores that serves now.", SplitState),
            Operation("PUT", "/split", self._change, "Change it, drop no request.", SplitState, SplitChange),
            Operation("GET", "/metrics", self._metrics, "Counts and times for Prometheus.", str),
            Operation("GET", "/openapi.json", lambda _: description(self._facts, self.operations), "This document.",
                      dict[str, Any]),
        ]  # fmt: skip
        for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}"):
            self.operations += [
                Operation("GET", model, lambda _: protocol.metadata(self._facts), "Inputs and outputs of the model.",
                          protocol.ModelMetadata),
                Operation("GET", f"{model}/ready", self._ready, "Whether it would answer.", dict[str, bool]),
                Operation("POST", f"{model}/infer", self._infer, "Run the model on named tensors.",
                          protocol.InferResponse, protocol.InferRequest),
            ]  # fmt: skip
        self.app = Starlette(
            routes=[Route(each.path, self._guarded(each), methods=[each.method]) for each in self.operations],
            exception_handlers={HTTPException: _unknown},
        )

    # --- what surrounds every request

    def _guarded(self, operation: Operation) -> Callable[[Request], Awaitable[Response]]:
        """Return who may ask for which model, what a refusal looks like, and how long it took."""

        async def guarded(request: Request) -> Response:
            began = perf_counter()
            try:
                if not operation.open:
                    self._authorise(request)
                served = {"name": self._facts.name, "version": VERSION}
                if served | request.path_params != served:
                    raise RequestError(404, f"the model is {self._facts.name}, version {VERSION}.")
                answer = operation.call(request)
                answer = await answer if isawaitable(answer) else answer
                response = answer if isinstance(answer, Response) else _json(answer)
            except RequestError as error:
                response = _error(error.status, error.reason, error.retry_s)
            except ForetraceError as error:
                response = _error(422, str(error))
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
        """Check the token, where there is one; else that a name of this machine was asked, which no web page can."""
        host = request.headers.get("host", "")
        if self.token:
            given = request.headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
                raise RequestError(401, "the request must have the header Authorization: Bearer TOKEN, with the token.")
        elif host not in _LOCAL and host.rpartition(":")[0] not in _LOCAL:
            raise RequestError(403, "without a token the server answers to 127.0.0.1 and localhost alone.")

    @property
    def _facts(self) -> ModelFacts:
        assert self.dispatcher.facts is not None  # requests are taken once the model is loaded
        return self.dispatcher.facts

    # --- routes

    def _ready(self, _: Request) -> dict[str, bool]:
        if not self.dispatcher.ready:
            raise RequestError(503, "no instance runs yet, or none any more.", 1)
        return {"ready": True}

    def _server(self, _: Request) -> dict[str, Any]:
        about = {"name": "foretrace", "version": version("foretrace"), "extensions": ["binary_tensor_data"]}
        return about | {"models": [self._facts.name]}

    def _metrics(self, _: Request) -> Response:
        text = generate_latest(self.dispatcher.metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _infer(self, request: Request) -> Response:
        body, length = await _body(request), request.headers.get(protocol.HEADER_LENGTH)
        return await self._answered(request, protocol.read_infer(body, length, self._facts))

    async def _predict(self, request: Request) -> Response:
        return await self._answered(request, protocol.read_plain(await _body(request), self._facts))

    def _split(self, _: Request) -> SplitState:
        now = self.dispatcher
        return SplitState(
            split=now.active.split.text, changing=now.changing, samples_waiting=now.waiting,
            samples_running=now.running, processes=sorted(each.pid for each in now.active.alive),
        )  # fmt: skip

    async def _change(self, request: Request) -> SplitState:
        wanted: SplitChange = protocol.decoded(await _body(request), SplitChange)
        split = CoreSplit.parse(wanted.split)
        if split.batch > self.dispatcher.limit:
            raise ForetraceError(f"a split must run at most {self.dispatcher.limit} samples at once.")
        if self.dispatcher.changing:
            raise RequestError(409, "another split is being started; ask again when it serves.", 1)
        await self.dispatcher.reconfigure(split)
        return self._split(request)

    async def _answered(self, request: Request, asked: Asked) -> Response:
        """Wait for the answer for as long as the client does, and write it."""
        deadline_s = min(asked.deadline_s, self.deadline_s)
        serving = asyncio.ensure_future(self.dispatcher.infer(asked.inputs, deadline_s))
        leaving = asyncio.ensure_future(request.receive())  # after the body: the client has left
        try:
            await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise ClientDisconnect
            content, headers = asked.write(serving.result())
        finally:
            for each in (serving, leaving):
                each.cancel()
                with suppress(asyncio.CancelledError, RequestError):
                    await each
        return Response(content, headers=headers)


async def _body(request: Request) -> bytes:
    """Read all of a body that is not too large and does not come too slowly."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RequestError(415, "the body must not be compressed.")
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for piece in request.stream():
                body += piece
                if len(body) > _BODY_BYTES:
                    raise RequestError(413, f"the body must have at most {_BODY_BYTES} bytes.")
    except TimeoutError:
        raise RequestError(408, f"the body did not come within {_BODY_S:g} s.") from None
    return bytes(body)


def _json(answer: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(answer), status, headers, "application/json")


def _error(status: int, reason: str, retry_s: int | None = None) -> Response:
    """Return an error as Triton words it; `retry_s` becomes Retry-After."""
    headers = {"retry-after": str(retry_s)} if retry_s is not None else {}
    return _json({"error": reason}, status, headers | ({"www-authenticate": "Bearer"} if status == 401 else {}))


async def _unknown(_: Request, error: Exception) -> Response:
    """Return a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    response = _error(error.status_code, f"{error.detail}.")
    response.headers.update(error.headers or {})
    return response


def description(facts: ModelFacts, operations: Sequence[Operation]) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document, from operations and the inputs of a model."""
    kinds = [kind for each in operations for kind in (each.answer, each.body) if kind is not None]
    found, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    of = dict(zip(kinds, found, strict=True))
    names = [each.name for each in facts.inputs]
    schemas["InferRequest"]["properties"]["inputs"] |= {"minItems": len(names)}
    schemas["RequestTensor"]["properties"] |= {
        "name": {"enum": names}, "datatype": {"enum": sorted({DATATYPES[each.dtype] for each in facts.inputs})},
    }  # fmt: skip
    plain = {
        "type": "object", "required": names, "additionalProperties": False,
        "properties": {each.name: _nested(each.dtype, each.sizes) for each in facts.inputs},
    }  # fmt: skip
    refused = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    errors = {str(each): {"description": HTTPStatus(each).phrase, "content": refused} for each in _REFUSALS}
    paths = dict[str, dict[str, Any]]()
    for each in operations:
        content = {"text/plain" if each.answer is str else "application/json": {"schema": of[each.answer]}}
        about = {"summary": each.summary, "responses": {"200": {"description": "OK", "content": content}} | errors}
        if each.body is not None:
            body = {"schema": plain if each.body is PlainTensors else of[each.body]}
            about["requestBody"] = {"required": True, "content": {"application/json": body}}
        path = each.path.replace("{name}", facts.name).replace("{version}", VERSION)
        paths.setdefault(path, {})[each.method.lower()] = about
    return {
        "openapi": "3.1.0",
        "info": {"title": f"foretrace serve {facts.name}", "version": version("foretrace")},
        "paths": paths,
        "components": {
            "schemas": schemas | {"Error": _ERROR}, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }  # fmt: skip


def _nested(dtype: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Return lists of lists of numbers, samples first."""
    number: dict[str, Any] = {"type": "boolean" if dtype == "bool" else "number" if "float" in dtype else "integer"}
    if dtype.startswith("uint"):
        number["minimum"] = 0
    for size in reversed(sizes):
        number = {"type": "array", "items": number, "minItems": size, "maxItems": size}
    return {"type": "array", "items": number, "minItems": 1}
