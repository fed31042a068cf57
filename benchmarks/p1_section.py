"""The page docs/accuracy/predictor.md on networks and kernels of GPUs that the predictor never saw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from accuracy_p1 import LOOKS, PUBLISHED, arguments_of, evaluate
from tables import ROOT, table

ABLATIONS = ROOT / "benchmarks" / "data" / "predictor_ablations.json"
TEXT = """
The learned predictor (`foretrace.cost.devices.learned`) is trained on isolated kernels of five GPUs (A100-PCIe-40,
V100, P100, T4, P4; rows of split *train*). Whole networks come from their operator graph and the device sheet alone, by
replaying a task graph: what eager PyTorch launches for each node, a host lane that launches ahead of the stream,
kernels that cost device time only (what measuring one kernel alone adds is hidden in a stream), and a board power limit
averaged over 20 ms. No label of a network was used for fitting or choosing, nor a row of A100-80, L4 or H100. What was
known all the same: earlier prototypes' mean errors on the shared held-out rows, that L4 reaches 0.28 of its peak, and
their joules per FLOP of Ampere, Ada and Hopper (scaled by foundry figures, unconfirmed), which were taken over as they
stood. *Published*: NeuSight's stored predictions on the very same rows; on all its rows (some are not in the file) it
has {held_out} % on held-out GPUs and {all} % over all. Errors are means of absolute errors in %; *covered* is how often
the 80 % range from leaving devices out holds; *added up* is what the same kernels give without a replay, each as an
isolated measurement would show it (computed after the first look, nothing was chosen by it).
"""


def section(data: Path) -> str:
    """Tables of everything that `accuracy_p1.py` scores on the shared data."""
    kernels = data / "kernels"
    result = evaluate(arguments_of([
        "--opgraphs", str(kernels / "opgraph"), "--labels", str(kernels / "e2e_summary.csv.gz"),
        "--devices", str(kernels / "devices.csv"), "--kernels", str(kernels / "kernels.csv.gz"),
    ]))  # fmt: skip
    return TEXT.format(**PUBLISHED).strip() + "\n\n" + "\n\n".join((
        _networks(result["networks"]), _kernels(result), _few_shot(result), _left_out(result), _looks(),
        "Said about the sheet and the label file: " + "; ".join(result["notes"]) + ".",
    ))  # fmt: skip


def _networks(found: dict[str, dict[str, Any]]) -> str:
    check = found.get("pipeline_check", {})
    first = ("held_out", "trained_on", "all")
    rows = [
        [name.replace("_", " "), str(part["rows"]), _number(part["mape"]), f"{part['signed']:+.2f}",
         _number(part["neusight_same_rows"]), _number(part["summed"]), _number(part["covered_80"])]
        for name, part in sorted(found.items(), key=lambda item: (item[0] not in first, item[0]))
        if "mape" in part
    ]  # fmt: skip
    return table(("networks", "rows", "error", "signed", "published", "added up", "covered"), rows) + (
        f"\n\nPipeline check: a plain roofline through the same graphs is off by {check['roofline_mape']} %, the "
        f"stored one by {check['stored_roofline_mape']} %."
        if check
        else ""
    )


def _kernels(result: dict[str, Any]) -> str:
    header = (
        "kernels of GPUs never seen (P1b)",
        "rows",
        "mean",
        "median",
        "roofline mean",
        "roofline median",
        "covered",
    )
    keys = ("rows", "mean", "median", "roofline_mean", "roofline_median", "covered_80")
    rows = [[name, *(_number(part[key]) for key in keys)] for name, part in result["kernels"].items()]
    return table(header, rows)


def _few_shot(result: dict[str, Any]) -> str:
    shots = [str(each["k"]) for each in next(iter(result["few_shot_kernels"].values()))]
    rows = []
    for title, what in (("few_shot_kernels", "mean"), ("few_shot_kernels", "median"), ("few_shot_networks", "mape")):
        for name, points in result[title].items():
            label = "networks" if what == "mape" else f"kernels, {what}"
            rows.append([f"{name}, {label}", *(_number(point[what]) for point in points)])
    return (
        "Error after measuring k kernels of the new GPU, chosen by KMeans task sampling from its pool without looking "
        "at a label; a ridge regression shifts what was missed. Its form was chosen by leaving training GPUs out, "
        "after a first one (a shift per kind of kernel) had been scored here. Measured kernels are not scored.\n\n"
    ) + table(("k", *shots), rows)


def _left_out(result: dict[str, Any]) -> str:
    known = json.loads(ABLATIONS.read_text(encoding="utf-8")) if ABLATIONS.exists() else {}
    keys = ("networks", "networks_signed", "bmm", "linear", "vector")
    rows = [[name, *(_number(row.get(key)) for key in keys)] for name, row in result["leave_one_device_out"].items()]
    mean = round(sum(row["networks"] for row in result["leave_one_device_out"].values()) / len(rows), 2)
    ablated = [["as shipped", _number(mean)], *([name, _number(each["mean_networks"])] for name, each in known.items())]
    return (
        "What settings were chosen by: each training GPU predicted by the others (kernels of split *train*; networks "
        "are 300 random bags of large kernels). Joules per FLOP of older boards and the power window come from all "
        "five.\n\n"
        + table(("left out", "bags", "signed", "bmm", "linear", "vector"), rows)
        + "\n\n"
        + table(("setting", "bags, mean of the five"), ablated)
    )


def _looks() -> str:
    looks = json.loads(LOOKS.read_text(encoding="utf-8")) if LOOKS.exists() else []
    rows = [
        [str(i), each["date"], each["what"], str(each["rows"]), _number(each["held_out"]), _number(each["all"])]
        for i, each in enumerate(looks, 1)
    ]
    return "Every look at labels of networks:\n\n" + table(
        ("look", "date", "what was chosen, and how", "rows", "held out", "all"), rows
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,}"
