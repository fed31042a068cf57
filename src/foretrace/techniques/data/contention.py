"""`contention`: transfers that are under way at the same time share the links of a cluster, and slow kernels down.

Every transfer of the graph becomes a flow over the links of the cluster (`foretrace.simulate.flows.flows`). A flow
alone takes exactly what the graph says: its rate is limited to what it reaches there, and where the graph is quicker
than the links, it moves fewer bytes. So sharing lengthens transfers and never shortens one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.cost.network.link_network import LinkNetwork
from foretrace.cost.network.parse import network
from foretrace.errors import ForetraceError, GraphError
from foretrace.graph.taskgraph import Change, TaskGraph, TaskKind
from foretrace.hardware.cluster import Cluster
from foretrace.simulate.flows.flows import Interference, measured_interference, simulate_flows
from foretrace.simulate.overlap import covered
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.techniques.base import Technique, parameter, prior
from foretrace.techniques.compute.batching import with_facts
from foretrace.techniques.distributed import on_links
from foretrace.techniques.distributed.messages import HIERARCHICAL

MEASURED = "measured"
FACT = "contention"  # of a graph whose transfers have shared links already


@dataclass(frozen=True, kw_only=True)
class Contention(Technique):
    """Let concurrent transfers share the links of a cluster."""

    summary = "transfers at the same time share links fairly, communication slows kernels"
    source = "Bertsekas & Gallager, Data Networks (2nd ed.), 6.5.2, max-min fairness; Proteus (2023), overlap factor"
    not_applied = "sharing links is what a cluster does by itself; run the job there, no program can put it in."
    across, repeats = "all", True

    network: str = parameter(
        "", doc="file of the cluster, or a link (1gbit/50us); by default that of the messages in the graph"
    )
    groups: int = parameter(
        1, doc="groups of workers like the one in the graph that send at the same time, interleaved over the cluster"
    )
    interference: str = parameter(
        "", doc="how many times longer kernels take beside communication: a number or measured; not counted by default"
    )
    background: float | None = prior(
        0.0, 0.0, 0.3, unit="share", doc="share of every link between machines that other jobs take",
        why="a network of its own, or neighbours that take up to a third of it; nothing in the recording tells",
    )  # fmt: skip

    def change(self, graph: TaskGraph) -> TaskGraph:
        background = self._check(graph)
        facts: dict[str, Any] = dict(graph.info.recording.get("distributed") or {})
        if FACT in facts or FACT in graph.info.recording:
            raise self.refuse("the transfers share links already; give it once, behind all other changes.")
        live = (graph.kind == TaskKind.COLLECTIVE) & ~graph.gone & (graph.dur > 0)
        if not live.any():
            raise self.refuse(
                'the graph shows no transfers between workers; put `do="data-parallel workers=... network=..."` first, '
                "or record a run of several workers."
            )
        before = simulate(graph)
        cluster, capacity, found = self._found(graph, before, live, facts)
        now = capacity.copy()
        now[2 * cluster.workers :] *= 1 - background  # links between machines
        slowing = self._slowing(graph, before, put_in=bool(facts))
        try:
            run = _Runs(graph, before, found.moved, capacity, now, slowing, put_in=bool(facts))
        except GraphError as error:
            raise self.refuse(str(error)) from error
        dur = run.dur
        noted = [self._transfers_note(run, cluster, now, background)]
        if slowing is not None:
            noted.append(self._kernels_note(graph, dur, run.kernels & (dur != graph.dur), slowing))
        if not facts:
            noted += self._limits_notes(graph, found)
        if np.array_equal(dur, graph.dur):
            return graph.noted(*noted)
        changed = graph.with_columns(dur=dur)
        if graph.n_steps:
            after_s = simulate(changed).step_time_s
            what = f"the step goes from {1e3 * before.step_time_s:.4g} to {1e3 * after_s:.4g} ms"
            noted.append(Change(what=what, tasks=int((dur != graph.dur).sum())))
        fact = {"distributed": {**facts, FACT: str(self)}} if facts else {FACT: str(self)}
        return with_facts(changed, **fact).noted(*noted)

    # -- what the user gave ----------------------------------------------------------------------------------------

    def _check(self, graph: TaskGraph) -> float:
        """Return the share of others; refuses what cannot be."""
        background = self.values(graph)["background"]
        if background == 1:
            raise self.refuse("background must be 0 or more and less than 1, got 1; others leave part of a link.")
        if self.groups < 1:
            raise self.refuse(f"groups={self.groups} cannot be; give 1 or more.")
        self._factor()
        return background

    def _factor(self) -> float | None:
        """Return the slow-down that the user states; None for none, and where it is to be measured."""
        if self.interference in ("", MEASURED):
            return None
        try:
            factor = float(self.interference)
        except ValueError:
            factor = float("nan")
        if not (isfinite(factor) and factor >= 1):
            raise self.refuse(
                f"interference={self.interference} is no slow-down; write how many times longer kernels take, 1 or "
                "more (1.1), or measured."
            )
        return factor

    # -- transfers -------------------------------------------------------------------------------------------------

    def _found(
        self, graph: TaskGraph, before: Timeline, live: Mask, facts: dict[str, Any]
    ) -> tuple[Cluster, Float64, on_links.PlacedTransfers]:
        """Return the cluster, what its links carry (L, bytes per second), and the transfers of the graph on them."""
        if facts:
            messages = on_links.PutIn(facts=facts, groups=self.groups)
            cluster, capacity = self._cluster(self.network or self._text(facts), messages.workers)
            return cluster, capacity, messages.found(graph, live, cluster)
        workers = on_links.recorded_workers(graph)
        if not workers:
            raise self.refuse("the recording does not tell how many workers there are; record all ranks of the run.")
        if self.groups != 1:
            raise self.refuse("groups= goes with messages that a technique put in; a recording has its groups itself.")
        if not self.network:
            raise self.refuse("the recording does not tell its network; give the file of its cluster (network=).")
        cluster, capacity = self._cluster(self.network, workers)
        found = on_links.recorded(graph, before, live, cluster)
        if not found.moved:
            raise self.refuse(
                "the recording does not tell who takes part in its transfers; record all ranks of the run."
            )
        return cluster, capacity, found

    def _text(self, facts: dict[str, Any]) -> str:
        """Return the network that messages were put in for."""
        levels = {text for _, text in facts.get("levels", ())} if facts.get("scheme") == HIERARCHICAL else set()
        if not facts.get("network") or len(levels) > 1:
            raise self.refuse("the messages take several networks; give the file of the cluster that has them "
                              "(network=)." if levels else
                              "the messages do not tell their network; give network=.")  # fmt: skip
        return str(facts["network"])

    def _cluster(self, text: str, workers: int) -> tuple[Cluster, Float64]:
        try:
            found = network(text, workers)
            if isinstance(found, LinkNetwork):
                return found.cluster, np.array([rate for _, rate in found.cluster.links], dtype=np.float64)
        except ForetraceError as error:
            raise self.refuse(f"network={text}: {error}") from error
        raise self.refuse(
            f"network={text} says what collectives take and not which links they share; give the file of the cluster, "
            "or a link."
        )

    def _transfers_note(self, run: _Runs, cluster: Cluster, now: Float64, background: float) -> Change:
        mask, load = on_links.sharing(run.flows, len(now), run.begin, run.finish)
        mask |= [each.joined for each in run.moved]
        count, total_ns = len(mask), sum(each.alone_ns for each in run.moved)
        what = f"{int(mask.sum())} of {count} transfers share a link of {cluster.name} with another one"
        if self.groups > 1:
            what += f", of {self.groups} groups that send at the same time"
        if background:
            what += f", other jobs take {100 * background:.3g} % of links between machines"
        if longer_ns := int(run.longer_ns.sum()):
            busiest = cluster.links[int((load / now).argmax())][0]
            what += f": {total_ns / 1e6:.4g} → {(total_ns + longer_ns) / 1e6:.4g} ms in all, most load on {busiest}"
        else:
            what += ": none takes longer"
        return Change(what=what, tasks=sum(len(each.rows) for each in run.moved))

    def _limits_notes(self, graph: TaskGraph, found: on_links.PlacedTransfers) -> list[Change]:
        """Return what a recording of collectives leaves open."""
        what = (
            "recorded transfers are taken as alone on their links: what they shared there counts twice if they still do"
        )
        if len(graph.ranks) == 1:
            what += ", and their times hold the waiting for other ranks"
        notes = [Change(what=what, tasks=0)]
        if found.lost:
            what = f"transfers that keep their time, because nobody knows who takes part in them: {found.lost}"
            notes.append(Change(what=what, tasks=0))
        return notes

    # -- kernels beside communication ------------------------------------------------------------------------------

    def _slowing(self, graph: TaskGraph, before: Timeline, *, put_in: bool) -> Interference | None:
        if not self.interference:
            return None
        counted = [each for each in graph.assumptions if each.flag == "company" and each.value > 1]
        if counted:
            raise self.refuse(
                f"{counted[0].technique} slows computing beside messages already (company, {counted[0].value:.3g}); "
                "give company=1 there, or leave interference= out."
            )
        cpu = graph.info.platform == "cpu"
        tasks = graph.kind == (TaskKind.OPERATOR if cpu else TaskKind.KERNEL)
        factor = self._factor()
        if factor is not None:
            return Interference(factor=factor, why="stated", tasks=tasks)
        if put_in:
            raise self.refuse(
                "interference=measured needs a recording of several workers, and these messages were put in; "
                "give a number."
            )
        measured = measured_interference(graph, before.start, before.end)
        if measured is None:
            raise self.refuse(
                "interference=measured needs three kernels of a sort beside collectives and three alone, and the "
                "recording has none; give a number."
            )
        return Interference(factor=measured.factor, why=measured.why, tasks=tasks)

    def _kernels_note(self, graph: TaskGraph, dur: Int64, slowed: Mask, slowing: Interference) -> Change:
        before_ms, after_ms = (float(each[slowed].sum()) / 1e6 for each in (graph.dur, dur))
        work = "operator" if graph.info.platform == "cpu" else "kernel"
        count = int(slowed.sum())
        what = f"{work}s take {slowing.factor:.4g} times as long beside communication ({slowing.why}): "
        what += (
            f"{count} {work}{'s' * (count != 1)}, {before_ms:.4g} → {after_ms:.4g} ms"
            if count
            else "no other time than before"
        )
        return Change(what=what, tasks=count)


class _Runs:
    """What sharing adds: the difference of two runs, with links that all share and with links of their own.

    Kernels of a recording have the slow-down by its own collectives in their times, and so in both runs.
    """

    def __init__(
        self, graph: TaskGraph, before: Timeline, moved: Sequence[on_links.Moved], capacity: Float64, now: Float64,
        slowing: Interference | None, *, put_in: bool,
    ) -> None:  # fmt: skip
        """Take `capacity`, what links (L, bytes per second) carry for a transfer alone, `now` what they carry."""
        self.moved = moved
        bare = graph if slowing is None or put_in else _lonely(graph, before, slowing)
        self.flows, links = on_links.as_flows(moved, capacity, now)
        start, end = simulate_flows(bare, self.flows, links, interference=slowing)
        own, links = on_links.as_flows(moved, capacity, now, shared=False)
        start_own, end_own = simulate_flows(bare, own, links, interference=None if put_in else slowing)
        first = np.array([start[list(each.rows)].max() for each in moved], dtype=np.int64)
        self.finish = np.array([end[list(each.rows)].max() for each in moved], dtype=np.int64)
        self.begin = first + np.array([each.latency_ns for each in moved], dtype=np.int64)
        alone_ns = np.array([each.alone_ns for each in moved], dtype=np.int64)
        self.longer_ns = np.maximum(self.finish - first - alone_ns, 0)
        self.kernels = np.zeros(len(graph), dtype=np.bool_) if slowing is None else _slowed(graph, slowing)
        more_ns = (end - start) - (end_own - start_own)
        self.dur = graph.dur.copy()
        self.dur[self.kernels] = np.maximum(graph.dur + more_ns, bare.dur)[self.kernels]
        self.dur[self.flows.task] += self.longer_ns[self.flows.flow]


def _slowed(graph: TaskGraph, slowing: Interference) -> Mask:
    tasks = graph.kind == TaskKind.KERNEL if slowing.tasks is None else slowing.tasks
    return tasks & ~graph.gone & (graph.dur > 0)


def _lonely(graph: TaskGraph, before: Timeline, slowing: Interference) -> TaskGraph:
    """Return the graph with kernels as they would be without the collectives beside which they were recorded."""
    dur, rank, slowed = graph.dur.copy(), graph.rank, _slowed(graph, slowing)
    collective = (graph.kind == TaskKind.COLLECTIVE) & ~graph.gone & (before.end > before.start)
    for each in np.unique(rank):
        mine, beside = np.flatnonzero(slowed & (rank == each)), np.flatnonzero(collective & (rank == each))
        if len(mine) and len(beside):
            shared = covered(before.start[beside], before.end[beside], before.start[mine], before.end[mine])
            dur[mine] -= np.rint(shared * (1 - 1 / slowing.factor)).astype(np.int64)
    return graph.with_columns(dur=dur)
