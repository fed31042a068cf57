"""Comparisons: repetitions are what they say, intervals cover, and noise is called noise."""

from __future__ import annotations

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.fleet import comparison
from foretrace.fleet.comparison import Tails, compare, jitter, jittered, judge, subtraces
from foretrace.fleet.result import FleetResult
from foretrace.fleet.workload import SECOND, Workload
from reproductions.results import simple


def load(jobs: int = 200, seed: int = 0) -> Workload:
    rng = np.random.default_rng(seed)
    return Workload.of(
        submit_s=np.sort(rng.uniform(0, 2000, jobs)), gpus=np.ones(jobs, int), work_s=rng.uniform(1, 40, jobs),
        logged_start_s=np.where(np.arange(jobs) % 2, 5000.0, np.nan), name="demo", epoch_s=100.0,
    )  # fmt: skip


def served(workload: Workload, shortest: bool = False, servers: int = 3) -> FleetResult:
    """Servers one by one, first come first served, or the shortest waiting job first."""
    n = len(workload)
    free = np.zeros(servers, np.int64)
    work = np.rint(workload.work_s * SECOND).astype(np.int64)
    start = np.zeros(n, np.int64)
    waiting = set(range(n))
    while waiting:
        server = int(free.argmin())
        here = [job for job in waiting if workload.submit_ns[job] <= free[server]] or [min(waiting)]
        job = min(here) if not shortest else min(here, key=lambda job: (work[job], job))
        waiting.discard(job)
        start[job] = max(int(free[server]), int(workload.submit_ns[job]))
        free[server] = start[job] + work[job]
    return simple(workload, policy="p", cluster="c", gpus=servers, start_ns=start, end_ns=start + work)


def test_jitter_moves_every_job_a_little_and_repeatably() -> None:
    base = load()
    moved, again, other = jitter(base, 7, 60), jitter(base, 7, 60), jitter(base, 8, 60)
    assert (moved.submit_ns == again.submit_ns).all() and (moved.submit_ns != other.submit_ns).any()
    place = {name: i for i, name in enumerate(base.job)}
    at = [place[name] for name in moved.job]
    by = moved.submit_ns - base.submit_ns[at]
    assert by.min() >= 0 and by.max() <= 60 * SECOND and by.std() > 10 * SECOND
    assert (np.diff(moved.submit_ns) >= 0).all() and sorted(at) == list(range(len(base)))
    known = moved.logged_start_ns >= 0
    assert (moved.logged_start_ns[known] == 5000 * SECOND + by[known]).all() and known.sum() == 100
    assert (jitter(base, 7, 0).submit_ns == base.submit_ns).all()
    assert jittered(base, 1)[0] is base and len(jittered(base, 3)) == 3
    with pytest.raises(ForetraceError, match="cannot be moved by -1 s"):
        jitter(base, 0, -1)


def test_subtraces_are_consecutive_parts_from_zero() -> None:
    base = load(101)
    parts = subtraces(base, 4)
    assert [len(part) for part in parts] == [26, 25, 25, 25]
    assert [name for part in parts for name in part.job] == base.job.tolist()
    for part in parts:
        assert part.submit_ns[0] == 0
        first = int(np.flatnonzero(base.job == part.job[0])[0])
        assert part.epoch_s == pytest.approx(100 + base.submit_ns[first] / SECOND)
        assert (np.diff(part.submit_ns) == np.diff(base.submit_ns[first : first + len(part)])).all()
    with pytest.raises(ForetraceError, match="cannot be cut into 200 parts"):
        subtraces(base, 200)


def test_a_real_difference_is_found_and_noise_is_called_so() -> None:
    workloads = jittered(load(), 12, 30)
    policies = {
        "fifo": served,
        "again": served,
        "short": lambda w: served(w, True),
        "more": lambda w: served(w, servers=4),
    }
    shown: list[tuple[str, int]] = []
    found = compare(policies, workloads, how="12 seeds", seen=lambda policy, i, result: shown.append((policy, i)))
    assert len(shown) == 48 and found.repetitions == 12 and found.baseline == "fifo"
    jct = found.figures["mean_jct_s"]
    assert jct.against_baseline["again"].verdict == "same"
    for name in ("short", "more"):
        each = jct.against_baseline[name]
        assert each.verdict == "better" and each.low is not None and each.high is not None
        assert each.low < each.ratio < each.high < 1
    assert found.figures["utilisation"].against_baseline["more"].verdict == "worse"
    assert jct.best == "more" and found.figures["p50_jct_s"].estimates["fifo"].low is not None
    # The same comparison again is the same to the last bit.
    assert compare(policies, workloads, how="12 seeds").figures == found.figures
    one = compare(policies, workloads[:1])
    assert one.figures["mean_jct_s"].against_baseline["short"].verdict == "unknown"
    assert one.figures["mean_jct_s"].estimates["short"].low is None


def test_a_subset_is_measured_by_name() -> None:
    base = load(60)
    names = base.job[::4].tolist()
    found = compare({"fifo": served}, jittered(base, 3, 500), only=names)
    wanted = []
    for moved in jittered(base, 3, 500):
        at = [int(np.flatnonzero(moved.job == name)[0]) for name in names]
        wanted.append(served(moved).jct_s[at].mean())
    assert found.samples["fifo"]["mean_jct_s"] == pytest.approx(np.array(wanted))


@pytest.mark.parametrize("n", [3, 5, 8, 12, 20])
def test_intervals_cover_as_often_as_they_say(n: int) -> None:
    rng = np.random.default_rng(n)
    inside, trials = 0, 400
    draws = np.random.default_rng(0).integers(0, n, (1000, n))
    tails = Tails.of(n, 0.95)
    for _ in range(trials):
        shared = rng.lognormal(0, 0.3, n)  # what repetitions have in common: pairing takes it out
        base, other = shared * rng.lognormal(0, 0.1, n), 1.2 * shared * rng.lognormal(0, 0.1, n)
        each = comparison.contrast(other, base, draws, tails)
        assert each.low is not None and each.high is not None
        inside += each.low <= 1.2 <= each.high
    assert 0.90 <= inside / trials <= 0.99


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 19, 40])
def test_the_t_quantile_is_that_of_scipy(freedom: int) -> None:
    from scipy import special

    assert Tails.of(freedom + 1, 0.9).t == pytest.approx(special.stdtrit(freedom, 0.95))


def test_ties_and_unknown_figures() -> None:
    rng = np.random.default_rng(1)
    common = rng.lognormal(5, 0.5, 16)
    samples = {
        "a": {"mean_jct_s": common, "mean_rho": np.full(16, np.nan), "utilisation": np.full(16, 0.5)},
        "b": {
            "mean_jct_s": common * rng.lognormal(0, 0.2, 16),
            "mean_rho": np.ones(16),
            "utilisation": np.full(16, 0.6),
        },
        "c": {"mean_jct_s": common * 3, "mean_rho": np.ones(16), "utilisation": np.full(16, 0.4)},
    }
    found = judge(samples, baseline="c")
    jct = found.figures["mean_jct_s"]
    assert {jct.best, *jct.tied} == {"a", "b"}
    assert jct.against_baseline["a"].ratio == pytest.approx(1 / 3) and jct.against_baseline["a"].low == pytest.approx(
        1 / 3
    )
    assert found.figures["mean_rho"].against_baseline["a"].verdict == "unknown"
    assert found.figures["mean_rho"].best in ("b", "c")
    assert found.figures["utilisation"].best == "b"
    assert found.figures["utilisation"].against_baseline["a"].verdict == "better"
    with pytest.raises(ForetraceError, match="there is no policy 'z'"):
        judge(samples, baseline="z")
    with pytest.raises(ForetraceError, match="same repetitions"):
        judge({"a": {"x": [1, 2]}, "b": {"x": [1]}})
    with pytest.raises(ForetraceError, match="at least one policy"):
        compare({}, [load()])
