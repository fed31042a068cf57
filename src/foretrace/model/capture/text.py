"""The inputs of a dispatched call as PyTorch's profiler writes them: JSON `[dims, types, concrete]`.

The profiler has every argument of an operator's schema, also those left at their default. A tensor is its sizes and the
C++ name of its type; numbers are "Scalar", lists of numbers "ScalarList", both with their value as text; a number in
the place of a tensor is a tensor without dimensions; all else is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from foretrace.model.texts import RECORDED

_TYPES = RECORDED | {"int16": "short int"}
# Numbers of torch.dtype, torch.memory_format and torch.layout in C++, by which the profiler names them.
_NUMBERS = {
    "torch.uint8": "0", "torch.int8": "1", "torch.int16": "2", "torch.int32": "3", "torch.int64": "4",
    "torch.float16": "5", "torch.float32": "6", "torch.float64": "7", "torch.complex64": "9", "torch.complex128": "10",
    "torch.bool": "11", "torch.bfloat16": "15", "torch.float8_e5m2": "23", "torch.float8_e4m3fn": "24",
    "torch.contiguous_format": "0", "torch.preserve_format": "1", "torch.channels_last": "2",
    "torch.channels_last_3d": "3", "torch.strided": "0", "torch.sparse_coo": "1",
}  # fmt: skip
_WHOLE_BELOW = 1e10  # the profiler writes whole doubles below this without an exponent, as "2."

Part = tuple[Any, str, str]  # dims, type, concrete value of one argument


def dtype_name(dtype: Any) -> str:
    """`torch.float32` as "float32"."""
    return str(dtype).removeprefix("torch.")


def call_text(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The inputs of a call of the operator with this schema (`torch._C.FunctionSchema`)."""
    parts = []
    for i, (name, kind, default) in enumerate(arguments(schema)):
        value = args[i] if i < len(args) else kwargs.get(name, default)
        parts.append(_part(value, kind))
    return join(parts)


def join(parts: Sequence[Part]) -> str:
    """The text of a call with these arguments."""
    columns: list[list[Any]] = [list(column) for column in zip(*parts, strict=True)] if parts else [[], [], []]
    return msgspec.json.encode(columns).decode()


_arguments: dict[tuple[str, str], tuple[tuple[str, str, Any], ...]] = {}


def arguments(schema: Any) -> tuple[tuple[str, str, Any], ...]:
    """(name, type, default) of every argument of a schema."""
    key = schema.name, schema.overload_name
    if key not in _arguments:
        _arguments[key] = tuple(
            (each.name, str(each.type), each.default_value if each.has_default_value() else None)
            for each in schema.arguments
        )
    return _arguments[key]


def number(value: bool | int | float) -> Part:
    """An argument that is a number."""
    return [], "Scalar", _number(value)


def numbers(values: Sequence[bool | int | float]) -> Part:
    """An argument that is a list of numbers."""
    return [], "ScalarList", "[" + ", ".join(map(_number, values)) + "]"


NOTHING: Part = ([], "", "")


def _part(value: Any, kind: str) -> Part:
    if value is None:
        return NOTHING
    if hasattr(value, "untyped_storage"):
        return list(value.shape), _TYPES.get(dtype_name(value.dtype), dtype_name(value.dtype)), ""
    if isinstance(value, bool | int | float):
        if kind in ("Tensor", "Optional[Tensor]"):  # a number in the place of a tensor
            return [], {bool: "bool", int: "long int"}.get(type(value), "double"), ""
        return number(float(value) if kind in ("float", "Optional[float]") else value)
    if isinstance(value, list | tuple):
        if "Tensor" in kind:
            if any(each is None for each in value):
                return [], "", ""  # the profiler does not look into lists of optional tensors
            types = {_TYPES.get(dtype_name(each.dtype), "") for each in value}
            other = len(types) == 1 and not types & {"float", ""}  # as `cost.arguments` writes lists of another type
            return [list(each.shape) for each in value], f"TensorList:{types.pop()}" if other else "TensorList", ""
        return numbers(value)
    found = _NUMBERS.get(str(value))
    return ([], "Scalar", found) if found is not None else NOTHING


def _number(value: bool | int | float) -> str:
    if isinstance(value, float):
        if abs(value) < _WHOLE_BELOW and value == int(value):
            return f"{int(value)}."
        return format(value, ".17g")
    return str(value)
