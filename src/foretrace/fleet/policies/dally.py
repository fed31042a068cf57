"""Dally (arXiv 2401.16492): delay scheduling over levels of consolidation, network-sensitive order, leases.

Only waiting jobs bid, a timer that runs out wakes the scheduler, and a lease that is won again on the same GPUs costs
nothing; the published simulator does otherwise in all three (docs/fleet.md).
"""

from __future__ import annotations

from foretrace.fleet.policy import OrderRule, PlaceRule, Policy


def _dally(
    name: str, order: OrderRule, place: PlaceRule, lease_s: float, waits_s: tuple[float, ...], history_leases: int
) -> Policy:
    return Policy(
        name=name,
        order_rule=order,
        place_rule=place,
        preempt_rule="lease",
        lease_s=lease_s,
        waits_s=waits_s,
        history_leases=history_leases,
    )


def dally(*, lease_s: float = 3600.0, history_leases: int = 24) -> Policy:
    """Least work done for the time it ran first (Nw: new jobs and those that the network slows most); wider than a
    machine only after a timer, which is tuned from how long jobs of that size waited in the last `history_leases`.
    """
    return _dally("dally", "network", "auto", lease_s, (), history_leases)


def dally_manual(*, lease_s: float = 3600.0, waits_s: tuple[float, ...] = ()) -> Policy:
    """`dally` with stated timers: seconds before a rack will do, before several racks will (1 and 2 leases)."""
    return _dally("dally-manual", "network", "delay", lease_s, waits_s or (lease_s, 2 * lease_s), 24)


def dally_las(*, lease_s: float = 3600.0, history_leases: int = 24) -> Policy:
    """The same placement with the order of least attained service, which is kinder to the mean completion time."""
    return _dally("dally-las", "service", "auto", lease_s, (), history_leases)


def dally_rr(*, lease_s: float = 3600.0, history_leases: int = 24) -> Policy:
    """The same placement in turns (who gained or lost GPUs longest ago), without a look at the network."""
    return _dally("dally-rr", "last", "auto", lease_s, (), history_leases)
