"""Designs times plans: each price is that of the planner, the best is that of brute force, runs take as long."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from foretrace.cost.accelerators.kernels import ACTIVATION, ADD, NORM, SOFTMAX
from foretrace.errors import ForetraceError
from foretrace.hardware.accelerators import MB, TPU_LIKE, Accelerator
from foretrace.plan.codesign import kernels, search
from foretrace.plan.codesign.answer import Codesign, codesign, forward_graph, stopping_rule
from foretrace.plan.codesign.search import CodesignSpace, design_columns
from foretrace.plan.transformers.model import DESIGNED, Parallelism, configuration_of, on_design
from foretrace.plan.transformers.plan import plan_decoder
from foretrace.plan.transformers.shape import TransformerSizes, transformer
from foretrace.plan.transformers.space import ParallelismSpace
from foretrace.simulate.timeline import simulate
from tests.cost.test_accelerators import product_seconds

SMALL = TransformerSizes(
    name="small", layers=4, hidden=512, heads=8, kv_heads=8, inner=2048, words=8192, length=256, causal=True
)
AREA = 12e6  # µm²: a few thousand designs


@pytest.fixture(scope="module")
def trained() -> Codesign:
    return codesign(SMALL, devices=8, batch=32, area=AREA)


@pytest.fixture(scope="module")
def inferred() -> Codesign:
    return codesign(SMALL, devices=8, batch=32, area=AREA, training=False)


def _planner(found: Codesign, design: object) -> ParallelismSpace:
    space = found.space
    on = on_design(design)  # type: ignore[arg-type]
    return ParallelismSpace(model=space.model, on=on, software=DESIGNED, devices=space.devices, batch=space.batch)


def test_every_price_is_that_of_the_planner(trained: Codesign) -> None:
    space = trained.space
    priced = space.price(50.0)
    rng = np.random.default_rng(1)
    for row in rng.choice(len(space.designs), 40, replace=False).tolist():
        design = space.designs.at(row, space.like)
        cost = _planner(trained, design).cost(space.plan(priced, row))
        assert cost.seconds == pytest.approx(priced.seconds[row], rel=1e-12)
        assert cost.peak_bytes <= 32e9


def test_every_plan_has_the_price_of_the_planner(trained: Codesign) -> None:
    """Also those of sequence parallelism that are not the best of any design."""
    space = trained.space
    design = space.designs.at(len(space.designs) // 2, space.like)
    planner, plans = _planner(trained, design), space._splits()
    assert {0, 1} == {each.sequence for each in plans} and all(each.tensor > 1 for each in plans if each.sequence)
    for at in plans:
        assert space.one(design, at)[0] == pytest.approx(planner.cost(at).seconds, rel=1e-12)


def test_without_gradients_sequence_parallelism_is_never_slower(inferred: Codesign) -> None:
    space, design = inferred.space, TPU_LIKE
    plans = [each for each in space._splits() if each.tensor > 1]
    assert all(each.sequence for each in plans)
    assert all(space.one(design, at)[0] < space.one(design, replace(at, sequence=0))[0] for at in plans)


def _one_word(model: TransformerSizes, design: Accelerator, at: Parallelism, batch: int, cache: int) -> float:
    """Seconds of one more word of each sample, operator by operator."""
    tensor, kv = at.tensor, max(model.kv_heads / at.tensor, 1.0)
    heads, inner, width = model.heads / tensor, model.inner / tensor, model.head
    routed, reached = at.micro * model.active, min(model.experts, at.micro * model.active)
    sizes = [  # b, m, n, k
        (1, at.micro, (heads + 2 * kv) * width, model.hidden), (at.micro * kv, heads / kv, cache, width),
        (at.micro * kv, heads / kv, width, cache), (1, at.micro, model.hidden, heads * width),
        (reached, routed / reached, inner, model.hidden), (reached, routed / reached, model.hidden, inner),
    ]  # fmt: skip
    numbers = [(at.micro * model.hidden, 2 * (NORM[0] + ADD[0])), (at.micro * heads * cache, SOFTMAX[0]),
               (routed * inner, ACTIVATION[0])]  # fmt: skip
    rate = design.lanes * design.vector_cores * design.clock_ghz * 1e9
    layer = sum(count * each / rate for count, each in numbers)  # all of them stay in the buffer
    b, m, n, k = np.array(sizes, dtype=np.float64).T
    layer += float(product_seconds(b, m, n, k, design).sum())
    layer += 4 * (tensor - 1) / tensor * 2 * at.micro * model.hidden / (design.link_gb_s * 1e9)
    b, m, n, k = np.array([[1, at.micro, model.words / tensor, model.hidden]]).T
    head = float(product_seconds(b, m, n, k, design)[0])
    hop = 2 * at.micro * model.hidden / tensor / (design.link_gb_s * 1e9) if at.pipeline > 1 else 0.0
    pace, count = model.layers / at.pipeline * layer, batch // (at.data * at.micro)
    return at.pipeline * pace + head + (at.pipeline - 1) * hop + (count - 1) * max(pace + head, hop)


@pytest.mark.parametrize(("kv_heads", "experts", "active"), [(8, 1, 1), (2, 1, 1), (8, 4, 2)])
def test_one_more_word_is_that_of_brute_force(kv_heads: int, experts: int, active: int) -> None:
    model = replace(SMALL, kv_heads=kv_heads, experts=experts, active=active)
    found = codesign(model, devices=8, batch=32, area=AREA, decode=512)
    space = found.space
    priced = space.price(50.0)
    for row in [int(np.argmin(priced.seconds)), len(space.designs) // 2, len(space.designs) - 1]:
        design = space.designs.at(row, space.like)
        least = min(_one_word(model, design, at, 32, 512) for at in space._splits())
        assert priced.seconds[row] == pytest.approx(least, rel=1e-12)
    assert abs(found.simulated.window_ns - found.best.iteration_s * 1e9) <= len(found.graph)
    assert found.best.iteration_s < codesign(model, devices=8, batch=32, area=AREA, decode=4096).best.iteration_s


def test_a_cache_takes_memory(inferred: Codesign) -> None:
    """Keys and values of all layers and samples: 2 · 2 bytes · layers · hidden · words, whatever the plan."""
    space, words = inferred.space, 100_000
    whole = 2 * 2 * SMALL.layers * SMALL.hidden * words * space.batch / space.devices
    tight = replace(space, decode=words, like=replace(TPU_LIKE, hbm_gb=whole / 1e9))
    with pytest.raises(ForetraceError, match=r"needs .* of each of 8 devices at least"):
        _ = tight.plans
    assert len(replace(tight, like=replace(TPU_LIKE, hbm_gb=2 * whole / 1e9)).plans[0])


def test_the_best_is_that_of_brute_force(trained: Codesign) -> None:
    """Also of plans that were left out: more recomputation than is needed, and without ZeRO."""
    space, least = trained.space, inf
    rng = np.random.default_rng(2)
    rows = [*rng.choice(len(space.designs), 15, replace=False).tolist(), int(np.argmin(space.price(50.0).seconds))]
    for row in rows:
        planner = _planner(trained, space.designs.at(row, space.like))
        best = inf
        for at in space._splits():
            for zero in {0, at.zero}:
                cost = planner.cost(replace(at, zero=zero))
                if cost.peak_bytes <= 32e9:
                    best = min(best, cost.seconds)
        assert best == pytest.approx(space.price(50.0).seconds[row], rel=1e-12)
        least = min(least, best)
    assert least == pytest.approx(trained.best.iteration_s, rel=1e-12)
    assert trained.proven


def test_small_designs_that_are_left_out_are_no_quicker(trained: Codesign, monkeypatch: pytest.MonkeyPatch) -> None:
    published = design_columns(5 * AREA)
    monkeypatch.setattr(search, "LEAST_SHARE", 0.0)
    every = design_columns(5 * AREA)
    assert len(every) > 1.2 * len(published)
    least = [replace(trained.space, designs=each).price(50.0).seconds.min() for each in (published, every)]
    assert least[0] == least[1]


def test_winners_take_as_long_as_they_simulate(trained: Codesign, inferred: Codesign) -> None:
    for found in (trained, inferred):
        passes = len(found.graph)
        assert abs(found.simulated.window_ns - found.best.iteration_s * 1e9) <= passes


@pytest.mark.parametrize(("pace", "head", "hop"), [(3e-6, 1e-6, 5e-7), (1e-6, 0.0, 9e-6), (2e-6, 2e-6, 0.0)])
def test_a_forward_pipeline_takes_its_closed_form(pace: float, head: float, hop: float) -> None:
    for stages, count in ((1, 5), (3, 1), (4, 7)):
        whole = stages * pace + head + (stages - 1) * hop + (count - 1) * max(pace + head, hop if stages > 1 else 0.0)
        assert simulate(forward_graph(pace, head, hop, stages, count)).window_ns == round(whole * 1e9)


def test_inference_needs_less_and_takes_less(trained: Codesign, inferred: Codesign) -> None:
    assert inferred.best.iteration_s < 0.6 * trained.best.iteration_s
    assert inferred.joules < trained.joules


def test_the_front_is_that_of_brute_force(trained: Codesign) -> None:
    rng = np.random.default_rng(5)
    area, seconds, joules = rng.integers(1, 12, (3, 300)).astype(np.float64)
    kept = np.zeros(300, dtype=np.int64)
    found = set(kept[: kernels.front(area, seconds, joules, np.lexsort((joules, seconds, area)), kept)].tolist())
    all_of = np.stack([area, seconds, joules], axis=1)
    for row in range(300):
        beaten = ((all_of <= all_of[row]).all(axis=1) & (all_of < all_of[row]).any(axis=1)).any()
        equals = any((all_of[each] == all_of[row]).all() for each in found)
        assert equals == (not beaten)
    front = trained.pareto
    assert min(each.iteration_s for each in front) == trained.best.iteration_s
    assert [each.design.area for each in front] == sorted(each.design.area for each in front)


def test_baselines_are_never_better_where_they_are_of_the_space(trained: Codesign) -> None:
    assert set(trained.baselines) == {
        "TPU-like", "TPU-like, balanced vector units", "PHAZE's search rule", "TPU-like with an expert's plan",
        "best design for the plan of TPU-like",
    }  # fmt: skip
    for name in ("PHAZE's search rule", "best design for the plan of TPU-like"):
        ratio, low, high = trained.baselines[name].over(trained.best)
        assert ratio >= 1 and low <= ratio <= high
    tpu, expert = trained.baselines["TPU-like"], trained.baselines["TPU-like with an expert's plan"]
    assert expert.iteration_s >= tpu.iteration_s
    for each in (trained.best, *trained.baselines.values()):
        low, high = each.interval_s
        assert low <= each.iteration_s <= high
    assert 0 < trained.baselines["PHAZE's search rule"].calls < len(trained.space.designs)


def test_the_published_rule_by_hand() -> None:
    area = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 7.1]) * 10_000
    #  buckets from the largest: {7: 5, 4}, {6: 5}, {5: 6}, {4: 7}, {3: 8} -> five that do not rise: stop
    assert stopping_rule(area, np.array([1.0, 1.0, 8.0, 7.0, 6.0, 5.0, 5.0, 4.0])) == (7, 6)
    # one that rises inside of the last five goes on
    assert stopping_rule(area, np.array([1.0, 2.0, 3.0, 7.0, 6.0, 5.0, 5.0, 4.0])) == (0, 8)


def test_the_tables_of_the_lessons_hold_in_kind() -> None:
    """GPT-2 2.5B: a weak baseline is most of the gain, slower links take it away, the rule stops early."""
    found = codesign("gpt2-2.5b")
    tpu, balanced = ([getattr(each, name) for each in found.links] for name in ("tpu_like", "balanced"))
    assert 1 < tpu[0] < tpu[1] < tpu[2] < 5
    assert all(1 <= few < many for few, many in zip(balanced, tpu, strict=True))
    assert balanced[1] < 2
    assert found.baselines["PHAZE's search rule"].over(found.best)[0] > 1.05
    assert found.seconds < 60  # CPU; five on a quiet machine


def test_a_design_is_a_device_of_the_planner() -> None:
    found = plan_decoder("gpt2-medium", devices=8, device="accelerator:vc=16x128", batch=64)
    low, high = found.best.interval_s
    assert low < found.best.seconds < high / 5
    assert found.simulated.window_ns / 1e9 == pytest.approx(found.best.seconds, rel=1e-6)
    fewer = plan_decoder("gpt2-medium", devices=8, device="accelerator:vc=2x128", batch=64)
    assert fewer.best.seconds > found.best.seconds


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(ForetraceError, match=r"no accelerator has an area of at most 1 mm²; give 3\.36 or more"):
        codesign(SMALL, area=1e6)
    with pytest.raises(ForetraceError, match=r"needs .* of each of 1 devices at least"):
        codesign("gpt3-175b", devices=1, batch=1)
    with pytest.raises(ForetraceError, match="cannot be split over 7 devices"):
        codesign(SMALL, devices=7, batch=1)
    with pytest.raises(ForetraceError, match="is an encoder and adds no words"):
        codesign("megatron-bert-1.3b", decode=16)
    with pytest.raises(ForetraceError, match="`devices=` must be 1 to 1000000"):
        codesign(SMALL, devices=0)


def test_the_expert_takes_the_fewest_devices_for_a_replica() -> None:
    space = CodesignSpace(
        model=transformer("llama-2-7b"), devices=64, batch=64, training=True, like=TPU_LIKE,
        designs=design_columns(4e6),
    )  # fmt: skip
    rows = space.plans[0]
    expert = space.expert()
    assert expert.micro == 1
    assert expert.tensor * expert.pipeline == min(
        (each.tensor * each.pipeline for each in map(configuration_of, rows)), default=0
    )
    assert TPU_LIKE.buffer == 128 * MB
