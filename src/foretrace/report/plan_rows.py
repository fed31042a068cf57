"""What `foretrace plan rows` answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from foretrace.experiment.rows.placed import RanPlacement
from foretrace.plan.rows.plan import RowPlan
from foretrace.report.blocks import About, Block, Column, Line, listing, table
from foretrace.report.units import count, digits, nbytes, seconds, things
from foretrace.report.views import Report, taken
from foretrace.simulate.timeline import Timeline


class PlacedTableView(msgspec.Struct, frozen=True, kw_only=True):
    """One table and how it is kept."""

    name: str
    mode: str  # pooled: one device adds up; columns: each its columns; rows: rows are fetched, each from its owner
    rows: int
    rows_replicated: int  # that every device has a copy of


class RowPlanView(Report, frozen=True, kw_only=True):
    """`foretrace plan rows`: where rows of embedding tables are kept. Bytes are those of a batch, in and out."""

    command: str = "plan rows"
    source: str
    devices: int
    inference: bool
    tables: tuple[PlacedTableView, ...]
    busiest_bytes: float  # of the busiest device, mean of the held-out batches
    busiest_interval: tuple[float, float]  # 80 %
    expected_bytes: float  # from the profiled batches
    bound_bytes: float  # no placement exchanges less, by the profile
    baselines: dict[str, float | None]  # busiest device there over here; null where it does not fit or here is nothing
    memory_bytes: tuple[int, ...]  # of the tables, per device
    profiled: int  # batches
    held_out: int
    seconds: float  # that the search took
    exchange_s: float | None  # a held-out batch on links of --between, each way as fast; null without
    run: tuple[RanPlacement, ...]  # empty unless asked for
    ok: bool  # whether the sums of a run are those of whole tables
    ledger: str
    row: str  # the last of this run

    def shown(self, top: int) -> Iterator[Block]:
        what = "inference" if self.inference else "training"
        judged = f"{self.held_out} of {self.profiled + self.held_out} batches held out"
        yield About((self.source, things(self.devices, "device"), what, judged))
        columns = [
            Column("table", "name"), Column("rows", "count"), Column("mode"), Column("on every device", "count"),
        ]  # fmt: skip
        rows = [(each.name, each.rows, each.mode, each.rows_replicated) for each in self.tables]
        yield table(columns, sorted(rows, key=lambda row: -row[1]), top=top, noun="table", how="--top")
        known = [
            f"{name} {'does not fit' if each is None else f'{digits(each)}×'}" for name, each in self.baselines.items()
        ]
        yield Line(" · ".join(known), label="others")
        if self.exchange_s is not None:
            yield Line(f"{seconds(self.exchange_s)} at the rate of the links alone", label="exchange")
        if self.run:
            measured = ("predicted_bytes", "predicted", "bytes"), ("counted_bytes", "counted", "bytes")
            timed = [("predicted_s", "predicted", "time")] if self.run[0].predicted_s is not None else []
            yield listing(self.run, ("name", "placement"), *measured, *timed, ("step_s", "batch", "time"))
            off = max(each.gradient_error for each in self.run)
            yield Line(
                f"sums {'equal' if self.ok else 'DIFFER FROM'} those of whole tables bit by bit"
                + ("" if self.inference else f"; gradients differ by {off:.1e} of the largest at most"),
                label="checked",
            )
        fullest = max(self.memory_bytes)
        yield Line(
            f"by the profile {nbytes(self.expected_bytes)}, and no placement less than {nbytes(self.bound_bytes)}; the "
            f"fullest device keeps {nbytes(fullest)}"
        )


def planned_rows(
    found: RowPlan, source: str, ran: Sequence[RanPlacement] = (), ledger: str = "", row: str = "", *,
    moved: Timeline | None = None,
) -> RowPlanView:  # fmt: skip
    """Return the answer about a placement of rows, with what became of it and where its rows went."""
    placement, (ours, low, high) = found.placement, found.busiest
    modes = [each.mode for each in placement.tables]
    modes_said = ", ".join(
        f"{count(modes.count(each))} {each}" for each in ("pooled", "columns", "rows") if each in modes
    )
    copied = sum(each.rows_replicated for each in placement.tables)
    return taken(
        RowPlanView, found, placement,
        headline=f"The busiest of {things(placement.devices, 'device')} exchanges {nbytes(ours)} per batch "
        f"({nbytes(low)} – {nbytes(high)}), tables: {modes_said}"
        + (f", {things(copied, 'row')} on every device." if copied else "."),
        notes=() if not placement.training else (
            "No row is copied in training: to sum the gradients of copies costs as much as to fetch the row.",
        ),
        source=source, inference=not placement.training, busiest_bytes=ours, busiest_interval=(low, high),
        baselines={name: each[0] / ours if each and ours else None for name, each in found.baselines.items()},
        memory_bytes=tuple(placement.memory().tolist()), profiled=found.batches[0], held_out=found.batches[1],
        exchange_s=moved.window_ns / 1e9 if moved else None, run=tuple(ran), ok=all(each.equal for each in ran),
        ledger=ledger, row=row,
    )  # fmt: skip
