"""PipeDream-2BW's planner (Narayanan et al., ICML 2021, section 4): width, depth, micro-batch and recomputation.

A model of alike blocks is cut into `depth` stages of as many blocks each, `width` replicas of the whole. All
configurations are columns; the best that fits is expanded into its schedule and simulated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foretrace.errors import ForetraceError
from foretrace.plan.pipelines.lower import PipelinePrediction, StageCost, predict
from foretrace.training.pipeline.schedules import one_f_one_b_flush, two_bw

VERSIONS = {"2bw": 2, "1f1b-flush": 1}
_BATCHES = 4  # that the winner's simulation has


@dataclass(frozen=True, kw_only=True)
class BlockModel:
    """A model of alike blocks: seconds by samples per micro-batch, and bytes."""

    blocks: int
    forward_s: Mapping[int, float]  # of a block
    backward_s: Mapping[int, float]
    weight_bytes: float  # of a block
    state_bytes: float  # the optimizer's, of a block
    activation_bytes: float  # that a block keeps of a sample
    boundary_bytes: float  # that goes from block to block, of a sample


@dataclass(frozen=True, kw_only=True)
class Configurations:
    """Columns of n configurations, fastest first; those that do not fit are left out."""

    schedule: npt.NDArray[np.str_]
    width: npt.NDArray[np.int64]
    depth: npt.NDArray[np.int64]
    micro_batch: npt.NDArray[np.int64]  # samples
    micro_batches: npt.NDArray[np.int64]  # per batch and replica
    recompute: npt.NDArray[np.bool_]
    nbytes: npt.NDArray[np.float64]  # of the first stage, which holds most
    samples_per_s: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.width)


def plan_2bw(
    model: BlockModel, *, devices: int, memory_bytes: float, bandwidth: float, batch: int, latency_s: float = 0.0
) -> Configurations:
    """All configurations that fit, fastest first: with two versions, and with a flush.

    `bandwidth` is bytes per second of every link. A hop counts as time of its stage, as published; averaging the
    gradients overlaps with computation without a flush, and is added to the batch with one. Raises ForetraceError,
    naming what comes nearest, where nothing fits.
    """
    if devices < 1 or model.blocks < 1 or batch < 1 or not bandwidth > 0:
        raise ForetraceError(
            f"a plan must have devices, blocks, samples and a bandwidth above zero, got {devices}, {model.blocks}, "
            f"{batch} and {bandwidth:g}."
        )
    grid = [
        (name, devices // depth, depth, b, again)
        for name in VERSIONS
        for depth in range(1, min(devices, model.blocks) + 1)
        if devices % depth == 0 and model.blocks % depth == 0
        for b in sorted(model.forward_s)
        for again in (False, True)
        if batch % (b * (devices // depth)) == 0
    ]
    if not grid:
        raise ForetraceError(
            f"no depth divides {devices} devices and {model.blocks} blocks with micro-batches that divide {batch} "
            "samples; change the batch to a multiple of the devices."
        )
    name, width, depth, b, again = (np.array(column) for column in zip(*grid, strict=True))
    m = batch // (b * width)
    versions = np.array([VERSIONS[each] for each in name])
    share = model.blocks // depth
    forward = np.array([model.forward_s[each] for each in b.tolist()]) * share
    backward = np.array([model.backward_s[each] for each in b.tolist()]) * share + again * forward
    hop = np.where(depth > 1, latency_s + model.boundary_bytes * b / bandwidth, 0.0)
    reduce = 2 * (width - 1) / width * model.weight_bytes * share / bandwidth
    step = forward + backward + np.where(depth > 1, 2 * hop, 0.0)
    flush = name == "1f1b-flush"
    seconds = np.where(flush, step * (m + depth - 1) + reduce, np.maximum(step * m, reduce))
    flight = np.where(flush, np.minimum(depth, m), depth)
    inputs = model.boundary_bytes * b
    whole = model.activation_bytes * b * share
    held = np.where(again, flight * inputs + np.maximum(whole - inputs, 0.0), flight * whole)
    nbytes = share * (model.weight_bytes * (versions + 1) + model.state_bytes) + held
    works = flush | (m >= depth - 1)  # see `two_bw`
    fits = works & (nbytes <= memory_bytes)
    if not fits.any():
        near = int(np.argmin(np.where(works, nbytes, np.inf)))
        raise ForetraceError(
            f"nothing fits in {memory_bytes:,.0f} bytes per device; the least is {nbytes[near]:,.0f} with "
            f"{depth[near]} stages, micro-batches of {b[near]} and recomputation {again[near]}: use more "
            "devices or smaller micro-batches."
        )
    rows = np.flatnonzero(fits)
    rows = rows[np.lexsort((nbytes[rows], seconds[rows]))]
    return Configurations(
        schedule=name[rows], width=width[rows], depth=depth[rows], micro_batch=b[rows], micro_batches=m[rows],
        recompute=again[rows], nbytes=nbytes[rows], samples_per_s=batch / seconds[rows],
    )  # fmt: skip


def expanded(
    model: BlockModel, found: Configurations, row: int, *, bandwidth: float, latency_s: float = 0.0
) -> PipelinePrediction:
    """One configuration as a schedule of four batches, simulated; averaging over replicas is not in it."""
    depth, b = int(found.depth[row]), int(found.micro_batch[row])
    share = model.blocks // depth
    cost = StageCost(
        forward_s=model.forward_s[b] * share,
        backward_s=model.backward_s[b] * share,
        hop_s=latency_s + model.boundary_bytes * b / bandwidth,
        activation_bytes=max(model.activation_bytes * share, model.boundary_bytes) * b,
        input_bytes=model.boundary_bytes * b,
        weight_bytes=model.weight_bytes * share,
        state_bytes=model.state_bytes * share,
    )
    make = two_bw if found.schedule[row] == "2bw" else one_f_one_b_flush
    schedule = make(depth, int(found.micro_batches[row]), _BATCHES)
    return predict(schedule, [cost] * depth, recompute=bool(found.recompute[row]))
