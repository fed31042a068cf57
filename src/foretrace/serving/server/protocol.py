"""Requests and answers on the wire: the Open Inference Protocol v2 with binary tensors, and plain JSON.

https://github.com/kserve/open-inference-protocol, with the extension of Triton for tensors as bytes behind the JSON
(`binary_data_size`). Nothing of a request is unpickled or evaluated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import numpy as np

from foretrace.serving.server.models import DTYPES, Array, ModelFacts, TensorSpec

VERSION = "1"  # of the model: there is one at a time
DATATYPES = dict(
    zip(
        DTYPES,
        ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"),
        strict=True,
    )
)
HEADER_LENGTH = "Inference-Header-Content-Length"
PlainTensors = dict[str, list[Any]]  # nested lists by name, samples first
_OF_KIND = {"b": "b", "u": "iu", "i": "iu", "f": "iuf"}  # kinds of JSON numbers that a type takes


class RequestError(Exception):
    """A request that gets no answer, with the HTTP status that says why; `retry_s` where trying again may help."""

    def __init__(self, status: int, reason: str, retry_s: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.retry_s = status, reason, retry_s


class RequestTensor(msgspec.Struct, kw_only=True):
    """An input of a request; its numbers are in `data`, or behind the JSON (`binary_data_size`)."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: list[Any] | None = None


class RequestedOutput(msgspec.Struct, kw_only=True):
    """An output that a request needs; `binary_data` in `parameters` requests bytes."""

    name: str
    parameters: dict[str, Any] = {}


class InferRequest(msgspec.Struct, kw_only=True):
    """A request; `timeout` in `parameters` is its deadline in microseconds."""

    inputs: list[RequestTensor]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[RequestedOutput] | None = None


class ResponseTensor(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An output of a model; its numbers are in `data`, flat in row-major order, or behind the JSON."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, int] = {}
    data: list[Any] | None = None


class InferResponse(msgspec.Struct, kw_only=True):
    """The answer to a request."""

    model_name: str
    model_version: str
    id: str
    outputs: list[ResponseTensor]


class TensorMetadata(msgspec.Struct, kw_only=True):
    """Name, type and sizes; -1 is the number of samples."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(msgspec.Struct, kw_only=True):
    """What a model takes and gives."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that was read: arrays of the same number of samples, the outputs wanted, and those wanted as bytes."""

    inputs: Mapping[str, Array]
    outputs: tuple[str, ...]
    as_bytes: Collection[str] = ()
    id: str = ""
    deadline_s: float | None = None


def metadata(facts: ModelFacts) -> ModelMetadata:
    """Return what the protocol tells of a model."""

    def tensors(specs: Sequence[TensorSpec]) -> list[TensorMetadata]:
        return [
            TensorMetadata(name=each.name, datatype=DATATYPES[each.dtype], shape=[-1, *each.sizes]) for each in specs
        ]

    return ModelMetadata(
        name=facts.name, versions=[VERSION], platform=f"foretrace_{facts.kind}", inputs=tensors(facts.inputs),
        outputs=tensors(facts.outputs),
    )  # fmt: skip


def read_infer(body: bytes, header_length: str | None, facts: ModelFacts) -> Asked:
    """Return a request of the protocol. Raises RequestError (400) for one that is not, or does not fit the model."""
    size = len(body)
    if header_length is not None:
        if not header_length.isdecimal() or len(header_length) > 18 or int(header_length) > size:
            raise RequestError(400, f"{HEADER_LENGTH} must be the bytes of the JSON, at most {size}.")
        size = int(header_length)
    request = _decoded(body[:size], InferRequest)
    rest, inputs = memoryview(body)[size:], dict[str, Array]()
    for tensor in request.inputs:
        spec = next((each for each in facts.inputs if each.name == tensor.name), None)
        if spec is None or tensor.name in inputs:
            raise RequestError(400, f"input {tensor.name[:80]!r} is given twice, or no input; {_takes(facts)}.")
        if tensor.datatype != DATATYPES[spec.dtype]:
            raise RequestError(400, f"input {spec.name} must be {DATATYPES[spec.dtype]}, got {tensor.datatype[:40]!r}.")
        if len(tensor.shape) != 1 + len(spec.sizes) or tensor.shape[1:] != list(spec.sizes) or tensor.shape[0] < 1:
            raise RequestError(400, f"input {spec.name} must have the shape {_shape(spec)}, got {tensor.shape[:9]}.")
        length = tensor.parameters.get("binary_data_size")
        if length is not None:
            if length != tensor.shape[0] * spec.nbytes or length > len(rest) or tensor.data is not None:
                raise RequestError(
                    400, f"input {spec.name} must have {tensor.shape[0] * spec.nbytes} bytes and no data."
                )
            array = np.frombuffer(rest[:length], spec.dtype).reshape(tensor.shape)
            rest = rest[length:]
        else:
            array = _numbers(tensor.data, spec)
            if array.size != prod(tensor.shape):
                raise RequestError(400, f"input {spec.name} must have {prod(tensor.shape)} numbers, got {array.size}.")
        inputs[spec.name] = array.reshape(tensor.shape)
    if len(rest):
        raise RequestError(400, f"{len(rest)} bytes behind the JSON belong to no input; give their binary_data_size.")
    known = [each.name for each in facts.outputs]
    wanted = request.outputs or [RequestedOutput(name=each) for each in known]
    for each in wanted:
        if each.name not in known or each.parameters.get("classification"):
            raise RequestError(
                400, f"output {each.name[:80]!r} cannot be had; there are {', '.join(known)}, unclassified."
            )
    binary = request.parameters.get("binary_data_output") is True
    timeout = request.parameters.get("timeout")
    if timeout is not None and (not isinstance(timeout, int) or not 0 < timeout < 1 << 53):
        raise RequestError(400, "the parameter timeout must be a number of microseconds from 1 on.")
    return Asked(
        inputs=_complete(inputs, facts),
        outputs=tuple(dict.fromkeys(each.name for each in wanted)),
        as_bytes={each.name for each in wanted if each.parameters.get("binary_data", binary) is True},
        id=request.id,
        deadline_s=None if timeout is None else timeout / 1e6,
    )


def read_plain(body: bytes, facts: ModelFacts) -> Asked:
    """Return nested lists by name of the input, samples first. Raises RequestError (400)."""
    request = _decoded(body, PlainTensors)
    inputs = {}
    for spec in facts.inputs:
        if spec.name in request:
            array = _numbers(request[spec.name], spec)
            if array.shape[1:] != spec.sizes or not len(array):
                raise RequestError(
                    400, f"input {spec.name} must have the shape {_shape(spec)}, got {list(array.shape)}."
                )
            inputs[spec.name] = array
    if unknown := next((each for each in request if each not in inputs), None):
        raise RequestError(400, f"{unknown[:80]!r} is no input; {_takes(facts)}.")
    return Asked(inputs=_complete(inputs, facts), outputs=tuple(each.name for each in facts.outputs))


def write_infer(asked: Asked, found: Mapping[str, Array], facts: ModelFacts) -> tuple[bytes, dict[str, str]]:
    """Return the answer in the protocol, and the headers that go with it. Raises RequestError (422) for what JSON
    lacks.
    """
    tensors, behind = list[ResponseTensor](), list[bytes]()
    for name in asked.outputs:
        array = found[name]
        tensor = ResponseTensor(name=name, datatype=DATATYPES[str(array.dtype)], shape=list(array.shape))
        if name in asked.as_bytes:
            behind.append(array.tobytes())
            tensor.parameters = {"binary_data_size": len(behind[-1])}
        else:
            tensor.data = _listed(name, array.reshape(-1))
        tensors.append(tensor)
    response = InferResponse(model_name=facts.name, model_version=VERSION, id=asked.id, outputs=tensors)
    head = msgspec.json.encode(response)
    if not behind:
        return head, {"content-type": "application/json"}
    headers = {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(head))}
    return b"".join([head, *behind]), headers


def write_plain(asked: Asked, found: Mapping[str, Array], _: ModelFacts) -> tuple[bytes, dict[str, str]]:
    """Return nested lists by name of the output. Raises RequestError (422)."""
    answer = {name: _listed(name, found[name]) for name in asked.outputs}
    return msgspec.json.encode(answer), {"content-type": "application/json"}


def _decoded(body: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(400, f"the body is no such JSON: {str(error)[:200].rstrip('.')}.") from None


def _numbers(data: list[Any] | None, spec: TensorSpec) -> Array:
    """Return numbers of JSON in the type of an input; none is changed by that but for the precision of floats."""
    try:
        array = np.array(data if data is not None else [])
    except (ValueError, OverflowError):
        array = np.array(None)
    target = np.dtype(spec.dtype)
    if array.dtype.kind not in _OF_KIND[target.kind]:
        raise RequestError(
            400, f"input {spec.name} must hold {DATATYPES[spec.dtype]} numbers in lists of equal lengths."
        )
    if target.kind in "iu" and array.size:
        limits = np.iinfo(target)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise RequestError(400, f"input {spec.name} must hold numbers from {limits.min} to {limits.max}.")
    with np.errstate(over="ignore"):
        found: Array = array.astype(target)
    if target.kind == "f" and not np.isfinite(found).all():
        raise RequestError(400, f"input {spec.name} must hold numbers that {DATATYPES[spec.dtype]} can.")
    return found


def _complete(inputs: Mapping[str, Array], facts: ModelFacts) -> Mapping[str, Array]:
    if len(inputs) < len(facts.inputs) or len({len(each) for each in inputs.values()}) != 1:
        raise RequestError(400, f"a request must have every input with the same number of samples; {_takes(facts)}.")
    return inputs


def _listed(name: str, array: Array) -> list[Any]:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise RequestError(422, f"output {name} holds infinities, which JSON cannot; ask for it as binary data.")
    found: list[Any] = array.tolist()
    return found


def _shape(spec: TensorSpec) -> str:
    return f"[samples{''.join(f', {each}' for each in spec.sizes)}]"


def _takes(facts: ModelFacts) -> str:
    return (
        f"the model takes {', '.join(f'{each.name} {DATATYPES[each.dtype]} {_shape(each)}' for each in facts.inputs)}"
    )
