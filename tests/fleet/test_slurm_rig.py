"""A private Slurm for real: jobs run on it, two do not meet, and a killed one leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.fleet.formats.slurm_cluster import expand
from foretrace.fleet.policies import parse
from foretrace.fleet.policies.slurm import SlurmPolicy
from foretrace.fleet.policies.slurm_options import NodeWindow
from foretrace.fleet.rig import against, cluster, on_ray
from foretrace.fleet.rig.cluster import SlurmSetup, private
from foretrace.fleet.rig.play import for_rig, slurm_setup
from foretrace.fleet.workload import Workload

AT_ONCE = "bf_interval=2,bf_resolution=1,batch_sched_delay=0,sched_interval=2"
needs_slurm = pytest.mark.skipif(bool(cluster.missing()), reason=f"no private Slurm here: {cluster.missing()}")


@needs_slurm
@pytest.mark.slow("real jobs in real time")
def test_jobs_run_where_and_when_they_were_predicted() -> None:
    jobs = Workload.of(submit_s=[0, 0, 0, 1, 2], gpus=[4, 4, 8, 1, 2], work_s=[4, 4, 2, 1, 1])
    told: list[float] = []
    setup = SlurmSetup(nodes=4, gpus=2, racks=2)
    found = against.against(jobs, setup, f"backfill slurm={AT_ONCE}", speedup=1.0, progress=told.append)
    (ran,) = found.ran
    assert ran.nodes[0] == (0, 1) and ran.nodes[1] == (2, 3) and ran.nodes[2] == (0, 1, 2, 3)
    assert (ran.end_s - ran.start_s >= jobs.work_s).all() and ran.start_s[2] >= 4, "the machine may be slow"
    assert found.errors.switches_equal == 1.0 and found.repeated is None and told[-1] == 1.0
    assert np.isfinite(found.simulated[0].end_s).all()


@needs_slurm
@pytest.mark.slow("two private Slurms")
def test_two_at_once_do_not_meet() -> None:
    both = Barrier(2, timeout=60)

    def one(at: int) -> tuple[str, str]:
        with private(SlurmSetup(nodes=2 + at, gpus=1, racks=1)) as slurm:
            slurm.run("sbatch", "--output=/dev/null", text="#!/bin/sh\nexec sleep 30\n")
            both.wait()
            seen = slurm.run("sinfo", "--noheader", "--format=%D").strip(), slurm.run("squeue", "--noheader")
            both.wait()
            return seen

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one, range(2)))
    assert [nodes for nodes, _ in found] == ["2", "3"] and all(queue.count("sbatch") == 1 for _, queue in found)


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name leaves room for Slurm's sockets."""
    with tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp") as name:
        yield Path(name)


@needs_slurm
def test_a_folder_in_which_no_job_could_start(tmp_path: Path) -> None:
    below = tmp_path / ("long" * 20)
    below.mkdir()
    with (
        pytest.raises(ForetraceError, match=r"private Slurm must have at most 7\d characters, got"),
        private(SlurmSetup(nodes=1, gpus=1, racks=1), under=below),
    ):
        pass
    assert not any(below.iterdir())


@pytest.mark.skipif(bool(cluster.missing(accounting=True)), reason=f"{cluster.missing(accounting=True)}")
@pytest.mark.slow("a database of its own")
def test_a_qos_is_accounted_for(short: Path) -> None:
    policy = parse("priority slurm=yes qos=high=10,low=1 weights=qos=1000")
    assert isinstance(policy, SlurmPolicy)
    with private(slurm_setup(SlurmSetup(nodes=1, gpus=1, racks=1), policy), under=short) as slurm:
        said = slurm.run("sacctmgr", "show", "qos", "-nP", "format=name,priority")
        assert {"high|10", "low|1"} <= set(said.splitlines())
    assert not any(short.iterdir()) and not owned(short)


@needs_slurm
@pytest.mark.slow("waits for what was killed")
def test_a_killed_one_leaves_nothing(short: Path) -> None:
    """Neither a process, nor a port, nor a file: also where the one who started it had no time to clean up."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from foretrace.fleet.rig.cluster import SlurmSetup, private\n"
        "with private(SlurmSetup(nodes=2, gpus=1, racks=1), under=Path(sys.argv[1])) as slurm:\n"
        "    slurm.run('sbatch', '--output=/dev/null', text='#!/bin/sh\\nexec sleep 4321\\n')\n"
        "    for _ in range(600):\n"
        "        if slurm.run('squeue', '--noheader', '--states=R').strip():\n"
        "            break\n"
        "        time.sleep(0.1)\n"
        "    print((slurm.folder / 'slurm.conf').read_text(), flush=True)\n"
        "    print('READY', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(short)], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        said = []
        for line in started.stdout:
            said.append(line)
            if line == "READY\n":
                break
        assert said[-1:] == ["READY\n"] and len(owned(short)) >= 6  # daemons, and a step of the job
        started.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20
    while time.monotonic() < end and (owned(short) or any(short.iterdir())):
        time.sleep(0.1)
    assert not owned(short) and not any(short.iterdir())
    (ports,) = [expand(word[5:]) for line in said for word in line.split() if word.startswith("Port=")]
    assert len(ports) == 2
    for port in ports:
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", int(port)))


def owned(folder: Path) -> list[int]:
    """Processes that name the folder or work in it: daemons, steps, jobs."""
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdecimal() and int(each.name) != os.getpid():
            try:
                if str(folder) in (each / "cmdline").read_text() + str((each / "cwd").readlink()):
                    found.append(int(each.name))
            except OSError:
                continue
    return found


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "PROGRAMS", ("surely-not-slurm",))
    with (
        pytest.raises(ForetraceError, match="apt-get install slurmctld slurmd slurm-client munge"),
        private(SlurmSetup()),
    ):
        pass


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"nodes": 513}, {"gpus": 0}, {"racks": 3}])
def test_a_cluster_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ForetraceError, match="must"):
        SlurmSetup(**wrong).validate()


def test_jobs_on_the_clock_of_the_rig() -> None:
    jobs = Workload.of(
        submit_s=[100, 1300, 1400], gpus=[1, 5, 8], work_s=[10, 6000, 3000], estimate_s=[60, 9000, np.nan]
    )
    made = for_rig(jobs, SlurmSetup(nodes=8, gpus=4), 100.0)
    assert made.submit_ns.tolist() == [0, 12_000_000_000, 13_000_000_000] and made.work_s.tolist() == [1, 60, 30]
    assert made.gpus.tolist() == [1, 6, 8], "three on each of two nodes"
    assert made.estimate_s.tolist() == [60, 120, 60]
    with pytest.raises(ForetraceError, match="needs 2 nodes of 4 GPUs"):
        for_rig(jobs, SlurmSetup(nodes=1, gpus=4, racks=1), 100.0)
    with pytest.raises(ForetraceError, match="larger speedup"):
        for_rig(jobs, SlurmSetup(), 0.0001)
    with pytest.raises(ForetraceError, match="above 0"):
        for_rig(jobs, SlurmSetup(), 0.0)


def test_what_the_command_takes_is_read() -> None:
    setup = SlurmSetup(nodes=8, racks=2)
    made = against.synthetic("synthetic jobs=30 seed=3 load=0.5 run-s=100", setup)
    assert len(made) == 30 and made.gpus.max() <= 8 and (made.estimate_s > made.work_s).all()
    assert (against.synthetic("synthetic jobs=30 seed=3 load=0.5 run-s=100", setup).work_s == made.work_s).all()
    for wrong in ("synthetic jobs=0", "synthetic nodes=3", "synthetic jobs=x"):
        with pytest.raises(ForetraceError, match="`trace`"):
            against.synthetic(wrong, setup)
    with pytest.raises(ForetraceError, match="`fail` must name nodes from 0 to 7, got 9"):
        against.against(made, setup, "fifo slurm=yes", speedup=1.0, failures=[NodeWindow(9, 9, 3.0)])
    with pytest.raises(ForetraceError, match="must decide as the engine does"):
        against.against(made, setup, "las", speedup=1.0)


@pytest.mark.skipif(bool(on_ray.missing()), reason=on_ray.missing())
@pytest.mark.slow("a Ray of its own")
def test_jobs_are_placement_groups_on_a_private_ray() -> None:
    """The third waits for the first two, the last one passes it; nothing is left of the Ray afterwards."""
    jobs = Workload.of(submit_s=[0, 0, 1, 2], gpus=[2, 1, 4, 1], work_s=[4, 4, 1, 1])
    setup = SlurmSetup(nodes=2, gpus=2, racks=1)
    before = set(Path(tempfile.gettempdir()).glob("ft-ray-*"))
    found = against.against(jobs, setup, "fifo-skip", speedup=1.0, on="ray")
    (ran,), (made,) = found.ran, found.simulated
    assert ran.start_s == pytest.approx(made.start_s, abs=1.5) and [len(each) for each in ran.nodes] == [1, 1, 2, 1]
    assert made.start_s.tolist() == pytest.approx([0, 0, 4.1, 2], abs=0.2) and found.errors.order_equal == 1.0
    assert set(Path(tempfile.gettempdir()).glob("ft-ray-*")) <= before


def test_what_a_private_ray_cannot_be_is_said() -> None:
    jobs, large = Workload.of(submit_s=[0], gpus=[1], work_s=[1]), SlurmSetup(nodes=64)
    for policy, setup, said in (
        ("backfill slurm=yes", large, "fifo-skip for Ray"), ("fifo-skip", large, "1 to 16 nodes and no racks"),
    ):  # fmt: skip
        with pytest.raises(ForetraceError, match=said):
            against.against(jobs, setup, policy, speedup=1.0, on="ray")
