"""The compiled sweep against plain enumeration: every valid configuration, its time, its memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.plan.transformers import kernels
from foretrace.plan.transformers.model import Parallelism, fields_of, machine, softwares
from foretrace.plan.transformers.shape import TransformerSizes, transformer
from foretrace.plan.transformers.space import ParallelismSpace

SMALL = TransformerSizes(
    name="small", layers=12, hidden=768, heads=12, kv_heads=4, inner=3072, words=32000, length=1024, gated=True
)
MIXED = replace(SMALL, name="mixed", experts=6, active=2, layers=4)
DENSE = TransformerSizes(name="dense", layers=6, hidden=256, heads=4, kv_heads=4, inner=1024, words=8000, length=96)


def space(model: TransformerSizes = SMALL, *, devices: int = 8, batch: int = 24, **fixed: int) -> ParallelismSpace:
    return ParallelismSpace(
        model=model,
        on=machine("a100-40gb"),
        software=softwares()["megatron"],
        devices=devices,
        batch=batch,
        fixed=fixed,
    )


def plainly(model: TransformerSizes, devices: int, batch: int, versions: int) -> set[tuple[int, ...]]:
    """Every valid configuration by trying all tuples of numbers: the rules as they are stated, one by one."""
    found: set[tuple[int, ...]] = set()
    some = [n for n in range(1, devices + 1) if devices % n == 0]
    for tensor, context, pipeline, data in product(some, repeat=4):
        if tensor * context * pipeline * data != devices or model.heads % tensor or model.inner % tensor:
            continue
        if model.kv_heads % tensor and tensor % model.kv_heads:
            continue
        if (context > 1 and model.length % (2 * context)) or model.layers % pipeline or batch % data:
            continue
        for micro, virtual in product(range(1, batch + 1), range(1, model.layers + 1)):
            if batch % (data * micro) or model.layers % (pipeline * virtual):
                continue
            if virtual > 1 and (pipeline == 1 or batch // (data * micro) % pipeline):
                continue
            each = (range(1, model.experts + 1), range(2), range(3), range(4), range(2))
            for expert, sequence, recompute, zero, overlap in product(*each):
                if sequence and (tensor == 1 or model.length % (tensor * context)):
                    continue
                if (zero and data * context == 1) or data % expert or model.experts % expert:
                    continue
                if versions > 1 and (
                    pipeline == 1 or virtual > 1 or zero > 1 or batch // (data * micro) < pipeline - 1
                ):
                    continue
                fields = (tensor, sequence, context, pipeline, virtual, data, expert, micro, recompute, zero, overlap)
                found.add((*fields, versions))
    return found


@pytest.mark.parametrize("versions", [1, 2])
@pytest.mark.parametrize(
    ("model", "devices", "batch"),
    [(SMALL, 8, 24), (SMALL, 12, 6), (DENSE, 6, 8), (DENSE, 1, 4), (SMALL, 7, 14), (MIXED, 12, 12)],
)
def test_no_valid_configuration_is_skipped(model: TransformerSizes, devices: int, batch: int, versions: int) -> None:
    wanted = plainly(model, devices, batch, versions)
    found = space(model, devices=devices, batch=batch, versions=versions).sweep(len(wanted) + 10)
    assert found.valid == len(wanted)
    got = [tuple(fields_of(each).tolist()) for each in (*found.configurations, *found.spilled)]
    assert len(got) == len(set(got)) and set(got) == wanted


def test_two_versions_save_the_bubble_and_cost_a_copy() -> None:
    flush = Parallelism(tensor=2, pipeline=4, data=2, zero=1)
    costs = [space(devices=16).cost(each) for each in (flush, replace(flush, versions=2))]
    assert costs[1].parts["bubble"] == 0 < costs[0].parts["bubble"] and costs[1].seconds < costs[0].seconds
    assert [each.memory[1]["weights"] for each in costs] == [each * costs[0].memory[1]["weights"] for each in (1, 2)]
    widths = [each.interval_s[1] / each.interval_s[0] for each in costs]
    assert widths[1] == pytest.approx(widths[0] ** 2)  # no row without a flush was measured
    with pytest.raises(ForetraceError, match="two versions of the weights must have pipeline 2, got 1"):
        space(versions=2, pipeline=1)


def test_small_devices_reject_what_does_not_fit() -> None:
    """Fits or not is what the memory of all stages says, and the order is that of single times."""
    tight = space()
    tight = replace(tight, on=replace(tight.on, capacity=2.5e9))
    found = tight.sweep(20_000)
    assert 0 < found.fitting < found.valid
    fitting = [tight.cost(each) for each in found.configurations[::97]]
    assert all(each.peak_bytes <= 2.5e9 for each in fitting)
    assert all(tight.cost(each).peak_bytes > 2.5e9 for each in found.spilled[::97])
    assert np.all(np.diff([each.seconds for each in fitting]) >= 0)


def test_reasons_are_counted_for_every_loser() -> None:
    found = space().search(10)
    assert found.fitting - 10 <= sum(found.lost.values()) < found.fitting  # the best and its equals lose nothing
    assert len([part for part, count in found.lost.items() if count]) > 3


def test_parts_add_up_and_stages_hold_what_they_must() -> None:
    at = Parallelism(tensor=2, pipeline=4, virtual=3, micro=1, data=1, recompute=kernels.FULL)
    found = space().cost(at)
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert found.interval_s[0] < found.seconds < found.interval_s[1]
    assert len(found.memory) == 4
    held = [each["activations"] for each in found.memory]
    assert held == sorted(held, reverse=True)  # the first stage has most in flight


def test_activations_are_the_published_closed_form() -> None:
    """175 billion parameters over tensor 8, pipeline 8, three virtual stages (Korthikanti et al., 2022)."""
    gpt = TransformerSizes(
        name="175b",
        layers=96,
        hidden=12288,
        heads=96,
        kv_heads=96,
        inner=4 * 12288,
        words=51200,
        length=2048,
        tied=True,
    )
    by = softwares()["megatron-2022"]
    one = ParallelismSpace(model=gpt, on=machine("a100-80gb"), software=by, devices=64, batch=64)
    at = {"tensor": 8, "pipeline": 8, "virtual": 3}
    sbh, in_flight = 2048 * 12288, 96 * (1 + 7 / 24)
    kept = {
        (0, 0): 10 + 24 / 8 + 5 * 96 * 2048 / (12288 * 8),
        (1, 0): 34 / 8 + 5 * 96 * 2048 / (12288 * 8),
        (1, 1): 34 / 8,
        (0, 2): 2.0,
    }
    for (sequence, recompute), each in kept.items():
        found = one.cost(Parallelism(**at, sequence=sequence, recompute=recompute)).memory[0]
        assert found["activations"] == pytest.approx(each * sbh * in_flight)
    states = found["weights"] + found["gradients"] + found["optimizer"]
    assert states == pytest.approx(18 * (12 * 12 * 12288**2 + 51200 * 12288) / 8)


def test_a_mixture_keeps_a_copy_of_every_word_for_each_of_its_experts() -> None:
    """Beside what products inside the experts read: these inputs are in another order than the router's."""
    at = Parallelism(data=8)
    one, two = (space(replace(MIXED, active=each)).cost(at).memory[0]["activations"] for each in (1, 2))
    words, widths = MIXED.length * MIXED.layers, MIXED.hidden + 3 * MIXED.inner
    assert two - one == pytest.approx(2 * words * widths)


def test_what_each_dimension_is_for() -> None:
    """ZeRO and recomputation cost time and save memory; virtual stages shorten the bubble; overlap is never slower."""
    big = space(devices=8, batch=32)

    def cost(**changes: int):  # type: ignore[no-untyped-def]
        return big.cost(Parallelism(**{"pipeline": 2, "data": 4, "micro": 1, **changes}))

    base = cost()
    assert cost(virtual=3).parts["bubble"] == pytest.approx(base.parts["bubble"] / 3)
    for less, more in ((1, 0), (2, 1), (3, 2)):
        assert cost(zero=less).peak_bytes < cost(zero=more).peak_bytes
    assert cost(zero=3).seconds > cost(zero=1).seconds
    assert cost(recompute=kernels.FULL).seconds > base.seconds
    assert cost(recompute=kernels.FULL).peak_bytes < base.peak_bytes
    assert cost(overlap=1).seconds < base.seconds


def test_experts_are_shared_out_over_the_data_group() -> None:
    """A device keeps a share of the experts, whose gradients fewer devices exchange; words travel to them and back."""
    model = transformer("mixtral-8x7b")
    many = space(model, devices=32, batch=64)
    costs = [many.cost(Parallelism(data=32, expert=expert)) for expert in (1, 2, 4, 8)]
    weights = [each.memory[0]["weights"] for each in costs]
    experts = 2.0 * model.layers * model.expert_parameters
    assert np.diff(weights) == pytest.approx([-4 * experts, -2 * experts, -experts])
    swapped, data = ([each.parts[part] for each in costs] for part in ("expert messages", "data messages"))
    assert swapped[0] == 0 and np.all(np.diff(swapped) > 0) and np.all(np.diff(data) < 0)
    whole = 4 * 2 * model.active * model.length * model.hidden * 7 / 8  # bytes of a layer and micro-batch
    link = many.on.link * many.software.constants["link_share"]
    slowest = 2 * model.layers * (whole / link + 4 * many.on.link_s * many.software.constants["link_times"])
    assert swapped[3] == pytest.approx(slowest)
    state = [many.cost(Parallelism(data=32, expert=8, zero=zero)).memory[0]["optimizer"] for zero in (0, 1)]
    dense = model.layers * model.attention_parameters + 2 * model.words * model.hidden
    assert state == pytest.approx([6 * weights[3], 12 * (dense / 32 + 4 * experts / 32)])


def test_what_the_forward_pass_sends_is_sent_again_where_all_is_computed_again() -> None:
    """Keys and values go round once forward and twice backward, words to experts and back once each."""
    both = {"tensor": 2, "context": 2, "pipeline": 1, "data": 2, "expert": 2, "micro": 1, "overlap": 0}
    none, full = (
        space(MIXED, **both, recompute=each).cost(Parallelism(**both, recompute=each)).parts for each in (0, 2)
    )
    for part, more in (("tensor messages", 3 / 2), ("context messages", 4 / 3), ("expert messages", 3 / 2)):
        assert full[part] == pytest.approx(more * none[part])


def test_one_stage_updates_and_exchanges_both_tables_that_are_not_tied() -> None:
    at = Parallelism(data=8)
    tied, apart = (space(replace(SMALL, tied=each)).cost(at).parts for each in (True, False))
    moved = space().software.constants
    table_s = 1e-9 * moved["update_bytes"] * SMALL.words * SMALL.hidden / moved["bandwidth"] / 1555
    assert apart["update"] - tied["update"] == pytest.approx(table_s)
    assert apart["data messages"] > tied["data messages"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"devices": 7, "tensor": 4}, "7 devices cannot be cut by tensor degree 4; the nearest that can be is 1 or 8"),
        ({"devices": 7, "tensor": 8}, "7 devices cannot be cut by tensor degree 8; the nearest that can be is 1\\."),
        ({"tensor": 8}, "12 heads cannot be cut by tensor degree 8; the nearest that can be is 4"),
        ({"pipeline": 8}, "12 layers cannot be cut by pipeline degree 8; the nearest that can be is 4"),
        ({"expert": 2}, "1 experts of a layer cannot be cut by expert degree 2; the nearest that can be is 1"),
        ({"micro": 5}, "24 samples of a batch cannot be cut by a micro-batch of 5; the nearest that can be is 4"),
        ({"tensor": 4, "data": 4}, "the degrees multiply to 16, got 8 devices; give 16"),
        ({"zero": 4}, "a given zero must be 0 to 3, got 4; give 3"),
        ({"batch": 0}, "`batch=` must be 1 to 1000000, got 0; give 1"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(change: dict[str, int], says: str) -> None:
    with pytest.raises(ForetraceError, match=says.replace("(", r"\(")):
        space(SMALL, **change)
