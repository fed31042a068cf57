"""The Pollux simulator: its published answers, its rules on a profile small enough for hand calculation, its search."""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.fleet.pollux.profiles import Application, Profiles, read_application
from foretrace.fleet.result import FleetResult
from foretrace.fleet.workload import SECOND, Origin, Workload
from reproductions.pollux.policies import Job, Optimus, Tiresias, fill
from reproductions.pollux.search import Pollux
from reproductions.pollux.simulator import PolluxSimulator
from tests.fleet.test_pollux_profiles import write_profile


def pollux_workload(path: Path, jobs: int | None = None) -> Workload:
    rows = list(csv.DictReader(path.read_text().splitlines()))[:jobs]
    return Workload.of(
        submit_s=[float(row["time"]) for row in rows],
        gpus=[int(row["num_replicas"]) for row in rows],
        work_s=[float("nan")] * len(rows),
        job=[row["name"] for row in rows],
        model=[row["application"] for row in rows],
        batch=[float(row["batch_size"]) for row in rows],
        origin=Origin(path=str(path)),
    )


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pollux") / "profiles"
    write_profile(folder / "toy")
    return folder


@pytest.fixture(scope="module")
def toy(profiles: Path) -> Application:
    return read_application(profiles / "toy")


def jobs_of(rows: list[tuple[float, int, float]]) -> Workload:
    """(submission s, GPUs, batch) each."""
    submit, gpus, batch = zip(*rows, strict=True)
    return Workload.of(
        submit_s=submit, gpus=gpus, work_s=[float("nan")] * len(rows), model=["toy"] * len(rows), batch=batch
    )


def play(workload: Workload, policy: str, cluster: str, seed: int = 0, **options: Any) -> FleetResult:
    return PolluxSimulator().run(workload, policy=policy, cluster=cluster, seed=seed, options=options)


# Published answers.


@pytest.mark.parametrize(("policy", "mean"), [("tiresias", 3469.69375), ("optimus", 5301.875)])
def test_published_average(shared_data: Path, policy: str, mean: float) -> None:
    path = shared_data / "fleet/pollux/workloads/workload-6.csv"
    result = play(pollux_workload(path), policy, "16x4")
    assert result.jct_s.mean() == mean
    assert result.finished.all()
    assert result.facts["profiles"] == str(shared_data / "fleet/pollux/profiles")


# Rules.


def test_completion_by_hand(profiles: Path) -> None:
    """Two GPUs of one node, batch 16: 8 each, 1 s per step. Gain 3 / (2/2 + 1) = 1.5, then 7 / (6/2 + 1) = 1.75.

    Start at 60 s, 30 s pause: 45 done at 120 s. Epoch 1 ends at 100, after 55 / 1.5 = 36.7 s, rounded to 37; in the 23
    s that remain 40.25 are done. Epoch 2 ends at 239.125: after 98.875 / 1.75 = 56.5 s, to even 56. End: 180 + 56 s.
    """
    result = play(jobs_of([(60, 2, 16)]), "tiresias", "1x4", profiles=str(profiles))
    assert result.start_ns.tolist() == [60 * SECOND]
    assert result.end_ns.tolist() == [236 * SECOND]
    assert result.jct_s.tolist() == [176.0]
    assert result.held_ns.tolist() == [176 * SECOND]
    assert result.dead_ns.tolist() == [30 * SECOND]
    assert result.gpu_ns.tolist() == [352.0 * SECOND]
    assert result.segments is not None
    assert result.segments.level.tolist() == [1]


def test_fill_takes_the_emptiest_node_first() -> None:
    allocations = {7: [0, 0, 0], 8: [2]}
    fill(allocations, {1: 5, 2: 1, 3: 2}, [4, 4, 4])
    assert allocations[1] == [1, 1, 1, 1, 2]
    assert allocations[2] == [2], "the emptiest of what is left"
    assert allocations[3] == [0, 2], "the lower number among equals"


def test_tiresias_demotes_at_sixteen_gpu_hours(toy: Application) -> None:
    jobs = {at: Job(at=at, app=toy, submit_s=0, gpus=2, batch=16) for at in (0, 1)}
    policy = Tiresias()
    held: dict[int, list[int]] = {}
    holders = []
    for now in range(60, 60 + 28_800 + 60 * 3, 60):
        held = policy.allocate(now, jobs, held, [2])
        holders.append((now, *held))
    changes = [b for a, b in pairwise(holders) if a[1:] != b[1:]]
    assert holders[0] == (60, 0)
    assert changes == [(60 + 28_800, 1)]


def test_tiresias_passes_over_what_does_not_fit(profiles: Path) -> None:
    result = play(jobs_of([(0, 2, 16), (1, 4, 32), (2, 1, 8), (3, 99, 32)]), "tiresias", "1x4", profiles=str(profiles))
    first, second, third, fourth = result.start_ns / SECOND
    assert (first, third) == (60, 60)
    assert second >= result.end_ns[0] / SECOND
    assert (fourth, result.never.tolist()) == (-1e-9, [False, False, False, True])


def test_optimus_gives_gpus_where_they_save_most(toy: Application) -> None:
    jobs = {
        0: Job(at=0, app=toy, submit_s=0, gpus=1, batch=8),
        1: Job(at=1, app=toy, submit_s=0, gpus=1, batch=32),
        2: Job(at=2, app=toy, submit_s=0, gpus=1, batch=32, epoch=1),  # one step is left to go
    }
    given = Optimus().allocate(60, jobs, {}, [4])
    assert {at: len(taken) for at, taken in given.items()} == {0: 1, 1: 2, 2: 1}
    assert Optimus(alone=frozenset({"toy"})).allocate(60, jobs, {}, [4]) == {0: [0], 1: [0], 2: [0]}
    assert Optimus().allocate(60, jobs, {}, [1, 1]) == {0: [0], 1: [1]}, "one each for the first"


def test_optimus_asks_for_no_more_gpus_than_there_are(toy: Application) -> None:
    """More may not be profiled."""
    asked = set()

    class Asking(Optimus):
        def _step_s(self, job: Job, gpus: int) -> float:
            asked.add(gpus)
            return 1 / gpus

    jobs = {0: Job(at=0, app=toy, submit_s=0, gpus=1, batch=32)}
    assert Asking().allocate(60, jobs, {}, [2, 2]) == {0: [0, 0, 1, 1]}
    assert asked == {1, 2, 3, 4}


@settings(max_examples=12)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 400), st.sampled_from([1, 2, 3, 4]), st.sampled_from([16, 24, 32])),
        min_size=1,
        max_size=7,
    ),
    nodes=st.integers(1, 3),
    per_node=st.integers(2, 4),
    policy=st.sampled_from(PolluxSimulator.policies),
)
def test_no_gpu_is_given_twice(
    profiles: Path, rows: list[tuple[int, int, int]], nodes: int, per_node: int, policy: str
) -> None:
    small: dict[str, Any] = {"population": "6", "generations": "3"} if policy == "pollux" else {}
    result = play(jobs_of(list(rows)), policy, f"{nodes}x{per_node}", profiles=str(profiles), **small)
    assert (result.finished | result.never).all()
    parts = result.segments
    assert parts is not None
    changes = sorted([(t, g) for t, g in zip(parts.start_ns, parts.gpus, strict=True)]
                     + [(t, -g) for t, g in zip(parts.end_ns, parts.gpus, strict=True)])  # fmt: skip
    assert np.cumsum([g for _, g in changes]).max(initial=0) <= nodes * per_node
    held = np.bincount(parts.job, parts.end_ns - parts.start_ns, minlength=len(result.workload))
    assert held.tolist() == result.held_ns.tolist()
    assert np.bincount(parts.job, minlength=len(result.workload)).tolist() == result.starts.tolist()
    assert np.bincount(parts.job, parts.dead_ns, minlength=len(result.workload)).tolist() == result.dead_ns.tolist()
    assert (result.start_ns[~result.never] % (60 * SECOND) == 0).all(), "decisions fall on rounds"


# The search.


def test_equal_seeds_give_equal_answers(profiles: Path) -> None:
    workload = jobs_of([(20 * i, 2, 16) for i in range(8)])
    runs = [
        play(workload, "pollux", "2x4", seed, profiles=str(profiles), population="8", generations="4")
        for seed in (1, 1, 2, 3, 4)
    ]
    assert runs[0].end_ns.tolist() == runs[1].end_ns.tolist()
    assert any(run.end_ns.tolist() != runs[0].end_ns.tolist() for run in runs[2:])
    assert runs[0].facts["population"] == 8
    assert runs[0].facts["fits"] > 0


def test_pollux_grows_a_job_at_most_twofold(toy: Application) -> None:
    policy = Pollux(population=10, generations=5)
    job = Job(at=0, app=toy, submit_s=0, gpus=1, batch=0)
    assert policy.most(job) == 1
    job.placement, job.atomic = (2,), 4
    policy.observe(job, *toy.step_seconds((2,), 4), 1.0, 1.0)
    assert policy.most(job) == 4
    job.placement = (4,)
    policy.observe(job, *toy.step_seconds((4,), 4), 1.0, 1.0)
    assert policy.most(job) == 8, "and never beyond the largest batch at the smallest per GPU"


# What users get wrong.


@pytest.mark.parametrize(
    ("rows", "policy", "options", "message"),
    [
        ([(0, 1, 8)], "fifo", {}, "no policy 'fifo'; it has tiresias, optimus, pollux"),
        ([(0, 1, 8)], "tiresias", {"colour": "red"}, "no option 'colour'; it has profiles"),
        ([(0, 1, 8)], "tiresias", {"generations": "5"}, "belongs to policy pollux"),
        ([(0, 1, 8)], "tiresias", {"interval": "0"}, "interval must be a whole number above zero"),
        ([(0, 1, 64)], "tiresias", {}, "job '0': profile toy is validated for total batches of 8 to 32, not 64"),
        ([(0, 4, 8)], "tiresias", {}, "job '0': a total batch of 8 on 4 GPUs"),
        ([(0, 1, float("nan"))], "optimus", {}, "no whole batch size"),
    ],
)
def test_what_cannot_be_simulated(
    profiles: Path, rows: list[tuple[float, int, float]], policy: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ForetraceError, match=message):
        play(jobs_of(rows), policy, "1x4", **{"profiles": str(profiles), **options})


def test_profiles_are_of_one_kind_of_gpu(profiles: Path) -> None:
    with pytest.raises(ForetraceError, match="several kinds of GPU"):
        play(jobs_of([(0, 1, 8)]), "tiresias", "1x4@v100+1x4@k80", profiles=str(profiles))


def test_where_profiles_are_looked_for(profiles: Path, tmp_path: Path) -> None:
    workload = jobs_of([(0, 1, 8)])
    with pytest.raises(ForetraceError, match="give it as option profiles"):
        play(workload, "tiresias", "1x4")
    with pytest.raises(ForetraceError, match="is not a folder"):
        play(workload, "tiresias", "1x4", profiles=str(tmp_path / "none"))
    with pytest.raises(ForetraceError, match="holds no application"):
        play(workload, "tiresias", "1x4", profiles=str(tmp_path))
    with pytest.raises(ForetraceError, match="no profile of application 'other'; it has toy"):
        Profiles(profiles).application("other")
