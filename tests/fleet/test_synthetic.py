"""Generated workloads keep what the log has, and are the same for the same seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.fleet import arrivals, synthetic
from foretrace.fleet.synthetic import Generator, fit, load_generator
from foretrace.fleet.workload import SECOND, Float64, Workload


def apart(one: Any, other: Any) -> float:
    """The statistic of Kolmogorov and Smirnov: the largest distance of two distributions."""
    values = np.concatenate((one, other))
    below = [np.searchsorted(np.sort(each), values, side="right") / len(each) for each in (one, other)]
    return float(np.abs(below[0] - below[1]).max())


def log_of(days: int = 40, seed: int = 0) -> Workload:
    """A log whose make-up is known: a day's rhythm, sweeps of one tenant, durations that depend on tenant and GPUs."""
    rng = np.random.default_rng(seed)
    hour = rng.poisson(np.tile(6 + 5 * np.sin(np.arange(24) / 24 * 2 * np.pi), days))
    begin = (np.repeat(np.arange(24 * days), hour) + rng.random(hour.sum())) * 3600
    who = rng.choice(3, len(begin), p=[0.5, 0.3, 0.2])
    size = np.where(who == 0, rng.choice([1, 8], len(begin), p=[0.8, 0.2]), 1)
    submit = np.repeat(begin, size) + np.concatenate([np.arange(k) * 5.0 for k in size])
    tenant = np.repeat(who, size)
    gpus = np.array([1, 4, 16])[np.repeat(rng.choice(3, len(begin), p=[0.7, 0.2, 0.1]), size)]
    center = np.log(np.array([100.0, 2000.0, 30000.0]))[tenant] + 0.5 * np.log(gpus)
    work = np.exp(center + np.repeat(rng.normal(0, 1, len(begin)), size) + rng.normal(0, 0.2, len(submit)))
    return Workload.of(
        submit_s=submit, gpus=gpus, work_s=work, tenant=[f"team{i}" for i in tenant], name="made", epoch_s=3600.0 * 9,
        model=np.where(tenant == 0, "resnet", ""), iterations=work * 3, batch=np.full(len(work), 32.0),
        estimate_s=work * np.exp(rng.uniform(0.1, 0.9, len(work))), priority=(tenant == 1) * 2.0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def log() -> Workload:
    return log_of()


@pytest.fixture(scope="module")
def generator(log: Workload) -> Generator:
    return fit(log)


def dispersion(load: Workload, window_s: float) -> float:
    """Variance over mean of the jobs per window: 1 for a Poisson process."""
    counts = np.bincount((load.submit_ns / SECOND // window_s).astype(np.int64))[:-1]
    return float(counts.var() / counts.mean())


def test_the_same_seed_gives_the_same_jobs(generator: Generator) -> None:
    a, b, c = (generator.generate(jobs=500, seed=seed) for seed in (1, 1, 2))
    assert (a.submit_ns == b.submit_ns).all() and (a.work_s == b.work_s).all() and (a.tenant == b.tenant).all()
    assert (a.work_s != c.work_s).any() and len(a) == len(c) == 500
    assert a.origin.format == "generated" and "load 1" in a.origin.notes[0]


def test_a_generator_survives_its_file(generator: Generator, tmp_path: Path) -> None:
    generator.save(tmp_path / "g.json")
    again = load_generator(tmp_path / "g.json")
    assert again == generator
    assert (again.generate(days=3).work_s == generator.generate(days=3).work_s).all()
    (tmp_path / "bad.json").write_text('{"version": 1}')
    with pytest.raises(ForetraceError, match="is no generator of workloads"):
        load_generator(tmp_path / "bad.json")
    (tmp_path / "old.json").write_text((tmp_path / "g.json").read_text().replace('"version": 1', '"version": 0'))
    with pytest.raises(ForetraceError, match="of version 0"):
        load_generator(tmp_path / "old.json")
    with pytest.raises(ForetraceError, match="cannot read"):
        load_generator(tmp_path / "none.json")


def test_the_joint_distribution_is_kept(log: Workload, generator: Generator) -> None:
    made = generator.generate(days=120, seed=3)
    for tenant in ("team0", "team1", "team2"):
        share = (made.tenant == tenant).mean() / (log.tenant == tenant).mean()
        assert share == pytest.approx(1, abs=0.12)
        for gpus in (1, 16):
            real = np.log(log.work_s[(log.tenant == tenant) & (log.gpus == gpus)])
            drawn = np.log(made.work_s[(made.tenant == tenant) & (made.gpus == gpus)])
            assert drawn.mean() == pytest.approx(real.mean(), abs=0.25) and drawn.std() == pytest.approx(
                real.std(), rel=0.15
            )
    assert apart(made.gpus, log.gpus) < 0.03
    assert apart(made.work_s, log.work_s) < 0.05
    # Columns that belong to the kind of job or follow from its duration.
    assert ((made.model == "resnet") == (made.tenant == "team0")).all()
    assert ((made.priority == 2) == (made.tenant == "team1")).all()
    assert made.iterations / made.work_s == pytest.approx(3) and (made.batch == 32).all()
    ratio = np.log(made.estimate_s / made.work_s)
    assert ratio.min() >= 0.09 and ratio.max() <= 0.91 and ratio.mean() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("jobs", [9, 60])
def test_few_jobs_of_a_kind_keep_their_spread_and_their_mean(jobs: int) -> None:
    """Thirty kinds with so many jobs each: what smooths their durations makes them no longer."""
    kinds = np.arange(1, 31)
    work = np.exp(np.random.default_rng(0).normal(6, 2, 30 * jobs))
    load = Workload.of(submit_s=np.arange(30.0 * jobs) * 1000, gpus=np.tile(kinds, jobs), work_s=work)
    made = fit(load).generate(jobs=30_000)
    before, after = (np.mean([np.log(each.work_s[each.gpus == kind]).var() for kind in kinds]) for each in (load, made))
    assert after / before == pytest.approx(1, abs=0.06)
    assert made.work_s.mean() / work.mean() == pytest.approx(1, abs=0.06)


def test_arrivals_keep_rhythm_and_sweeps(log: Workload, generator: Generator) -> None:
    made = generator.generate(days=80, seed=5)
    assert len(made) / 80 == pytest.approx(len(log) / 40, rel=0.1)
    by_hour = [
        np.bincount((load.submit_ns // (3600 * SECOND)).astype(np.int64) % 24, minlength=24) / len(load)
        for load in (log, made)
    ]
    assert np.corrcoef(by_hour[0], by_hour[1])[0, 1] > 0.9
    assert generator.profile_of == "week" and np.mean(generator.profile) == pytest.approx(1)
    for window in (60.0, 3600.0):
        assert dispersion(made, window) == pytest.approx(dispersion(log, window), rel=0.3)
        assert dispersion(made, window) > 2  # a Poisson process has 1
    first = next(each for tenant in generator.tenants for each in tenant.strata if 8 in each.sizes)
    assert first.alike > 0.8


def test_load_and_length_scale(log: Workload, generator: Generator) -> None:
    one, three = generator.generate(days=60, seed=1), generator.generate(days=60, load=3, seed=1)
    assert len(three) / len(one) == pytest.approx(3, rel=0.1)
    assert one.submit_ns[-1] < 60 * 86400 * SECOND
    assert apart(one.work_s, three.work_s) < 0.05
    bad: dict[str, Any]
    for bad in ({}, {"jobs": 1, "days": 1.0}, {"jobs": 0}, {"days": -1.0}, {"jobs": 5, "load": 0.0}):
        with pytest.raises(ForetraceError):
            generator.generate(**bad)


def test_rates_that_wander_are_learnt() -> None:
    rng = np.random.default_rng(0)
    hours = 24 * 400
    swing = arrivals.Swing(variance=0.5, keeps=0.8)
    rate = 6 * np.repeat(arrivals.factors(rng, swing, hours // 24), 24)
    counts = rng.poisson(rate)
    time: Float64 = np.sort((np.repeat(np.arange(hours), counts) + rng.random(counts.sum())) * 3600)
    day, hour = arrivals.burst_swing(time, np.ones(len(time)), np.ones(168), hours * 3600.0)
    assert day.variance == pytest.approx(0.5, abs=0.15) and day.keeps == pytest.approx(0.8, abs=0.12)
    assert hour.variance < 0.03
    steady: Float64 = np.sort(rng.uniform(0, hours * 3600.0, 50_000))
    assert (
        max(each.variance for each in arrivals.burst_swing(steady, np.ones(50_000), np.ones(168), 3600.0 * hours))
        < 0.02
    )


def test_few_or_unknown_jobs() -> None:
    two = fit(Workload.of(submit_s=[0, 100], gpus=[1, 2], work_s=[10, 20]))
    assert two.profile_of == "flat" and len(two.generate(jobs=50)) == 50
    some = fit(Workload.of(submit_s=[0, 100, 200], gpus=[1, 2, 2], work_s=[10, np.nan, 20]))
    assert (some.jobs, some.left_out) == (3, 1)
    with pytest.raises(ForetraceError, match="too few jobs"):
        fit(Workload.of(submit_s=[0, 5], gpus=[1, 1], work_s=[3, np.nan]))


@pytest.mark.parametrize("n", [1, 2, 60, 129, 130, 5000])
def test_quantiles_keep_both_tails(n: int) -> None:
    values = np.sort(np.random.default_rng(n).pareto(1.1, n))
    at, kept = synthetic.levels(n), synthetic.knots(values)
    assert len(at) == len(kept) <= synthetic.KNOTS + 1 and (np.diff(at) > 0).all()
    assert kept[0] == pytest.approx(values[0], abs=1e-6) and kept[-1] == pytest.approx(values[-1], abs=1e-6)


def test_held_out_half_of_philly_beats_plain_resampling(shared_data: Path) -> None:
    """Fitted to the first half of the time and brought to the second half's work per day, generated jobs come as
    unevenly, and ask for as many GPUs at once, as those of the second half; resampled rows at Poisson times do not.
    """
    formats = pytest.importorskip("foretrace.fleet.formats")
    log = formats.read(shared_data / "fleet" / "philly" / "philly.csv.gz")
    middle = (log.submit_ns[0] + log.submit_ns[-1]) // 2
    first, second = log.take(log.submit_ns < middle), log.take(log.submit_ns >= middle)
    second = second.with_columns(submit_ns=second.submit_ns - second.submit_ns[0])
    days, days_first = second.submit_ns[-1] / SECOND / 86400, middle / SECOND / 86400
    load = second.gpu_seconds.sum() / days / (first.gpu_seconds.sum() / days_first)

    def demand(jobs: Workload) -> Float64:
        """GPUs that jobs would hold if none waited, every half hour, the first tenth left out."""
        moments = np.arange(days * 0.1, days, 1 / 48) * 86400 * SECOND
        end = jobs.submit_ns + jobs.work_s * SECOND
        order = np.argsort(end)
        come = np.concatenate([[0], np.cumsum(jobs.gpus)])[np.searchsorted(jobs.submit_ns, moments, "right")]
        gone = np.concatenate([[0], np.cumsum(jobs.gpus[order])])[np.searchsorted(end[order], moments, "right")]
        return np.asarray(come - gone, np.float64)

    def plain(seed: int) -> Workload:
        rng = np.random.default_rng(seed)
        at = rng.integers(0, len(first), rng.poisson(len(first) / days_first * days * load))
        return Workload.of(submit_s=rng.uniform(0, days * 86400, len(at)), gpus=first.gpus[at], work_s=first.work_s[at])

    generator = fit(first)
    seeds = range(3)
    off: dict[str, list[float]] = {}
    for name, make in (("plain", plain), ("fitted", lambda seed: generator.generate(days=days, load=load, seed=seed))):
        made = [make(seed) for seed in seeds]
        spread = np.mean([np.percentile(demand(each), 95) / demand(each).mean() for each in made])
        real = demand(second)
        off[name] = [
            abs(np.log(np.mean([dispersion(each, 3600) for each in made]) / dispersion(second, 3600))),
            abs(np.log(np.mean([dispersion(each, 86400) for each in made]) / dispersion(second, 86400))),
            abs(np.log(spread / (np.percentile(real, 95) / real.mean()))),
            float(np.mean([apart(np.diff(e.submit_ns), np.diff(second.submit_ns)) for e in made])),
        ]
    assert all(a < b for a, b in zip(off["fitted"], off["plain"], strict=True)), off
    assert off["fitted"][0] < np.log(2) < np.log(20) < off["plain"][0]
