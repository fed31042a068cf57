"""How far predicted times of 16-bit products are off (protocol P2), with the weights that the package ships.

    python benchmarks/accuracy_p2.py [--gemm FILE] [--devices FILE] [--deepbench FILE] [--weights FILE] [--json]

P2a: shapes held out, GPUs measured. P2b: GPUs left out with their families, from the training run's own table. P2c:
GPUs that the shipped laws never saw, with 0 to 100 of their products measured, beside transfer by the ratio of
rooflines and beside random instead of chosen products. Any table with the columns system, m, n, k, latency_ms is
scored; a GPU that neither the device sheet nor the catalog knows is named and left out.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foretrace.cost.devices.learned.gemm16 import Gemm16
from foretrace.cost.devices.learned.gemm16_law import Chip
from foretrace.errors import ForetraceError
from foretrace.hardware.devices import named
from gemm_table import ANCHOR, System, fingerprint, read
from tables import percent, table, today
from train_gemm16 import SHARED, WEIGHTS
from transfer_gemm16 import COUNTS, draw, few_shot

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
SEEDS = 5  # of random choices
#: Mean errors of the state before: no limit by power, and the L2 cache faster where the peak is.
BEFORE = {
    "a100_sxm": (8.98, 7.66), "h100_sxm": (11.37, 7.84), "h200_sxm": (11.67, 8.44), "l40s": (19.60, 12.94),
    "rtx_pro_6000_server": (12.90, 11.95),
}  # fmt: skip
LOOKS = (
    "The form of the law, its limit by power, which latencies follow the peak, that laws of single families are asked "
    "beside the shared one, the parts of the covariance, the prior of its amplitudes, the weight of the trees and of "
    "the first forty measurements were chosen by leaving all four families out, the figures of this table in view: the "
    "limit was looked for because large products of L40S were 40 % slower than predicted. Amplitudes, lengths, noise "
    "and the energy of a FLOP are fitted to the other families alone. The range is what the ends of the other "
    "families' ranges, each left out in turn, say of a further one (Student's t, 90 % each; `transfer_gemm16.ranges`): "
    "wider than 80 % of most families need, because three say little of a fourth. How far a data sheet lies from the "
    "measured ones did not widen errors as far as that could be seen; beyond, the range grows in proportion."
)
DEEPBENCH = {"V100": "V100-SXM2", "T4": "T4"}
ASKED = 1e6  # predictions per second on one core
LEAST_S = 20e-6  # times are printed to a microsecond; below this rounding alone is some per cent


def score(predicted: Floats, truth: Floats, factors: tuple[Floats, Floats] | None = None) -> dict[str, float]:
    """Mean and median |predicted / measured - 1|, the median bias, and how often the range holds the truth."""
    off = np.abs(predicted / truth - 1)
    found = {
        "n": float(len(truth)),
        "mean": float(off.mean()),
        "median": float(np.median(off)),
        "bias": float(np.median(predicted / truth) - 1),
        "mean winsorised at 1": float(np.minimum(off, 1.0).mean()),
    }
    if factors is not None:
        low, high = (predicted * each for each in factors)
        found["covered"] = float(((truth >= low) & (truth <= high)).mean())
        found["range"] = float(np.median(high / low))
    return found


def held_out_shapes(model: Gemm16, system: System) -> dict[str, float] | None:
    """P2a of one GPU; None where it was not measured for the shipped weights or nothing is held out."""
    rows = np.flatnonzero(system.held_out)
    if system.device.short not in model.known or not len(rows):
        return None
    found = model.seconds(system.device, system.m[rows], system.n[rows], system.k[rows])
    return score(found, system.seconds[rows], model.factors(system.device, found))


def ratio_transfer(source: System, target: System, tasks: Indices) -> dict[str, float] | None:
    """Source's times by the ratio of rooflines, shifted by the median of the measured products, if any."""
    rows = _common(source, target)
    if rows is None:
        return None
    of_source, of_target = rows
    roofs = [
        np.maximum(2 * x.m * x.n * x.k / chip.peak, 2 * (x.m * x.n + x.n * x.k + x.m * x.k) / chip.bandwidth)
        for x, chip in ((source, Chip.of(source.device)), (target, Chip.of(target.device)))
    ]
    found = source.seconds[of_source] * roofs[1][of_target] / roofs[0][of_source]
    truth = target.seconds[of_target]
    known = np.isin(of_target, tasks)
    if known.any():
        found = found * np.exp(np.median(np.log(truth[known] / found[known])))
    return score(found[~known], truth[~known])


def _common(source: System, target: System) -> tuple[Indices, Indices] | None:
    place = {key: i for i, key in enumerate(zip(source.m, source.n, source.k, strict=True))}
    pairs = [(place[key], i) for i, key in enumerate(zip(target.m, target.n, target.k, strict=True)) if key in place]
    if not pairs:
        return None
    both = np.array(pairs)
    return both[:, 0], both[:, 1]


def law_alone(model: Gemm16) -> Gemm16:
    """The same model without what was measured in full on single GPUs."""
    return replace(model, known={}, adapted={})


def unseen(model: Gemm16, systems: Mapping[str, System], system: System) -> dict[str, Any]:
    """P2c of one GPU."""
    plain = law_alone(model)
    pool = draw(system, 0)
    rest = np.setdiff1d(np.arange(len(system)), pool)
    rows: dict[str, Any] = {"few-shot": {}, "few-shot, random": {}, "ratio transfer": {}}
    truth = system.seconds[rest]
    for count, found in few_shot(plain, system, pool, rest).items():
        factors = plain.factors(system.device, found, count=count)
        rows["few-shot"][str(count)] = score(found, truth, factors)
    for seed in range(SEEDS):
        drawn = few_shot(plain, system, draw(system, seed), rest, chosen=False)
        for count in COUNTS[1:]:
            rows["few-shot, random"].setdefault(str(count), []).append(score(drawn[count], truth)["mean"])
    for count in COUNTS:
        for name, source in systems.items():
            if source.device.short in model.trained_on and name != system.name:
                shifted = ratio_transfer(source, system, pool[:count])
                if shifted is not None:
                    rows["ratio transfer"].setdefault(name, {})[str(count)] = shifted
    return rows


def deepbench(model: Gemm16, path: Path) -> dict[str, Any]:
    """16-bit products of DeepBench, on GPUs older than any that the law was fitted to."""
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            lines = [
                row for row in csv.DictReader(file) if row["precision"] == "fp16_in_mixed" and row["gpu"] in DEEPBENCH
            ]
        times_ms = [float(row[c]) for row in lines for c in ("m", "n", "k", "time_ms")]
    except (OSError, EOFError, KeyError, ValueError, TypeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ForetraceError(f"{path} is no gzipped table with gpu, precision, m, n, k, time_ms ({what}).") from error
    if not all(value > 0 for value in times_ms):
        raise ForetraceError(f"{path} has sizes or times that are not above 0; leave these rows out.")
    found = {}
    for gpu, short in DEEPBENCH.items():
        rows = [row for row in lines if row["gpu"] == gpu]
        if not rows:
            continue
        m, n, k, times = (np.array([float(row[c]) for row in rows]) for c in ("m", "n", "k", "time_ms"))
        predicted = model.seconds(named(short), m, n, k)
        factors = model.factors(named(short), predicted)
        long = times / 1e3 >= LEAST_S
        found[gpu] = {
            "all": score(predicted, times / 1e3, factors),
            "from 20 us": score(predicted[long], times[long] / 1e3, (factors[0][long], factors[1][long])),
        }
    return found


def speed(model: Gemm16) -> dict[str, float]:
    """Predictions per second of processor time, as a ratio to the million that is asked for."""
    rng = np.random.default_rng(0)
    m, n, k = (np.exp2(rng.uniform(5, 14, 60_000)).round() for _ in range(3))
    known = [named(short) for short in model.known][:1]
    other = named("B200-SXM")
    few = model.choose(other, 50)
    sizes = few[:, 0], few[:, 1], few[:, 2]
    moved = model.few_shot(other, *sizes, model.seconds(other, *sizes))
    asked = [("measured GPU", model, each) for each in known]
    found = {}
    for kind, knows, device in (*asked, ("other GPU", model, other), ("other GPU, 50 products measured", moved, other)):
        times = []
        for _ in range(5):
            begin = time.process_time()
            knows.seconds(device, m, n, k)
            times.append(time.process_time() - begin)
        found[kind] = len(m) / min(times) / ASKED
    return found


def run(gemm: Path, devices: Path | None, deep: Path | None, weights: Path | None) -> dict[str, Any]:
    """Everything as plain data."""
    systems, notes = read(gemm, devices)
    if not systems:
        raise ForetraceError(f"{gemm} has no row of a GPU that is known: {' '.join(notes) or 'it is empty'}.")
    if weights is not None and not weights.is_file():
        raise ForetraceError(f"{weights} does not exist; train_gemm16.py writes it.")
    if deep is not None and not deep.is_file():
        notes.append(f"{deep} does not exist, so DeepBench is left out.")
    model = Gemm16.load(weights)
    report = (weights or WEIGHTS).with_suffix(".json")
    trained = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
    if trained.get("triples") != fingerprint(systems):
        notes.append(
            "the table has other triples than that of the training run, so its fifth held out (P2a) may hold some that "
            "were fitted to."
        )
    return {
        "table": gemm.name,
        "rows": sum(len(each) for each in systems.values()),
        "notes": notes,
        "law fitted to": list(model.trained_on),
        "P2a": {name: found for name, each in systems.items() if (found := held_out_shapes(model, each)) is not None},
        "P2b": trained.get("law, error by measured products of the GPU left out", {}),
        "P2c": {
            name: unseen(model, systems, each)
            for name, each in systems.items()
            if each.device.short not in model.trained_on
        },
        "speed": speed(model),
        "deepbench": deepbench(law_alone(model), deep) if deep is not None and deep.is_file() else {},
    }


def text(found: Mapping[str, Any]) -> str:
    """The same as Markdown tables, errors in %."""
    parts = [
        f"*{today()}, {found['table']}, {found['rows']:,} products; the arithmetic does not depend on the machine.*"
    ]
    parts += [f"Note: {note}" for note in found["notes"]]
    if found["P2a"]:
        rows = [
            [name, percent(x["mean"]), percent(x["median"]), _given(ANCHOR.get(name)), percent(x["covered"])]
            for name, x in found["P2a"].items()
        ]
        parts.append(
            "**Shapes held out, GPU measured (P2a).** A fifth of the (m, n, k), the same on every GPU. *Published*: "
            "aiconfigurator's interpolation of the same table.\n\n"
            + table(("GPU", "mean", "median", "published mean", "80 % range holds"), rows)
        )
    if found["P2b"]:
        parts.append(_left_out_text(found["P2b"]))
    if found["P2c"]:
        parts.append(_unseen_text(found))
    if found["deepbench"]:
        rows = [
            [f"{gpu}, {which}", f"{x['n']:.0f}", *(percent(x[c]) for c in ("mean", "median", "bias", "covered"))]
            for gpu, both in found["deepbench"].items()
            for which, x in both.items()
        ]
        parts.append(
            "**DeepBench, 16-bit products on Volta and Turing.** Nothing was fitted or chosen on it. Another library, "
            "other generations and years.\n\n"
            + table(("GPU", "products", "mean", "median", "bias", "80 % range holds"), rows)
        )
    fast = ", ".join(f"{ratio:.1f} ({kind})" for kind, ratio in found["speed"].items())
    parts.append(f"Predictions per second of processor time, as a ratio to one million: {fast}.")
    return "\n\n".join(parts) + "\n"


def _left_out_text(found: Mapping[str, Any]) -> str:
    """P2b: what a GPU of a family that nobody measured may expect."""
    rows = []
    for name, x in found.items():
        for i, count in enumerate(COUNTS):
            own = x[str(count)]
            before = dict(zip((0, 50), BEFORE.get(name, ()), strict=False)).get(count)
            best, worst = own["best and worst pool"]
            rows.append([
                f"{name}, {count}", _given(before), percent(own["mean"]), percent(own["median"]),
                percent(own["bias"], signed=True), f"{percent(best)} – {percent(worst)}" if i else "–",
                percent(own["random choice"]) if i else "–", percent(own["covered"]), f"{own['range']:.2f}",
            ])  # fmt: skip
    mean = {count: float(np.mean([x[str(count)]["mean"] for x in found.values()])) for count in COUNTS}
    header = (
        "GPU left out, measured products", "mean before", "mean", "median", "bias", "by pool", "random choice",
        "80 % range holds", "its width",
    )  # fmt: skip
    return (
        "**Family left out (P2b).** Each GPU without all of its family (H100 and H200 are one): neither the laws nor "
        "what a measurement is taken to say know anything of it, and the range comes from the other families. The "
        "products to measure are chosen without any time, from 600 candidates; means over five such pools. *Before*: "
        "no limit by power. *Width*: upper over lower end. Mean of the GPUs: "
        + ", ".join(f"{percent(value)} % with {count}" for count, value in mean.items())
        + f".\n\n{LOOKS}\n\n"
        + table(header, rows)
    )


def _unseen_text(found: Mapping[str, Any]) -> str:
    """P2c."""
    rows = []
    for name, x in found["P2c"].items():
        for count in COUNTS:
            own = x["few-shot"][str(count)]
            drawn = x["few-shot, random"].get(str(count))
            nearest = min(x["ratio transfer"].values(), key=lambda t: float(t["0"]["mean"]), default=None)
            rows.append([
                f"{name}, {count}", percent(own["mean"]), percent(own["median"]), percent(own["bias"], signed=True),
                f"{percent(min(drawn))} – {percent(max(drawn))}" if drawn else "–",
                percent(nearest[str(count)]["mean"]) if nearest else "–", percent(own["covered"]),
                f"{own['range']:.2f}",
            ])  # fmt: skip
    header = (
        "GPU, measured products", "mean", "median", "bias", "mean, random choice", "ratio transfer, shifted",
        "80 % range holds", "its width",
    )  # fmt: skip
    return (
        f"**GPUs that the laws never saw (P2c).** Fitted to {', '.join(found['law fitted to'])}. *Ratio transfer*: "
        "times of the training GPU that, in hindsight, does best, by the ratio of rooflines, shifted by the median of "
        "as many measured products. *Width*: upper over lower end.\n\n" + table(header, rows)
    )


def _given(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def section(shared: Path) -> str:
    """For docs/accuracy/gemm.md; `shared` is the folder of tables."""
    gemm, deep = shared / "gemm" / "gemm_bf16.parquet", shared / "deepbench" / "gemm.csv.gz"
    return text(run(gemm, shared / "hardware" / "hardware.csv", deep, None))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gemm", type=Path, default=SHARED / "gemm" / "gemm_bf16.parquet")
    parser.add_argument("--devices", type=Path, default=SHARED / "hardware" / "hardware.csv")
    parser.add_argument("--deepbench", type=Path, default=SHARED / "deepbench" / "gemm.csv.gz")
    parser.add_argument("--weights", type=Path, default=None)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    try:
        found = run(given.gemm, given.devices, given.deepbench, given.weights)
    except ForetraceError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(found, indent=1) if given.json else text(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
