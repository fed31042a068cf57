"""Latency profiles: files, quantiles, and what a batch takes that several instances share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.serving.server.measure import LatencyProfile, read, samples_for
from foretrace.serving.server.split import CoreSplit, ModelInstance

HEAD = "model,threads,batch,latency_ms\n"
POINTS = st.builds(ModelInstance, st.integers(1, 64), st.integers(1, 4096))
SAMPLES = st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=5).map(lambda found: np.sort(np.array(found)))


@given(samples=st.dictionaries(POINTS, SAMPLES, min_size=1, max_size=5))
def test_a_profile_that_was_written_is_read_again(
    samples: dict[ModelInstance, np.ndarray[tuple[int], np.dtype[np.float64]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.mktemp("profile") / "profile.csv"
    LatencyProfile(model="other", samples_s={ModelInstance(1, 1): np.array([1.0])}).save(path)
    profile = LatencyProfile(model="mlp, wide", samples_s=samples, origin="here")
    profile.save(path)
    profile.save(path)  # once more changes nothing
    other, found = read(path)
    assert other.model == "other" and (found.model, found.origin) == ("mlp, wide", "here")
    assert found.samples_s.keys() == samples.keys()
    for point, each in samples.items():
        np.testing.assert_allclose(found.samples_s[point], each, rtol=1e-5)


def test_a_recorded_latency_is_kept_to_the_last_digit(tmp_path: Path) -> None:
    path = tmp_path / "recorded.csv"
    path.write_text(HEAD + "resnet,16,1,10.778\nresnet,1,1,79.4656483316794\n")
    (found,) = read(path)
    found.save(path)
    assert read(path)[0].latency_s() == found.latency_s() == {
        ModelInstance(16, 1): 10.778 / 1e3, ModelInstance(1, 1): 79.4656483316794 / 1e3,
    }  # fmt: skip


def test_a_batch_waits_for_the_slowest_of_its_instances() -> None:
    """Equal instances: the quantile of the largest of n independent draws, here counted."""
    random = np.random.default_rng(0)
    samples = random.lognormal(0, 0.3, 500)
    profile = LatencyProfile(model="m", samples_s={ModelInstance(1, 4): samples})
    drawn = random.choice(samples, (200_000, 3)).max(axis=1)
    for quantile in (0.5, 0.9):
        split = CoreSplit((ModelInstance(1, 4),) * 3)
        assert profile.alone_s(split, quantile) == pytest.approx(np.quantile(drawn, quantile), rel=0.01)
    assert profile.alone_s(CoreSplit.fat(1, 4)) == profile.latency_s()[ModelInstance(1, 4)] == np.median(samples)


def test_unequal_instances_give_a_bound_of_the_tail() -> None:
    random = np.random.default_rng(1)
    points = {ModelInstance(1, 1): random.gamma(4, 1, 400), ModelInstance(2, 3): random.gamma(5, 1, 400)}
    profile = LatencyProfile(model="m", samples_s=points)
    drawn = np.maximum(*(random.choice(each, 200_000) for each in points.values()))
    assert profile.alone_s(CoreSplit(tuple(points)), 0.9) >= np.quantile(drawn, 0.9) * 0.99


def test_a_tail_needs_enough_latencies() -> None:
    profile = LatencyProfile(model="m", samples_s={ModelInstance(1, 1): np.linspace(1, 2, 99)})
    assert samples_for(0.99) == 100 and samples_for(0.9) == 10
    assert profile.latency_s(0.9)
    with pytest.raises(ForetraceError, match=r"`tail=0.99` needs 100 latencies of every point, .* has 99"):
        profile.latency_s(0.99)


@pytest.mark.parametrize(("text", "said"), [
    ("a,b\n1,2\n", "line 2 is no point of a profile .*missing required field `model`"),
    ("", "it holds no point"),
    (HEAD + "m,0,1,2\n", "line 2 is no point"),
    (HEAD + "m,1,1,-2\n", "line 2 is no point"),
    (HEAD + "m,1,1,nan\n", "line 2 is no point"),
    (HEAD + "m,1,1,inf\n", "line 2 is no point"),
    (HEAD + "m,1,one,2\n", "line 2 is no point"),
    (HEAD + "m,1\n", "line 2 is no point"),
    (HEAD + f"m,{'9' * 5000},1,2\n", "line 2 is no point"),
    (HEAD + "m,1,1,2\nm,1,1,3\n", "line 3 .*comes twice"),
    (HEAD.strip() + ",origin\nm,1,1,2,here\nm,1,2,3,there\n", "line 3 .*from two places"),
])  # fmt: skip
def test_files_that_are_no_profile(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    with pytest.raises(ForetraceError, match=said):
        read(path)
