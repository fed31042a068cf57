"""The order of candidates: what fits, what sees enough of a graph, what is quick."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace as but

from foretrace.errors import ForetraceError
from foretrace.plan.data import plan as plans
from foretrace.plan.data.plan import DataCandidate, GraphSource, plan_data, ranked


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


def test_the_quickest_is_quickest_also_where_it_was_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first measurement of each is lucky for the one that looks best: again, it takes three times as long."""
    seen: dict[str, int] = {}

    def priced(each: DataCandidate, *_: Any) -> DataCandidate:
        seen[each.name] = seen.get(each.name, 0) + 1
        first = 1.0 + 0.01 * list(seen).index(each.name)
        epoch_s = 3 * first if seen[each.name] > 1 and first == 1.0 else first
        return but(each, epoch_s=epoch_s, low_s=epoch_s, high_s=epoch_s)

    monkeypatch.setattr(plans, "priced", priced)
    monkeypatch.setattr(plans, "limited", lambda measure, probes: dict.fromkeys(probes))
    monkeypatch.setattr(plans, "epochs", lambda *_: (0, (None,)))
    monkeypatch.setattr(plans, "simulate", lambda _: None)
    found = plan_data(GraphSource.of("planted:nodes=1000 edges=3000"), memory_bytes=10**9, task="links")
    times = [each.epoch_s for each in found.candidates]
    assert len(times) > 1 and times == sorted(times) and times[0] < 3 == max(times)
    assert sorted(seen.values())[-2:] == [2, 2], "the first, and the one that came first then"
