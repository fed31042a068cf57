"""Bytes of the busiest device under `foretrace plan rows` against placements of whole tables; written to README.md.

    python -m reproductions oper [--batches N] [--samples N] [--problems N] [--print]

26 tables of the sizes of Criteo Kaggle's, 64 columns, 4 devices. Two thirds of the batches are profiled, the others
judge. Inference has memory for the tables and a tenth more on each device.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from pathlib import Path

import numpy as np

from foretrace.plan.rows.costs import RowCosts, profile
from foretrace.plan.rows.plan import Bytes, RowPlan, judge, plan_rows
from foretrace.training.rows.lookups import CRITEO, zipf
from reproductions import parser_of
from reproductions.ledgers import predictions
from reproductions.oper import bounds
from reproductions.oper.torchrec import torchrec
from reproductions.systems import put
from tables import machine, table, today

HERE = Path(__file__).parent
DEVICES, WIDTH, ROOM = 4, 64, 1.1
POOLINGS, SKEWS, LOCALITIES = (1, 5, 20), (0.8, 1.05, 1.2), (0.0, 0.6)
PUBLISHED = {True: 2.3, False: 4.0}  # by training
COMPARED = ("table-wise", "column-wise", "row-wise", "rows by number", "torchrec")
HEAD = """# OPER: placement of embedding rows

OPER (USENIX ATC 2024) places rows of embedding tables, not tables, and claims 2.3 times faster training and 4.0 times
faster inference. No code was published. `foretrace plan rows` places rows after the paper's idea, with a choice per
table among rows and pooled sums. Below are bytes, not seconds: in and out of the busiest of 4 devices for a batch, ids
and counts included, on batches that were not profiled. Written by `make reproduce NAME=oper`.
"""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One workload, planned."""

    training: bool
    pooling: int
    skew: float
    locality: float
    plan: RowPlan
    baselines: dict[str, Bytes | None]

    def gain(self, name: str) -> float | None:
        """How many times the bytes of another placement the plan saves; None where that does not fit."""
        other = self.baselines[name]
        return None if other is None else other[0] / self.plan.busiest[0]

    @property
    def reached(self) -> bool:
        """Whether the published speed-up is reached over every placement of whole tables that fits."""
        gains = [self.gain(name) for name in ("table-wise", "column-wise", "row-wise", "torchrec")]
        return min(each for each in gains if each is not None) >= PUBLISHED[self.training]


def measure(
    pooling: int, skew: float, locality: float, *, samples: int, batches: int, rows: Sequence[int]
) -> tuple[Cell, Cell]:
    """Plan one workload, for training and for inference."""
    lookups = zipf(
        exponent=skew, tables=len(rows), rows=rows, pooling=pooling, samples=samples, batches=batches,
        locality=locality, workers=DEVICES,
    )  # fmt: skip
    room = 4 * WIDTH * sum(rows) / DEVICES * ROOM + 4 * WIDTH * len(rows)

    def planned(training: bool, memory: float) -> Cell:
        plan = plan_rows(lookups, devices=DEVICES, width=WIDTH, training=training, memory=memory)
        split, held = plan.batches
        theirs = torchrec(RowCosts(profile(lookups, DEVICES, range(split)), WIDTH, training=training), memory)
        judged = None if theirs is None else judge(theirs.exchanged(lookups, range(split, split + held)))
        print(f"pooling {pooling}, zipf {skew}, locality {locality}: {plan.seconds:.1f} s", file=sys.stderr, flush=True)
        return Cell(
            training=training, pooling=pooling, skew=skew, locality=locality, plan=plan,
            baselines={**plan.baselines, "torchrec": judged},
        )  # fmt: skip

    return planned(True, inf), planned(False, room)


def row(cell: Cell) -> list[str]:
    """A line of the table."""
    plan = cell.plan
    modes = [each.mode for each in plan.placement.tables]
    gains = [cell.gain(name) for name in COMPARED]
    busiest = plan.busiest
    return [
        str(cell.pooling), f"{cell.skew:g}", f"{cell.locality:g}",
        f"{busiest[0] / 1e6:.2f} ({busiest[1] / 1e6:.2f} – {busiest[2] / 1e6:.2f})",
        " / ".join(str(modes.count(mode)) for mode in ("rows", "pooled", "columns")),
        *("–" if each is None else f"{each:.2f}" for each in gains),
        f"{plan.expected_bytes / plan.bound_bytes:.3f}", f"{busiest[0] / plan.expected_bytes:.3f}",
        "yes" if cell.reached else "no",
    ]  # fmt: skip


def page(cells: Sequence[Cell], command: str, near: str) -> str:
    """README.md."""
    parts = [HEAD, f"*{today()}, {machine()}; `{command}`.*\n"]
    header = [
        "pooling", "zipf", "locality", "MB of the busiest (80 %)", "tables by rows / pooled / columns",
        *(f"{name} ÷ plan" for name in COMPARED), "plan ÷ bound", "held out ÷ expected", "reached",
    ]  # fmt: skip
    for training in (True, False):
        mine = [cell for cell in cells if cell.training == training]
        if mine:
            what = "Training" if training else f"Inference, {ROOM:g} times the memory of the tables"
            parts.append(f"## {what}: {PUBLISHED[training]:g} times published\n")
            parts.append(table(header, [row(cell) for cell in mine]) + "\n")
            reached = [cell for cell in mine if cell.reached]
            gains = [cell.gain("rows by number") or 1.0 for cell in mine]
            parts.append(
                f"Reached over every placement of whole tables in {len(reached)} of {len(mine)} workloads; over rows "
                f"that are placed by their number alone the plan gains {min(gains):.2f} to {max(gains):.2f} times "
                f"(median {np.median(gains):.2f}).\n"
            )
    parts.append(
        "*Reached* compares with the best of table-wise, column-wise, row-wise and torchrec's planner by its formula "
        "(`shard_estimators.py`), which places for a machine of GPUs; – does not fit. *Locality* is the share of reads "
        "that are redrawn among rows of the reader. *Held out ÷ expected* shows how well the profile foretells.\n"
    )
    parts += [
        near,
        "## Run on processes\n",
        "`foretrace plan rows ... --devices 2 --run --between 50mbit`: a batch on shaped links, each placement twice "
        "per round, in turns. Sums are those of whole tables bit by bit, bytes those predicted. Until the afternoon of "
        "2026-11-28 the bytes of *column-wise* told the rate of the links; the last runs are predicted by all-to-alls "
        "that are timed on the links.\n",
        predictions("plan-rows") + "\n",
    ]
    return "\n".join(parts)


def main(given: Sequence[str]) -> int:
    """Plan every workload and write the page."""
    parser = parser_of("oper", __doc__)
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=0, help="of each of 26 tables; by default those of Criteo")
    parser.add_argument("--pooling", type=int, nargs="*", default=POOLINGS)
    parser.add_argument("--problems", type=int, default=36, help="of a few tables, to compare with the bound")
    parser.add_argument("--print", action="store_true", help="instead of writing README.md")
    chosen = parser.parse_args(given)
    rows = [chosen.rows] * len(CRITEO) if chosen.rows else CRITEO
    cells = [
        cell
        for workload in product(chosen.pooling, SKEWS, LOCALITIES)
        for cell in measure(*workload, samples=chosen.samples, batches=chosen.batches, rows=rows)
    ]
    text = page(cells, " ".join(("python -m reproductions oper", *given)), bounds.text(chosen.problems))
    if chosen.print:
        print(text)
    else:
        put(HERE / "README.md", text)
    return 0
