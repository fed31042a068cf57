"""Results of calls that were made before with tensors of the same sizes: layers of a model repeat, and so do steps.

PyTorch works sizes out in Python, in a tenth of a millisecond to a whole one. Only what is sure to come out alike is
taken from before: operators that neither write to what they are given nor return a view of it, on plain tensors
without data (`sizes`), with numbers, types and lists of these for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FIXED = frozenset([
    int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format
])  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Made:
    """A tensor with a storage of its own, just as large as it has to be."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: Any
    device: Any

    def again(self, fake: Any) -> Any:
        if fake is None:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
        from torch._subclasses.fake_tensor import FakeTensor

        with torch._C._DisableTorchDispatch():  # as fake tensors make theirs
            made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
        return FakeTensor(fake, made, self.device)


class RepeatedCalls:
    """What calls returned, by operator and what they were given; on meta tensors, or those of a `FakeTensorMode`."""

    def __init__(self, fake: Any = None) -> None:
        self._fake = fake
        self._made: dict[Any, Any] = {}
        self._pure: dict[Any, bool] = {}

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what the call returns: new tensors, as they were the last time."""
        key = self._key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        found = self._made.get(key)
        if found is not None:
            return self._again(found)
        out = func(*args, **kwargs)
        kept = self._kept(out, (args, kwargs.values()))
        if kept is not None:
            self._made[key] = kept
        return out

    def _key(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what decides on the sizes of what a call returns; None where that may be more than can be seen."""
        pure = self._pure.get(func)
        if pure is None:
            pure = self._pure[func] = _pure(func)
        if not pure:
            return None
        parts: list[Any] = [func, torch.get_default_dtype()]
        if not self._describe(args, parts):
            return None
        for name, value in kwargs.items():
            parts.append(name)
            if not self._describe(value, parts):
                return None
        return tuple(parts)

    def _describe(self, value: Any, parts: list[Any]) -> bool:
        """Add what an argument is; False where it is something that cannot be described."""
        kind = type(value)
        if kind in _FIXED:
            parts += (kind, value)  # 1, 1.0 and True are equal, and other types come of them
        elif kind is list or kind is tuple:
            parts += (list, len(value))
            return all(self._describe(each, parts) for each in value)
        elif self._plain(value):
            parts += (torch.Tensor, value.dtype, value.shape, value.stride(), value.storage_offset())
            if self._fake is not None:
                parts.append(value.fake_device)
        else:
            return False
        return True

    def _plain(self, value: Any) -> bool:
        """Return whether something is a tensor of which sizes and type say everything."""
        if self._fake is None:
            known = type(value) in _PLAIN and value.is_meta
        else:  # one with a constant knows its values
            known = getattr(value, "fake_mode", None) is self._fake and value.constant is None
        return known and value.layout == torch.strided and not value.is_conj() and not value.is_neg()

    def _kept(self, out: Any, given: Any) -> Any:
        """Return how to make what a call returned, None where that is not all new: `_unsafe_view` does not say so."""
        storages = {each.untyped_storage()._cdata for each in _tensors(given)}
        made: list[_Made | None] = []
        for each in out if isinstance(out, tuple | list) else (out,):
            if each is None:
                made.append(None)
                continue
            if not isinstance(each, torch.Tensor) or not self._plain(each) or each.storage_offset():
                return None
            recipe = _Made(tuple(each.shape), tuple(each.stride()), each.dtype, getattr(each, "fake_device", None))
            storage = each.untyped_storage()
            if storage._cdata in storages or recipe.again(self._fake).untyped_storage().nbytes() != storage.nbytes():
                return None
            storages.add(storage._cdata)
            made.append(recipe)
        return type(out) if isinstance(out, tuple | list) else None, tuple(made)

    def _again(self, found: tuple[Callable[[Any], Any] | None, tuple[_Made | None, ...]]) -> Any:
        kind, recipes = found
        made = [None if each is None else each.again(self._fake) for each in recipes]
        return made[0] if kind is None else kind(made)


def _pure(func: Any) -> bool:
    """Return whether an operator makes new tensors from its arguments alone."""
    schema = func._schema
    return func.namespace == "aten" and all(each.alias_info is None for each in (*schema.arguments, *schema.returns))


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif not isinstance(value, str) and isinstance(value, Iterable):
        for each in value:
            yield from _tensors(each)
