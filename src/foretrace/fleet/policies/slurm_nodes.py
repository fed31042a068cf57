"""Which nodes a job gets from Slurm: select/cons_tres with topology/tree (cons_tres/job_test.c, _eval_nodes_topo)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from foretrace.fleet import setup
from foretrace.fleet.workload import Int64

if TYPE_CHECKING:
    from foretrace.fleet.policy import Policy
    from foretrace.fleet.stepping import View


class PlannedNodes(NamedTuple):
    """Nodes that are not reserved from one time to another (Unix seconds)."""

    begin: int
    end: int
    nodes: Any


def reserve(space: list[PlannedNodes], begin: int, end: int, nodes: Any) -> None:
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

    def __init__(self, view: View, policy: Policy, *, switches: int, wait_s: float, exclusive: bool) -> None:
        cluster = view.cluster
        self.switches, self.wait_s, self.exclusive = switches, wait_s, exclusive
        self.level = setup.waits_ns(policy, cluster)[1]
        starts = cluster.starts[self.level]
        self.size = np.diff(starts)
        self.node_of = cluster.units_of(self.level)
        # per level of switches the one above each node; on one level of nodes alone, one switch is taken
        above = [cluster.units_of(level)[starts[:-1]] for level in range(self.level + 1, len(cluster.levels))]
        self.above = np.array(above or [np.zeros(len(self.size), np.int64)])
        self.over = self.above[:, np.unique(self.above[0], return_index=True)[1]]  # (levels, leaves) the same of leaves
        # (leaves, leaves) links between two leaf switches
        self.apart = 2 * (self.over[:, :, None] != self.over[:, None, :]).sum(axis=0)
        # (jobs,) each needs nodes × per_node GPUs (the last one may need fewer), on nodes that are usable for it
        work, kind = view.workload, cluster.gpu_type[starts[:-1]]
        masks = {each: np.array(cluster.usable(each))[kind] for each in map(str, dict.fromkeys(work.gpu_type))}
        largest = {each: int(self.size[mask].max(initial=1)) for each, mask in masks.items()}
        self.gpus, self.usable = work.gpus, [masks[str(each)] for each in work.gpu_type]
        self.nodes = -(-work.gpus // np.array([largest[str(each)] for each in work.gpu_type]))
        self.per_node = -(-work.gpus // self.nodes)

    def look(self, view: View) -> None:
        """Take note of who holds what now."""
        self.free, self.held = np.array(view.free(self.level), np.int64), {}
        for job in view.running.tolist():
            self.held[job] = np.unique(self.node_of[list(view.gpus_of(job))], return_counts=True)
        self.up = self.freed(self.held) == self.size

    def freed(self, jobs: Iterable[int]) -> Int64:
        """Return (nodes,) GPUs that would be free without these jobs."""
        free = self.free.copy()
        for job in jobs:
            on, gpus = self.held[job]
            free[on] += gpus
        return free

    def take(self, view: View, job: int, nodes: list[int]) -> list[int]:
        """Free GPUs of these nodes, as many as needed."""
        chosen: list[int] = []
        for node in sorted(nodes):
            chosen += view.free_in(node, self.level)[: min(self.per_node[job], self.gpus[job] - len(chosen))]
        self.held[job] = np.unique(self.node_of[chosen], return_counts=True)
        np.subtract.at(self.free, self.node_of[chosen], 1)
        return chosen

    def room(self, job: int, free: Int64) -> Any:
        """Return (nodes,) whether so many free GPUs are enough for a job on each."""
        return free >= (self.size if self.exclusive else self.per_node[job])

    def choose(self, job: int, free: Int64, nodes: Any, waited_s: float) -> list[int] | None:
        """Return as many of these nodes as the job needs; None where too few have room, or they lie below too many
        switches and the job has not waited long enough.

        Leaf by leaf: one that holds all that is missing, and of these the one with the fewest nodes that fit; else the
        one with the most. The first of equals. Within a leaf the first nodes, whatever else is free on them.
        """
        fit, wanted = nodes & self.usable[job] & self.room(job, free), int(self.nodes[job])
        if np.count_nonzero(fit) < wanted:
            return None
        counts = np.array(
            [
                np.bincount(above[fit], minlength=above.max() + 1)[over]
                for above, over in zip(self.above, self.over, strict=True)
            ]
        )  # (levels, leaves) nodes that fit below the switch above each leaf
        far = np.zeros(counts.shape[1], np.int64)
        chosen: list[int] = []
        leaves = 0
        while len(chosen) < wanted:
            missing, best = wanted - len(chosen), -1
            for leaf in np.flatnonzero(counts[0]).tolist():  # _topo_choose_best_switch
                better = 1 if best < 0 else self._compare(counts, leaf, best, missing)
                if best < 0 or (far[leaf] < far[best] and better >= 0) or (far[leaf] == far[best] and better > 0):
                    best = leaf
            chosen += np.flatnonzero(fit & (self.above[0] == self.over[0, best]))[:missing].tolist()
            far += self.apart[best]
            counts[0, best] = 0
            leaves += 1
        return None if 0 < self.switches < leaves and waited_s < self.wait_s else chosen

    def _compare(self, counts: Int64, one: int, other: int, missing: int) -> int:
        """Return a number above 0 where the first leaf suits better (_topo_compare_switches)."""
        for level, count in enumerate(counts):
            fits, others = count[one] >= missing, count[other] >= missing
            if fits and others:
                return int(np.sign(count[other] - count[one]))
            if fits != others:
                return 1 if fits else -1
            if level + 1 == len(counts) or self.over[level + 1, one] == self.over[level + 1, other]:
                return int(np.sign(count[one] - count[other]))
        return 0

    def victims(self, job: int, nodes: Any, jobs: list[int], waited_s: float) -> list[int]:
        """Return those of these jobs, the first first, that make room for one; none where all of them are too few.

        They are taken away one after the other until it fits, then sorted by how many of its nodes they hold, three
        times in all; those that hold none of its nodes stay (cons_common/job_test.c: _run_now).
        """
        for again in (2, 1, 0):
            for count in range(1, len(jobs) + 1):
                chosen = self.choose(job, self.freed(jobs[:count]), nodes, waited_s)
                if chosen is not None:
                    break
            else:
                return []
            theirs = {each: len(set(chosen) & set(self.held[each][0].tolist())) for each in jobs[:count]}
            if not again or len(jobs) <= 3 - again:
                return [each for each in jobs[:count] if theirs[each]]
            theirs[jobs[count - 1]] = len(self.size) + 1
            jobs = sorted(jobs, key=lambda each: -theirs.get(each, 0))
        return []
