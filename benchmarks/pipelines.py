"""Pipelines, predicted against measured: stages that sleep, and stages that compute.

    python benchmarks/pipelines.py [sleeping] [computing] [memory] [--write]

Stage times and hops are read off one run of GPipe; every other schedule is predicted from them and then run. What
is compared is the median batch of one of five runs, without the first and the last batch: the one whose stages took
least time for their own work, which others disturb and no schedule changes. Sleeping stages need no core, yet a loaded
machine wakes them late; computing ones need a core each. `--write` keeps the rows in
benchmarks/data/pipelines.jsonl and writes the last section of docs/pipelines.md.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from foretrace.plan.pipelines.lower import StageCost, predict
from foretrace.training.pipeline.job import PipelineJob
from foretrace.training.pipeline.launch import train_here
from foretrace.training.pipeline.runtime import Trained
from foretrace.training.pipeline.schedule import SCHEDULES, PipelineSchedule
from pipeline_costs import batch_times_s, measured_costs
from pipeline_storages import measured
from tables import ROOT, machine, table, today

PATH = Path(__file__).parent / "data" / "pipelines.jsonl"
PAGE = ROOT / "docs" / "pipelines.md"
HEADING = "## Predicted and measured\n"
FORWARD_S, BACKWARD_S = 0.020, 0.040
BATCHES, SKIP, RUNS = 8, 1, 5  # connections are made in the first batch; others disturb a run
KINDS: tuple[tuple[str, dict[str, int]], ...] = (
    ("gpipe", {}), ("1f1b-flush", {}), ("2bw", {}), ("2bw", {"warmup": 2}), ("zero-bubble", {}),
)  # fmt: skip


class _Sleep(torch.autograd.Function):
    """Identity whose passes take so long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Sleeping(nn.Module):
    """A stage that takes its time and no core; half of the backward pass is for the gradient of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        passed: Tensor = _Sleep.apply(x, FORWARD_S, BACKWARD_S / 2)  # type: ignore[no-untyped-call]
        weight: Tensor = _Sleep.apply(self.weight, 0.0, BACKWARD_S / 2)  # type: ignore[no-untyped-call]
        return passed * weight


class Computing(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def batch(shape: tuple[int, ...], micro_batch: int) -> tuple[Tensor, Tensor]:
    """An input and a target that nobody reads."""
    return torch.full(shape, 0.5 + micro_batch % 7), torch.zeros(1)


def mean(out: Tensor, target: Tensor) -> Tensor:
    """A loss of the output alone."""
    return out.mean() + target.sum()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain SGD."""
    return torch.optim.SGD(parameters, lr=1e-3)


def jobs(kind: str, stages: int) -> PipelineJob:
    """A pipeline of alike stages that sleep or compute."""
    layer, shape = (Sleeping, (4, 64)) if kind == "sleeping" else (partial(Computing, 128), (8, 64, 128))
    return PipelineJob(
        layers=(layer,) * stages, cut=(1,) * stages, data=partial(batch, shape), loss=mean, optimizer=sgd
    )


def compared(kind: str, stages: int, m: int) -> list[dict[str, Any]]:
    """One row per schedule."""
    job = jobs(kind, stages)
    first = SCHEDULES["gpipe"](stages, m, BATCHES)
    runs = [measured_costs(first, train_here(job, first), skip=SKIP) for _ in range(RUNS)]
    costs = [_least(stage) for stage in zip(*runs, strict=True)]
    rows = []
    for name, options in KINDS:
        if m < options.get("warmup", 1) * (stages - 1):
            continue
        schedule = SCHEDULES[name](stages, m, BATCHES, **options)
        rows.append(_row(kind, schedule, options, costs, job))
        print(_line(rows[-1]), flush=True)
    return rows


def _least(runs: tuple[StageCost, ...]) -> StageCost:
    """Of every time of a stage the least disturbed."""
    names = ("forward_s", "backward_s", "update_s", "hop_s")
    return StageCost(**{name: min(getattr(each, name) for each in runs) for name in names})


def _work_s(found: tuple[Trained, ...]) -> float:
    """Seconds that all stages took for their own work: what others disturb, and no schedule changes."""
    return sum(each.end - each.begin for process in found for each in process.spans)


def _row(
    kind: str, schedule: PipelineSchedule, options: dict[str, int], costs: list[StageCost], job: PipelineJob
) -> Any:
    runs = [train_here(job, schedule) for _ in range(RUNS)]
    calm = min(runs, key=_work_s)
    took_s = median(batch_times_s(schedule, calm)[SKIP:-1])
    own = measured_costs(schedule, calm, skip=SKIP)
    if schedule.halves:  # what halves take is not in a run of whole passes
        costs = own
    expected = predict(schedule, costs)
    stages = schedule.stages_of
    alone = sum(
        sum(costs[s].of(each.kind) for s in (stages[r] if each.stage < 0 else [each.stage]))
        for r, row in enumerate(schedule.rows)
        for each in row
    )
    predicted = float(np.median(expected.timeline.step_times_ns[SKIP:-1])) / 1e9
    return {
        "stages": kind, "processes": len(schedule.rows), "micro_batches": schedule.micro_batches,
        "schedule": " ".join([schedule.name, *(f"{key}={value}" for key, value in options.items())]),
        "predicted_s": predicted, "measured_s": took_s, "error": predicted / took_s - 1,
        "runs_s": [median(batch_times_s(schedule, each)[SKIP:-1]) for each in runs], "bubble": expected.bubble[0],
        "work_s": schedule.micro_batches * max(each.forward_s + each.backward_s for each in costs),
        "hop_s": max(each.hop_s for each in costs), "late": _work_s(calm) / alone - 1,
        "load": os.getloadavg()[0], "cores": os.cpu_count(),
        "torch": torch.__version__,
    }  # fmt: skip


def memory() -> list[dict[str, Any]]:
    """Activations in flight, predicted from one micro-batch, against the storages that autograd kept."""
    job, rows = jobs("computing", 4), []
    single = measured(job, SCHEDULES["gpipe"](4, 1, 1))
    costs = [
        StageCost(forward_s=1.0, backward_s=2.0, activation_bytes=each.peak_bytes, weight_bytes=each.fixed_bytes)
        for each in single
    ]
    for name in ("gpipe", "1f1b-flush", "2bw"):
        schedule = SCHEDULES[name](4, 4, 2)
        found = measured(job, schedule)
        for process, (each, expected) in enumerate(zip(found, predict(schedule, costs).nbytes, strict=True)):
            gradients = sum(weight.nbytes for weight in each.weights.values())
            rows.append({
                "stages": "memory", "schedule": name, "process": process, "predicted_bytes": expected,
                "measured_bytes": each.peak_bytes + each.fixed_bytes + gradients,
            })  # fmt: skip
            print(
                f"{name:12} process {process}: {expected:12,.0f} B predicted, {rows[-1]['measured_bytes']:12,} B held"
            )
    return rows


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['stages']:10} p={row['processes']} m={row['micro_batches']} {row['schedule']:14} predicted "
        f"{1e3 * row['predicted_s']:7.1f} ms, measured {1e3 * row['measured_s']:7.1f} ms per batch, "
        f"{100 * row['error']:+5.1f} %"
    )


def main() -> None:
    """Measure what is named, by default all."""
    wanted = [each for each in sys.argv[1:] if not each.startswith("-")] or ["sleeping", "computing", "memory"]
    rows = []
    for kind in wanted:
        if kind == "memory":
            rows += memory()
        else:
            for stages, m in ((2, 2), (2, 4), (4, 4), (4, 6)) if kind == "sleeping" else ((2, 4),):
                rows += compared(kind, stages, m)
    if "--write" in sys.argv:
        kept = [json.loads(line) for line in PATH.read_text().splitlines()] if PATH.exists() else []
        rows = [row for row in kept if row["stages"] not in wanted] + rows
        PATH.write_text("".join(json.dumps(row) + "\n" for row in rows))
        hand, heading, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
        PAGE.write_text(hand + heading + section(rows), encoding="utf-8")


def section(rows: list[dict[str, Any]]) -> str:
    """The end of the page."""
    timed = [row for row in rows if "error" in row]
    lines = [
        (
            f"{row['stages']}, {row['schedule']}", str(row["processes"]), str(row["micro_batches"]),
            f"{1e3 * row['predicted_s']:.1f}", f"{1e3 * row['measured_s']:.1f}", f"{100 * row['error']:+.1f}",
            f"{100 * row['late']:+.1f}", f"{row['load']:.0f}",
        )
        for row in timed
    ]  # fmt: skip
    head = ("stages, schedule", "processes", "m", "predicted ms", "measured ms", "error %", "late %", "load")
    held = [row for row in rows if "measured_bytes" in row]
    same = sum(row["predicted_bytes"] == row["measured_bytes"] for row in held)
    return (
        f"\n{today()}, {machine()}; other work ran on the machine: its load is beside each row, "
        f"and how much longer than in the first run the stages took for their own work (late). "
        f"Computing stages need a core each: where they were late or early the error is that of the machine.\n\n"
        f"{table(head, lines)}\n\nBytes held at most (weights in all versions, gradients, the optimizer's state, "
        f"storages that autograd keeps) are as predicted in {same} of {len(held)} processes of GPipe, 1F1B with a "
        "flush and 2BW on 4 stages.\n"
    )


if __name__ == "__main__":
    main()
