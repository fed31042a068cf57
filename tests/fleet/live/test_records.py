"""What Slurm prints is read whole, in each of its forms; what cannot be is refused in one sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError
from foretrace.fleet.formats.slurm import gpus_in
from foretrace.fleet.live import records
from foretrace.fleet.live.records import QueuedJob, SlurmNode, Snapshot
from foretrace.fleet.live.sources import ask_slurm, read_folder
from tests.fleet.live.queues import EXAMPLE, job, write_queue


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 300), ("1:30", 90), ("02:00:00", 7200), ("1-01:00:00", 90000), ("3-12", 302400), ("UNLIMITED", math.inf)],
)
def test_durations_are_as_sbatch_writes_them(text: str, seconds: float) -> None:
    assert records.duration(text) == seconds


@given(st.integers(0, 10**8))
def test_durations_come_back(seconds: int) -> None:
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    text = f"{hours // 24}-{hours % 24:02d}:{minute:02d}:{second:02d}"
    assert records.duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "gpus"),
    [("gres:gpu:4", 4), ("gres/gpu:a100:2", 2), ("gpu:a100:2(S:0-1),gpu:v100:2", 4), ("cpu=8,gres/gpu=4", 4),
     ("cpu=8,gres/gpu=4,gres/gpu:a100=4", 4),
     ("gpu:1g.5gb:7", 7), ("gpu", 1), ("gpu:4(IDX:0-3)", 4), ("(null)", 0), ("gres:mps:100", 0)],
)  # fmt: skip
def test_gpus_are_found_in_resources(text: str, gpus: int) -> None:
    assert gpus_in(text) == gpus


def test_the_example_is_read() -> None:
    seen = read_folder(EXAMPLE)
    assert (seen.version, len(seen.nodes), len(seen.partitions)) == ("22.05.8", 8, 2)
    assert seen.notes == ()
    by = {each.job: each for each in seen.jobs}
    assert by["22"].held == {"n003": 4, "n004": 4}
    assert (by["22"].state, by["22"].ran_s, by["22"].limit_s) == ("RUNNING", 21.0, 120.0)
    assert (by["60"].switches, by["60"].switch_wait_s, by["60"].nodes, by["60"].per_node) == (1, 300.0, 4, 4)
    assert (by["58"].tasks, by["58"].throttle) == (4, 2)
    assert by["59"].after.startswith("afterany:58")
    assert by["28"].start_s - seen.now_s == 68.0
    assert sum(by[name].held["n002"] for name in ("26", "31", "36")) == 4
    assert set(seen.leaves) == {"rack0", "rack1"}


def told(jobs: Iterable[QueuedJob]) -> list[str]:
    """Every field as text: from Python 3.13 on records with times that are not known (NaN) equal no others."""
    return list(map(repr, jobs))


def test_one_line_forms_say_the_same(tmp_path: Path) -> None:
    """`scontrol -o show job` prints a record per line."""
    for each in EXAMPLE.iterdir():
        (tmp_path / each.name).write_text(each.read_text())
    text = "\n".join(" ".join(part.split()) for part in (EXAMPLE / "job.txt").read_text().split("\n\n") if part.strip())
    (tmp_path / "job.txt").write_text(text)
    assert told(read_folder(tmp_path).jobs) == told(read_folder(EXAMPLE).jobs)


def test_a_name_cannot_speak_for_the_job(tmp_path: Path) -> None:
    seen = read_folder(write_queue(tmp_path, job(1, JobName="a JobState=RUNNING NodeList=n1")))
    assert (seen.jobs[0].state, seen.jobs[0].name) == ("PENDING", "a JobState=RUNNING NodeList=n1")


def _json_job(**more: Any) -> dict[str, Any]:
    return {
        "job_id": 7, "job_state": "PENDING", "state_reason": "Resources", "name": "x", "user_name": "ann",
        "account": "lab", "partition": "all", "priority": 5, "node_count": 2, "tres_per_node": "gres:gpu:4",
        "time_limit": 5, "submit_time": 1795435200, "start_time": 1795435260, "nodes": "", "cpus": 8,
    } | more  # fmt: skip


@pytest.mark.parametrize("asked", ["TresPerNode=gres:gpu:4", ""])
def test_a_job_that_completes_keeps_its_own_gpus_alone(asked: str) -> None:
    line = f"JobId=7 JobState=COMPLETING NodeList=n003 NumNodes=4 JOB_GRES=gpu:16 {asked}"
    said = dict(each.split("=", 1) for each in line.split())
    assert records.job_of({**said, "held": "Nodes=n[000-003] CPU_IDs=0 GRES="}).held == {"n003": 4}


def test_json_of_all_versions_says_the_same(tmp_path: Path) -> None:
    """Numbers are plain up to 22.05 and {set, infinite, number} from 23.02 on; states are lists there."""

    def new(value: int) -> dict[str, Any]:
        return {"set": True, "infinite": False, "number": value}

    newer = _json_job(
        job_state=["PENDING"], priority=new(5), node_count=new(2), time_limit=new(5), submit_time=new(1795435200),
        start_time=new(1795435260), cpus=new(8),
    )  # fmt: skip
    found = [records.queue_json({"jobs": [each], "meta": {}}, "x")[0] for each in (_json_job(), newer)]
    assert told(found[:1]) == told(found[1:])
    assert (found[0].gpus, found[0].limit_s, found[0].start_s - found[0].submit_s) == (8, 300.0, 60.0)
    endless = records.queue_json({"jobs": [_json_job(time_limit={"set": True, "infinite": True, "number": 0})]}, "x")
    assert endless[0].limit_s == math.inf


def test_squeue_json_takes_the_place_of_scontrol(tmp_path: Path) -> None:
    folder = write_queue(tmp_path)
    meta = {"Slurm": {"release": "22.05.8"}}
    (folder / "job.txt").write_text(json.dumps({"meta": meta, "errors": [], "jobs": [_json_job()]}))
    seen = read_folder(folder)
    assert [each.job for each in seen.jobs] == ["7"]


def test_squeue_says_it_with_the_keys_of_scontrol(tmp_path: Path) -> None:
    folder = write_queue(tmp_path)
    (folder / "job.txt").unlink()
    (folder / "squeue.txt").write_text(
        "JobId=13_[3-6%2] JobState=PENDING Reason=JobArrayTaskLimit StartTime=N/A NodeList= NumNodes=1 TimeLimit=1:00 "
        "RunTime=0:00 TresPerNode=gres:gpu:2 Partition=all UserId=ann JobName=a JobState=b\n"
        "JobId=13_2 JobState=RUNNING Reason=None NodeList=n[0-1] NumNodes=2 TimeLimit=1:00 RunTime=0:04 JobName=a\n"
    )
    waiting, running = read_folder(folder).jobs
    assert (waiting.job, waiting.tasks, waiting.throttle, waiting.reason) == ("13", 4, 2, "JobArrayTaskLimit")
    assert (running.job, list(running.held), running.ran_s) == ("13_2", ["n0", "n1"], 4.0)
    (folder / "squeue.txt").write_text("  JOBID PARTITION NAME USER ST TIME NODES NODELIST(REASON)\n")
    with pytest.raises(ForetraceError, match="says nothing of jobs; add the output of scontrol show job"):
        read_folder(folder)


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        ("job.txt", "JobId=1 ", "JobId=one ", "it has no number"),
        ("job.txt", "JobState=PENDING", "JobState=DREAMING", "its state is 'DREAMING', which Slurm does not document"),
        ("job.txt", "TimeLimit=00:10:00", "TimeLimit=soon", "is no duration"),
        ("job.txt", "NumNodes=1", "NumNodes=many", "is no number"),
        ("job.txt", "SubmitTime=2026-11-23T12:00:00", "SubmitTime=yesterday", "Invalid isoformat"),
        ("job.txt", "JobState=PENDING", "State=PENDING", "JobState"),
        ("node.txt", "NodeName=n0", "Nodename=n0", "says nothing of nodes"),
        ("partition.txt", "Nodes=n[0-1]", "Nodes=n[0-1", "brackets do not match"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(tmp_path: Path, file: str, old: str, new: str, says: str) -> None:
    folder = write_queue(tmp_path, job(1))
    path = folder / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ForetraceError) as told:
        read_folder(folder)
    assert says in str(told.value) and "\n" not in str(told.value)


def test_two_outputs_of_jobs_are_refused(tmp_path: Path) -> None:
    folder = write_queue(tmp_path, job(1))
    (folder / "again.txt").write_text(job(2))
    with pytest.raises(ForetraceError, match="a second output of scontrol show job"):
        read_folder(folder)


def test_unknown_flags_of_nodes_keep_them_usable_and_known_ones_do_not() -> None:
    def usable(state: str) -> bool:
        return SlurmNode(name="n", gpus=1, cpus=1, state=state).usable

    assert usable("IDLE") and usable("MIXED+CLOUD") and usable("ALLOCATED+NEWFLAG")
    assert not any(usable(each) for each in ("IDLE+DRAIN", "DOWN*", "IDLE*", "DOWN+NOT_RESPONDING", "MIXED+MAINT"))


def test_commands_that_fail_or_are_missing_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ForetraceError, match="there is no scontrol here"):
        ask_slurm()

    def silent(command: tuple[str, ...]) -> str:
        return "NodeName=n0 CPUTot=1 State=IDLE" if "node" in command else ""

    with pytest.raises(ForetraceError, match="neither scontrol show job nor squeue answers"):
        ask_slurm(silent)


def test_what_was_saved_says_the_same(tmp_path: Path) -> None:
    texts = {name: (EXAMPLE / name).read_text() for name in ("config.txt", "partition.txt", "node.txt", "job.txt")}

    def run(command: tuple[str, ...]) -> str:
        return texts.get(f"{command[-1]}.txt", "")

    ask_slurm(run, save=tmp_path / "kept")
    seen, again = read_folder(EXAMPLE), read_folder(tmp_path / "kept")
    assert isinstance(again, Snapshot) and told(again.jobs) == told(seen.jobs) and again.nodes == seen.nodes
