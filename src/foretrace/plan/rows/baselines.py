"""Placements of whole tables to compare with."""

from __future__ import annotations

import numpy as np

from foretrace.arrays import Int64
from foretrace.plan.rows.costs import RowCosts
from foretrace.plan.rows.place import whole_tables
from foretrace.training.rows.placement import EVERYWHERE, Mode, PlacedTable, RowPlacement


def baselines(costs: RowCosts, memory: float) -> dict[str, RowPlacement | None]:
    """Return placements by name; None for one that `memory` bytes of a device are too few for.

    `table-wise` puts whole tables where they keep loads equal; `column-wise` and `row-wise` divide each over all
    devices, `row-wise` with partial sums; `rows by number` divides rows regardless of who reads them and exchanges
    rows; `data-parallel` copies all.
    """
    devices, tables = costs.profile.devices, costs.profile.tables
    spread, everywhere = np.arange(devices), np.array([EVERYWHERE])
    none = np.zeros(len(tables), np.int64)

    def alike(mode: Mode, rest: Int64, owners: Int64) -> RowPlacement:
        placed = tuple(
            PlacedTable(name=each.name, rows=each.rows, mode=mode, owner=owner, rest=rest)
            for each, owner in zip(tables, owners.tolist(), strict=True)
        )
        return RowPlacement(devices=devices, width=costs.width, training=costs.training, tables=placed)

    owners = whole_tables(costs, costs.pooled, memory)
    by_table = None if owners is None else alike("pooled", spread, owners)
    copies = alike("data-parallel" if costs.training else "rows", everywhere, none)
    found = {
        "table-wise": by_table, "column-wise": alike("columns", spread, none),
        "row-wise": alike("row-wise", spread, none), "rows by number": alike("rows", spread, none),
        "data-parallel": copies,
    }  # fmt: skip
    return {name: each if each and each.memory().max() <= memory else None for name, each in found.items()}
