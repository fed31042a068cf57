"""The choice of torchrec's planner by its formula, to compare with; the package itself wants GPUs."""

from __future__ import annotations

from math import inf

import numpy as np

from foretrace.arrays import Float64
from foretrace.plan.rows.costs import RowCosts
from foretrace.plan.rows.place import whole_tables
from foretrace.training.rows.placement import FLOAT, WORD, Mode, PlacedTable, RowPlacement

# Constants of torchrec/distributed/planner/constants.py, for one machine of GPUs; bytes per second.
_LINK = 600 * 2**30
_NETWORK = 12.5 * 2**30
_MEMORY = 897 * 2**30
_BLOCK, _PENALTY_64, _PENALTY_32, _LEAST_WIDTH = 128, 1.15, 1.75, 32
_BACKWARD, _COPY, _UPDATE = 2.0, 2.455, 9.22
_TORCHREC: tuple[Mode, ...] = ("pooled", "row-wise", "data-parallel")


def torchrec(costs: RowCosts, memory: float) -> RowPlacement | None:
    """The plan of torchrec's `EmbeddingShardingPlanner` as its cost model (`shard_estimators.py`) rates plans.

    Proposals are all tables alike, and for every table the way with the least time on a device, and in all; the
    quickest that fits is taken. A part goes to the device with the least time so far, the longest first. Columns are
    cut from 128 on, so that narrower tables are not. Which rows are read is not in the model.
    """
    devices, count = costs.profile.devices, len(costs.profile.tables)
    whole, rows, copies = _times(costs)  # seconds of the device of a table, and of every device otherwise
    best: tuple[float, RowPlacement | None] = inf, None
    spread, alone_on = np.arange(devices), costs.width * np.eye(devices, dtype=np.int64)
    longest = np.argmin([whole, rows, copies], axis=0)
    summed = np.argmin([whole, devices * rows, devices * copies], axis=0)
    for ways in (*(np.full(count, way) for way in range(3)), longest, summed):
        alone = ways == 0
        owners = whole_tables(costs, np.where(alone, whole, 0.0)[:, None] * np.ones(devices), memory, chosen=alone)
        if owners is None:
            continue
        load = np.bincount(owners[alone], whole[alone], minlength=devices)
        rating = float(load.max() + rows[ways == 1].sum() + copies[ways == 2].sum())
        tables = tuple(
            PlacedTable(name=each.name, rows=each.rows, mode=_TORCHREC[way], shares=alone_on[owner], rest=spread)
            for each, way, owner in zip(costs.profile.tables, ways.tolist(), owners.tolist(), strict=True)
        )
        placement = RowPlacement(devices=devices, width=costs.width, training=costs.training, tables=tables)
        if placement.memory().max() <= memory and rating < best[0]:
            best = rating, placement
    return best[1]


def _times(costs: RowCosts) -> tuple[Float64, Float64, Float64]:
    """Seconds (tables,) of a device by torchrec's model: whole table, divided by rows, copied."""
    devices, width, training = costs.profile.devices, costs.width, costs.training
    samples = costs.profile.samples.mean()  # of a device
    ids = costs.profile.ids.mean(axis=1)
    out, read = FLOAT * width * samples, FLOAT * width * ids
    penalty = 1.0 if width >= _BLOCK else _PENALTY_64 if width >= 64 else _PENALTY_32
    backward = _BACKWARD if training else 0.0

    wide = FLOAT * max(width, _LEAST_WIDTH) * ids
    compute = devices * (WORD * ids + wide + out) * penalty / _MEMORY
    whole = compute * (1 + backward) + devices * out * (1 + training) / _LINK

    compute = (WORD * ids + read + devices * out) / _MEMORY
    rows = compute * (1 + backward) + devices * out * ((1 + training) / _LINK + training * _COPY / _MEMORY)

    slow = _MEMORY / 2  # of the dense kernel
    table = costs.table_memory.astype(np.float64)
    update = training * table * (1 / (_NETWORK * devices) + _UPDATE / slow)
    return whole, rows, (WORD * ids + read + out) / slow * (1 + backward) + update
