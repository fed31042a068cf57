"""What speed models ask of a placement's shape: the dimensions of its all-reduce, and whether it is shared."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet.speeds import Shape
from foretrace.fleet.workload import Int64


def dimensions(shape: Shape) -> tuple[tuple[int, int], ...]:
    """(level, size) of each dimension that an all-reduce over these GPUs has, innermost first; sizes are 2 or more.

    GPUs that lie evenly make one dimension per level: GPUs per node, nodes per rack, ... Uneven ones make a flat ring
    of all of them at the widest level that they use (shared reference of ArtISt-sim; its hierarchy differs there).
    """
    if shape.gpus == 1:
        return ()
    inside = (shape.gpus, *shape.units[:-1])
    whole = all(below % units == 0 for below, units in zip(inside, shape.units, strict=True))
    if not shape.even or not whole:
        return ((shape.level - 1, shape.gpus),)
    sizes = [below // units for below, units in zip(inside, shape.units, strict=True)]
    return tuple((level, size) for level, size in enumerate(sizes) if size > 1)


def coded(keys: Iterable[Hashable]) -> Int64:
    """Equal keys as equal small whole numbers, counted in the order of their first appearance."""
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(key, len(seen)) for key in keys], np.int64)


def alone(speeds: str, shape: Shape) -> None:
    """Raise ForetraceError where other jobs are on the same GPUs, for models that know nothing of sharing."""
    if shape.sharers:
        raise ForetraceError(
            f"the speed model {speeds!r} does not know how jobs slow each other down on one GPU; give every job whole "
            "GPUs, or use a table of pairs."
        )
