"""The OpenAPI document of a server, with the inputs and outputs of its model."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec

from foretrace.serving.server.models import ModelFacts
from foretrace.serving.server.protocol import (
    DATATYPES,
    InferRequest,
    InferResponse,
    ModelMetadata,
    metadata,
)

_REFUSALS = {
    400: "not understood, or not what the model takes", 401: "no token", 403: "a foreign host",
    404: "no such model",
    408: "sent too slowly", 409: "a split is being changed", 413: "too large", 415: "compressed",
    422: "the model cannot answer, or the split cannot start", 429: "too much waits", 503: "not ready",
    504: "not within the deadline",
}  # fmt: skip


def description(facts: ModelFacts, state: type[Any], change: type[Any]) -> dict[str, Any]:
    """An OpenAPI 3.1 document; `state` and `change` are what /split answers and takes."""
    kinds = (InferRequest, InferResponse, ModelMetadata, state, change)
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schemas["Error"] = {
        "type": "object", "required": ["error"], "properties": {"error": {"type": "string"}},
    }  # fmt: skip
    about = metadata(facts)
    request = schemas["InferRequest"]
    request["properties"]["inputs"] |= {"minItems": len(facts.inputs)}
    schemas["RequestTensor"]["properties"]["name"] = {"enum": [each.name for each in facts.inputs]}
    schemas["RequestTensor"]["properties"]["datatype"] = {"enum": sorted({each.datatype for each in about.inputs})}
    plain = {
        "type": "object",
        "required": [each.name for each in facts.inputs],
        "additionalProperties": False,
        "properties": {
            each.name: {"description": f"{DATATYPES[each.dtype]} [samples, {list(each.sizes)}]"}
            | _nested(each.dtype, each.sizes)
            for each in facts.inputs
        },
    }
    lists = {"type": "object", "additionalProperties": {"type": "array"}}
    ready = {"type": "object", "required": ["ready"], "properties": {"ready": {"type": "boolean"}}}
    live = {"type": "object", "required": ["live"], "properties": {"live": {"type": "boolean"}}}
    model = f"/v2/models/{facts.name}"
    infer = _operation("Run the model on named tensors.", _ref(InferResponse), _ref(InferRequest))
    return {
        "openapi": "3.1.0",
        "info": {"title": f"foretrace serve {facts.name}", "version": version("foretrace")},
        "paths": {
            "/v2/health/live": {"get": _operation("Whether the server runs.", live, refusals=())},
            "/v2/health/ready": {"get": _operation("Whether a request would be run now.", ready, own=(503,))},
            "/v2": {"get": _operation("Name and version of the server.", {"type": "object"})},
            model: {"get": _operation("Inputs and outputs of the model.", _ref(ModelMetadata))},
            f"{model}/ready": {"get": _operation("Whether the model is ready.", ready, own=(503,))},
            f"{model}/infer": {"post": infer},
            f"{model}/versions/1/infer": {"post": infer},
            "/predict": {"post": _operation("Run the model on nested lists by name of the input.", lists, plain)},
            "/split": {
                "get": _operation("The split of cores among instances that serves now.", _ref(state)),
                "put": _operation("Change the split without dropping a request.", _ref(state), _ref(change)),
            },
            "/metrics": {"get": _operation("Counts and times for Prometheus.", {"type": "string"}, kind="text/plain")},
            "/openapi.json": {"get": _operation("This document.", {"type": "object"})},
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _nested(dtype: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    number: dict[str, Any] = {"type": "boolean" if dtype == "bool" else "number" if "float" in dtype else "integer"}
    if dtype.startswith("uint"):
        number["minimum"] = 0
    for size in reversed(sizes):
        number = {"type": "array", "items": number, "minItems": size, "maxItems": size}
    return {"type": "array", "items": number, "minItems": 1}


def _ref(kind: type[Any]) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _operation(
    summary: str,
    answer: dict[str, Any],
    body: dict[str, Any] | None = None,
    *,
    kind: str = "application/json",
    refusals: tuple[int, ...] = tuple(_REFUSALS),
    own: tuple[int, ...] = (),
) -> dict[str, Any]:
    """One method of a path; statuses of `own` answer as 200 does."""
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    responses: dict[str, Any] = {str(each): {"description": _REFUSALS[each], "content": error} for each in refusals}
    for status in (200, *own):
        responses[str(status)] = {"description": "the answer", "content": {kind: {"schema": answer}}}
    found: dict[str, Any] = {"summary": summary, "responses": responses}
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return found
