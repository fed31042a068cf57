"""`foretrace align` as an answer: how far the clocks of the ranks are apart."""

from __future__ import annotations

from collections.abc import Iterator

from foretrace.graph.alignment import ClockOffsets
from foretrace.graph.matching import Matching
from foretrace.report.blocks import Block, Column, Headline, notes, table
from foretrace.report.ranks import clock_view
from foretrace.report.units import count, seconds
from foretrace.report.views import Result, taken


class AlignView(Result, frozen=True, kw_only=True):
    """`foretrace align`: how far the clock of every rank is ahead of that of the first one."""

    command: str = "align"
    offsets_s: dict[str, float | None]  # by rank; null where no collective ties it to the first
    uncertainty_s: float | None  # the largest standard error
    drift: dict[str, float]  # seconds per second, only ranks whose clock drifts
    matched: int  # collectives that all recorded ranks of their group share
    unmatched: tuple[str, ...]
    notes: tuple[str, ...]

    def shown(self, top: int) -> Iterator[Block]:
        ranks = len(self.offsets_s)
        known = [offset for offset in self.offsets_s.values() if offset is not None]
        unsure = "" if self.uncertainty_s is None else f", known to ±{seconds(self.uncertainty_s)} (one standard error)"
        if len(known) < 2:
            yield Headline(f"No collective ties the {ranks} ranks together, so their clocks cannot be compared.")
        else:
            yield Headline(
                f"The clocks of {count(len(known))} of {count(ranks)} ranks lie within "
                f"{seconds(max(known) - min(known))}{unsure}, by {count(self.matched)} collectives."
            )
        rows = []
        for rank, offset in self.offsets_s.items():
            told = "not known: no collective ties it to the others" if offset is None else seconds(offset)
            drift = f", drifting {self.drift[rank] * 1e6:.3g} µs per second" if rank in self.drift else ""
            rows.append((rank, f"{told}{drift}"))
        yield table([Column("rank", right=True), f"ahead of rank {next(iter(self.offsets_s))}"], rows)
        yield from notes(self.unmatched)


def align(found: Matching, clock: ClockOffsets) -> AlignView:
    """Return what the collectives of the ranks tell of their clocks."""
    offsets = [o if known else None for o, known in zip(clock.offset_ns.tolist(), clock.known.tolist(), strict=True)]
    told = clock_view(clock.ranks, offsets, clock.drift.tolist(), clock.worst_ns)
    return taken(AlignView, told, found, unmatched=found.unmatched(), notes=(*found.missing, *clock.notes))
