"""The normal form of terms: what is cancelled as soon as it is made. Every cancellation removes work or a view.

`CANCELLATIONS` names them; the verifier holds each equal to what it replaces, as it does with rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from foretrace.plan.rewrite.term import Term

Make = Callable[..., Term]  # `Terms.make`

CANCELLATIONS = {
    "slice-of-all": "a slice of everything is the tensor",
    "slice-of-slice": "a slice of a slice is a slice",
    "slice-of-concat": "a slice of a concatenation is one of the parts it lies in",
    "concat-of-one": "a concatenation of one tensor is the tensor",
    "concat-of-concat": "a concatenation of concatenations along the same axis is one",
    "concat-of-slices": "neighbouring slices concatenated again are a slice",
    "permute-of-permute": "two permutations are one; the identity is none",
    "reshape-of-reshape": "of two reshapes the last one counts; to the same sizes it is none",
}


def simplified(make: Make, op: str, inputs: Sequence[Term], a: dict[str, Any]) -> Term | None:
    """Return the simpler value; None where the operator is in normal form already."""
    if op == "slice":
        return _slice(make, inputs[0], a["axis"], a["start"], a["length"])
    if op == "concat":
        return _concat(make, list(inputs), a["axis"])
    if op == "permute":
        return _permute(make, inputs[0], tuple(a["order"]))
    if op == "reshape":
        x = inputs[0]
        if x.dims == tuple(a["dims"]):
            return x
        if x.op == "reshape":
            return make("reshape", x.inputs, dims=tuple(a["dims"]))
    return None


def _slice(make: Make, x: Term, axis: int, start: int, length: int) -> Term | None:
    if start == 0 and length == x.dims[axis]:
        return x
    if x.op == "slice" and x["axis"] == axis:
        return make("slice", x.inputs, axis=axis, start=x["start"] + start, length=length)
    if x.op == "concat" and x["axis"] == axis:
        return _slice_of_concat(make, x, axis, start, length)
    return None


def _slice_of_concat(make: Make, x: Term, axis: int, start: int, length: int) -> Term | None:
    """Replace a slice of a concatenation, only where it begins and ends with parts, or lies in one: else work would be
    added.
    """
    at, whole = 0, []
    for part in x.inputs:
        size = part.dims[axis]
        if at <= start and start + length <= at + size:
            return make("slice", (part,), axis=axis, start=start - at, length=length)
        if start <= at and at + size <= start + length:
            whole.append(part)
        at += size
    if whole and sum(each.dims[axis] for each in whole) == length:
        return make("concat", whole, axis=axis)
    return None


def _concat(make: Make, parts: list[Term], axis: int) -> Term | None:
    if len(parts) == 1:
        return parts[0]
    flat: list[Term] = []
    for part in parts:
        flat += part.inputs if part.op == "concat" and part["axis"] == axis else [part]
    joined = [flat[0]]
    for part in flat[1:]:
        last = joined[-1]
        if (
            last.op == part.op == "slice" and last.inputs == part.inputs and last["axis"] == part["axis"] == axis
            and last["start"] + last["length"] == part["start"]
        ):  # fmt: skip
            joined[-1] = make(
                "slice", part.inputs, axis=axis, start=last["start"], length=last["length"] + part["length"]
            )
        else:
            joined.append(part)
    if len(joined) == len(parts) and all(a is b for a, b in zip(joined, parts, strict=True)):
        return None
    return make("concat", joined, axis=axis)


def _permute(make: Make, x: Term, order: tuple[int, ...]) -> Term | None:
    if order == tuple(range(len(order))):
        return x
    if x.op == "permute":
        return make("permute", x.inputs, order=tuple(x["order"][i] for i in order))
    return None
