"""First come, first served."""

from __future__ import annotations

from foretrace.fleet.policies.slurm import slurm_policy
from foretrace.fleet.policy import Policy


def fifo(
    *, consolidate: bool = True, slurm: str = "", switches: str = "", exclusive: bool = False, drain: str = "",
    reservation: str = "",
) -> Policy:  # fmt: skip
    """In order of submission; nobody passes a job that does not fit (head-of-line blocking).

    consolidate: a job waits for the tightest unit that can ever hold it; else it spreads over whatever is free.
    slurm: as Slurm's sched/builtin decides, with these SchedulerParameters ("yes": its defaults); switches, exclusive:
    what its jobs ask for, as sbatch has it (`switches=1@5:00`). drain, reservation: nodes that take no new jobs, or
    that are reserved for maintenance, as NODES@SECONDS-SECONDS (`drain=0-3@600-1200,7@30`).
    """
    made = slurm_policy("fifo", slurm, switches=switches, exclusive=exclusive, drain=drain, reservation=reservation)
    return made or Policy(name="fifo", admit_rule="block", place_rule="strict" if consolidate else "greedy")


def fifo_skip(*, consolidate: bool = True) -> Policy:
    """In order of submission; whoever fits may pass those that do not (fit first)."""
    return Policy(name="fifo-skip", admit_rule="skip", place_rule="strict" if consolidate else "greedy")
