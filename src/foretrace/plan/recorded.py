"""From the recorded graph of one worker to the problem that the search works on, and from a plan back to the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretrace.arrays import Float64, Int64, Mask
from foretrace.cost.network.network import CollectiveKind, Network
from foretrace.graph.edit import remove
from foretrace.graph.taskgraph import EdgeKind, Phase, TaskGraph, TaskKind
from foretrace.model.messages import MIB
from foretrace.plan.problem import CoarseStep, Plan
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.techniques.base import Prior, derived, parameter
from foretrace.techniques.compute.batching import with_facts
from foretrace.techniques.distributed.data_parallel import DataParallel
from foretrace.techniques.distributed.exchange import WAIT
from foretrace.techniques.distributed.gradients import Gradient, first_uses
from foretrace.techniques.distributed.messages import ExchangePlan as Messages
from foretrace.techniques.distributed.messages import MessagePart, lay_out

COMPILED = "compiled"


@dataclass(frozen=True, kw_only=True)
class Planned(DataParallel):
    """`data-parallel` as a search needs it: regions of a compiled model, and messages in parts that overtake.

    Where the model is compiled, every bucket is a region of its own (`torch._dynamo.config.optimize_ddp`), and a
    boundary costs the call of one more region.
    """

    parts: str = parameter("", doc="parts of every bucket, by commas")
    ahead: bool = parameter(False, doc="messages that the next forward pass needs first overtake others")
    region_us: float | None = derived(unit="µs", doc="time of one more compiled region, forward and backward together")

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found = dict(super().priors(graph))
        if any(change.technique == COMPILED for change in graph.changes):
            found["region_us"] = Prior(
                40.0, 15.0, 100.0, unit="µs", why="guards are checked and tensors handed over once more"
            )
        return found

    def with_plan(self, problem: CoarseStep, plan: Plan) -> Planned:
        """Return the technique with the buckets, parts and order of a plan."""
        sizes = np.add.reduceat(problem.nbytes, plan.begins)
        cut = any(count > 1 for count in plan.chunks)
        return replace(
            self,
            bucket_mb=None,
            buckets_mb=",".join(repr(size / MIB) for size in sizes.tolist()),
            parts=",".join(map(str, plan.chunks)) if cut else "",
            ahead=plan.ahead,
        )

    def plan(self, graph: TaskGraph, gradients: Sequence[Gradient]) -> Messages:
        found = super().plan(graph, gradients)
        if self.parts:
            counts = [int(each) for each in self.parts.split(",")]
            found = replace(
                found,
                parts=tuple(
                    MessagePart(gradients=part.gradients, nbytes=-(-part.nbytes // count))
                    for part, count in zip(found.parts, counts, strict=True)
                    for _ in range(count)
                ),
            )
        return replace(found, prioritised=self.ahead)

    def slowed(self, graph: TaskGraph, gradients: Sequence[Gradient], plan: Messages) -> TaskGraph:
        graph = super().slowed(graph, gradients, plan)
        region = self.values(graph).get("region_us")
        if region is None:
            return graph
        dur = graph.dur.copy()
        buckets = dict.fromkeys(part.gradients for part in plan.parts)
        for bucket in list(buckets)[:-1]:
            np.add.at(dur, gradients[max(bucket)].ready, round(1e3 * region))
        return graph.with_columns(dur=dur)

    def problem(self, graph: TaskGraph, *, name: str = "recording") -> CoarseStep:
        """Return the coarsened view of a recorded step: when gradients become ready, and what is before and behind.

        Read off the simulated graph without messages of gradients, medians over its steps. Computing is slowed by the
        messages of this technique as it stands. Where the host runs ahead of a device, neither an exchange that
        ends late nor the launch of a message delays the step by all its time; how much it does is found by simulating
        a very slow exchange, and one message per gradient that takes no time.
        """
        gradients = self._gradients(graph)
        messages, values = self.plan(graph, gradients), self.values(graph)
        slowed = super().slowed(graph, gradients, messages)
        quiet = lay_out(slowed, replace(messages, parts=(), prioritised=False), self)
        timeline = simulate(quiet)
        step = int(np.argsort(timeline.step_times_ns, kind="stable")[(quiet.n_steps - 1) // 2])
        found = _Step(quiet, timeline, step, messages.gradients(quiet))
        net, launch, late = messages.net(), 1e3 * values["launch_us"], round(1e6 * messages.waiting_ms)
        felt, after = 1.0, None
        if graph.info.platform != "cpu":

            def steps(parts: Sequence[MessagePart]) -> Int64:
                return simulate(
                    lay_out(slowed, replace(messages, parts=tuple(parts), prioritised=False), self)
                ).step_times_ns

            everything, total = tuple(range(len(gradients))), sum(each.nbytes for each in gradients)
            apart = float(np.median(steps([MessagePart(gradients=(i,), nbytes=0) for i in everything])))
            more = apart - float(np.median(timeline.step_times_ns))
            felt = float(np.clip(more / (launch * len(gradients)), 0, 1)) if launch else 1.0
            whole = net.cost(CollectiveKind.ALL_REDUCE, total).seconds
            slow = MessagePart(
                gradients=everything, nbytes=total * (1 + round(2e-9 * apart / whole)) if whole else total
            )
            took = round(1e9 * net.cost(CollectiveKind.ALL_REDUCE, slow.nbytes).seconds)
            sent = found.all_ready()[:, -1] + late + round(felt * launch)
            felt_ns = steps([slow])
            if np.median(felt_ns) < took / 2:
                raise self.refuse(
                    "the steps of this recording do not wait for the device, so nothing shows how long an exchange "
                    "lasts; record several steps."
                )
            after = round(float(np.median(felt_ns - sent - took)))
        return found.problem(
            name,
            late_ns=late + round(felt * launch),
            cut_ns=round(felt * (launch + 1e3 * values.get("region_us", 0.0))),
            after_ns=after,
            network=net,
            slots=net.in_flight,
        )


@dataclass(frozen=True, eq=False)
class _Step:
    """The simulated steps of a graph whose gradients travel in no time, and the one of median length."""

    graph: TaskGraph
    timeline: Timeline
    step: int
    gradients: Sequence[Gradient]

    def problem(
        self, name: str, *, late_ns: int, cut_ns: int, after_ns: int | None, network: Network, slots: int
    ) -> CoarseStep:
        """Return durations between the moments that matter; every gradient may leave `late_ns` after it is ready.

        `after_ns` is what follows an exchange that ends late, where that is known not to be all that follows compute.
        """
        begin = int(self.timeline.end[self.graph.marks[self.step]])
        ready = _middle(self.all_ready()) + late_ns
        waits = max(int(_middle(self._behind())), int(ready[-1]))
        step = round(float(np.median(self.timeline.step_times_ns)))
        after = step - (waits - late_ns)
        if after_ns is not None:  # an exchange that ends a little behind compute is not felt
            waits, after = max(step - after_ns, int(ready[-1])), after_ns
        if after < 0:  # steps are counted on the host, and the device is behind it by more than follows the exchange
            ready, waits, after = np.maximum(ready + after, 0), waits + after, 0
        first, forward = self._forward(begin, int(ready[0]))
        backward = np.diff(ready, prepend=first + int(forward.sum()))
        nbytes = np.array([each.nbytes for each in self.gradients], dtype=np.int64)
        update = min(self._busy(Phase.OPTIMIZER), after)
        return (
            CoarseStep(
                name=name,
                first_ns=first,
                forward_ns=forward,
                forward_place=self._place(),
                backward_ns=backward.astype(np.int64),
                last_ns=waits - int(ready[-1]),
                update_ns=_shared(update, nbytes.astype(np.float64)),
                rest_ns=max(after - update - late_ns, 0),
                nbytes=nbytes,
                cut_ns=np.full(len(nbytes) - 1, cut_ns, dtype=np.int64),
                tensors=tuple(each.name or f"gradient {i}" for i, each in enumerate(self.gradients)),
                network=network,
                slots=slots,
            )
            .checked()
            .coarsened()
        )

    def all_ready(self) -> Int64:
        """Return when gradients (columns, in order) of every step (rows) are ready, ns from the step's begin."""
        end = self.timeline.end
        host = np.stack([end[each.ready] for each in self.gradients], axis=1)
        device = np.stack([np.where(each.device >= 0, end[each.device], 0) for each in self.gradients], axis=1)
        at = np.maximum(host, device) - end[self.graph.marks[:-1], None]
        found: Int64 = np.maximum.accumulate(np.maximum(at, 0), axis=1)
        return found

    def _behind(self) -> Int64:
        """Return when compute of every step waits for the last message, from the step's begin."""
        graph, found = self.graph, []
        waiting = (graph.name == graph.names.index(WAIT)) & ~graph.gone
        launch = np.flatnonzero((graph.edge_kind == EdgeKind.LAUNCH) & ~graph.gone[graph.dst])
        for step in range(graph.n_steps):
            join = int(np.flatnonzero(waiting & (graph.step == step))[-1])
            later = launch[(graph.src[launch] > join) & (graph.lane[graph.src[launch]] == graph.lane[join])]
            if graph.on_device.any() and len(later):  # on a device it is the next kernel that waits
                join = int(graph.dst[later[np.argmin(graph.src[later])]])
            found.append(int(self.timeline.start[join]))
        return np.array(found, dtype=np.int64) - self.timeline.end[graph.marks[:-1]]

    def _here(self) -> Mask:
        return np.asarray((self.graph.step == self.step) & ~self.graph.gone)

    def _busy(self, phase: Phase) -> int:
        mine = np.flatnonzero(self._here() & (self.graph.phase == phase))
        if not len(mine):
            return 0
        return int(self.timeline.end[mine].max() - self.timeline.start[mine].min())

    def _uses(self) -> Int64:
        """Return when each weight is first used in the forward pass (ns), −1 where that is unknown."""
        rows = first_uses(self.graph, self.gradients)[:, self.step]
        found: Int64 = np.where(rows >= 0, self.timeline.start[np.maximum(rows, 0)], -1)
        return found

    def _place(self) -> Int64:
        uses = self._uses()
        n = len(uses)
        key = np.lexsort((np.arange(n)[::-1], uses)) if (uses >= 0).all() else np.arange(n)[::-1]
        place = np.empty(n, dtype=np.int64)
        place[key] = np.arange(n)
        return place

    def _forward(self, begin: int, until: int) -> tuple[int, Int64]:
        """Return time before the forward pass, and from the first use of each weight in it to that of the next."""
        uses = self._uses()
        order = np.argsort(self._place(), kind="stable")
        mine = np.flatnonzero(self._here() & (self.graph.phase == Phase.FORWARD))
        if not len(mine) or (uses < 0).any():
            return until, np.zeros(len(uses), dtype=np.int64)
        last = int(np.clip(self.timeline.end[mine].max() - begin, 0, until))
        at = np.clip(uses[order] - begin, 0, last)
        forward = np.empty(len(uses), dtype=np.int64)
        forward[order] = np.diff(np.maximum.accumulate(at), append=last)
        return int(at[0]), np.maximum(forward, 0)


def alone(graph: TaskGraph) -> TaskGraph:
    """Return the graph of one worker without the messages that it exchanged when it was recorded."""
    exchanged = (graph.kind == TaskKind.COLLECTIVE) & ~graph.gone
    if not exchanged.any() and not graph.info.recording.get("distributed"):
        return graph
    quiet = remove(graph, exchanged) if exchanged.any() else graph
    # What is gone keeps its place but is no message any more, to whoever reads messages.
    kind = np.where(quiet.kind == TaskKind.COLLECTIVE, TaskKind.MEMSET, quiet.kind).astype(np.uint8)
    return with_facts(quiet.with_columns(kind=kind), distributed=None)


def _middle(columns: Int64) -> Int64:
    """Return the median over the steps (rows)."""
    found: Int64 = np.rint(np.median(columns, axis=0)).astype(np.int64)
    return found


def _shared(total: int, weight: Float64) -> Int64:
    """Return `total` ns in parts that are proportional to weights and sum to it exactly."""
    if weight.sum() <= 0:
        weight = np.ones_like(weight)
    edges = np.rint(total * np.concatenate([[0.0], np.cumsum(weight)]) / weight.sum())
    parts: Int64 = np.diff(edges).astype(np.int64)
    return parts
