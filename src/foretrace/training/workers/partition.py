"""Deal samples out to workers by their labels; names and meaning as of Flower's partitioners.

A partition is the numbers of a worker's samples, sorted; every sample is in exactly one of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from foretrace.arrays import Int64
from foretrace.errors import ForetraceError
from foretrace.names import chosen, keyed

_TRIES = 10  # of drawing proportions, as Flower's


def iid(labels: Int64, partitions: int, seed: int) -> list[Int64]:
    """Return random shares of equal size (`IidPartitioner`)."""
    return _split(np.random.default_rng(seed).permutation(len(labels)), np.ones(partitions))


def pathological(labels: Int64, partitions: int, seed: int, *, classes: float = 1) -> list[Int64]:
    """Assign so many classes on each worker, each shared equally by those who have it (`PathologicalPartitioner`).

    Classes are assigned in order, as by class_assignment_mode="deterministic" where workers take all classes; where
    one class each would leave some out, every worker has the next so many. Raises ForetraceError where that loses any.
    """
    kinds = np.unique(labels)
    count = int(classes)
    if not 1 <= count <= len(kinds):
        raise ForetraceError(f"classes must be 1 to {len(kinds)}, got {count}; that many labels there are.")
    if partitions * count < len(kinds):
        raise ForetraceError(
            f"{partitions} workers with {count} class{'es' * (count > 1)} each leave {len(kinds) - partitions * count} "
            f"of {len(kinds)} labels out; give classes={-(-len(kinds) // partitions)} or more."
        )
    jump = 1 if partitions >= len(kinds) else -(-len(kinds) // partitions)
    owned = [{(worker * jump + i) % len(kinds) for i in range(count)} for worker in range(partitions)]
    parts: list[list[Int64]] = [[] for _ in range(partitions)]
    for number, kind in enumerate(kinds):
        owners = [worker for worker in range(partitions) if number in owned[worker]]
        mine = np.flatnonzero(labels == kind)
        for worker, share in zip(owners, np.array_split(mine, len(owners)), strict=True):
            parts[worker].append(share)
    return [np.sort(np.concatenate(each)) for each in parts]


def dirichlet(
    labels: Int64, partitions: int, seed: int, *, alpha: float = 0.5, least: float = 10, balanced: float = 1
) -> list[Int64]:
    """Return shares of every class drawn from a Dirichlet distribution (`DirichletPartitioner`).

    `least` samples on each worker, drawn again up to ten times; `balanced` 1: who has the mean number gets no more.
    """
    if not alpha > 0:
        raise ForetraceError(f"alpha must be above 0, got {alpha:g}; small ones deal out unevenly, large ones evenly.")
    random = np.random.default_rng(seed)
    for _ in range(_TRIES):
        parts: list[list[Int64]] = [[] for _ in range(partitions)]
        sizes = np.zeros(partitions)
        for kind in np.unique(labels):
            shares = random.dirichlet(np.full(partitions, alpha))
            if balanced and (kept := np.where(sizes > len(labels) / partitions, 0, shares)).any():
                shares = kept
            for worker, own in enumerate(_split(np.flatnonzero(labels == kind), shares)):
                parts[worker].append(own)
                sizes[worker] += len(own)
        if sizes.min() >= least:
            return [np.sort(np.concatenate(each)) for each in parts]
    raise ForetraceError(
        f"alpha={alpha:g} left a worker with fewer than {least:g} samples {_TRIES} times; raise alpha=, or lower least="
    )


def quantity(labels: Int64, partitions: int, seed: int, *, power: float = 1) -> list[Int64]:
    """Return labels alike and sizes as 1, 2, 3, ... to a power: `LinearPartitioner` by 1, `SquarePartitioner` by 2."""
    if not 0 <= power <= 100:
        raise ForetraceError(f"power must be 0 to 100, got {power:g}; 0 deals out evenly.")
    sizes = np.arange(1, partitions + 1, dtype=np.float64) ** power
    return _split(np.random.default_rng(seed).permutation(len(labels)), sizes)


PARTITIONS: dict[str, Callable[..., list[Int64]]] = {
    "iid": iid, "pathological": pathological, "dirichlet": dirichlet, "quantity": quantity,
}  # fmt: skip


def partition(text: str, labels: Int64, partitions: int, *, seed: int = 0) -> list[Int64]:
    """Return samples of each worker, as written: "dirichlet alpha=0.1". labels: (samples). Raises ForetraceError."""
    name, *words = text.split() or ("",)
    found = chosen(name, PARTITIONS, f"there is no partition {name!r}")
    if not 1 <= partitions <= len(labels):
        raise ForetraceError(f"Workers must be 1 to {len(labels)}, one sample each at least; got {partitions}.")
    known = list(PARTITIONS[found].__kwdefaults__ or ())
    try:
        given = {key: float(value) for key, value in keyed(words, known, found).items()}
    except ValueError as error:
        raise ForetraceError(f"{found}: {error}; write a number.") from None
    return PARTITIONS[found](labels, partitions, seed, **given)


def _split(numbers: Int64, shares: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> list[Int64]:
    """Return numbers cut in proportion to shares."""
    ends = (np.cumsum(shares / shares.sum()) * len(numbers)).astype(np.int64)
    return [np.sort(each) for each in np.split(numbers, ends[:-1])]
