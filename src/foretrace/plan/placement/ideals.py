"""The best contiguous placement for throughput: dynamic programming over predecessor-closed sets of blocks (ideals).

`dp[c, f, I]` is the smallest largest load with which c CPUs and f accelerators run the ideal I (Tarnawski et al.,
section 4). What one device runs is the difference of two ideals, J in I. With the best placement that is known, few
ideals can be where one device ends and another begins: enough devices for their own time, and enough left for the rest.
Only pairs of these are looked at, and nothing is stored per pair. An output is cut by a set that has some, not all, of
the block that makes it and those that read it; I - J cuts what I or J cut, except what both do with the same blocks:

    load(I - J) = time(I) - time(J) + cut(I) + cut(J) - sum of transfer x (1 or 2) over outputs cut by both

(2 where I and J have the same of its blocks: I - J has none).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import inf

import numpy as np
import numpy.typing as npt

from foretrace.arrays import Float64, Int32, Int64
from foretrace.compiled import inner, njit
from foretrace.plan.placement.blocks import PlacementBlocks, crossing, flat
from foretrace.plan.placement.problem import DeviceLoad, PlacementProblem

MOST_IDEALS = 250_000
WORD = 63  # bits of a word of a mask


def lattice(blocks: PlacementBlocks, most: int = MOST_IDEALS) -> list[int] | None:
    """Return all ideals as bit masks, smaller ones first; None where there are more than `most`."""
    lacking = [len(before) for before in blocks.before]
    ready = [at for at, count in enumerate(lacking) if not count]
    while ready:
        if len(ready) >= most.bit_length():  # each set of these makes an ideal
            return None
        following = []
        for each in chain.from_iterable(blocks.after[at] for at in ready):
            lacking[each] -= 1
            if not lacking[each]:
                following.append(each)
        ready = following
    needs = [sum(1 << each for each in before) for before in blocks.before]
    masks, frees = [0], [tuple(at for at, need in enumerate(needs) if not need)]
    known = {0}
    for mask, free in zip(masks, frees, strict=False):  # both grow
        for place, block in enumerate(free):
            larger = mask | 1 << block
            if larger not in known:
                if len(known) >= most:
                    return None
                known.add(larger)
                masks.append(larger)
                new = [each for each in blocks.after[block] if not needs[each] & ~larger]
                frees.append((*free[:place], *free[place + 1 :], *new))
    return masks


def words(masks: Sequence[int], bits: int) -> Int64:
    """Return bit masks in words of 63 bits, the least first (n, words)."""
    count = -(-max(bits, 1) // WORD)
    return np.array([[mask >> WORD * at & (1 << WORD) - 1 for at in range(count)] for mask in masks], dtype=np.int64)


Contiguous = tuple[tuple[DeviceLoad, ...] | None, int]  # devices, if any are below the bound; ideals


def solve(problem: PlacementProblem, blocks: PlacementBlocks, below: float = inf) -> Contiguous | None:
    """Return the placement with the least largest load, if under `below`; None where there are too many ideals."""
    masks = lattice(blocks)
    if masks is None:
        return None
    if below <= 0:  # no placement costs less than nothing
        return None, len(masks)
    home, readers, rows = crossing(problem, blocks)
    touched: list[list[int]] = [[] for _ in range(len(blocks))]
    for at, (block, others) in enumerate(zip(home, readers, strict=True)):
        for each in (block, *others):
            touched[each].append(at)
    weights = _weights(problem, blocks)
    cpus, accelerators = (min(count, len(blocks)) for count in (problem.cpus, problem.accelerators))
    relief = np.array([_relief(weights[0], weights[1], c and c * below) for c in range(cpus + 1)])
    best, choice, origin = _best(
        words(masks, len(blocks)),
        weights,
        *flat(touched),
        np.array([1 + len(others) for others in readers], dtype=np.int64),
        problem.transfer[rows],
        cpus,
        accelerators,
        float(problem.memory_limit),
        below,
        relief,
    )
    devices = None
    if np.isfinite(best[-1, -1, -1]):
        devices = _devices(problem, blocks, masks, choice, origin)
    return devices, len(masks)


def least_load(problem: PlacementProblem, blocks: PlacementBlocks, value: float) -> float:
    """Return a load that no placement can beat: all operators, shared out evenly; `value` is one that is known."""
    weights = _weights(problem, blocks)
    if not problem.accelerators:
        return float(weights[1].sum()) / problem.cpus
    relief = _relief(weights[0], weights[1], problem.cpus * value)
    return max(float(weights[0].sum() - relief) / problem.accelerators, 0.0)


def _weights(problem: PlacementProblem, blocks: PlacementBlocks) -> Float64:
    """Return time on an accelerator and on a CPU, bytes, rows that no accelerator can run, of every block (4, b)."""
    able = np.isfinite(problem.accelerator_time)
    columns = [np.where(able, problem.accelerator_time, 0.0), problem.cpu_time, problem.nbytes, ~able]
    return np.array([[column[list(each)].sum() for each in blocks.rows] for column in columns])


def _relief(time: Float64, cpu: Float64, budget: float) -> float:
    """Return the most time that CPUs can take off accelerators within a budget of theirs (a fractional knapsack)."""
    if not budget:
        return 0.0
    order = np.argsort(-time / np.maximum(cpu, 1e-300))
    used = np.cumsum(cpu[order])
    whole = used <= budget
    part = 0.0
    if not whole.all():
        last = order[int(np.argmin(whole))]
        part = time[last] * (budget - (used[int(np.argmin(whole)) - 1] if whole[0] else 0.0)) / cpu[last]
    return float(time[order][whole].sum() + part)


def _devices(
    problem: PlacementProblem,
    blocks: PlacementBlocks,
    masks: list[int],
    choice: npt.NDArray[np.int8],
    origin: npt.NDArray[np.int32],
) -> tuple[DeviceLoad, ...]:
    """Follow the choices back from the whole graph."""
    cpus, accelerators, at = (size - 1 for size in choice.shape)
    found: list[tuple[int, int]] = []  # kind, mask
    while at:
        kind, lower = int(choice[cpus, accelerators, at]), int(origin[cpus, accelerators, at])
        found.append((kind, masks[at] & ~masks[lower]))
        cpus, accelerators, at = cpus - (kind == 0), accelerators - kind, lower
    return tuple(
        problem.device(("cpu", "accelerator")[kind], blocks.members(mask)) for kind, mask in reversed(found) if mask
    )


@inner
def has(masks: Int64, ideal: int, block: int) -> bool:
    """Return whether an ideal has a block; `masks` as `words` gives them."""
    return bool(masks[ideal, block // WORD] >> (block % WORD) & 1)


@inner
def within(masks: Int64, lower: int, ideal: int) -> bool:
    """Return whether an ideal has all blocks of another."""
    missing = 0
    for word in range(masks.shape[1]):
        missing |= masks[lower, word] & ~masks[ideal, word]
    return missing == 0


@inner
def cut_by(
    masks: Int64, ideal: int, touched: Int64, first: Int64, size: Int64, transfer: Float64, inside: Int32
) -> float:
    """Set `inside` to how many of its blocks an ideal has of every output; returns the time to move what it cuts."""
    for at in range(len(size)):
        inside[at] = 0
    for block in range(len(first) - 1):
        if has(masks, ideal, block):
            for place in range(first[block], first[block + 1]):
                inside[touched[place]] += 1
    time = 0.0
    for at in range(len(size)):
        if 0 < inside[at] < size[at]:
            time += transfer[at]
    return time


@inner
def note_cut(cut: Int32, held: Int32, end: int, size: Int64, inside: Int32) -> int:
    """Note what an ideal cuts, and the blocks that it has of each, from `end` on; returns the new end."""
    for at in range(len(size)):
        if 0 < inside[at] < size[at]:
            cut[end], held[end] = at, inside[at]
            end += 1
    return end


@inner
def cut_twice(cut: Int32, held: Int32, begin: int, end: int, size: Int64, transfer: Float64, inside: Int32) -> float:
    """Return the last sum of the load above: what a lower ideal cuts (`begin` to `end`) and the ideal, too."""
    time = 0.0
    for at in range(begin, end):
        if 0 < inside[cut[at]] < size[cut[at]]:
            time += transfer[cut[at]] * (1 + (inside[cut[at]] == held[at]))
    return time


@njit()
def _best(
    masks: Int64,  # of all ideals, as `words` has them
    weights: Float64,  # as `_weights` says
    touched: Int64,  # outputs that a block makes or reads
    first: Int64,  # where each block's begin (b + 1)
    size: Int64,  # blocks that make or read an output
    transfer: Float64,  # time to move an output
    cpus: int,
    accelerators: int,
    memory: float,
    limit: float,
    relief: Float64,  # time that 0, 1, ... CPUs can take off accelerators
) -> tuple[Float64, npt.NDArray[np.int8], npt.NDArray[np.int32]]:
    """Return the least largest load by CPUs, accelerators and ideal; the last device there, and the ideal below it."""
    n, blocks = len(masks), weights.shape[1]
    best = np.full((cpus + 1, accelerators + 1, n), np.inf)
    choice = np.zeros((cpus + 1, accelerators + 1, n), dtype=np.int8)
    origin = np.zeros((cpus + 1, accelerators + 1, n), dtype=np.int32)
    best[:, :, 0] = 0.0
    total = weights[0].sum()
    # Ideals that some devices can run, in the order of their number, with sums over their blocks and what they cut.
    reached = np.zeros(n, dtype=np.int32)
    sums = np.zeros((n, 4))
    cost = np.zeros(n)
    least = np.zeros(n, dtype=np.int64)  # accelerators
    cut_first = np.zeros(n + 1, dtype=np.int64)
    cut, held = np.zeros(1024, dtype=np.int32), np.zeros(1024, dtype=np.int32)  # outputs, and their blocks inside
    inside = np.zeros(len(size), dtype=np.int32)
    # By CPUs; the most are with none, which leaves all of them for the rest.
    fewest = np.zeros(cpus + 1, dtype=np.int64)
    most = np.zeros(cpus + 1, dtype=np.int64)
    own = np.zeros(4)
    count = 1  # the empty one
    for ideal in range(1, n):
        own[:] = 0.0
        for block in range(blocks):
            if has(masks, ideal, block):
                own += weights[:, block]
        # How many accelerators this ideal may have: enough for its load, and enough left for the rest.
        some = False
        for c in range(cpus + 1):
            fewest[c] = max(int(np.ceil((own[0] - relief[c]) / limit)), 0)
            most[c] = accelerators - max(int(np.ceil((total - own[0] - relief[cpus - c]) / limit)), 0)
            some |= fewest[c] <= most[c]
        if not some:
            continue
        mine = cut_by(masks, ideal, touched, first, size, transfer, inside)
        for place in range(count):
            time = own[0] - sums[place, 0]
            cpu = own[1] - sums[place, 1]
            runs = least[place] < most[0] and time + abs(mine - cost[place]) < limit
            runs &= own[2] - sums[place, 2] <= memory and own[3] - sums[place, 3] < 0.5
            helps = cpus > 0 and cpu < limit  # a CPU may run it
            lower = reached[place]
            if not (runs or helps) or not within(masks, lower, ideal):
                continue
            if runs:  # and gains, if it cuts what is cut below it
                gains, light = False, time + abs(mine - cost[place])
                for c in range(cpus + 1):
                    for f in range(max(fewest[c], 1), most[c] + 1):
                        gains |= max(best[c, f - 1, lower], light) < best[c, f, ideal]
                runs = gains
            if runs:
                begin, end = cut_first[place], cut_first[place + 1]
                load = time + mine + cost[place] - cut_twice(cut, held, begin, end, size, transfer, inside)
                if load < limit:
                    for c in range(cpus + 1):
                        for f in range(max(fewest[c], 1), most[c] + 1):
                            before = best[c, f - 1, lower]
                            value = max(before, load)
                            if value < best[c, f, ideal]:
                                best[c, f, ideal] = value
                                choice[c, f, ideal] = 1
                                origin[c, f, ideal] = lower
            if helps:
                for c in range(1, cpus + 1):
                    for f in range(fewest[c], most[c] + 1):
                        value = max(best[c - 1, f, lower], cpu)
                        if value < best[c, f, ideal]:
                            best[c, f, ideal] = value
                            choice[c, f, ideal] = 0
                            origin[c, f, ideal] = lower
        for c in range(cpus + 1):  # a device may stay idle
            for f in range(accelerators + 1):
                for kind, before in (
                    (0, best[c - 1, f, ideal] if c else np.inf),
                    (1, best[c, f - 1, ideal] if f else np.inf),
                ):
                    if before < best[c, f, ideal]:
                        best[c, f, ideal] = before
                        choice[c, f, ideal] = kind
                        origin[c, f, ideal] = ideal
        if best[cpus, accelerators, ideal] < np.inf:
            reached[count], sums[count], cost[count] = ideal, own, mine
            while best[cpus, least[count], ideal] == np.inf:
                least[count] += 1
            end = cut_first[count]
            if end + len(size) > len(cut):
                cut = np.concatenate((cut, np.zeros(len(cut) + len(size), dtype=np.int32)))
                held = np.concatenate((held, np.zeros(len(cut) - len(held), dtype=np.int32)))
            count += 1
            cut_first[count] = note_cut(cut, held, end, size, inside)
    return best, choice, origin
