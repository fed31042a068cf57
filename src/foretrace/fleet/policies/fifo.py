"""First come, first served."""

from __future__ import annotations

from foretrace.fleet.policies.slurm import slurm_policy
from foretrace.fleet.policy import Policy


def fifo(*, consolidate: bool = True, slurm: str = "", switches: str = "", exclusive: bool = False) -> Policy:
    """In order of submission; nobody passes a job that does not fit (head-of-line blocking).

    consolidate: a job waits for the tightest unit that can ever hold it; else it spreads over whatever is free.
    slurm: as Slurm's sched/builtin decides, with these SchedulerParameters ("yes": its defaults); switches, exclusive:
    what its jobs ask for, as sbatch has it (`switches=1@5:00`).
    """
    if slurm:
        return slurm_policy("fifo", slurm, switches=switches, exclusive=exclusive)
    return Policy(name="fifo", admit_rule="block", place_rule="strict" if consolidate else "greedy")


def fifo_skip(*, consolidate: bool = True) -> Policy:
    """In order of submission; whoever fits may pass those that do not (fit first)."""
    return Policy(name="fifo-skip", admit_rule="skip", place_rule="strict" if consolidate else "greedy")
