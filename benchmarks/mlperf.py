"""Strong scaling of MLPerf Training results: the larger run predicted from the smaller one.

    python benchmarks/mlperf.py --labels RUNS.csv[.gz] ... [--json]

A pair is one organisation's runs of one benchmark, round, device and global batch on two numbers of devices; medians
over its runs. Steps per second count, except where the throughput field changes its unit with scale (ssd, retinanet,
maskrcnn): there the run time. Two predictions: *network*: work divided by devices, plus averaging gradients over links
between nodes with nothing hidden; *overhead*: the law of `plan/strong_scaling.py`, whose one constant per benchmark
comes from pairs of **other** organisations only, across nodes if this pair is.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from foretrace.cost.network import CollectiveKind, network
from foretrace.errors import ForetraceError
from foretrace.plan.strong_scaling import Pair, fit_overhead, speedup
from tables import percent, table

BY_RUN_TIME = frozenset(("ssd", "retinanet", "maskrcnn"))
# Millions of parameters whose gradients all devices average, 2 bytes each; benchmarks that exchange other things
# (embeddings, adapters of sharded models) have none here.
PARAMETERS = {"resnet": 25.6, "ssd": 38.0, "retinanet": 38.0, "maskrcnn": 44.0, "unet3d": 31.0, "bert": 336.0,
              "stable_diffusion": 866.0}  # fmt: skip
BETWEEN = "3200gbit/5us"  # of a node with a 400 Gbit/s adapter per device, eight of them
TOLERANCE = 0.15


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
    runs: dict[tuple[str, str, str, str, int], dict[int, list[tuple[float, float, int]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for path in paths:
        try:
            raw = path.read_bytes()
            text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
            for row in csv.DictReader(io.StringIO(text)):
                if row["status"] != "success" or not row["accelerators"] or not row["gbs"] or not row["run_min"]:
                    continue
                key = (row["benchmark"], row["round"], row["org"], row["accelerator"], int(float(row["gbs"])))
                figures = (float(row["median_throughput"] or 0), float(row["run_min"]), int(float(row["acc_per_node"])))
                runs[key][int(float(row["accelerators"]))].append(figures)
        except (OSError, KeyError, ValueError, EOFError) as error:
            raise ForetraceError(f"{path} is no table of MLPerf runs ({error!r}).") from error
    found, seen = [], set()
    for (benchmark, number, org, device, batch), sizes in sorted(runs.items()):
        middle = {
            n: (median(x[0] for x in figures), median(x[1] for x in figures), figures[0][2])
            for n, figures in sizes.items()
        }
        for fewer in sorted(middle):
            for more in sorted(n for n in middle if n > fewer):
                few, many = middle[fewer], middle[more]
                rates = few[0] > 0 and many[0] > 0 and benchmark not in BY_RUN_TIME
                ratio = many[0] / few[0] if rates else few[1] / many[1]
                again = (benchmark, org, device, fewer, more, few[:2], many[:2])  # shown again in a later round
                if again in seen:
                    continue
                seen.add(again)
                pair = Pair(global_batch=batch, fewer=fewer, more=more, speedup=ratio)
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
    more = each.step_s * each.pair.fewer / each.pair.more
    if each.across:
        more += network(BETWEEN, each.pair.more).cost(CollectiveKind.ALL_REDUCE, nbytes).seconds
    return each.step_s / more


def others(each: Measured, everybody: Sequence[Measured]) -> list[Pair]:
    """Pairs of other organisations to learn from."""
    found = [o for o in everybody if o.benchmark == each.benchmark and o.org != each.org]
    return [o.pair for o in [o for o in found if o.across == each.across] or found]


def by_overhead(each: Measured, everybody: Sequence[Measured]) -> float | None:
    """Speed-up with the overhead that other organisations' pairs show; None where there are none."""
    learned = others(each, everybody)
    return speedup(each.pair, fit_overhead(learned)) if learned else None


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


def report(found: Sequence[Measured]) -> dict[str, object]:
    """Every pair with both predictions, and a summary. Errors: predicted over measured time of the larger run − 1."""
    rows: list[dict[str, object]] = []
    for each in found:
        law, net = by_overhead(each, found), by_network(each)
        rows.append(
            {
                "benchmark": each.benchmark,
                "round": each.round,
                "organisation": each.org,
                "device": each.device,
                "global_batch": each.pair.global_batch,
                "fewer": each.pair.fewer,
                "more": each.pair.more,
                "speedup": each.pair.speedup,
                "network_error": None if net is None else each.pair.speedup / net - 1,
                "overhead_error": None if law is None else each.pair.speedup / law - 1,
                "why": "" if law is None or abs(each.pair.speedup / law - 1) <= TOLERANCE else why(each, found),
            }
        )
    errors = [abs(float(str(row["overhead_error"]))) for row in rows if row["overhead_error"] is not None]
    networks = [abs(float(str(row["network_error"]))) for row in rows if row["network_error"] is not None]
    summary = {
        "pairs": len(rows),
        "predicted": len(errors),
        "median_error": median(errors) if errors else None,
        "within_15_percent": sum(e <= TOLERANCE for e in errors) / len(errors) if errors else None,
        "network_alone_median_error": median(networks) if networks else None,
    }
    return {"summary": summary, "pairs": rows}


def as_table(result: dict[str, object]) -> str:
    """Markdown: summary line and one row per pair."""
    summary, pairs = result["summary"], result["pairs"]
    assert isinstance(summary, dict) and isinstance(pairs, list)
    rows = []
    for row in pairs:
        off = row["overhead_error"]
        rows.append(
            [
                f"{row['benchmark']} {row['round']} {row['organisation']}, {row['device']}", f"{row['global_batch']}",
                f"{row['fewer']} → {row['more']}", f"{row['speedup']:.2f}",
                "–" if row["network_error"] is None else percent(row["network_error"], signed=True),
                "–" if off is None else percent(off, signed=True),
                str(row["why"]),
            ]
        )  # fmt: skip
    line = (
        f"{summary['predicted']} of {summary['pairs']} pairs have another organisation to learn from: median error "
        f"{percent(summary['median_error'])} %, {percent(summary['within_15_percent'])} % within 15 %; the network "
        f"alone is off by {percent(summary['network_alone_median_error'])} % (median).\n\n"
        if summary["predicted"]
        else "No pair has another organisation to learn from.\n\n"
    )
    header = ("pair", "global batch", "devices", "speed-up", "network alone %", "with overhead %", "why it misses")
    return line + table(header, rows)


def section(files: Sequence[Path]) -> str:
    """The part of docs/accuracy.md."""
    return (
        "The same benchmark, round, organisation, device and global batch on two numbers of devices: the larger run "
        "predicted from the smaller one. *Network alone* divides the work by the devices and adds averaging gradients "
        "between nodes. *With overhead* is the law of `foretrace.plan.strong_scaling`: a step on b samples per device "
        "takes time in proportion to b + s; s of a benchmark is learned from other organisations' pairs only; that "
        "there is such a law "
        "was seen on all of these pairs. Errors "
        "are predicted / measured time of the larger run − 1, in %.\n\n" + as_table(report(read(files)))
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=Path, nargs="+", required=True)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    try:
        found = read(given.labels)
    except ForetraceError as error:
        print(f"mlperf: {error}", file=sys.stderr)
        return 2
    result = report(found)
    print(json.dumps(result, indent=1) if given.json else as_table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
