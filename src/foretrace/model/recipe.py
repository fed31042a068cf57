"""What an `Estimate` was taken to be, choice by choice, and where its time goes by family of operators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from foretrace.cost.calls import Family, Precision
from foretrace.cost.devices.defaults import as_run
from foretrace.cost.devices.roofline import MATRIX
from foretrace.model.estimate import Estimate


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One choice of the recipe, and whether nobody made it."""

    name: str  # "precision", "optimizer", "recomputation", "micro-batches", "tensor", "pipeline", "data", "ZeRO", ...
    value: str
    default: bool


@dataclass(frozen=True, kw_only=True)
class CostSource:
    """A cost model that spoke: its share of the kernel time, and where its numbers come from."""

    model: str
    share: float
    why: str


@dataclass(frozen=True, kw_only=True)
class FamilyWork:
    """Operators of one family together."""

    family: str
    calls: int
    flops: float
    bytes: float
    time_s: float  # sum of their kernels


def recipe(found: Estimate, chosen: frozenset[str]) -> Iterator[Choice]:
    """Yield what the step was taken to be; `chosen` names what the user chose. A training's own code is no default."""
    graph, sharding = found.operators, found.sharding

    def choice(name: str, value: object, *given: str) -> Choice:
        return Choice(name=name, value=str(value), default=not chosen & set(given))

    weights = graph.recipe.get("weights", "")
    kept = "float32 beside 16-bit copies" if sharding.master else weights
    yield choice("precision", precisions(found) + (f", weights in {kept}" if kept else ""), "precision", "do")
    if "layout" in graph.recipe:
        yield choice("layout", graph.recipe["layout"], "do")
    for name in ("attention", "loss", "dropout"):
        if name in graph.recipe:
            yield choice(name, graph.recipe[name], name)
    if found.training:
        if "optimizer" in graph.recipe:
            yield choice("optimizer", graph.recipe["optimizer"], "optimizer", "do")
        every = {0: "none", 1: "every block"}.get(found.recompute, f"every {found.recompute} blocks, one")
        far = ", to its end" if found.reentrant else ", as far as read" if found.recompute else ""
        yield choice("recomputation", every + far, "recompute", "recompute-every", "do")
        yield choice("micro-batches", found.accumulate, "accumulate", "do")
    yield choice("tensor", sharding.tensor, "tensor")
    yield choice("pipeline", 1)
    yield choice("data", sharding.workers, "workers")
    if found.training:
        yield choice("ZeRO", sharding.stage, "zero")
    if found.networks:
        yield choice("network", " and ".join(dict.fromkeys(found.networks)), "network")


def precisions(found: Estimate) -> str:
    """Return the precisions that products run in, the most work first: "bf16, fp32"."""
    calls = as_run(found.operators.calls, found.device)
    work: dict[str, float] = {}
    for each in np.unique(calls.precision).tolist():
        mine = (calls.precision == each) & np.isin(calls.family, MATRIX)
        if flops := float(calls.flops[mine].sum()):
            work[Precision(each).name.lower()] = flops
    return ", ".join(sorted(work, key=lambda name: -work[name])) or "no products"


def sources(found: Estimate) -> tuple[CostSource, ...]:
    """Return the cost models that spoke."""
    step = found.step
    return tuple(CostSource(model=name, share=part, why=step.whys[name]) for name, part in step.cost_sources.items())


def families(found: Estimate) -> tuple[FamilyWork, ...]:
    """Return where the time goes, the longest first."""
    calls, time = found.operators.calls, found.step.lowered.costs.seconds
    members = ((family, calls.family == family) for family in Family if family != Family.NONE)
    rows = [
        FamilyWork(
            family=family.name.lower(),
            calls=int(mine.sum()),
            flops=float(calls.flops[mine].sum()),
            bytes=float(calls.nbytes[mine].sum()),
            time_s=float(np.nansum(time[mine])),
        )
        for family, mine in members
        if mine.any()
    ]
    return tuple(sorted(rows, key=lambda row: -row.time_s))
