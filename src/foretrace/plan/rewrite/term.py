"""`Term`: one value of a functional graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

Dims = tuple[int, ...]
Attributes = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Term:
    """One value: an operator of `shapes.KNOWN`, "leaf", or the name of an ATen operator that rules leave alone."""

    op: str
    inputs: tuple[Term, ...]
    attributes: Attributes  # sorted by name; hashable values
    dims: Dims
    strides: Dims  # in elements
    dtype: str  # as PyTorch calls it, "float32"
    constant: bool
    number: int
    lookup: dict[str, Any] = field(repr=False)

    def __getitem__(self, name: str) -> Any:
        """Return an attribute."""
        return self.lookup[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or the default."""
        return self.lookup.get(name, default)

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.dims)

    def __repr__(self) -> str:
        return f"%{self.number}={self.op}({', '.join(f'%{each.number}' for each in self.inputs)}){list(self.dims)}"
