"""The goodput model: its fit, its choice of batch sizes, and the speeds that it gives the engine."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError, MissingExtraError
from foretrace.fleet.pollux.goodput import (
    BatchLimits,
    Candidates,
    Goodput,
    GoodputSpeeds,
    StepModel,
    _loss,
    efficiency,
    fit_application,
    fit_step_model,
    with_work,
)
from foretrace.fleet.pollux.profiles import Profiles
from foretrace.fleet.speeds import Shape, Speeds
from foretrace.fleet.workload import Workload

TRUE = StepModel(0.05, 0.002, 0.3, 0.01, 0.04, 0.002, 1.8)
LIMITS = BatchLimits(init=32, most=2048, low=8, high=128)


@pytest.fixture(scope="module")
def profiles(shared_data: Path) -> Profiles:
    return Profiles(shared_data / "fleet/pollux/profiles")


def job_of(model: str, gpus: int, batch: float, work_s: float = 100.0) -> Workload:
    return Workload.of(submit_s=[0], gpus=[gpus], work_s=[work_s], model=[model], batch=[batch], job=["one"])


# The model and its fit.


def test_step_by_hand() -> None:
    assert TRUE.compute_s(100) == pytest.approx(0.25)
    assert TRUE.network_s([1, 1, 1, 2, 2], [1, 2, 4, 2, 8]) == pytest.approx([1e-8, 0.04, 0.044, 0.3, 0.36])
    overlapped = (0.25**1.8 + 0.36**1.8) ** (1 / 1.8)
    assert TRUE.step_s(2, 8, 100, 3) == pytest.approx(3 * 0.25 + overlapped)


def test_fit_finds_the_model_behind_the_rows() -> None:
    n, k, m = (each.ravel() for each in np.meshgrid([1, 2, 4], [1, 2, 4, 8], [16, 32, 64, 128]))
    able = k >= n
    n, k, m = n[able], k[able], m[able]
    step = TRUE.step_s(n, k, m)
    found = fit_step_model(n, k, m, step, step - TRUE.compute_s(m))
    assert found.step_s(n, k, m) == pytest.approx(step, rel=0.01)
    assert found.step_s(8, 32, 200) == pytest.approx(TRUE.step_s(8, 32, 200), rel=0.03)
    assert (found.alpha_c, found.alpha_n) == pytest.approx((TRUE.alpha_c, TRUE.alpha_n), rel=0.05)


def test_fit_says_little_where_rows_say_nothing() -> None:
    one = fit_step_model([1], [1], [32], [0.1], [0.0])
    assert one.alpha_c == pytest.approx(0.05)
    assert one.compute_s(32) == pytest.approx(0.1, rel=1e-4)
    assert one.step_s(4, 8, 32) == pytest.approx(0.1, rel=1e-4), "scaling is taken to be free until it was tried"
    node = fit_step_model([1, 1, 1], [1, 2, 4], [32, 32, 64], [0.1, 0.2, 0.3], [0.0, 0.05, 0.06])
    assert node.alpha_n == pytest.approx(1.1 * node.alpha_r)
    assert node.beta_n == pytest.approx(1.1 * node.beta_r)


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_slope_of_the_loss(seed: int) -> None:
    random = np.random.default_rng(seed)
    n = random.integers(1, 4, 9)
    k = n + random.integers(0, 6, 9)
    step = random.uniform(0.1, 1, 9)
    loss = _loss(
        n > 1, (n == 1) & (k > 1), np.maximum(k - 2.0, 1e-8), random.integers(8, 99, 9).astype(float),
        np.log(step * 0.7), np.log(step),
    )  # fmt: skip
    x = np.array([0.1, 0.01, 0.2, 0.02, 0.1, 0.03, 2.5]) * random.uniform(0.5, 2, 7)
    slope = loss(x)[1]
    for i in range(7):
        width = 1e-6 * x[i]
        up, down = x.copy(), x.copy()
        up[i] += width
        down[i] -= width
        assert (loss(up)[0] - loss(down)[0]) / (2 * width) == pytest.approx(slope[i], rel=1e-4, abs=1e-6)


def test_rows_that_cannot_be_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ForetraceError, match="at least one measured step"):
        fit_step_model([], [], [], [], [])
    with pytest.raises(ForetraceError, match="longer than its synchronisation"):
        fit_step_model([1], [1], [8], [0.1], [0.2])
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingExtraError, match="pip install scipy"):
        fit_step_model([1], [1], [8], [0.2], [0.1])


def test_fit_predicts_rows_it_did_not_see(profiles: Profiles) -> None:
    for app in map(profiles.application, profiles.names):
        rows = np.random.default_rng(0).permutation(app.measured)
        half = len(rows) // 2
        nodes, replicas, local, step, _ = rows[half:].T
        off = np.abs(fit_step_model(*rows[:half].T).step_s(nodes, replicas, local) / step - 1)
        assert len(off) > 300 and np.median(off) < 0.08 and np.quantile(off, 0.9) < 0.25, app.name


# Efficiency and batch sizes.


@settings(max_examples=50)
@given(noise=st.floats(1, 1e5), scale=st.floats(1, 500), sqr=st.floats(1e-3, 1e3))
def test_efficiency_is_that_of_the_noise_scale(noise: float, scale: float, sqr: float) -> None:
    """(noise + M0) / (noise + M), with noise = var / sqr * M0."""
    initial = 64.0
    worth = float(efficiency(sqr, noise / initial * sqr, scale))
    assert worth == pytest.approx((noise + initial) / (noise + initial * scale))
    assert float(efficiency(sqr, 0.0, 1.0)) == 1
    assert float(efficiency(0.0, 0.0, 4.0)) == 0.25


def test_best_batch_against_every_candidate() -> None:
    goodput = Goodput(TRUE, 1.0, 9.0, LIMITS)
    nodes, replicas = np.array([1, 1, 2, 4]), np.array([1, 4, 6, 16])
    best, local, passes = goodput.best(Candidates.of(LIMITS, nodes, replicas))
    for i, (n, k) in enumerate(zip(nodes, replicas, strict=True)):
        batch = k * local[i] * (passes[i] + 1)
        assert LIMITS.init <= batch <= LIMITS.most + k * (passes[i] + 1)
        assert LIMITS.low <= local[i] <= LIMITS.high
        assert goodput.at(n, k, local[i], passes[i]) == pytest.approx(best[i])
        every = [
            float(goodput.at(n, k, m, s))
            for s in range(0, 17)
            for m in range(LIMITS.low, LIMITS.high + 1)
            if LIMITS.init <= k * m * (s + 1) <= LIMITS.most and not (k == 1 and s == 0 and m > LIMITS.init)
        ]
        assert best[i] >= 0.97 * max(every), "50 candidates come near the best of all"
    assert passes[0] >= 1 or local[0] <= LIMITS.init
    noisy, quiet = Goodput(TRUE, 1.0, 1e6, LIMITS), Goodput(TRUE, 1.0, 0.01, LIMITS)
    at = Candidates.of(LIMITS, [2], [8])
    assert noisy.best(at)[1][0] > quiet.best(at)[1][0], "noisy gradients repay large batches"


# Speeds for the engine.


def test_own_allocation_is_the_unit_of_speed(profiles: Profiles) -> None:
    speeds: Speeds = GoodputSpeeds(profiles)
    workload = job_of("cifar10", 8, 2048)
    own = speeds.speed(workload, 0, Shape(8, (2, 1)))
    assert own.progress == 1
    assert 0 < own.communication < 1
    assert speeds.speed(workload, 0, Shape(4, (1, 1))).progress < 1
    assert speeds.speed(workload, 0, Shape(16, (4, 1))).progress > 1
    assert speeds.speed(workload, 0, Shape(1, (1, 1))).communication == pytest.approx(0, abs=1e-6)
    adapting = GoodputSpeeds(profiles, adapt=True)
    assert (
        adapting.speed(workload, 0, Shape(16, (4, 1))).progress >= speeds.speed(workload, 0, Shape(16, (4, 1))).progress
    )


def test_speed_against_measured_steps(profiles: Profiles) -> None:
    """The model's ratio of two measured placements is near the measured ratio."""
    speeds, app = GoodputSpeeds(profiles), profiles.application("imagenet")
    workload = job_of("imagenet", 4, 800)
    one, four = app.step_seconds((4,), 200)[0], app.step_seconds((1, 1, 1, 1), 200)[0]
    assert speeds.speed(workload, 0, Shape(4, (4, 1))).progress == pytest.approx(one / four, rel=0.15)


def test_kinds_are_equal_jobs(profiles: Profiles) -> None:
    workload = Workload.of(
        submit_s=[0, 1, 2, 3, 4], gpus=[1, 1, 2, 1, 1], work_s=[1] * 5, model=["ncf", "ncf", "ncf", "bert", "ncf"],
        batch=[256, 256, 256, 256, float("nan")],
    )  # fmt: skip
    assert GoodputSpeeds(profiles).kinds(workload).tolist() == [0, 0, 1, 2, 3]


def test_what_profiles_do_not_say(profiles: Profiles) -> None:
    speeds, workload = GoodputSpeeds(profiles), job_of("cifar10", 4, 512)
    with pytest.raises(ForetraceError, match="job 'one': the profiles are not said to be measured on any kind"):
        speeds.speed(workload, 0, Shape(4, (1, 1), gpu_type="v100"))
    with pytest.raises(ForetraceError, match="measured on 't4', so they say nothing about 'v100'"):
        GoodputSpeeds(profiles, gpu_type="t4").speed(workload, 0, Shape(4, (1, 1), gpu_type="v100"))
    with pytest.raises(ForetraceError, match="share a GPU"):
        speeds.speed(workload, 0, Shape(4, (1, 1), sharers=1))
    with pytest.raises(ForetraceError, match="leaves 32 GPUs less than the 32 samples"):
        speeds.speed(workload, 0, Shape(32, (8, 1)))
    with pytest.raises(ForetraceError, match="no profile of application 'gpt'"):
        speeds.speed(job_of("gpt", 4, 512), 0, Shape(4, (1, 1)))
    with pytest.raises(ForetraceError, match="validated for total batches of 128 to 4096, not 9999"):
        speeds.speed(job_of("cifar10", 4, 9999), 0, Shape(4, (1, 1)))


def test_work_needs_a_batch_size(profiles: Profiles) -> None:
    with pytest.raises(ForetraceError, match="job 'one': its run time follows from its batch size"):
        with_work(job_of("ncf", 1, float("nan"), float("nan")), profiles)
    given = job_of("ncf", 1, float("nan"), 7.0)
    assert with_work(given, profiles).work_s.tolist() == [7.0]
    assert fit_application(profiles.application("ncf")).gamma >= 1
