"""Orders in which a buffer holds partitions so that every pair of them meets: BETA and COMET.

MariusGNN (Waleffe et al., EuroSys 2023) and Marius (Mohoney et al., OSDI 2021), section 4.1. A state is what the buffer
holds at a time; a swap is a partition that is read while others stay. All is a function of sizes and seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from foretrace.arrays import Int64
from foretrace.errors import ForetraceError

State = tuple[int, ...]  # partitions in the buffer, ascending


def beta(partitions: int, buffer: int, random: np.random.Generator) -> tuple[State, ...]:
    """Return states in which every two of the partitions meet; each differs from the one before by a single partition.

    Raises ForetraceError for a buffer of one partition, or of more than there are.
    """
    _check(partitions, buffer)
    order = random.permutation(partitions)
    held, rest = order[:buffer].copy(), order[buffer:].copy()
    states = [_state(held)]
    while len(rest):
        random.shuffle(held)
        random.shuffle(rest)
        for i in range(len(rest)):
            rest[i], held[-1] = held[-1], rest[i]
            states.append(_state(held))
        fresh = min(buffer - 1, len(rest))
        for i in range(fresh):  # those that stayed have met all others
            held[i] = rest[i]
            states.append(_state(held))
        rest = rest[fresh:]
    return tuple(states)


def comet(partitions: int, buffer: int, random: np.random.Generator, *, group: int = 2) -> tuple[State, ...]:
    """Return states of BETA over groups of `group` partitions, which are drawn again each time (MariusGNN, section
    5.1).

    Raises ForetraceError where groups do not make up partitions and buffer, or fewer than two groups fit.
    """
    if group < 1 or partitions % group or buffer % group:
        raise ForetraceError(
            f"{partitions} partitions and a buffer of {buffer} must be multiples of the group {group}."
        )
    members = random.permutation(partitions).reshape(-1, group)
    return tuple(_state(members[list(held)].ravel()) for held in beta(partitions // group, buffer // group, random))


ORDERS = {"beta": beta, "comet": comet}


def assign(states: Sequence[State], partitions: int, random: np.random.Generator | None = None) -> list[Int64]:
    """Return which buckets (i, j) are trained in which state: (n, 2) per state, every ordered pair in one of them.

    Without `random` a bucket goes to the first state that holds both ends (BETA), with it to a uniformly random one of
    them (COMET). Raises ForetraceError where two partitions never meet.
    """
    holds = np.zeros((len(states), partitions), bool)
    for row, state in zip(holds, states, strict=True):
        row[list(state)] = True
    both = holds[:, :, None] & holds[:, None, :]
    if not both.any(axis=0).all():
        apart = np.argwhere(~both.any(axis=0))[0]
        raise ForetraceError(f"Partitions {apart[0]} and {apart[1]} must meet in a state; no state holds both.")
    keys = both * (1 - random.random(both.shape)) if random is not None else both
    chosen = keys.argmax(axis=0)
    return [np.argwhere(chosen == k) for k in range(len(states))]


def swaps(states: Sequence[State]) -> int:
    """Return partitions read after the first state."""
    return sum(len({*after} - {*before}) for before, after in pairwise(states))


def swaps_bound(partitions: int, buffer: int) -> int:
    """Return the least number of swaps in which all pairs can meet: each brings at most buffer - 1 new pairs."""
    _check(partitions, buffer)
    pairs = partitions * (partitions - 1) // 2 - buffer * (buffer - 1) // 2
    return -(-pairs // (buffer - 1)) if pairs else 0


def _check(partitions: int, buffer: int) -> None:
    if not (2 <= buffer <= partitions or buffer == partitions == 1):
        raise ForetraceError(f"A buffer must hold 2 to {partitions} partitions, got {buffer}.")


def _state(held: Int64) -> State:
    return tuple(sorted(held.tolist()))
