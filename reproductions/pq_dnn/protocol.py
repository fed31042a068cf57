"""Product quantisation of a ResNet (PQA, TRETS 2024): accuracy beside performance per area at the same (v, K).

    python -m reproductions pq_dnn [--cells N] [--write]

Cells of accuracy are kept in accuracy.jsonl and measured once; --cells measures so many more and stops.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from reproductions import parser_of
from reproductions.kept import Cell, measured

HERE = Path(__file__).parent
ROWS = HERE / "accuracy.jsonl"
SEEDS, BITS = 3, 8
# (length, prototypes, distance, assignment), those first that the paper's claim is about
POINTS = (
    (9, 16, "l1", "straight"), (9, 8, "l1", "straight"), (9, 16, "l2", "straight"), (9, 4, "l1", "straight"),
    (4, 16, "l1", "straight"), (18, 16, "l1", "straight"), (9, 32, "l1", "straight"), (9, 8, "l2", "straight"),
    (4, 8, "l1", "straight"), (9, 64, "l1", "straight"), (9, 16, "l2", "soft"), (18, 8, "l1", "straight"),
)  # fmt: skip
NAMES = ("length", "prototypes", "distance", "assignment")


def keys() -> list[Cell]:
    """Every cell: a point and a seed."""
    return [dict(zip(NAMES, point, strict=True)) | {"seed": seed} for point in POINTS for seed in range(SEEDS)]


def cell(key: Cell, folder: Path) -> dict[str, Any]:
    """Accuracy of one quantised network."""
    from foretrace.training.product_quantised import Quantiser
    from reproductions.pq_dnn.trained import dense, quantised

    quantiser = Quantiser(**{name: key[name] for name in NAMES}, bits=BITS)
    model, accuracy = dense(key["seed"], folder)
    return {"dense": accuracy, **quantised(model, quantiser, key["seed"])}


def main(arguments: Sequence[str]) -> int:
    parser = parser_of("pq_dnn", __doc__)
    parser.add_argument("--cells", type=int, help="measure so many cells more, then stop")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "foretrace_pq_dnn")
    options = parser.parse_args(arguments)

    import torch

    torch.set_num_threads(1)
    wanted = keys()
    if options.cells is not None:
        known = len(ROWS.read_text(encoding="utf-8").splitlines()) if ROWS.exists() else 0
        wanted = wanted[: known + options.cells]
    measured(ROWS, wanted, partial(cell, folder=options.folder))
    return 0
