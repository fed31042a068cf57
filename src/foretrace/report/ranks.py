"""Several ranks: who waits for whom, how far clocks are apart (`foretrace align`), and more of them (`scale`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from foretrace.experiment.job import Assumed
from foretrace.graph.alignment import ClockOffsets
from foretrace.graph.edit import scale as scaled
from foretrace.graph.matching import Matching
from foretrace.graph.taskgraph import TaskGraph, TaskKind
from foretrace.report import shared
from foretrace.report.blocks import About, Block, Column, Headline, Line, listing, notes, table
from foretrace.report.names import command, short_name
from foretrace.report.shared import assumption
from foretrace.report.units import MINUS, between, change, count, digits, in_unit, seconds, share, things, unit_for
from foretrace.report.views import Report, Result, taken
from foretrace.simulate import ranks
from foretrace.simulate.breakdown import Breakdown, over_ranks
from foretrace.simulate.folding import RankClass, Scaling
from foretrace.simulate.timeline import Timeline, simulate

BALANCED = 0.02  # waiting below this share of the step is not what holds it back


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
    by_rank: tuple[ranks.RankShare, ...]
    each: tuple[CollectiveRow, ...]


class ClockView(msgspec.Struct, frozen=True, kw_only=True):
    """How far the clock of every rank is ahead of that of the first one; null where nothing tells."""

    offsets_s: dict[str, float | None]
    uncertainty_s: float | None
    drift: dict[str, float]  # seconds per second, only ranks whose clock drifts


def collectives(timeline: Timeline) -> CollectivesView | None:
    """Return what ties the ranks of a graph together; None for one rank that nobody compared with others."""
    graph = timeline.graph
    said = graph.info.collectives
    if len(graph.ranks) < 2 and "matched" not in said:
        return None
    found = ranks.parts(timeline)
    rows = ranks.shares(timeline, found)
    late = ranks.straggler(timeline, found)
    transfers = graph.kind == TaskKind.COLLECTIVE
    free = simulate(scaled(graph, transfers, 0.0)) if transfers.any() else timeline
    together = simulate(ranks.entering_together(graph))
    return CollectivesView(
        matched=int(said.get("matched", found.count)), unmatched=tuple(said.get("unmatched", ())),
        missing=tuple(said.get("missing", ())), wait_s_mean=float(np.mean([row.wait_s for row in rows])),
        transfer_s_mean=float(np.mean([row.transfer_s for row in rows])),
        last_arriver=tuple(found.rank[found.last_arriver].tolist()), straggler=_straggler(*late) if late else None,
        saved_if_free_s=timeline.step_time_s - free.step_time_s,
        saved_if_together_s=float(timeline.step_times_ns[0] - together.step_times_ns[0]) / 1e9, by_rank=rows,
        each=_each(graph, found, said.get("what", ())),
    )  # fmt: skip


def _straggler(row: ranks.RankShare, why: ranks.Lateness) -> StragglerView:
    reason = why.sentence(seconds(why.more_s), seconds(why.name_more_s), short_name(why.name, 40))
    return taken(StragglerView, row, why, cause=str(why.cause), reason=reason)


def _each(graph: TaskGraph, found: ranks.Parts, what: Sequence[Sequence[Any]]) -> tuple[CollectiveRow, ...]:
    rows = []
    told = len(what) == found.count
    for i in range(found.count):
        part = slice(int(found.first[i]), int(found.first[i + 1]))
        task = int(found.transfer[part][0])
        kind, group = what[i][:2] if told else (short_name(graph.names[graph.name[task]]), "")
        nbytes = int(graph.nbytes[found.transfer[part]].max())
        rows.append(
            CollectiveRow(
                kind=kind,
                group=group,
                bytes=nbytes if nbytes >= 0 else None,
                ranks=part.stop - part.start,
                wait_s_mean=float(found.wait_ns[part].mean()) / 1e9,
                transfer_s_mean=float(found.transfer_ns[part].mean()) / 1e9,
                last_arriver=int(found.rank[found.last_arriver[i]]),
                spread_s=float(np.ptp(found.arrived[part])) / 1e9,
            )
        )
    return tuple(rows)


def clock(graph: TaskGraph) -> ClockView | None:
    """Return the clocks of the ranks that a graph was joined of; None for the graph of one rank."""
    said = graph.info.collectives
    if "offset_ns" not in said:
        return None
    return clock_view(said["ranks"], said["offset_ns"], said["drift"], said["uncertainty_ns"])


def clock_view(
    numbers: Sequence[int], offsets: Sequence[float | None], drift: Sequence[float], worst: float | None
) -> ClockView:
    """Return how far clocks are apart, of ranks by number; offsets and the largest standard error (`worst`) in ns."""
    pairs = zip(numbers, offsets, strict=True)
    return ClockView(
        offsets_s={str(rank): None if offset is None else round(offset, 1) / 1e9 for rank, offset in pairs},
        uncertainty_s=None if worst is None else worst / 1e9,
        drift={str(rank): each for rank, each in zip(numbers, drift, strict=True) if each},
    )


def breakdown(timeline: Timeline) -> Breakdown:
    """Return where the steps go, mean over the ranks; of the only rank where there is one."""
    return over_ranks(timeline.graph, timeline.start, timeline.end)


def next_command(view: CollectivesView, step_s: float, path: str) -> str:
    """Return the command that looks into the straggler; "" where nobody holds the others up."""
    late = view.straggler
    if not path or late is None or view.wait_s_mean < BALANCED * step_s:
        return ""
    return f"foretrace blame {path} --rank {late.rank}"


def headline(view: CollectivesView, step_s: float, *, every: bool, all_there: bool) -> str:
    """Return who waits for whom, the first sentence about several ranks; `all_there`: every rank was recorded."""
    waits, net, step = seconds(view.wait_s_mean), seconds(view.transfer_s_mean), seconds(step_s)
    per = f"per step of {step}" if every else f"in the step of {step}"
    lacking = "" if all_there else "; ranks are missing, and waiting for them counts as transfer"
    late = view.straggler
    if late is None or view.wait_s_mean < BALANCED * step_s:
        return f"The ranks keep pace: {waits} of waiting for each other and {net} of transfer {per}{lacking}."
    times = f"at {count(late.last)} of {count(len(view.last_arriver))} collectives"
    first = (
        f"The ranks wait for each other: {waits} in collectives {per}, and {net} of transfer"
        if view.wait_s_mean > view.transfer_s_mean
        else f"The ranks communicate: {net} of transfer and {waits} of waiting for each other {per}"
    )
    return f"{first}; rank {late.rank} arrives last {times}: {late.reason}{lacking}."


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


SHOWN_ASSUMPTIONS = 4


class PerStepView(msgspec.Struct, frozen=True, kw_only=True):
    """Mean over the ranks of what one of them spends per step, seconds."""

    recorded: float
    predicted: float


class PerRankView(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per predicted rank; seconds per step."""

    recorded_rank: tuple[int, ...]
    step_s: tuple[float | None, ...]
    wait_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    last_share: tuple[float, ...]


class ScaleView(Report, frozen=True, kw_only=True):
    """`foretrace scale`: a run of many ranks predicted from a few recorded ones."""

    command: str = "scale"
    source: str
    ranks: int
    recorded_ranks: tuple[int, ...]
    world_size: int  # of the recorded job
    steps: int  # recorded by all ranks
    recorded_s: float = msgspec.field(name="recorded_step_s")
    folded_s: float = msgspec.field(name="folded_step_s")  # with the transfers of so many ranks, none of which varies
    predicted_s: float = msgspec.field(name="predicted_step_s")
    interval_s: tuple[float, float]
    level: float = msgspec.field(name="interval_level")
    noise: str
    samples: int
    wait_s: PerStepView
    transfer_s: PerStepView
    growing: int  # collectives among all ranks
    kept: int  # collectives among some of them
    network: str  # as given; "" without
    transfer_ratio: float | None  # recorded over expected transfer time; null where it cannot be known
    transfers_from: str  # "recording": scaled by the network; "network": its own times
    classes: tuple[RankClass, ...]
    per_rank: PerRankView
    assumptions: tuple[Assumed, ...]

    def shown(self, top: int) -> Iterator[Block]:
        unit = unit_for(self.predicted_s)
        yield About(
            (self.source, f"{len(self.recorded_ranks)} of {count(self.world_size)} ranks", things(self.steps, "step"))
        )
        rows = [
            ("recorded, from entry to last end", in_unit(self.recorded_s, unit)),
            (f"transfers among {count(self.ranks)} ranks", in_unit(self.folded_s, unit)),
            *([("the last of more ranks that vary", in_unit(self.predicted_s, unit))] if self.samples else []),
            (f"{share(self.level)} interval", between(*self.interval_s, unit)),
        ]
        yield table(["step", Column(unit.name, right=True)], rows)
        yield listing(
            sorted(self.classes, key=lambda each: (-each.last_share, each.recorded_rank)),
            (lambda each: f"rank {each.recorded_rank}", "copies of"), ("copies", "ranks", "count"),
            ("step_s", "step", "seconds"), ("wait_s", "waits", "seconds"), ("transfer_s", "transfers", "seconds"),
            ("last_share", "last to arrive", "share"), top=top, how="--top",
        )  # fmt: skip
        if self.samples:
            runs = f"{count(self.samples)} runs of {count(self.ranks)} ranks sampled"
            yield Line(f"{self.noise}; {runs}", label="noise")
        yield from notes(map(shared.assumption_text, self.assumptions[:SHOWN_ASSUMPTIONS]), "assumed")


def scale(found: Scaling, *, path: str, network: str = "") -> ScaleView:
    """Return the answer to a prediction of many ranks."""
    folded = found.folded
    graph, transfers = folded.graph, folded.transfers
    notes = list(graph.info.notes)
    if graph.info.recording.get("overhead"):
        notes.append("the cost of recording is in these times.")
    return taken(
        ScaleView, found, folded, graph.info, headline=_scale_headline(found), source=path,
        interval_s=(found.low_s, found.high_s),
        wait_s=PerStepView(recorded=found.recorded_wait_s, predicted=float(found.wait_s.mean())),
        transfer_s=PerStepView(recorded=found.recorded_transfer_s, predicted=float(found.transfer_s.mean())),
        growing=int(folded.grows.sum()), kept=int((~folded.grows).sum()), network=network,
        transfer_ratio=transfers.ratio, transfers_from="network" if transfers.absolute else "recording",
        per_rank=taken(
            PerRankView, folded, found, step_s=tuple(None if np.isnan(s) else s for s in found.step_s.tolist())
        ),
        assumptions=tuple(assumption(each, low, high) for each, low, high in found.assumptions), notes=tuple(notes),
        next=command("show", path),
    )  # fmt: skip


def _scale_headline(found: Scaling) -> str:
    """Return text such as "On 1,024 ranks a step takes 21.7 ms (20.8 – 21.9), 4.30 % more than on the 8: …"."""
    unit = unit_for(found.predicted_s)
    more = found.predicted_s / found.recorded_s - 1
    than = f"as on the {len(found.folded.recorded_ranks)} recorded"
    if more > 1:
        than = f"{digits(1 + more)}× the {seconds(found.recorded_s)} of the {len(found.folded.recorded_ranks)} recorded"
    elif abs(more) >= 5e-4:
        word = "more" if more > 0 else "less"
        than = f"{share(abs(more))} {word} than on the {len(found.folded.recorded_ranks)} recorded"
    wait = found.wait_s.mean() - found.recorded_wait_s
    waits = f"each waits {seconds(float(found.wait_s.mean()))} of it for others ({_change(float(wait))})"
    sends = f"transfers take {seconds(float(found.transfer_s.mean()))}"
    sends += f" ({_change(float(found.transfer_s.mean()) - found.recorded_transfer_s)})"
    return (
        f"On {count(found.folded.ranks)} ranks a step takes {in_unit(found.predicted_s, unit)} {unit.name} "
        f"({between(found.low_s, found.high_s, unit)}), {than}: {waits}, and {sends}."
    )


def _change(value: float) -> str:
    text = change(value)
    return "as recorded" if text in ("0", MINUS + "0") else text
