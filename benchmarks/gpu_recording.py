"""Recordings and machine constants for ``gpu_pairs.py``: profile, shrink, remove private names, write."""

from __future__ import annotations

import datetime
import gzip
import json
import os
import platform
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from gpu_workloads import Mixer, Sizes

FORMAT = 1
MAX_FILE_BYTES = 700_000  # a recording above this is made again with fewer steps
MAX_SMALL_FILE_BYTES = 200_000

cuda: Any = torch.cuda  # parts of it have no type hints
cudnn: Any = torch.backends.cudnn


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        cuda.synchronize()


def experimental_config(sync_events: bool) -> Any:
    """Ask for CUDA synchronisation events where this PyTorch knows them."""
    if not sync_events:
        return None
    try:
        return _ExperimentalConfig(enable_cuda_sync_events=True)
    except TypeError:
        return None


def record(
    step: Callable[[], None],
    device: torch.device,
    *,
    steps: int,
    warmup: int = 6,
    settle: bool = False,
    shapes: bool = True,
    modules: bool = False,
    sync_events: bool = False,
) -> str:
    """Profile ``steps`` steps after ``warmup`` and return the text of the recording.

    A throw-away cycle goes first: the first profile of a process pays for the profiler's own buffers.
    With ``settle`` the device is idle when the window opens; without it, the steady state goes on, work
    launched earlier included.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    texts: list[str] = []

    def export(prof: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            prof.export_chrome_trace(str(path))
            texts.append(path.read_text(encoding="utf-8"))

    for handler in (lambda _: None, export):
        with profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=warmup, active=steps, repeat=1),
            on_trace_ready=handler,
            record_shapes=shapes,
            with_stack=modules,
            with_modules=modules,
            experimental_config=experimental_config(sync_events),
        ) as prof:
            for index in range(warmup + steps):
                step()
                if settle and index < warmup:
                    synchronize(device)
                prof.step()
        synchronize(device)
    return texts[0]


def keep_modules_only(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop python functions that are no module call; a module's parent becomes its nearest kept ancestor."""
    python = {e["args"]["Python id"]: e for e in events if e.get("cat") == "python_function"}
    kept = {key for key, e in python.items() if e["name"].startswith("nn.Module: ")}
    out = []
    for event in events:
        if event.get("cat") == "python_function":
            if event["args"]["Python id"] not in kept:
                continue
            parent = event["args"].get("Python parent id")
            while parent is not None and parent not in kept:
                parent = python[parent]["args"].get("Python parent id") if parent in python else None
            event["args"]["Python parent id"] = parent
        out.append(event)
    return out


def scrub(text: str) -> str:
    """Remove what names this machine or its user: folders and the host name."""
    secrets = {str(Path.cwd()), str(Path.home()), sys.prefix, tempfile.gettempdir(), socket.gethostname()}
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) > 3 and secret != "localhost":
            text = text.replace(secret, "")
    return text


def packed(recording: str, about: dict[str, Any]) -> bytes:
    """Return the recording as gzip bytes with ``about`` under "foretrace".

    Decimal numbers keep their text: a time stamp with three decimals does not survive a double.
    """
    mark = "\ufdd0"  # a code point that no text may contain
    trace = json.loads(recording, parse_float=lambda text: mark + text)
    for private in ("traceName", "host_name", "hostname"):
        trace.pop(private, None)
    trace["traceEvents"] = keep_modules_only(trace["traceEvents"])
    text = json.dumps({"foretrace": about, **trace}, separators=(",", ":"), ensure_ascii=False)
    text = re.sub(f'"{mark}([^"]*)"', r"\1", text)
    return gzip.compress(scrub(text).encode(), compresslevel=9, mtime=0)


def write(path: Path, content: bytes) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    partial.replace(path)


# --- small recordings that test a graph builder -------------------------------------------------------------


def full_queue(sizes: Sizes, device: torch.device) -> Callable[[], None]:
    """One stream, long kernels, no synchronisation: the launch queue (about 1,022 entries) fills."""
    large = torch.ones(sizes.queue_elements, device=device)

    def step() -> None:
        for _ in range(sizes.queue_launches):
            large.neg_()  # one operator, one kernel

    return step


def two_streams(sizes: Sizes, device: torch.device) -> Callable[[], None]:
    """Copies on a side stream, products on the main stream, an event each way, one read at the end."""
    side, host = cuda.Stream(), torch.ones(4 * 2**20).pin_memory()
    weight = torch.randn(1024, 1024, device=device)

    def step() -> None:
        main = cuda.current_stream()
        work = torch.ones(1024, 1024, device=device)
        for _ in range(8):
            with cuda.stream(side), record_function("copy ahead"):
                ahead = host.to(device, non_blocking=True)
                copied = cuda.Event()
                copied.record(side)
            for _ in range(6):
                work = work @ weight * 1e-2
            main.wait_event(copied)
            ahead.record_stream(main)
            work = work + ahead[: 2**20].view(1024, 1024)
            side.wait_stream(main)
        work.sum().item()

    return step


def graph_replay(sizes: Sizes, device: torch.device) -> Callable[[], None]:
    """Two replays of a graph of 300 kernels with one eager kernel between them."""
    small = torch.ones(256, 256, device=device)
    small.add_(1.0)
    cuda.synchronize()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        for _ in range(300):
            small.add_(1.0)

    def step() -> None:
        graph.replay()
        small.add_(1.0)
        graph.replay()
        cuda.synchronize()

    return step


def module_events(sizes: Sizes, device: torch.device) -> Callable[[], None]:
    """A small model whose recording keeps the events of its modules."""
    model = Mixer(min(sizes.mixer_layers, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(8, 64, 48, device=device)

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(model(inputs).square().mean())
        optimizer.step()

    return step


def builder_recordings(sizes: Sizes, environment: dict[str, Any], device: torch.device, out: Path) -> list[str]:
    """Record four small jobs that are hard for a graph builder; return one line per job that failed."""
    jobs: tuple[tuple[str, Callable[[Sizes, torch.device], Callable[[], None]], dict[str, Any]], ...] = (
        ("full-queue", full_queue, {"steps": 2, "shapes": False}),
        ("two-streams", two_streams, {"steps": 3, "sync_events": True}),
        ("graph-replay", graph_replay, {"steps": 3, "sync_events": True}),
        ("modules", module_events, {"steps": 2, "modules": True}),
    )
    failed = []
    for name, make, options in jobs:
        try:
            recording = record(make(sizes, device), device, warmup=2, settle=True, **options)
            about = {"format": FORMAT, "workload": f"builder-{name}", "arm": name, **environment}
            content = packed(recording, about)
            write(out / f"builder.{name}.json.gz", content)
            if len(content) > MAX_SMALL_FILE_BYTES:
                failed.append(f"builder {name}: {len(content):,} bytes, more than wanted")
        except Exception as error:  # one unsupported job must not cost the others
            failed.append(scrub(f"builder {name}: {error!r}"))
    return failed


# --- the machine -------------------------------------------------------------------------------------------


def device_seconds(call: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Median device time of a call in seconds, after three warm-up calls."""
    for _ in range(3):
        call()
    synchronize(device)
    times: list[float] = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def launch_times(device: torch.device) -> dict[str, float]:
    """Latency from launch call to kernel start on an idle stream, and the CPU time of one small operator."""
    x = torch.ones(32, device=device)

    def idle_launches() -> None:
        for _ in range(50):
            x.add_(1.0)
            cuda.synchronize()

    events = json.loads(record(idle_launches, device, steps=1, warmup=1, shapes=False))["traceEvents"]
    calls = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver")
        and e["name"].startswith(("cudaLaunchKernel", "cuLaunchKernel"))
    }
    latencies = [
        (e["ts"] - calls[e["args"]["correlation"]]) * 1e-6
        for e in events
        if e.get("cat") == "kernel" and e["args"]["correlation"] in calls
    ]
    cuda.synchronize()
    start = time.perf_counter()
    for _ in range(500):  # below the depth of the launch queue, so the CPU never waits
        x.add_(1.0)
    operator = (time.perf_counter() - start) / 500
    cuda.synchronize()
    return {"launch_latency_s": statistics.median(latencies), "small_operator_cpu_s": operator}


def measure_machine(device: torch.device, quick: bool) -> dict[str, Any]:
    """Peak rates as reached here: matrix products on random data, copies, launches.  SI units."""
    machine: dict[str, Any] = {"gemm_flop_per_s": {}}
    kinds = [("float32", torch.float32, False), ("bfloat16", torch.bfloat16, False)]
    if device.type == "cuda":
        kinds.insert(1, ("tf32", torch.float32, True))
    before = torch.backends.cuda.matmul.allow_tf32
    for side in (128, 256) if quick else (2048, 8192):
        for name, dtype, tf32 in kinds:
            torch.backends.cuda.matmul.allow_tf32 = tf32
            a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
            rate = 2 * side**3 / device_seconds(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
            machine["gemm_flop_per_s"][f"{name}-{side}"] = rate
    torch.backends.cuda.matmul.allow_tf32 = before
    count = 2**20 if quick else 2**30
    source, target = (torch.ones(count, dtype=torch.uint8, device=device) for _ in range(2))
    # a copy reads every byte once and writes it once
    machine["device_copy_bytes_per_s"] = 2 * count / device_seconds(lambda: target.copy_(source), device)
    if device.type == "cuda":
        for name in ("pinned", "pageable"):
            host = torch.ones(2**26, dtype=torch.uint8)
            host = host.pin_memory() if name == "pinned" else host
            took = device_seconds(lambda host=host: target[: 2**26].copy_(host), device)  # type: ignore[misc]
            machine[f"host_to_device_{name}_bytes_per_s"] = 2**26 / took
        machine |= launch_times(device)
    return machine


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, device and settings, stored in every recording."""
    about: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "recorded": datetime.date.today().isoformat(),
        "device": "cpu",
        "num_threads": torch.get_num_threads(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "tf32": {
            "matmul": torch.backends.cuda.matmul.allow_tf32,
            "cudnn": torch.backends.cudnn.allow_tf32,
        },
    }
    if device.type == "cuda":
        properties = cuda.get_device_properties(device)
        about |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "cudnn": int(cudnn.version()),
        }
    return about
