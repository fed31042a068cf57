"""`codesign`: the best design with its plan, what it is compared with, and what it looks like when it runs."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf

import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError
from foretrace.graph.taskgraph import Phase, TaskGraph, TaskKind
from foretrace.graph.writer import StepWriter
from foretrace.hardware.accelerators import MAPPED_PORTS, TPU_LIKE, Accelerator
from foretrace.plan.codesign import kernels
from foretrace.plan.codesign.search import CodesignSpace, PricedDesigns, design_columns
from foretrace.plan.transformers.model import DESIGNED, Parallelism, fields_of, on_design
from foretrace.plan.transformers.shape import TransformerSizes, transformer
from foretrace.plan.transformers.space import ParallelismSpace
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.trace.trace import LaneKind

BALANCED = replace(TPU_LIKE, vector_cores=8 * TPU_LIKE.vector_cores)
BUCKET, PATIENCE = 10_000.0, 5  # of PHAZE's rule: µm² of a bucket, buckets without a gain
LINKS = {"4 GiB/s": 4 * 2**30 / 1e9, "50 GB/s": 50.0, "4 TiB/s": 4 * 2**40 / 1e9}  # stated; usual; as units are mixed
# What is assumed of any design: words a cycle across the ports, times the lanes' rate. First what is answered with,
# then its ends: ports without end and those of PHAZE's mapper, vector operators of half and twice the work.
ASSUMED = ((TPU_LIKE.ports, 1.0), (1 << 40, 1.0), (MAPPED_PORTS, 1.0), (TPU_LIKE.ports, 2.0), (TPU_LIKE.ports, 0.5))
MOST_PASSES = 100_000  # that are simulated


@dataclass(frozen=True, kw_only=True)
class CodesignedPlan:
    """A design with a plan; seconds of a batch under each of `ASSUMED`, with this plan."""

    design: Accelerator
    plan: Parallelism
    under_s: tuple[float, ...]
    calls: int = 0  # designs that a search priced
    joules: float = 0.0  # of a batch, where it was asked

    @property
    def iteration_s(self) -> float:
        """As answered."""
        return self.under_s[0]

    @property
    def interval_s(self) -> tuple[float, float]:
        """Between the quickest and the slowest that is assumed, each alone."""
        return min(self.under_s), max(self.under_s)

    def over(self, best: CodesignedPlan) -> tuple[float, float, float]:
        """Return how many times longer than `best` it takes, and the least and the most under one assumption
        for both.
        """
        ratios = [mine / others for mine, others in zip(self.under_s, best.under_s, strict=True)]
        return ratios[0], min(ratios), max(ratios)


@dataclass(frozen=True, kw_only=True)
class LinkRow:
    """The same search with other links between devices."""

    link: str
    link_gb_s: float
    design: str  # the best
    iteration_s: float
    tpu_like: float  # times as long, with its own best plan
    balanced: float  # the same of the one with more vector units


@dataclass(frozen=True, kw_only=True)
class Codesign:
    """The answer."""

    space: CodesignSpace
    link_gb_s: float
    best: CodesignedPlan
    joules: float
    pareto: tuple[CodesignedPlan, ...]  # by area; none is beaten in area, time and energy at once
    baselines: dict[str, CodesignedPlan]
    links: tuple[LinkRow, ...]
    seconds: float

    @property
    def proven(self) -> bool:
        """Every design was priced with every plan, or with one that is never slower."""
        return True

    @property
    def throughput(self) -> float:
        """Samples per second of all devices."""
        return self.space.batch / self.best.iteration_s

    @property
    def drawable(self) -> bool:
        """Whether its passes are few enough to simulate."""
        at, each = self.best.plan, 2 if self.space.training else 1
        return each * at.pipeline * self.space.batch // (at.data * at.micro) <= MOST_PASSES

    @cached_property
    def graph(self) -> TaskGraph:
        """The best as tasks, a lane per stage. Raises ForetraceError where it has more than 100,000 passes."""
        at, space = self.best.plan, self.space
        count = space.batch // (at.data * at.micro)
        if not self.drawable:
            raise ForetraceError(
                f"the winner has more than {MOST_PASSES} passes to draw; give a smaller batch or more devices."
            )
        if space.training:
            on = on_design(self.best.design)
            whole = ParallelismSpace(
                model=space.model, on=on, software=DESIGNED, devices=space.devices, batch=space.batch
            )
            return whole.expand(at)
        (s, c), parts = space.arrays, np.zeros(3)
        kernels.forward_parts(s, on_design(self.best.design).array(), c, fields_of(at), space.decode, parts)
        pace_s, head_s, hop_s = parts.tolist()
        return forward_graph(pace_s, head_s, hop_s, at.pipeline, count)

    @cached_property
    def simulated(self) -> Timeline:
        """The best on the simulator."""
        return simulate(self.graph)


def forward_graph(pace_s: float, head_s: float, hop_s: float, stages: int, count: int) -> TaskGraph:
    """Return `count` micro-batches through stages that only compute forward; what they send takes time of the link."""
    writer = StepWriter("forward pipeline", ranks=stages)
    lanes = [writer.on(LaneKind.GPU, f"stage {r}", r) for r in range(stages)]
    links = [writer.on(LaneKind.LINK, f"{r} to {r + 1}", r) for r in range(stages - 1)]
    for _ in range(count):
        sent = list[int]()
        for stage, lane in enumerate(lanes):
            took_s = pace_s + (head_s if stage == stages - 1 else 0.0)
            sent = [writer.behind(sent, TaskKind.KERNEL, lane, "f", round(took_s * 1e9), layer=f"stage {stage}",
                                  phase=Phase.FORWARD)]  # fmt: skip
            if stage < stages - 1:
                sent = [writer.behind(sent, TaskKind.COPY, links[stage], "send", round(hop_s * 1e9))]
    return writer.ended()


def codesign(
    name: str | TransformerSizes, *, devices: int = 1024, batch: int = 4096, area: float = 0.0, link_gb_s: float = 50.0,
    training: bool = True, length: int = 0, decode: int = 0,
) -> Codesign:  # fmt: skip
    """Price every design of at most `area` (µm²; by default that of `TPU_LIKE`) with every plan.

    With `decode` a batch is one more word of every sample behind so many in its cache: nothing is trained.
    Raises ForetraceError for an unknown model, an encoder that is to decode, an area that nothing has, and where no
    plan is possible.
    """
    begun = time.process_time()
    model = name if isinstance(name, TransformerSizes) else transformer(name, length=length)
    for what, value in (("devices", devices), ("batch", batch), ("decode", decode or 1)):
        if not 1 <= value <= 1_000_000:
            raise ForetraceError(f"`{what}=` must be 1 to 1000000, got {value}; give {1 if value < 1 else 1_000_000}.")
    if decode and not model.causal:
        raise ForetraceError(f"{model.name} is an encoder and adds no words one by one; leave out `decode=`.")
    designs = design_columns(area)
    like = replace(TPU_LIKE, link_gb_s=link_gb_s)
    space = CodesignSpace(model=model, devices=devices, batch=batch, training=training and not decode, like=like,
                          designs=designs, decode=decode)  # fmt: skip
    priced = space.price(link_gb_s)
    row = int(np.argmin(priced.seconds))
    best = _under(space, designs.at(row, like), space.plan(priced, row))
    _, tpu_plan = space.one(like)
    balanced = replace(BALANCED, link_gb_s=link_gb_s)
    fixed = space.price(link_gb_s, (space.plans[0] == fields_of(tpu_plan)).all(axis=1))
    same = int(np.argmin(fixed.seconds))
    stopped, calls = stopping_rule(designs.area, priced.seconds)
    expert = space.expert()
    baselines = {
        "TPU-like": _under(space, like, tpu_plan),
        "TPU-like, balanced vector units": _under(space, balanced, space.one(balanced)[1]),
        "PHAZE's search rule": _under(space, designs.at(stopped, like), space.plan(priced, stopped), calls),
        "TPU-like with an expert's plan": _under(space, like, expert),
        "best design for the plan of TPU-like": _under(space, designs.at(same, like), tpu_plan),
    }
    links = tuple(
        _linked(space, each, rate, priced if rate == link_gb_s else space.price(rate)) for each, rate in LINKS.items()
    )
    return Codesign(
        space=space, link_gb_s=link_gb_s, best=best, joules=float(priced.joules[row]), baselines=baselines, links=links,
        pareto=_front(space, priced, like), seconds=time.process_time() - begun,
    )  # fmt: skip


def _under(space: CodesignSpace, design: Accelerator, plan: Parallelism, calls: int = 0) -> CodesignedPlan:
    seconds = tuple(space.one(replace(design, ports=ports), plan, lanes_rate=rate)[0] for ports, rate in ASSUMED)
    return CodesignedPlan(design=design, plan=plan, under_s=seconds, calls=calls)


def _linked(space: CodesignSpace, link: str, rate: float, priced: PricedDesigns) -> LinkRow:
    like = replace(space.like, link_gb_s=rate)
    row = int(np.argmin(priced.seconds))
    best_s = float(priced.seconds[row])
    tpu_s, balanced_s = (space.one(replace(each, link_gb_s=rate))[0] for each in (TPU_LIKE, BALANCED))
    return LinkRow(link=link, link_gb_s=rate, design=str(space.designs.at(row, like)),
                   iteration_s=best_s, tpu_like=tpu_s / best_s, balanced=balanced_s / best_s)  # fmt: skip


def _front(space: CodesignSpace, priced: PricedDesigns, like: Accelerator) -> tuple[CodesignedPlan, ...]:
    area, seconds, joules = space.designs.area, priced.seconds, priced.joules
    kept = np.zeros(len(area), dtype=np.int64)
    count = kernels.front(area, seconds, joules, np.lexsort((joules, seconds, area)), kept)
    return tuple(
        CodesignedPlan(
            design=space.designs.at(row, like), plan=space.plan(priced, row), under_s=(float(seconds[row]),),
            joules=float(joules[row]),
        )
        for row in kept[:count].tolist()
    )  # fmt: skip


def stopping_rule(area: Float64, seconds: Float64) -> tuple[int, int]:
    """Return the row that PHAZE's published search answers with, and how many designs it prices.

    Buckets of 10,000 µm² from the largest down, each in the order given; it stops behind a bucket where the best
    throughputs of the last five do not rise (Solver/solver.py of msr-fiddle/phaze).
    """
    buckets = (area / BUCKET).astype(np.int64)
    best, calls = list[float](), 0
    row, least = -1, inf
    for bucket in np.unique(buckets)[::-1].tolist():
        inside = np.flatnonzero(buckets == bucket)
        calls += len(inside)
        first = int(inside[np.argmin(seconds[inside])])
        if row < 0 or seconds[first] < least:
            row, least = first, float(seconds[first])
        best.append(float(seconds[first]))
        last = best[-PATIENCE:]
        if len(best) >= PATIENCE and all(a <= b for a, b in pairwise(last)):
            break
    return row, calls
