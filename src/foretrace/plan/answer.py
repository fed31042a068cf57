"""The configuration that a search ends with, as data and as Python that applies it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foretrace.plan.buckets import MIB, by_caps
from foretrace.plan.evaluate import Evaluator
from foretrace.plan.result import Answer
from foretrace.shipped import filled
from foretrace.simulate.timeline import simulate
from foretrace.techniques.compute.compiled import Compiled
from foretrace.techniques.compute.fused_optimizer import FusedOptimizer
from foretrace.techniques.compute.mixed_precision import MixedPrecision
from foretrace.techniques.memory.activation_recomputation import ActivationRecomputation
from foretrace.techniques.memory.gradient_accumulation import GradientAccumulation


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients that travel together."""

    first: str  # the one that is ready first
    last: str
    gradients: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Region:
    """A region of a compiled model: the parameters whose gradients are ready first and last in it."""

    first: str
    last: str


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What to set; null where it is not in the answer."""

    buckets: tuple[Bucket, ...]  # in the order in which they are sent
    bucket_cap_mb_list: tuple[float, ...]  # MiB; of DistributedDataParallel, one size per bucket
    bucket_cap_mb: float | None  # MiB; the best single size, for PyTorch without the list
    bucket_cap_step_s: float | None  # step with that size, by the whole graph
    gradient_as_bucket_view: bool
    autocast: str | None  # "bfloat16" or "float16"
    compile_mode: str | None
    regions: tuple[Region, ...]  # in backward order
    fused_optimizer: bool
    accumulation_steps: int
    recompute: str | None  # blocks to checkpoint


def configuration(answer: Answer) -> Configuration:
    """Return what the best candidate sets."""
    chosen = {type(each): each for each in answer.best.techniques}
    buckets: tuple[Bucket, ...] = ()
    caps: tuple[float, ...] = ()
    single, single_s = None, None
    if answer.problem is not None and answer.best.found is not None:
        problem, plan = answer.problem, answer.best.found.plan
        sizes = np.add.reduceat(problem.nbytes, plan.begins).tolist()
        count = problem.members or (1,) * len(problem)
        buckets = tuple(
            Bucket(
                first=problem.tensors[begin].split("+")[0],
                last=problem.tensors[end].split("+")[-1],
                gradients=sum(count[begin : end + 1]),
                bytes=size,
            )
            for begin, end, size in zip(plan.begins, plan.ends, sizes, strict=True)
        )
        caps = tuple(size / MIB for size in sizes)
        evaluator = Evaluator.of(problem)
        cap = by_caps(evaluator, single=True)[2]
        single, single_s = cap / MIB, _with_cap_s(answer, cap / MIB)
    mixed, compiled = chosen.get(MixedPrecision), chosen.get(Compiled)
    accumulated, recomputed = chosen.get(GradientAccumulation), chosen.get(ActivationRecomputation)
    regions = tuple(Region(first=each.first, last=each.last) for each in buckets) if compiled is not None else ()
    return Configuration(
        buckets=buckets,
        bucket_cap_mb_list=caps,
        bucket_cap_mb=single,
        bucket_cap_step_s=single_s,
        gradient_as_bucket_view=bool(buckets),
        autocast=mixed.type_name(answer.graph) if isinstance(mixed, MixedPrecision) else None,
        compile_mode=compiled.mode or None if isinstance(compiled, Compiled) else None,
        regions=regions,
        fused_optimizer=FusedOptimizer in chosen,
        accumulation_steps=accumulated.steps if isinstance(accumulated, GradientAccumulation) else 1,
        recompute=recomputed.blocks or None if isinstance(recomputed, ActivationRecomputation) else None,
    )


def _with_cap_s(answer: Answer, cap_mb: float) -> float | None:
    """Return the step with one size for all buckets."""
    if answer.best.parallel is None:
        return None
    graph = answer.graph
    for technique in answer.best.techniques:
        graph = technique.predict(graph)
    alike = replace(answer.best.parallel, buckets_mb="", bucket_mb=cap_mb, parts="", ahead=False)
    return simulate(alike.predict(graph)).step_time_s


def snippet(found: Configuration) -> str:
    """Return Python with a function for each thing that is to be set; needs PyTorch alone."""
    return filled("foretrace.plan", "prepare.py.j2", found=found)


def text(found: Configuration, suffix: str) -> str:
    """Return what a file of this suffix holds: Python (.py), else JSON."""
    return snippet(found) if suffix == ".py" else json.dumps(as_json(found), indent=2) + "\n"


def as_json(found: Configuration) -> dict[str, Any]:
    """Return the configuration for a file or for `DistributedDataParallel(**...)`."""
    return {
        "distributed_data_parallel": {
            "bucket_cap_mb_list": list(found.bucket_cap_mb_list),
            "gradient_as_bucket_view": found.gradient_as_bucket_view,
        }
        if found.buckets
        else None,
        "bucket_cap_mb": found.bucket_cap_mb,
        "autocast": found.autocast,
        "compile": {"mode": found.compile_mode, "regions": [[each.first, each.last] for each in found.regions]}
        if found.compile_mode
        else None,
        "fused_optimizer": found.fused_optimizer,
        "accumulation_steps": found.accumulation_steps,
        "recompute": found.recompute,
    }
