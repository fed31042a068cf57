"""EASY backfill (Lifka, JSSPP 1995): pass the first in line only if that does not delay it; and Slurm's own."""

from __future__ import annotations

from foretrace.fleet.policies.slurm import slurm_policy
from foretrace.fleet.policy import Policy


def backfill(
    *, consolidate: bool = True, slurm: str = "", switches: str = "", exclusive: bool = False, drain: str = "",
    reservation: str = "",
) -> Policy:  # fmt: skip
    """In order of submission; the first job that does not fit gets a reservation for when enough GPUs of a kind will be
    free by the stated run times (the true ones where none are stated), and others may start if they end before it,
    leave it enough, or cannot use that kind. The reservation counts GPUs and does not look at where they are; a job
    whose tenant holds all that it may gets none.

    slurm: as Slurm's sched/backfill decides, with these SchedulerParameters ("yes": its defaults, or
    `slurm=bf_interval=5,bf_resolution=1`); switches, exclusive: what its jobs ask for, as sbatch has it; drain,
    reservation: nodes that take no new jobs, or that are reserved for maintenance (`reservation=0-3@600-1200`).
    """
    made = slurm_policy(
        "backfill", slurm, switches=switches, exclusive=exclusive, drain=drain, reservation=reservation, backfill=True
    )
    return made or Policy(name="backfill", admit_rule="backfill", place_rule="strict" if consolidate else "greedy")
