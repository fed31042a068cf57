"""What is played: workloads of 200 jobs and more, each on a private Slurm of 64 nodes × 4 GPUs in four racks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from foretrace.fleet import formats
from foretrace.fleet.rig.against import synthetic
from foretrace.fleet.rig.cluster import SlurmSetup
from foretrace.fleet.workload import SECOND, Workload
from reproductions import shared_data

SETUP = SlurmSetup()
QUICK = "bf_interval=5,bf_resolution=1,batch_sched_delay=0,sched_interval=5"
JOBS, RUN_S, LONGEST_S = 200, 40.0, 240.0


class Cell(NamedTuple):
    """One workload under one policy. source: drawn with a seed, or a slice of the Philly log from that job on."""

    source: str
    seed: int
    load: float
    policy: str

    @property
    def name(self) -> str:
        """What rows call it."""
        return f"{self.source} {self.seed} load {self.load:g}"


def cells() -> Iterator[Cell]:
    """All of them, the ones that differ most first."""
    for at, load in enumerate((1.0, 0.8, 1.2, 0.5)):
        yield Cell("drawn", 20 + at, load, f"backfill slurm={QUICK}")
        yield Cell("drawn", 30 + at, load, "backfill slurm=yes")
        yield Cell("drawn", 10 + at, load, f"fifo slurm={QUICK}")
        yield Cell("drawn", 40 + at, load, f"backfill slurm={QUICK} switches=1@1:00")
        yield Cell("philly", 1000 + 20_000 * at, 0.9, f"backfill slurm={QUICK}" if at % 2 else "backfill slurm=yes")
    yield Cell("drawn", 50, 0.6, f"backfill slurm={QUICK} exclusive=yes")
    yield Cell("drawn", 60, 1.0, f"priority slurm={QUICK}")
    yield Cell("drawn", 61, 0.8, "priority slurm=yes")
    yield Cell("drawn", 70, 0.8, "fifo slurm=yes")


def workload(cell: Cell) -> Workload:
    """Its jobs, on the rig's clock already."""
    if cell.source == "drawn":
        made = synthetic(f"synthetic jobs={JOBS} seed={cell.seed} load={cell.load} run-s={RUN_S}", SETUP)
    else:
        made = _slice(formats.read(str(shared_data() / "fleet" / "philly" / "philly.csv.gz")), cell)
    random = np.random.default_rng(cell.seed)
    return made.with_columns(priority=random.integers(0, 5, len(made)).astype(float))


def _slice(log: Workload, cell: Cell) -> Workload:
    """Consecutive jobs of a log, scaled to this mean run time and load; the log has no limits, so they are drawn."""
    found = log.take(np.flatnonzero(log.gpus <= SETUP.nodes * SETUP.gpus // 4)[cell.seed : cell.seed + JOBS])
    work = np.clip(found.work_s * (RUN_S / found.work_s.mean()), 1.0, LONGEST_S)
    random = np.random.default_rng(cell.seed)
    submit = (found.submit_ns - found.submit_ns[0]) / SECOND
    span = float((found.gpus * work).sum()) / (SETUP.nodes * SETUP.gpus) / cell.load
    return Workload.of(
        submit_s=submit * (span / submit[-1]), gpus=found.gpus, work_s=work, name="philly",
        estimate_s=work * random.uniform(1.1, 5.0, len(work)),
    )  # fmt: skip


def kept(made: Workload) -> dict[str, Any]:
    """A workload as it is stored with a run."""
    return {
        "submit_s": (made.submit_ns // SECOND).tolist(), "gpus": made.gpus.tolist(),
        "work_s": made.work_s.astype(int).tolist(), "limit_s": made.estimate_s.astype(int).tolist(),
        "priority": made.priority.astype(int).tolist(),
    }  # fmt: skip


def restored(said: dict[str, Any]) -> Workload:
    """A stored workload."""
    return Workload.of(
        submit_s=said["submit_s"], gpus=said["gpus"], work_s=said["work_s"], estimate_s=said["limit_s"],
        priority=said["priority"],
    )  # fmt: skip
