"""Inputs of a call as JSON text, its work where a source does not state it, and names of types in both spellings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import msgspec

from foretrace.cost.calls import Call, Family, describe
from foretrace.graph import work
from foretrace.trace.trace import decode_shapes

#: Type of a tensor as PyTorch calls it -> as a recording does.
RECORDED = {
    "float64": "double", "float32": "float", "tf32": "float", "float16": "c10::Half", "bfloat16": "c10::BFloat16",
    "float8_e4m3fn": "c10::Float8_e4m3fn", "float8_e5m2": "c10::Float8_e5m2", "complex64": "c10::complex<float>",
    "complex128": "c10::complex<double>", "int64": "long int", "int32": "int", "int16": "short", "int8": "signed char",
    "uint8": "unsigned char", "bool": "bool",
}  # fmt: skip
DTYPES = {recorded.lower(): dtype for dtype, recorded in RECORDED.items() if dtype != "tf32"} | {
    "long": "int64", "scalar": "float32", "half": "float16", "bfloat16": "bfloat16",
    "c10::complex": "complex64",
}  # fmt: skip

LARGEST = 2**62  # elements or bytes of anything


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """Sizes and type of a tensor."""

    dims: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallWork:
    """Work of one call: floating-point operations, and bytes read and written, each tensor once."""

    flops: float
    read_bytes: float
    written_bytes: float


def text_of(dims: Sequence[Any], dtypes: Sequence[Any], concrete: Sequence[str] = ()) -> str:
    """JSON `[dims, types, concrete]` of a call.

    Per argument: the sizes and type of a tensor; lists of both for a list of tensors; `[]` and "" for what is none.
    """
    types = ["TensorList" if isinstance(each, list | tuple) else RECORDED.get(each, each) for each in dtypes]
    values = [*concrete, *[""] * (len(types) - len(concrete))]
    return msgspec.json.encode([list(dims), types, values]).decode()


def text_of_values(inputs: Iterable[TensorType], concrete: Sequence[str] = ()) -> str:
    """The text of a call whose arguments are these tensors, and after them what is no tensor."""
    given = list(inputs)
    dims: list[Any] = [list(each.dims) for each in given] + [[] for _ in concrete]
    types = [RECORDED.get(each.dtype, each.dtype) for each in given] + ["Scalar"] * len(concrete)
    return msgspec.json.encode([dims, types, [""] * len(given) + list(concrete)]).decode()


def price(
    op: str, text: str, outputs: Sequence[TensorType], written_bytes: float | None = None
) -> tuple[Call, CallWork]:
    """What a call does. `written_bytes` are the bytes of its outputs, where their types are known."""
    sizes = [each.dims for each in outputs]
    call = describe(op, text, sizes)
    flops, written = call.flops, call.written_bytes
    if written_bytes is not None and call.family not in (Family.NONE, Family.LOOKUP):
        written = written_bytes
    if call.family == Family.CONV and not flops and sizes:  # strides unknown, but the size of the result says it all
        weights = tensor_dims(text)[:2]
        if len(weights) == 2:
            between = {(weights[0], weights[1]): tuple(sizes[0])}
            flops = work.operator_work(op, text, between)[1]
    if call.family == Family.OTHER:
        flops = 0.0
    return call, CallWork(flops=flops, read_bytes=call.read_bytes, written_bytes=written)


@lru_cache(maxsize=4096)
def complaint(text: str) -> str:
    """What is wrong with a text that a user wrote: "" if nothing is."""
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return "is no JSON"
    if not isinstance(decoded, list) or len(decoded) not in (3, 4):
        return "is no list of [dims, types, concrete]"
    dims, types, concrete = decoded[:3]
    if not all(isinstance(each, list) for each in (dims, types, concrete)):
        return "is no list of three lists"
    if not all(isinstance(each, str) for each in (*types, *concrete, *decoded[3:])):
        return "has types or values that are no text"
    tensors = [each for each in dims if isinstance(each, list)]
    inner = [one for each in tensors for one in each if isinstance(one, list)]
    if len(tensors) != len(dims) or any(isinstance(each, list) for one in inner for each in one):
        return "has dims that are no list of sizes"
    sizes = [size for each in (*tensors, *inner) for size in each if not isinstance(size, list)]
    if not all(isinstance(size, int) and not isinstance(size, bool) and 0 <= size < LARGEST for size in sizes):
        return "has a size that is no number from 0 on"
    if any(16 * prod(size for size in each if isinstance(size, int)) > LARGEST for each in (*tensors, *inner)):
        return "has a tensor that is larger than any memory"
    return ""


def tensor_dims(text: str) -> list[tuple[int, ...]]:
    """Sizes of the tensors among the inputs, lists walked into; [] where the text cannot be read."""
    try:
        return [tuple(dims) for dims, _ in work.tensors(decode_shapes(text))]
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError):
        return []


def inputs_of(text: str) -> list[TensorType]:
    """The tensors among the inputs of a call, lists walked into (their types are float32 unless known)."""
    try:
        shapes = decode_shapes(text)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError):
        return []
    found = []
    for dims, kind in zip(shapes.dims, shapes.types, strict=False):
        dtype = DTYPES.get(kind.lower())
        if not isinstance(dims, list) or kind == "Scalar":
            continue
        if kind.startswith("TensorList") or (dims and isinstance(dims[0], list)):
            inner = DTYPES.get(kind.partition(":")[2].lower(), "float32")
            lists = [each for each in dims if isinstance(each, list) and all(isinstance(d, int) for d in each)]
            found += [TensorType(dims=tuple(each), dtype=inner) for each in lists]
        elif dtype is not None and all(isinstance(d, int) for d in dims):
            found.append(TensorType(dims=tuple(dims), dtype=dtype))
    return found
