"""The published optima, and the law that stands for points which are not known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foretrace.serving.server.measure import LatencyProfile, read
from foretrace.serving.server.split import ModelInstance
from reproductions.packrat.law import LatencyLaw, fit
from reproductions.packrat.protocol import cells, fat_over_optimum, page, thin_over_optimum


@pytest.fixture
def folder(shared_data: Path) -> Path:
    found = shared_data / "serving" / "packrat"
    if not found.is_dir():
        pytest.skip(f"no published optima at {found}")
    return found


def test_every_published_optimum_is_reproduced(folder: Path) -> None:
    found = cells(folder)
    assert len(found) == 80 and sum(np.isinf(each.published_s) for each in found) == 2
    assert [each.ours_s for each in found] == [each.published_s for each in found]
    assert all(each.idle_s <= each.ours_s for each in found)


def test_idle_threads_gain_where_more_would_only_slow_an_instance_down(folder: Path) -> None:
    (cell,) = [each for each in cells(folder) if (each.model, each.threads, each.batch) == ("inception", 16, 1)]
    assert cell.ours_s / cell.idle_s == pytest.approx(1.176, abs=5e-4)


def test_thin_is_the_optimum_of_large_batches(folder: Path) -> None:
    profiles = {each.model: each for each in read(folder / "packrat_profile.csv")}
    for model in ("resnet", "inception"):
        ratios = thin_over_optimum(profiles[model])
        assert all(1 <= ratio < 1.02 for batch, ratio in ratios.items() if batch >= 16)
    ratios = thin_over_optimum(profiles["gpt2"])
    assert np.mean([ratio for batch, ratio in ratios.items() if batch >= 16]) == pytest.approx(1.30, abs=0.005)
    assert min(fat_over_optimum(profiles["bert"]).values()) >= 1, "the table holds what beat it"


def test_the_page_can_be_written(folder: Path) -> None:
    text = page(folder)
    assert "80 of 80 published optima are reproduced" in text and "cannot be recomputed" in text


def test_the_law_is_found_again_from_its_own_points() -> None:
    law = LatencyLaw(np.array([1e-3, 5e-3, 2e-3, 3e-2, 4e-3]))
    points = [ModelInstance(t, 2**k) for t in range(1, 9) for k in range(8)]
    samples = {point: np.array([each]) for point, each in zip(points, law.latency_s(points), strict=True)}
    found = fit(LatencyProfile(model="m", samples_s=samples))
    np.testing.assert_allclose(found.constants, law.constants, rtol=1e-6)
