"""Does compressing gradients pay? The Utility study's question over many set-ups, with hooks timed on this machine.

    python -m reproductions compression_utility measure [--models resnet50,bert,...] [--out measured.json]
    python -m reproductions compression_utility table [--measured measured.json] [--v100 TRACE]

`measure`: backward pass of zoo models (one thread, CPU time, median of three steps) and every communication
hook on the buckets that DistributedDataParallel would form of their gradients, timed alone (`training/compression`).
`table` puts models x networks x workers x methods into the closed formula of the study (`formula.py`) and writes
README.md. `--v100` adds ResNet-50 on a V100: the backward pass of a public
recording, coding times as quoted from the paper.

Source: Agarwal et al., On the Utility of Gradient Compression in Distributed Training Systems, MLSys 2022.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from foretrace.cost.network.network import CollectiveKind
from foretrace.files import write_bytes
from foretrace.model.messages import MIB, bucketed
from foretrace.techniques.distributed.compressors import parts
from foretrace.training.compression.settings import CompressionSettings
from foretrace.training.compression.timing import ALL, GATHERING, hook_operator
from reproductions import parser_of
from reproductions.compression_utility.formula import Link, Sent, compressed_s, required_ratio, synchronous_s
from reproductions.systems import put

HERE = Path(__file__).parent
MODELS = ("resnet50", "inception-v3", "vgg11", "lstm-lm", "transformer", "bert", "dlrm")
METHODS = {
    "fp16": CompressionSettings(method="fp16"),
    "PowerSGD rank 1": CompressionSettings(method="powersgd", rank=1),
    "PowerSGD rank 4": CompressionSettings(method="powersgd", rank=4),
    "PowerSGD rank 16": CompressionSettings(method="powersgd", rank=16),
    "top-k 1 %": CompressionSettings(method="topk", share=0.01),
    "top-k 10 %": CompressionSettings(method="topk", share=0.1),
    "random-k 1 %": CompressionSettings(method="randomk", share=0.01),
    "sign": CompressionSettings(method="sign"),
    "DGC 0.1 %": CompressionSettings(method="dgc", share=0.001),
}
GBIT = (0.1, 0.5, 1.0, 5.0, 8.0, 10.0, 25.0, 100.0)
WORKERS = (4, 16, 64)
LATENCY_S = 50e-6
AT = (2, 8)  # workers that decoding of gathering methods is timed at; it is linear in them
FASTER = 0.99  # of the uncompressed step: less is no gain

# ResNet-50 on V100: seconds of encoding and decoding all gradients, quoted from the study and not checked against it.
V100_CODING_S = {
    "PowerSGD rank 4": 0.045,
    "PowerSGD rank 16": 0.130,
    "top-k 1 %": 0.240,
    "top-k 10 %": 0.289,
    "sign": 0.016,
}


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one model."""

    name: str
    size: str  # of the zoo
    where: str
    batch: int
    backward_s: float
    shapes: tuple[tuple[int, ...], ...]  # of the gradients, in the order in which they become ready
    coding_s: dict[str, tuple[float, float]]  # per method: with few and with many workers (`AT`)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return 4 * sum(prod(shape) for shape in self.shapes)

    def buckets(self) -> list[list[tuple[int, ...]]]:
        """Gradients as DistributedDataParallel puts them together."""
        sizes = [4 * prod(shape) for shape in self.shapes]
        return [[self.shapes[i] for i in bucket] for bucket in bucketed(sizes, [MIB, 25 * MIB])]

    def sent(self, method: str, workers: int) -> Sent:
        """What a worker sends with a method, and its coding time."""
        each = [part for bucket in self.buckets() for part in parts(METHODS[method], bucket, workers)]
        few, many = self.coding_s[method]
        slope = (many - few) / (AT[1] - AT[0])
        return Sent(
            reduced=[part.nbytes for part in each if part.kind == CollectiveKind.ALL_REDUCE and part.nbytes],
            gathered=[part.sent for part in each if part.kind == CollectiveKind.ALL_GATHER],
            coding_s=max(few + slope * (workers - AT[0]), 0.0),
        )


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A run of `measure`."""

    date: str
    machine: str
    models: tuple[Model, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SetUp:
    """One model, network, number of workers and method."""

    model: str
    gbit: float
    workers: int
    method: str
    plain_s: float
    compressed_s: float

    @property
    def gains(self) -> bool:
        """Whether compression makes the step shorter, by a hundredth or more."""
        return self.compressed_s < FASTER * self.plain_s


def measure(names: Sequence[str], size: str) -> Measured:
    """Backward passes and hooks on this machine."""
    import torch

    torch.set_num_threads(1)
    found = []
    for name in names:
        began = time.perf_counter()
        found.append(_measure_model(name, size))
        gc.collect()
        print(f"{name}: backward {found[-1].backward_s:.3g} s, {time.perf_counter() - began:.0f} s", flush=True)
    return Measured(date=f"{datetime.now(UTC):%Y-%m-%d}", machine=_machine(), models=tuple(found))


def _measure_model(name: str, size: str) -> Model:
    from foretrace.zoo.registry import training as make

    training = make(name, size).with_batches(1)
    batch = next(training.batches())
    order: list[int] = []
    parameters = [each for each in training.model.parameters() if each.requires_grad]
    for i, each in enumerate(parameters):
        each.register_post_accumulate_grad_hook(lambda _, i=i: order.append(i))
    times = []
    for _ in range(4):
        order.clear()
        training.model.zero_grad()
        loss = training.forward(batch)
        begin = time.thread_time()
        loss.backward()
        times.append(time.thread_time() - begin)
    ready = list(dict.fromkeys(order))
    shapes = tuple(tuple(parameters[i].shape) for i in ready)
    backward_s, samples = statistics.median(times[1:]), training.batch_size
    del training, loss, parameters, batch
    gc.collect()
    model = Model(name=name, size=size, where="here", batch=samples, backward_s=backward_s, shapes=shapes, coding_s={})
    coding = {label: _coding(model, settings) for label, settings in METHODS.items()}
    return msgspec.structs.replace(model, coding_s=coding)


def _coding(model: Model, settings: CompressionSettings) -> tuple[float, float]:
    """Seconds of a hook on all buckets, with few and with many workers; the least of a few repetitions."""
    totals = []
    for workers in AT if settings.method in GATHERING else AT[:1]:
        total = 0.0
        for bucket in model.buckets():
            call = _prepared(settings, bucket, workers)
            call()
            times = []
            for _ in range(3):
                begin = time.thread_time()
                call()
                times.append(time.thread_time() - begin)
            total += min(times)
        totals.append(total)
    return totals[0], totals[-1]


def _prepared(settings: CompressionSettings, bucket: list[tuple[int, ...]], workers: int) -> Any:
    from foretrace.training.compression.timing import prepared_hook

    return prepared_hook(hook_operator(settings, bucket, workers, ALL))


def v100(trace: Path) -> Model:
    """ResNet-50 as recorded by others on a V100; coding as quoted, where it was."""
    from foretrace.flow import read
    from foretrace.graph.taskgraph import Phase
    from foretrace.simulate.replay import replay
    from foretrace.zoo.registry import training as make

    shapes = [tuple(each.shape) for each in make("resnet50", "full").model.parameters()]
    graph = read(trace).graph().graph
    start, end = replay(graph)
    spans = []
    for step in range(graph.n_steps):
        rows = np.flatnonzero((graph.phase == Phase.BACKWARD) & (graph.step == step) & graph.on_device & ~graph.gone)
        if len(rows):
            spans.append(float(end[rows].max() - start[rows].min()) / 1e9)
    return Model(
        name="resnet50 on V100",
        size="full",
        where="V100",
        batch=32,
        backward_s=statistics.median(spans),
        shapes=tuple(reversed(shapes)),
        coding_s={name: (seconds, seconds) for name, seconds in V100_CODING_S.items()},
    )


def set_ups(models: Sequence[Model]) -> list[SetUp]:
    """All combinations."""
    return [
        SetUp(
            model=model.name,
            gbit=gbit,
            workers=workers,
            method=method,
            plain_s=synchronous_s(model.backward_s, model.nbytes, link),
            compressed_s=compressed_s(model.backward_s, model.sent(method, workers), link),
        )
        for model in models
        for gbit in GBIT
        for workers in WORKERS
        for link in [Link(workers=workers, bytes_per_s=gbit * 1e9 / 8, latency_s=LATENCY_S)]
        for method in model.coding_s
    ]


def page(measured: Measured, models: Sequence[Model]) -> str:
    """README.md."""
    found = set_ups(models)
    return "\n".join(
        [
            *_head(measured, models, found),
            *_by_network(models, found),
            *_by_method(found),
            *_by_model(models, found),
            *_coding_table(models),
        ]
    )


def _head(measured: Measured, models: Sequence[Model], found: Sequence[SetUp]) -> list[str]:
    gains, usual = _counts(found)
    return [
        "# Does compressing gradients pay?",
        "",
        f"Written by `make reproduce NAME=compression_utility ARGS=table` on {datetime.now(UTC):%Y-%m-%d}. "
        "Backward passes and hooks were "
        f"timed on {measured.date} on {measured.machine}, one thread, CPU time, by `ARGS=measure`.",
        "",
        f"{len(models)} models × {len(GBIT)} networks × {len(WORKERS)} numbers of workers × up to "
        f"{len(METHODS)} methods: "
        f"**{gains} of {len(found)} set-ups are faster with compression**, by 1 % or more. At 10 Gbit/s and "
        "above it is "
        f"{usual[0]} of {usual[1]}, {_without_casts(found)}. The study (Agarwal et al., MLSys 2022) reports 6 of "
        "more than 200, on V100s.",
        "",
        "Model of a step: the closed formula of the study (`formula.py`): uncompressed, all-reduces of 25 "
        "MiB buckets "
        "beside the backward pass (slowed by 1.07 ×); compressed, backward pass, then coding, then messages. Rings, "
        f"latency {1e6 * LATENCY_S:.0f} µs. Coding is the real hook on the real buckets with its messages "
        "answered at once; "
        "decoding of gathering methods was timed with "
        f"{AT[0]} and {AT[1]} workers and continued in a straight line. `foretrace compression advise` asks "
        "the same of a "
        "recorded task graph, with intervals.",
        "",
        "Read it with care: a backward pass on one processor core takes seconds where a GPU takes tens of "
        "milliseconds, and "
        "coding is slower, too. What carries over is the comparison on one device. `resnet50 on V100` takes "
        "its backward "
        "pass from a public recording and its coding times from the study as quoted second-hand (not checked "
        "against it).",
        "",
    ]


def _without_casts(found: Sequence[SetUp]) -> str:
    """The same without the 16-bit cast, which is hardly compression."""
    rest = [each for each in found if each.method != "fp16" and each.gbit >= 10]
    return f"without the cast to 16 bit {sum(each.gains for each in rest)} of {len(rest)}"


def _counts(found: Sequence[SetUp]) -> tuple[int, tuple[int, int]]:
    usual = [each for each in found if each.gbit >= 10]
    return sum(each.gains for each in found), (sum(each.gains for each in usual), len(usual))


def _by_method(found: Sequence[SetUp]) -> list[str]:
    lines = [
        "## Set-ups that gain, by method and network",
        "",
        "| method | " + " | ".join(f"{gbit:g} Gbit/s" for gbit in GBIT) + " | all |",
        "|---|" + "---|" * (len(GBIT) + 1),
    ]
    for method in METHODS:
        mine = [each for each in found if each.method == method]
        cells = []
        for gbit in GBIT:
            there = [each for each in mine if each.gbit == gbit]
            cells.append(f"{sum(each.gains for each in there)} of {len(there)}")
        lines.append(f"| {method} | " + " | ".join(cells) + f" | {sum(each.gains for each in mine)} of {len(mine)} |")
    return [*lines, ""]


def _by_model(models: Sequence[Model], found: Sequence[SetUp]) -> list[str]:
    lines = [
        "## By model, 16 workers",
        "",
        "Backward pass; ratio that near-linear scaling (5 %) needs at no cost of coding; best method and its "
        "step relative "
        "to the uncompressed one (bold: faster).",
        "",
        "| model | gradients | backward | " + " | ".join(f"{gbit:g} Gbit/s" for gbit in GBIT) + " |",
        "|---|---|---|" + "---|" * len(GBIT),
    ]
    for model in models:
        cells = []
        for gbit in GBIT:
            link = Link(workers=16, bytes_per_s=gbit * 1e9 / 8, latency_s=LATENCY_S)
            needed = required_ratio(model.backward_s, model.nbytes, link)
            there = [e for e in found if (e.model, e.gbit, e.workers) == (model.name, gbit, 16)]
            best = min(there, key=lambda each: each.compressed_s)
            relative = best.compressed_s / best.plain_s
            text = f"{best.method} {relative:.2f}"
            text = f"**{text}**" if best.gains else text
            cells.append(f"{'none' if needed is None else f'{needed:.3g}×'}; {text}")
        lines.append(
            f"| {model.name} ({model.size}), batch {model.batch} | {model.nbytes / 1e6:.3g} MB | "
            f"{1e3 * model.backward_s:.3g} ms | " + " | ".join(cells) + " |"
        )
    return [*lines, ""]


def _coding_table(models: Sequence[Model]) -> list[str]:
    lines = [
        "## Coding",
        "",
        "Encoding and decoding of all gradients of a step (ms), and how many times fewer bytes a worker sends. "
        "Gathering "
        f"methods with {AT[0]} / {AT[1]} workers.",
        "",
        "| model | " + " | ".join(METHODS) + " |",
        "|---|" + "---|" * len(METHODS),
    ]
    for model in models:
        cells = []
        for method, settings in METHODS.items():
            if method not in model.coding_s:
                cells.append("–")
                continue
            few, many = model.coding_s[method]
            sent = model.sent(method, 2)
            ratio = model.nbytes / (sum(sent.reduced) + sum(sent.gathered))
            times = f"{1e3 * few:.3g}" + (
                f" / {1e3 * many:.3g}" if settings.method in GATHERING and few != many else ""
            )
            cells.append(f"{times}; {ratio:.3g}×")
        lines.append(f"| {model.name} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _by_network(models: Sequence[Model], found: Sequence[SetUp]) -> list[str]:
    """Set-ups that gain, by model and network."""
    lines = [
        "## Set-ups that gain, by model and network",
        "",
        f"Over {', '.join(map(str, WORKERS))} workers and all methods.",
        "",
        "| model | " + " | ".join(f"{gbit:g} Gbit/s" for gbit in GBIT) + " | methods that gain at 10 Gbit/s |",
        "|---|" + "---|" * (len(GBIT) + 1),
    ]
    for model in models:
        mine = [each for each in found if each.model == model.name]
        cells = []
        for gbit in GBIT:
            there = [each for each in mine if each.gbit == gbit]
            cells.append(f"{sum(each.gains for each in there)} of {len(there)}")
        at_ten = dict.fromkeys(each.method for each in mine if each.gbit == 10 and each.gains)
        lines.append(f"| {model.name} | " + " | ".join(cells) + f" | {', '.join(at_ten) or 'none'} |")
    return [*lines, ""]


def _machine() -> str:
    import torch

    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return f"{model}, {os.cpu_count()} cores, PyTorch {torch.__version__}"


def main(arguments: Sequence[str]) -> int:
    parser = parser_of("compression_utility", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("measure", help="time backward passes and hooks on this machine")
    first.add_argument("--models", default=",".join(MODELS))
    first.add_argument("--size", default="tiny", choices=("tiny", "full"))
    first.add_argument("--out", type=Path, default=HERE / "measured.json")
    second = commands.add_parser("table", help="write the pages")
    second.add_argument("--measured", type=Path, default=HERE / "measured.json")
    second.add_argument("--v100", type=Path, help="a recording of ResNet-50 on a V100")
    given = parser.parse_args(arguments)
    if given.command == "measure":
        found = measure(given.models.split(","), given.size)
        write_bytes(given.out, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
        return 0
    measured = msgspec.json.decode(given.measured.read_bytes(), type=Measured)
    models = list(measured.models)
    if given.v100 is not None:
        models.append(v100(given.v100))
    put(HERE / "README.md", page(measured, models))
    return 0
