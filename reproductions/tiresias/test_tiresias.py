"""The Tiresias simulator against its own job files, and on cases small enough to follow by hand."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.fleet.result import FleetResult
from foretrace.fleet.workload import SECOND, Origin, Workload
from reproductions.tiresias.events import Samples
from reproductions.tiresias.simulator import Tiresias


def jobs(*rows: tuple[int, int, float], path: str = "") -> Workload:
    """(submit, GPUs, duration) each."""
    submit, gpus, work = zip(*rows, strict=True)
    return Workload.of(submit_s=submit, gpus=gpus, work_s=work, origin=Origin(path=path))


def run(workload: Workload, policy: str, cluster: str = "1x1x4", **options: str) -> FleetResult:
    return Tiresias().run(workload, policy=policy, cluster=cluster, seed=0, options=options)


def seconds(nanoseconds: np.ndarray) -> list[int]:
    return [int(each) // SECOND if each >= 0 else -1 for each in nanoseconds]


@pytest.fixture(scope="module")
def philly(shared_data: Path) -> Workload:
    path = shared_data / "fleet/repro/philly_ee9e8c_500.csv"
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return Workload.of(
        submit_s=[float(row["submit_time"]) for row in rows],
        gpus=[int(row["num_gpu"]) for row in rows],
        work_s=[float(row["duration"]) for row in rows],
        job=[row["job_id"] for row in rows],
        origin=Origin(path=str(path)),
    )


@pytest.mark.parametrize("policy", ["fifo", "fjf", "shortest", "dlas"])
def test_every_job_is_as_in_the_file_of_the_original(philly: Workload, shared_data: Path, policy: str) -> None:
    with (shared_data / f"fleet/repro/tiresias_n32g4_philly500_{policy}.job.csv").open() as file:
        known = {row["job_id"]: row for row in csv.DictReader(file)}
    result = run(philly, policy, str(shared_data / "fleet/tiresias/n32g4.csv"))
    assert len(known) == len(philly) == 500
    columns = {
        "start_time": seconds(result.start_ns),
        "end_time": seconds(result.end_ns),
        "JCT": [round(each) for each in result.jct_s],
        "pending_time": result.facts["pending_s"],
        "preempt": result.facts["preempt"],
        "resume": result.facts["resume"],
        "promote": result.facts["promote"],
    }
    for name, values in columns.items():
        assert [int(known[job][name]) for job in philly.job] == list(values), name
    assert np.allclose(result.queue_s, result.facts["pending_s"])


def test_cluster_as_text_and_as_file_are_the_same(philly: Workload, shared_data: Path) -> None:
    from_file = run(philly, "shortest", str(shared_data / "fleet/tiresias/n32g4.csv"))
    assert (from_file.end_ns == run(philly, "shortest", "1x32x4").end_ns).all()
    assert (from_file.end_ns != run(philly, "shortest", "2x8x4").end_ns).any()


def test_fifo_is_blocked_by_its_head_and_fjf_passes() -> None:
    work = jobs((0, 3, 100), (1, 2, 50), (2, 1, 10))
    assert seconds(run(work, "fifo").start_ns) == [0, 100, 100]
    assert seconds(run(work, "fjf").start_ns) == [0, 100, 2]


def test_shortest_preempts_and_resumes() -> None:
    result = run(jobs((0, 4, 100), (10, 4, 20)), "shortest")
    assert seconds(result.end_ns) == [120, 30]
    assert result.facts["preempt"].tolist() == [1, 0]
    assert result.facts["resume"].tolist() == [2, 1]
    assert seconds(result.held_ns) == [100, 20]


def test_shortest_by_gpu_time_turns_the_order_around() -> None:
    work = jobs((0, 4, 30), (0, 1, 100))  # 120 against 100 GPU seconds
    assert seconds(run(work, "shortest").end_ns) == [30, 130]
    assert seconds(run(work, "shortest-gpu").end_ns) == [130, 100]
    assert seconds(run(work, "sjf").end_ns) == [130, 100]


def test_dlas_demotes_who_has_run_3250_seconds() -> None:
    result = run(jobs((0, 4, 5000), (100, 4, 200)), "dlas")
    # the second waits in the first queue until the first leaves it
    assert seconds(result.start_ns) == [0, 3250]
    assert seconds(result.end_ns) == [5200, 3450]


def test_dlas_gpu_looks_too_early_under_python_2() -> None:
    work = jobs((0, 4, 5000), (0, 4, 200))
    # 3,250 GPU seconds are had after 813 s; rounded down the look is at 812 s, the next (3,250 - 812) // 4 later
    assert seconds(run(work, "dlas-gpu", python="3").start_ns) == [0, 813]
    assert seconds(run(work, "dlas-gpu").start_ns) == [0, 812 + 609]


def test_a_job_that_waited_long_enough_is_promoted() -> None:
    # the first runs 813 s, is passed by the second for 813 s, and has then waited once what it ran
    work = jobs((0, 4, 900), (0, 4, 900))
    never, once = run(work, "dlas-gpu", python="3"), run(work, "dlas-gpu-1", python="3")
    assert never.facts["promote"].tolist() == [0, 0]
    assert once.facts["promote"].tolist() == [1, 0]
    assert run(work, "dlas-gpu-2", python="3").facts["promote"].tolist() == [0, 0]
    assert seconds(once.end_ns) == [1626 + 87, 1626 + 87 + 87]
    assert seconds(once.held_ns) == [900, 900]


def test_gittins_ranks_and_gittins_n_does_not(tmp_path: Path) -> None:
    samples = tmp_path / "samples.csv"
    samples.write_text("duration\n" + "\n".join(["100"] * 50 + ["100000"] * 50))
    # past its first 100 GPU seconds a job is expected to be a long one, so the newcomer goes first
    work = jobs((0, 4, 600), (300, 4, 20))
    ranked = run(work, "dlas-gpu-gittins", samples=str(samples))
    assert seconds(ranked.start_ns) == [0, 300]
    assert seconds(ranked.end_ns) == [620, 320]
    assert seconds(run(work, "dlas-gpu-gittins-1").start_ns) == seconds(run(work, "dlas-gpu-1").start_ns) == [0, 600]


def test_gittins_rank_of_two_samples() -> None:
    both = [1000, 9000]
    # of both jobs one ends within 3,250 s; service until then 1,000 and 3,250, 2,125 on average
    assert Samples(both, python3=True).rank(0) == round(0.5 * 1e6 / 2125, 4)
    assert Samples(both, python3=False).rank(0) == round(0.5 * 1e6 / 2125, 4)
    assert Samples(both, python3=True).rank(9000) == 0.0
    assert Samples(both, python3=True).expected(0) == 1000.0  # the original leaves the last sample out of the mean


def test_completions_remembered_with_an_arrival() -> None:
    # The second job arrives in the second in which the first would end, and a crossing lies before it: the original
    # ends the first then, although it was preempted at the crossing in favour of a job in a better queue.
    work = jobs((0, 4, 4000), (3000, 4, 3000), (4000, 1, 10))
    result = run(work, "dlas")
    assert result.facts["early_ends"] == 1
    assert seconds(result.end_ns)[0] == 4000
    assert seconds(result.held_ns)[0] == 3250


def test_yarn_keeps_a_job_in_one_node_and_under_one_switch() -> None:
    work = jobs((0, 3, 100), (0, 3, 100), (0, 2, 50))
    assert seconds(run(work, "fifo", "1x2x4").start_ns) == [0, 0, 0]
    assert seconds(run(work, "fifo", "1x2x4", scheme="yarn").start_ns) == [0, 0, 100]
    split = jobs((0, 2, 100), (0, 2, 100), (0, 4, 50), (0, 4, 60))
    assert seconds(run(split, "fjf", "1x2x4", scheme="yarn").start_ns) == [0, 0, 0, 50]
    across = jobs((0, 8, 100), (0, 8, 100), (1, 16, 10))
    result = run(across, "fifo", "2x2x4", scheme="yarn")
    assert seconds(result.start_ns) == [0, 0, -1]  # 16 GPUs are under no one switch
    assert seconds(run(across, "fifo", "2x2x4").start_ns) == [0, 0, 100]


def test_yarn_under_shortest_loses_memory_as_the_original_does() -> None:
    # each event places the running job anew and takes another 5 of 256 GB
    work = jobs((0, 1, 10_000), *((100 + i, 1, 5000) for i in range(60)))
    assert run(work, "shortest", "1x1x4").finished.all()
    assert not run(work, "shortest", "1x1x4", scheme="yarn").finished.all()


def test_a_job_that_never_fits_is_named_and_blocks_fifo() -> None:
    result = run(jobs((0, 8, 10), (1, 1, 10)), "fifo")
    assert result.never.tolist() == [True, False]
    assert seconds(result.end_ns) == [-1, -1]
    assert seconds(run(jobs((0, 8, 10), (1, 1, 10)), "dlas").end_ns) == [-1, 11]


@pytest.mark.parametrize(
    ("policy", "cluster", "options", "words"),
    [
        ("srtf", "1x1x4", {}, "no policy 'srtf'.*fifo, fjf"),
        ("gittins", "1x1x4", {}, "stops with an error.*dlas-gpu-gittins"),
        ("fifo", "4 nodes", {}, "neither SWITCHESxNODESxGPUS"),
        ("fifo", "1x0x4", {}, "neither SWITCHESxNODESxGPUS"),
        ("fifo", "1x1x4", {"scheme": "spread"}, "scheme=spread.*count, yarn"),
        ("fifo", "1x1x4", {"lease": "3"}, "no option 'lease'"),
        ("dlas-gpu-gittins", "1x1x4", {}, "samples=FILE"),
        ("dlas-gpu-gittins", "1x1x4", {"samples": "/no/such.csv"}, "does not exist"),
        ("dlas-gpu", "1x1x4000", {}, "more than the first queue's limit"),
    ],
)
def test_mistakes_get_a_sentence(policy: str, cluster: str, options: dict[str, str], words: str) -> None:
    gpus = 4000 if cluster == "1x1x4000" else 1
    with pytest.raises(ForetraceError, match=words):
        run(jobs((0, gpus, 10), path="/nowhere/jobs.csv"), policy, cluster, **options)


def test_fractions_of_seconds_are_refused_and_of_durations_cut() -> None:
    late = Workload.of(submit_s=[0.5], gpus=[1], work_s=[10.0])
    with pytest.raises(ForetraceError, match="fraction of a second"):
        run(late, "fifo")
    with pytest.raises(ForetraceError, match="less than a second"):
        run(jobs((0, 1, 0.5)), "fifo")
    assert seconds(run(jobs((0, 1, 9.9)), "fifo").end_ns) == [9]


def test_damaged_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.csv"
    path.write_text("num_switch,num_node_p_switch,num_gpu_p_node\n1,2,4\n")
    with pytest.raises(ForetraceError, match="num_cpu_p_node"):
        run(jobs((0, 1, 10)), "fifo", str(path))
