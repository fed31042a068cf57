"""What an answer says of several ranks: part of `views.ShowView`, and of `foretrace align`. Times are seconds."""

from __future__ import annotations

import msgspec


class CollectiveRow(msgspec.Struct, frozen=True, kw_only=True):
    """One collective: means over its ranks."""

    kind: str
    group: str
    bytes: int | None
    ranks: int
    wait_s_mean: float
    transfer_s_mean: float
    last_arriver: int
    spread_s: float  # from the first arrival to the last


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank spends in collectives per step."""

    rank: int
    wait_s: float
    transfer_s: float
    last: int  # collectives at which it arrives last
    caused_s: float  # waiting of the others in those, per step


class StragglerView(msgspec.Struct, frozen=True, kw_only=True):
    """The rank that makes the others wait most, and why it is late, at the collective that shows it best."""

    rank: int
    last: int
    caused_s: float
    collective: int  # place in `each`
    than: int  # the rank in the middle of the others, with which it is compared
    by_s: float  # so much later than that one
    cause: str
    more_s: float
    name: str  # task that it spends most of that in, "" if none
    reason: str


class CollectivesView(msgspec.Struct, frozen=True, kw_only=True):
    """Collectives that tie the ranks of a recording together.

    `wait_s_mean` and `transfer_s_mean` are means over the ranks of what a step holds of each.
    """

    matched: int
    unmatched: tuple[str, ...]
    missing: tuple[str, ...]
    wait_s_mean: float
    transfer_s_mean: float
    last_arriver: tuple[int, ...]  # rank, per collective
    straggler: StragglerView | None
    saved_if_free_s: float  # per step, if transfers took no time
    saved_if_together_s: float  # of the first step, if all ranks entered the recording together
    by_rank: tuple[RankRow, ...]
    each: tuple[CollectiveRow, ...]


class ClockView(msgspec.Struct, frozen=True, kw_only=True):
    """How far the clock of every rank is ahead of that of the first one; null where nothing tells."""

    offsets_s: dict[str, float | None]
    uncertainty_s: float | None
    drift: dict[str, float]  # seconds per second, only ranks whose clock drifts
