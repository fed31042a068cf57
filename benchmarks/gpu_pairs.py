"""Record the same training job before and after one change, on the GPU at hand.

A what-if is only as good as the truth it is held against, and that truth needs the same job twice: recorded
without the change, and run for real with it.  This script makes such pairs for four techniques
(prefetch-data, fused-optimizer, mixed-precision, cuda-graphs).  For every arm it writes

* a Kineto recording of a few steady steps, whose top-level key ``"foretrace"`` holds what the profiler leaves
  out (optimizer, loader, threads, precision flags) and the *unprofiled* step times of the same process;
* one line in ``pairs.json``: unprofiled step times of both arms, their ratio with its 80 % interval, and the
  ratio of the job to an identical second copy of itself, which is the noise floor of the comparison.

Arms are timed in short interleaved blocks (A B C ... C B A), so that a slow spell of the machine hits all of
them.  It also measures the machine (matrix-product rates, copy bandwidth, launch latency) and records four
small jobs that test a graph builder (full launch queue, several streams, graph replay, module events).

    python benchmarks/gpu_pairs.py --out benchmarks/data/gpu

Needs PyTorch and nothing else.  ``--quick --device cpu`` is a dry run with toy sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import tarfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from gpu_recording import (
    FORMAT,
    MAX_FILE_BYTES,
    builder_recordings,
    describe_environment,
    measure_machine,
    packed,
    record,
    scrub,
    synchronize,
    write,
)
from gpu_workloads import QUICK, Arm, Sizes, Workload, workloads

MAX_FOLDER_BYTES = 12_000_000

cuda: Any = torch.cuda  # parts of it have no type hints


class Job:
    """One arm, built and ready to step.  Raises whatever the device does not support."""

    def __init__(self, workload: Workload, arm: Arm, device: torch.device) -> None:
        self.workload, self.arm, self.device = workload, arm, device
        torch.manual_seed(0)
        model, batch = workload.build()
        self.model: Callable[[torch.Tensor], torch.Tensor] = model.to(device)
        self.parameters = list(model.parameters())
        self.host = tuple(t.pin_memory() if device.type == "cuda" else t for t in batch)
        self.optimizer = self._optimizer()
        self.unprofiled_step_ns: list[int] = []
        self.block_step_s: list[float] = []
        self._batches: Iterator[Any] | None = None
        self._graph: Any = None
        if arm.graph == "step":
            self._capture_step()
        elif arm.graph == "model":
            if device.type != "cuda":
                raise RuntimeError("CUDA graphs need a CUDA device")
            sample = self.host[0].to(device)
            self.model = cuda.make_graphed_callables(model, (sample,))

    def _optimizer(self) -> torch.optim.Optimizer:
        parameters, kind = self.parameters, self.arm.optimizer
        if kind == "sgd":
            return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4)
        options: dict[str, Any] = {"foreach": kind == "adamw-foreach"}
        if kind == "adamw-fused":
            options = {"fused": True, "capturable": self.arm.graph == "step"}
        return torch.optim.AdamW(parameters, lr=1e-4, **options)

    def _forward_backward(self, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.arm.precision == "bf16"):
            loss = F.cross_entropy(self.model(inputs), target)
        torch.autograd.backward(loss)
        return loss

    def _capture_step(self) -> None:
        """Capture forward, backward and optimizer; a replay reads the batch that lies in ``self._static``."""
        if self.device.type != "cuda":
            raise RuntimeError("CUDA graphs need a CUDA device")
        self._static = tuple(t.to(self.device) for t in self.host)
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):  # lazy initialisation must not happen inside the capture
            for _ in range(3):
                self._forward_backward(*self._static)
                self.optimizer.step()
        cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        self._graph = cuda.CUDAGraph()
        with cuda.graph(self._graph):
            self._loss = self._forward_backward(*self._static)
            self.optimizer.step()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Open the data loader, if there is one.

        Every block gets fresh workers: workers left alive would fill their queues while another arm runs.
        """
        if self.workload.dataset is not None and self.arm.workers is not None:
            loader = DataLoader(
                self.workload.dataset(),
                batch_size=len(self.host[0]),
                num_workers=self.arm.workers,
                pin_memory=self.arm.pin and self.device.type == "cuda",
            )
            self._batches = iter(loader)
        try:
            yield
        finally:
            self._batches = None  # the last reference: shuts the workers down

    def step(self) -> None:
        source = self.host if self._batches is None else next(self._batches)
        if self._graph is None:
            inputs, target = (t.to(self.device, non_blocking=True) for t in source)
            loss = self._forward_backward(inputs, target)
            self.optimizer.step()
        else:
            for static, fresh in zip(self._static, source, strict=True):
                static.copy_(fresh, non_blocking=True)
            self._graph.replay()
            loss = self._loss
        if self.workload.reads_loss:
            loss.item()

    def describe(self) -> dict[str, Any]:
        """What the profiler does not write down; stored under the key "foretrace" of the recording."""
        group = self.optimizer.param_groups[0]
        kind = self.arm.optimizer
        loader = None
        if self.arm.workers is not None:
            loader = {
                "num_workers": self.arm.workers,
                "pin_memory": self.arm.pin,
                "prefetch_factor": 2 if self.arm.workers else None,
                "batch_size": len(self.host[0]),
            }
        return {
            "format": FORMAT,
            "workload": self.workload.name,
            "arm": self.arm.name,
            "precision": self.arm.precision,
            "graph": self.arm.graph,
            "reads_loss_every_step": self.workload.reads_loss,
            "batch": [{"shape": list(t.shape), "dtype": str(t.dtype)} for t in self.host],
            "optimizer": {
                "class": type(self.optimizer).__name__,
                # SGD chooses by itself, and chooses foreach on a CUDA device
                "foreach": kind == "adamw-foreach" or (kind == "sgd" and self.device.type == "cuda"),
                "fused": kind == "adamw-fused",
                "tensors": len(group["params"]),
                "elements": sum(p.numel() for p in group["params"]),
            },
            "loader": loader,
            "unprofiled_step_ns": self.unprofiled_step_ns,
            "unprofiled_block_step_ns": [round(s * 1e9) for s in self.block_step_s],
        }


# --- timing without the profiler ---------------------------------------------------------------------------


def file_name(job: Job) -> str:
    return f"{job.workload.name}.{job.arm.name}.json.gz"


def time_block(job: Job, steps: int, discard: int) -> None:
    """Run one block; add its mean wall time per step and the time of each step to the job."""
    on_cuda = job.device.type == "cuda"
    with job.running():
        for _ in range(discard):
            job.step()
        synchronize(job.device)
        marks: list[Any] = []
        start = time.perf_counter()
        for index in range(steps + 1):
            if index:
                job.step()
            if on_cuda:  # device-side step ends: no synchronisation inside the block
                event = cuda.Event(enable_timing=True)
                event.record()
                marks.append(event)
            else:
                marks.append(time.perf_counter())
        synchronize(job.device)
        job.block_step_s.append((time.perf_counter() - start) / steps)
    for before, after in itertools.pairwise(marks):
        took_s = before.elapsed_time(after) / 1e3 if on_cuda else after - before
        job.unprofiled_step_ns.append(round(took_s * 1e9))


def quantile(values: list[float], q: float) -> float:
    """Linear-interpolation quantile of a non-empty list."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def spread(values: list[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile and count."""
    return {
        "median": quantile(values, 0.5),
        "p10": quantile(values, 0.1),
        "p90": quantile(values, 0.9),
        "n": len(values),
    }


def compare(technique: str, before: Job, after: Job, twins: tuple[Job, Job] | None) -> dict[str, Any]:
    """One entry of ``pairs.json``: ratios are taken block by block, so a drift of the machine cancels."""

    def ratios(a: Job, b: Job) -> list[float]:
        return [y / x for x, y in zip(a.block_step_s, b.block_step_s, strict=True)]

    def steps(job: Job) -> dict[str, float]:
        return spread([ns * 1e-9 for ns in job.unprofiled_step_ns])

    return {
        "workload": before.workload.name,
        "technique": technique,
        "before": before.arm.name,
        "after": after.arm.name,
        "before_file": file_name(before),
        "after_file": file_name(after),
        "before_step_s": steps(before),
        "after_step_s": steps(after),
        "before_block_step_s": spread(before.block_step_s),
        "after_block_step_s": spread(after.block_step_s),
        "ratio": spread(ratios(before, after)),
        "same_job_ratio": spread(ratios(*twins)) if twins else None,
    }


def record_job(job: Job, environment: dict[str, Any], out: Path) -> None:
    """Write the recording of one arm, with fewer steps if it would be too large to keep."""
    steps = job.arm.steps
    with job.running():
        for _ in range(3):
            job.step()
        while True:
            # synchronisation events where the loss is read, so that at least one workload has them
            recording = record(job.step, job.device, steps=steps, sync_events=job.workload.reads_loss)
            content = packed(recording, job.describe() | environment | {"profiled_steps": steps})
            if len(content) <= MAX_FILE_BYTES or steps == 2:
                break
            steps = max(2, min(steps - 1, int(steps * MAX_FILE_BYTES / len(content))))
    write(out / file_name(job), content)


# --- the whole run -----------------------------------------------------------------------------------------


class Results:
    """What is known so far; ``save`` may be called at any time and always leaves whole files."""

    def __init__(self, out: Path, environment: dict[str, Any], archive: Path | None) -> None:
        self.out, self.archive = out, archive
        self.content: dict[str, Any] = {
            "format": FORMAT,
            "environment": environment,
            "machine": {},
            "pairs": [],
            "failed": [],
        }

    def fail(self, what: str, error: BaseException) -> None:
        self.content["failed"].append(scrub(f"{what}: {error!r}"))
        traceback.print_exception(error)

    def save(self) -> None:
        write(self.out / "pairs.json", (json.dumps(self.content, indent=1) + "\n").encode())
        if self.archive is not None:
            partial = self.archive.with_name(self.archive.name + ".partial")
            with tarfile.open(partial, "w") as tar:
                for path in sorted(self.out.glob("*.json*")):
                    tar.add(path, arcname=path.name)
            partial.replace(self.archive)

    def folder_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.out.glob("*.json.gz"))

    def table(self) -> str:
        """The pairs as a Markdown table."""
        lines = [
            "| workload | technique | before -> after | before ms | after ms | ratio [p10, p90] | same job |",
            "|---|---|---|---|---|---|---|",
        ]
        for pair in self.content["pairs"]:
            ratio, same = pair["ratio"], pair["same_job_ratio"]
            lines.append(
                f"| {pair['workload']} | {pair['technique']} | {pair['before']} -> {pair['after']} "
                f"| {pair['before_block_step_s']['median'] * 1e3:.3g} "
                f"| {pair['after_block_step_s']['median'] * 1e3:.3g} "
                f"| {ratio['median']:.3f} [{ratio['p10']:.3f}, {ratio['p90']:.3f}] "
                f"| {'-' if same is None else format(same['median'], '.3f')} |"
            )
        return "\n".join([*lines, *(f"- failed: {line}" for line in self.content["failed"])])


def run_workload(workload: Workload, device: torch.device, environment: dict[str, Any], results: Results) -> None:
    """Time all arms interleaved, then record them, those that a prediction starts from first."""
    jobs: dict[str, Job] = {}
    for arm in workload.arms:
        try:
            job = Job(workload, arm, device)
            with job.running():
                for _ in range(3):
                    job.step()
            synchronize(device)
            jobs[arm.name] = job
        except Exception as error:
            results.fail(f"{workload.name} {arm.name}", error)
    loads = workload.dataset is not None
    for block in range(workload.blocks):
        order = list(jobs.values()) if block % 2 == 0 else list(reversed(jobs.values()))
        for job in order:
            time_block(job, workload.block_steps, discard=8 if loads else 2)
    twins = tuple(jobs[name] for name in workload.twins if name in jobs)
    for technique, before, after in workload.pairs:
        if before in jobs and after in jobs:
            same = (twins[0], twins[1]) if len(twins) == 2 else None
            results.content["pairs"].append(compare(technique, jobs[before], jobs[after], same))
    results.save()
    befores = [before for _, before, _ in workload.pairs]
    for job in sorted(jobs.values(), key=lambda j: j.arm.name not in befores):
        if job.arm.name == workload.twins[1]:
            continue
        if job.arm.name not in befores and results.folder_bytes() > MAX_FOLDER_BYTES - MAX_FILE_BYTES:
            results.content["failed"].append(f"{file_name(job)}: left out, the folder is full")
            continue
        try:
            record_job(job, environment, results.out)
        except Exception as error:
            results.fail(f"recording {file_name(job)}", error)
    results.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the recordings and pairs.json")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a dry run")
    parser.add_argument("--only", default="", help="comma-separated workload names; default: all")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="start no workload after this long")
    parser.add_argument("--archive", type=Path, help="also keep everything in this one tar file")
    parser.add_argument("--quick", action="store_true", help="toy sizes: a dry run of the script")
    arguments = parser.parse_args()
    start = time.perf_counter()
    device = torch.device(arguments.device)
    sizes = QUICK if arguments.quick else Sizes()
    only = set(filter(None, arguments.only.split(",")))
    arguments.out.mkdir(parents=True, exist_ok=True)
    environment = describe_environment(device)
    results = Results(arguments.out, environment, arguments.archive)
    try:
        results.content["machine"] = measure_machine(device, arguments.quick)
    except Exception as error:
        results.fail("machine", error)
    results.save()
    if not only or "builder" in only:
        results.content["failed"] += builder_recordings(sizes, environment, device, arguments.out)
    for each in workloads(sizes):
        workload = replace(each, blocks=2) if arguments.quick else each
        if only and workload.name not in only:
            continue
        if time.perf_counter() - start > arguments.budget_s:
            results.content["failed"].append(f"{workload.name}: not started, out of time")
            continue
        try:
            run_workload(workload, device, environment, results)
        except Exception as error:
            results.fail(workload.name, error)
        if device.type == "cuda":
            cuda.empty_cache()
        print(f"{workload.name}: done after {time.perf_counter() - start:.0f} s", flush=True)
    results.save()
    print(results.table())


if __name__ == "__main__":
    main()
