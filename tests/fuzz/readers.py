"""Every reader of files that others made: what it reads, small samples, and what a command would do with the result.

The list is complete: `test_readers.py` fails where a module of the package reads files and no reader here stands for
it, and the kinds of fleet logs come from the package's own registry.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from foretrace.cli.streams import Printed
from foretrace.errors import ForetraceError, NotApplicableError

Figure = tuple[str, Any]  # a name, and numbers that must be finite and not negative
Samples = Mapping[str, bytes]  # by file name, whose ending says what kind of file it is


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One way into the program.

    covers: modules that open the files; samples: whole files; play: reads a file and goes on as a command does,
    giving figures on the way; it may raise ForetraceError. Figures that are views (msgspec) must be finite alone.
    play is also told a way, 0 to 7: which options to read with (bit 0), and whether to go on to the pages (0 and 1).
    """

    name: str
    covers: tuple[str, ...]
    samples: Callable[[], Samples]
    play: Callable[[Path, int], Iterator[Figure]]


DATA = Path(__file__).resolve().parents[1] / "data"
WAYS = 8


def check(name: str, value: Any) -> str:
    """What is wrong with a figure, "" where nothing is."""
    if hasattr(value, "__struct_fields__"):
        import msgspec

        bad = [number for number in _numbers(msgspec.to_builtins(value)) if not np.isfinite(number)]
        return f"{name} holds {bad[0]}" if bad else ""
    numbers = np.asarray(value, dtype=np.float64)
    if not np.isfinite(numbers).all():
        return f"{name} is not finite"
    return f"{name} is {numbers.min():g}" if numbers.size and numbers.min() < 0 else ""


def _numbers(value: Any) -> Iterator[float]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
        elif isinstance(each, float):
            yield each


# --- recordings -------------------------------------------------------------------------------------------------------


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
    from foretrace.report import blame as blames
    from foretrace.report import html, perfetto, tracks
    from foretrace.report import show as shows
    from foretrace.report import simulate as simulated
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
    show, blame = shows.show(timeline, path=str(path)), blames.blame(timeline, path=str(path))
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


def printed(text: str, *, colour: bool = False) -> None:
    """Check that of what goes to a terminal nothing is obeyed there, colours aside; as a command prints it."""
    out = io.StringIO()
    Printed(out, colours=colour).write(text)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue()) if colour else out.getvalue()
    found = re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]", shown)
    assert found is None, f"{found[0]!r} reaches the terminal" if found else ""


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
    from tempfile import TemporaryDirectory

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


# --- operators --------------------------------------------------------------------------------------------------------


@cache
def operator_files() -> Samples:
    """Our JSON in its three forms."""
    from foretrace.model.readers.json_form import dumps, loads

    head = '{"format": "foretrace operators", "version": 1, "name": "m", "batch": 4, '
    calls = head + '"calls": [{"op": "aten::mm", "dims": [[8, 16], [16, 4]], "times": 3}, {"op": "aten::relu", '
    calls += '"dims": [[8, 4]], "phase": "backward", "layer": "a.b"}]}'
    nodes = head + '"tensors": [{"dims": [8, 16], "role": "input"}, {"dims": [16, 4], "role": "weight"}, '
    nodes += '{"dims": [8, 4]}, {"dims": [4, 8], "of": 2}], "nodes": [{"op": "aten::mm", "inputs": [0, 1], "outputs": '
    nodes += '[2], "flops": 1024}, {"op": "aten::t", "inputs": [2], "outputs": [3], "layer": "x"}]}'
    return {"whole.json": dumps(loads(nodes.encode())), "calls.json": calls.encode(), "nodes.json": nodes.encode()}


@cache
def execution_traces() -> Samples:
    """PyTorch's and Chakra's JSON, and Chakra's protocol buffers."""
    from foretrace.model.readers.chakra import VERSIONS
    from tests.model.test_chakra import NODES, old, trace

    protobuf = b"".join(_length(part) + part for part in _chakra_messages(VERSIONS[-1]))
    return {
        "chakra.json": trace(NODES),
        "old.json": trace([old(each) for each in NODES], "1.0.1"),
        "chakra.et": protobuf,
    }


def _length(part: bytes) -> bytes:
    from tests.fuzz.mutations import _varint

    return _varint(len(part))


def _chakra_messages(version: str) -> list[bytes]:
    from tests.fuzz.mutations import _joined
    from tests.model.test_chakra import NODES

    def attribute(name: str, number: int, value: Any) -> bytes:
        return _joined([(1, 2, name.encode()), (number, 0 if isinstance(value, int) else 2, value)])

    parts = [_joined([(1, 2, version.encode()), (2, 2, attribute("schema", 29, version.encode()))])]
    for node in NODES:
        arguments = [
            _joined([(i, 2, repr(node[side][key]).encode()) for i, key in ((1, "values"), (2, "shapes"), (3, "types"))])
            for side in ("inputs", "outputs")
        ]
        parts.append(
            _joined([
                (1, 0, node["id"]), (2, 2, node["name"].encode()), (4, 0, node["ctrl_deps"]), (8, 2, arguments[0]),
                (9, 2, arguments[1]), (10, 2, attribute("is_cpu_op", 27, 1)), (10, 2, attribute("tid", 9, 1)),
            ])
        )  # fmt: skip
    return parts


@cache
def onnx_models() -> Samples:
    """A small network with fixed sizes; nothing without the onnx package."""
    try:
        from tests.model.test_onnx import cnn
    except BaseException:  # pytest skips the module where onnx is missing
        return {}
    return {"cnn.onnx": cnn(2)}


def _play_operators(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.model.estimate import estimate
    from foretrace.model.memory.memory import peak
    from foretrace.model.readers.sources import load_operators
    from foretrace.model.target import target
    from foretrace.report import estimate as report
    from foretrace.report.jsonout import dumps
    from foretrace.report.terminal import Terminal, render

    graph = load_operators(path)
    yield "flops", [graph.flops, graph.nbytes]
    yield "peak", peak(graph).peak_bytes
    on = target("a100")
    found = estimate(graph, device=on.device, costs=on.costs)
    view = report.estimate(found, model=graph.name)
    yield "estimate", view
    yield "step", [found.step.step_time_s, *found.step.interval_s, found.step.utilisation]
    dumps(view)
    printed(render(view, Terminal(width=100)))


# --- networks and clusters --------------------------------------------------------------------------------------------

CLUSTERS = {
    "short.yaml": b"nodes: 2\nper_node: 4\ndevice: h100\ninside: nvlink\nbetween: 100gbit/5us\nnics: 2\n"
    b"oversubscription: 1.5\nper_switch: 2\n",
    "long.yaml": b"name: lab\ndevice: a100\ninside: 300gbit/2us\nnodes:\n- name: a\n  per_node: 4\n"
    b"- {name: b, per_node: 2, wiring: [[0, 1, 2]]}\nswitches: [top]\nlinks:\n"
    b"- {from: a, to: top, rate: 25gbit/10us, count: 2}\n- {from: b, to: top, rate: 10gbit/10us}\ntopology: tree\n",
}


def _play_network(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.cost.network.network import CollectiveKind
    from foretrace.cost.network.parse import network

    for workers in (2, 4):
        found = network(str(path), workers)
        for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.SEND):
            for nbytes in (1.0, 3e5, 1e9):
                try:
                    cost = found.cost(kind, nbytes)
                except ForetraceError:
                    continue
                yield str(kind), [cost.seconds, cost.low_s, cost.high_s]
                assert cost.low_s <= cost.seconds * (1 + 1e-9) <= cost.high_s * (1 + 2e-9), (
                    "a time lies outside its range"
                )
                printed(cost.why)


NCCL_LOG = """# nThread 1 nGpus 8 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20
# all_reduce_perf
#  Rank  0 Group  0 Pid   1 on node1 device  0 [0x1b] NVIDIA H100
#  Rank  1 Group  0 Pid   2 on node1 device  1 [0x43] NVIDIA H100
#  Rank  2 Group  0 Pid   3 on node2 device  0 [0x52] NVIDIA H100
#  Rank  3 Group  0 Pid   4 on node2 device  1 [0x61] NVIDIA H100
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           256     float     sum      -1    20.10    0.05    0.08      0    19.90    0.05    0.08      0
     1048576        262144     float     sum      -1    50.00   20.97   31.46      0    50.10   20.93   31.39      0
   134217728      33554432     float     sum      -1   800.00  167.77  251.66      0   801.00  167.56  251.34      0
# Avg bus bandwidth    : 94.4
"""


@cache
def collective_tables() -> Samples:
    """What nccl-tests prints, CSV of several programs, our JSON."""
    plain = "kind,workers,nbytes,seconds,per_node,system\n" + "".join(
        f"{kind},{n},{size},{1e-5 + size * n / 1e11:.9g},2,a\n"
        for kind in ("all_reduce", "all_gather", "send")
        for n in (2, 4)
        for size in (1e3, 1e5, 1e7, 1e9)
    )
    stats = ",".join(f"time_stats.all_reduce.{each}" for each in ("min", "max", "median"))
    vidur = f"{stats},collective,num_workers,devices_per_node,size\n" + "".join(
        f"{0.009 + size / 1e7:.5f},{0.011 + size / 1e7:.5f},{0.01 + size / 1e7:.5f},all_reduce,{n},4,{size}\n"
        for n in (2, 4)
        for size in (1000, 100_000, 10_000_000)
    )
    columns = "size(B),count(elements),type,time(us),algbw(GB/s),busbw(GB/s),time(us),algbw(GB/s),busbw(GB/s)\n"
    columns += "".join(
        f"{size},1,float,{10 + size / 1e5:.3f},1,1,{11 + size / 1e5:.3f},1,1\n" for size in (1e3, 1e6, 1e9)
    )
    busbw = "bytes,busbw_GBps,gpus,system\n" + "".join(f"{1 << k},{k * 10},8,2 nodes of x\n" for k in (20, 25, 30))
    from foretrace.cost.network.collective_table import series_of, table_of
    from foretrace.cost.network.network import CollectiveKind

    own = [
        series_of("own", kind=kind, workers=n, per_node=n, points=[(s, 1e-5 + s / 1e10, 0.1) for s in (1e3, 1e6, 1e9)])
        for kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.SEND)
        for n in (2, 4)
    ]
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        table_of("own", own, name="t", backend="gloo", machine={"cpu": "x"}, missing={"reduce": "no"}).save(
            Path(folder) / "t.json"
        )
        ours = (Path(folder) / "t.json").read_bytes()
    return {
        "nccl_all_reduce.log": NCCL_LOG.encode(), "plain.csv": plain.encode(), "vidur.csv": vidur.encode(),
        "all_reduce_8gpus.csv": columns.encode(), "busbw.csv": busbw.encode(), "own.json": ours,
    }  # fmt: skip


def _play_collectives(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.cost.network.collective_files import read

    table = read(path)
    for each in table.series:
        yield each.title, [*each.nbytes, *each.seconds, *each.spread, each.workers, each.per_node]
        printed(each.title)
    yield from _play_network(path, way)


# --- fleets -----------------------------------------------------------------------------------------------------------


@cache
def fleet_logs() -> dict[str, dict[str, bytes]]:
    """Logs by the format that they are of."""
    from tests.fleet.format_samples import SAMPLES

    endings = {"kueue": "json", "ray": "json", "swf": "swf", "slurm": "txt", "shockwave": "tsv"}
    found: dict[str, dict[str, bytes]] = {}
    for name, (text, kind) in SAMPLES.items():
        found.setdefault(kind, {})[f"{name}.{endings.get(kind, 'csv')}"] = text.encode()
    return found


def _play_fleet(format: str) -> Callable[[Path, int], Iterator[Figure]]:
    def play(path: Path, way: int) -> Iterator[Figure]:
        from foretrace.fleet import policies
        from foretrace.fleet.cluster import parse_cluster
        from foretrace.fleet.formats import read
        from foretrace.fleet.simulate import simulate
        from foretrace.report import fleet as report
        from foretrace.report.jsonout import dumps
        from foretrace.report.terminal import Terminal, render

        workload = read(path, format if way & 1 else "auto", salvage=bool(way & 2))
        workload.validate()
        yield "gpus", workload.gpus
        known = np.isfinite(workload.work_s)
        yield "work", workload.work_s[known]
        if way >= 4:
            return
        workload = replace(workload, work_s=np.where(known, workload.work_s, 100.0))
        for name in ("fifo", "srtf")[: 1 + (way < 2)]:
            result = simulate(workload, parse_cluster("2x2x4"), policies.parse(name))
            view = report.run(result, parse_cluster("2x2x4"), path=str(path))
            yield name, view
            dumps(view)
            printed(render(view, Terminal(width=100)))

    return play


@cache
def fleet_clusters() -> Samples:
    """Descriptions of clusters by other systems, and our own."""
    from tests.fleet.test_formats_clusters import CONF, NODES, YAML

    kubernetes = {
        "kind": "List",
        "items": [
            {"kind": "Topology",
             "spec": {"levels": [{"nodeLabel": "x/rack"}, {"nodeLabel": "kubernetes.io/hostname"}]}},
            *(
                {"kind": "Node",
                 "metadata": {"name": f"n{i}", "labels": {"x/rack": f"r{i // 2}", "gpu.product": "H100"}},
                 "status": {"allocatable": {"nvidia.com/gpu": "8"}}}
                for i in range(4)
            ),
        ],
    }  # fmt: skip
    own = b"name: lab\nlevels: [rack, node]\nunits:\n- {count: [2, 4], gpus: 8, type: v100}\n"
    own += b"- {count: [1, 2], gpus: 4, type: a100}\ngbit_s: {node: 2400, rack: 400}\nquotas: {research: 64}\n"
    return {
        "topology_conf.txt": CONF.encode(), "topology.yaml": YAML.encode(), "nodes.txt": NODES.encode(),
        "kubernetes.json": json.dumps(kubernetes).encode(), "own.yaml": own,
        "alibaba.csv": b"sn,cpu_milli,memory_mib,gpu,model\nn1,64000,262144,2,P100\nn2,64000,262144,8,G2\n",
        "tiresias.csv": b"num_switch,num_node_p_switch,num_gpu_p_node,num_cpu_p_node,mem_p_node\n2,4,8,64,256\n",
    }  # fmt: skip


def _play_fleet_cluster(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.fleet.formats import read_cluster
    from foretrace.fleet.scene import cluster_of

    tree = read_cluster(path, gpus_per_node=4 if way else None)
    yield "starts", np.concatenate(tree.starts)
    yield "rates", list(tree.gbit_s)
    if path.suffix == ".yaml" and "topology" not in path.name:
        yield "gpus", cluster_of(str(path)).gpus


def _throughputs() -> Samples:
    from tests.fleet.test_throughputs import SMALL

    return {"speeds.json": json.dumps(SMALL).encode()}


def _play_throughputs(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.fleet.speeds.throughputs import ThroughputTable

    table = ThroughputTable.read(path)
    for rows in table.alone.values():
        yield "alone", list(rows.values())
    for pairs in table.shared.values():
        yield "shared", [rate for both in pairs.values() for rate in both]


def _play_speed_table(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.fleet.speeds.closed_form import TableSpeeds
    from foretrace.fleet.workload import Workload

    speeds = TableSpeeds.read(path, interpolate=True)
    yield "rows", [row.steps_per_s for row in speeds.rows]
    models = sorted({row.model for row in speeds.rows})[:3]
    jobs = Workload.of(submit_s=[0.0] * len(models), gpus=[2] * len(models), work_s=[1.0] * len(models), model=models)
    yield "kinds", speeds.kinds(jobs)


def _play_profiles(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.fleet.speeds.closed_form import ClosedFormSpeeds, speed_table
    from foretrace.fleet.speeds.profiles import load_profiles

    profiles = load_profiles(path)
    yield "profiles", [number for each in profiles for number in (each.compute_ms, each.gradient_mb, each.batch)]
    speeds = ClosedFormSpeeds(bandwidth_gb_s=[300, 25, 2.5], profiles=profiles)
    rows = speed_table(speeds, [profiles[0].name], gpus=8, levels=("node", "rack", "cluster"))
    yield "speeds", [number for row in rows for number in (row.progress, row.communication)]


@cache
def _generators() -> Samples:
    from tempfile import TemporaryDirectory

    from foretrace.fleet.synthetic import fit
    from foretrace.fleet.workload import Workload

    dice = np.random.default_rng(0)
    jobs = Workload.of(
        submit_s=np.sort(dice.uniform(0, 9e5, 60)), gpus=dice.choice([1, 2, 8], 60), work_s=dice.lognormal(7, 2, 60),
        tenant=["a", "b"] * 30,
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        path = Path(folder) / "g.json"
        fit(jobs).save(path)
        return {"generator.json": path.read_bytes()}


def _play_zeus(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.report import energy
    from foretrace.serving.energy import recorded
    from foretrace.serving.energy.tune import tune

    for whole in (DATA / "energy").glob("*.csv"):
        if whole.name != path.name:
            path.with_name(whole.name).write_bytes(whole.read_bytes())
    found = recorded.read([f"zeus:{path.parent}", "workload=squad", *(["target=84"] if way & 1 else [])])
    yield "tuned", energy.tuned(tune(found, "1.1x", evaluations=4), slo="1.1x")


def _play_settings(path: Path, way: int) -> Iterator[Figure]:
    from tempfile import TemporaryDirectory

    from foretrace.serving.energy.command import setter
    from foretrace.serving.energy.held import recover
    from foretrace.serving.energy.machine import rapl_meter
    from tests.serving.energy.fake_machine import make

    with TemporaryDirectory() as folder:
        root = make(Path(folder))
        if path.suffix == ".json":
            yield "restored", float(recover(path, lambda name: setter(name, root)))
            return
        for file in ("energy_uj", "max_energy_range_uj"):
            (root / "class/powercap/intel-rapl:0" / file).write_bytes(path.read_bytes())
        meter = rapl_meter(root)
        assert meter is not None
        yield "joules", [*meter.read(), meter.between(meter.read(), meter.read())]


def _play_generator(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.fleet.synthetic import load_generator

    made = load_generator(path).generate(jobs=50, seed=1)
    made.validate()
    yield "work", made.work_s[np.isfinite(made.work_s)]


# --- tables and settings ----------------------------------------------------------------------------------------------


def _play_instances(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.hardware.instances import instances

    for each in instances(path):
        yield each.name, [each.devices, each.vcpus, each.memory_gb, each.network_gbit_s, each.price_per_h]
        cluster = each.cluster(2)
        yield "rate", [cluster.inside.bytes_per_s, cluster.between.bytes_per_s]


def _instances() -> Samples:
    from importlib.resources import files

    text = files("foretrace.hardware").joinpath("instances.csv").read_bytes()
    return {"prices.csv": b"\n".join(text.split(b"\n")[:5]) + b"\n"}


MEASURED = (
    'device,ms,op,text\nh100,0.5,aten::mm,"[[[8, 8], [8, 8]], [""float"", ""float""], []]"\n'
    'a100,1.5,aten::relu,"[[[8]], [""float""], []]"\n'
)
SIZED = "device,us,family,precision,b,m,n,k\nh100,12.5,gemm,bf16,1,128,128,64\nh100,13.5,gemm,fp32,2,128,128,64\n"


def _play_measured(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.cost.devices.measured import Measured

    found = Measured.from_table(path)
    times = [time for table in found.calls.values() for time in table.values()]
    times += [time for table in found.sizes.values() for time in table.values()]
    for time in times:
        yield "time", [time.seconds, time.low_s, time.high_s, time.count]


_CELLS = "|nor_conv_3x3~0|+|nor_conv_3x3~0|avg_pool_3x3~1|+|skip_connect~0|nor_conv_3x3~1|skip_connect~2|"


def _play_networks(path: Path, way: int) -> Iterator[Figure]:
    from reproductions.nas_bench_201.tables import read_networks

    other = path.with_name("other.csv")
    archs = "arch" in path.name
    other.write_text(
        "arch_idx,2080ti_1,2080ti_32\n0,2.5,9\n1,3.5,10\n" if archs else f"arch_idx,arch\n0,{_CELLS}\n1,{_CELLS}\n"
    )
    try:
        found = read_networks(path, other) if archs else read_networks(other, path)
        for seconds in found.latencies_s.values():
            yield "latency", seconds
        yield "flops", found.flops
    finally:
        other.unlink()


def _play_decoder(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.model.decoder_config import decoder_config

    found = decoder_config(str(path))
    yield "shape", [found.layers, found.hidden, found.heads, found.kv_heads, found.inner, found.words, found.length]


def _rules() -> Samples:
    from tests.fuzz.mutations import _joined

    def operator(kind: int, inputs: Sequence[tuple[int, int]]) -> bytes:
        told = [(2, 2, _joined([(1, 0, op % 2**64), (2, 0, out)])) for op, out in inputs]
        return _joined([(1, 0, kind), *told, (3, 2, _joined([(1, 0, 9), (2, 0, 0)]))])

    from foretrace.plan.rewrite.taso import KINDS

    add = next(number for number, name in KINDS.items() if "add" in str(name).lower())
    rule = [(1, 2, operator(add, [(-1, 0), (-2, 0)])), (2, 2, operator(add, [(-2, 0), (-1, 0)]))]
    rule.append((3, 2, _joined([(1, 0, 0), (2, 0, 0), (3, 0, 0), (4, 0, 0)])))
    return {"rules.pb": _joined([(1, 2, _joined(rule)), (1, 2, _joined(rule))])}


def _play_rules(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.plan.rewrite.taso import read

    yield "rules", len(read(path))


def _play_calibration(path: Path, way: int) -> Iterator[Figure]:
    import os
    from shutil import copyfile

    from foretrace.cost.operators import store

    machine = {"cpu": "x"}
    before = os.environ.get("FORETRACE_CACHE")
    os.environ["FORETRACE_CACHE"] = str(path.parent / "cache")
    try:
        to = store.path_for(machine)
        to.parent.mkdir(parents=True, exist_ok=True)
        copyfile(path, to)
        yield "seconds", list(store.load(machine).values())
    finally:
        if before is None:
            del os.environ["FORETRACE_CACHE"]
        else:
            os.environ["FORETRACE_CACHE"] = before


def _ledger_lines() -> Samples:
    shipped = Path(__file__).resolve().parents[2] / "benchmarks" / "data" / "ledger.jsonl"
    return {"ledger.jsonl": b"\n".join(shipped.read_bytes().split(b"\n")[:2]) + b"\n"}


def _play_ledger(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.experiment.ledger import Ledger
    from foretrace.report import verification
    from foretrace.report.jsonout import dumps
    from foretrace.report.terminal import Terminal, render

    base = path.with_name("ledger.sqlite")
    try:
        ledger = Ledger(base)
        yield "added", ledger.import_jsonl(path)
        view = verification.ledger(ledger.rows(), source=str(base))
        yield "ledger", view
        dumps(view)
        printed(render(view, Terminal(width=100)))
    finally:
        base.unlink(missing_ok=True)


def _pollux_rows(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.fleet.pollux.profiles import _rows

    for row in _rows(path, ("num_nodes", "num_replicas", "step_time")):
        yield "row", np.abs(row)  # columns that may be below 0 are its own affair


RESULTS = {"run|allox|physical": {"jct_list": [10.0, 20.0], "ftf_themis": [0.5, 1.0]}}
SIMULATORS = {
    "results.json": json.dumps(RESULTS).encode(),
    "samples.csv": b"duration,job\n10,a\n20,b\n4000,c\n",
    "cluster.csv": b"num_switch,num_node_p_switch,num_gpu_p_node,num_cpu_p_node,mem_p_node\n1,32,4,64,256\n",
}


def _play_simulators(path: Path, way: int) -> Iterator[Figure]:
    from reproductions.shockwave.profile import read_results
    from reproductions.tiresias.cluster import Cluster
    from reproductions.tiresias.simulator import _read_samples

    if "results" in path.name:
        found = read_results(path)
        yield "results", len(found)
    elif "samples" in path.name:
        yield "samples", _read_samples(path)
    else:
        yield "cluster", Cluster.read(str(path)).total


def _readers() -> Iterator[Reader]:
    from foretrace.fleet.formats import FORMATS

    covers: tuple[str, ...]
    samples: Callable[[], Samples]
    yield Reader(name="recording", covers=("trace.stream", "trace.kineto", "trace.read", "trace.readers",
                 "trace.tables", "trace.trace"),
                 samples=recordings, play=_play_recording)  # fmt: skip
    yield Reader(name="ranks", covers=("trace.stream", "graph.ranks"), samples=rank_archives, play=_play_ranks)
    yield Reader(
        name="graph", covers=("graph.store", "fleet.speeds.graph", "cli.options"), samples=graphs, play=_play_graph
    )
    for name, samples, module in (
        ("operators", operator_files, "json_form"),
        ("execution-trace", execution_traces, "chakra"),
        ("onnx", onnx_models, "onnx"),
    ):
        covers = (
            "model.readers.sources",
            f"model.readers.{module}",
            "model.texts",
            "model.capture.unroll",
            "techniques.compute.batching",
        )
        yield Reader(name=name, covers=covers, samples=samples, play=_play_operators)
    yield Reader(name="cluster", covers=("hardware.cluster_file",), samples=lambda: CLUSTERS, play=_play_network)
    covers = ("cost.network.collective_files", "cost.network.collective_table", "experiment.links.calibrate")
    yield Reader(name="collectives", covers=covers, samples=collective_tables, play=_play_collectives)
    for format in FORMATS:
        if format not in fleet_logs():
            raise LookupError(f"tests/fleet/format_samples.py has no sample of the format {format}; add one.")
        module = FORMATS[format].read.__module__.rpartition(".")[2]
        covers = ("fleet.formats.source", "fleet.formats.own", f"fleet.formats.{module}")
        samples = partial(fleet_logs().__getitem__, format)
        yield Reader(name=f"log-{format}", covers=covers, samples=samples, play=_play_fleet(format))
    yield Reader(name="fleet-cluster", covers=("fleet.cluster", "fleet.formats.clusters", "fleet.formats.source"),
                 samples=fleet_clusters, play=_play_fleet_cluster)  # fmt: skip
    yield Reader(name="throughputs", covers=("fleet.speeds.throughputs",), samples=_throughputs, play=_play_throughputs)
    table = b"model,gpus,nodes,gpu_type,steps_per_s\nbert,1,1,v100,2\nbert,2,1,v100,3.9\nbert,4,2,v100,6\n"
    zeus = {file.name: file.read_bytes() for file in sorted((DATA / "energy").glob("*.csv"))}
    yield Reader(name="zeus", covers=("serving.energy.recorded",), samples=lambda: zeus, play=_play_zeus)
    settings = {"settings.json": b'{"cpu-frequency": {"scaling_max_freq": "1600000"}}', "energy_uj": b"5000000\n"}
    covers = ("serving.energy.held", "serving.energy.machine")
    yield Reader(name="settings", covers=covers, samples=lambda: settings, play=_play_settings)
    rows = [{"model": "bert", "gpus": n, "level": 1, "steps_per_s": 2.0 * n} for n in (1, 2, 4)]
    speed = {"speeds.csv": table, "speeds.json": json.dumps(rows).encode()}
    yield Reader(name="speed-table", covers=("fleet.speeds.table",), samples=lambda: speed, play=_play_speed_table)
    profiles = {"profiles": [{"name": "m", "compute_ms": 90.0, "gradient_mb": 98, "batch": 32, "aliases": ["n"],
                              "published_scale": 0.5, "note": "x"}]}  # fmt: skip
    yield Reader(name="profiles", covers=("fleet.speeds.profiles",), play=_play_profiles,
                 samples=lambda: {"profiles.json": json.dumps(profiles).encode()})  # fmt: skip
    yield Reader(name="generator", covers=("fleet.synthetic",), samples=_generators, play=_play_generator)
    yield Reader(name="prices", covers=("hardware.instances",), samples=_instances, play=_play_instances)
    yield Reader(name="measured", covers=("cost.devices.measured",), play=_play_measured,
                 samples=lambda: {"measured.csv": MEASURED.encode(), "sized.csv": SIZED.encode()})  # fmt: skip
    networks = {"archs.csv": f"arch_idx,arch\n0,{_CELLS}\n1,{_CELLS}\n".encode(),
                "latencies.csv": b"arch_idx,2080ti_1,2080ti_32\n0,2.5,9\n1,3.5,10\n"}  # fmt: skip
    yield Reader(
        name="networks", covers=("reproductions.nas_bench_201.tables",), samples=lambda: networks, play=_play_networks
    )
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
              "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000, "max_position_embeddings": 2048,
              "tie_word_embeddings": False, "head_dim": 16}  # fmt: skip
    yield Reader(name="decoder", covers=("model.decoder_config",), play=_play_decoder,
                 samples=lambda: {"config.json": json.dumps(config).encode()})  # fmt: skip
    yield Reader(name="rules", covers=("plan.rewrite.taso", "model.readers.protobuf"), samples=_rules, play=_play_rules)
    calibration = {
        "format": 1,
        "machine": {"cpu": "x"},
        "seconds": {"aten::mm [[[8, 8]]]": 1e-5, "near aten::mm": 2e-5},
    }
    yield Reader(name="calibration", covers=("cost.operators.store",), play=_play_calibration,
                 samples=lambda: {"calibration.json": json.dumps(calibration).encode()})  # fmt: skip
    yield Reader(name="ledger", covers=("experiment.ledger",), samples=_ledger_lines, play=_play_ledger)
    covers = (
        "reproductions.shockwave.profile", "reproductions.tiresias.simulator", "reproductions.tiresias.cluster",
    )  # fmt: skip
    yield Reader(name="simulators", covers=covers, samples=lambda: SIMULATORS, play=_play_simulators)
    pollux = {"placements.csv": b"num_nodes,num_replicas,step_time\n1,1,0.1\n1,2,0.12\n2,4,0.2\n"}
    yield Reader(name="pollux-profile", covers=("fleet.pollux.profiles",), samples=lambda: pollux,
                 play=_pollux_rows)  # fmt: skip
    from tests.fuzz.plan_readers import plan_readers
    from tests.fuzz.serving_readers import serving_readers

    yield from plan_readers()
    yield from serving_readers()


@cache
def readers() -> Mapping[str, Reader]:
    """All readers by name."""
    return {each.name: each for each in _readers()}
