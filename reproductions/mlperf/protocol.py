"""MLPerf Training results on more devices: the larger run predicted from the smaller one.

    python -m reproductions mlperf [--labels RUNS.csv[.gz] ...] [--json]
    python -m reproductions mlperf [--labels RUNS.csv[.gz] ...] --ask resnet 8 3200 512 20480

A pair is one organisation's runs of one benchmark, round and device on two numbers of devices, with one global batch
(strong scaling) or two; medians over its runs. Samples per second count, except where the throughput field changes its
unit with scale (ssd, retinanet, maskrcnn): there the run time, which says nothing of two batches (they converge in
different numbers of samples), so such pairs are left out.

Two predictions: *network*: work divided by devices, plus averaging gradients over links between nodes with nothing
hidden; *overhead*: the law of `law.py`, whose one constant per benchmark comes from pairs of **other**
organisations only, with one batch, across nodes if this pair is. Its 80 % range is how far that law was off on others'
pairs, each predicted from yet other organisations. `--ask` names a benchmark, devices and global batch of a run at
hand, and those of the run in question: it answers with samples per second as a multiple.
"""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, log, log2, sqrt
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from foretrace.cost.network.network import CollectiveKind
from foretrace.cost.network.parse import network
from foretrace.errors import ForetraceError
from foretrace.names import question as question_of
from foretrace.names import resolve
from foretrace.reading import read_text
from reproductions import parser_of
from reproductions.mlperf.law import Pair, fit_overhead, speedup
from tables import percent, shared_traces, table

BY_RUN_TIME = frozenset(("ssd", "retinanet", "maskrcnn"))
# Millions of parameters whose gradients all devices average, 2 bytes each; benchmarks that exchange other things
# (embeddings, adapters of sharded models) have none here.
PARAMETERS = {"resnet": 25.6, "ssd": 38.0, "retinanet": 38.0, "maskrcnn": 44.0, "unet3d": 31.0, "bert": 336.0,
              "stable_diffusion": 866.0}  # fmt: skip
BETWEEN = "3200gbit/5us"  # of a node with a 400 Gbit/s adapter per device, eight of them
TOLERANCE = 0.15
ENOUGH = 5  # pairs of others from which a range can be told
BEYOND = 2  # times the samples per device that were measured, within which the law is trusted


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A pair with where it is from."""

    benchmark: str
    round: str
    org: str
    device: str
    per_node: int
    step_s: float  # of the smaller run, 0 if unknown
    pair: Pair

    @property
    def across(self) -> bool:
        """Whether the larger run needs more than one node."""
        return self.pair.more > self.per_node


def read(paths: Iterable[Path]) -> list[Measured]:
    """All pairs of the files. Raises ForetraceError with the file that is wrong."""
    runs: dict[tuple[str, str, str, str], dict[tuple[int, int], list[tuple[float, float, int]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for path in paths:
        usable = 0
        try:
            for row in csv.DictReader(io.StringIO(read_text(path))):
                if row["status"] != "success" or not row["accelerators"] or not row["gbs"] or not row["run_min"]:
                    continue
                key = (row["benchmark"], row["round"], row["org"], row["accelerator"])
                figures = (float(row["median_throughput"] or 0), float(row["run_min"]), int(float(row["acc_per_node"])))
                runs[key][int(float(row["accelerators"])), int(float(row["gbs"]))].append(figures)
                usable += 1
        except (KeyError, ValueError, TypeError, csv.Error) as error:
            raise ForetraceError(f"{path} is no table of MLPerf runs ({error!r}).") from error
        if not usable:
            raise ForetraceError(
                f"{path} is no table of MLPerf runs (no row has a run that succeeded); give one of its RUNS.csv."
            )
    found, seen = [], set()
    for (benchmark, number, org, device), sizes in sorted(runs.items()):
        middle = {
            size: (median(x[0] for x in figures), median(x[1] for x in figures), figures[0][2])
            for size, figures in sizes.items()
        }
        for small, large in product(sorted(middle), sorted(middle)):
            (fewer, batch), (more, larger) = small, large
            few, many = middle[small], middle[large]
            rates = few[0] > 0 and many[0] > 0 and benchmark not in BY_RUN_TIME
            again = (benchmark, org, device, small, large, few[:2], many[:2])  # shown again in a later round
            if fewer >= more or again in seen or not (rates or batch == larger):
                continue
            seen.add(again)
            ratio = many[0] / few[0] if rates else few[1] / many[1]
            pair = Pair(global_batch=batch, fewer=fewer, more=more, speedup=ratio, larger_batch=larger)
            found.append(
                Measured(benchmark=benchmark, round=number, org=org, device=device, per_node=many[2],
                         step_s=batch / few[0] if rates else 0.0, pair=pair)
            )  # fmt: skip
    return found


def by_network(each: Measured) -> float | None:
    """Speed-up if only the averaging of gradients between nodes is added; None where it cannot be told."""
    if not each.step_s or each.benchmark not in PARAMETERS:
        return None
    nbytes = 2e6 * PARAMETERS[each.benchmark]
    few, many = each.pair.batches
    more = each.step_s * each.pair.fewer / each.pair.more * many / few
    if each.across:
        more += network(BETWEEN, each.pair.more).cost(CollectiveKind.ALL_REDUCE, nbytes).seconds
    return many / few * each.step_s / more


def others(each: Measured, everybody: Sequence[Measured]) -> list[Pair]:
    """Pairs of other organisations to learn from."""
    found = [o for o in everybody if o.benchmark == each.benchmark and o.org != each.org]
    same = [o for o in found if len(set(o.pair.batches)) == 1] or found  # what a step costs shows at one batch
    return [o.pair for o in [o for o in same if o.across == each.across] or same]


def by_overhead(each: Measured, everybody: Sequence[Measured]) -> float | None:
    """Speed-up with the overhead that other organisations' pairs show; None where there are none."""
    learned = others(each, everybody)
    return speedup(each.pair, fit_overhead(learned)) if learned else None


def interval(each: Measured, everybody: Sequence[Measured]) -> tuple[float, float] | None:
    """Where the speed-up lies 4 times out of 5; None where nothing can be learned.

    From how far the law was off on pairs of others, per root of a doubling: on this benchmark or on all, whichever is
    wider. A benchmark with fewer than ENOUGH such pairs may be like any other, so there the widest of all counts. Of
    seven such rules the one whose ranges hold 78 and 80 % of the pairs of a left-out organisation.
    """
    predicted = by_overhead(each, everybody)
    apart = [o for o in everybody if o.org != each.org]
    off = [(o.benchmark, error / _doublings(o)) for o in apart if (error := _error(o, apart)) is not None]
    if predicted is None or not off:
        return None
    by_name = defaultdict(list)
    for benchmark, error in off:
        by_name[benchmark].append(error)
    enough = {benchmark: errors for benchmark, errors in by_name.items() if len(errors) >= ENOUGH}
    own = enough.get(each.benchmark)
    pools = [[error for _, error in off], *([own] if own else enough.values())]
    low, high = (np.array([np.quantile(pool, at) for pool in pools]) for at in (0.1, 0.9))
    reach = _doublings(each)
    return predicted * exp(min(low.min(), 0.0) * reach), predicted * exp(max(high.max(), 0.0) * reach)


def _error(each: Measured, everybody: Sequence[Measured]) -> float | None:
    """Logarithm of measured over predicted speed-up, None where nothing can be learned."""
    predicted = by_overhead(each, everybody)
    return None if predicted is None else log(each.pair.speedup / predicted)


def _doublings(each: Measured) -> float:
    """Root of the number of doublings of the devices."""
    return sqrt(log2(each.pair.more / each.pair.fewer))


def why(each: Measured, everybody: Sequence[Measured]) -> str:
    """What the runs themselves say about a miss."""
    pair = each.pair
    if pair.speedup > 1.02 * pair.more / pair.fewer:
        return "faster than its devices allow: something else held the smaller run back"
    own, elsewhere = fit_overhead([pair]), fit_overhead(others(each, everybody))
    text = f"a step costs {own:.2g} samples here, {elsewhere:.2g} elsewhere"
    if len({o.org for o in everybody if o.benchmark == each.benchmark and o.org != each.org}) == 1:
        text += " (one other submitter)"
    return text + (", run time with evaluation" if each.benchmark in BY_RUN_TIME else "")


def report(found: Sequence[Measured]) -> dict[str, Any]:
    """Every pair with both predictions, and a summary. Errors: predicted over measured time of the larger run − 1."""
    rows: list[dict[str, Any]] = []
    for each in found:
        law, net, lies = by_overhead(each, found), by_network(each), interval(each, found)
        few, many = each.pair.batches
        rows.append(
            {
                "benchmark": each.benchmark,
                "round": each.round,
                "organisation": each.org,
                "device": each.device,
                "global_batch": few,
                "larger_batch": many,
                "fewer": each.pair.fewer,
                "more": each.pair.more,
                "speedup": each.pair.speedup,
                "network_error": None if net is None else each.pair.speedup / net - 1,
                "overhead_error": None if law is None else each.pair.speedup / law - 1,
                "predicted": law,
                "predicted_range": lies,
                "covered": None if lies is None else lies[0] <= each.pair.speedup <= lies[1],
                "why": "" if law is None or abs(each.pair.speedup / law - 1) <= TOLERANCE else why(each, found),
            }
        )
    groups = {"one batch": [row for row in rows if row["global_batch"] == row["larger_batch"]],
              "two batches": [row for row in rows if row["global_batch"] != row["larger_batch"]]}  # fmt: skip
    for name in sorted({str(row["benchmark"]) for row in rows}):
        for group in ("one batch", "two batches"):
            groups[f"{name}, {group}"] = [row for row in groups[group] if row["benchmark"] == name]
    return {"summary": {name: _summed(each) for name, each in groups.items() if each}, "pairs": rows}


def _summed(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How far the predictions of these pairs were off; None where nothing was predicted."""
    errors = [abs(row["overhead_error"]) for row in rows if row["overhead_error"] is not None]
    networks = [abs(row["network_error"]) for row in rows if row["network_error"] is not None]
    covered = [row["covered"] for row in rows if row["covered"] is not None]
    return {
        "pairs": len(rows),
        "predicted": len(errors),
        "median_error": median(errors) if errors else None,
        "worst_error": max(errors) if errors else None,
        "within_15_percent": sum(e <= TOLERANCE for e in errors) / len(errors) if errors else None,
        "covered": sum(covered) / len(covered) if covered else None,
        "network_alone_median_error": median(networks) if networks else None,
    }


def as_table(result: Mapping[str, Any]) -> str:
    """Markdown: one row per group of pairs, and one per pair."""

    def cell(value: float | None, *, signed: bool = False) -> str:
        return "–" if value is None else percent(value, signed=signed)

    sums = [
        [name, f"{each['predicted']} of {each['pairs']}", cell(each["median_error"]), cell(each["worst_error"]),
         cell(each["within_15_percent"]), cell(each["covered"]), cell(each["network_alone_median_error"])]
        for name, each in result["summary"].items()
    ]  # fmt: skip
    rows = [
        [
            f"{row['benchmark']} {row['round']} {row['organisation']}, {row['device']}",
            " → ".join(dict.fromkeys(f"{row[key]}" for key in ("global_batch", "larger_batch"))),
            f"{row['fewer']} → {row['more']}", f"{row['speedup']:.2f}", cell(row["network_error"], signed=True),
            cell(row["overhead_error"], signed=True), row["why"],
        ]
        for row in result["pairs"]
    ]  # fmt: skip
    groups = (
        "pairs",
        "predicted",
        "median %",
        "worst %",
        "within 15 %",
        "in the 80 % range",
        "network alone, median %",
    )
    header = ("pair", "global batch", "devices", "speed-up", "network alone %", "with overhead %", "why it misses")
    return table(groups, sums) + "\n\n" + table(header, rows)


def ask(question: Sequence[str], found: Sequence[Measured]) -> dict[str, Any]:
    """The answer to `--ask`. Raises ForetraceError where the question makes no sense or nothing can be learned."""
    benchmark, *figures = question
    known = sorted({each.benchmark for each in found})
    if (meant := resolve(benchmark, known)) is None:
        raise ForetraceError(f"no pair of {benchmark} is in these files; {question_of(benchmark, known)}")
    benchmark = meant
    if not all(each.isdecimal() for each in figures):
        raise ForetraceError(f"--ask {' '.join(question)}: want whole numbers behind the benchmark.")
    fewer, batch, more, larger = map(int, figures)
    pair = Pair(global_batch=batch, fewer=fewer, more=more, speedup=1.0, larger_batch=larger)
    seen = [
        samples / devices
        for each in found
        if each.benchmark == benchmark
        for samples, devices in zip(each.pair.batches, (each.pair.fewer, each.pair.more), strict=True)
    ]
    for samples, devices in ((batch, fewer), (larger, more)):
        if not min(seen) / BEYOND <= samples / max(devices, 1) <= max(seen) * BEYOND and samples and devices:
            raise ForetraceError(
                f"{samples} samples on {devices} devices are {samples / devices:.3g} for each, and the runs of "
                f"{benchmark} have {min(seen):.3g} to {max(seen):.3g}: nothing measured says what such a step takes; "
                f"ask within {BEYOND} times that."
            )
    per_node = 8
    asked = Measured(benchmark=benchmark, round="", org="", device="", per_node=per_node, step_s=0.0, pair=pair)
    predicted, lies = by_overhead(asked, found), interval(asked, found)
    if predicted is None or lies is None:
        raise ForetraceError(f"nothing can be learned of {benchmark} from these files.")
    return {"benchmark": benchmark, "fewer": fewer, "more": more, "global_batch": batch, "larger_batch": larger,
            "predicted": predicted, "predicted_range": lies}  # fmt: skip


def section(files: Sequence[Path]) -> str:
    """The page docs/accuracy/scaling.md."""
    return (
        "The same benchmark, round, organisation and device on two numbers of devices, with one global batch or two: "
        "the larger run predicted from the smaller one; the speed-up is that of samples per second. *Network alone* "
        "divides the work by the devices and adds averaging gradients between nodes. *With overhead* is the law of "
        "`reproductions/mlperf/law.py`: a step on b samples per device takes time in proportion to b + s; s of a "
        "benchmark is learned from other organisations' pairs with one batch only; that there is such a law was seen "
        "on the pairs with one batch. Errors are predicted / measured time of the larger run − 1, in %.\n\n"
        + as_table(report(read(files)))
    )


def main(arguments: Sequence[str]) -> int:
    parser = parser_of("mlperf", __doc__)
    parser.add_argument("--labels", type=Path, nargs="+", help="by default those of the shared data")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ask", nargs=5, metavar=("BENCHMARK", "FEWER", "BATCH", "MORE", "BATCH"))
    given = parser.parse_args(arguments)
    traces = shared_traces()
    labels = given.labels or (traces and sorted((traces.parent / "mlperf-training").glob("*_runs.csv.gz")))
    if not labels:
        raise ForetraceError("no results of MLPerf Training are here; give --labels, or set FORETRACE_SHARED_DATA.")
    found = read(labels)
    answer = None if given.ask is None else ask(given.ask, found)
    if answer is not None and not given.json:
        low, high = answer["predicted_range"]
        print(f"{answer['predicted']:.3g} times the samples per second ({low:.3g} – {high:.3g}).")
        return 0
    result = answer or report(found)
    print(json.dumps(result, indent=1) if given.json else as_table(result))
    return 0
