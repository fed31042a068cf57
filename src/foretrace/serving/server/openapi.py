"""The OpenAPI document of a server, from its operations and the inputs of its model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from foretrace.serving.server.models import ModelFacts
from foretrace.serving.server.protocol import DATATYPES, VERSION, PlainTensors

_REFUSALS = (400, 401, 403, 404, 408, 409, 413, 415, 422, 429, 503, 504)
_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


class Operation(NamedTuple):
    """A method of a path: what answers it, and the types of answer and body (a str is text, others are JSON)."""

    method: str
    path: str
    call: Callable[[Request], Awaitable[Response]]
    summary: str
    answer: Any
    body: Any = None
    open: bool = False  # without a token


def description(facts: ModelFacts, operations: Sequence[Operation]) -> dict[str, Any]:
    """Return an OpenAPI 3.1 document."""
    kinds = [kind for each in operations for kind in (each.answer, each.body) if kind is not None]
    found, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas["InferRequest"]["properties"]["inputs"] |= {"minItems": len(facts.inputs)}
    tensor = schemas["RequestTensor"]["properties"]
    tensor["name"] = {"enum": [each.name for each in facts.inputs]}
    tensor["datatype"] = {"enum": sorted({DATATYPES[each.dtype] for each in facts.inputs})}
    plain = {
        "type": "object", "required": [each.name for each in facts.inputs], "additionalProperties": False,
        "properties": {each.name: _nested(each.dtype, each.sizes) for each in facts.inputs},
    }  # fmt: skip
    refused = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    errors = {str(each): {"description": HTTPStatus(each).phrase, "content": refused} for each in _REFUSALS}
    rest, paths = iter(found), dict[str, dict[str, Any]]()
    for each in operations:
        content = {"text/plain" if each.answer is str else "application/json": {"schema": next(rest)}}
        about = {"summary": each.summary, "responses": {"200": {"description": "OK", "content": content}} | errors}
        if each.body is not None:
            schema = next(rest)
            body = {"schema": plain if each.body is PlainTensors else schema}
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
