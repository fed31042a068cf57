"""What share of the roofline kernels reach, by family and precision: `roofline.json` of the package.

    python benchmarks/roofline.py [--data DIR] [--write]

Tables of measured kernels (docs/systems.md names them) are found by FORETRACE_SHARED_DATA. A share is the time that
peak FLOP/s and full bandwidth allow over the measured time less what measuring one kernel costs there; kernels below
`SMALL` of allowed time are left out: they are bound by their start. Printed: 10th, 50th and 90th percentile, devices
weighing the same.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from foretrace.files import write_bytes
from foretrace.hardware.devices import Device, find, named
from tables import ROOT

TARGET = ROOT / "src" / "foretrace" / "cost" / "devices" / "roofline.json"
SMALL = 50e-6
_ISOLATED = 25e-6  # what timing one kernel alone adds to it in the float32 table
_BOARDS = {"V100": "V100-SXM2", "T4": "T4", "P100": "P100-PCIe-16GB"}
_GEMM_BOARDS = {"a100_sxm": "A100-SXM4-80GB", "h100_sxm": "H100-SXM5-80GB", "h200_sxm": "H200-SXM-141GB",
                "l40s": "L40S", "rtx_pro_6000_server": "RTX-PRO-6000-Server"}  # fmt: skip
_VECTOR = {"softmax": "softmax", "ln": "norm"}
Row = tuple[str, str, float, float]  # (family and precision, device, time that the roofline allows, measured)


def kernels(data: Path) -> Iterator[Row]:
    """float32 products and row operators, timed alone."""
    with gzip.open(data / "kernels" / "kernels.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            device = find(row["device"])
            if device is None or device.vendor != "NVIDIA" or row["split"] != "train":
                continue
            t = float(row["latency_ms"]) * 1e-3 - _ISOLATED
            if row["op"] in ("bmm", "linear"):
                b, m, n, k = (float(row[key] or 1) for key in ("B", "M", "N", "K"))
                yield "gemm fp32", device.short, _allowed(2 * b * m * n * k, 4 * b * (m * n + n * k + m * k), device), t
            else:
                elements = float(row["B"]) * float(row["H"])
                tensors = 3 if row["op"] in ("add", "mul", "div", "pow") else 2
                family = _VECTOR.get(row["op"], "elementwise")
                yield f"{family} fp32", device.short, 4 * tensors * elements / (device.memory_gb_s * 1e9), t


def convolutions(data: Path) -> Iterator[Row]:
    with gzip.open(data / "kernels" / "conv.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            device = find(row["device"])
            assert device is not None
            b, c, n, r, side, s, pad = (
                float(row[key]) for key in ("B", "cin", "cout", "kernel_size", "hw", "stride", "pad")
            )
            out = (side + 2 * pad - r) // s + 1
            nbytes = 4 * (b * c * side * side + b * n * out * out + n * c * r * r)
            allowed = _allowed(2 * b * out * out * n * c * r * r, nbytes, device)
            yield "conv fp32", device.short, allowed, float(row["latency_ms"]) * 1e-3 - _ISOLATED
    with gzip.open(data / "deepbench" / "conv.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            precision = {"fp32": "fp32", "fp16_in_mixed": "half"}.get(row["precision"])
            if precision is None or not row["fwd_ms"]:
                continue
            device = named(_BOARDS[row["gpu"]])
            w, h, c, n, k, r, s, ph, pw, sv, sh = (
                int(float(row[key]))
                for key in ("w", "h", "c", "n", "k", "r", "s", "pad_h", "pad_w", "stride_v", "stride_h")
            )
            out = ((h + 2 * ph - r) // sv + 1) * ((w + 2 * pw - s) // sh + 1)
            size = 4 if precision == "fp32" else 2
            nbytes = size * (n * c * h * w + n * k * out + k * c * r * s)
            allowed = _allowed(2.0 * n * out * k * c * r * s, nbytes, device, half=size == 2)
            yield f"conv {precision}", row["gpu"], allowed, float(row["fwd_ms"]) * 1e-3


def products(data: Path) -> Iterator[Row]:
    """16-bit products."""
    import pyarrow.parquet

    found = pyarrow.parquet.read_table(data / "gemm" / "gemm_bf16.parquet").to_pydict()
    for system, m, n, k, ms in zip(*(found[key] for key in ("system", "m", "n", "k", "latency_ms")), strict=True):
        device = named(_GEMM_BOARDS[system])
        allowed = _allowed(2.0 * m * n * k, 2.0 * (m * n + n * k + m * k), device, half=True)
        yield "gemm half", device.short, allowed, ms * 1e-3


def _allowed(flops: float, nbytes: float, device: Device, *, half: bool = False) -> float:
    peak = max(device.fp16_tflops, device.bf16_tflops) if half else device.fp32_tflops
    return max(flops / (peak * 1e12), nbytes / (device.memory_gb_s * 1e9))


def shares(data: Path) -> dict[str, dict[str, float | int]]:
    """Percentiles of the share by "family precision"."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for read in (kernels, convolutions, products):
        for key, device, allowed, measured in read(data):
            if allowed >= SMALL and measured > 0:
                found[key][device].append(allowed / measured)
    table = {}
    for key, devices in sorted(found.items()):
        points = np.mean([np.quantile(each, (0.1, 0.5, 0.9)) for each in devices.values()], axis=0)
        low, middle, high = (round(float(min(x, 2.0)), 3) for x in points)
        count = sum(map(len, devices.values()))
        table[key] = {"low": low, "middle": middle, "high": high, "kernels": count, "devices": len(devices)}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("FORETRACE_SHARED_DATA", ROOT / "data")))
    parser.add_argument("--write", action="store_true", help="put the table into the package")
    options = parser.parse_args()
    if not (options.data / "kernels").is_dir():
        raise SystemExit(f"roofline: {options.data} has no kernels/; give --data DIR or set FORETRACE_SHARED_DATA.")
    table = shares(options.data)
    for key, row in table.items():
        print(f"{key:18}" + "".join(f"{name} {value:<9}" for name, value in row.items()))
    if options.write:
        write_bytes(TARGET, (json.dumps(table, indent=1) + "\n").encode())
        print(f"wrote {TARGET.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
