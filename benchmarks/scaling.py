"""How far kernel times scaled from one GPU to another are off, between every two GPUs of the public tables.

    python benchmarks/scaling.py [--kernels kernels.csv.gz] [--gemm gemm_bf16.parquet] [--all] [--json]

Prints, per class of kernel, the error of Habitat's wave scaling, of the plain ratio of rooflines and of
`foretrace.cost.devices.scaled.rescale`; the range that holds the measured time 4 times out of 5, found with each GPU
left out in turn, and how often it held on the GPU left out; and the shares of the peaks that large kernels reach, from
which the constants of `cost/devices/scaled.py` come. Only the GPUs that predictors train on are read: those of protocol
P1 (A100-40, P100, P4, T4, V100; MI100, MI210 and L4 for their shares) and of P2 (A100, L40S, RTX PRO 6000).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.cost.calls import Call, Calls, Family, Precision
from foretrace.cost.devices.roofline import MATRIX, floor_s, peak_flops
from foretrace.cost.devices.scaled import rescale
from foretrace.hardware.devices import find, named
from habitat import wave_scaling
from tables import ROOT, percent, table

Float64 = npt.NDArray[np.float64]

TRAINING = ("A100-PCIe-40GB", "P100-PCIe-16GB", "P4", "T4", "V100-PCIe-32GB")
OTHER_VENDOR = ("MI100", "MI210")
SHARES_ALONE = "L4"  # no predictor sees it
P2 = {"a100_sxm": "A100-SXM4-80GB", "l40s": "L40S", "rtx_pro_6000_server": "RTX-PRO-6000-Server"}
OVERHEAD_S = 2e-4  # times of the fp32 table hold 25 – 90 us of measuring; shorter ones say more of that than of kernels
# Products of the training split measured throttled, by the rule that a device's linear rows are dropped where their
# median share of the peak is below 0.9 of that of its batched products: 0.18 and 0.54 on P4, 0.56 and 0.73 on P100.
THROTTLED = (("P4", "train", "linear"), ("P100-PCIe-16GB", "train", "linear"))
_OPERANDS = {"relu": 2, "gelu": 2, "tanh": 2, "softmax": 2, "ln": 2}
_FAMILY = {"bmm": Family.GEMM, "linear": Family.GEMM, "softmax": Family.SOFTMAX, "ln": Family.NORM}
CLASSES = ("linear", "bmm", "elementwise", "softmax", "ln")


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """Calls measured on several devices: seconds per device, NaN where a call was not measured there (n rows)."""

    name: str
    calls: Calls
    kind: tuple[str, ...]  # class of every row
    seconds: Mapping[str, Float64]
    blocks: Mapping[str, Float64]


def data_folder() -> Path:
    given = os.environ.get("FORETRACE_SHARED_DATA")
    return Path(given) if given else ROOT.parent / "shared" / "data"


def read_kernels(path: Path, devices: Iterable[str]) -> Measured:
    """The fp32 table; the median where a shape was measured more than once on a device."""
    wanted = set(devices)
    times: dict[tuple[Any, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    grids: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            device = find(row["device"])
            if device is None or device.short not in wanted:
                continue
            if (device.short, row["split"], row["op"]) in THROTTLED:
                continue
            key = (row["op"], *(int(float(row[c] or 0)) for c in "BMNKH"))
            times[key][device.short].append(float(row["latency_ms"]) / 1e3)
            grids[key][device.short] = float(row["grid"] or 0)
    rows, kinds = [], []
    for op, b, m, n, k, h in times:
        if op in ("bmm", "linear"):
            bb, mm = (b, m) if op == "bmm" else (1, b * m)
            elements = bb * mm * n, bb * n * k if op == "bmm" else n * k, bb * mm * k
            rows.append(
                Call(family=Family.GEMM, b=bb, m=mm, n=k, k=n, flops=2.0 * bb * mm * n * k,
                     read_bytes=4.0 * (elements[0] + elements[1]), written_bytes=4.0 * elements[2], op=op)
            )  # fmt: skip
        else:
            operands = _OPERANDS.get(op, 2 if op.endswith("u") else 3)
            rows.append(
                Call(family=_FAMILY.get(op, Family.ELEMENTWISE), m=b, n=h, flops=float(b * h),
                     read_bytes=4.0 * (operands - 1) * b * h, written_bytes=4.0 * b * h, op=op)
            )  # fmt: skip
        kinds.append(op if op in CLASSES else "elementwise")
    names = sorted(wanted)
    return Measured(
        name="fp32",
        calls=Calls.from_rows(rows),
        kind=tuple(kinds),
        seconds={d: np.array([float(np.median(t[d])) if d in t else np.nan for t in times.values()]) for d in names},
        blocks={d: np.array([g.get(d, 0.0) for g in grids.values()]) for d in names},
    )


def read_products(path: Path) -> Measured:
    """The bf16 table of products."""
    from pyarrow import parquet

    columns = parquet.read_table(path).to_pydict()
    system = np.array(columns["system"])
    sizes = {c: np.array(columns[c], dtype=np.float64) for c in ("m", "n", "k")}
    seconds: dict[str, Float64] = {}
    m = n = k = np.zeros(0)
    for name, short in P2.items():
        at = np.flatnonzero(system == name)
        at = at[np.lexsort((sizes["k"][at], sizes["n"][at], sizes["m"][at]))]
        m, n, k = (sizes[c][at] for c in ("m", "n", "k"))
        seconds[short] = np.array(columns["latency_ms"], dtype=np.float64)[at] / 1e3
    one = np.ones(len(m))
    calls = Calls(
        family=np.full(len(m), Family.GEMM, dtype=np.uint8), precision=np.full(len(m), Precision.BF16, dtype=np.uint8),
        b=one, m=m, n=n, k=k, flops=2 * m * n * k, read_bytes=2 * (m * k + k * n), written_bytes=2 * m * n,
        op=("aten::mm",) * len(m), text=("",) * len(m),
    )  # fmt: skip
    blocks = {short: np.zeros(len(m)) for short in seconds}
    return Measured(name="bf16", calls=calls, kind=("products, bf16",) * len(m), seconds=seconds, blocks=blocks)


def pairs(data: Measured, kind: str, least_s: float, *, across: bool = False) -> list[dict[str, Any]]:
    """Errors between every two devices, one row per pair; `log` is ln(measured / scaled) of every call."""
    mine = np.array([each == kind for each in data.kind])
    rows = []
    for a, b in permutations(data.seconds, 2):
        if (named(a).vendor != named(b).vendor) != across:
            continue
        here, there = data.seconds[a], data.seconds[b]
        at = np.flatnonzero(mine & (here >= least_s) & (there >= least_s))
        if len(at) < 20:
            continue
        source, target = named(a), named(b)
        calls, seconds, truth = data.calls.take(at), here[at], there[at]
        habitat = wave_scaling(seconds, calls.flops, calls.nbytes, source, target, blocks=data.blocks[a][at])
        roofline = seconds * floor_s(calls, target) / floor_s(calls, source)
        ours = rescale(seconds, calls, source, target)
        rows.append({
            "source": a, "target": b, "rows": len(at),
            "habitat": float(np.mean(np.abs(habitat / truth - 1))),
            "roofline": float(np.mean(np.abs(roofline / truth - 1))),
            "scaled": float(np.mean(np.abs(ours / truth - 1))),
            "log": np.log(truth / ours),
        })  # fmt: skip
    return rows


def left_out(rows: list[dict[str, Any]], devices: Iterable[str]) -> dict[str, Any]:
    """80 % range of measured over scaled: over all pairs, and how often one without a device held on it."""
    inside, count = 0, 0
    for held in devices:
        others = [row["log"] for row in rows if held not in (row["source"], row["target"])]
        mine = [row["log"] for row in rows if row["target"] == held]
        if not others or not mine:
            continue
        low, high = np.quantile(np.concatenate(others), (0.1, 0.9))
        found = np.concatenate(mine)
        inside += int(((found >= low) & (found <= high)).sum())
        count += len(found)
    low, high = np.exp(np.quantile(np.concatenate([row["log"] for row in rows]), (0.1, 0.9)))
    medians = np.exp([float(np.median(row["log"])) for row in rows])
    return {
        "low": float(low), "high": float(high), "covered": inside / count if count else float("nan"),
        "device_low": float(np.quantile(medians, 0.1)), "device_high": float(np.quantile(medians, 0.9)),
    }  # fmt: skip


def summary(data: Measured, least_s: float, *, across: bool = False) -> list[dict[str, Any]]:
    """One row per class of kernel; `across` takes pairs of devices of two vendors, else of one."""
    found = []
    for kind in dict.fromkeys(data.kind):
        rows = pairs(data, kind, least_s, across=across)
        if not rows:
            continue
        mean = {name: float(np.mean([row[name] for row in rows])) for name in ("habitat", "roofline", "scaled")}
        found.append({
            "kind": kind, "pairs": len(rows), "rows": sum(row["rows"] for row in rows), **mean,
            **left_out(rows, data.seconds),
            "by_pair": [{key: value for key, value in row.items() if key != "log"} for row in rows],
        })  # fmt: skip
    return found


def shares(data: Measured) -> list[dict[str, Any]]:
    """Median share of the peak and of the bandwidth that large calls reach, per device and class."""
    found = []
    for short, seconds in data.seconds.items():
        device = named(short)
        for kind in dict.fromkeys(data.kind):
            mine = np.array([each == kind for each in data.kind]) & ~np.isnan(seconds)
            calls, took = data.calls.take(mine), seconds[mine]
            product = np.isin(calls.family, MATRIX)
            rate = peak_flops(device, Precision(int(calls.precision[0]))) if len(calls) else 1.0
            large = np.where(product, calls.flops > 5e10, calls.nbytes > 1e8)
            if large.sum() < 10:
                continue
            least = np.where(product, calls.flops / rate, calls.nbytes / device.memory_gb_s / 1e9)
            found.append({"device": short, "kind": kind, "share": float(np.median((least / took)[large])),
                          "rows": int(large.sum())})  # fmt: skip
    return found


def measure(kernels: Path, gemm: Path | None) -> dict[str, Any]:
    known = read_kernels(kernels, (*TRAINING, *OTHER_VENDOR, SHARES_ALONE))
    both, fp32 = (
        replace(known, seconds={name: known.seconds[name] for name in names})
        for names in (sorted((*TRAINING, *OTHER_VENDOR)), TRAINING)
    )
    found: dict[str, Any] = {
        "least_s": OVERHEAD_S,
        "fp32": summary(fp32, OVERHEAD_S),
        "fp32_all": summary(fp32, 0.0),
        "vendors": summary(both, OVERHEAD_S, across=True),
        "shares": shares(known),
    }
    if gemm is not None:
        bf16 = read_products(gemm)
        found["bf16"] = summary(bf16, 0.0)
        found["shares"] += shares(bf16)
    return found


def rows_of(found: dict[str, Any]) -> str:
    """The classes as a Markdown table."""
    header = ("kernels", "pairs", "measured twice", "wave scaling (Habitat)", "roofline ratio", "`scaled`",
              "80 % range of the factor",
              "of its median per pair", "held on the GPU left out")  # fmt: skip
    body = []
    for name, rows in (
        ("", found["fp32"]),
        ("all times: ", found["fp32_all"]),
        ("two vendors: ", found["vendors"]),
        ("", found.get("bf16", [])),
    ):
        for row in rows:
            body.append([
                name + row["kind"], str(row["pairs"]), f"{row['rows']:,}", percent(row["habitat"]),
                percent(row["roofline"]), percent(row["scaled"]), f"{row['low']:.2f} – {row['high']:.2f}",
                f"{row['device_low']:.2f} – {row['device_high']:.2f}",
                percent(row["covered"]),
            ])  # fmt: skip
    return table(header, body)


def section(found: dict[str, Any]) -> str:
    """For docs/accuracy/devices.md."""
    intro = (
        "Single kernels, from every GPU to every other that measured the same shapes (`python benchmarks/scaling.py`): "
        "mean absolute error in %. float32 on A100-40, P100, P4, T4, V100, from 0.2 ms on, below which the times of "
        "this table are mostly what measuring costs (*all times* has them); bf16 products on A100, L40S and RTX PRO "
        "6000; *two vendors*: from or to MI100 and MI210. *Wave scaling* is Habitat's rule with the recorded grid; its "
        "paper uses it for kernels that stay alike, and perceptrons, which are not public, for products (11.8 % over "
        "whole iterations, unconfirmed). The range is of measured over scaled time; the last column says how often the "
        "range of the pairs without a GPU held on that GPU. What elementwise kernels, ln and softmax reach on each of "
        "these GPUs was read from this table, large kernels alone.\n\n"
    )
    by_pair: dict[tuple[str, str], list[tuple[int, float, float]]] = defaultdict(list)
    for part in found["fp32"]:
        if part["kind"] in ("bmm", "linear"):
            for row in part["by_pair"]:
                by_pair[row["source"], row["target"]].append((row["rows"], row["habitat"], row["scaled"]))
    names = list(dict.fromkeys(source for source, _ in by_pair))
    lines = []
    for a in names:
        cells = []
        for b in names:
            rows = by_pair.get((a, b))
            weight = sum(count for count, _, _ in rows) if rows else 0
            cells.append(
                f"{sum(n * h for n, h, _ in rows) / weight:.0%} → {sum(n * s for n, _, s in rows) / weight:.0%}"
                if rows
                else "–"
            )
        lines.append([a, *cells])
    pairs_intro = "\n\nfloat32 products by pair, wave scaling → `scaled`:\n\n"
    return intro + rows_of(found) + pairs_intro + table(("from \\ to", *names), lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = data_folder()
    parser.add_argument("--kernels", type=Path, default=data / "kernels" / "kernels.csv.gz")
    parser.add_argument("--gemm", type=Path, default=data / "gemm" / "gemm_bf16.parquet")
    parser.add_argument("--by-pair", action="store_true", help="also every two GPUs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.kernels, options.gemm if options.gemm.exists() else None)
    if options.json:
        print(json.dumps(found))
        return
    print(rows_of(found))
    if options.by_pair:
        header = ("kernels", "from", "to", "rows", "wave scaling", "roofline ratio", "scaled")
        lines = [
            [each["kind"], row["source"], row["target"], f"{row['rows']:,}", *(
                percent(row[name]) for name in ("habitat", "roofline", "scaled"))]
            for part in ("fp32", "bf16") for each in found.get(part, []) for row in each["by_pair"]
        ]  # fmt: skip
        print("\n" + table(header, lines))
    columns = ("device", "kernels", "share of the peak", "rows")
    print(
        "\n" + table(columns, [[r["device"], r["kind"], f"{r['share']:.2f}", str(r["rows"])] for r in found["shares"]])
    )


if __name__ == "__main__":
    main()
