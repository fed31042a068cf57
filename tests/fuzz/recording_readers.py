"""Readers of recordings, of the ranks of one run, and of saved graphs."""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from foretrace.errors import ForetraceError, NotApplicableError
from tests.fuzz.reader import Figure, Reader, Samples, printed


def _gpu_recording(rank: int = 0) -> list[dict[str, Any]]:
    """Two steps: a loader, operators with shapes, launches on two streams, a collective, a wait, an autograd thread."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 10, "ts": 0, "args": {"name": "thread 10 (python)"}}
    ]

    def add(cat: str, name: str, ts: float, dur: float, tid: Any = 10, pid: Any = 1, **args: Any) -> None:
        events.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args})

    def work(cat: str, name: str, ts: float, dur: float, number: int, stream: int = 7, **args: Any) -> None:
        add(cat, name, ts, dur, stream, 0, device=0, stream=stream, correlation=number, **args)

    for i in range(2):
        t, c = 1_000_000 + 1000 * i, 10 * i
        add("user_annotation", f"ProfilerStep#{i + 3}", t, 990)
        add("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", t + 5, 60)
        add("cpu_op", "aten::stack", t + 10, 30)
        add("cuda_runtime", "cudaMemcpyAsync", t + 70, 8, correlation=c + 1)
        work("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", t + 85, 20, c + 1, bytes=4096)
        add("python_function", "nn.Module: Linear_0", t + 90, 100)
        mm = {"Input Dims": [[8, 16], [16, 32]], "Input type": ["float", "float"], "Concrete Inputs": ["", ""]}
        add("cpu_op", "aten::mm", t + 95, 40, **mm, **{"Sequence number": i})
        add("cuda_runtime", "cudaLaunchKernel", t + 100, 10, correlation=c + 2)
        work("kernel", "ampere_sgemm_128x64_tn", t + 120, 150, c + 2)
        add("cpu_op", "MmBackward0", t + 210, 60, 11, **{"Sequence number": i, "Fwd thread id": 1})
        add("cuda_runtime", "cudaLaunchKernel", t + 215, 10, 11, correlation=c + 3)
        work("kernel", "ampere_sgemm_128x64_nt", t + 280, 150, c + 3)
        add("cuda_runtime", "cudaEventRecord", t + 290, 2, correlation=c + 8)
        add("cuda_runtime", "cudaStreamWaitEvent", t + 293, 2, correlation=c + 9)
        add("cuda_runtime", "cudaLaunchKernel", t + 300, 10, correlation=c + 4)
        message = {"Collective name": "allreduce", "In msg nelems": 512, "Out msg nelems": 512, "dtype": "Float",
                   "Group size": 2, "Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Seq": i}  # fmt: skip
        work("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", t + 440 + rank, 100, c + 4, 20, **message)
        wait = {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": c + 8}
        add("cuda_sync", "Stream Wait Event", t + 431, 1, 20, 0, device=0, stream=20, correlation=c + 9, **wait)
        add("user_annotation", "Optimizer.step#SGD.step", t + 600, 200)
        add("cuda_runtime", "cudaLaunchKernel", t + 610, 10, correlation=c + 5)
        work("kernel", "multi_tensor_apply_kernel", t + 630, 60, c + 5)
        add("cuda_runtime", "cudaDeviceSynchronize", t + 820, 100, correlation=c + 6)
        memory = {"Addr": 1024, "Device Id": 0, "Device Type": 1, "Bytes": 512 * (1 - 2 * i), "Total Allocated": 512}
        events.append({"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 10, "ts": t + 100,
                       "args": memory})  # fmt: skip
    return events


def _recorded_steps(active: int) -> dict[str, Any]:
    """What foretrace's own recorder adds: unprofiled neighbours of the recorded steps."""
    steps = [{"phase": "before", "wall_ns": 800_000, "cpu_ns": 790_000}] * 3
    steps += [{"phase": "active", "wall_ns": 950_000, "cpu_ns": 940_000}] * active
    spent = {"profiled": {"wall_ns": 950_000, "cpu_ns": 940_000}, "unprofiled": {"wall_ns": 800_000, "cpu_ns": 790_000}}
    return {"steps": steps, "overhead": spent, "threads": {"intra_op": 1}, "whole_steps": list(range(3, 3 + active)),
            "version": "0.1.0", "machine": {"cpu": "x"}}  # fmt: skip


def _cpu_recording() -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for i in range(4):
        t = 5_000 + 1000 * i
        rows = [
            ("user_annotation", f"ProfilerStep#{i + 3}", 0, 950),
            ("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 1, 90),
            ("cpu_op", "aten::linear", 100, 200), ("cpu_op", "aten::addmm", 120, 150),
            ("cpu_op", "aten::relu", 310, 40), ("cpu_op", "AddmmBackward0", 400, 200), ("cpu_op", "aten::mm", 410, 80),
            ("user_annotation", "Optimizer.step#SGD.step", 650, 250), ("cpu_op", "aten::_foreach_add_", 660, 200),
        ]  # fmt: skip
        events += [
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 10, "ts": t + at, "dur": dur,
             "args": {"Input Dims": [[4, 8], [8, 8]], "Sequence number": i} if "mm" in name else {}}
            for cat, name, at, dur in rows
        ]  # fmt: skip
    return events


def _recording(events: list[dict[str, Any]], rank: int = 0, **more: Any) -> bytes:
    head = {
        "schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2},
        "deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}],
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
    }  # fmt: skip
    return json.dumps({**head, **more, "traceEvents": events, "traceName": "t.json"}).encode()


@cache
def recordings() -> Samples:
    """A GPU recording, CPU recordings as PyTorch's profiler and as our recorder write them, bare and packed ones."""
    gpu, cpu = _recording(_gpu_recording()), _cpu_recording()
    bare: dict[str, Any] = {"deviceProperties": [], "distributedInfo": {}}
    words = ("LaunchKernel", "MemcpyAsync", "EventRecord", "StreamWaitEvent", "DeviceSynchronize")
    rocm = [{**e, "name": re.sub(f"^cuda({'|'.join(words)})$", r"hip\1", e["name"])} for e in _gpu_recording()]
    kinds = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel", "gpu_memcpy": "Memcpy"}
    legacy = [{**e, "cat": kinds.get(e.get("cat", ""), e.get("cat"))} for e in _gpu_recording() if e["ph"] == "X"]
    captured = [
        {**e, "name": "cudaGraphLaunch"} if e["name"] == "cudaLaunchKernel" else
        {**e, "args": {**e["args"], "correlation": e["args"]["correlation"] // 10 * 10 + 2, "graph id": 1}}
        if e.get("cat") == "kernel" else e
        for e in _gpu_recording()
    ]  # fmt: skip
    real = json.loads(gzip.decompress((Path(__file__).parents[1] / "data" / "cnn.json.gz").read_bytes()))
    first = min(e["ts"] for e in real["traceEvents"] if e.get("name", "").startswith("ProfilerStep"))
    real["traceEvents"] = [e for e in real["traceEvents"] if e.get("ts", 0) >= first][:150]
    facts = {key: real["foretrace"][key][:8] for key in ("parameters", "modules", "module_calls")}
    real["foretrace"] |= {**facts, "gradient_order": [[0, 5], [7, 9]]}
    return {
        "rocm.json": _recording(rocm),
        "legacy.json": _recording(legacy),
        "captured.json": _recording(captured),
        "real.json": json.dumps(real).encode(),
        "gpu.json": gpu,
        "cpu.json": _recording(cpu, **bare),
        "own.json": _recording(cpu, **bare, foretrace=_recorded_steps(4)),
        "own_gpu.json": _recording(_gpu_recording(), foretrace=_recorded_steps(2)),
        "bare.json": json.dumps(_gpu_recording()).encode(),
        "packed.json.gz": gzip.compress(gpu, mtime=0),
    }


@cache
def rank_archives() -> Samples:
    """Two ranks of one run in an archive."""
    files = {f"rank{rank}.json": _recording(_gpu_recording(rank), rank) for rank in (0, 1)}
    tar, packed = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w:gz", compresslevel=1) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as folder:
        for name, content in files.items():
            folder.writestr(zipfile.ZipInfo(name), content)
    return {"ranks.tar.gz": tar.getvalue(), "ranks.zip": packed.getvalue()}


def _of_scenario(run: Any, path: Path, way: int) -> Iterator[Figure]:
    """What show, simulate, blame, whatif and export make of a graph."""
    from foretrace.report import check as simulated
    from foretrace.report import html, perfetto, tracks
    from foretrace.report import show as shows
    from foretrace.report import whatif as predicted
    from foretrace.report.jsonout import dumps
    from foretrace.report.terminal import Terminal, render
    from foretrace.techniques.arguments import parse_all

    graph = run.graph
    timeline = run.simulate()
    yield "dur", graph.dur
    yield "step", timeline.step_time_s
    yield "end", timeline.end - timeline.start
    try:
        changed = run.apply(*parse_all(["scale name=* by=0.5"]))
    except NotApplicableError:  # of a recording whose device work waits for what nobody knows
        changed = None
    else:
        yield "after", changed.simulate().step_time_s
    if way > 1:
        return
    show, blame = shows.show(timeline, path=str(path)), shows.blame(timeline, path=str(path))
    for view in (show, blame, simulated.simulate(timeline, path=str(path))):
        yield type(view).__name__, view
        dumps(view)
        printed(render(view, Terminal(width=100)))
        printed(render(view, Terminal(width=60, bars=True, colour=True)), colour=True)
    if changed is None:
        return
    found = changed.whatif()
    yield "after", [found.before.step_time_s, found.after.step_time_s, *found.interval_s]
    yield "what if", predicted.whatif(found, path=str(path))
    perfetto.export([tracks.track("recorded", timeline), tracks.track("after", found.after)])
    page = html.render(html.page_of(found.before, [found], path=str(path)))
    assert "\x1b" not in page, "an escape sequence reaches the page"


def _play_recording(path: Path, way: int) -> Iterator[Figure]:
    from foretrace import flow

    try:
        run = flow.read(path)
    except ForetraceError:
        run = flow.read(path, salvage=True)
    if way & 1:
        yield "as recorded", run.graph(as_recorded=True).simulate().step_time_s
    yield from _of_scenario(run.graph(), path, way)


def _play_ranks(path: Path, way: int) -> Iterator[Figure]:
    from foretrace import flow
    from foretrace.report import show as shows
    from foretrace.report.jsonout import dumps
    from foretrace.report.terminal import Terminal, render

    run = flow.read(path, salvage=bool(way & 1))
    yield "dur", run.trace.dur
    joined = run.global_graph(alone=True)
    timeline = joined.simulate()
    yield "step", timeline.step_time_s
    view = shows.show(timeline, path=str(path))
    yield "show", view
    dumps(view)
    printed(render(view, Terminal(width=100)))
    scaled = flow.scale([flow.Run(trace=run.trace).graph(rank=r.rank, as_recorded=True).graph for r in run.trace.ranks],
                        8, network="100gbit/5us", samples=2)  # fmt: skip
    yield "scaled", [scaled.recorded_s, scaled.folded_s, scaled.predicted_s, scaled.low_s, scaled.high_s]


@cache
def graphs() -> Samples:
    """Saved graphs of a recording with a device and of one without."""
    from foretrace import flow

    found = {}
    with TemporaryDirectory() as folder:
        for name in ("gpu.json", "own.json"):
            path = Path(folder) / name
            path.write_bytes(recordings()[name])
            found[path.with_suffix(".graph").name] = flow.read(path).graph().save(Path(folder) / "g").read_bytes()
    return found


def _play_graph(path: Path, way: int) -> Iterator[Figure]:
    from foretrace import flow

    yield from _of_scenario(flow.load(path), path, way)


def recording_readers() -> Iterator[Reader]:
    """The readers of this file."""
    yield Reader(name="recording", covers=("trace.stream", "trace.kineto", "trace.read", "trace.readers",
                 "trace.tables", "trace.trace"),
                 samples=recordings, play=_play_recording)  # fmt: skip
    yield Reader(name="ranks", covers=("trace.stream", "graph.ranks"), samples=rank_archives, play=_play_ranks)
    yield Reader(
        name="graph", covers=("graph.store", "fleet.speeds.graph", "cli.options"), samples=graphs, play=_play_graph
    )
