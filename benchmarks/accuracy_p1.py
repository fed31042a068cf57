"""Protocol P1: whole networks on GPUs that were never measured, from op graph and device sheet alone.

    python benchmarks/accuracy_p1.py [--opgraphs DIR] [--labels FILE] [--devices FILE] [--kernels FILE|none]
        [--json] [--record TEXT]

Scores the shipped weights (kernels of five training GPUs, split "train", nothing else) against label rows of any file
with the columns of `e2e_summary.csv`. Without arguments: the shared data. `--devices` is a sheet with the columns of
`data/kernels/devices.csv` or of `data/hardware/hardware.csv`; where it contradicts our catalog, the catalog wins and it
is said. Kernels (P1b, few-shot) are scored if a kernel table is there. `--record` appends the score and the hash of the
weights to `benchmarks/data/p1_looks.json`: every look at the labels is to be told.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

import isolated
import opgraph
from foretrace.cost.devices.learned import fp32
from foretrace.errors import ForetraceError
from foretrace.files import write_bytes
from foretrace.hardware.devices import Device, find, named
from isolated import Isolated
from kernel_table import HELD_OUT, TRAINING
from network_replay import Host, Replayed, replay
from p1_kernels import SHOTS, Pool, Shift, adapt, few_shot, pools, product_rows, score, vector_rows
from tables import ROOT, today

DATA = Path(os.environ.get("FORETRACE_SHARED_DATA") or ROOT.parent / "shared" / "data")
LOOKS = ROOT / "benchmarks" / "data" / "p1_looks.json"
NEEDED = ("model_name", "seqlen", "batch", "device", "mode", "label_all_e2e_latency")
PUBLISHED = {"held_out": 8.06, "all": 8.89}
LABEL = "all_e2e_latency"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One label row with our prediction; milliseconds."""

    model: str
    mode: str
    seqlen: int
    batch: int
    device: str
    held_out: bool
    label_ms: float
    said_ms: float
    summed_ms: float  # the same kernels as isolated measurements would show them, added up
    low_ms: float
    high_ms: float
    neusight_ms: float | None
    roofline_ms: float
    stored_roofline_ms: float | None
    parts_ms: dict[str, float]

    @property
    def error(self) -> float:
        return self.said_ms / self.label_ms - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """Devices by the names that label files use, and what was said about them."""

    devices: dict[str, Device]
    notes: tuple[str, ...]


def read_rows(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file, gzipped or not; raises ForetraceError where it cannot be read."""
    try:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
            return list(csv.DictReader(file))
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ForetraceError(f"{path} cannot be read as a CSV file: {error}.") from error


def read_sheet(path: Path) -> Sheet:
    """Devices of a sheet. What our catalog knows wins; a device that only the sheet knows needs arch and tdp_w.

    Raises ForetraceError for a file of neither form.
    """
    rows = read_rows(path)
    if not rows or not {"Device", "name"} & set(rows[0]):
        raise ForetraceError(f"{path} has neither a column Device nor name; give a sheet as data/kernels/devices.csv.")
    try:
        return _sheet(rows)
    except ValueError as error:
        raise ForetraceError(f"{path}: {error}; mend that figure of the device sheet.") from None


def _sheet(rows: Sequence[dict[str, str]]) -> Sheet:
    devices: dict[str, Device] = {}
    notes: list[str] = []
    for row in rows:
        name, file = row.get("Device") or row.get("name") or "", (row.get("file") or "").removesuffix(".json")
        if file.endswith("_TP"):
            notes.append(f"{file}: an artificial doubled device, left out")
            continue
        device = _of_catalog(name)
        if device is None:
            device = _of_sheet(row)
            if device is None:
                notes.append(f"{name}: not in the catalog and the sheet gives no arch and tdp_w, left out")
                continue
            notes.append(f"{name}: not in the catalog, taken from the sheet")
        else:
            notes += _contradictions(name, device, row)
        for key in {name, file, name.replace(" ", "_")} - {""}:
            devices[key] = device
    return Sheet(devices=devices, notes=tuple(notes))


def _of_catalog(name: str) -> Device | None:
    found = find(name)
    if found is None:
        try:
            found = named(name)
        except ForetraceError:
            return None
    return found


def _of_sheet(row: dict[str, str]) -> Device | None:
    keys = ("fp32_tflops", "mem_bw_gbs", "sms", "tdp_w")
    if not row.get("arch") or not all(row.get(key) for key in keys):
        return None
    fp32_tflops, bandwidth, sms, tdp = (float(row[key]) for key in keys)
    return Device(
        name=row["name"], short=row["name"], patterns=(), vendor=row.get("vendor", ""), arch=row["arch"],
        fp32_tflops=fp32_tflops, tf32_tflops=0.0, fp16_tflops=0.0, bf16_tflops=0.0, memory_gb_s=bandwidth,
        memory_gb=float(row.get("mem_gb") or 0), sms=int(sms), source="device sheet",
        l2_mb=float(row.get("l2_mb") or 0), tdp_w=tdp,
    )  # fmt: skip


def _contradictions(name: str, device: Device, row: dict[str, str]) -> Iterable[str]:
    for ours, columns, scale, what in (
        (float(device.sms), ("Num_Sm", "sms"), 1.0, "SMs"),
        (device.memory_gb_s, ("Mem_Bw", "mem_bw_gbs"), 1.0, "GB/s"),
        (device.fp32_tflops, ("SingleFLOPs",), 1e-3, "fp32 TFLOP/s"),
        (device.fp32_tflops, ("fp32_tflops",), 1.0, "fp32 TFLOP/s"),
    ):
        for column in columns:
            text = row.get(column)
            if text and abs(float(text) * scale / ours - 1) > 0.005 and device.vendor == "NVIDIA":
                yield f"{name}: sheet {float(text) * scale:g} {what}, catalog {ours:g}; the catalog is used"


def predict_rows(
    labels: Sequence[dict[str, str]], folder: Path, sheet: Sheet, model: Isolated, host: Host | None = None
) -> tuple[list[Row], list[str]]:
    """Every label row that can be scored, and one sentence for each kind of row that cannot."""
    graphs: dict[tuple[str, ...], opgraph.Graph] = {}
    rows: list[Row] = []
    skipped: dict[str, int] = {}
    low, high = model.facts["leave_one_device_out"]["network_interval"]
    for number, label in enumerate(labels, 2):
        if missing := [name for name in NEEDED if not label.get(name)]:
            raise ForetraceError(f"line {number} of the labels has no {', '.join(missing)}; is it a label file?")
        _check(label, number)
        reason, device = _cannot(label, sheet)
        on = fp32.board(device) if device is not None else None
        if not reason and on is None:
            reason = f"{label['device']}: the predictor knows nothing of this kind of device"
        key = (label["model_name"], label["mode"], label["seqlen"], label["batch"], label.get("num_layer") or "")
        if not reason and key not in graphs:
            try:
                path = opgraph.find(folder, key[0], key[1], int(float(key[2])), int(float(key[3])))
                graphs[key] = opgraph.read(path, int(float(key[4])) if key[4] else None)
            except ForetraceError as error:
                reason = str(error)
        if reason or on is None:
            skipped[reason] = skipped.get(reason, 0) + 1
            continue
        rows.append(_row(label, graphs[key], model, on, (low, high), host))
    return rows, [f"{count} rows left out: {reason}" for reason, count in skipped.items()]


def _check(label: dict[str, str], number: int) -> None:
    """Raises ForetraceError for a figure that is none; a time, a length or a batch is finite and above 0."""
    stored = [name for name in (f"{who}_{LABEL}" for who in ("neusight", "roofline")) if label.get(name)]
    for name in ("seqlen", "batch", f"label_{LABEL}", *stored, *(["num_layer"] if label.get("num_layer") else [])):
        try:
            value = float(label[name])
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and (value > 0 or (name == "num_layer" and value == 0))):
            raise ForetraceError(f"line {number} of the labels: {name} is {label[name]!r}; drop the line or mend it.")


def _cannot(label: dict[str, str], sheet: Sheet) -> tuple[str, Device | None]:
    if label.get("option"):
        return f"option {label['option']} is not part of the protocol", None
    name = label["device"]
    if name.endswith("_TP"):
        return f"{name} is an artificial doubled device", None
    device = sheet.devices.get(name) or sheet.devices.get(label.get("device_name") or name)
    if device is None:
        device = find(name.replace("_", " ")) or find(name)
    return ("" if device is not None else f"{name} is neither in the sheet nor in the catalog"), device


def _row(
    label: dict[str, str], graph: opgraph.Graph, model: Isolated, on: fp32.BoardFeatures, factors: tuple[float, float],
    host: Host | None,
) -> Row:  # fmt: skip
    found: Replayed = replay(graph, model, on, host)
    name = label.get("device_name") or label["device"].replace("_", " ")
    trained = [find(each) for each in TRAINING]
    said = 1e3 * found.seconds
    stored = [label.get(f"{who}_{LABEL}") for who in ("neusight", "roofline")]
    return Row(
        model=label["model_name"], mode=label["mode"], seqlen=int(float(label["seqlen"])),
        batch=int(float(label["batch"])), device=name, held_out=find(name) not in trained,
        label_ms=float(label[f"label_{LABEL}"]), said_ms=said, summed_ms=1e3 * found.isolated_s,
        low_ms=said * factors[0], high_ms=said * factors[1],
        neusight_ms=float(stored[0]) if stored[0] else None,
        roofline_ms=1e3 * opgraph.roofline_s(graph, on.peak_flops, on.bytes_per_s * 2**30 / 1e9),
        stored_roofline_ms=float(stored[1]) if stored[1] else None,
        parts_ms={part: 1e3 * seconds for part, seconds in found.parts.items()},
    )  # fmt: skip


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Errors in %: of the whole, by device, by mode; the published predictor on the same rows; coverage."""

    def of(part: Sequence[Row]) -> dict[str, Any]:
        errors = np.array([row.error for row in part])
        stored = [row.neusight_ms / row.label_ms - 1 for row in part if row.neusight_ms is not None]
        inside = [row.low_ms <= row.label_ms <= row.high_ms for row in part]
        return {
            "rows": len(part), "mape": _percent(np.abs(errors).mean()), "signed": _percent(errors.mean()),
            "summed": _percent(np.mean([abs(row.summed_ms / row.label_ms - 1) for row in part])),
            "neusight_same_rows": _percent(np.abs(stored).mean()) if stored else None,
            "covered_80": _percent(np.mean(inside)),
        }  # fmt: skip

    groups: dict[str, list[Row]] = {"all": list(rows), "held_out": [row for row in rows if row.held_out]}
    groups["trained_on"] = [row for row in rows if not row.held_out]
    for row in rows:
        groups.setdefault(row.device, []).append(row)
        groups.setdefault(f"{'held_out' if row.held_out else 'trained_on'} {row.mode}", []).append(row)
    checked = [row for row in rows if row.stored_roofline_ms]
    result: dict[str, Any] = {name: of(part) for name, part in groups.items() if part}
    if checked:
        ours = [abs(row.roofline_ms / row.label_ms - 1) for row in checked]
        theirs = [abs((row.stored_roofline_ms or 0) / row.label_ms - 1) for row in checked]
        result["pipeline_check"] = {
            "roofline_mape": _percent(np.mean(ours)), "stored_roofline_mape": _percent(np.mean(theirs)),
        }  # fmt: skip
    return result


def adapted(model: Isolated, pool: Pool, k: int) -> Isolated:
    """The model after k measurements of a device."""
    shift, _ = adapt(pool, k)
    return _Shifted(**{name: getattr(model, name) for name in Isolated.__dataclass_fields__}, shift=shift)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shifted(Isolated):
    shift: Shift

    def product_s(self, b: Any, m: Any, k: Any, n: Any, linear: Any, on: fp32.BoardFeatures) -> Any:
        seconds, joules = Isolated.product_s(self, b, m, k, n, linear, on)
        said = self.isolated_product_s(seconds, joules, linear, on)
        factor = self.shift.factor(linear.astype(np.int64), product_rows(b, m, k, n, linear), said)
        return seconds * factor, joules * factor

    def vector_s(self, op: Any, rows: Any, width: Any, nbytes: Any, on: fp32.BoardFeatures) -> Any:
        seconds, joules = Isolated.vector_s(self, op, rows, width, nbytes, on)
        kind = np.full(len(op), 2)
        factor = self.shift.factor(kind, vector_rows(op, rows, width), self.isolated_vector_s(seconds, op))
        return seconds * factor, joules * factor


def _percent(value: Any) -> float:
    return round(100 * float(value), 2)


def evaluate(arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that the command prints."""
    model = isolated.shipped()
    sheet = read_sheet(arguments.devices)
    labels = read_rows(arguments.labels)
    if not labels:
        raise ForetraceError(f"{arguments.labels} has no rows; give a file with the columns of e2e_summary.csv.")
    if not arguments.opgraphs.is_dir():
        raise ForetraceError(f"{arguments.opgraphs} is no folder; give that of the operator graphs with --opgraphs.")
    rows, skipped = predict_rows(labels, arguments.opgraphs, sheet, model)
    if not rows:
        why = f"{skipped[0].rstrip('.')}{' (and other reasons)' if len(skipped) > 1 else ''}"
        raise ForetraceError(f"{arguments.labels} has no row that can be scored: {why}.")
    result: dict[str, Any] = {
        "published": PUBLISHED, "networks": summary(rows), "host": asdict(Host()),
        "weights": {key: model.facts[key] for key in ("data", "split", "date", "setting")},
        "leave_one_device_out": model.facts["leave_one_device_out"]["table"],
        "notes": [*sheet.notes, *skipped],
        "rows": [asdict(row) | {"error": row.error} for row in rows],
    }  # fmt: skip
    if arguments.kernels is not None:
        found = pools(arguments.kernels, model, HELD_OUT)
        facts = model.facts["leave_one_device_out"]
        result["kernels"] = {pool.name: score(pool, facts) for pool in found}
        result["few_shot_kernels"] = {pool.name: [few_shot(pool, k) for k in SHOTS] for pool in found}
        result["few_shot_networks"] = _few_shot_networks(found, labels, arguments, sheet, model)
    return result


def _few_shot_networks(
    found: Sequence[Pool], labels: Sequence[dict[str, str]], arguments: argparse.Namespace, sheet: Sheet,
    model: Isolated,
) -> dict[str, list[dict[str, float]]]:  # fmt: skip
    """Error on the networks of each held-out GPU after k measured kernels of it."""
    result: dict[str, list[dict[str, float]]] = {}
    for pool in found:
        device = find(pool.name)
        mine = [
            label for label in labels
            if find((label.get("device_name") or label["device"]).replace("_", " ")) == device
        ]  # fmt: skip
        for k in SHOTS if mine else ():
            rows, _ = predict_rows(mine, arguments.opgraphs, sheet, adapted(model, pool, k))
            if rows:
                errors = [abs(row.error) for row in rows]
                result.setdefault(pool.name, []).append({"k": k, "rows": len(rows), "mape": _percent(np.mean(errors))})
    return result


def record(result: dict[str, Any], text: str) -> None:
    """Append this look at the labels to the list of all looks."""
    weights = files("foretrace.cost.devices.learned").joinpath(fp32.WEIGHTS).read_bytes()
    networks = result["networks"]
    looks = json.loads(LOOKS.read_text(encoding="utf-8")) if LOOKS.exists() else []
    looks.append({
        "date": today(), "what": text, "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "rows": networks["all"]["rows"], "all": networks["all"]["mape"],
        "held_out": networks.get("held_out", {}).get("mape"),
    })  # fmt: skip
    write_bytes(LOOKS, (json.dumps(looks, indent=1) + "\n").encode())


def arguments_of(given: Sequence[str]) -> argparse.Namespace:
    """Paths with the shared data as defaults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    kernels = DATA / "kernels"
    parser.add_argument("--opgraphs", type=Path, default=kernels / "opgraph")
    parser.add_argument("--labels", type=Path, default=kernels / "e2e_summary.csv.gz")
    parser.add_argument("--devices", type=Path, default=kernels / "devices.csv")
    parser.add_argument("--kernels", default=str(kernels / "kernels.csv.gz"), help="'none' leaves kernels out")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", default="", help="what was chosen how, for the list of looks")
    found = parser.parse_args(given)
    table = Path(found.kernels)
    if found.kernels not in ("none", parser.get_default("kernels")) and not table.exists():
        raise ForetraceError(f"{table} does not exist; give a table of kernels, or --kernels none.")
    return argparse.Namespace(
        **vars(found) | {"kernels": table if found.kernels != "none" and table.exists() else None}
    )


def main(given: Sequence[str]) -> int:
    try:
        arguments = arguments_of(given)
        result = evaluate(arguments)
    except ForetraceError as error:
        print(f"accuracy_p1: {error}", file=sys.stderr)
        return 2
    if arguments.record:
        record(result, arguments.record)
    if arguments.json:
        print(json.dumps(result, indent=1))
        return 0
    for name, part in result["networks"].items():
        print(f"{name:34s} {part}")
    for name, part in result.get("kernels", {}).items():
        print(f"P1b {name:30s} {part}")
    for title in ("few_shot_kernels", "few_shot_networks"):
        for name, part in result.get(title, {}).items():
            print(f"{title} {name}: {part}")
    for note in result["notes"]:
        print(f"note: {note}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
