"""Measured Megatron iterations on A100 nodes against iterations simulated as a 1F1B graph.

    python benchmarks/vtrain.py --labels FILE.csv ... [--fit] [--json]

FILE has the columns of the published tables of vTrain (MICRO 2024): GPUs, global batch, micro batch, hidden size,
heads, layers, sequence length, tensor, data and pipeline parallelism, iteration time in ms. Rows are scored with the
constants that the package ships (src/foretrace/plan/megatron.json). These were fitted by `--fit` on half of the rows,
chosen by a checksum of the layout alone; `--fit` also reports splits by number of devices and by size of the model.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.files import write_bytes
from foretrace.plan.megatron import Constants, Layout, as_json, iteration_s, shipped
from tables import ROOT, percent, table

STORED = ROOT / "src/foretrace/plan/megatron.json"
COLUMNS = {
    "global batch": "global_batch", "micro batch": "micro_batch", "hidden size": "hidden", "attention heads": "heads",
    "# layers": "layers", "sequence length": "sequence", "tensor parallelism": "tensor", "data parallelism": "data",
    "pipeline parallelism": "pipeline",
}  # fmt: skip
TIME = "iteration time (ms)"
Row = tuple[Layout, float]  # seconds measured

# What is plausible before any row is seen (central value, deviation of its logarithm): vendor figures of the A100 and
# its links, and arithmetic of the layer. Weak: it decides only what the rows leave open.
PLAUSIBLE = {
    "tflops": (260.0, 0.15), "product_us": (6.0, 0.7), "link_us": (25.0, 0.7), "link_gb_s": (200.0, 0.3),
    "between_us": (60.0, 0.7), "between_gb_s": (12.0, 0.5), "back": (2.0, 0.1), "update_bytes": (30.0, 0.5),
    "gradient_bytes": (4.0, 0.35), "shared_passes": (15.0, 0.7), "split_passes": (25.0, 0.7),
    "score_passes": (6.0, 0.7), "host_back": (1.5, 0.5),
}  # fmt: skip
_WEIGHT = 0.005
_FIXED = ("memory_gb_s",)


def read(path: Path) -> list[Row]:
    """Layouts and measured seconds. Raises ForetraceError with the row that is wrong."""
    rows = []
    with path.open(encoding="utf-8", newline="") as file:
        for number, line in enumerate(csv.DictReader(file), start=2):
            try:
                layout = Layout(**{field: int(line[name]) for name, field in COLUMNS.items()})
                rows.append((layout, float(line[TIME]) / 1e3))
            except (KeyError, ValueError, TypeError) as error:
                raise ForetraceError(f"{path}, line {number}: no measured iteration ({error!r}).") from error
    return rows


def half(layout: Layout) -> int:
    """0 or 1, by the layout alone."""
    return zlib.crc32(repr(layout).encode()) % 2


def fit(rows: Sequence[Row]) -> Constants:
    """Constants with the smallest robust relative error on these rows."""
    from scipy.optimize import least_squares

    start = Constants()
    names = [name for name in asdict(start) if name not in _FIXED]

    def made(x: np.ndarray) -> Constants:
        return replace(start, **dict(zip(names, np.exp(x).tolist(), strict=True)))

    def residuals(x: np.ndarray) -> np.ndarray:
        constants = made(x)
        errors = [np.log(iteration_s(layout, constants) / seconds) for layout, seconds in rows]
        far = [
            _WEIGHT * np.sqrt(len(rows)) * (x[names.index(name)] - np.log(value)) / spread
            for name, (value, spread) in PLAUSIBLE.items()
        ]
        return np.array(errors + far)

    x0 = np.log([asdict(start)[name] for name in names])
    return made(least_squares(residuals, x0, loss="soft_l1", f_scale=0.1, max_nfev=30, diff_step=1e-3).x)


def errors(rows: Sequence[Row], constants: Constants) -> np.ndarray:
    """Predicted over measured − 1."""
    return np.array([iteration_s(layout, constants) / seconds - 1 for layout, seconds in rows])


def score(rows: Sequence[Row], constants: Constants) -> dict[str, float]:
    """Errors over rows, and how good the layout is that would be chosen for each model, batch and number of devices."""
    off = np.abs(errors(rows, constants))
    groups: dict[tuple[int, ...], list[tuple[float, float]]] = defaultdict(list)
    for layout, seconds in rows:
        job = (layout.devices, layout.global_batch, layout.hidden, layout.layers, layout.sequence)
        groups[job].append((iteration_s(layout, constants), seconds))
    regret, order = [], []
    for found in groups.values():
        if len(found) > 2:
            predicted, measured = np.array(found).T
            regret.append(measured[predicted.argmin()] / measured.min() - 1)
            order.append(np.corrcoef(np.argsort(np.argsort(predicted)), np.argsort(np.argsort(measured)))[0, 1])
    return {
        "rows": len(rows),
        "mape": float(off.mean()),
        "median": float(np.median(off)),
        "p90": float(np.quantile(off, 0.9)),
        "bias": float(np.median(errors(rows, constants))),
        "jobs": len(regret),
        "rank_correlation": float(np.mean(order)) if order else float("nan"),
        "regret": float(np.mean(regret)) if regret else float("nan"),
    }


def splits(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Scores on rows that the constants were not fitted on, for several ways to split."""
    ways: dict[str, Callable[[Layout], bool]] = {
        "random half": lambda layout: half(layout) == 1,
        "2 and 4 devices, on 8": lambda layout: layout.devices in (2, 4),
        "12 and 16 layers, on 24": lambda layout: layout.layers in (12, 16),
        "up to 64 devices, on 256 and 512": lambda layout: layout.devices <= 64,
    }
    tested: dict[str, Callable[[Layout], bool]] = {
        "random half": lambda layout: half(layout) == 0,
        "2 and 4 devices, on 8": lambda layout: layout.devices == 8,
        "12 and 16 layers, on 24": lambda layout: layout.layers == 24,
        "up to 64 devices, on 256 and 512": lambda layout: layout.devices > 64,
    }
    found = {}
    for name, fitted in ways.items():
        constants = fit([row for row in rows if fitted(row[0])])
        held = [row for row in rows if tested[name](row[0])]
        found[name] = score(held, constants)
        if name == "random half":
            for size, inside in (("one node", True), ("several nodes", False)):
                part = [row for row in held if (row[0].devices <= 8) == inside]
                if part:
                    found[f"random half, {size}"] = score(part, constants)
    return found


def as_table(found: dict[str, dict[str, float]]) -> str:
    """Markdown."""
    header = (
        "fitted on, held out", "rows", "mean error", "median", "p90", "bias", "jobs", "rank correlation",
        "loss by choosing so",
    )  # fmt: skip
    rows = [
        [
            name, f"{each['rows']:.0f}", percent(each["mape"]), percent(each["median"]), percent(each["p90"]),
            percent(each["bias"], signed=True), f"{each['jobs']:.0f}", f"{each['rank_correlation']:.2f}",
            percent(each["regret"]),
        ]
        for name, each in found.items()
    ]  # fmt: skip
    return table(header, rows)


def section(files: Sequence[Path]) -> str:
    """The part of docs/accuracy.md: errors on rows that the constants were not fitted on, and the shipped ones."""
    rows = [row for path in files for row in read(path)]
    found = splits(rows) | {"shipped constants, all rows": score(rows, shipped())}
    return (
        "A GPT model split by tensor, pipeline and data parallelism is simulated as a 1F1B graph "
        "(`foretrace.plan.megatron`). Its constants were fitted on rows of the same tables, never on those they are "
        "scored on: *random half* by a checksum of the layout, so that a layout measured twice is on one side; the "
        "other splits hold out larger jobs. What is plausible for each constant before any row was seen, and the "
        "structure, were chosen on a third of the fitting half. The constants of the package are those of the random "
        "half. *Rank correlation* and *loss by choosing so*: over jobs with more than two measured layouts, how well "
        "layouts are ordered, and how much longer the predicted best one takes than the measured best. Errors in %.\n\n"
        + as_table(found)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=Path, nargs="+", required=True)
    parser.add_argument("--fit", action="store_true", help="fit again on half of the rows and store the constants")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    try:
        rows = [row for path in given.labels for row in read(path)]
    except (ForetraceError, OSError) as error:
        print(f"vtrain: {error}", file=sys.stderr)
        return 2
    if not rows:
        print("vtrain: the files hold no rows.", file=sys.stderr)
        return 2
    found = {}
    if given.fit:
        found = splits(rows)
        constants = fit([row for row in rows if half(row[0]) == 1])
        write_bytes(STORED, (json.dumps(as_json(constants), indent=1) + "\n").encode())
    found["shipped constants, all rows given"] = score(rows, shipped())
    print(json.dumps(found, indent=1) if given.json else as_table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
