"""Placements of whole tables to compare with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foretrace.arrays import Int64
from foretrace.plan.rows.costs import RowCosts
from foretrace.plan.rows.place import whole_tables
from foretrace.training.rows.placement import EVERYWHERE, Mode, PlacedTable, RowPlacement, column_shares


def baselines(costs: RowCosts, memory: float) -> dict[str, RowPlacement | None]:
    """Return placements by name; None for one that `memory` bytes of a device are too few for.

    `table-wise` puts whole tables where they keep loads equal; `column-wise` and `row-wise` divide each over all
    devices, `row-wise` with partial sums; `rows by number` divides rows regardless of who reads them and exchanges
    rows; `data-parallel` copies all.
    """
    devices, tables = costs.profile.devices, costs.profile.tables
    spread, even = np.arange(devices), column_shares(costs.width, devices)

    def alike(mode: Mode, rest: Int64, shares: Sequence[Int64] = (even,) * len(tables)) -> RowPlacement:
        placed = tuple(
            PlacedTable(name=each.name, rows=each.rows, mode=mode, shares=share, rest=rest)
            for each, share in zip(tables, shares, strict=True)
        )
        return RowPlacement(devices=devices, width=costs.width, training=costs.training, tables=placed)

    owners = whole_tables(costs, costs.pooled, memory)
    whole = costs.width * np.eye(devices, dtype=np.int64)
    by_table = None if owners is None else alike("pooled", spread, list(whole[owners]))
    copies = alike("data-parallel" if costs.training else "rows", np.array([EVERYWHERE]))
    found = {
        "table-wise": by_table, "column-wise": alike("columns", spread), "row-wise": alike("row-wise", spread),
        "rows by number": alike("rows", spread), "data-parallel": copies,
    }  # fmt: skip
    return {name: each if each and each.memory().max() <= memory else None for name, each in found.items()}
