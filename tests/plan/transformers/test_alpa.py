"""Unequal stages against every plan of small spaces, and beside equal ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.plan.transformers.alpa import UnequalStage, cut, unequal_stages
from foretrace.plan.transformers.model import Parallelism, machine, softwares
from foretrace.plan.transformers.shape import TransformerSizes, transformer
from foretrace.plan.transformers.space import ParallelismSpace
from foretrace.simulate.timeline import simulate

SMALL = TransformerSizes(
    name="small", layers=5, hidden=512, heads=4, kv_heads=4, inner=2048, words=8000, length=256, gated=True
)


def compositions(layers: int, devices: int, sizes: list[int]) -> Iterator[list[tuple[int, int]]]:
    """Every sequence of (layers, mesh) with all layers on all devices."""
    if layers == devices == 0:
        yield []
    for n, mesh in product(range(1, layers + 1), sizes):
        if mesh <= devices:
            yield from ([(n, mesh), *rest] for rest in compositions(layers - n, devices - mesh, sizes))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 3),
    st.one_of(st.just(inf), st.floats(1, 20)),
)
def test_the_least_sum_is_that_of_all_ways_to_cut(
    seed: int, layers: int, devices: int, flights: int, limit: float
) -> None:
    rng, sizes = np.random.default_rng(seed), [1, 2, 4]
    paces = rng.uniform(1, 20, (flights + 1, 3, layers + 1, 4))
    paces[rng.random(paces.shape) < 0.2] = inf
    best = inf
    for plan in compositions(layers, devices, sizes):
        each = [
            float(paces[min(len(plan) - i, flights), sizes.index(mesh), n, (i == 0) + 2 * (i == len(plan) - 1)])
            for i, (n, mesh) in enumerate(plan)
        ]
        if max(each) <= limit:
            best = min(best, sum(each))
    shape = min(layers, devices) + 1, layers + 1, devices + 1
    least = min(float((paces[1:, mesh, n] * sizes[mesh] / n).min()) for mesh in range(3) for n in range(1, layers + 1))
    found = cut(paces, np.array(sizes), devices, least, limit, inf, np.empty(shape), np.zeros(shape, dtype=np.int64))
    assert found == pytest.approx(best)


def space(model: TransformerSizes = SMALL, *, devices: int = 4, batch: int = 8, gb: float = 80, **fixed: int):  # type: ignore[no-untyped-def]
    on = replace(machine("a100-80gb", network_gb_s=0.5), node=2, capacity=gb * 1e9)
    return ParallelismSpace(
        model=model, on=on, software=softwares()["megatron"], devices=devices, batch=batch, fixed=fixed
    )


@pytest.mark.parametrize("gb", [80, 0.9, 0.55])
@pytest.mark.parametrize("devices", [3, 4, 6])
def test_no_plan_is_better(devices: int, gb: float) -> None:
    """All stages, meshes and degrees by hand: layers, tensor or data, recomputation, within memory."""
    here = space(devices=devices, gb=gb, zero=0, sequence=0, context=1, overlap=1)
    best = inf
    sizes = [size for size in (1, 2, 4, 6) if size <= devices]
    for samples in (1, 2, 4, 8):
        count = here.batch // samples
        options: dict[tuple[int, int, int, bool, bool], list[tuple[float, float]]] = {}
        for plan in compositions(SMALL.layers, devices, sizes):
            each = []
            for i, (n, mesh) in enumerate(plan):
                key = n, mesh, min(len(plan) - i, count), i == 0, i == len(plan) - 1
                if key not in options:
                    options[key] = ways(here, samples, *key)
                each.append(options[key])
            for choice in product(*each):
                paces, ends = [pace for pace, _ in choice], [end for _, end in choice]
                best = min(best, sum(paces) + (count - 1) * max(paces) + max(ends))
    if best == inf:
        with pytest.raises(ForetraceError, match="does not fit on"):
            unequal_stages(here)
    else:
        found = unequal_stages(here)
        assert found.step_s <= found.equal_s
        paces = [each.pace_s for each in found.stages]
        t = sum(paces) + (found.micro_batches - 1) * max(paces) + max(each.cost.update_s for each in found.stages)
        assert best * (1 - 1e-9) <= t and found.step_s <= best * 1.001


def ways(
    here: ParallelismSpace, samples: int, n: int, mesh: int, flight: int, first: bool, last: bool
) -> list[tuple[float, float]]:
    """Seconds of passes with messages, and at the end, of every way to run a stage that fits."""
    found = []
    for tensor, again in product((1, 2, 4), range(3)):
        if mesh % tensor or samples % (mesh // tensor):
            continue
        at = Parallelism(
            tensor=tensor, data=mesh // tensor, micro=samples * tensor // mesh, recompute=again, overlap=1,
            pipeline=max(here.devices // mesh, 2) if mesh < here.devices else 1,
        )  # fmt: skip
        if nbytes(here, at, n, flight, first, last) <= here.on.capacity:
            cost = here.stage_cost(at, n, last=last)
            found.append((cost.forward_s + cost.backward_s + 2 * cost.hop_s, cost.update_s))
    return found


def nbytes(here: ParallelismSpace, at: Parallelism, n: int, flight: int, first: bool, last: bool) -> float:
    """Of a stage, from the closed form of equal ones with as many in flight."""
    ends = {(True, True): 0, (True, False): 0, (False, False): 1, (False, True): 2}[first, last]
    stages = 1 if first and last else 3
    model = replace(here.model, layers=n * stages)
    alike = replace(here, model=model, devices=at.tensor * at.data * stages, fixed={})
    stage = alike.cost(replace(at, pipeline=stages)).memory[ends]
    kept = alike.cost(replace(at, pipeline=stages)).memory[stages - 1]["activations"]
    return sum(stage.values()) - stage["activations"] + flight * kept


def test_stages_use_all_layers_and_devices_and_are_simulated() -> None:
    """63 layers in stages that no power of two divides; equal ones cost four times as much on a slow network."""
    here = ParallelismSpace(
        model=replace(transformer("llama-2-70b"), layers=63), on=machine("h100", network_gb_s=2.0),
        software=softwares()["megatron"], devices=32, batch=32,
    )  # fmt: skip
    found = unequal_stages(here)
    assert sum(each.layers for each in found.stages) == 63
    assert sum(each.devices for each in found.stages) == 32
    assert max(each.nbytes for each in found.stages) <= here.on.capacity
    assert found.interval_s[0] < found.step_s < found.interval_s[1]
    assert found.step_s < 0.9 * found.equal_s


def test_equal_stages_stay_where_nothing_is_better() -> None:
    here = space(transformer("gpt2-xl"), devices=4, batch=32, gb=80)
    found = unequal_stages(here)
    (at,) = replace(here, fixed={"virtual": 1}).sweep(1).configurations
    assert found.equal_s == pytest.approx(simulate(here.expand(at)).window_ns / 1e9)
    assert found.step_s <= found.equal_s
    assert all(isinstance(each, UnequalStage) for each in found.stages)


@pytest.mark.parametrize("fixed", [{"pipeline": 2}, {"micro": 1}, {"virtual": 5, "tensor": 1}])
def test_what_stages_cannot_differ_in(fixed: dict[str, int]) -> None:
    with pytest.raises(ForetraceError, match=r"no `\w+=` in common; leave it out"):
        unequal_stages(space(replace(SMALL, layers=10), devices=4, **fixed))
