"""Themis (Mahajan et al., NSDI 2020): finish-time fairness by leases."""

from __future__ import annotations

from foretrace.errors import ForetraceError
from foretrace.fleet.policy import Policy


def themis(*, lease_s: float = 600.0, fairness: float = 0.8, consolidate: bool = False) -> Policy:
    """GPUs whose lease ended go to the (1 − `fairness`) part of the waiting jobs with the worst ratio of shared to
    ideal run time (elapsed + remaining over work), larger demands among them first; what they leave, to the others.

    Differently from the paper: no auction with hidden payments; jobs are gangs, so a bid is all or nothing.
    """
    if not 0 <= fairness <= 1:
        raise ForetraceError(f"policy 'themis': fairness must be 0 to 1, got {fairness:g}; 0.8 is the authors'.")
    return Policy(
        name="themis",
        order_rule="fairness",
        preempt_rule="lease",
        lease_s=lease_s,
        share=max(1.0 - fairness, 1e-6),
        place_rule="strict" if consolidate else "greedy",
    )
