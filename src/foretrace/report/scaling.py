"""What `foretrace scale` answers: its view, its sentences and its lines for people."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from foretrace.experiment.job import Assumed
from foretrace.report import assumptions
from foretrace.report.assumptions import assumption
from foretrace.report.blocks import About, Block, Column, Line, listing, table
from foretrace.report.names import command
from foretrace.report.units import MINUS, between, change, count, digits, in_unit, seconds, share, things, unit_for
from foretrace.report.views import Report, taken
from foretrace.simulate.folding import RankClass, Scaling

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
        for a in self.assumptions[:SHOWN_ASSUMPTIONS]:
            flag = f"; replace it with {a.flag}" if a.flag else ""
            effect = f" {assumptions.range_text(a)}" if a.step_at_low_s != a.step_at_high_s else ""
            value = count(a.value) if a.unit in ("ranks", "collectives") else digits(a.value)
            yield Line(f"{a.name} {value} {a.unit}{effect}: {a.why}{flag}", label="assumed")


def scale(found: Scaling, *, path: str, network: str = "") -> ScaleView:
    """Return the answer to a prediction of many ranks."""
    folded = found.folded
    graph, transfers = folded.graph, folded.transfers
    notes = list(graph.info.notes)
    if graph.info.recording.get("overhead"):
        notes.append("the cost of recording is in these times.")
    return taken(
        ScaleView, found, folded, graph.info, headline=headline(found), source=path,
        interval_s=(found.low_s, found.high_s),
        wait_s=PerStepView(recorded=found.recorded_wait_s, predicted=float(found.wait_s.mean())),
        transfer_s=PerStepView(recorded=found.recorded_transfer_s, predicted=float(found.transfer_s.mean())),
        growing=int(folded.grows.sum()), kept=int((~folded.grows).sum()), network=network,
        transfer_ratio=transfers.ratio, transfers_from="network" if transfers.absolute else "recording",
        per_rank=PerRankView(
            recorded_rank=tuple(folded.recorded_rank.tolist()),
            step_s=tuple(None if np.isnan(each) else each for each in found.step_s.tolist()),
            wait_s=tuple(found.wait_s.tolist()),
            transfer_s=tuple(found.transfer_s.tolist()),
            last_share=tuple(found.last_share.tolist()),
        ),
        assumptions=tuple(assumption(each, low, high) for each, low, high in found.assumptions), notes=tuple(notes),
        next=command("show", path),
    )  # fmt: skip


def headline(found: Scaling) -> str:
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
