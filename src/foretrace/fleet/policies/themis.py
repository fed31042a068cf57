"""Themis (Mahajan et al., NSDI 2020): finish-time fairness by leases."""

from __future__ import annotations

from foretrace.fleet.policy import Policy


def themis(*, lease_s: float = 600.0, fairness: float = 0.8, consolidate: bool = False) -> Policy:
    """GPUs whose lease ended go to the (1 − `fairness`) part of the waiting jobs with the worst ratio of shared to
    ideal run time (elapsed + remaining over work), larger demands among them first; what they leave, to the others.

    Differently from the paper: no auction with hidden payments; jobs are gangs, so a bid is all or nothing.
    """
    share = max(1.0 - fairness, 1e-6)
    return Policy(
        name="themis",
        order_rule="fairness",
        preempt_rule="lease",
        lease_s=lease_s,
        share=min(share, 1.0),
        place_rule="strict" if consolidate else "greedy",
    )
