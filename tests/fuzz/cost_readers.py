"""Readers of what things cost: clusters, measured collectives and operators, prices, the ledger."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory

from foretrace.errors import ForetraceError
from tests.fuzz.reader import Figure, Reader, Samples, printed

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


def _play_calibration(path: Path, way: int) -> Iterator[Figure]:
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


def _play_predictor(path: Path, way: int) -> Iterator[Figure]:
    import numpy as np

    from foretrace.cost.programs import predictor, rank

    found = rank.unpacked(path.read_bytes(), str(path))
    rows = np.ones((3, len(predictor.ROW))) * np.array([[1.0], [1e3], [1e6]])
    yield "seconds", found.predict(rows)
    yield "range", [found.low, found.high]
    printed(found.about)


def _play_kernels(path: Path, way: int) -> Iterator[Figure]:
    from foretrace.techniques.compute import compiled

    compiled._timed_step.cache_clear()
    found = compiled._timed_step(str(path))
    yield "step", [found.step_s, found.sum_s, found.eager_s, *found.interval_s]
    printed(found.model)


def _predictors() -> Samples:
    from importlib.resources import files

    return {"predictor.npz": files("foretrace.cost.programs").joinpath("shipped.npz").read_bytes()}


def cost_readers() -> Iterator[Reader]:
    """The readers of this file."""
    yield Reader(name="program-predictor", covers=("cost.programs.rank",), samples=_predictors, play=_play_predictor)
    kernels = {"command": "kernels", "model": "m", "step_s": 0.01, "sum_s": 0.0098, "eager_s": 0.012,
               "interval_s": [0.0097, 0.0103]}  # fmt: skip
    yield Reader(name="kernels", covers=("techniques.compute.compiled",), play=_play_kernels,
                 samples=lambda: {"kernels.json": json.dumps(kernels).encode()})  # fmt: skip
    yield Reader(name="cluster", covers=("hardware.cluster_file",), samples=lambda: CLUSTERS, play=_play_network)
    covers = ("cost.network.collective_files", "cost.network.collective_table", "experiment.links.calibrate")
    yield Reader(name="collectives", covers=covers, samples=collective_tables, play=_play_collectives)
    yield Reader(name="prices", covers=("hardware.instances",), samples=_instances, play=_play_instances)
    yield Reader(name="measured", covers=("cost.devices.measured",), play=_play_measured,
                 samples=lambda: {"measured.csv": MEASURED.encode(), "sized.csv": SIZED.encode()})  # fmt: skip
    networks = {"archs.csv": f"arch_idx,arch\n0,{_CELLS}\n1,{_CELLS}\n".encode(),
                "latencies.csv": b"arch_idx,2080ti_1,2080ti_32\n0,2.5,9\n1,3.5,10\n"}  # fmt: skip
    yield Reader(
        name="networks", covers=("reproductions.nas_bench_201.tables",), samples=lambda: networks, play=_play_networks
    )
    calibration = {
        "format": 1,
        "machine": {"cpu": "x"},
        "seconds": {"aten::mm [[[8, 8]]]": 1e-5, "near aten::mm": 2e-5},
    }
    yield Reader(name="calibration", covers=("cost.operators.store",), play=_play_calibration,
                 samples=lambda: {"calibration.json": json.dumps(calibration).encode()})  # fmt: skip
    yield Reader(name="ledger", covers=("experiment.ledger",), samples=_ledger_lines, play=_play_ledger)
