"""The best contiguous placement for throughput: dynamic programming over predecessor-closed sets of blocks (ideals).

`dp[c, f, I]` is the smallest largest load with which c CPUs and f accelerators run the ideal I (Tarnawski et al.,
section 4). What one device runs is the difference of two ideals. From every ideal a walk goes down the lattice, block
by block, and keeps the load of the difference as it goes, so that nothing is stored per pair of ideals. The walk is cut
where the difference already costs more than the best placement that is known, whatever follows: its time, and the
outputs that cross the upper boundary, only grow.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from foretrace.arrays import Float64, Int64
from foretrace.compiled import njit
from foretrace.plan.placement.blocks import PlacementBlocks, crossing, flat
from foretrace.plan.placement.problem import DeviceLoad, PlacementProblem

MOST_IDEALS = 250_000


@dataclass(frozen=True, kw_only=True)
class Contiguous:
    """The best contiguous placement of some blocks; None where there is none below the bound that was given."""

    devices: tuple[DeviceLoad, ...] | None
    ideals: int
    pairs: int  # of ideals that were looked at


def lattice(
    blocks: PlacementBlocks, most: int = MOST_IDEALS
) -> tuple[list[int], list[list[int]], list[list[int]]] | None:
    """All ideals as bit masks, smaller ones first; of each, the ideals with one block less, and that block.

    None where there are more than `most`.
    """
    needs = [sum(1 << each for each in before) for before in blocks.before]
    masks, number = [0], {0: 0}
    lower: list[list[int]] = [[]]
    without: list[list[int]] = [[]]
    frees: list[tuple[int, ...]] = [tuple(at for at, need in enumerate(needs) if not need)]
    at = 0
    while at < len(masks):
        mask = masks[at]
        for block in frees[at]:
            larger = mask | 1 << block
            found = number.get(larger)
            if found is None:
                found = number[larger] = len(masks)
                if found >= most:
                    return None
                masks.append(larger)
                lower.append([])
                without.append([])
                new = [each for each in blocks.after[block] if not needs[each] & ~larger]
                frees.append((*(each for each in frees[at] if each != block), *new))
            lower[found].append(at)
            without[found].append(block)
        at += 1
    return masks, lower, without


def solve(
    problem: PlacementProblem,
    blocks: PlacementBlocks,
    below: float = inf,
    *,
    serial: bool = False,
    most: int = MOST_IDEALS,
) -> Contiguous | None:
    """The best placement with an objective under `below`, exactly; None where there are too many ideals.

    The objective is the largest load; where `serial`, the sum of all loads, every block on a CPU by itself: what one
    sample takes where no two devices work at a time.
    """
    found = lattice(blocks, most)
    if found is None:
        return None
    if below <= 0:  # no placement costs less than nothing
        return Contiguous(devices=None, ideals=len(found[0]), pairs=0)
    _masks, lower, without = found
    count = len(blocks)
    home, readers, rows = crossing(problem, blocks)
    reader_blocks: list[list[int]] = [[] for _ in range(count)]
    living: list[list[int]] = [[] for _ in range(count)]
    for at, (block, others) in enumerate(zip(home, readers, strict=True)):
        living[block].append(at)
        for each in others:
            reader_blocks[each].append(at)
    weights = _weights(problem, blocks)
    reading, reader_first = flat(readers)
    relief = np.array([_relief(weights[0], weights[1], c and c * below) for c in range(problem.cpus + 1)])
    links, first = flat(lower)
    taken, _ = flat(without)
    reads, read_first = flat(reader_blocks)
    lives, live_first = flat(living)
    best, choice, origin, pairs = _best(
        links,
        first,
        taken,
        reads,
        read_first,
        lives,
        live_first,
        reading,
        reader_first,
        np.array(home, dtype=np.int64),
        problem.transfer[rows],
        weights,
        problem.cpus,
        problem.accelerators,
        problem.memory_limit,
        below,
        relief,
        serial,
    )
    devices = None
    if np.isfinite(best[-1, -1, -1]):
        devices = _devices(problem, blocks, found[0], choice, origin, serial=serial)
    return Contiguous(devices=devices, ideals=len(lower), pairs=int(pairs))


def least_load(problem: PlacementProblem, blocks: PlacementBlocks, value: float) -> float:
    """A load that no placement can beat: the time of all operators, shared out evenly; `value` is one that is known."""
    weights = _weights(problem, blocks)
    relief = _relief(weights[0], weights[1], problem.cpus * value)
    return max(float(weights[0].sum() - relief) / max(problem.accelerators, 1), 0.0)


def _weights(problem: PlacementProblem, blocks: PlacementBlocks) -> Float64:
    """Time on an accelerator, time on a CPU, bytes, and rows that no accelerator can run, of every block (4, b)."""
    able = np.isfinite(problem.accelerator_time)
    columns = [np.where(able, problem.accelerator_time, 0.0), problem.cpu_time, problem.nbytes, ~able]
    return np.array([[column[list(each)].sum() for each in blocks.rows] for column in columns])


def _relief(time: Float64, cpu: Float64, budget: float) -> float:
    """The most time that CPUs can take off accelerators within a budget of theirs (a fractional knapsack)."""
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
    *,
    serial: bool,
) -> tuple[DeviceLoad, ...]:
    """Follow the choices back from the whole graph."""
    cpus, accelerators, at = problem.cpus, problem.accelerators, len(masks) - 1
    found: list[tuple[int, int]] = []  # kind, mask
    while at:
        kind, lower = int(choice[cpus, accelerators, at]), int(origin[cpus, accelerators, at])
        found.append((kind, masks[at] & ~masks[lower]))
        cpus, accelerators, at = cpus - (kind == 0 and (not serial or lower == at)), accelerators - kind, lower
    if serial:  # one CPU stands for all
        found.append((0, sum(mask for kind, mask in found if kind == 0)))
        found = [each for each in found[:-1] if each[0]] + found[-1:]
    return tuple(
        problem.device(("cpu", "accelerator")[kind], blocks.members(mask)) for kind, mask in reversed(found) if mask
    )


@njit()
def _best(
    links: Int64,  # the ideals with one block less, of all ideals
    first: Int64,  # where each ideal's links begin (n + 1)
    taken: Int64,  # the block that a link takes
    reads: Int64,  # outputs that a block reads
    read_first: Int64,
    lives: Int64,  # outputs that are made in a block
    live_first: Int64,
    readers: Int64,  # blocks that read an output
    reader_first: Int64,
    home: Int64,  # the block that makes an output
    transfer: Float64,  # time to move an output
    weights: Float64,  # as `_weights` says
    cpus: int,
    accelerators: int,
    memory: float,
    limit: float,
    relief: Float64,  # time that 0, 1, ... CPUs can take off accelerators
    serial: bool,
) -> tuple[Float64, npt.NDArray[np.int8], npt.NDArray[np.int32], int]:
    """Least objective by CPUs, accelerators and ideal; what the last device is there, and the ideal below it."""
    n = len(first) - 1
    blocks = weights.shape[1]
    n_readers = reader_first[1:] - reader_first[:-1]
    best = np.full((cpus + 1, accelerators + 1, n), np.inf)
    choice = np.zeros((cpus + 1, accelerators + 1, n), dtype=np.int8)
    origin = np.zeros((cpus + 1, accelerators + 1, n), dtype=np.int32)
    best[:, :, 0] = 0.0
    # Sums over every ideal; along a link they differ by the block that is taken.
    sums = np.zeros((n, 4))
    for ideal in range(1, n):
        link = first[ideal]
        for kind in range(4):
            sums[ideal, kind] = sums[links[link], kind] + weights[kind, taken[link]]
    total = sums[n - 1]
    stamp = np.full(n, -1, dtype=np.int32)
    inside = np.zeros(blocks, dtype=np.bool_)
    held = np.zeros(blocks, dtype=np.bool_)  # blocks of the upper ideal
    count = np.zeros(len(home), dtype=np.int64)  # reading blocks inside
    outside = np.zeros(len(home), dtype=np.bool_)  # read beyond the upper ideal
    stack = np.zeros(blocks + 1, dtype=np.int64)  # ideals
    cursor = np.zeros(blocks + 1, dtype=np.int64)
    moved = np.zeros(blocks + 1)
    fixed = np.zeros(blocks + 1)
    fewest = np.zeros(cpus + 1, dtype=np.int64)
    most = np.zeros(cpus + 1, dtype=np.int64)
    pairs = 0
    for ideal in range(1, n):
        lower = ideal  # blocks of the ideal, from one link to the next
        held[:] = False
        while lower:
            held[taken[first[lower]]] = True
            lower = links[first[lower]]
        for at in range(len(home)):
            outside[at] = False
            if held[home[at]]:
                for place in range(reader_first[at], reader_first[at + 1]):
                    outside[at] |= not held[readers[place]]
        # How many accelerators this ideal may have: enough for its load, and enough left for the rest.
        some = False
        for c in range(cpus + 1):
            fewest[c] = max(int(np.ceil((sums[ideal, 0] - relief[c]) / limit)), 0)
            rest = total[0] - sums[ideal, 0] - relief[cpus - c]
            most[c] = accelerators - max(int(np.ceil(rest / limit)), 0)
            if serial:
                fewest[c], most[c] = 0, accelerators
            some |= fewest[c] <= most[c]
        if not some:
            continue
        depth = 0
        stack[0], cursor[0], moved[0], fixed[0] = ideal, first[ideal], 0.0, 0.0
        while depth >= 0:
            upper = stack[depth]
            if cursor[depth] == first[upper + 1]:
                depth -= 1
                if depth >= 0:  # give back the block that led here
                    block = taken[cursor[depth] - 1]
                    inside[block] = False
                    for place in range(read_first[block], read_first[block + 1]):
                        count[reads[place]] -= 1
                continue
            link = cursor[depth]
            cursor[depth] += 1
            lower = links[link]
            if stamp[lower] == ideal:
                continue
            stamp[lower] = ideal
            pairs += 1
            time = sums[ideal, 0] - sums[lower, 0]
            cpu = sums[ideal, 1] - sums[lower, 1]
            fits = sums[ideal, 2] - sums[lower, 2] <= memory and sums[ideal, 3] - sums[lower, 3] < 0.5
            helps = cpus > 0 and cpu < limit and (depth == 0 or not serial)  # a CPU may run it
            if not (fits and time < limit) and not helps:
                continue
            block = taken[link]
            comm, lasting = moved[depth], fixed[depth]
            for place in range(read_first[block], read_first[block + 1]):
                at = reads[place]
                count[at] += 1
                if inside[home[at]]:
                    if count[at] == n_readers[at]:
                        comm -= transfer[at]
                elif count[at] == 1:
                    comm += transfer[at]
                    if not held[home[at]]:
                        lasting += transfer[at]
            inside[block] = True
            for place in range(live_first[block], live_first[block + 1]):
                at = lives[place]
                comm += transfer[at] * ((count[at] < n_readers[at]) - (count[at] > 0))
                if outside[at]:
                    lasting += transfer[at]
            runs = fits and time + lasting < limit
            load = time + comm
            if runs and load < limit:
                for c in range(cpus + 1):
                    for f in range(max(fewest[c], 1), most[c] + 1):
                        before = best[c, f - 1, lower]
                        cost = before + load if serial else max(before, load)
                        if cost < best[c, f, ideal]:
                            best[c, f, ideal] = cost
                            choice[c, f, ideal] = 1
                            origin[c, f, ideal] = lower
            if helps:
                for c in range(1, cpus + 1):
                    for f in range(fewest[c], most[c] + 1):
                        cost = best[c, f, lower] + cpu if serial else max(best[c - 1, f, lower], cpu)
                        if cost < best[c, f, ideal]:
                            best[c, f, ideal] = cost
                            choice[c, f, ideal] = 0
                            origin[c, f, ideal] = lower
            depth += 1
            stack[depth], moved[depth], fixed[depth] = lower, comm, lasting
            more = runs or (helps and not serial)  # blocks may be added
            cursor[depth] = first[lower] if more else first[lower + 1]
        for c in range(cpus + 1):  # a device may stay idle
            for f in range(accelerators + 1):
                if c > 0 and best[c - 1, f, ideal] < best[c, f, ideal]:
                    best[c, f, ideal] = best[c - 1, f, ideal]
                    choice[c, f, ideal] = 0
                    origin[c, f, ideal] = ideal
                if f > 0 and best[c, f - 1, ideal] < best[c, f, ideal]:
                    best[c, f, ideal] = best[c, f - 1, ideal]
                    choice[c, f, ideal] = 1
                    origin[c, f, ideal] = ideal
    return best, choice, origin, pairs
