"""A private Slurm under load: jobs submitted when their time has come, and its outputs saved at regular moments."""

from __future__ import annotations

import time
from pathlib import Path

from foretrace.errors import ForetraceError
from foretrace.files import write_text
from foretrace.fleet.live import sources
from foretrace.fleet.rig.cluster import PrivateSlurm, SlurmSetup, private
from reproductions.slurm_live.workloads import RigJob, as_sacct

SETUP = SlurmSetup(
    nodes=16, gpus=4, racks=4, lines=("DefMemPerNode=1",),
    parameters={"bf_interval": 2, "sched_interval": 2, "batch_sched_delay": 0, "bf_resolution": 1, "bf_continue": None},
)  # fmt: skip
EVERY_S = 15.0
ENDED = "completed.txt"


def gather(folder: Path, jobs: list[RigJob], past: list[RigJob]) -> None:
    """Play the jobs in real time; `folder` then holds a folder of outputs per moment, the history, and who ran when."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "history.txt", as_sacct(past))
    with private(SETUP) as slurm:
        begin, at, shown = time.time() + 1, 0, 0
        while True:
            now = time.time() - begin
            while at < len(jobs) and jobs[at].submit_s <= now:
                _submit(slurm, jobs[at], at)
                at += 1
            if now > shown * EVERY_S:
                shown += 1
                sources.ask_slurm(lambda words: slurm.run(*words), save=folder / f"at{shown:03d}")
                if at == len(jobs) and not slurm.run("squeue", "--noheader", "--states=PENDING").strip():
                    break
            time.sleep(0.1)
        write_text(folder / ENDED, slurm.completed.read_text())


def _submit(slurm: PrivateSlurm, job: RigJob, at: int) -> None:
    nodes = -(-job.gpus // slurm.setup.gpus)
    each = job.gpus // nodes
    script = f"#!/bin/sh\nexec sleep {job.run_s:g}\n"
    if each * nodes != job.gpus:
        raise ForetraceError(f"{job.gpus} GPUs cannot be spread evenly over {nodes} nodes.")
    words = (
        f"--job-name=train{at}", f"--account={job.user}", f"--nodes={nodes}", f"--ntasks-per-node={each}",
        f"--gpus-per-node={each}", f"--time={job.limit_min}", "--output=/dev/null",
    )  # fmt: skip
    slurm.run("sbatch", *words, text=script)
