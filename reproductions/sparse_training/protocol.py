"""Zeros of six small networks in real training, and what an array that skips them gains.

    python -m reproductions sparse_training [--write] [--net NAME] [--steps N] [--folder FOLDER]

Every network is trained for some two minutes of a core; masks are taken at four checkpoints, of eight pictures, whose
weights are kept in the folder. What was simulated is kept in rows.jsonl beside this file and not simulated again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import quantiles
from tempfile import gettempdir
from typing import Any

import torch

from foretrace.cost.accelerators.sparse import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    ArrayRun,
    MaskedConv,
    SparseArray,
    expected,
    simulate,
)
from foretrace.report.models import sample
from foretrace.techniques.compute.sparse_accelerator import CLUSTERED
from foretrace.training.sparsity import exact, taken
from reproductions import parser_of
from reproductions.kept import SECONDS, Cell, measured
from reproductions.sparse_training.nets import NETS, training
from reproductions.sparse_training.trained import AT, STEPS, Checkpoint, checkpoints
from reproductions.systems import put
from tables import machine, table, today

HERE = Path(__file__).parent
LANES = (1, 8, 16, 32)
PUBLISHED = {"backward": (1.69, 5.43), "iteration": (1.68, 3.30)}
PARTS: dict[str, tuple[str, ...]] = {
    "forward": (FORWARD,), "input gradient": (INPUT_GRADIENT,), "backward": BACKWARD, "iteration": ()
}  # fmt: skip
FREE = SparseArray(bandwidth=1e8)  # PEs alone: memory keeps none of them waiting

HEAD = """# Input and output sparsity of training

Sarma et al. (arXiv 2109.07710) skip products with zero operands, and gradients that a ReLU masks anyway, in all three
products of a convolution: 1.69 – 5.43 × faster backward and 1.68 – 3.30 × an iteration, on five networks for ImageNet.
Here are six small networks (32 × 32 pixels, ten coloured shapes, generated without noise), masks of real training by
hooks, and our simulator of the array (`foretrace sparsity`, `foretrace.cost.accelerators.sparse`).

| published | ours | reason of the difference |
|---|---|---|
| 1.69 – 5.43 × backward, 1.68 – 3.30 × an iteration | third table: ranges by lanes | other networks and pictures |
| batch norm leaves output sparsity alone | zeros of output gradients with it and without: first table | |
| skipping is exact | all parameter gradients bit-identical in float64, six networks, trained and untrained | |

How wide the published array's lanes are and how it dispatches is not known to us: where the ranges meet, that is weak
evidence. Speed-ups are those of the PEs over the same array without skipping, products of padding left
out in both; what memory adds is in the fourth table.
"""


def figures(name: str, checkpoint: Checkpoint, *, last: bool) -> Cell:
    """What one checkpoint gives; the last one of a network on all arrays."""
    job = training(name)
    job.model.load_state_dict(checkpoint.state)
    step = taken(job, step=checkpoint.step)
    convs = step.convs
    simulate(convs[:2], SparseArray())  # loads the compiled loops
    begun = time.process_time()
    usual = sample(step, SparseArray())
    simulated_s = time.process_time() - begun
    arrays = {"memory 256": SparseArray()}
    if last:
        arrays |= {
            "fixed": replace(FREE, dispatch="fixed", barrier=1), "blocked": replace(FREE, order="blocked"),
            "pixels": replace(FREE, order="pixels"),
            "memory 256 plain": SparseArray(bitmaps="no"), "memory 64": SparseArray(bandwidth=64),
            "memory 64 plain": SparseArray(bandwidth=64, bitmaps="no"),
            **{f"{how} {n}": replace(FREE, lanes=n, dispatch=how) for n in LANES for how in
               ("redistributed", "unmasked")},
        }  # fmt: skip
    runs = {key: simulate(convs, array) for key, array in arrays.items()}
    shares = usual.input_zeros, usual.gradient_zeros
    return {
        "accuracy": checkpoint.accuracy, "trained_s": checkpoint.cpu_s, "exact": exact(job),
        "input_zeros": usual.input_zeros, "gradient_zeros": usual.gradient_zeros, "convolutions": len(convs),
        "masked": sum(each.maskable and each.input_gradient for each in convs), "simulated_s": simulated_s,
        "ideal": _ideal(convs), "clustered": _clustered(convs, runs["memory 256"], *shares),
        "runs": {key: _speedups(run) for key, run in runs.items()},
    }  # fmt: skip


def _speedups(run: ArrayRun) -> dict[str, Any]:
    """Of one array: speed-ups and bounds of the parts of a step, energy, and cycles that wait for memory."""
    parts = {name: run.of(*passes) for name, passes in PARTS.items()}
    waits = sum(each.sparse.cycles for each in run.passes if each.sparse.cycles > each.sparse.compute)
    return {
        **{name: round(part.speedup, 4) for name, part in parts.items()}, "energy": round(run.energy_ratio, 4),
        "waits": round(waits / run.sum("cycles"), 4),
        "bound": {name: round(part.bound, 4) for name, part in parts.items()},
    }  # fmt: skip


def _ideal(convs: Sequence[MaskedConv]) -> float:
    """1 / ((1 − s)(1 − s)) of the input gradients, each convolution weighed by its products."""
    inner = [each for each in convs if each.input_gradient]
    work = [each.gradients.size * each.weight[1] * each.weight[2] * each.weight[3] for each in inner]
    left = [(1 - each.zeros[1]) * (1 - each.zeros[0] * each.maskable) for each in inner]
    return sum(work) / sum(a * b for a, b in zip(work, left, strict=True))


def _clustered(convs: Sequence[MaskedConv], real: ArrayRun, inputs: float, gradients: float) -> dict[str, float]:
    """Cycles with the real masks over those with as many zeros of the whole network, drawn, per part of a step."""
    drawn = [
        run for each in convs for run in expected(each, inputs if each.input_gradient else 0.0, gradients, real.array)
    ]
    found = {}
    for name, passes in (("forward", (FORWARD,)), ("backward", BACKWARD)):
        mine = [each for each in drawn if each.what in passes]
        said = sum(each.sparse.cycles for each in mine) / sum(each.dense.cycles for each in mine)
        found[name] = round(1 / real.of(*passes).speedup / said, 4)
    return found


def main(given: Sequence[str]) -> int:
    """Print the tables, or write README.md."""
    parser = parser_of("sparse_training", __doc__)
    parser.add_argument("--write", action="store_true", help="keep rows and README.md")
    parser.add_argument("--net", choices=list(NETS), help="only this one")
    parser.add_argument("--steps", type=int, help="of every training, instead of its own number")
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "sparse_training", help="of the weights")
    asked = parser.parse_args(given)
    torch.set_num_threads(1)
    steps = {name: asked.steps or STEPS[name] for name in NETS if asked.net in (None, name)}
    keys = [
        {"net": name, "step": step}
        for name, count in steps.items()
        for step in dict.fromkeys(round(count * share) for share in AT)
    ]

    def found(key: Cell) -> Cell:
        trained = checkpoints(key["net"], steps[key["net"]], asked.folder)
        checkpoint = next(each for each in trained if each.step == key["step"])
        return figures(key["net"], checkpoint, last=checkpoint is trained[-1])

    file = HERE / "rows.jsonl" if asked.write else asked.folder / f"rows-{asked.steps or 'all'}.jsonl"
    asked.folder.mkdir(parents=True, exist_ok=True)
    text = tables(measured(file, keys, found))
    if not asked.write:
        print(text)
        return 0
    put(
        HERE / "README.md",
        f"{HEAD}\n*{today()}, {machine()}; `python -m reproductions sparse_training --write`.*\n\n{text}\n",
    )
    return 0


def tables(cells: Sequence[Cell]) -> str:
    """All tables and what they come to."""
    nets = list(dict.fromkeys(each["net"] for each in cells))
    last = {each["net"]: each for each in cells}  # the last checkpoint of every network
    trained_s = sum(each["trained_s"] for each in last.values())

    def line(title: str, value: Callable[[Cell], float], form: str = "{:.2f}") -> list[str]:
        return [title, *(form.format(value(last[net])) for net in nets)]

    def run(cell: Cell, array: str, part: str) -> float:
        return float(cell["runs"][array][part])

    zeros = table(
        ["network", "step", "accuracy", "zeros of inputs", "of output gradients", "forward", "backward", "iteration",
         "energy"],
        [
            [each["net"], str(each["step"]), f"{each['accuracy']:.3f}", f"{each['input_zeros']:.2f}",
             f"{each['gradient_zeros']:.2f}", *(f"{run(each, 'memory 256', part):.2f}" for part in
             ("forward", "backward", "iteration", "energy"))]
            for each in cells
        ],
    )  # fmt: skip
    dispatch = table(
        ["256 PEs × 16 lanes, speed-up", *nets],
        [
            line("input gradient, ideal 1/((1 − s)(1 − s))", lambda cell: cell["ideal"]),
            line("… no multiplier idle", lambda cell: cell["runs"]["redistributed 16"]["bound"]["input gradient"]),
            line("… work redistributed", lambda cell: run(cell, "redistributed 16", "input gradient")),
            line("… fixed places, barrier after 1 output per PE", lambda cell: run(cell, "fixed", "input gradient")),
            line("… unmasked outputs, 16 per barrier", lambda cell: run(cell, "unmasked 16", "input gradient")),
            line("… the same, a PE takes neighbours", lambda cell: run(cell, "blocked", "input gradient")),
            line("… the same, PEs take pixels of a channel", lambda cell: run(cell, "pixels", "input gradient")),
            line("whole backward, redistributed", lambda cell: run(cell, "redistributed 16", "backward")),
            line("whole backward, dispatched", lambda cell: run(cell, "unmasked 16", "backward")),
            line("iteration, redistributed", lambda cell: run(cell, "redistributed 16", "iteration")),
            line("iteration, dispatched", lambda cell: run(cell, "unmasked 16", "iteration")),
        ],
    )  # fmt: skip

    def span(array: str, part: str) -> str:
        values = [run(each, array, part) for each in last.values()]
        return f"{min(values):.2f} – {max(values):.2f}"

    lanes = table(
        ["lanes", "backward, redistributed", "dispatched", "iteration, redistributed", "dispatched"],
        [
            *(
                [str(n), *(span(f"{how} {n}", part) for part in PUBLISHED for how in ("redistributed", "unmasked"))]
                for n in LANES
            ),
            ["published", *(text for low, high in PUBLISHED.values() for text in (f"{low:.2f} – {high:.2f}", ""))],
        ],
    )
    memory = table(
        ["iteration, dispatched, 16 lanes", *nets],
        [
            line("speed-up, PEs alone", lambda cell: run(cell, "unmasked 16", "iteration")),
            *(
                line(f"{width} bytes a cycle, {how}{what}", partial(run, array=key, part=part), form)
                for width in (256, 64)
                for how, key in (("bitmaps", f"memory {width}"), ("all numbers", f"memory {width} plain"))
                for what, part, form in (
                    ("", "iteration", "{:.2f}"), (": cycles that wait", "waits", "{:.0%}"),
                    (": energy over dense", "energy", "{:.2f}"),
                )
            ),
        ],
    )  # fmt: skip
    return "\n".join([
        f"{len(nets)} networks, {trained_s / 60:.1f} minutes of a core in training; skipping was exact at "
        f"{sum(each['exact'] for each in cells)} of {len(cells)} checkpoints; a network is simulated in "
        f"{min(each['simulated_s'] for each in cells):.2f} – {max(each['simulated_s'] for each in cells):.2f} CPU "
        f"seconds, with its layers' figures ({max(each[SECONDS] for each in cells):.0f} s for all of a checkpoint).",
        "\n## Zeros and speed-ups along training\n\nThe usual array: 256 PEs × 16 lanes, unmasked outputs dispatched "
        "16 per barrier, 512 KiB, 256 bytes a cycle, bitmaps.\n", zeros,
        "\n## Dispatch decides\n\nAt the last checkpoint, each over its own array without skipping.\n", dispatch,
        "\n## Ranges over the networks by lanes\n", lanes, f"\n{_low(last)}",
        "\n## Memory, bitmaps and energy\n", memory,
        "\n## Stated zeros\n", _stated(cells),
    ])  # fmt: skip


def _low(last: dict[str, Cell]) -> str:
    """Why networks with batch norm are at the low end, and what dispatching recovers, by the figures."""
    dense = {net: each for net, each in last.items() if each["gradient_zeros"] < 0.05}
    skip = {net: each for net, each in last.items() if net not in dense}
    recovered = [
        each["runs"]["unmasked 16"]["input gradient"] / each["runs"]["redistributed 16"]["input gradient"]
        for each in last.values()
    ]
    said = [
        f"Dispatching only unmasked outputs reaches {min(recovered):.0%} – {max(recovered):.0%} of full redistribution."
    ]
    for name, part in (("with batch norm", dense), ("without batch norm", skip)):
        if part:
            values = [each["runs"]["redistributed 16"]["backward"] for each in part.values()]
            zeros = [each["gradient_zeros"] for each in part.values()]
            said.append(
                f"Networks {name} ({', '.join(part)}): {min(zeros):.2f} – {max(zeros):.2f} of output gradients are "
                f"zero, backward {min(values):.2f} – {max(values):.2f} ×."
            )
    if dense:
        said.append(
            "Batch norm's gradient subtracts means over the batch, which leaves no zero: the operand of both backward "
            "products is dense. What remains is the other operand of the weight gradient (zeros of inputs) and the "
            "outputs that the ReLU before the convolution masks, each worth 1/(1 − s) with s near a half: the low end, "
            "at most about 2."
        )
    return " ".join(said)


def _stated(cells: Sequence[Cell]) -> str:
    """How far cycles from two stated shares of zeros are off, and what a range from the other networks holds."""
    nets = list(dict.fromkeys(each["net"] for each in cells))
    off = {net: [v for each in cells if each["net"] == net for v in each["clustered"].values()] for net in nets}
    every = [value for values in off.values() for value in values]
    rows = [[net, f"{min(values):.2f} – {max(values):.2f}"] for net, values in off.items()]
    text = table(["network", "cycles, real masks over drawn ones with the network's shares of zeros"], rows)
    if len(nets) < 3:
        return text
    inside = 0
    for net in nets:
        others = [value for other in nets if other != net for value in off[other]]
        inside += sum(min(others) * 0.95 <= each <= max(others) * 1.05 for each in off[net])
    tenths = quantiles(every, n=10)
    held = sum(CLUSTERED[1] <= each <= CLUSTERED[2] for each in every)
    return (
        f"{text}\n\n80 % lie in {tenths[0]:.2f} – {tenths[-1]:.2f}. A range of the other networks, 5 % wider, "
        f"holds {inside} of {len(every)} values of the network left out. `sparse-accelerator` with `input=` and "
        f"`gradient=` takes {CLUSTERED[0]:g} ({CLUSTERED[1]:g} – {CLUSTERED[2]:g}), which holds {held}."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
