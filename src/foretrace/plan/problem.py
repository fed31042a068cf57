"""The coarsened view of a data-parallel step (dPRO, MLSys 2022, section 5): groups of compute that end in a gradient.

Every compute operator is merged with the ones after it until the group holds a tensor that is to be exchanged, so a
step of thousands of operators becomes one row per gradient. All workers decide alike, hence one worker stands for all.
Times are int64 nanoseconds. Tensors are numbered in the order in which the backward pass makes them ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretrace.arrays import Float64, Int64
from foretrace.cost.network.network import CollectiveKind, Network
from foretrace.errors import ForetraceError

MOST_TENSORS = 512  # beyond, the smallest neighbours are one tensor from the start
CHUNKS = (1, 2, 4, 8)  # partition counts that are tried


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoarseStep:
    """One worker's step in groups of compute, and what has to be exchanged (n tensors).

    A step is `first_ns`, the forward groups in the order of `forward_place`, the backward groups in the order of the
    tensors, `last_ns`, the exchange that is left, the updates, `rest_ns`. A bucket boundary after tensor i costs
    `cut_ns[i]` of compute where it also ends a compiled region, and nothing otherwise.
    """

    name: str
    first_ns: int  # before the first forward group: batch, host work
    forward_ns: Int64  # n; forward compute that needs the weights of tensor i
    forward_place: Int64  # n; place of that compute in the forward pass, 0 first
    backward_ns: Int64  # n; compute from the gradient before to this one; with what lies before the first
    last_ns: int  # backward compute after the last gradient
    update_ns: Int64  # n; optimizer's time for tensor i
    rest_ns: int  # after the update
    nbytes: Int64  # n; of the exchanged gradients
    cut_ns: Int64  # n − 1
    tensors: tuple[str, ...]
    network: Network
    slots: int = 1  # transfers at a time
    members: tuple[int, ...] = ()  # gradients in each tensor, where some were taken together; empty: one each

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def ready_ns(self) -> Int64:
        """When each gradient is ready (n), from the start of the step, boundaries apart."""
        return np.asarray(self.first_ns + self.forward_ns.sum() + np.cumsum(self.backward_ns), dtype=np.int64)

    @property
    def compute_ns(self) -> int:
        """Compute of a step without any boundary: what it lasts on one worker."""
        return int(self.ready_ns[-1] + self.last_ns + self.update_ns.sum() + self.rest_ns)

    @property
    def after_ns(self) -> int:
        """What follows the exchange: updates and the rest."""
        return int(self.update_ns.sum() + self.rest_ns)

    def checked(self) -> CoarseStep:
        """Return the problem itself; raises ForetraceError where a length or a value makes no sense."""
        n = len(self)
        columns = (self.forward_ns, self.forward_place, self.backward_ns, self.update_ns, self.nbytes)
        if n < 1:
            raise ForetraceError(f"{self.name}: there is no gradient to exchange, so there is nothing to optimise.")
        if any(len(each) != n for each in columns) or len(self.cut_ns) != n - 1 or len(self.tensors) != n:
            raise ValueError(f"{self.name}: columns of {n} tensors differ in length")
        if (
            any((each < 0).any() for each in (*columns, self.cut_ns))
            or min(self.first_ns, self.last_ns, self.rest_ns) < 0
        ):
            raise ForetraceError(f"{self.name}: a time or a size is negative; times and sizes are 0 or more.")
        if sorted(self.forward_place.tolist()) != list(range(n)):
            raise ValueError(f"{self.name}: forward_place is no permutation")
        if self.slots < 1:
            raise ForetraceError(f"{self.name}: {self.slots} transfers at a time is not possible; give 1 or more.")
        return self

    def coarsened(self, most: int = MOST_TENSORS) -> CoarseStep:
        """Return the step with at most `most` tensors: neighbours with the fewest bytes become one."""
        if len(self) <= most:
            return self
        groups = [[i] for i in range(len(self))]
        size = self.nbytes.tolist()
        while len(groups) > most:
            i = min(range(len(groups) - 1), key=lambda j: size[j] + size[j + 1])
            groups[i : i + 2] = [groups[i] + groups[i + 1]]
            size[i : i + 2] = [size[i] + size[i + 1]]
        return self._merged(groups)

    def _merged(self, groups: Sequence[Sequence[int]]) -> CoarseStep:
        def total(column: Int64) -> Int64:
            return np.array([int(column[group].sum()) for group in map(list, groups)], dtype=np.int64)

        first = np.array([min(self.forward_place[list(group)]) for group in groups])
        place = np.empty(len(groups), dtype=np.int64)
        place[np.argsort(first, kind="stable")] = np.arange(len(groups))
        return replace(
            self,
            forward_ns=total(self.forward_ns),
            forward_place=place,
            backward_ns=total(self.backward_ns),
            update_ns=total(self.update_ns),
            nbytes=total(self.nbytes),
            cut_ns=self.cut_ns[[group[-1] for group in groups[:-1]]],
            members=tuple(len(group) for group in groups),
            tensors=tuple("+".join(self.tensors[i] for i in group) for group in groups),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How gradients travel: buckets of neighbours, the parts of each, and who goes first.

    `ends` are the last tensors of the buckets, ascending, the last one n − 1. With `ahead`, a transfer overtakes those
    that the next forward pass needs later, and a forward group waits for its own weights alone (P3, MLSys 2019);
    without, transfers go in the order in which they become ready and the update waits for all of them (DDP).
    """

    ends: tuple[int, ...]
    chunks: tuple[int, ...]
    ahead: bool = False

    @property
    def begins(self) -> tuple[int, ...]:
        """First tensor of every bucket."""
        return (0, *(end + 1 for end in self.ends[:-1]))

    @classmethod
    def whole(cls, n: int) -> Plan:
        """Return all gradients in one bucket."""
        return cls(ends=(n - 1,), chunks=(1,))

    @classmethod
    def single(cls, n: int) -> Plan:
        """Return every gradient alone."""
        return cls(ends=tuple(range(n)), chunks=(1,) * n)

    @classmethod
    def capped(cls, nbytes: Int64, cap: float, first: float | None = None) -> Plan:
        """Return buckets as DDP forms them: a bucket is closed by the tensor that reaches its cap; `first` caps the
        first one.

        See `_compute_bucket_assignment_by_size` of PyTorch.
        """
        ends: list[int] = []
        held, limit = 0, cap if first is None else first
        for i, size in enumerate(nbytes.tolist()):
            held += size
            if held >= limit:
                ends.append(i)
                held, limit = 0, cap
        if not ends or ends[-1] != len(nbytes) - 1:
            ends.append(len(nbytes) - 1)
        return cls(ends=tuple(ends), chunks=(1,) * len(ends))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransferCosts:
    """What transfers take: `table[c, i, j]` ns for one of `chunks[c]` parts of the bucket of tensors i to j.

    With several transfers in flight the wire is free for the next one `latency_ns` before a transfer ends; with one,
    `latency_ns` is 0 and a transfer follows the end of the one before.
    """

    chunks: Int64
    table: Int64  # c x n x n, upper triangle
    latency_ns: int

    @classmethod
    def of(cls, problem: CoarseStep, chunks: Sequence[int] = CHUNKS) -> TransferCosts:
        """Return costs of all buckets of neighbours, by the network's own answer for every size."""
        n = len(problem)
        prefix = np.concatenate([[0], np.cumsum(problem.nbytes)])
        size = np.maximum(prefix[None, 1:] - prefix[:-1, None], 0)
        upper = np.triu(np.ones((n, n), dtype=np.bool_))
        table = np.zeros((len(chunks), n, n), dtype=np.int64)
        for c, count in enumerate(chunks):
            parts = -(-size[upper] // count)
            unique, place = np.unique(parts, return_inverse=True)
            table[c][upper] = _times_ns(problem.network, unique)[place]
        one, two = (problem.network.cost(CollectiveKind.ALL_REDUCE, size).seconds for size in (1, 2))
        latency = 0 if problem.slots == 1 else round(1e9 * max(2 * one - two, 0.0))  # of no bytes, by a line
        return cls(chunks=np.array(chunks, dtype=np.int64), table=table, latency_ns=latency)

    def of_plan(self, plan: Plan) -> Int64:
        """Return the time of one chunk of every bucket of a plan (ns)."""
        ends = np.array(plan.ends, dtype=np.int64)
        return self.of_buckets(begins_of(ends), ends, np.array(plan.chunks, dtype=np.int64))

    def of_buckets(self, begins: Int64, ends: Int64, chunks: Int64) -> Int64:
        """Return the same by first and last tensors and numbers of chunks."""
        rows = np.searchsorted(self.chunks, chunks) if chunks.max() > 1 else 0
        found: Int64 = self.table[rows, begins, ends]
        return found


def begins_of(ends: Int64) -> Int64:
    """Return the first tensors of buckets by their last ones."""
    begins = np.zeros_like(ends)
    begins[1:] = ends[:-1] + 1
    return begins


def _times_ns(network: Network, nbytes: Int64) -> Int64:
    """Return times of all-reduces of these sizes; where the network is a straight line, by that line.

    A line is believed where 33 of the network's answers over the whole range lie on it to 0.001 ns.
    """

    def ask(sizes: Int64) -> Float64:
        return np.array([1e9 * network.cost(CollectiveKind.ALL_REDUCE, float(size)).seconds for size in sizes])

    if len(nbytes) > 64:
        probes = nbytes[np.linspace(0, len(nbytes) - 1, 33).astype(np.int64)]
        times = ask(probes)
        slope = (times[-1] - times[0]) / (probes[-1] - probes[0])
        line = times[0] + slope * (probes - probes[0])
        if np.abs(line - times).max() < 1e-3:  # ns
            straight: Int64 = np.rint(times[0] + slope * (nbytes - nbytes[0])).astype(np.int64)
            return straight
    return np.rint(ask(nbytes)).astype(np.int64)
