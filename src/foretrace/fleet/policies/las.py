"""Least attained service: who has had least comes first, so that short jobs pass without anybody knowing run times."""

from __future__ import annotations

from foretrace.fleet.policy import Policy


def las(*, lease_s: float = 3600.0, consolidate: bool = True) -> Policy:
    """By GPU-seconds had so far, least first; GPUs are held for a lease and bid for again (2D-LAS with leases)."""
    return Policy(
        name="las",
        order_rule="service",
        preempt_rule="lease",
        lease_s=lease_s,
        place_rule="strict" if consolidate else "greedy",
    )
