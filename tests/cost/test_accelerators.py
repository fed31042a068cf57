"""Costs on accelerators that need not exist: SCALE-Sim's cycles, rooflines, the rank of PHAZE's mapper."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrace.cost.accelerators import kernels
from foretrace.cost.accelerators.kernels import (
    machine_columns,
    product_cycles,
    systolic_cycles,
)
from foretrace.cost.calls import Call, Calls, Family, Precision
from foretrace.cost.devices.defaults import standard
from foretrace.cost.devices.designed import Designed
from foretrace.cost.devices.roofline import floor_s
from foretrace.hardware.accelerators import MAPPED_PORTS, TPU_LIKE, WORD, Accelerator
from foretrace.hardware.devices import named


def product_seconds(b: Any, m: Any, n: Any, k: Any, design: Accelerator) -> Any:
    """Seconds of products of bf16 numbers; arrays and memory work at the same time."""
    found = product_cycles(b, m, n, k, [design])[0]
    return np.maximum(found[:, 0] / (design.clock_ghz * 1e9), found[:, 2] * WORD / (design.hbm_gb_s * 1e9))


def _rows(path: Path) -> dict[str, Any]:
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    return {
        name: np.array([row[name] for row in rows]) if name == "dataflow" else
        np.array([float(row[name]) for row in rows]) for name in rows[0]
    }  # fmt: skip


def test_cycles_are_those_of_scale_sim(shared_data: Path) -> None:
    known = _rows(shared_data / "accelerators" / "scalesim_gemm_cycles.csv")
    assert len(known["M"]) == 28
    for flow in ("os", "ws", "is"):
        mine = known["dataflow"] == flow
        m, n, k, rows, columns = (known[each][mine] for each in ("M", "N", "K", "array_rows", "array_cols"))
        assert np.array_equal(systolic_cycles(flow, m, n, k, rows, columns), known["total_cycles"][mine])


def test_a_fold_by_hand() -> None:
    # 8 x 8 arrays, output stationary: 2 x 3 folds of 10 + 8 + 8 - 2 cycles.
    at = [np.array([float(each)]) for each in (16, 20, 10, 8, 8)]
    assert systolic_cycles("os", *at)[0] == 6 * 24 - 1
    assert systolic_cycles("ws", *at)[0] == 2 * 3 * (16 + 16 + 8 - 2) - 1
    assert systolic_cycles("is", *at)[0] == 2 * 2 * (20 + 16 + 8 - 2) - 1


def test_one_core_takes_its_best_dataflow() -> None:
    m, n, k = (np.array([float(each)]) for each in (300, 200, 77))
    one = Accelerator(tensor_cores=1, width=16, depth=32, ports=1 << 40)
    best = min(systolic_cycles(flow, m, n, k, np.array([16.0]), np.array([32.0]))[0] + 1 for flow in ("os", "ws", "is"))
    assert product_cycles(np.ones(1), m, n, k, [one])[0, 0, 0] == best


def test_nothing_is_below_the_roofline() -> None:
    rng = np.random.default_rng(7)
    designs = [
        Accelerator(tensor_cores=int(rng.integers(1, 4097)), width=int(1 << rng.integers(1, 9)),
                    depth=int(1 << rng.integers(1, 9)), buffer=int(1 << rng.integers(21, 28)),
                    ports=int(1 << rng.integers(4, 14)))
        for _ in range(100)
    ]  # fmt: skip
    b, m, n, k = np.floor(np.exp(rng.uniform(0, [[6], [10], [10], [10]], (4, 200))))
    found = product_cycles(b, m, n, k, designs)  # 20,000
    macs = np.array([each.tensor_cores * each.width * each.depth for each in designs])
    once = b * (m * k + k * n + m * n)
    assert (found[:, :, 0] * macs[:, None] >= b * m * n * k * (1 - 1e-12)).all()
    assert (found[:, :, 0] >= found[:, :, 1] / np.array([each.ports for each in designs])[:, None] * (1 - 1e-12)).all()
    assert (found[:, :, 1] >= b * m * n).all()
    assert (found[:, :, 2] >= once * (1 - 1e-12)).all()
    assert (found[:, :, 2] <= b * (2 * m * n * k + m * n)).all()


def test_larger_buffers_more_ports_and_more_cores_never_cost() -> None:
    rng = np.random.default_rng(3)
    b, m, n, k = np.floor(np.exp(rng.uniform(0, [[5], [9], [9], [9]], (4, 300))))
    small = replace(TPU_LIKE, tensor_cores=4, buffer=1 << 21, ports=256)
    for name in ("tensor_cores", "buffer", "ports"):
        more = replace(small, **{name: 8 * getattr(small, name)})
        before, after = (product_seconds(b, m, n, k, each) for each in (small, more))
        assert (after <= before * (1 + 1e-12)).all(), name


def test_what_fits_into_the_buffer_crosses_the_memory_once() -> None:
    b, m, n, k = (np.array([float(each)]) for each in (1, 512, 256, 128))
    found = product_cycles(b, m, n, k, [TPU_LIKE, replace(TPU_LIKE, width=8, depth=8, buffer=1 << 14)])
    assert found[0, 0, 2] == 512 * 128 + 128 * 256 + 512 * 256
    assert found[1, 0, 2] > 2 * found[0, 0, 2]


def test_ports_explain_the_mapper_that_phaze_calls(shared_data: Path) -> None:
    known = _rows(shared_data / "accelerators" / "sunstone_gemm_cycles.csv")
    count = len(known["N"])
    assert count == 33
    ratios = {}
    for ports in (MAPPED_PORTS, 4096):
        designs = [
            Accelerator(tensor_cores=int(known["num_tc"][i]), width=int(known["width"][i]), ports=ports,
                        depth=int(known["depth"][i]), buffer=int(known["glb_bytes"][i]))
            for i in range(count)
        ]  # fmt: skip
        ones = np.ones(count)
        took = product_cycles(ones, known["N"], known["K"], known["C"], designs)[np.arange(count), np.arange(count), 0]
        ratios[ports] = took / known["cycles"]
        if ports == MAPPED_PORTS:
            ours, theirs = (np.argsort(np.argsort(each, kind="stable")) for each in (took, known["cycles"]))
            assert np.corrcoef(ours, theirs)[0, 1] >= 0.95
            assert (took >= known["ideal_cycles"]).all()
    assert 0.6 < np.median(ratios[MAPPED_PORTS]) < 1.1  # in size, too, with the ports that it is given
    assert np.median(ratios[4096]) < 0.5 * np.median(ratios[MAPPED_PORTS])  # and not without them


def _calls() -> Calls:
    half = Precision.BF16
    rows = [
        Call(family=Family.GEMM, precision=half, m=4096, n=1024, k=512, flops=2.0 * 4096 * 1024 * 512,
             read_bytes=2.0 * (4096 * 512 + 512 * 1024), written_bytes=2.0 * 4096 * 1024),
        Call(family=Family.CONV, precision=half, m=1e5, n=64, k=576, flops=4e5 * 64 * 576, read_bytes=2e7,
             written_bytes=1e7),
        Call(family=Family.ATTENTION, precision=half, b=32, m=512, n=512, k=64, flops=4.0 * 32 * 512 * 512 * 64,
             read_bytes=6e6, written_bytes=2e6),
        Call(family=Family.SOFTMAX, precision=half, m=1e4, n=512, flops=2e7, read_bytes=1e7, written_bytes=1e7),
        Call(family=Family.NONE),
        Call(family=Family.OTHER, read_bytes=1e6, written_bytes=1e6),
    ]  # fmt: skip
    return Calls.from_rows(rows)


def test_calls_on_a_design() -> None:
    calls, device = _calls(), named("accelerator:")
    found = Designed().predict(calls, device)
    assert (found.seconds >= floor_s(calls, device) * (1 - 1e-12)).all()
    assert (found.low_s <= found.seconds).all()
    assert (found.seconds <= found.high_s).all()
    assert found.seconds[4] == 0
    assert found.high_s[0] > 2 * found.seconds[0]  # ports
    assert found.high_s[3] == pytest.approx(2 * found.seconds[3])  # lanes
    backward = replace(calls, flops=2 * calls.flops)
    assert Designed().predict(backward, device).seconds[1] == pytest.approx(2 * found.seconds[1])
    assert set(standard().predict(calls, device).shares()) == {"designed"}
    assert np.isnan(Designed().predict(calls, named("h100")).seconds).all()
    assert not len(Designed().predict(calls.take(np.zeros(0, dtype=np.int64)), device).seconds)


def test_a_machine_has_its_design_where_loops_read_it() -> None:
    at = machine_columns(TPU_LIKE)
    assert at[kernels.CORES] == 8
    assert at[kernels.CLOCK] == 1.05e9
    assert at[kernels.MEMORY] == 1.2e12
