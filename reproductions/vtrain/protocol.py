"""Measured Megatron iterations on A100 nodes against iterations simulated as a 1F1B graph.

    python -m reproductions vtrain --labels FILE.csv ... [--fit] [--json]

FILE has the columns of the published tables of vTrain (MICRO 2024): GPUs, global batch, micro batch, hidden size,
heads, layers, sequence length, tensor, data and pipeline parallelism, iteration time in ms. Rows are scored with the
constants of `megatron.json`, by model, by tensor degree and by number of
devices. `--splits` fits anew without each model, each tensor degree and each fifth of the shapes of one node (hidden
size, tensor degree, micro-batch: rows of a shape that was seen, with other numbers of layers, test nothing), for the
law of `megatron.py` and for the one before it. `--fit` does the same and then stores constants fitted on all rows, with
the errors that the left-out ones had.

An outlier is a row that takes more than a fifth longer than its twin with the nearest micro-batch, pipeline bubbles
taken out. It is measured, not predicted; it enters no fit and is scored and named apart.
"""

from __future__ import annotations

import csv
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.files import write_bytes
from reproductions import parser_of
from reproductions.vtrain.megatron import (
    NODE,
    STORED,
    VOCABULARY,
    Constants,
    Float64,
    Layout,
    MegatronFit,
    as_json,
    iteration,
    iteration_s,
    length_s,
    shipped,
    stage_times,
)  # fmt: skip
from tables import percent, table

COLUMNS = {
    "global batch": "global_batch", "micro batch": "micro_batch", "hidden size": "hidden", "attention heads": "heads",
    "# layers": "layers", "sequence length": "sequence", "tensor parallelism": "tensor", "data parallelism": "data",
    "pipeline parallelism": "pipeline",
}  # fmt: skip
TIME = "iteration time (ms)"
Row = tuple[Layout, float]  # seconds measured
Law = Callable[[Layout, Constants], Mapping[str, Float64]]  # stage times

# What is plausible before any row is seen (central value, deviation of its logarithm): vendor figures of the A100 and
# its links (four cards of 200 Gbit/s in a node), all-reduces measured inside such a node, and arithmetic of the layer.
# Weak but for those two: it decides only what the rows leave open.
PLAUSIBLE = {
    "tflops": (260.0, 0.15), "product_us": (6.0, 0.7), "link_us": (25.0, 0.7), "link_gb_s": (225.0, 0.005),
    "between_us": (60.0, 0.7), "node_gb_s": (95.0, 0.05), "crossing": (0.7, 0.7), "back": (2.0, 0.02),
    "update_bytes": (30.0, 0.5), "shared_passes": (15.0, 0.7), "split_passes": (25.0, 0.7),
    "score_passes": (6.0, 0.7), "host_back": (1.5, 0.5), "host_split": (1.1, 0.2),
}  # fmt: skip
_WEIGHT = 0.005
_FIXED = ("memory_gb_s", "gradient_bytes")
# The law before: a network card per device, whose rate and the bytes of a gradient were both left to the rows.
_PLAUSIBLE_BEFORE = PLAUSIBLE | {
    "link_gb_s": (200.0, 0.3), "node_gb_s": (12.0, 0.5), "back": (2.0, 0.1), "gradient_bytes": (4.0, 0.35),
}  # fmt: skip
_FAR = 5.0  # weight of a row of several nodes, of which there are few, beside one of one node
_SLOWER = 1.2  # than the twin: an outlier
_FOLDS = 5


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


def before(layout: Layout, c: Constants) -> Mapping[str, Float64]:
    """The law before this one: `node_gb_s` belongs to each device alone, whole activations are sent.

    Launching took `host_split` times as long with any tensor degree.
    """
    if layout.tensor > 1:
        c = replace(c, host_split=c.host_split ** (1 / np.log2(layout.tensor)))
    times = dict(stage_times(layout, c))
    if layout.devices > NODE:
        p, t, d, h = layout.pipeline, layout.tensor, layout.data, layout.hidden
        tokens = layout.micro_batch * layout.sequence
        parameters = np.full(p, layout.layers // p * 12 * h * h / t)
        parameters[[0, -1]] += VOCABULARY * h / t
        near = t * d <= NODE
        us, rate = (c.link_us, c.link_gb_s) if near else (c.between_us, c.node_gb_s)
        moved = 2 * (d - 1) / d * c.gradient_bytes * parameters / (rate * 1e9)
        times["exchange"] = moved + us * 1e-6 if d > 1 else np.zeros(p)
        times["send"] = np.full(p, c.between_us * 1e-6 + 2 * tokens * h / (c.node_gb_s * 1e9))
    return times


def outliers(rows: Sequence[Row]) -> set[Row]:
    """Rows that take longer than their twins of the nearest smaller and larger micro-batch by more than a fifth."""
    groups: dict[object, list[Row]] = defaultdict(list)
    for layout, seconds in rows:
        groups[replace(layout, micro_batch=1)].append((layout, seconds))
    found = set()
    for each in groups.values():
        paces: dict[int, list[float]] = defaultdict(list)
        for layout, seconds in each:
            m = layout.micro_batches
            paces[layout.micro_batch].append(seconds * m / (m + layout.pipeline - 1))
        sizes = sorted(paces)
        for layout, seconds in each:
            at, m = sizes.index(layout.micro_batch), layout.micro_batches
            pace = seconds * m / (m + layout.pipeline - 1)
            twins = [np.median(paces[sizes[i]]) for i in (at - 1, at + 1) if 0 <= i < len(sizes)]
            if layout.devices > NODE and twins and pace > _SLOWER * min(twins):
                found.add((layout, seconds))
    return found


def fit(rows: Sequence[Row], law: Law = stage_times) -> Constants:
    """Constants with the smallest robust relative error on these rows, without outliers."""
    from scipy.optimize import least_squares

    plausible, fixed = (PLAUSIBLE, _FIXED) if law is stage_times else (_PLAUSIBLE_BEFORE, ("memory_gb_s", "crossing"))
    start = Constants()
    names = [name for name in asdict(start) if name not in fixed]
    far = outliers(rows)
    rows = [row for row in rows if row not in far]
    weights = np.array([np.sqrt(_FAR) if layout.devices > NODE else 1.0 for layout, _ in rows])
    alike: dict[Layout, list[int]] = defaultdict(list)  # but for the global batch, which only repeats the stage times
    for at, (layout, _) in enumerate(rows):
        alike[replace(layout, global_batch=layout.micro_batch * layout.data)].append(at)

    def made(x: np.ndarray) -> Constants:
        return replace(start, **dict(zip(names, np.exp(x).tolist(), strict=True)))

    def residuals(x: np.ndarray) -> np.ndarray:
        constants = made(x)
        errors = np.empty(len(rows))
        for layout, which in alike.items():
            times = law(layout, constants)
            for at in which:
                errors[at] = weights[at] * np.log(length_s(times, rows[at][0].micro_batches) / rows[at][1])
        prior = [
            _WEIGHT * np.sqrt(len(rows)) * (x[names.index(name)] - np.log(value)) / spread
            for name, (value, spread) in plausible.items()
            if name in names
        ]
        return np.concatenate([errors, prior])

    x0 = np.log([asdict(start)[name] for name in names])
    return made(least_squares(residuals, x0, loss="soft_l1", f_scale=0.1, max_nfev=40, diff_step=1e-3).x)


def errors(rows: Sequence[Row], constants: Constants, law: Law = stage_times) -> np.ndarray:
    """Predicted over measured − 1."""
    found = [length_s(law(layout, constants), layout.micro_batches) / seconds - 1 for layout, seconds in rows]
    return np.array(found)


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
    """Scores of the law on rows that it was not fitted on, for several ways to split."""
    ways: dict[str, tuple[Callable[[Layout], bool], Callable[[Layout], bool]]] = {
        "random half": (lambda layout: half(layout) == 1, lambda layout: half(layout) == 0),
        "2 and 4 devices, on 8": (lambda layout: layout.devices in (2, 4), lambda layout: layout.devices == 8),
        "up to 64 devices, on 256 and 512": (lambda layout: layout.devices <= 64, lambda layout: layout.devices > 64),
    }
    found = {}
    for name, (fitted, held) in ways.items():
        constants = fit([row for row in rows if fitted(row[0])])
        found[name] = score([row for row in rows if held(row[0])], constants)
    return found


GROUPS: dict[str, Callable[[Layout], int]] = {
    "model (hidden size)": lambda layout: layout.hidden,
    "tensor degree": lambda layout: layout.tensor,
    "devices": lambda layout: layout.devices,
}


def left_out(rows: Sequence[Row], law: Law = stage_times) -> dict[str, dict[int, tuple[list[Row], np.ndarray]]]:
    """Rows and log(measured / predicted) by way and group, each from a fit that saw nothing of its group.

    Of several nodes: each model, each tensor degree. Of one node: fifths of the shapes (hidden size, tensor degree,
    micro-batch), listed by tensor degree. Outliers are left out of the fits and are among the rows.
    """
    far, near = ([row for row in rows if (row[0].devices > NODE) == inside] for inside in (True, False))
    found: dict[str, dict[int, tuple[list[Row], np.ndarray]]] = {}

    def held(tested: Sequence[Row]) -> np.ndarray:
        kept = set(tested)
        constants = fit([row for row in rows if row not in kept], law)
        return np.asarray(-np.log1p(errors(tested, constants, law)))

    for name in ("model (hidden size)", "tensor degree"):
        key, parts = GROUPS[name], {}
        for value in sorted({key(layout) for layout, _ in far}):
            tested = [row for row in far if key(row[0]) == value]
            if len(tested) < len(far):
                parts[value] = tested, held(tested)
        if parts:
            found[f"several nodes, {name}"] = parts
    if near:
        folds: dict[int, list[Row]] = defaultdict(list)
        for row in near:
            folds[zlib.crc32(repr(shape(row[0])).encode()) % _FOLDS].append(row)
        tested = [row for each in folds.values() for row in each]
        logs = np.concatenate([held(each) for each in folds.values()])
        found["one node, shapes; by tensor degree"] = {
            t: ([tested[i] for i in at], logs[at])
            for t in sorted({layout.tensor for layout, _ in near})
            if len(at := np.flatnonzero([layout.tensor == t for layout, _ in tested]))
        }
    return found


def shape(layout: Layout) -> tuple[int, int, int]:
    """What decides the time of a layer."""
    return layout.hidden, layout.tensor, layout.micro_batch


def quantiles(logs: np.ndarray) -> tuple[float, float]:
    """10 % and 90 % of log(measured / predicted); at least a per cent on both sides."""
    low, high = np.quantile(logs, [0.1, 0.9])
    return min(float(low), -0.01), max(float(high), 0.01)


def made(rows: Sequence[Row], found: dict[str, dict[int, tuple[list[Row], np.ndarray]]]) -> MegatronFit:
    """What is stored: constants of all rows, ranges of the left-out ones."""
    near = [parts for name, parts in found.items() if name.startswith("one node")]
    far = [
        quantiles(logs) for name, parts in found.items() if name.startswith("several") for _, logs in parts.values()
    ]  # of groups, because what is asked will be another group, not more rows of these
    if not near or not far:
        raise ForetraceError("a fit needs rows of one node and of several; name both tables.")
    return MegatronFit(
        constants=fit(rows),
        one_node={t: quantiles(logs) for t, (_, logs) in near[0].items()},
        several_nodes=(min(low for low, _ in far), max(high for _, high in far)),
    )


def grouped(parts: dict[int, tuple[list[Row], np.ndarray]], far: set[Row]) -> list[tuple[str, np.ndarray]]:
    """Relative errors of predictions by group and of all, without outliers."""
    kept = {key: np.expm1(-logs[[row not in far for row in rows]]) for key, (rows, logs) in parts.items()}
    return [*((str(key), each) for key, each in kept.items()), ("all", np.concatenate(list(kept.values())))]


def as_left_out(rows: Sequence[Row]) -> tuple[str, dict[str, dict[int, tuple[list[Row], np.ndarray]]]]:
    """Table of left-out groups, before and after, and what was found after."""
    was, now, far = left_out(rows, before), left_out(rows), outliers(rows)
    lines = []
    for name, parts in now.items():
        for (group, new), (_, old) in zip(grouped(parts, far), grouped(was[name], far), strict=True):
            if len(new):
                cells = [percent(f(each), signed=signed) for each in (old, new)
                         for f, signed in ((lambda e: np.abs(e).mean(), False), (np.mean, True))]  # fmt: skip
                lines.append([name, group, str(len(new)), *cells, percent(float(np.median(np.abs(new))))])
    header = ("left out", "group", "rows", "before: mean", "bias", "now: mean", "bias", "median")
    return table(header, lines), now


def by_group(rows: Sequence[Row]) -> str:
    """The stored constants on all rows given, by group, with how many are inside the range; outliers named."""
    far, lines = outliers(rows), []
    for name, key in GROUPS.items():
        for value in sorted({key(layout) for layout, _ in rows}):
            part = [row for row in rows if key(row[0]) == value and row not in far]
            if part:
                found = [(iteration(layout), seconds) for layout, seconds in part]
                off = np.array([each.seconds / seconds - 1 for each, seconds in found])
                inside = np.mean([each.low_s <= seconds <= each.high_s for each, seconds in found])
                lines.append([name, str(value), str(len(part)), percent(float(np.abs(off).mean())),
                              percent(float(off.mean()), signed=True), percent(float(np.abs(off).max())),
                              percent(float(inside))])  # fmt: skip
    text = table(("group", "", "rows", "mean error", "bias", "worst", "in the 80 % range"), lines)
    named = [
        f"hidden {layout.hidden}, tensor {layout.tensor}, data {layout.data}, pipeline {layout.pipeline}, micro-batch "
        f"{layout.micro_batch} ({percent(iteration(layout).seconds / seconds - 1, signed=True)})"
        for layout, seconds in rows
        if (layout, seconds) in far
    ]
    return text + (f"\n\nOutliers, in none of these figures: {'; '.join(named)}." if named else "")


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
    """The page docs/accuracy/iterations.md: errors on rows not fitted on, and of the shipped constants."""
    rows = [row for path in files for row in read(path)]
    found = splits(rows) | {"shipped constants, all rows": score(rows, shipped().constants)}
    groups, _ = as_left_out(rows)
    return (
        "A GPT model split by tensor, pipeline and data parallelism is simulated by the 1F1B schedule "
        "(`reproductions.vtrain.megatron`). Errors in %. *Left out*: nothing of the group was fitted on. Rows of one "
        "node are left out by whole shapes (hidden size, tensor degree, micro-batch): rows of a shape that was seen "
        "with another number of layers test nothing. *Before*: the law that gave every device its own network card,"
        " fitted in the same way. The form of the factor where data groups change network cards was chosen by "
        "leaving out models and tensor degrees; other forms (without the number of nodes, without the degree) "
        "differ by 0.3 points, less than these rows can tell. What the rows of one node miss are layers whose time "
        "is irregular in their shape (tensor degrees 4 and 8, micro-batches 1 and 2): no smooth law has it, and the"
        " range says so. Outliers take more than "
        "a fifth longer than their twins of the nearest micro-batch; they enter no fit.\n\n"
        + groups
        + "\n\nThe stored constants, fitted on all of these rows:\n\n"
        + by_group(rows)
        + "\n\nOther splits, outliers among the rows. *Rank correlation* and *loss by choosing so*: over jobs with "
        "more than two measured layouts, how well layouts are ordered, and how much longer the predicted best one "
        "takes than the measured best.\n\n" + as_table(found)
    )


def main(given: Sequence[str]) -> int:
    parser = parser_of("vtrain", __doc__)
    parser.add_argument("--labels", type=Path, nargs="+", required=True)
    parser.add_argument("--splits", action="store_true", help="fit without each group in turn; takes minutes")
    parser.add_argument("--fit", action="store_true", help="as --splits, and store constants fitted on all rows")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(given)
    rows = [row for path in options.labels for row in read(path)]
    if not rows:
        raise ForetraceError("the files hold no rows; give the tables of vTrain.")
    parts = []
    if options.fit or options.splits:
        text, found = as_left_out(rows)
        if options.fit:
            write_bytes(STORED, (json.dumps(as_json(made(rows, found)), indent=1) + "\n").encode())
            shipped.cache_clear()
        parts += [text]
    scored = {"stored constants, all rows given": score(rows, shipped().constants)}
    print(json.dumps(scored, indent=1) if options.json else "\n\n".join([*parts, by_group(rows), as_table(scored)]))
    return 0
