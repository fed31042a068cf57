"""Product quantisation of a ResNet (PQA, TRETS 2024): accuracy beside performance per area at the same (v, K).

    python -m reproductions pq_dnn [--cells N] [--write]

Cells of accuracy are kept in accuracy.jsonl and measured once; --cells measures so many more and stops. The page is
made of the settings whose seeds are all there.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from foretrace.cost.accelerators.product_quantised import (
    LOOK_UP_DESIGNS,
    AreaCosts,
    LayerProduct,
    MeasuredQuantisation,
    Surroundings,
    best_design,
)
from reproductions import parser_of
from reproductions.kept import Cell, measured
from reproductions.systems import put

HERE = Path(__file__).parent
ROWS = HERE / "accuracy.jsonl"
SEEDS, BITS, MOST_LOSS = 3, 8, 0.01
STEPS = 150  # of training again: a quarter of the dense network's
# (length, prototypes, distance), those first that the paper's claim is about
POINTS = (
    (9, 16, "l2"), (9, 16, "l1"), (9, 8, "l2"), (4, 16, "l2"), (9, 32, "l2"), (9, 64, "l2"), (9, 8, "l1"),
    (4, 16, "l1"), (9, 64, "l1"),
)  # fmt: skip
# Steps, assignment, rates, noise and seeds of what is also done, most at (9, 16); SLOW was too low for prototypes.
SLOW, RATES, TAUGHT = (2e-3, 2e-3), (5e-3, 2.5e-2), (3e-3, 3e-2)  # of weights, of prototypes
NOISE, LITTLE = 0.3, 0.1  # of pictures
COURSE = (
    (9, 16, "l2", "straight", 0, RATES, NOISE, 1), (9, 16, "l1", "straight", 0, RATES, NOISE, 1),
    (9, 16, "l2", "straight", 150, SLOW, NOISE, 3), (9, 16, "l1", "straight", 150, SLOW, NOISE, 3),
    (9, 16, "l2", "straight", 150, RATES, NOISE, 3), (9, 16, "l1", "straight", 150, RATES, NOISE, 3),
    (9, 16, "l2", "straight", 300, RATES, NOISE, 3), (9, 16, "l2", "straight", 600, RATES, NOISE, 3),
    (9, 16, "l2", "straight", 1200, RATES, NOISE, 1), (9, 16, "l2", "taught", 300, TAUGHT, NOISE, 1),
    (9, 16, "l2", "taught", 1200, TAUGHT, NOISE, 1), (9, 16, "l2", "straight", 600, RATES, LITTLE, 1),
    (9, 16, "l1", "straight", 600, RATES, NOISE, 1), (9, 16, "l2", "straight", 4800, RATES, NOISE, 1),
    (9, 64, "l2", "straight", 1200, RATES, NOISE, 1), (4, 16, "l2", "straight", 1200, RATES, NOISE, 1),
    (4, 16, "l2", "straight", 4800, RATES, NOISE, 1), (9, 16, "l2", "straight", 1200, RATES, LITTLE, 3),
    (9, 16, "l1", "straight", 1200, RATES, LITTLE, 1),
)  # fmt: skip
NAMES = ("length", "prototypes", "distance", "assignment", "steps")
RESNET8 = (
    LayerProduct(rows=64, inputs=144, outputs=16, count=2), LayerProduct(rows=16, inputs=144, outputs=32),
    LayerProduct(rows=16, inputs=288, outputs=32), LayerProduct(rows=4, inputs=288, outputs=64),
    LayerProduct(rows=4, inputs=576, outputs=64),
)  # fmt: skip
RESNET20 = (
    LayerProduct(rows=1024, inputs=144, outputs=16, count=6), LayerProduct(rows=256, inputs=144, outputs=32),
    LayerProduct(rows=256, inputs=288, outputs=32, count=5), LayerProduct(rows=64, inputs=288, outputs=64),
    LayerProduct(rows=64, inputs=576, outputs=64, count=5),
)  # fmt: skip
FREE = replace(AreaCosts(), bit_um2=0.4, port_um2=0.0, word_um2=0.0)
NO_TRAFFIC = Surroundings(bytes_per_cycle=1e12)
# name, areas, surroundings
CASES = (
    ("free ports", FREE, NO_TRAFFIC), ("ports", AreaCosts(), NO_TRAFFIC),
    ("all on chip", AreaCosts(), Surroundings(all_on_chip=True)),
    ("16 B/cycle, batch 64", AreaCosts(), Surroundings(batch=64)), ("16 B/cycle", AreaCosts(), Surroundings()),
)  # fmt: skip


HEAD = """# PQ-DNN: a ResNet whose layers look their products up

PQA (TRETS 2024) reports up to 3.1 times the performance per area of multipliers on ResNet-20 (FPGA; sub-vectors of 9,
16 prototypes), at less than a point of accuracy lost.

| published | ours | reason of the difference |
|---|---|---|
| 3.1 × per area at (9, 16) | *free ports* below | ASIC areas; an FPGA's memories have ports anyway |
| the same | columns behind it | ports, and traffic of tables of 16/9 the numbers of weights |
| less than a point lost | 0.9 with L2 and little noise, *Accuracy* below | steps; noise that prototypes miss |

ResNet-8 (widths 16, 32, 64; the first convolution has a stride of 2 and, like the output layer, stays dense) on
generated pictures of 16 × 16 pixels: strokes of ten classes, warped, coloured, in noise, drawn anew for every step.
2,000 test pictures, the same for all: one is 0.05 points, and 80 % of repeated test sets would lie within ± 0.7 points
of an accuracy of 94 %. Convolutions are replaced one after the other by k-means of what they meet, then all is trained
with AdamW in steps of 32 pictures, a quarter of the dense network's 600 or more. Inputs, prototypes and tables have
8 bits when tested. The noise was set so that the dense network is not saturated, and batch, stem and steps were cut to
what a run may take: losses are those of short training. *Dense, trained on* has as many more steps as the quantised
network has; *inputs missed* is the share of the squares of a layer's inputs that prototypes miss before they are
trained; *prototypes in use* is the exponential of the entropy of how often each is the nearest, K where all are equally
often; *steps back* is told below. Columns of a setting are means over its seeds, of those that have the figure.

The rates (5e-3 for weights, 2.5e-2 for prototypes) were chosen on 2,000 other pictures, with one seed. So were other
ways to train again, by hand, in 300 steps at (9, 16) with L2: *taught* (half of the loss by the outputs of the dense
network, and what its blocks give) saved most, 2 points (on the test pictures less, see below); its outputs or its
blocks alone, or a loss that draws inputs to their prototypes, 1 to 1.5; k-means again every 50 steps nothing, though
prototypes then miss 25 % of the squares of inputs in place of 45; prototypes that train four times faster lost 4. So
what is lost is not what prototypes miss: in few steps the network has not yet learned to do with 16 of them. More steps
help, first much and then little; and they help the dense network, too. At (9, 16) a point is out of reach here:
prototypes miss a fifth of the squares of what they stand for, twice as much as at (4, 16), where the quantised network
after 1,200 steps is more accurate than the dense one that it was made from, which had 600 (beside a dense one *trained
on* as long it still loses points). What they miss matters where the task is hard: on pictures with a third of the
*noise*, (9, 16) comes to about a point. Sub-vectors of 4 lose least, and gain least per area.

Why L1 loses more: training takes what is looked up to follow its inputs (the gradient goes straight through). With L2
it does: where a small step of the inputs changes the nearest prototype, the change never leads back, since the nearest
by squares is the gradient of a convex function of the inputs. With L1 a tenth of these changes do (*steps back*), and
fewer prototypes are in use. On other pictures, by hand, seed 0, 150 steps, nothing else made the difference: from the
prototypes of L2's k-means, or of k-medians, with one rate of 5e-3 for all, and without the 8 bits, L1 comes to 67 to
70 %, L2 to 77 %.

Accelerators: encoder, accumulators, tables with ports, prototypes and activations against a weight-stationary array of
8-bit multipliers, all sizes of both enumerated (`foretrace plan look-ups` does it for a model of yours). *Free ports*:
no ports, dense cells, and memory that is never waited for, as publications have it; *ports*: only the last of these;
*all on chip*: tables of all layers; *16 B/cycle*: tables of a layer are read for every image, or for a batch of 64.
"""


def of_point(point: Sequence[Any], seed: int) -> Cell:
    """The key of a cell: (length, prototypes, distance, assignment, steps, rates, noise) and a seed."""
    *names, rates, noise = point
    key = dict(zip(NAMES, names, strict=True)) | {"seed": seed} | ({} if rates == SLOW else {"rates": list(rates)})
    return key if noise == NOISE else key | {"noise": noise}


def points(cells: Sequence[Cell]) -> list[tuple[Any, ...]]:
    """POINTS whose seeds are all there, trained again in the same number of steps."""
    every = [(*point, "straight", STEPS, RATES, NOISE) for point in POINTS]
    return [each for each in every if len(with_key(cells, each)) == SEEDS]


ACCURACY = (
    "| v, K, distance | assignment | steps | rates, 1e-3 | noise | dense % | dense, trained on | inputs missed % "
    "| prototypes in use | steps back % | k-means alone | trained again | loss, points | by seed "
    "| CPU s |",
    "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
)


def keys() -> list[Cell]:
    """Every cell: a point, or the dense network trained on, and a seed."""
    course = [of_point(point, seed) for *point, seeds in COURSE for seed in range(seeds)]
    found = [of_point((*point, "straight", STEPS, RATES, NOISE), seed) for point in POINTS for seed in range(SEEDS)]
    found += [
        {"dense": steps, "rates": list(RATES), "seed": 0} | ({} if noise == NOISE else {"noise": noise})
        for noise, steps in sorted({(each[6], each[4]) for each in COURSE if each[4]})
    ]
    return list({str(each): each for each in (*course, *found)}.values())


def cell(key: Cell, folder: Path) -> dict[str, Any]:
    """Accuracy of one network."""
    from foretrace.training.product_quantised import Quantiser
    from reproductions.pq_dnn.trained import dense, longer, quantised

    rates, noise = key.get("rates", SLOW), key.get("noise", NOISE)
    model, accuracy = dense(key["seed"], folder, noise)
    if "dense" in key:
        return {"accuracy": longer(model, key["seed"], key["dense"], rates, noise)}
    taught = key["assignment"] == "taught"
    given = {name: key[name] for name in NAMES if name != "steps"} | ({"assignment": "straight"} if taught else {})
    found = quantised(model, Quantiser(**given, bits=BITS), key["seed"], key["steps"], rates, noise, taught=taught)
    return {"dense": accuracy, **found}


def settings(cells: Sequence[Cell], tested: int, of: Sequence[Sequence[Any]]) -> list[MeasuredQuantisation]:
    """Points with mean accuracies."""
    found = []
    for point in of:
        mine = with_key(cells, point)
        dense, accuracy = (statistics.mean(each[name] for each in mine) for name in ("dense", "accuracy"))
        found.append(MeasuredQuantisation(
            length=point[0], prototypes=point[1], distance=point[2], bits=BITS, dense=dense, accuracy=accuracy,
            samples=tested,
        ))  # fmt: skip
    return found


def with_key(cells: Sequence[Cell], point: Sequence[Any]) -> list[Cell]:
    """The cells of a point, by seed."""
    wanted = [{"rates": None, "noise": None} | of_point(point, seed) for seed in range(SEEDS)]
    return [each for each in cells for key in wanted if {name: each.get(name) for name in key} == key]


def trained(cells: Sequence[Cell], point: Sequence[Any]) -> str:
    """A row of the table of accuracy."""
    mine = with_key(cells, point)
    *_, assignment, steps, rates, noise = point
    losses = [100 * (row["dense"] - row["accuracy"]) for row in mine]
    on = [
        each["accuracy"] for each in cells
        if "length" not in each and (each["dense"], each.get("noise", NOISE)) == (steps, noise)
    ]  # fmt: skip
    found = [
        f"{point[0]}, {point[1]}, {point[2].upper()}", assignment, f"{steps:,}",
        " / ".join(f"{1e3 * each:g}" for each in rates), f"{noise:g}",
        f"{100 * statistics.mean(row['dense'] for row in mine):.1f}", f"{100 * statistics.mean(on):.1f}" if on else "–",
        f"{100 * statistics.mean(row['lost'] for row in mine):.0f}" if "lost" in mine[0] else "–",
        f"{statistics.mean(row['used'] for row in mine):.1f}" if "used" in mine[0] else "–",
        f"{100 * statistics.mean(row['against'] for row in mine):.0f}" if "against" in mine[0] else "–",
        f"{100 * statistics.mean(row['kmeans'] for row in mine):.1f}",
        f"{100 * statistics.mean(row['accuracy'] for row in mine):.1f}", f"{statistics.mean(losses):.1f}",
        f"{min(losses):.1f} – {max(losses):.1f}" if len(mine) > 1 else "one seed",
        f"{statistics.mean(row['cpu_s'] for row in mine):.0f}",
    ]  # fmt: skip
    return "| " + " | ".join(found) + " |"


def areas(found: Sequence[MeasuredQuantisation], products: Sequence[LayerProduct]) -> list[str]:
    """Rows of a table of performance per area over multipliers, never without the loss."""
    rows = []
    for each in found:
        cells = [f"{each.length}, {each.prototypes}, {each.distance.upper()}", f"{100 * each.loss:.1f}"]
        for _, costs, around in CASES:
            design = best_design(products, each, costs=costs, around=around)
            low, high = design.over_dense_interval
            cells.append(f"{design.over_dense:.2f} ({low:.2f} – {high:.2f})")
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def searched(found: Sequence[MeasuredQuantisation], products: Sequence[LayerProduct], most_loss: float) -> list[str]:
    """Rows of a table of what the search chooses within a loss."""
    rows, kept = [], [each for each in found if each.loss <= most_loss]
    if not kept:
        return ["| all | none: every setting that was measured loses more | – | – | – | – |"]
    for name, costs, around in CASES:
        made = [best_design(products, each, costs=costs, around=around) for each in kept]
        design = max(made, key=lambda each: each.over_dense)
        at = design.measured
        rows.append(
            f"| {name} | {at.length}, {at.prototypes}, {at.distance.upper()} | {100 * at.loss:.1f} | "
            f"{design.over_dense:.2f} | {design.units}, {design.banks} × {design.word} | "
            f"{len(kept) * LOOK_UP_DESIGNS:,} |"
        )
    return rows


def page(cells: Sequence[Cell], tested: int) -> str:
    """The page."""
    from tables import machine, today

    straight = settings(cells, tested, points(cells))
    quiet = [point for *point, seeds in COURSE if point[-1] == LITTLE and len(with_key(cells, point)) == seeds == SEEDS]
    table = [trained(cells, point) for point in points(cells)]
    course = [trained(cells, point) for *point, _ in COURSE if with_key(cells, point)]
    names = " | ".join(name for name, _, _ in CASES)
    least = min((each.loss for each in straight), default=0.0)
    lines = [
        HEAD, f"*{today()}, {machine()}; `python -m reproductions pq_dnn --write`.*", "", "## Accuracy", "",
        *ACCURACY, *table, "", "How far it comes by steps, rates and assignment:", "", *ACCURACY, *course,
        "",
        "## Performance per area over multipliers, beside the loss measured at the same (v, K)", "",
        f"Sizes of ResNet-20 at 32 × 32 (the paper's); the loss is that of our ResNet-8.\n\n| v, K, distance | loss, "
        f"points | {names} |", "|---|---:|" + "---:|" * len(CASES), *areas(straight, RESNET20), "",
        f"Sizes of our ResNet-8, whose accuracy it is:\n\n| v, K, distance | loss, points | {names} |",
        "|---|---:|" + "---:|" * len(CASES), *areas(straight, RESNET8), "",
        "## What the search finds", "",
        "Settings and sizes together, all priced: proven best within the model. Sizes of ResNet-20. Within a "
        f"loss of {100 * MOST_LOSS:.0f} point, then of {100 * least + 2:.1f} (2 more than the least there is), then of "
        "any, which is what performance per area alone would choose:",
    ]  # fmt: skip
    for most in (MOST_LOSS, least + 0.02, 1.0):
        lines += [
            "", f"| at most {100 * most:.1f} points | v, K, distance | loss, points | over multipliers "
            "| units, banks | designs |", "|---|---|---:|---:|---:|---:|", *searched(straight, RESNET20, most),
        ]  # fmt: skip
    lines += [
        "", f"On pictures with a third of the noise, of the settings with {SEEDS} seeds there:", "",
        f"| at most {100 * MOST_LOSS:.1f} points | v, K, distance | loss, points | over multipliers | units, banks "
        "| designs |", "|---|---|---:|---:|---:|---:|", *searched(settings(cells, tested, quiet), RESNET20, MOST_LOSS),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    parser = parser_of("pq_dnn", __doc__)
    parser.add_argument("--cells", type=int, help="measure so many cells more, then stop; 0: only what is kept")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "foretrace_pq_dnn")
    parser.add_argument("--write", action="store_true", help="write README.md beside this file, not to the terminal")
    options = parser.parse_args(arguments)

    import torch

    from reproductions.pq_dnn.trained import TESTED

    torch.set_num_threads(1)
    lines = ROWS.read_text(encoding="utf-8").splitlines() if ROWS.exists() else []
    known = [json.loads(line)["key"] for line in lines]
    wanted = known + [each for each in keys() if each not in known][: options.cells]
    cells = measured(ROWS, wanted, partial(cell, folder=options.folder))
    if options.cells and not options.write:
        return 0
    text = page(cells, TESTED)
    if options.write:
        put(HERE / "README.md", text)
    else:
        print(text, end="")
    return 0
