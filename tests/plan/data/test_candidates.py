"""The order of candidates: what fits, what sees enough of a graph, what is quick."""

from __future__ import annotations

import pytest

from foretrace.errors import ForetraceError
from foretrace.plan.data.plan import DataCandidate, ranked


def candidate(name: str, seconds: float, memory: int, reach: float = 1.0) -> DataCandidate:
    return DataCandidate(
        name=name, loader=name, parameters={}, memory_bytes=memory, batches=1, epoch_s=seconds, low_s=0, high_s=seconds,
        reach=reach,
    )  # fmt: skip


def test_little_of_a_graph_is_held_only_where_nothing_else_fits() -> None:
    few, half, whole = candidate("few", 1.0, 10, 0.25), candidate("half", 2.0, 20, 0.5), candidate("whole", 1.5, 90)
    assert [each.name for each in ranked([few, half, whole], 100)] == ["whole", "half", "few"]
    assert [each.name for each in ranked([few, half, whole], 15)] == ["few"]
    with pytest.raises(ForetraceError, match="least that works is 1MB"):
        ranked([few, half, whole], 5)
