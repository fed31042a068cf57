"""The published histograms give the hit rates that the page states."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretrace.plan.look_ahead.plan import trace
from foretrace.training.rows.lookahead import plan_ahead


def test_hit_rates_rise_with_the_look_ahead(shared_data: Path) -> None:
    lookups = trace(f"reuse:{shared_data}/embedding/locality_stats_2022.txt samples=128 batches=24")
    rates = [plan_ahead(lookups, trainers=2, look_ahead=each).hit_rate for each in (1, 4, 16)]
    assert rates == sorted(rates) and rates[-1] == pytest.approx(0.7, abs=0.15)
