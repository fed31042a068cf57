"""Inputs of a call as JSON text, and names of types in both spellings.

A text is what PyTorch's profiler writes, JSON `[dims, types, concrete]` with every argument of an operator's schema,
also those left at their default. A tensor is its sizes and the C++ name of its type; numbers are "Scalar", lists of
numbers "ScalarList", both with their value as text; a number in the place of a tensor is a tensor without dimensions;
all else is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import msgspec

from foretrace.graph import work
from foretrace.trace.trace import told_shapes

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

_DISPATCHED = RECORDED | {"int16": "short int"}  # of a call that is dispatched
# Numbers of torch.dtype, torch.memory_format and torch.layout in C++, by which the profiler names them.
_NUMBERS = {
    "torch.uint8": "0", "torch.int8": "1", "torch.int16": "2", "torch.int32": "3", "torch.int64": "4",
    "torch.float16": "5", "torch.float32": "6", "torch.float64": "7", "torch.complex64": "9", "torch.complex128": "10",
    "torch.bool": "11", "torch.bfloat16": "15", "torch.float8_e5m2": "23", "torch.float8_e4m3fn": "24",
    "torch.contiguous_format": "0", "torch.preserve_format": "1", "torch.channels_last": "2",
    "torch.channels_last_3d": "3", "torch.strided": "0", "torch.sparse_coo": "1",
}  # fmt: skip
_WHOLE_BELOW = 1e10  # the profiler writes whole doubles below this without an exponent, as "2."

LARGEST = 2**62  # elements or bytes of anything


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """Sizes and type of a tensor."""

    dims: tuple[int, ...]
    dtype: str = "float32"


def text_of(dims: Sequence[Any], dtypes: Sequence[Any], concrete: Sequence[str] = ()) -> str:
    """Return JSON `[dims, types, concrete]` of a call.

    Per argument: the sizes and type of a tensor; lists of both for a list of tensors; `[]` and "" for what is none.
    """
    types = ["TensorList" if isinstance(each, list | tuple) else RECORDED.get(each, each) for each in dtypes]
    values = [*concrete, *[""] * (len(types) - len(concrete))]
    return msgspec.json.encode([list(dims), types, values]).decode()


def text_of_values(inputs: Iterable[TensorType], concrete: Sequence[str] = ()) -> str:
    """Return the text of a call whose arguments are these tensors, and after them what is no tensor."""
    given = list(inputs)
    dims = [*(each.dims for each in given), *([] for _ in concrete)]
    types = [*(each.dtype for each in given), *["Scalar"] * len(concrete)]
    return text_of(dims, types, [*[""] * len(given), *concrete])


def call_text(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the inputs of a call of the operator with this schema (`torch._C.FunctionSchema`)."""
    parts = [
        _part(args[i] if i < len(args) else kwargs.get(name, default), kind)
        for i, (name, kind, default) in enumerate(arguments(schema))
    ]
    return msgspec.json.encode(list(zip(*parts, strict=True)) or [[], [], []]).decode()


_arguments: dict[tuple[str, str], tuple[tuple[str, str, Any], ...]] = {}


def arguments(schema: Any) -> tuple[tuple[str, str, Any], ...]:
    """Return (name, type, default) of every argument of a schema."""
    key = schema.name, schema.overload_name
    if key not in _arguments:
        _arguments[key] = tuple(
            (each.name, str(each.type), each.default_value if each.has_default_value() else None)
            for each in schema.arguments
        )
    return _arguments[key]


def dtype_name(dtype: Any) -> str:
    """Return `torch.float32` as "float32"."""
    return str(dtype).removeprefix("torch.")


def _part(value: Any, kind: str) -> tuple[Any, str, str]:
    """Return sizes, type and value of one argument."""
    if hasattr(value, "untyped_storage"):
        name = dtype_name(value.dtype)
        return list(value.shape), _DISPATCHED.get(name, name), ""
    if isinstance(value, bool | int | float):
        if kind in ("Tensor", "Optional[Tensor]"):  # a number in the place of a tensor
            return [], {bool: "bool", int: "long int"}.get(type(value), "double"), ""
        return [], "Scalar", _number(float(value) if kind in ("float", "Optional[float]") else value)
    if isinstance(value, list | tuple) and "Tensor" in kind:
        if any(each is None for each in value):
            return [], "", ""  # the profiler does not look into lists of optional tensors
        types = {_DISPATCHED.get(dtype_name(each.dtype), "float") for each in value}
        other = len(types) == 1 and types != {"float"}  # as `cost.arguments` writes lists of another type
        return [list(each.shape) for each in value], f"TensorList:{types.pop()}" if other else "TensorList", ""
    if isinstance(value, list | tuple):
        return [], "ScalarList", "[" + ", ".join(map(_number, value)) + "]"
    found = _NUMBERS.get(str(value), "")
    return [], "Scalar" if found else "", found


def _number(value: bool | int | float) -> str:
    if isinstance(value, float):
        if abs(value) < _WHOLE_BELOW and value == int(value):
            return f"{int(value)}."
        return format(value, ".17g")
    return str(value)


@lru_cache(maxsize=4096)
def complaint(text: str) -> str:
    """Return what is wrong with a text that a user wrote: "" if nothing is."""
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
    """Return sizes of the tensors among the inputs, lists walked into; [] where the text cannot be read."""
    return [tuple(dims) for dims, _ in work.tensors(told_shapes(text))]


def inputs_of(text: str) -> list[TensorType]:
    """Return the tensors among the inputs of a call, lists walked into (their types are float32 unless known)."""
    shapes, found = told_shapes(text), list[TensorType]()
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
