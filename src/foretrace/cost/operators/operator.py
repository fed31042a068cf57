"""`Operator`: one call of an ATen operator by name and inputs, as a recording shows it, and its changed twins.

Its text is an entry of `TaskGraph.shapes`: JSON `[dims, types, concrete]`, with a fourth item, the memory layout, where
that is not the contiguous one. Two calls with the same name and text cost the same on one machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from foretrace.trace.trace import Shapes, decode_shapes

FLOATS = frozenset(["float", "c10::BFloat16", "c10::Half"])
BFLOAT16 = "c10::BFloat16"
CONTIGUOUS, CHANNELS_LAST = "", "channels_last"


@dataclass(frozen=True)
class Operator:
    """One call of an operator. Hashable: equal calls are measured once."""

    name: str  # "aten::addmm", or "package.module:function" that prepares a call to be timed (see `bench`)
    text: str

    @classmethod
    def of(
        cls, name: str, dims: list[Any], types: list[str], concrete: list[str] | None = None, layout: str = CONTIGUOUS
    ) -> Operator:
        """Make it from its parts, each with one entry per argument: dims [2, 3] of a tensor, [[2], [3]] of a
        list, [].
        """
        parts: list[Any] = [dims, types, concrete if concrete is not None else [""] * len(dims)]
        if layout:
            parts.append(layout)
        return cls(name, msgspec.json.encode(parts).decode())

    @cached_property
    def _shapes(self) -> Shapes:
        return decode_shapes(self.text)

    @property
    def dims(self) -> list[Any]:
        """Per argument: sizes of a tensor, sizes of every tensor of a list, or []."""
        return list(self._shapes.dims)

    @property
    def types(self) -> list[str]:
        """Per argument: "float", "c10::BFloat16", "long int", "TensorList", "Scalar", "", ..."""
        return list(self._shapes.types)

    @property
    def concrete(self) -> list[str]:
        """Per argument: the value of what is no tensor, as text; "" where there is none."""
        return list(self._shapes.concrete)

    def tensor(self, at: int) -> tuple[int, ...]:
        """Return sizes of the tensor at this place; () where there is none, or the recording does not tell."""
        sizes = self._shapes.dims[at] if at < len(self._shapes.dims) else []
        return tuple(sizes) if all(isinstance(size, int) for size in sizes) else ()

    def type(self, at: int) -> str:
        """Return the type of the argument at this place; "" where the recording does not tell."""
        return self._shapes.types[at] if at < len(self._shapes.types) else ""

    @property
    def layout(self) -> str:
        """Memory layout of its four-dimensional tensors."""
        return self._shapes.layout

    def with_types(self, types: list[str]) -> Operator:
        """Return the same call on inputs of other types."""
        return Operator.of(self.name, self.dims, types, self.concrete, self.layout)

    def with_dims(self, dims: list[Any]) -> Operator:
        """Return the same call on inputs of other sizes."""
        return Operator.of(self.name, dims, self.types, self.concrete, self.layout)

    def with_layout(self, layout: str) -> Operator:
        """Return the same call on inputs in another memory layout."""
        return Operator.of(self.name, self.dims, self.types, self.concrete, layout)

    @property
    def key(self) -> str:
        """What a calibration stores its time under."""
        return f"{self.name} {self.text}"

    @property
    def near_key(self) -> str:
        """The same for a call that finds its data in a cache."""
        return f"near {self.key}"


def call(name: str, *arguments: list[int] | list[list[int]] | str | tuple[str, list[int]] | None) -> Operator:
    """Return an operator from float tensors (sizes), other tensors (type, sizes), values (text) and absent ones
    (None).
    """
    dims: list[Any] = []
    types: list[str] = []
    concrete: list[str] = []
    for each in arguments:
        if isinstance(each, tuple):
            dims.append(each[1])
            types.append(each[0])
            concrete.append("")
        elif isinstance(each, list):
            dims.append(each)
            types.append("TensorList" if each and isinstance(each[0], list) else "float")
            concrete.append("")
        else:
            dims.append([])
            types.append("" if each is None else "ScalarList" if each.startswith("[") else "Scalar")
            concrete.append(each or "")
    return Operator.of(f"aten::{name}", dims, types, concrete)
