"""The Gavel simulator against its published figures, and its rounds on cases small enough to follow by hand."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.fleet.result import FleetResult
from foretrace.fleet.speeds.throughputs import ThroughputTable
from foretrace.fleet.workload import SECOND, Origin, Workload
from reproductions.gavel.generator import generate
from reproductions.gavel.simulator import Gavel

pytest.importorskip("scipy")


def run(work: Workload, policy: str, cluster: str, seed: int = 0, **options: str) -> FleetResult:
    return Gavel().run(work, policy=policy, cluster=cluster, seed=seed, options=options)


def listed(rows: list[tuple[str, float, int, float]], path: str = "") -> Workload:
    """(model, steps, GPUs, arrival) each."""
    model, steps, gpus, arrival = zip(*rows, strict=True)
    return Workload.of(
        submit_s=arrival,
        gpus=gpus,
        work_s=np.full(len(rows), np.nan),
        model=model,
        iterations=steps,
        origin=Origin(path=path),
    )


@pytest.fixture(scope="module")
def physical(shared_data: Path) -> Workload:
    path = shared_data / "fleet/gavel/physical_cluster/max_min_fairness.trace"
    cells = [line.split("\t") for line in path.read_text().splitlines()]
    return listed([(row[0], float(row[5]), int(row[6]), float(row[9])) for row in cells], str(path))


@pytest.fixture(scope="module")
def published(shared_data: Path) -> tuple[Path, list[dict[str, str]]]:
    path = shared_data / "fleet/gavel/generated_seed42_lam9000.csv.gz"
    with gzip.open(path, "rt") as file:
        return path, list(csv.DictReader(file))


@pytest.fixture
def profiles(tmp_path: Path) -> str:
    """One step a second on any type for A and B on any number of GPUs; C only on a v100; A and B share at 0.6 each."""
    jobs = [f"('{model}', {gpus})" for model in "AB" for gpus in (1, 2, 4)]
    rows = {job: {"null": 1.0} | {other: [0.6, 0.6] for other in jobs if other[-2] == job[-2]} for job in jobs}
    table = {kind: dict(rows) for kind in ("v100", "p100", "k80")}
    for kind, speed in (("v100", 3.0), ("p100", 0.0), ("k80", 0.0)):
        table[kind]["('C', 1)"] = {"null": speed}
    path = tmp_path / "profiles.json"
    path.write_text(json.dumps(table))
    return str(path)


def test_generated_jobs_are_those_of_the_original(
    published: tuple[Path, list[dict[str, str]]], shared_data: Path
) -> None:
    table = ThroughputTable.read(shared_data / "fleet/gavel/simulation_throughputs.json.gz")
    work = generate(table, seed=42, mean_interarrival_s=9000.0, jobs=5036)
    rows = published[1]
    assert len(rows) == 5036
    assert [row["job_type"] for row in rows] == work.model.tolist()
    assert [float(row["total_steps"]) for row in rows] == work.iterations.tolist()
    assert [int(row["scale_factor"]) for row in rows] == work.gpus.tolist()
    assert [round(float(row["arrival_s"]) * SECOND) for row in rows] == work.submit_ns.tolist()


@pytest.mark.slow
def test_allox_on_the_published_jobs(published: tuple[Path, list[dict[str, str]]]) -> None:
    path, rows = published
    work = listed(
        [(r["job_type"], float(r["total_steps"]), int(r["scale_factor"]), float(r["arrival_s"])) for r in rows],
        str(path),
    )
    result = run(work, "allox", "36:36:36", seed=42, window="4000:5000")
    known = np.array([float(row["allox_jct_s"]) for row in rows[4000:5000]])
    assert np.abs(result.jct_s[4000:5000] - known).max() < 6e-4  # written with three digits
    assert result.jct_s[4000:5000].mean() == pytest.approx(59492.106756, abs=1e-6)
    assert result.facts["average_jct_s"] == pytest.approx(59492.106756, abs=1e-6)
    assert result.facts["utilisation"] == pytest.approx(0.060797, abs=5e-7)
    assert result.facts["arrived"] == 5036  # the original had generated as many when it stopped
    assert result.stopped_ns is not None


@pytest.mark.parametrize(
    ("policy", "jct", "utilisation", "within"),
    [
        ("fifo", 99257.864, 0.731, 1e-8),
        ("gandiva", 63617.345, 0.976, 1e-8),
        # which jobs get GPUs that are left over hangs on fractions of 1e-12 of the solver's answer
        ("max_min_fairness", 66558.675, 0.967, 0.01),
        ("min_total_duration_perf", 145188.631, 0.990, 0.01),
    ],
)
def test_policies_on_the_physical_trace(
    physical: Workload, policy: str, jct: float, utilisation: float, within: float
) -> None:
    result = run(physical, policy, "4:4:4")
    assert result.finished.all()
    assert result.facts["average_jct_s"] == pytest.approx(jct, rel=within, abs=1e-3)
    assert result.facts["utilisation"] == pytest.approx(utilisation, abs=max(within, 0.005))
    assert result.facts["profiles"].endswith("simulation_throughputs.json.gz")


@pytest.mark.parametrize("policy", [each for each in Gavel.policies if each not in ("fifo", "gandiva")])
def test_every_policy_ends_every_job(physical: Workload, policy: str) -> None:
    few = physical.take(np.arange(14))
    if policy == "allox":
        few = few.with_columns(gpus=np.ones(14, np.int64))
    result = run(few, policy, "4:4:4")
    assert result.finished.all()
    assert (result.end_ns > result.start_ns).all()
    assert (result.start_ns >= few.submit_ns).all()
    assert (result.jct_s >= result.held_ns / SECOND - 1e-6).all()
    assert 0 < result.facts["utilisation"] <= 1


def test_gpus_stay_idle_to_the_end_of_the_round(profiles: str) -> None:
    # the first ends after 100 s, but its GPU is given out when the round of the second ends
    work = listed([("A", 100, 1, 0), ("A", 700, 1, 0), ("A", 50, 1, 0)])
    result = run(work, "fifo", "2:0:0", profiles=profiles)
    assert (result.end_ns // SECOND).tolist() == [100, 700, 360 + 50]
    late = run(work, "fifo", "2:0:0", profiles=profiles, round="720")
    assert (late.end_ns // SECOND).tolist() == [100, 700, 700 + 50]


def test_a_newcomer_waits_for_the_next_allotment(profiles: str) -> None:
    # nothing may change for 1,920 s after the allotment at 2,160 s, the first at which the clock is not at zero
    work = listed([("A", 5000, 1, 0), ("A", 3000, 1, 2000), ("A", 400, 1, 2500)])
    result = run(work, "isolated", "4:0:0", profiles=profiles)
    starts = (result.start_ns // SECOND).tolist()
    assert starts == [0, 2160, 4320]


def test_jobs_run_where_they_can(profiles: str) -> None:
    work = listed([("C", 1000, 1, 0), ("C", 1000, 1, 0), ("A", 500, 1, 0)])
    result = run(work, "max_min_fairness_perf", "1:1:1", profiles=profiles)
    assert result.finished.all()
    # the two share one v100 at 3 steps a second: at least 2,000 / 3 s
    assert result.end_ns[:2].max() >= 666 * SECOND


def test_pairs_share_gpus_at_the_speeds_of_the_table(profiles: str) -> None:
    work = listed([("A", 300, 1, 0), ("B", 300, 1, 0)])
    alone = run(work, "gandiva", "2:0:0", profiles=profiles)
    assert (alone.end_ns // SECOND).tolist() == [300, 300]
    packed = run(work, "gandiva", "1:0:0", profiles=profiles)
    # 216 of 300 steps in the first round, the rest in the second
    assert packed.end_ns.tolist() == pytest.approx([500 * SECOND] * 2)
    assert packed.gpu_ns.sum() == pytest.approx(500 * SECOND)
    assert packed.facts["utilisation"] == pytest.approx(1.0)


def test_fewer_steps_than_gpus_are_never_done(profiles: str) -> None:
    # in each round of four GPUs 360 steps are done; the last two cannot be shared out, which fails five times
    work = listed([("A", 362, 4, 0), ("A", 360, 4, 0)])
    result = run(work, "fifo", "4:0:0", profiles=profiles)
    assert result.facts["given_up"] == ("0",)
    assert result.finished.tolist() == [False, True]
    assert result.facts["average_jct_s"] == result.jct_s[1]


def test_window_stops_the_clock(profiles: str) -> None:
    work = listed([("A", 300, 1, 1000 * i) for i in range(6)])
    result = run(work, "allox", "1:1:1", profiles=profiles, window="1:3")
    # allotted at 0, 300 and then 3,000 s, the first event 1,920 s later
    assert (result.start_ns[:4] // SECOND).tolist() == [0, 3000, 3000, 3000]
    assert not result.finished[4:].any()
    assert result.facts["average_jct_s"] == pytest.approx((2300 + 1300) / 2)
    assert result.stopped_ns == 3300 * SECOND


def test_shuffled_types_follow_the_seed(physical: Workload) -> None:
    few = physical.take(np.arange(20))
    assert (run(few, "isolated", "4:4:4", 1).end_ns == run(few, "isolated", "4:4:4", 1).end_ns).all()
    assert (run(few, "isolated", "4:4:4", 1).end_ns != run(few, "isolated", "4:4:4", 2).end_ns).any()


@pytest.mark.parametrize(
    ("policy", "cluster", "options", "words"),
    [
        ("las", "1:1:1", {}, "no policy 'las'.*allox, fifo"),
        ("fifo", "3", {}, "V100S:P100S:K80S"),
        ("fifo", "0:0:0", {}, "V100S:P100S:K80S"),
        ("fifo", "2:2:2", {"window": "2:1"}, "FIRST:BEHIND_LAST"),
        ("fifo", "2:2:2", {"window": "0:9"}, "within the 2 jobs"),
        ("fifo", "2:2:2", {"round": "0"}, "above zero"),
        ("fifo", "1:1:1", {"lease": "1"}, "no option 'lease'"),
        ("fifo", "1:1:1", {}, "asks for more GPUs than any one type"),
        ("allox", "2:2:2", {}, "allox is for jobs on one GPU"),
        ("min_total_duration", "0:2:2", {}, "the cluster has none"),
    ],
)
def test_mistakes_get_a_sentence(policy: str, cluster: str, options: dict[str, str], words: str, profiles: str) -> None:
    work = listed([("A", 100, 1, 0), ("A", 100, 2, 0)])
    with pytest.raises(ForetraceError, match=words):
        run(work, policy, cluster, 0, **({"profiles": profiles} | options))


def test_profiles_are_looked_for_and_missed(tmp_path: Path, profiles: str) -> None:
    folder = tmp_path / "somewhere" / "traces"
    folder.mkdir(parents=True)
    work = listed([("A", 100, 1, 0)], str(folder / "jobs.trace"))
    with pytest.raises(ForetraceError, match="-o profiles=FILE"):
        run(work, "fifo", "1:0:0")
    found = folder.parent / "simulation_throughputs.json"
    found.write_text(Path(profiles).read_text())
    assert run(work, "fifo", "1:0:0").facts["profiles"] == str(found)
    with pytest.raises(ForetraceError, match="does not say how many steps"):
        run(Workload.of(submit_s=[0], gpus=[1], work_s=[1], model=["A"]), "fifo", "1:0:0", profiles=profiles)


def test_generator_of_several_gpus_and_priorities(shared_data: Path) -> None:
    table = ThroughputTable.read(shared_data / "fleet/gavel/simulation_throughputs.json.gz")
    work = generate(
        table, seed=1, mean_interarrival_s=0, jobs=800, several_gpus=True, priorities=True, duration_s=3600.0
    )
    assert (work.submit_ns == 0).all()
    shares = [(work.gpus == size).mean() for size in (1, 2, 4, 8)]
    assert np.allclose(shares, [0.7, 0.1, 0.15, 0.05], atol=0.05)
    assert (work.priority == 5.0).mean() == pytest.approx(0.2, abs=0.05)
    assert not any(
        gpus > 1 and model.startswith(("A3C", "Cycle", "Rec"))
        for gpus, model in zip(work.gpus, work.model, strict=True)
    )
    assert (work.work_s == 3600.0).all()
    with pytest.raises(ForetraceError, match="at least one job"):
        generate(table, seed=1, mean_interarrival_s=1, jobs=0)
