"""Area and throughput of accelerators that look products up."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from foretrace.cost.accelerators.product_quantised import (
    LOOK_UP_DESIGNS,
    AreaCosts,
    LayerProduct,
    MeasuredQuantisation,
    Surroundings,
    best_design,
    dense_array,
    look_up_parts,
)
from foretrace.errors import ForetraceError

SETTING = MeasuredQuantisation(length=9, prototypes=16, distance="l1", bits=8, dense=0.94, accuracy=0.935, samples=2500)
RESNET20 = [
    LayerProduct(rows=1024, inputs=144, outputs=16, count=6), LayerProduct(rows=256, inputs=144, outputs=32),
    LayerProduct(rows=256, inputs=288, outputs=32, count=5), LayerProduct(rows=64, inputs=288, outputs=64),
    LayerProduct(rows=64, inputs=576, outputs=64, count=5),
]  # fmt: skip
FREE = AreaCosts(bit_um2=0.4, port_um2=0.0, word_um2=0.0)
AROUND = Surroundings(bytes_per_cycle=1e9)


def test_cycles_and_areas_by_hand() -> None:
    one = [LayerProduct(rows=10, inputs=18, outputs=8)]
    costs = AreaCosts(
        multiplier_um2=100, adder_um2=10, register_um2=1, bit_um2=0.5, port_um2=2, word_um2=3
    )  # fmt: skip
    parts, cycles = look_up_parts(one, SETTING, 4, 2, 8, costs=costs, around=AROUND)
    assert cycles == 10 * 8, "2 sub-spaces of 16 prototypes on 4 units"
    assert parts["encoder"] == 4 * (9 * (2 * 10 + 20 + 8) + 20)
    assert parts["accumulators"] == 16 * (20 + 16)
    assert parts["tables"] == 2 * (16 * (64 * 0.5 + 3) + 64 * 2), "2 tables of 16 × 8 bytes, a word of 8"
    assert parts["prototypes"] == 32 * (72 * 0.5 + 3) + 72 * 2
    assert parts["activations"] == -(-2 * 80 * 8 // 72) * (72 * 0.5 + 3) + 72 * 2
    parts, cycles = look_up_parts(one, SETTING, 64, 1, 4, costs=costs, around=AROUND)
    assert cycles == 10 * 4, "2 words of 2 tables in one bank"
    slow = Surroundings(bytes_per_cycle=1.0, batch=2)
    assert look_up_parts(one, SETTING, 64, 2, 8, costs=costs, around=slow)[1] == 32 * (8 + 9) / 2
    area, cycles = dense_array(one, 18, 4, costs=costs, around=AROUND)
    assert cycles == 10 * 2
    assert area == pytest.approx(72 * (100 + 20 + 24) + 36 * (32 * 0.5 + 3) + 64 + -(-1280 // 144) * 75 + 288)


def test_multipliers_in_the_encoder_and_ports_cost_what_they_are() -> None:
    squared = replace(SETTING, distance="l2")
    absolute, square = (
        look_up_parts(RESNET20, each, 64, 8, 32, costs=AreaCosts(), around=AROUND)[0] for each in (SETTING, squared)
    )
    assert square["encoder"] - absolute["encoder"] == pytest.approx(64 * 9 * (282 - 36))
    free = look_up_parts(RESNET20, SETTING, 64, 8, 32, costs=FREE, around=AROUND)[0]
    assert free["tables"] < 0.75 * absolute["tables"]


def test_the_best_of_all_sizes_is_found() -> None:
    found = best_design(RESNET20, SETTING, around=AROUND)
    priced = [
        sum(parts.values()) * cycles
        for sizes in product((32, 64, 128, 256, 512, 1024), (4, 8, 16, 32, 64), (8, 16, 32, 64))
        for parts, cycles in [look_up_parts(RESNET20, SETTING, *sizes, costs=AreaCosts(), around=AROUND)]
    ]
    assert sum(found.parts_um2.values()) * found.cycles == pytest.approx(min(priced))
    assert (
        sum(
            max(units, banks * word) <= 1 << 14 for units, banks, word in product([1 << i for i in range(13)], repeat=3)
        )
        == LOOK_UP_DESIGNS
    )
    assert found.over_dense_interval[0] < found.over_dense < found.over_dense_interval[1]


def test_published_gain_arises_without_ports_and_traffic_and_not_with_them() -> None:
    """(9, 16) with L1: published 3.1 (FPGA); traffic of tables at batch 1 takes all of it."""
    free = best_design(RESNET20, SETTING, costs=FREE, around=AROUND)
    ports = best_design(RESNET20, SETTING, around=AROUND)
    traffic = best_design(RESNET20, SETTING, around=Surroundings(bytes_per_cycle=16))
    assert 2.5 < free.over_dense < 4 and traffic.over_dense < ports.over_dense < free.over_dense
    assert traffic.over_dense < 1.5


@pytest.mark.parametrize("given", [{"accuracy": 1.2}, {"dense": float("nan")}, {"length": 0}, {"samples": 0},
                                   {"distance": "dot"}])  # fmt: skip
def test_accuracy_is_a_share_that_was_measured(given: dict[str, float]) -> None:
    with pytest.raises(ForetraceError):
        replace(SETTING, **given)  # type: ignore[arg-type]
