"""Placement for the latency of one sample: how long a placement takes, good ones, and a latency that none can beat.

An accelerator runs its operators as one piece (Tarnawski et al., section 3): it starts when every input is in host
memory, takes them in, computes, and gives its outputs back. Operators on CPUs run as soon as their inputs are there,
any number at a time. The largest finish is the latency.

A *waist* is a block that comes before or after every other one. An accelerator that runs a waist waits for all before
it, and all behind it wait for that accelerator: its load adds to the latency. So does a waist on a CPU. What is left
lies between two waists, and takes at least its longest path: on CPUs, or, with an accelerator of its own, on whatever
is faster, with the transfers that this needs. Dynamic programming over ideals finds the least sum of such pieces: a
bound of the latency, which is reached where nothing is left that could run beside anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import inf

import numpy as np
import numpy.typing as npt

from foretrace.arrays import Float64, Int64, Mask
from foretrace.compiled import njit
from foretrace.plan.placement.blocks import NOTHING, PlacementBlocks, flat
from foretrace.plan.placement.ideals import WORD, cut_by, cut_twice, has, lattice, note_cut, within, words
from foretrace.plan.placement.problem import ROUNDING, DeviceLoad, PlacementProblem, topological

_MOST_IDEALS = 4_000
_HOST, _DEVICE, _BETWEEN = 0, 1, 2  # pieces: on CPUs; of an accelerator; of CPUs and accelerators side by side


def latency(problem: PlacementProblem, devices: Sequence[DeviceLoad]) -> float:
    """Return the time of one sample; inf where an accelerator's operators are too large or wait for themselves."""
    item = np.full(len(problem), -1)
    time: list[float] = []
    for each in devices:
        if each.kind == "accelerator" and each.nodes:
            item[list(each.nodes)] = len(time)
            time.append(each.load)
    alone = np.flatnonzero(item < 0)
    item[alone] = np.arange(len(time), len(time) + len(alone))
    time += problem.cpu_time[alone].tolist()
    ends = item[problem.edges]
    pairs = np.unique(ends[ends[:, 0] != ends[:, 1]], axis=0)
    after: list[list[int]] = [[] for _ in time]
    for source, target in pairs.tolist():
        after[source].append(target)
    order, end = topological(after), [0.0] * len(time)
    for at in order:
        end[at] += time[at]
        for reader in after[at]:
            end[reader] = max(end[reader], end[at])
    return max(end, default=0.0) if len(order) == len(time) else inf


def greedy(problem: PlacementProblem, blocks: PlacementBlocks) -> tuple[DeviceLoad, ...]:
    """Fill one accelerator after another with blocks in topological order; what is left runs on CPUs."""
    held: list[list[int]] = [[]]
    rest: list[int] = []
    for rows in blocks.rows:
        can = problem.accelerators > 0 and np.isfinite(problem.accelerator_time[list(rows)]).all()
        if can and problem.nbytes[[*held[-1], *rows]].sum() > problem.memory_limit and len(held) < problem.accelerators:
            held.append([])
        if can and problem.nbytes[[*held[-1], *rows]].sum() <= problem.memory_limit:
            held[-1] += rows
        else:
            rest += rows
    return _placement(problem, held, rest)


def _placement(problem: PlacementProblem, held: Sequence[Sequence[int]], rest: Iterable[int]) -> tuple[DeviceLoad, ...]:
    found = [problem.device("accelerator", rows) for rows in held if rows]
    on_cpus = problem.device("cpu", rest)
    return (*found, *([on_cpus] if on_cpus.nodes else []))


def candidates(problem: PlacementProblem, blocks: PlacementBlocks) -> Iterator[tuple[DeviceLoad, ...]]:
    """Yield good placements: the greedy ones, CPUs alone, and the best where no two devices work at a time.

    The last come from dynamic programming over ideals where there are few, and over intervals of topological orders.
    """
    orders = [blocks, blocks.reordered(deep=False)]
    for order in orders:
        yield greedy(problem, order)
    yield _placement(problem, (), range(len(problem)))
    for order in [*(each.linear() for each in orders), blocks]:
        found = in_series(problem, order)
        if found is not None:
            yield found


def bound(problem: PlacementProblem, blocks: PlacementBlocks) -> float:
    """Return a latency that no placement with whole blocks can beat; inf if nothing fits, 0 if nothing is known.

    The longest path takes its time, and all operators that of an accelerator's share where there are no CPUs. For
    waists, rows may be left out: what is left waits as before, and sends as much. Those without time are; then, more
    and more of those that could run beside most others, because more blocks are waists then. The best bound counts.
    """
    time = np.where(np.isfinite(problem.accelerator_time), problem.accelerator_time, NOTHING)
    kept = (time >= NOTHING) | (problem.cpu_time >= NOTHING)
    behind = _reached(len(problem), problem.order, problem.successors)
    beside = ~(behind | behind.T)
    np.fill_diagonal(beside, val=False)
    quickest = np.minimum(problem.accelerator_time, problem.cpu_time if problem.cpus else inf)
    best = _path(problem, range(len(problem)), quickest)
    if not problem.cpus:
        best = max(best, float(quickest.sum()) / problem.accelerators)
        behind = _reached(len(blocks), range(len(blocks)), blocks.after)
    while kept.any():
        found = _bound(problem, blocks, behind, kept)
        best = max(best, found)
        others = (beside & kept).sum(axis=1) * kept
        if others.max() == 0:
            break
        kept = kept & (others < others.max())
    return best * (1 - ROUNDING)


def _bound(problem: PlacementProblem, blocks: PlacementBlocks, behind: Mask, kept: Mask) -> float:
    """Return the least sum of pieces of what is kept; 0 with too many ideals.

    `behind` is what rows reach (n x n), and without CPUs what blocks reach (b x b).
    """
    block_of = np.repeat(np.arange(len(blocks)), [len(rows) for rows in blocks.rows])
    held = kept[np.fromiter(chain.from_iterable(blocks.rows), dtype=np.int64, count=len(block_of))]
    numbers = np.unique(block_of[held]).tolist()
    if problem.cpus:  # where every row runs by itself: all that is kept of a block has to reach all of the other
        own = np.zeros((len(numbers), len(problem)), dtype=np.float32)
        for at, number in enumerate(numbers):
            own[at, list(blocks.rows[number])] = 1.0
        own *= kept
        before: Mask = own @ (~behind).astype(np.float32) @ own.T == 0
        np.fill_diagonal(before, val=False)
    else:
        before = behind[np.ix_(numbers, numbers)]
    order = np.argsort(before.sum(axis=0), kind="stable")  # of time: backward operators go against that of blocks
    numbers, before = [numbers[at] for at in order], before[np.ix_(order, order)]
    if not _comparable(before).any():
        return 0.0
    direct = before & (before.astype(np.float32) @ before.astype(np.float32) == 0)
    ends = zip(*(each.tolist() for each in np.nonzero(direct)), strict=True)
    left = PlacementBlocks.of((blocks.rows[number] for number in numbers), set(ends))
    rows = [[row for row in rows if kept[row]] for rows in left.rows]
    found = _pieces(problem, left, rows, before, between=True)
    return 0.0 if found is None else found[0]


def in_series(problem: PlacementProblem, blocks: PlacementBlocks) -> tuple[DeviceLoad, ...] | None:
    """Return the best placement without two devices at work at a time; None if too many ideals, or nothing fits."""
    before = _reached(len(blocks), range(len(blocks)), blocks.after)
    found = _pieces(problem, blocks, blocks.rows, before, between=False)
    if found is None or found[0] == inf:
        return None
    devices = [problem.device("accelerator", rows) for kind, rows in found[1] if kind == _DEVICE]
    rest = [row for kind, rows in found[1] if kind == _HOST for row in rows]
    return (*devices, *([problem.device("cpu", rest)] if rest else []))


def _pieces(
    problem: PlacementProblem, blocks: PlacementBlocks, rows: Sequence[Sequence[int]], before: Mask, *,
    between: bool,
) -> tuple[float, list[tuple[int, list[int]]]] | None:  # fmt: skip
    """Return the least sum of pieces, and the kind and rows of each; None with too many ideals.

    `rows` of every block count on a CPU; `before` (b x b): what waits for what.
    """
    masks = lattice(blocks, _MOST_IDEALS)
    if masks is None:
        return None
    sent = _sent(problem, blocks)
    touched: list[list[int]] = [[] for _ in blocks.rows]
    toll = np.zeros(before.shape)
    for at, (home, others, seconds) in enumerate(sent):
        for each in others | {home} - {-1}:
            touched[each].append(at)
        if home >= 0:
            toll[home, list(others)] += seconds
    able = np.isfinite(problem.accelerator_time)
    columns = (np.where(able, problem.accelerator_time, 0.0), problem.nbytes, ~able)
    best, kind, origin = _least(
        words(masks, len(blocks)),
        np.array([[column[list(each)].sum() for each in blocks.rows] for column in columns]).reshape(3, -1),
        np.array([_path(problem, each, problem.cpu_time) if problem.cpus else inf for each in rows]),
        _comparable(before),
        before,
        toll,
        *flat([np.flatnonzero(each).tolist() for each in toll.T]),
        *flat([np.flatnonzero(each).tolist() for each in toll]),
        *flat(touched),
        np.array([len(others) + (home >= 0) for home, others, _ in sent], dtype=np.int64),
        np.array([seconds for _, _, seconds in sent]),
        min(problem.accelerators, len(blocks)),
        problem.memory_limit,
        between,
    )
    found: list[tuple[int, list[int]]] = []
    at, f = (size - 1 for size in best.shape)
    while at and best[-1, -1] < inf:
        lower, how = int(origin[at, f]), int(kind[at, f])
        if lower != at:
            found.append((how, blocks.members(masks[at] & ~masks[lower])))
        f, at = f - (how != _HOST), lower
    return float(best[-1, -1]), found


def _sent(problem: PlacementProblem, blocks: PlacementBlocks) -> list[tuple[int, set[int], float]]:
    """Return what crosses where a set of blocks ends: the block that makes it (-1: none), its readers, its time.

    Rows may be in none of the blocks. From one of the blocks to another, through such rows, at least the least transfer
    on the way has to cross. Every row is on the way from one maker, so that nothing counts twice; of what comes from a
    maker, the dearest that is cut counts.
    """
    of = {row: at for at, rows in enumerate(blocks.rows) for row in rows}
    root, least = list(range(len(problem))), problem.transfer.tolist()
    makers: list[list[int]] = [[] for _ in root]
    ways: dict[int, list[tuple[float, set[int]]]] = {}
    for row in problem.order:
        if row not in of and makers[row]:
            maker = max(makers[row], key=lambda each: least[each])
            root[row], least[row] = root[maker], min(least[row], least[maker])
        for reader in problem.successors[row]:
            makers[reader].append(row)
        read = {of[each] for each in problem.successors[row] if each in of}
        ways.setdefault(root[row], []).append((least[row], read))
    found = []
    for maker, each in ways.items():
        home, others = of.get(maker, -1), set[int]()
        each.sort(key=lambda way: -way[0])
        for (seconds, read), (lesser, _) in zip(each, [*each[1:], (0.0, set())], strict=True):
            others = (others | read) - {home}
            if seconds > lesser and len(others) + (home >= 0) > 1:
                found.append((home, others, seconds - lesser))
    return found


def _reached(count: int, order: Sequence[int], after: Sequence[Iterable[int]]) -> Mask:
    """Return which nodes (columns) lie behind which (rows)."""
    found = np.zeros((count, count), dtype=np.bool_)
    for at in reversed(order):
        for each in after[at]:
            found[at] |= found[each]
            found[at, each] = True
    return found


def _comparable(before: Mask) -> Mask:
    """Return blocks that come before or after every other one."""
    found: Mask = (before | before.T).sum(axis=0) == len(before) - 1
    return found


def _path(problem: PlacementProblem, rows: Sequence[int], time: Float64) -> float:
    """Return the longest path through some rows that take these times (n)."""
    inside, done = set(rows), dict.fromkeys(rows, 0.0)
    for row in (each for each in problem.order if each in inside):
        done[row] += float(time[row])
        for reader in inside.intersection(problem.successors[row]):
            done[reader] = max(done[reader], done[row])
    return max(done.values())


@njit()
def _least(
    masks: Int64,  # of all ideals, as `words` has them
    weights: Float64,  # (3, b): time on an accelerator, bytes, rows that none can run
    host: Float64,  # (b,) time on CPUs
    waist: Mask,  # (b,)
    before: Mask,  # (b, b)
    toll: Float64,  # (b, b) to move what one block makes and another reads
    makers: Int64,  # blocks that have a toll to a block
    maker_first: Int64,  # where each block's begin (b + 1)
    takers: Int64,  # blocks that a block has a toll to
    taker_first: Int64,
    touched: Int64,  # outputs that a block makes or reads
    first: Int64,  # where each block's begin (b + 1)
    size: Int64,  # blocks that make or read an output
    transfer: Float64,  # time to move an output
    accelerators: int,
    memory: float,
    between: bool,  # accelerators between two waists work beside other ones
) -> tuple[Float64, npt.NDArray[np.int8], npt.NDArray[np.int32]]:
    """Return the least sum by accelerators and ideal, what the last piece is, and the ideal below it."""
    n, blocks = len(masks), len(host)
    best = np.full((n, accelerators + 1), np.inf)
    kind = np.zeros((n, accelerators + 1), dtype=np.int8)
    origin = np.zeros((n, accelerators + 1), dtype=np.int32)
    best[0] = 0.0
    sums = np.zeros((n, 3))
    cost = np.zeros(n)  # of the outputs that an ideal cuts
    waists = np.zeros(n, dtype=np.int64)
    cut_first = np.zeros(n + 1, dtype=np.int64)
    cut, held = np.zeros(1024, dtype=np.int32), np.zeros(1024, dtype=np.int32)  # outputs, and their blocks inside
    inside = np.zeros(len(size), dtype=np.int32)
    on_host, on_device = np.zeros(blocks), np.zeros(blocks)  # from where a block begins to the end of the piece
    behind = np.zeros(blocks, dtype=np.int64)  # blocks of the ideal behind its last waist
    for ideal in range(1, n):
        begin, count = 0, 0
        for block in range(blocks):
            if has(masks, ideal, block):
                sums[ideal] += weights[:, block]
                behind[count] = block
                count += 1
                if waist[block]:
                    waists[ideal] += 1
                    begin, count = block + 1, 0
        cost[ideal] = cut_by(masks, ideal, touched, first, size, transfer, inside)
        end = cut_first[ideal]
        if end + len(size) > len(cut):
            cut = np.concatenate((cut, np.zeros(len(cut) + len(size), dtype=np.int32)))
            held = np.concatenate((held, np.zeros(len(cut) - len(held), dtype=np.int32)))
        cut_first[ideal + 1] = note_cut(cut, held, end, size, inside)
        for at in range(count - 1, -1, -1):
            block = behind[at]
            after_host = after_device = 0.0
            for later in range(at + 1, count):
                other = behind[later]
                if before[block, other]:
                    cpu, device = on_host[other], on_device[other]
                    if between:
                        cpu, device = min(cpu, toll[block, other] + device), min(device, toll[block, other] + cpu)
                    after_host, after_device = max(after_host, cpu), max(after_device, device)
            for place in range(taker_first[block], taker_first[block + 1]):
                other = takers[place]
                if other > block and before[block, other] and not has(masks, ideal, other):
                    after_device = max(after_device, toll[block, other])
            on_host[block] = host[block] + after_host
            on_device[block] = (weights[0, block] if weights[2, block] == 0 else np.inf) + after_device
        slowest = behind[:count][np.argsort(-on_host[behind[:count]])]
        for lower in range(ideal):
            passed = waists[ideal] - waists[lower]
            runs = sums[ideal, 1] - sums[lower, 1] <= memory and sums[ideal, 2] - sums[lower, 2] < 0.5
            if passed < 0 or not (runs or passed <= 1) or best[lower, accelerators] >= best[ideal, 0]:
                continue
            if not within(masks, lower, ideal):
                continue
            # What a piece costs at least: on one device, if it cuts what is cut below it; otherwise nothing.
            gains = rests = False
            least = sums[ideal, 0] - sums[lower, 0] + abs(cost[ideal] - cost[lower])
            for f in range(accelerators + 1):
                gains |= f > 0 and best[lower, f - 1] + least < best[ideal, f]
                rests |= best[lower, f] < best[ideal, f] or (f > 0 and best[lower, f - 1] < best[ideal, f])
            gains &= runs and (passed > 0 or not between)
            rests &= passed <= 1
            if gains:
                load = sums[ideal, 0] - sums[lower, 0] + cost[ideal] + cost[lower]
                load -= cut_twice(cut, held, cut_first[lower], cut_first[lower + 1], size, transfer, inside)
                for f in range(1, accelerators + 1):
                    if best[lower, f - 1] + load < best[ideal, f]:
                        best[ideal, f] = best[lower, f - 1] + load
                        kind[ideal, f] = _DEVICE
                        origin[ideal, f] = lower
            if not rests:
                continue
            path, quick = 0.0, 0.0
            if passed == 1:
                block = begin - 1  # by itself, a waist works alone
                for word in range(masks.shape[1]):
                    own = 1 << block % WORD if word == block // WORD else 0
                    if masks[ideal, word] & ~masks[lower, word] != own:
                        path = np.inf
                path = max(path, host[block])
            for at in range(count if passed == 0 else 0):
                block = slowest[at]
                if path >= on_host[block] and (quick >= on_host[block] or not between):
                    break  # nor does any other one take longer
                if not has(masks, lower, block):
                    path = max(path, on_host[block])
                    if between:
                        entry = on_device[block]
                        for place in range(maker_first[block], maker_first[block + 1]):
                            other = makers[place]
                            if has(masks, lower, other):
                                entry += toll[other, block]
                        quick = max(quick, min(on_host[block], entry))
            if passed == 0 or path < np.inf:
                for f in range(accelerators + 1):
                    if best[lower, f] + path < best[ideal, f]:
                        best[ideal, f] = best[lower, f] + path
                        kind[ideal, f] = _HOST
                        origin[ideal, f] = lower
                    if between and passed == 0 and f and best[lower, f - 1] + quick < best[ideal, f]:
                        best[ideal, f] = best[lower, f - 1] + quick
                        kind[ideal, f] = _BETWEEN
                        origin[ideal, f] = lower
        for f in range(1, accelerators + 1):  # a device may stay idle
            if best[ideal, f - 1] < best[ideal, f]:
                best[ideal, f] = best[ideal, f - 1]
                kind[ideal, f] = _DEVICE
                origin[ideal, f] = ideal
    return best, kind, origin
