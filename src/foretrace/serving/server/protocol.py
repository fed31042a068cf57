"""Requests and answers on the wire: the Open Inference Protocol v2 with binary tensors, and plain JSON.

https://github.com/kserve/open-inference-protocol, with the extension of Triton for tensors as bytes behind the JSON
(`binary_data_size`). Nothing of a request is unpickled or evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import msgspec
import numpy as np

from foretrace.serving.server.models import DTYPES, Array, ModelFacts, TensorSpec

VERSION = "1"  # of the model: there is one at a time
DATATYPES = {each: each.upper().replace("FLOAT", "FP") for each in DTYPES}
HEADER_LENGTH = "Inference-Header-Content-Length"
PlainTensors = dict[str, list[Any]]  # nested lists by name, samples first
_OF_KIND = {"b": "b", "u": "iu", "i": "iu", "f": "iuf"}  # kinds of JSON numbers that a type takes


class RequestError(Exception):
    """A request that gets no answer, with the HTTP status that says why; `retry_s` where trying again may help."""

    def __init__(self, status: int, reason: str, retry_s: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.retry_s = status, reason, retry_s


class InferTensor(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tensor of a model or of an answer: numbers are in `data`, row by row, or behind the JSON (`binary_data_size`).

    In the metadata of a model, the size -1 is the number of samples.
    """

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] = {}
    data: list[Any] | None = None


class RequestTensor(InferTensor, kw_only=True):
    """An input of a request."""


class RequestedOutput(msgspec.Struct, kw_only=True):
    """An output that a request needs; `binary_data` in `parameters` requests bytes."""

    name: str
    parameters: dict[str, Any] = {}


class InferRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request; `timeout` in `parameters` is its deadline in microseconds."""

    inputs: list[RequestTensor]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[RequestedOutput] | None = None


class InferResponse(msgspec.Struct, kw_only=True):
    """The answer to a request."""

    model_name: str
    model_version: str
    id: str
    outputs: list[InferTensor]


class ModelMetadata(msgspec.Struct, kw_only=True):
    """What a model takes and gives."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[InferTensor]
    outputs: list[InferTensor]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request that was read: arrays of the same number of samples, and how its answer is written."""

    inputs: Mapping[str, Array]
    write: Callable[[Mapping[str, Array]], tuple[bytes, dict[str, str]]]  # body and headers, from arrays by output
    deadline_s: float = inf


def metadata(facts: ModelFacts) -> ModelMetadata:
    """Return what the protocol tells of a model."""

    def tensors(specs: Iterable[TensorSpec]) -> list[InferTensor]:
        return [InferTensor(name=each.name, datatype=DATATYPES[each.dtype], shape=[-1, *each.sizes]) for each in specs]

    return ModelMetadata(
        name=facts.name, versions=[VERSION], platform=f"foretrace_{facts.kind}", inputs=tensors(facts.inputs),
        outputs=tensors(facts.outputs),
    )  # fmt: skip


def as_tensor(kind: type[InferTensor], name: str, array: Array, behind: list[bytes] | None) -> Any:
    """Return a tensor for the wire; where there is a list of what comes `behind` the JSON, its bytes are added there.

    Raises RequestError (422) for what JSON lacks.
    """
    found = kind(name=name, datatype=DATATYPES[str(array.dtype)], shape=list(array.shape))
    if behind is None:
        found.data = _listed(name, array.reshape(-1))
    else:
        behind.append(array.tobytes())
        found.parameters = {"binary_data_size": len(behind[-1])}
    return found


def packed(message: object, behind: list[bytes]) -> tuple[bytes, dict[str, str]]:
    """Return a message and what comes behind it as a body, and its headers."""
    head = msgspec.json.encode(message)
    if not behind:
        return head, {"content-type": "application/json"}
    return b"".join([head, *behind]), {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(head))}


def read_infer(body: bytes, header_length: str | None, facts: ModelFacts) -> Asked:
    """Return a request of the protocol. Raises RequestError (400) for one that is not, or does not fit the model.

    Its `write` raises RequestError (422) for what JSON lacks.
    """
    size = len(body)
    if header_length is not None:
        if not header_length.isdecimal() or len(header_length) > 18 or int(header_length) > size:
            raise RequestError(400, f"{HEADER_LENGTH} must be the bytes of the JSON, at most {size}.")
        size = int(header_length)
    request: InferRequest = decoded(body[:size], InferRequest)
    rest, inputs = memoryview(body)[size:], dict[str, Array]()
    for tensor in request.inputs:
        spec, shape = _spec(tensor.name, inputs, facts), tensor.shape
        if tensor.datatype != DATATYPES[spec.dtype] or not shape or shape[0] < 1 or shape[1:] != [*spec.sizes]:
            raise RequestError(400, f"an input must be {_words(spec)}, got {tensor.datatype[:40]!r} {shape[:9]}.")
        length = tensor.parameters.get("binary_data_size")
        if length is None:
            array = _numbers(tensor.data, spec)
            if array.size != prod(shape):
                raise RequestError(400, f"input {spec.name} must have {prod(shape)} numbers, got {array.size}.")
        elif length != shape[0] * spec.nbytes or length > len(rest) or tensor.data is not None:
            raise RequestError(400, f"input {spec.name} must have {shape[0] * spec.nbytes} bytes and no data.")
        else:
            array, rest = np.frombuffer(rest[:length], spec.dtype), rest[length:]
        inputs[spec.name] = array.reshape(shape)
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
    as_bytes = {each.name for each in wanted if each.parameters.get("binary_data", binary) is True}

    def write(found: Mapping[str, Array]) -> tuple[bytes, dict[str, str]]:
        behind = list[bytes]()
        outputs = [
            as_tensor(InferTensor, name, found[name], behind if name in as_bytes else None)
            for name in dict.fromkeys(each.name for each in wanted)
        ]
        answer = InferResponse(model_name=facts.name, model_version=VERSION, id=request.id, outputs=outputs)
        return packed(answer, behind)

    deadline_s = inf if timeout is None else timeout / 1e6
    return Asked(inputs=_complete(inputs, facts), write=write, deadline_s=deadline_s)


def read_plain(body: bytes, facts: ModelFacts) -> Asked:
    """Return nested lists by name of the input, samples first; answers are as well. Raises as `read_infer`."""
    inputs = dict[str, Array]()
    for name, data in decoded(body, PlainTensors).items():
        spec = _spec(name, inputs, facts)
        array = inputs[name] = _numbers(data, spec)
        if array.shape[1:] != spec.sizes or not len(array):
            raise RequestError(400, f"an input must be {_words(spec)}, got {[*array.shape]}.")

    def write(found: Mapping[str, Array]) -> tuple[bytes, dict[str, str]]:
        return packed({each.name: _listed(each.name, found[each.name]) for each in facts.outputs}, [])

    return Asked(inputs=_complete(inputs, facts), write=write)


def decoded(body: bytes, kind: Any) -> Any:
    """Return what JSON says of this type. Raises RequestError (400)."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise RequestError(400, f"the body is no such JSON: {str(error)[:200].rstrip('.')}.") from None


def _spec(name: str, before: Collection[str], facts: ModelFacts) -> TensorSpec:
    spec = next((each for each in facts.inputs if each.name == name and name not in before), None)
    if spec is None:
        raise RequestError(400, f"input {name[:80]!r} is given twice, or no input; {_takes(facts)}.")
    return spec


def _numbers(data: list[Any] | None, spec: TensorSpec) -> Array:
    """Return numbers of JSON in the type of an input; none is changed by that but for the precision of floats."""
    try:
        array = np.array(data if data is not None else [])
    except (ValueError, OverflowError):
        array = np.array(None)
    kind, word = np.dtype(spec.dtype).kind, DATATYPES[spec.dtype]
    if array.dtype.kind not in _OF_KIND[kind]:
        raise RequestError(400, f"input {spec.name} must hold {word} numbers in lists of equal lengths.")
    with np.errstate(over="ignore"):
        found: Array = array.astype(spec.dtype)
    if not (np.isfinite(found) if kind == "f" else found == array).all():
        raise RequestError(400, f"input {spec.name} must hold numbers that {word} can.")
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


def _words(spec: TensorSpec) -> str:
    return f"{spec.name} {DATATYPES[spec.dtype]} [{', '.join(map(str, ('samples', *spec.sizes)))}]"


def _takes(facts: ModelFacts) -> str:
    return f"the model takes {', '.join(map(_words, facts.inputs))}"
