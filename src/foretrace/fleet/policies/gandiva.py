"""Gandiva (Xiao et al., OSDI 2018): time-slicing, and migration to tighter places; no notion of fairness."""

from __future__ import annotations

from foretrace.fleet.policy import Policy


def gandiva(*, slice_s: float = 60.0) -> Policy:
    """Who lost its turn longest ago is next; turns of `slice_s` while others wait; a job starts wherever GPUs are free
    and moves to a tighter unit once one is free and it ends sooner there. Packing two jobs on a GPU is apart: it needs
    a table of what pairs do to each other (`packing`).
    """
    return Policy(
        name="gandiva", order_rule="last", preempt_rule="lease", lease_s=slice_s, place_rule="greedy", migrate=True
    )


def gandiva_like() -> Policy:
    """The comparator of the Dally study: in order of submission, anywhere, with migration, without time-slicing."""
    return Policy(name="gandiva-like", place_rule="greedy", migrate=True)
