"""Workers that die, hang or fail end the others, with a sentence; nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from foretrace.errors import ForetraceError, NotApplicableError
from foretrace.experiment.links import netns
from foretrace.experiment.links.arms import buckets_of, make, run_steps
from foretrace.experiment.messages import Make, RunSteps, Setup, Worker
from foretrace.experiment.processes import AskedCall, WorkerError, Workers, alone

pytest.importorskip("torch")

EMULATED = Setup(work="4x64kb/1ms", techniques=("data-parallel workers=2 network=50mbit bucket_mb=0.1",))

STARTS_A_PAIR = """
import time
from foretrace.hardware.cluster import parse_link
from foretrace.experiment.links import netns
from foretrace.experiment.links.arms import buckets_of, make, run_steps
with netns.made(2, parse_link("100mbit")) as net, netns.running(net) as workers:
    print(*(each.pid for each in workers.processes), flush=True)
    time.sleep(600)
"""


def test_arms_run_and_show_their_buckets(pair: Workers) -> None:
    pair.ask(make, Make(name="a", setup=EMULATED), "making")
    blocks = pair.ask(run_steps, RunSteps(name="a", discarded=2, steps=3, together=True), "stepping")
    assert all(block.wall_s >= 4 * 0.001 and block.loss is not None for block in blocks)
    found = pair.ask(buckets_of, "a", "asking")
    assert {each.world for each in found} == {2}
    assert sum(found[0].rebuilt) == 4 * 64 * 1024
    assert found[0].rebuilt == found[1].rebuilt == (128 * 1024,) * 2


def test_a_killed_worker_is_named(pair: Workers) -> None:
    pair.ask(make, Make(name="a", setup=EMULATED), "making")
    killer = threading.Timer(0.5, pair.processes[1].kill)
    killer.start()
    with pytest.raises(ForetraceError, match="worker 1 was ended by SIGKILL while running forever"):
        pair.ask(run_steps, RunSteps(name="a", discarded=0, steps=1_000_000, together=True), "running forever")
    assert all(each.poll() is not None for each in pair.processes)
    with pytest.raises(ForetraceError, match="ended"):  # and asking again does not hang either
        pair.ask(run_steps, RunSteps(name="a", discarded=0, steps=1, together=True), "asking the dead")


def test_a_silent_worker_is_named() -> None:
    with alone() as worker:
        os.kill(worker.processes[0].pid, signal.SIGSTOP)
        with pytest.raises(ForetraceError, match="worker 0 gave no answer within 0 s while waiting"):
            worker.ask_each([AskedCall(buckets_of, "a")], "waiting", patience_s=0.2)
        assert worker.processes[0].poll() is not None


def keep(number: int, worker: Worker) -> tuple[int, int]:
    """What was kept before, and the cores of this process."""
    before, worker.kept["number"] = worker.kept.get("number", 0), number
    return before, len(os.sched_getaffinity(0))


def test_what_a_worker_keeps_and_the_cores_that_it_is_on() -> None:
    core = min(os.sched_getaffinity(0))
    with alone(2, cores=[core]) as workers:
        calls = [AskedCall(keep, 3), AskedCall(keep, 5)]
        assert workers.ask_each(calls, "keeping", patience_s=60.0) == [(0, 1), (0, 1)]
        workers.submit(calls, "keeping")
        assert workers.collect(calls, "keeping") == [(3, 1), (5, 1)]
        workers.leave()
        assert [each.returncode for each in workers.processes] == [0, 0]


def test_a_mistake_is_a_sentence_and_a_bug_a_traceback() -> None:
    with alone() as worker, pytest.raises(NotApplicableError, match="is no emulated training"):
        worker.ask(make, Make(name="a", setup=Setup(work="12x")), "making")
    with alone() as worker, pytest.raises(WorkerError, match="KeyError"):
        worker.ask(run_steps, RunSteps(name="never made", discarded=0, steps=1, together=True), "stepping")


def test_workers_end_with_the_process_that_started_them(able: netns.Capability) -> None:
    parent = subprocess.Popen([sys.executable, "-c", STARTS_A_PAIR], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    end = time.monotonic() + 20
    while any(_runs(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in pids)
    assert sum(f"-{parent.pid}-" in name for name in netns.clean()) == 3


def _runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
