"""The compiled simulation of one strategy; `PlainStep` of the reproduction of FlexFlow says the same in plain Python.

Tasks are numbered: forward parts of all operators, their backward parts, two messages (activation, gradient) for each
pair of overlapping parts on different devices, exchanges of gradients. A task starts when what it waits for has ended
and its device, or the links that it takes, are free; who is ready first is first (then the lower number). Times are
int64 nanoseconds. All loops live in this file because numba's cache does not see edits across files.
"""

# mypy: disable-error-code="assignment,arg-type,no-any-return,call-arg,misc"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from foretrace.arrays import Int64
from foretrace.compiled import inner, njit

ID_BITS = 22  # of a task's number in a key of the queue
ALLREDUCE, GATHER = 0, 1  # how gradients are exchanged


class Columns(NamedTuple):
    """A model; one row per operator, per layer, per input, and per way to split (`degrees`); bytes, nanoseconds."""

    sizes: Int64  # (operators, 4)
    element: Int64  # of an element of the output
    saved: Int64  # of the activations of all parts
    layer: Int64  # of an operator
    width: Int64  # of a layer: channels
    weights: Int64  # of a layer, per channel
    kept: Int64  # the same with gradients and the optimizer's state
    begin: Int64  # first input of each operator, and the end
    source: Int64
    needed: Int64  # (inputs, 4, 3): stride, offset, extent
    degrees: Int64  # (ways, 4)
    forward: Int64  # of a part
    backward: Int64
    ways: Int64  # first way of each operator
    strides: Int64  # between devices of parts


class ClusterFigures(NamedTuple):
    """A cluster as the loops read it."""

    devices: int
    per_node: int
    link: float
    network: float
    link_s: float
    network_s: float


class Tasks(NamedTuple):
    """Room for the tasks of one simulation."""

    takes: Int64
    first: Int64  # what a task holds: a device, a link, the interface that sends
    second: Int64  # the interface that receives, else the same
    ring: Int64  # devices of an all-reduce as bits, else 0
    owner: Int64  # operator; operators + input; operators + inputs + layer
    waits: Int64  # tasks that have to end before; in the end, its place in the order of all
    ready: Int64
    end: Int64
    head: Int64  # first of the task's followers, −1 at the end
    heap: Int64
    following: Int64  # per follower: the next one
    target: Int64


def room(tasks: int, followers: int) -> Tasks:
    return Tasks(*(np.empty(tasks, dtype=np.int64) for _ in range(10)),
                 *(np.empty(followers, dtype=np.int64) for _ in range(2)))  # fmt: skip


@inner
def _after(then: int, before: int, count: int, tasks: Tasks) -> int:
    """Let a task wait for one before it; returns the number of followers."""
    if count < len(tasks.target):
        tasks.target[count] = then
        tasks.following[count] = tasks.head[before]
        tasks.head[before] = count
        tasks.waits[then] += 1
    return count + 1


@inner
def _new(task: int, owner: int, takes_s: float, first: int, second: int, ring: int, tasks: Tasks) -> int:
    """Note a task; returns the number of tasks."""
    if task < len(tasks.takes):
        tasks.takes[task] = np.int64(takes_s * 1e9 + 0.5)
        tasks.first[task], tasks.second[task], tasks.ring[task] = first, second, ring
        tasks.owner[task] = owner
        tasks.waits[task] = tasks.ready[task] = tasks.end[task] = 0
        tasks.head[task] = -1
    return task + 1


@inner
def _link(src: int, dst: int, m: ClusterFigures) -> tuple[int, int]:
    """Return what a message between two devices holds: their link, or the interfaces of their nodes."""
    here, there = src // m.per_node, dst // m.per_node
    base = m.devices * (1 + m.devices)
    own = m.devices * (1 + src) + dst
    return (own, own) if here == there else (base + here, base + m.devices + there)


@inner
def _message(task: int, owner: int, src: int, dst: int, nbytes: int, m: ClusterFigures, tasks: Tasks) -> int:
    """Note a message between two devices; returns the number of tasks."""
    first, second = _link(src, dst, m)
    takes_s = m.link_s + nbytes / m.link if first == second else m.network_s + nbytes / m.network
    return _new(task, owner, takes_s, first, second, 0, tasks)


@inner
def _ring(ring: int, m: ClusterFigures, holds: Int64) -> int:
    """Set `holds` to what the ring through these devices (bits) takes; returns how many there are."""
    count, first, before = 0, -1, -1
    for at in range(m.devices + 1):
        device = at if at < m.devices else first
        if at == m.devices or (ring >> at) & 1:
            if before >= 0:
                holds[count], holds[count + 1] = _link(before, device, m)
                count += 2
            else:
                first = device
            before = device
    return count


@inner
def _device(part: int, first: int, stride: int, devices: int) -> int:
    """Return the device of a part; two of at most as many parts as devices never share one."""
    at = part * stride
    return (first + at % devices + at // devices) % devices


@inner
def _push(heap: Int64, size: int, key: int) -> int:
    """Add a key to `size` others (`heapq` takes a third more time); returns how many there are."""
    at = size
    while at > 0 and heap[(at - 1) >> 1] > key:
        heap[at] = heap[(at - 1) >> 1]
        at = (at - 1) >> 1
    heap[at] = key
    return size + 1


@inner
def _pop(heap: Int64, size: int) -> int:
    """Take the least of `size` keys."""
    least, key, at = heap[0], heap[size - 1], 0
    size -= 1
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= key:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = key
    return least


@njit()
def simulate_strategy(
    point: Int64, model: Any, cluster: Any, sync: int, arrays: Any, held: Int64, counts: Int64
) -> int:  # fmt: skip
    """Return nanoseconds of one training step, 0 where `tasks` has too little room, −1 where tasks wait in a circle.

    `model`, `cluster` and `arrays` are plain tuples of what `Columns`, `ClusterFigures` and `Tasks` hold: a kept
    compiled loop names the types that it was called with, and could not be read once a class had another name.
    `held` becomes the bytes of each device: weights, gradients, momentum, all activations, its own and received.
    `counts` becomes the number of tasks, of followers, of bytes moved by activations and gradients, by weights, and
    `waits` the place of each task in the order in which they ran.
    """
    c, m, tasks = Columns(*model), ClusterFigures(*cluster), Tasks(*arrays)
    n, devices, inputs = len(point), m.devices, len(c.source)
    way, first, stride = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n, np.int64)
    start, parts = np.zeros(n + 1, np.int64), np.empty(n, np.int64)
    for op in range(n):
        code = point[op]
        stride[op] = c.strides[code % len(c.strides)]
        first[op] = code // len(c.strides) % devices
        way[op] = c.ways[op] + code // (len(c.strides) * devices)
        degrees = c.degrees[way[op]]
        parts[op] = degrees[0] * degrees[1] * degrees[2] * degrees[3]
        start[op + 1] = start[op] + parts[op]
    total = start[n]
    held[:] = 0
    counts[:] = 0
    if 2 * total > len(tasks.takes):
        counts[0] = 2 * total
        return 0
    followers = resent = exchanged = 0
    count = 2 * total
    lo, hi = np.empty((4, devices), np.int64), np.empty((4, devices), np.int64)  # needed per part of the consumer
    at = np.empty(4, np.int64)
    for op in range(n):
        degrees, sizes = c.degrees[way[op]], c.sizes[op]
        for part in range(parts[op]):  # so that they are there before messages are
            _new(start[op] + part, op, 0.0, 0, 0, 0, tasks)
            _new(total + start[op] + part, op, 0.0, 0, 0, 0, tasks)
            followers = _after(total + start[op] + part, start[op] + part, followers, tasks)
        for i in range(c.begin[op], c.begin[op + 1]):
            src = c.source[i]
            theirs, have = c.degrees[way[src]], c.sizes[src]
            for d in range(4):
                step, offset, extent = c.needed[i, d]
                for k in range(degrees[d]):
                    lo[d, k] = max(sizes[d] * k // degrees[d] * step + offset, 0)
                    hi[d, k] = min((sizes[d] * (k + 1) // degrees[d] - 1) * step + offset + extent, have[d])
            for part in range(parts[op]):
                rest = part
                volume = 1
                for d in range(3, -1, -1):
                    at[d] = rest % degrees[d]
                    rest //= degrees[d]
                    volume *= max(hi[d, at[d]] - lo[d, at[d]], 0)
                if volume == 0:
                    continue
                a0, a1, a2, a3 = lo[0, at[0]], lo[1, at[1]], lo[2, at[2]], lo[3, at[3]]
                b0, b1, b2, b3 = hi[0, at[0]], hi[1, at[1]], hi[2, at[2]], hi[3, at[3]]
                dst = _device(part, first[op], stride[op], devices)
                for k0 in range(((a0 + 1) * theirs[0] - 1) // have[0], (b0 * theirs[0] - 1) // have[0] + 1):
                    v0 = min(b0, have[0] * (k0 + 1) // theirs[0]) - max(a0, have[0] * k0 // theirs[0])
                    for k1 in range(((a1 + 1) * theirs[1] - 1) // have[1], (b1 * theirs[1] - 1) // have[1] + 1):
                        v1 = v0 * (min(b1, have[1] * (k1 + 1) // theirs[1]) - max(a1, have[1] * k1 // theirs[1]))
                        for k2 in range(((a2 + 1) * theirs[2] - 1) // have[2], (b2 * theirs[2] - 1) // have[2] + 1):
                            v2 = v1 * (min(b2, have[2] * (k2 + 1) // theirs[2]) - max(a2, have[2] * k2 // theirs[2]))
                            for k3 in range(((a3 + 1) * theirs[3] - 1) // have[3], (b3 * theirs[3] - 1) // have[3] + 1):
                                v3 = min(b3, have[3] * (k3 + 1) // theirs[3]) - max(a3, have[3] * k3 // theirs[3])
                                nbytes = c.element[src] * v2 * v3
                                other = ((k0 * theirs[1] + k1) * theirs[2] + k2) * theirs[3] + k3
                                there = _device(other, first[src], stride[src], devices)
                                mine, other = start[op] + part, start[src] + other
                                if there == dst:
                                    followers = _after(mine, other, followers, tasks)
                                    followers = _after(total + other, total + mine, followers, tasks)
                                    continue
                                resent += 2 * nbytes
                                held[dst] += nbytes
                                count = _message(count, n + i, there, dst, nbytes, m, tasks)
                                count = _message(count, n + i, dst, there, nbytes, m, tasks)
                                if count <= len(tasks.takes):
                                    followers = _after(count - 2, other, followers, tasks)
                                    followers = _after(mine, count - 2, followers, tasks)
                                    followers = _after(count - 1, total + mine, followers, tasks)
                                    followers = _after(total + other, count - 1, followers, tasks)
        for part in range(parts[op]):
            rest = part
            volume = 1
            for d in range(3, -1, -1):
                k = rest % degrees[d]
                rest //= degrees[d]
                volume *= sizes[d] * (k + 1) // degrees[d] - sizes[d] * k // degrees[d]
            device = _device(part, first[op], stride[op], devices)
            held[device] += c.saved[op] * volume // (sizes[0] * sizes[1] * sizes[2] * sizes[3])
            task = start[op] + part
            tasks.takes[task], tasks.takes[total + task] = c.forward[way[op]], c.backward[way[op]]
            tasks.first[task] = tasks.first[total + task] = tasks.second[task] = tasks.second[total + task] = device
    masks = np.empty(devices, np.int64)
    for layer in range(len(c.width)):
        width = c.width[layer]
        if c.weights[layer] == 0:
            continue
        atoms = 1  # ranges of channels that no operator of the layer splits
        while 2 * atoms <= min(width, devices):
            atoms *= 2
        masks[:] = 0
        for op in range(n):
            if c.layer[op] == layer:
                degree = c.degrees[way[op], 3]
                for part in range(parts[op]):
                    bit = np.int64(1) << _device(part, first[op], stride[op], devices)
                    for atom in range(part % degree * atoms // degree, (part % degree + 1) * atoms // degree):
                        masks[atom] |= bit
        for atom in range(atoms):
            mask = masks[atom]
            known = False
            for other in range(atom):
                known |= masks[other] == mask
            channels = members = 0
            root = -1
            for other in range(atom, atoms):
                if masks[other] == mask:
                    channels += width * (other + 1) // atoms - width * other // atoms
            if known:
                continue
            nbytes = c.weights[layer] * channels
            for device in range(devices - 1, -1, -1):
                if (mask >> device) & 1:
                    held[device] += c.kept[layer] * channels
                    members += 1
                    root = device
            if members == 1:
                continue
            exchanged += 2 * (members - 1) * nbytes
            begin = count
            owner = n + inputs + layer
            if sync == ALLREDUCE:
                hop, rate = m.link_s, m.link
                for device in range((root // m.per_node + 1) * m.per_node, devices):
                    if (mask >> device) & 1:  # of another node than the root
                        hop, rate = max(m.link_s, m.network_s), min(m.link, m.network)
                count = _new(
                    count, owner, 2 * (members - 1) * (hop + nbytes / members / rate), -1, -1, mask, tasks
                )  # fmt: skip
            else:
                for device in range(root + 1, devices):
                    if (mask >> device) & 1:
                        count = _message(count, owner, device, root, nbytes, m, tasks)
                for device in range(root + 1, devices):
                    if (mask >> device) & 1:
                        count = _message(count, owner, root, device, nbytes, m, tasks)
            if count > len(tasks.takes):
                continue
            sent = begin + members - 1  # the first message of the broadcast
            if sync == GATHER:
                for task in range(begin, sent):
                    for then in range(sent, count):
                        followers = _after(then, task, followers, tasks)
            for op in range(n):
                if c.layer[op] != layer:
                    continue
                degree = c.degrees[way[op], 3]
                for part in range(parts[op]):
                    concerned = False
                    for other in range(part % degree * atoms // degree, (part % degree + 1) * atoms // degree):
                        concerned |= masks[other] == mask
                    if not concerned:
                        continue
                    task, device = total + start[op] + part, _device(part, first[op], stride[op], devices)
                    if sync == ALLREDUCE:
                        followers = _after(begin, task, followers, tasks)
                    elif device == root:
                        for then in range(sent, count):
                            followers = _after(then, task, followers, tasks)
                    else:
                        rank = 0
                        for other in range(root + 1, device):
                            rank += (mask >> other) & 1
                        followers = _after(begin + rank, task, followers, tasks)
    counts[0], counts[1], counts[2], counts[3] = count, followers, resent, exchanged
    if count > len(tasks.takes) or followers > len(tasks.target):
        return 0
    done = makespan = size = 0
    free, holds = np.zeros(devices * (3 + devices), np.int64), np.empty(2 * devices + 2, np.int64)
    for task in range(count):
        if tasks.waits[task] == 0:
            size = _push(tasks.heap, size, task)
    while size:
        task = _pop(tasks.heap, size) & ((1 << ID_BITS) - 1)
        size -= 1
        tasks.waits[task] = done
        done += 1
        members, begin = 2, tasks.ready[task]
        if tasks.ring[task]:
            members = _ring(tasks.ring[task], m, holds)
        else:
            holds[0], holds[1] = tasks.first[task], tasks.second[task]
        for i in range(members):
            begin = max(begin, free[holds[i]])
        end = tasks.end[task] = begin + tasks.takes[task]
        for i in range(members):
            free[holds[i]] = end
        makespan = max(makespan, end)
        at = tasks.head[task]
        while at >= 0:
            then = tasks.target[at]
            tasks.ready[then] = max(tasks.ready[then], end)
            tasks.waits[then] -= 1
            if tasks.waits[then] == 0:
                size = _push(tasks.heap, size, (tasks.ready[then] << ID_BITS) | then)
            at = tasks.following[at]
    return makespan if done == count else -1
