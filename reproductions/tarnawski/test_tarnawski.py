"""The published workloads can be read and placed."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretrace.plan.placement.place import place
from reproductions.tarnawski.protocol import rows_of, workloads


def test_smallest_workload_is_placed_as_known(shared_data: Path) -> None:
    folder = shared_data / "placement" / "dnn-partitioning"
    if not folder.is_dir():
        pytest.skip(f"no placement workloads at {folder}")
    name, problem = next(workloads(folder, "throughput"))
    known = rows_of(folder / "known_optima.csv", "optimal_max_load")
    assert place(problem).objective_value == pytest.approx(known[name], rel=1e-9)
