"""EASY backfill (Lifka, JSSPP 1995): pass the first in line only if that does not delay it."""

from __future__ import annotations

from foretrace.fleet.policy import Policy


def backfill(*, consolidate: bool = True) -> Policy:
    """In order of submission; the first job that does not fit gets a reservation for when enough GPUs will be free by
    the stated run times (the true ones where none are stated), and others may start if they end before it or leave it
    enough. The reservation counts GPUs and does not look at where they are.
    """
    return Policy(name="backfill", admit_rule="backfill", place_rule="strict" if consolidate else "greedy")
