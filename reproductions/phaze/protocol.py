"""PHAZE: best designs and plans for its models, what they gain over which baseline, and the parts that are exact.

    python -m reproductions phaze [--model NAME ...] [--quick] [--write]

Without `--write` the tables are printed. Published designs, cycles and the mapper's answers are read from
FORETRACE_SHARED_DATA. `--quick`: one small model, no schedules.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import mean

import numpy as np

from foretrace import executor
from foretrace.arrays import Float64
from foretrace.cost.accelerators.kernels import product_cycles, systolic_cycles
from foretrace.files import write_text
from foretrace.hardware.accelerators import MAPPED_PORTS, Accelerator
from foretrace.plan.codesign.answer import Codesign, codesign
from foretrace.plan.codesign.schedule import LayerSchedule, layer_schedules
from foretrace.plan.codesign.search import design_columns
from foretrace.plan.transformers.shape import transformer
from reproductions import parser_of, shared_data
from reproductions.systems import put
from tables import machine, table, today

HERE = Path(__file__).parent
PICTURES = HERE.parents[1] / "docs"
MODELS = ("megatron-bert-1.3b", "gpt2-xl", "gpt2-2.5b", "opt-6.7b", "llama-2-7b", "gpt3-175b")
SCHEDULED = ("megatron-bert-1.3b", "gpt2-2.5b", "gpt3-175b")
KINDS = {"training": 0, "inference": 0, "decoding": 1024}  # words in the cache
SHOWN = "gpt2-2.5b"  # whose front and layer are drawn

HEAD = """# PHAZE: accelerator and plan together

PHAZE (ICML 2024) searches 29,360 accelerators of tensor cores, vector cores and a buffer within the area of a
TPU-like one (8 tensor cores of 128×128, 2 vector cores of 128, 128 MB), with a mapper for products, an integer program
for each layer and dynamic programming for the plan, and stops early. Here every design is priced with every plan
(1,024 devices, batch 4,096, 32 GB), so that the best is proven within the model. `foretrace codesign MODEL` answers
for one model. *Inference* reads whole sequences; *decoding* (`--decode 1024`) gives each of the 4,096 samples one more
word behind 1,024 in its cache, all of them together, and the next step begins when all have it.

{differences}

Ranges are ends of what is assumed (ports of the buffer without end, and as PHAZE's mapper has them; vector operators of
half and twice the work), one at a time, for both designs of a ratio. Nothing was measured: no such chip exists.
Written by `make reproduce NAME=phaze ARGS=--write`.
"""

# Published, ours, why they differ.
DIFFERENCES = (
    (
        "2.9× a TPUv4-like accelerator, mean over language models (as remembered; the repository holds no results)",
        "the first table: less over 4 GiB/s and 50 GB/s, about as much over 4 TiB/s",
        "the link: 4 GiB/s is stated, but operators come out in milliseconds and transfers in seconds, so that "
        "messages count a thousandth (read, not run): 4 TiB/s in effect",
    ),
    (
        "the baseline is TPU-like",
        "a part of the gain is left with balanced vector units: columns *balanced*",
        "0.08 % of the baseline's area is vector units, 63 % its buffer; eight times the vector cores are 0.5 % more",
    ),
    (
        "its search stops when the best of five area buckets does not rise",
        "the second table: how far from the best it stops",
        "buckets are walked from the largest area down, and those are few designs that are alike",
    ),
    (
        "cycles of products by a mapper (Sunstone), 0.05–0.6 s each",
        "closed forms, microseconds each",
        "the third table: with the 256 words a cycle that PHAZE's wrapper gives the mapper's buffer, ours rank alike "
        "and are near in size; one to eight cores take the same cycles there because the ports are full",
    ),
    (
        "energy by Accelergy and CACTI",
        "operation counts times published energies, × ½ to × 2",
        "those tools' tables were not at hand",
    ),
    ("an integer program with big-M rows for each layer", "CP-SAT with two cumulative constraints: the last table", ""),
    (
        "SGD, no ZeRO, one size of micro-batches at a time",
        "Adam, ZeRO 1, all sizes of micro-batches",
        "what is trained so; models of 175 billion parameters fit 32 GB with more stages or tensor degree only",
    ),
)


@dataclass(frozen=True, kw_only=True)
class ModelAnswer:
    """One model, and of KINDS what it is used for."""

    model: str
    kind: str
    found: Codesign
    layers: tuple[LayerSchedule, ...]


def answer(asked: tuple[str, str, bool]) -> ModelAnswer:
    """Of one model: its name, what it is used for, whether its layer is scheduled."""
    model, kind, schedule = asked
    found = codesign(model, training=kind == "training", decode=KINDS[kind])
    best = found.best
    layers = layer_schedules(found.space.model, best.plan, best.design) if schedule else ()
    return ModelAnswer(model=model, kind=kind, found=found, layers=layers)


def gains(every: Sequence[ModelAnswer]) -> str:
    """Times as long as the best, by link: TPU-like, and with balanced vector units."""
    head = [
        "model",
        "",
        *(f"{each.link}, {what}" for each in every[0].found.links for what in ("TPU-like", "balanced")),
    ]
    head.append("range of TPU-like, 50 GB/s")
    rows = []
    for each in every:
        _, low, high = each.found.baselines["TPU-like"].over(each.found.best)
        numbers = [f"{value:.2f}" for link in each.found.links for value in (link.tpu_like, link.balanced)]
        rows.append([each.model, each.kind, *numbers, f"{low:.2f} – {high:.2f}"])
    for kind in dict.fromkeys(each.kind for each in every):
        links = [each.found.links for each in every if each.kind == kind]
        means = [
            f"**{exp(mean(log(getattr(row[i], what)) for row in links)):.2f}**"
            for i in range(3)
            for what in ("tpu_like", "balanced")
        ]
        rows.append(["geometric mean", kind, *means, ""])
    return table(head, rows)


def parts(every: Sequence[ModelAnswer]) -> str:
    """Winners, the published rule, plan and design apart."""
    rows = []
    for each in every:
        by, best = each.found.baselines, each.found.best
        tpu, rule = by["TPU-like"].iteration_s, by["PHAZE's search rule"]
        fixed = by["best design for the plan of TPU-like"].iteration_s
        low, high = best.interval_s
        at = best.plan
        rows.append([
            each.model, each.kind, str(best.design).partition(":")[2], f"{at.tensor} × {at.pipeline} × {at.data}",
            f"{best.iteration_s:.3g} ({low:.3g} – {high:.3g})", f"{rule.over(best)[0]:.2f}", f"{rule.calls}",
            f"{by['''TPU-like with an expert's plan'''].iteration_s / tpu:.2f}", f"{tpu / fixed:.2f}",
            f"{each.found.simulated.window_ns / 1e9 / best.iteration_s - 1:+.1%}", f"{each.found.seconds:.1f}",
        ])  # fmt: skip
    return table(
        ["model", "", "best design", "tensor × stages × data", "iteration, s", "PHAZE's rule ÷ best", "its designs",
         "plan alone gains", "design alone gains", "simulated", "CPU s"], rows,
    )  # fmt: skip


def scheduled(every: Sequence[ModelAnswer]) -> str:
    """Exact schedules of the winners' layers."""
    rows = [
        [each.model, "backward" if at else "forward", str(len(layer.operators)), f"{layer.serial_ns / 1e3:.0f}",
         f"{layer.ns / 1e3:.0f}", f"{layer.serial_ns / layer.ns:.3f}", f"{layer.gap:.1%}"]
        for each in every
        for at, layer in enumerate(each.layers)
    ]  # fmt: skip
    return table(
        ["model", "pass", "operators", "one after another, µs", "schedule, µs", "gain", "gap to the bound"], rows
    )


def exact(folder: Path) -> str:
    """What is equal to published figures, and how near the rest comes."""
    published = json.loads(gzip.decompress((folder / "placement" / "phaze" / "cores.json.gz").read_bytes()))
    off = float(np.abs(design_columns().area / np.array([each["area"] for each in published]) - 1).max())
    known = _read(folder / "accelerators" / "scalesim_gemm_cycles.csv")
    same = sum(
        systolic_cycles(row["dataflow"], *(np.array([float(row[each])]) for each in
                        ("M", "N", "K", "array_rows", "array_cols")))[0] == float(row["total_cycles"])
        for row in known
    )  # fmt: skip
    rows = [
        ["areas of published designs", f"{len(published):,}", f"largest relative error {off:.1e}"],
        ["cycles of SCALE-Sim, three dataflows", f"{len(known)}", f"{same} equal"],
    ]
    mapped = _read(folder / "accelerators" / "sunstone_gemm_cycles.csv")
    theirs = np.array([float(row["cycles"]) for row in mapped])
    for ports in (MAPPED_PORTS, 1024, 4096, 1 << 40):
        ours = np.array([_cycles(row, ports) for row in mapped])
        ratio, said = ours / theirs, f"{ports:,} words a cycle" if ports < 1 << 40 else "ports without end"
        rows.append([
            f"products of Sunstone, {said}", f"{len(mapped)}",
            f"rank {np.corrcoef(_ranks(ours), _ranks(theirs))[0, 1]:.2f}, ours ÷ theirs {np.median(ratio):.2f} "
            f"({ratio.min():.2f} – {ratio.max():.2f})",
        ])  # fmt: skip
    return table(["what", "rows", "found"], rows)


def _ranks(values: Float64) -> Float64:
    """Places in order, the mean of them where values are equal."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    found: Float64 = (np.cumsum(count) - (count - 1) / 2)[place]
    return found


def _cycles(row: dict[str, str], ports: int) -> float:
    design = Accelerator(
        tensor_cores=int(row["num_tc"]), width=int(row["width"]), depth=int(row["depth"]),
        buffer=int(row["glb_bytes"]), ports=ports,
    )  # fmt: skip
    m, n, k = (np.array([float(row[each])]) for each in ("N", "K", "C"))
    return float(product_cycles(np.ones(1), m, n, k, [design])[0, 0, 0])


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def front_svg(found: Codesign) -> str:
    """Samples per second by area, darker where a batch takes less energy."""
    points = [(each.design.area / 1e6, found.space.batch / each.iteration_s, each.joules) for each in found.pareto]
    most = max(rate for _, rate, _ in points)
    widest, least, worst = max(each[0] for each in points), *(f(log(each[2]) for each in points) for f in (min, max))
    dots = [
        f'<circle cx="{60 + 620 * area / widest:.1f}" cy="{300 - 270 * rate / most:.1f}" r="3" '
        f'fill="hsl(210 60% {30 + 55 * (log(joules) - least) / max(worst - least, 1e-9):.0f}%)"/>'
        for area, rate, joules in points
    ]
    text = [
        f'<text x="60" y="330">0</text><text x="640" y="330">{widest:.0f} mm²</text>',
        f'<text x="4" y="34">{most:,.0f}/s</text><text x="40" y="304">0</text>',
    ]
    axes = '<path d="M60 30V300H690" fill="none" stroke="#888"/>'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 340" {style}>{axes}{"".join(dots + text)}</svg>\n'


def layer_svg(layer: LayerSchedule) -> str:
    """One line for each core that is used, tensor cores above, an operator on all cores across both."""
    lanes = sorted(
        {(not each.tensor, core) for each, core in zip(layer.operators, layer.core, strict=True) if core >= 0}
    )
    height, parts_of = 30 + 18 * max(len(lanes), 2), []
    for each, begin, core in zip(layer.operators, layer.begins, layer.core, strict=True):
        x, took = 120 + 560 * begin / layer.ns, each.all_ns if core < 0 else each.one_ns
        y, tall = (10, height - 30) if core < 0 else (10 + 18 * lanes.index((not each.tensor, core)), 16)
        fill = "#4477aa" if each.tensor else "#ee9944"
        size = f'width="{max(560 * took / layer.ns - 0.5, 0.5):.1f}" height="{tall}"'
        said = f"<title>{each.name}: {took / 1e3:.1f} µs</title>"
        parts_of.append(f'<rect x="{x:.1f}" y="{y}" {size} fill="{fill}">{said}</rect>')
    names = [
        f'<text x="4" y="{22 + 18 * i}">{"vector" if vector else "tensor"} core {core}</text>'
        for i, (vector, core) in enumerate(lanes)
    ]
    scale = f'<text x="120" y="{height}">0</text><text x="640" y="{height}">{layer.ns / 1e3:.0f} µs</text>'
    style = 'font-family="sans-serif" font-size="11"'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {height + 6}" {style}>'
            f'{"".join(parts_of + names)}{scale}</svg>\n')  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the protocol."""
    parser = parser_of("phaze", __doc__)
    parser.add_argument("--model", action="append", metavar="NAME")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args(arguments)
    models = tuple(given.model or (("gpt2-medium",) if given.quick else MODELS))
    drawn = set(SCHEDULED) if not given.quick else set()
    asked = [
        (model, kind, kind == "training" and model in drawn)
        for kind, words in KINDS.items() for model in models if transformer(model).causal or not words
    ]  # fmt: skip
    every = executor.map(answer, asked, pool=not given.quick)
    reasons = table(["published", "ours", "reason of the difference"], DIFFERENCES)
    words = [each for model in given.model or () for each in ("--model", model)] + ["--write"]
    made = f"*{today()}, {machine()}; `python -m reproductions phaze {' '.join(words)}`.*\n"
    page = [HEAD.format(differences=reasons.replace("---:", "---")), made]
    page.append(f"## Times as long as the best\n\n{gains(every)}\n")
    page.append(f"## Winners at 50 GB/s\n\n{parts(every)}\n")
    if (folder := shared_data()).is_dir():
        page.append(f"## Against published figures\n\n{exact(folder)}\n")
    if not given.quick:
        page.append(f"## Layers of the winners on their cores\n\n{scheduled(every)}\n")
    if not given.write:
        print("\n".join(page[1:]))
        return 0
    put(HERE / "README.md", "\n".join(page))
    shown = next((each for each in every if each.model == SHOWN and each.kind == "training"), every[0])
    write_text(PICTURES / "codesign-front.svg", front_svg(shown.found))
    if shown.layers:
        write_text(PICTURES / "codesign-layer.svg", layer_svg(shown.layers[0]))
    return 0
