"""Dally's timers on a real Slurm: jobs know their nodes, kept runs are simulated again, the page is written."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from foretrace.fleet.rig.cluster import missing, private
from foretrace.fleet.rig.play import play, slurm_setup
from reproductions.__main__ import main
from reproductions.slurm.runs import stored
from reproductions.slurm_dally import protocol, study
from reproductions.slurm_dally.study import Level


@pytest.mark.parametrize(("nodes", "racks"), [
    ("n003", "1"), ("n[000-003]", "4"), ("n[002-005]", "2+2"), ("n[000,005-006,009]", "2+1+1"), ("n[007-008]", "1+1"),
])  # fmt: skip
def test_a_job_sleeps_as_long_as_the_simulator_says_of_its_nodes(nodes: str, racks: str) -> None:
    work = study.jobs(0.6, 0)
    wanted = 4 * sum(int(each) for each in racks.split("+"))
    job = int(np.flatnonzero(work.gpus == wanted)[0])
    script = study.script(work, job).replace("exec sleep", "exec echo")
    said = subprocess.run(["sh"], input=script, env={"SLURM_JOB_NODELIST": nodes, "PATH": "/usr/bin:/bin"}, text=True,
                          capture_output=True, check=True)  # fmt: skip
    assert float(said.stdout) == pytest.approx(work.work_s[job] / study.speeds(work, job)[racks], abs=0.001)


def test_the_table_of_speeds_is_the_simulators() -> None:
    """One job at a time, so that it gets one rack: it takes what the table says of that."""
    work = study.jobs(0.1, 0)
    alone = work.with_columns(submit_ns=np.arange(len(work)) * 10**12)
    made = study.simulated(alone, "spread")
    expected = [each / study.speeds(work, job)[str(-(-int(work.gpus[job]) // 4))]
                for job, each in enumerate(work.work_s.tolist())]  # fmt: skip
    assert made.spread == 0 and np.mean(expected) < made.jct_s < np.mean(expected) + 7, "a pass, and a launch"


def test_what_is_played_is_chosen_by_the_simulator() -> None:
    found = [Level(0.2, np.array([[10.0, 10.0, 10.0]] * 2)), Level(0.4, np.array([[10.0, 10.0, 10.05]] * 2)),
             Level(0.8, np.array([[10.0, 12.0, 15.0], [10.0, 10.0, 18.0]]))]  # fmt: skip
    assert study.chosen(found, (7, 8)) == {"largest": (0.8, 8), "none": (0.4, 8), "second": (0.8, 7)}
    (level,) = study.levels((0.2,), (0,))
    assert level.gaps.max() < 0.01, "nobody waits"


def test_kept_runs_are_simulated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "_PHASES", 2)
    found = protocol.rows([each for each in stored(protocol.RUNS) if each["load"] < 0.5])
    assert [row.arm for row in found] == list(study.ARMS)
    for row in found:
        assert len(row.ran) >= 3 and row.errors.switches_equal == 1.0 and row.errors.jct_error < 0.1
    trials = protocol.compared(found)
    assert len(trials) == len(protocol.PAIRS) and all(abs(each[2].predicted.value - 1) < 0.01 for each in trials)
    assert len(protocol.ledger(found)) == 6
    assert "strict" in protocol._section(found)


def test_without_runs_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm_dally", "--runs", str(tmp_path / "none.jsonl.gz")]) == 2
    assert "play some with --run" in capsys.readouterr().err


@pytest.mark.skipif(bool(missing()), reason=f"no private Slurm here: {missing()}")
@pytest.mark.slow("real jobs in real time")
def test_jobs_read_their_nodes_on_slurm() -> None:
    work = study.jobs(0.1, 0).take(np.arange(4))
    work = work.with_columns(work_s=np.full(4, 2.0), submit_ns=np.zeros(4, np.int64))
    policy = study.policy("spread")
    with private(slurm_setup(study.SETUP, policy)) as slurm:
        ran = play(slurm, work, policy, script=study.script)
    assert (ran.end_s - ran.start_s >= 2).all()
