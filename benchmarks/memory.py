"""How far predicted peaks of memory are off, against the allocator of this machine; FLOPs against PyTorch's counter.

    python benchmarks/memory.py [MODEL ...] [--batch N] [--json]
    python benchmarks/memory.py --store            # all rows anew, for docs/accuracy/memory.md

A training is made and run for two steps inside PyTorch's profiler, so that every allocation is seen: weights, optimizer
state, batch and all that the second step needs. Its peak stands beside that of the captured step, which is not run.
FLOPs are of products, convolutions and attention, which is what `torch.utils.flop_counter` counts.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.cost.calls import Family
from foretrace.errors import ForetraceError
from foretrace.files import write_bytes
from foretrace.model.capture.capture import capture
from foretrace.model.memory.memory import peak
from foretrace.training.batches import resized
from foretrace.training.training import Training
from foretrace.zoo.registry import entries, training
from tables import ROOT, machine, percent, table, today

LARGER = {"resnet50": 64, "bert": 32, "lstm-lm": 64, "gan": 64, "llama": 32}  # model -> further batch size
STORED = ROOT / "benchmarks" / "data" / "memory.json"
_PRODUCTS = (Family.GEMM, Family.CONV, Family.ATTENTION)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One model at one batch size; without `real_bytes` it could not be captured, and `why` says what stood against."""

    model: str
    batch: int
    real_bytes: int = 0
    predicted_bytes: int = 0
    error: float = 0.0  # of the prediction, relative to the real peak
    flops: float = 0.0  # predicted, products only
    counted_flops: float = 0.0  # by torch.utils.flop_counter
    why: str = ""


def real_peak(make: Any) -> int:
    """Most bytes that the processor's allocator has given out during the second step of a training made anew."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with (
        tempfile.TemporaryDirectory() as folder,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        job: Training = make()
        batch = next(job.batches())
        job.model.train()
        job.step(batch)
        gc.collect()
        with record_function("the second step"):
            job.step(batch)
        del job, batch
        gc.collect()
        profiler.stop()
        path = Path(folder) / "trace.json.gz"
        profiler.export_chrome_trace(str(path))
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    step = next(each for each in events if each.get("name") == "the second step" and each.get("ph") == "X")
    first, last = step["ts"], step["ts"] + step["dur"]
    sizes = [
        each["args"]["Total Allocated"]
        for each in events
        if each.get("name") == "[memory]" and first <= each["ts"] <= last
    ]
    return int(max(sizes))


def counted(make: Any) -> float:
    """FLOPs of a step by PyTorch's own counter."""
    from torch.utils.flop_counter import FlopCounterMode

    job: Training = make()
    batch = next(job.batches())
    job.model.train()
    with FlopCounterMode(display=False) as counter:
        job.step(batch)
    return float(counter.get_total_flops())


def row(model: str, batch: int | None) -> Row:
    """Real and predicted peak of one model."""

    def make() -> Training:
        job = training(model)
        return job if batch is None else replace(job, loader=resized(job.loader, batch))

    samples = batch or training(model).batch_size
    try:
        graph = capture(lambda: training(model), batch=batch, like="cpu")
    except ForetraceError as error:
        return Row(model=model, batch=samples, why=str(error))
    products = np.isin(graph.calls.family, _PRODUCTS)
    predicted = peak(graph, allocator="none").peak_bytes
    real = real_peak(make)
    return Row(
        model=model, batch=samples, real_bytes=real, predicted_bytes=predicted, error=predicted / real - 1,
        flops=float(graph.calls.flops[products].sum()), counted_flops=counted(make),
    )  # fmt: skip


def rows(models: Sequence[str] = (), batch: int | None = None, *, keep: bool = False) -> list[Row]:
    """All models of the zoo as they are, and some with larger batches; `keep` stores every row as it comes."""
    import torch

    torch.set_num_threads(1)
    if models:
        asked = [(model, batch) for model in models]
    else:
        asked = [(model, None) for model in entries()] + list(LARGER.items())
    found = []
    for model, each in asked:
        found.append(row(model, each))
        if keep:
            store(found)
        print(f"{model}: {percent(found[-1].error, signed=True)} %", file=sys.stderr)
    return found


def as_table(found: Sequence[Row]) -> str:
    """Markdown."""
    header = ("model", "batch", "real peak MB", "predicted MB", "error %", "GFLOPs", "PyTorch's counter")
    lines = []
    for each in found:
        if each.why:
            lines.append([each.model, str(each.batch), "", "", each.why, "", ""])
            continue
        lines.append(
            [
                each.model, str(each.batch), f"{each.real_bytes / 1e6:.2f}", f"{each.predicted_bytes / 1e6:.2f}",
                percent(each.error, signed=True), f"{each.flops / 1e9:.4g}", f"{each.counted_flops / 1e9:.4g}",
            ]
        )  # fmt: skip
    return table(header, lines)


def store(found: Sequence[Row]) -> None:
    """Keep rows with their date and machine."""
    stored = {"date": today(), "machine": machine(), "rows": [asdict(each) for each in found]}
    write_bytes(STORED, (json.dumps(stored, indent=1) + "\n").encode())


def section() -> str:
    """The page docs/accuracy/memory.md, from the stored rows."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    found = [Row(**each) for each in stored["rows"]]
    known = [each for each in found if not each.why]
    worst = max((abs(each.error) for each in known), default=0.0)
    mean = sum(abs(each.error) for each in known) / max(len(known), 1)
    return (
        f"*{stored['date']}, {stored['machine']}.*\n\n"
        'The step of every zoo model in its small size is captured without being run (`like="cpu"`), and its peak is '
        "held against what PyTorch's allocator gave out during a real second step, weights and optimizer state "
        "included. What oneDNN needs beside tensors (workspaces) follows rules that were found by looking at the "
        "allocations of vgg11, resnet50, gan, lstm-lm and actor-critic, which are among the rows "
        "(the detector, too); everything else "
        "follows from the capture. "
        f"Mean error {percent(mean)} %, worst {percent(worst)} %.\n\n"
        "FLOPs are of products, convolutions and fused attention. PyTorch's counter does not know fused attention of "
        "processors (llama) and takes the gradients of grouped convolutions for those of ungrouped ones "
        "(mobilenet-v2); it counts addmm, yet not addmm_ in place, which `DropoutLSTM` calls in every time step "
        "(dropout-lstm, acoustic-lstm).\n\n" + as_table(found)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="of the zoo; all, and some in larger batches, if none is given")
    parser.add_argument("--batch", type=int, help="samples of a step, for the models given")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--store", action="store_true", help="keep the rows for docs/accuracy/memory.md")
    given = parser.parse_args()
    try:
        found = rows(given.models, given.batch, keep=given.store)
    except ForetraceError as error:
        print(f"memory: {error}", file=sys.stderr)
        return 2
    print(json.dumps([asdict(each) for each in found], indent=1) if given.json else as_table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
