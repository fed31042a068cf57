"""Which nodes a job gets from Slurm: select/cons_tres with topology/tree (cons_tres/job_test.c, _eval_nodes_topo)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.fleet import setup
from foretrace.fleet.formats.slurm import duration
from foretrace.fleet.workload import Int64

if TYPE_CHECKING:
    from foretrace.fleet.policy import Policy
    from foretrace.fleet.stepping import View


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """What jobs need of their nodes: at most so many leaf switches, insisted on for so long; nobody else on them."""

    switches: int = 0  # 0: any number
    wait_s: float = 0.0
    exclusive: bool = False

    @classmethod
    def parse(cls, text: str, *, most_s: int, exclusive: bool) -> Self:
        """Parse `N@TIME` as sbatch has it: minutes, minutes:seconds or hours:minutes:seconds. Raises ForetraceError."""
        count, at, time = text.partition("@")
        try:
            if text and not (count.isdecimal() and int(count)):
                raise ValueError(count)
            return cls(int(count or 0), min(duration(time), most_s) if at else float(most_s), exclusive)
        except ValueError:
            raise ForetraceError(f"`switches` must be N@minutes:seconds, such as 1@2:30, got {text!r}.") from None

    @property
    def sbatch(self) -> list[str]:
        """The same as options of sbatch."""
        wait = int(self.wait_s)
        clock = f"{wait // 3600:02d}:{wait // 60 % 60:02d}:{wait % 60:02d}"
        return [f"--switches={self.switches}@{clock}"] * bool(self.switches) + ["--exclusive"] * self.exclusive


@dataclass(frozen=True, slots=True)
class Asks:
    """What one job needs: nodes × per_node GPUs (the last one may need fewer), on nodes that it may use."""

    gpus: int
    nodes: int
    per_node: int
    usable: Any


class PlannedNodes(NamedTuple):
    """Nodes that are not reserved from one time to another (Unix seconds)."""

    begin: int
    end: int
    nodes: Any


def reserve(space: list[PlannedNodes], begin: int, end: int, nodes: list[int]) -> None:
    """Take nodes out of a stretch of time; stretches are split at its ends, alike neighbours joined."""
    made: list[PlannedNodes] = []
    for each in space:
        cuts = [each.begin, *(cut for cut in (begin, end) if each.begin < cut < each.end), each.end]
        for low, high in itertools.pairwise(cuts):
            left = each.nodes.copy()
            if low >= begin and high <= end:
                left[nodes] = False
            if made and (made[-1].nodes == left).all():
                made[-1] = made[-1]._replace(end=high)
            else:
                made.append(PlannedNodes(low, high, left))
    space[:] = made


class NodeTable:
    """Nodes and switches of a cluster, and who holds what at one moment (`look`)."""

    free: Int64  # (nodes,) GPUs that nobody holds
    up: Any  # (nodes,) True where nothing is broken
    held: dict[int, tuple[Int64, Int64]]  # per running job its nodes, and GPUs on each

    def __init__(self, view: View, policy: Policy) -> None:
        cluster = view.cluster
        self.request: NodeRequest = policy.request  # type: ignore[attr-defined]  # of SlurmPolicy
        self.workload, self.cluster = view.workload, cluster
        self.level = setup.waits_ns(policy, cluster)[1]
        starts = cluster.starts[self.level]
        self.size = np.diff(starts)
        self.node_of = cluster.units_of(self.level)
        # per level of switches the one above each node; on one level of nodes alone, one switch is taken
        self.above = [cluster.units_of(level)[starts[:-1]] for level in range(self.level + 1, len(cluster.levels))]
        self.above = self.above or [np.zeros(len(self.size), np.int64)]
        self._asks: dict[int, Asks] = {}

    def asks(self, job: int) -> Asks:
        """Return the request of a job, as many GPUs on each node as divide it evenly."""
        if job not in self._asks:
            gpus = int(self.workload.gpus[job])
            kinds = np.array(self.cluster.usable(str(self.workload.gpu_type[job])))
            usable = kinds[self.cluster.gpu_type[self.cluster.starts[self.level][:-1]]]
            nodes = -(-gpus // int(self.size[usable].max()))
            self._asks[job] = Asks(gpus, nodes, -(-gpus // nodes), usable)
        return self._asks[job]

    def look(self, view: View) -> None:
        """Take note of who holds what now."""
        self.free = np.array(view.free(self.level), np.int64)
        self.held = {}
        all_held = np.zeros(len(self.size), np.int64)
        for job in view.running.tolist():
            nodes, gpus = np.unique(self.node_of[list(view.gpus_of(job))], return_counts=True)
            self.held[job] = nodes, gpus
            all_held[nodes] += gpus
        self.up = self.free + all_held == self.size

    def take(self, view: View, job: int, nodes: list[int]) -> list[int]:
        """Free GPUs of these nodes, as many as needed."""
        chosen: list[int] = []
        asks = self.asks(job)
        for node in sorted(nodes):
            chosen += view.free_in(node, self.level)[: min(asks.per_node, asks.gpus - len(chosen))]
        self.held[job] = np.unique(self.node_of[chosen], return_counts=True)
        np.subtract.at(self.free, self.node_of[chosen], 1)
        return chosen

    def wanted(self, asks: Asks) -> Any:
        """Return GPUs that must be free on a node for the job."""
        return self.size if self.request.exclusive else asks.per_node

    def choose(self, asks: Asks, free: Int64, nodes: Any, waited_s: float) -> list[int] | None:
        """Return as many of these nodes as the job needs; None where too few have room, or they lie below too many
        switches and the job has not waited long enough.

        Leaf by leaf: one that holds all that is missing, and of these the one with the fewest nodes that fit; else the
        one with the most. The first of equals. Within a leaf the first nodes, whatever else is free on them.
        """
        fit = nodes & asks.usable & (free >= self.wanted(asks))
        if np.count_nonzero(fit) < asks.nodes:
            return None
        counts = [np.bincount(above[fit], minlength=above.max() + 1) for above in self.above]
        far = np.zeros(len(counts[0]), np.int64)
        chosen: list[int] = []
        leaves = 0
        while len(chosen) < asks.nodes:
            best = self._leaf(counts, far, asks.nodes - len(chosen))
            chosen += np.flatnonzero(fit & (self.above[0] == best))[: asks.nodes - len(chosen)].tolist()
            far += self._distance[best]
            counts[0][best] = 0
            leaves += 1
        late = waited_s >= self.request.wait_s
        return None if self.request.switches and leaves > self.request.switches and not late else chosen

    def victims(self, asks: Asks, nodes: Any, jobs: list[int], waited_s: float) -> list[int]:
        """Return those of these jobs, the first first, that make room for one; none where all of them are too few.

        They are taken away one after the other until it fits, then sorted by how many of its nodes they hold, three
        times in all; those that hold none of its nodes stay (cons_common/job_test.c: _run_now).
        """
        for again in (2, 1, 0):
            free = self.free.copy()
            for job in jobs:
                on, gpus = self.held[job]
                free[on] += gpus
                chosen = self.choose(asks, free, nodes, waited_s)
                if chosen is not None:
                    break
            else:
                return []
            taken = jobs[: jobs.index(job) + 1]
            theirs = {each: len(set(chosen) & set(self.held[each][0].tolist())) for each in taken}
            if not again or len(jobs) <= 3 - again:
                return [each for each in taken if theirs[each]]
            theirs[job] = len(self.size) + 1
            jobs = sorted(jobs, key=lambda each: -theirs.get(each, 0))
        return []

    def _leaf(self, counts: list[Int64], far: Int64, missing: int) -> int:
        """Return the leaf switch to take nodes from next (_topo_choose_best_switch)."""
        best = -1
        for leaf in np.flatnonzero(counts[0]).tolist():
            if best < 0:
                best = leaf
                continue
            better = self._compare(counts, leaf, best, missing)
            if (far[leaf] < far[best] and better >= 0) or (far[leaf] == far[best] and better > 0):
                best = leaf
        return best

    def _compare(self, counts: list[Int64], one: int, other: int, missing: int) -> int:
        """Return a number above 0 where the first switch suits better (_topo_compare_switches)."""
        for level, count in enumerate(counts):
            fits, others = count[one] >= missing, count[other] >= missing
            if fits and others:
                return int(np.sign(count[other] - count[one]))
            if fits != others:
                return 1 if fits else -1
            up = self._parents[level]
            if level + 1 == len(counts) or up[one] == up[other]:
                return int(np.sign(count[one] - count[other]))
            one, other = int(up[one]), int(up[other])
        return 0

    @cached_property
    def _parents(self) -> list[Int64]:
        """Per level of switches the one above each; the last has none."""
        found = []
        for low, high in zip(self.above, [*self.above[1:], np.zeros_like(self.above[0])], strict=True):
            up = np.zeros(low.max() + 1, np.int64)
            up[low] = high
            found.append(up)
        return found

    @cached_property
    def _distance(self) -> Int64:
        """(leaves, leaves) links between two leaf switches."""
        leaves = np.arange(self.above[0].max() + 1)
        path = [leaves]
        for up in self._parents[:-1]:
            path.append(up[path[-1]])
        apart = [2 * (each[:, None] != each[None, :]) for each in path]
        return np.asarray(sum(apart), np.int64)
