"""Structured dropout of LSTMs: how much faster a training step is, and what it does to perplexity on a real text.

    python -m reproductions structured_dropout [--blocks N] [--seeds N] [--write]

Speed: two layers over 35 time steps of 20 samples, forward and backward, all variants in one process in turns, one
thread, CPU time, median over blocks. Compared with ordinary dropout in the same implementation, and with
`torch.nn.LSTM` and `torch.nn.Dropout` (oneDNN's fused layer, dropout on inputs only), which people use.
Perplexity: a word model trained on the documentation topics that come with Python, last tenth held out.
"""

from __future__ import annotations

import math
import os
import platform
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foretrace.experiment.cores import environment
from reproductions import parser_of
from reproductions.systems import put

TIME_STEPS, BATCH, LAYERS = 35, 20, 2
SIZES, RATES, CONNECTIONS = (256, 512, 1024), (0.5, 0.65), ("input", "both")
WORDS, HIDDEN, P = 2_000, 128, 0.5


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Milliseconds of CPU time per step of the variants of one cell of the table."""

    hidden: int
    p: float
    connections: str
    ordinary_ms: float
    again_ms: float  # ordinary once more: the noise floor
    torch_ms: float
    sequence_ms: float  # units redrawn once per sequence
    five_ms: float  # every five time steps
    each_ms: float  # every time step: the paper's case III

    def row(self) -> str:
        ratios = [self.ordinary_ms / each for each in (self.sequence_ms, self.five_ms, self.each_ms, self.again_ms)]
        cells = [f"{self.ordinary_ms:.1f}", f"{self.torch_ms:.1f}", f"{self.sequence_ms:.1f}"]
        cells += [f"{each:.2f}" for each in ratios[:1]] + [f"{self.torch_ms / self.sequence_ms:.2f}"]
        cells += [f"{each:.2f}" for each in ratios[1:]]
        return f"| {self.hidden} | {self.p} | {self.connections} | " + " | ".join(cells) + " |"


def speed(hidden: int, p: float, connections: str, blocks: int) -> Speed:
    """Measure one cell."""
    import torch
    from torch import nn

    from foretrace.training.structured_lstm import DropoutLSTM, StructuredDropoutLSTM

    x = torch.randn(TIME_STEPS, BATCH, hidden, requires_grad=True)
    given: dict[str, Any] = {"p": p, "connections": connections}
    arms: dict[str, nn.Module] = {
        "ordinary": DropoutLSTM(hidden, hidden, LAYERS, **given),
        "torch": nn.LSTM(hidden, hidden, LAYERS, dropout=p),
        "sequence": StructuredDropoutLSTM(hidden, hidden, LAYERS, **given),
        "five": StructuredDropoutLSTM(hidden, hidden, LAYERS, span=5, **given),
        "each": StructuredDropoutLSTM(hidden, hidden, LAYERS, span=1, **given),
        "again": DropoutLSTM(hidden, hidden, LAYERS, **given),
    }
    before = nn.Dropout(p)
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for block in range(blocks + 1):
        for name, module in arms.items():
            module.zero_grad(set_to_none=True)
            began = time.process_time()
            out, _ = module(before(x) if name == "torch" else x)
            out.sum().backward()
            if block:
                taken[name].append(time.process_time() - began)
    ms = {f"{name}_ms": 1e3 * statistics.median(values) for name, values in taken.items()}
    return Speed(hidden=hidden, p=p, connections=connections, **ms)


def text() -> list[str]:
    """Words of the documentation topics that come with Python."""
    from pydoc_data.topics import topics

    return re.findall(r"[a-z]+|[^\sa-z]", " \n ".join(topics[name] for name in sorted(topics)).lower())


def perplexity(make: Callable[[], object], seed: int, epochs: int) -> float:
    """Perplexity on the held-out tenth after some epochs on the rest."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

    torch.manual_seed(seed)
    words = text()
    known = {word: i + 1 for i, (word, _) in enumerate(Counter(words).most_common(WORDS - 1))}
    numbers = torch.tensor([known.get(word, 0) for word in words])
    cut = len(numbers) * 9 // 10
    lstm = make()
    assert isinstance(lstm, nn.LSTM)
    model = nn.ModuleDict({"in": nn.Embedding(WORDS, HIDDEN), "lstm": lstm, "out": nn.Linear(HIDDEN, WORDS)})
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def run(part: Tensor, *, train: bool) -> float:
        columns = part[: len(part) // BATCH * BATCH].view(BATCH, -1).t()
        state, total, count = None, 0.0, 0
        model.train(train)
        for at in range(0, len(columns) - 1, TIME_STEPS):
            x, y = columns[at : at + TIME_STEPS], columns[at + 1 : at + 1 + TIME_STEPS]
            x = x[: len(y)]
            out, state = model["lstm"](model["in"](x), state)
            state = tuple(each.detach() for each in state)
            loss = functional.cross_entropy(model["out"](out).flatten(0, 1), y.flatten())
            if train:
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total, count = total + loss.item() * y.numel(), count + y.numel()
        return total / count

    for _ in range(epochs):
        run(numbers[:cut], train=True)
    with torch.no_grad():
        return math.exp(run(numbers[cut:], train=False))


def perplexities(seeds: int, epochs: int) -> list[str]:
    """Rows of the table of perplexities."""
    from foretrace.training.structured_lstm import DropoutLSTM, StructuredDropoutLSTM

    variants: dict[str, Callable[[], object]] = {
        "none": lambda: DropoutLSTM(HIDDEN, HIDDEN, LAYERS, p=0.0),
        "ordinary": lambda: DropoutLSTM(HIDDEN, HIDDEN, LAYERS, p=P),
        "structured, once per sequence": lambda: StructuredDropoutLSTM(HIDDEN, HIDDEN, LAYERS, p=P),
        "structured, every time step": lambda: StructuredDropoutLSTM(HIDDEN, HIDDEN, LAYERS, p=P, span=1),
    }
    rows = []
    for name, make in variants.items():
        found = [perplexity(make, seed, epochs) for seed in range(seeds)]
        spread = statistics.stdev(found) if seeds > 1 else 0.0
        each = ", ".join(f"{value:.1f}" for value in found)
        rows.append(f"| {name} | {statistics.mean(found):.1f} | {spread:.1f} | {each} |")
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main(arguments: Sequence[str]) -> int:
    parser = parser_of("structured_dropout", "Structured dropout of LSTMs: speed and perplexity.")
    parser.add_argument("--blocks", type=int, default=4, help="repetitions of every variant; 0: no speed")
    parser.add_argument("--seeds", type=int, default=3, help="0: no perplexity")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--write", action="store_true", help="write the page beside this file, not to the terminal")
    options = parser.parse_args(arguments)
    if os.environ != (settled := environment(threads=1)):
        words = [sys.executable, "-m", "reproductions", "structured_dropout", *arguments]
        os.execve(sys.executable, words, settled)  # set before torch loads

    import torch

    torch.set_num_threads(1)
    began = time.process_time()
    perplexity_rows = perplexities(options.seeds, options.epochs) if options.seeds else []
    speeds = []
    for hidden in SIZES if options.blocks else ():
        for p in RATES:
            for connections in CONNECTIONS:
                speeds.append(speed(hidden, p, connections, options.blocks))
                print(speeds[-1].row(), file=sys.stderr, flush=True)
    lines = [
        "# Structured dropout of LSTMs",
        "",
        f"Made by `make reproduce NAME=structured_dropout` on {datetime.now(UTC):%Y-%m-%d}, PyTorch "
        f"{torch.__version__}, {platform.machine()} ({torch.backends.cpu.get_cpu_capability()}), one thread, "
        f"CPU time, load {os.getloadavg()[0]:.1f}, {time.process_time() - began:.0f} s in all.",
        "",
        "## Speed",
        "",
        f"Forward and backward of {LAYERS} layers, {TIME_STEPS} time steps, batch {BATCH}, float32; median of "
        f"{options.blocks} blocks in which all variants take turns. *Ordinary*: masks, the same implementation. "
        "*nn.LSTM*: oneDNN with `nn.Dropout`, which drops inputs only. *Structured* redraws units once per sequence; "
        "the speed-ups after it are over ordinary dropout when they are redrawn every 5 or every single time step. "
        "*A/A* is ordinary against itself. Published (GPU): 1.23 to 1.64.",
        "",
        "| hidden | p | connections | ordinary ms | nn.LSTM ms | structured ms | over ordinary | over nn.LSTM "
        "| every 5 | every 1 | A/A |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(each.row() for each in speeds),
    ]
    if perplexity_rows:
        lines += [
            "",
            "## Perplexity",
            "",
            f"Word model, {LAYERS} layers of {HIDDEN}, p = {P} on inputs and recurrent connections, {options.epochs} "
            f"epochs of Adam over Python's documentation topics ({len(text()):,} words, {WORDS:,} distinct), last "
            "tenth held out.",
            "",
            "| dropout | perplexity | standard deviation | seeds |",
            "|---|---|---|---|",
            *perplexity_rows,
        ]
    page = "\n".join(lines) + "\n"
    if options.write:
        put(Path(__file__).with_name("README.md"), page)
    else:
        print(page, end="")
    return 0
