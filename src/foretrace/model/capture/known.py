"""Values that a model's code makes from nothing but sizes: positions, masks, lengths, counters of steps.

Code may look at them (`if mask.all():`), in a capture as in a real run. So what is made without data and is small is
really computed beside the sizes, and forgotten as soon as something unknown is written into it. What is made of the
example batch alone is computed, too, but code must not look at it: only the share of denormal numbers is asked of it.
Of unknown numbers, scores of an attention, it is kept what known ones, a mask, were added to them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from typing import Any

from foretrace.model.capture.light import replaced

_MOST = 2**17  # elements that are computed; positions of 32 sequences of 4096
_VALUE, _SPOILED, _BATCH = "_foretrace_value", "_foretrace_spoiled", "_foretrace_batch"
_ADDED = "_foretrace_added"
_KEEPING_ROWS = frozenset(
    f"aten::{each}" for each in ("add", "view", "_unsafe_view", "expand", "unsqueeze", "clone", "alias", "_to_copy")
)


def of_batch(tensor: Any, example: Any) -> Any:
    """Return the tensor without data, told that it stands for this one of a batch."""
    if example.device.type == "cpu" and type(tensor) is not type(example) and example.numel() <= _MOST:
        setattr(tensor, _VALUE, example.detach().clone())
        setattr(tensor, _BATCH, True)
    return tensor


def denormal(tensor: Any, together: int = 1) -> float | None:
    """Return the share of a tensor's numbers that are denormal, None if its values are not known.

    Of so many neighbours `together` one is enough: a product loads the rows of its second operand as vectors.
    """
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    value = _real(tensor)
    if value is None or not value.is_floating_point() or not value.numel():
        return None
    with _disable_current_modes():
        tiny = ((value != 0) & (value.abs() < torch.finfo(value.dtype).tiny)).flatten()
        groups = torch.nn.functional.pad(tiny, (0, -len(tiny) % together)).view(-1, together)
        return float(groups.any(1).double().mean())


def vanishing(tensor: Any) -> float | None:
    """Return the share of numbers that a softmax of a tensor makes denormal by the mask added to it; None without one.

    Scores are taken to be small beside the mask: exp(-100) is denormal, exp(-200) and exp(-inf) are zero.
    """
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    added = _added(tensor)
    if added is None or not added.ndim or added.shape[-1] != tensor.shape[-1]:
        return None
    with _disable_current_modes():
        made, info = added.double().log_softmax(-1).exp(), torch.finfo(tensor.dtype)
        return float(((made < info.tiny) & (made > info.tiny * info.eps / 2)).double().mean())


def _added(tensor: Any) -> Any:
    """Return known numbers that were added to a tensor, of a shape that can be expanded to its own; None without."""
    if not hasattr(tensor, "untyped_storage") or getattr(tensor.untyped_storage(), _SPOILED, False):
        return None
    return getattr(tensor, _ADDED, getattr(tensor, _VALUE, None))


def values_of(tensor: Any) -> Any:
    """Return the values of a tensor as numbers in lists, None if they are not known or another batch has others."""
    from torch.utils._python_dispatch import _disable_current_modes

    value = _real(tensor)
    if value is None or getattr(tensor, _BATCH, False):
        return None
    with _disable_current_modes():
        return value.tolist()


def _real(tensor: Any) -> Any:
    value = getattr(tensor, _VALUE, None)
    if value is None or getattr(tensor.untyped_storage(), _SPOILED, False):
        return None
    return value


def _unknown(value: Any) -> bool:
    """Return whether there is a tensor among what a call is given whose values are not known."""
    import torch

    if isinstance(value, torch.Tensor):
        return not (type(value) is torch.Tensor and value.device.type == "cpu") and _real(value) is None
    return isinstance(value, list | tuple) and any(map(_unknown, value))


def follow(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Compute the values of what a call made, if those of its inputs are known."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    made = [each for each in (out if isinstance(out, list | tuple) else [out]) if isinstance(each, torch.Tensor)]
    if not made and not func._schema.is_mutable:
        return
    if any(map(_unknown, (*args, *kwargs.values()))):  # nearly always
        _go_on(func, args, kwargs, out)
        return
    most, batch = 0, False

    def look(value: Any) -> Any:
        nonlocal most, batch
        if isinstance(value, torch.Tensor):
            batch = batch or getattr(value, _BATCH, False)
            most = max(most, value.numel())
            return value if type(value) is torch.Tensor and value.device.type == "cpu" else _real(value)
        if isinstance(value, list | tuple):
            return [look(each) for each in value]
        return value

    given = [look(each) for each in args]
    named = {key: look(value) for key, value in kwargs.items()}
    if "device" in named:
        named["device"] = None
    small = max([most, *(each.numel() for each in made)]) <= _MOST and func.namespace == "aten"
    if not small or torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name:
        _go_on(func, args, kwargs, out)
        return
    try:
        with _disable_current_modes(), torch.no_grad():
            found = func(*given, **named)
    except (RuntimeError, TypeError, NotImplementedError):
        return
    values = found if isinstance(found, list | tuple) else [found]
    for tensor, value in zip(made, values, strict=False):
        if type(tensor) is not torch.Tensor and isinstance(value, torch.Tensor):
            setattr(tensor, _VALUE, value)
            if batch:
                setattr(tensor, _BATCH, True)


def _go_on(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
    """Mark what an unknown call wrote as unknown; note what a sum or a copy has of known numbers."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    if func._schema.is_mutable:
        _spoil(func, args, kwargs)
    elif func._schema.name in _KEEPING_ROWS:
        added = [each for each in map(_added, args) if each is not None]
        with _disable_current_modes(), suppress(RuntimeError):  # of shapes that do not go together
            if added and prod(torch.broadcast_shapes(*(each.shape for each in added))) <= _MOST:
                setattr(out, _ADDED, sum(added))


def _spoil(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Mark what a call wrote from something unknown as unknown, however it is looked at."""
    import torch

    for i, each in enumerate(func._schema.arguments):
        if each.alias_info is None or not each.alias_info.is_write:
            continue
        value = args[i] if i < len(args) else kwargs.get(each.name)
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                setattr(tensor.untyped_storage(), _SPOILED, True)


@contextmanager
def as_if_real() -> Iterator[None]:
    """Let libraries that treat fake tensors in another way treat them as real ones."""
    home, name = sys.modules.get("transformers.utils.import_utils"), "is_fake_tensor"
    with replaced([(home, name, lambda _: False)] if hasattr(home, name) else []):
        yield
