"""Placements of rows on real processes: sums, gradients and bytes; what cannot be run."""

from __future__ import annotations

import numpy as np
import pytest

from foretrace.arrays import Int64
from foretrace.errors import ForetraceError
from foretrace.experiment.rows.placed import MessageRate, run
from foretrace.training.rows.lookups import parse
from foretrace.training.rows.placement import Mode, PlacedTable, RowPlacement

pytest.importorskip("torch")


def shares(mode: Mode, at: int, devices: int) -> Int64:
    """Columns by device of a table of ten: one device keeps them, or several do and the last has none."""
    return np.eye(devices, dtype=np.int64)[at % devices] * 10 if mode == "pooled" else np.array([3, 7, 0])[:devices]


def placement(training: bool, devices: int, modes: tuple[Mode, ...], copied: int = 0) -> RowPlacement:
    tables = tuple(
        PlacedTable(
            name=f"table{i}", rows=200, mode=mode, shares=shares(mode, i, devices), ids=np.arange(20),
            owners=np.where(np.arange(20) < copied, -1, np.arange(20) % devices), rest=np.arange(devices)[::-1],
        )
        for i, mode in enumerate(modes)
    )  # fmt: skip
    return RowPlacement(devices=devices, width=10, training=training, tables=tables)


TEXT = "zipf:1.1 tables=3 rows=200 pooling=3 samples=31 batches=4"


@pytest.mark.parametrize("devices, training", [(2, True), (3, False)])
def test_processes_compute_what_whole_tables_do_and_exchange_what_is_predicted(devices: int, training: bool) -> None:
    arms = {
        "mixed": placement(training, devices, ("pooled", "columns", "rows"), copied=0 if training else 7),
        "rows": placement(training, devices, ("rows", "rows", "rows")),
    }
    for each in run(arms, TEXT, 0, range(2), rounds=1):
        assert each.equal
        assert each.gradient_error < 1e-5
        assert each.counted_bytes == each.predicted_bytes > 0
        assert len(each.rounds_s) == len(each.again_s) == 1 and each.predicted_s is None


@pytest.mark.parametrize(
    ("one", "other", "measured_ms"),
    [
        (1 << 19, 0, 83.0),
        (0, 1 << 19, 83.0),
        (1 << 18, 1 << 18, 77.8),
        (1 << 19, 1 << 17, 99.6),
        (1 << 16, 1 << 16, 11.8),
    ],
)
def test_a_connection_carries_one_way_at_a_time(one: int, other: int, measured_ms: float) -> None:
    """All-to-alls of two processes of gloo on links of 50 Mbit/s with buckets of 32 KB, as they were timed."""
    rate = MessageRate(bytes_per_s=(5.97e6,) * 3, waits=1.0, waits_least=1.0, burst_bytes=32_768)
    value, low, high = rate.seconds([np.array([[0.0, one], [other, 0.0]])])
    assert 1e3 * value == pytest.approx(measured_ms, rel=0.08)
    assert low <= 1.001 * measured_ms / 1e3 <= high


def test_ways_of_other_connections_do_not_wait_for_each_other() -> None:
    rate = MessageRate(bytes_per_s=(1e6,) * 3, waits=1.0, waits_least=1.0, burst_bytes=0)
    assert rate.seconds([1e6 * np.roll(np.eye(3), 1, axis=1)]) == pytest.approx((1, 1, 1))  # a ring of three
    assert rate.seconds([np.full((3, 3), 1e6) - np.diag([1e6] * 3)]) == pytest.approx((4, 4, 4))


def test_what_cannot_be_run_is_said() -> None:
    large = RowPlacement(
        devices=2, width=64, training=True, tables=(PlacedTable(name="t", rows=10_000_000, mode="pooled"),)
    )
    with pytest.raises(ForetraceError, match="too many"):
        run({"large": large}, TEXT, 0, range(2))
    with pytest.raises(ForetraceError, match="are not run; choose pooled"):
        run({"copies": placement(True, 2, ("data-parallel",) * 3)}, TEXT, 0, range(2))
    other = parse("zipf:1.1 tables=3 rows=100 samples=31 batches=4")
    with pytest.raises(ForetraceError, match="other tables"):
        placement(True, 2, ("rows",) * 3).exchanged(other, range(2))
