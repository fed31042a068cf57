"""A small training run made by hand: a loader, a host with an autograd thread, a compute and a communication
stream.

Its graph has every task kind that a GPU recording has, so that the faces can be tested without a recording.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foretrace.graph.assemble import assemble
from foretrace.graph.taskgraph import EdgeKind, GraphInfo, Lane, Phase, TaskGraph, TaskKind
from foretrace.report.tracks import Track, track
from foretrace.simulate.timeline import Timeline, simulate
from foretrace.trace.trace import LaneKind

US = 1_000
NASTY = 'void evil::kernel<"</script><script>document.title=1</script>", float&>(int*)'
LANES = (
    Lane(rank=0, kind=LaneKind.CPU, stream=101, label="main thread"),
    Lane(rank=0, kind=LaneKind.CPU, stream=202, label="autograd thread"),
    Lane(rank=0, kind=LaneKind.GPU, device=0, stream=7, label="stream 7"),
    Lane(rank=0, kind=LaneKind.GPU, device=0, stream=20, label="stream 20 (nccl)"),
)
KERNELS = (
    "volta_scudnn_128x64_relu_interior_nn_v1",
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1>(cudnnTensorStruct, float const*)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>, at::detail::Array<char*, 3> >",
    NASTY,
)


@dataclass
class Builder:
    """Collects tasks and edges; `after` edges leave from the end of their source."""

    rng: np.random.Generator
    tasks: dict[str, list[Any]] = field(default_factory=dict)
    edges: dict[str, list[Any]] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    step: int = -1

    def name(self, text: str) -> int:
        return self.names.setdefault(text, len(self.names))

    def task(
        self,
        kind: TaskKind,
        lane: int,
        text: str,
        dur: float,
        *,
        layer: str = "",
        phase: Phase = Phase.NONE,
        **more: Any,
    ) -> int:
        row = len(self.tasks.setdefault("kind", []))
        values = {
            "kind": kind, "lane": lane, "name": self.name(text), "dur": int(dur * US),
            "phase": phase, "step": self.step,
            "layer": self.layers.setdefault(layer, len(self.layers)) if layer else -1,
            "nbytes": -1, "flops": 0.0, "op": -1, "release": 0,
        } | more  # fmt: skip
        for key, value in values.items():
            self.tasks.setdefault(key, []).append(value)
        if lane in self.last:
            stream = lane >= 2
            self.edge(self.last[lane], row, EdgeKind.STREAM if stream else EdgeKind.PROGRAM, 1_200 if stream else 0)
        self.last[lane] = row
        return row

    def edge(self, src: int, dst: int, kind: EdgeKind, lag: int = 0, *, from_start: bool = False) -> None:
        edge = {"src": src, "dst": dst, "edge_kind": kind, "lag": lag, "from_start": from_start}
        for key, value in edge.items():
            self.edges.setdefault(key, []).append(value)

    def noisy(self, us: float, spread: float) -> float:
        return us * float(np.exp(self.rng.normal(0, spread)))


def demo_graph(
    *,
    steps: int = 6,
    layers: int = 16,
    loader_us: float = 58_000.0,
    kernel_us: float = 900.0,
    comm_us: float = 4_000.0,
    kernels_per_layer: int = 4,
    seed: int = 1,
) -> TaskGraph:
    """A graph of `steps` steps of a convolutional network with data-parallel gradients."""
    b = Builder(rng=np.random.default_rng(seed))
    marks = [b.task(TaskKind.MARK, 0, "ProfilerStep", 0)]
    for b.step in range(steps):
        marks.append(_step(b, layers, loader_us, kernel_us, comm_us, kernels_per_layer))
    info = GraphInfo(
        source="demo.json.gz",
        platform="cuda",
        devices=("Demo V100 <&>",),
        steps=tuple(range(3, 3 + steps)),
        step_source="ProfilerStep",
        attributed_share=0.987,
        notes=("recorded 2021-06-08",),
    )
    graph = assemble(
        {key: np.array(values) for key, values in b.tasks.items()},
        {key: np.array(values) for key, values in b.edges.items()},
        marks=np.array(marks),
        names=tuple(b.names),
        layers=tuple(b.layers),
        lanes=LANES,
        info=info,
    )
    return graph.with_columns(recorded=simulate(graph).start)


def _step(b: Builder, layers: int, loader_us: float, kernel_us: float, comm_us: float, per_layer: int) -> int:
    b.task(
        TaskKind.DATA, 0, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", b.noisy(loader_us, 0.08),
        phase=Phase.DATA,
    )  # fmt: skip
    _copy(b)
    for i in range(layers):
        for k in range(per_layer):
            _launch(
                b,
                0,
                f"layer{1 + 4 * i // layers}.{i}.conv{k}",
                KERNELS[k % 4],
                kernel_us * (0.4 + (k == 0)),
                Phase.FORWARD,
            )
    fork = b.task(TaskKind.JOIN, 0, "fork", 0)
    joined = b.task(TaskKind.JOIN, 1, "start of burst", 0)
    b.edge(fork, joined, EdgeKind.THREAD)
    ready = 0
    for i in reversed(range(layers)):
        for k in range(per_layer):
            ready = _launch(
                b, 1, f"layer{1 + 4 * i // layers}.{i}.conv{k}", KERNELS[k % 4].replace("fw", "bw"),
                kernel_us * (0.8 + (k == 0)), Phase.BACKWARD,
            )  # fmt: skip
        if i % 8 == 0 and comm_us:
            call = b.task(TaskKind.CALL, 1, "cudaLaunchKernel", 6)
            reduce = b.task(
                TaskKind.COLLECTIVE, 3, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", b.noisy(comm_us, 0.2),
                phase=Phase.BACKWARD, nbytes=25_000_000,
            )  # fmt: skip
            b.edge(call, reduce, EdgeKind.LAUNCH, 7_000, from_start=True)
            b.edge(ready, reduce, EdgeKind.EVENT, 1_500)
    burst = b.task(TaskKind.JOIN, 1, "end of burst", 0)
    back = b.task(TaskKind.JOIN, 0, "join", 0)
    b.edge(burst, back, EdgeKind.THREAD)
    last_reduce = b.last.get(3)
    first = True
    for _ in range(0, layers, 2):
        kernel = _launch(b, 0, "", "multi_tensor_apply_kernel", 60, Phase.OPTIMIZER)
        if first and last_reduce is not None:
            b.edge(last_reduce, kernel, EdgeKind.EVENT, 1_500)
            first = False
    b.task(TaskKind.CALL, 0, "cudaDeviceSynchronize", 4)
    back = b.task(TaskKind.RETURN, 0, "cudaDeviceSynchronize", 0)
    b.edge(b.last[2], back, EdgeKind.SYNC, 3_000)
    return b.task(TaskKind.MARK, 0, "ProfilerStep", 0)


def _copy(b: Builder) -> None:
    call = b.task(TaskKind.CALL, 0, "cudaMemcpyAsync", 40)
    copy = b.task(TaskKind.COPY, 2, "Memcpy HtoD (Pageable -> Device)", b.noisy(2_000, 0.1), nbytes=19_267_584)
    b.edge(call, copy, EdgeKind.LAUNCH, 9_000, from_start=True)
    back = b.task(TaskKind.RETURN, 0, "cudaMemcpyAsync", 0)
    b.edge(copy, back, EdgeKind.SYNC, -35_000)


def _launch(b: Builder, thread: int, layer: str, kernel: str, us: float, phase: Phase) -> int:
    op = b.name("aten::cudnn_convolution" if "conv0" in layer else "aten::add_")
    b.task(TaskKind.CPU, thread, "host work", b.noisy(22, 0.4), layer=layer, phase=phase)
    call = b.task(TaskKind.CALL, thread, "cudaLaunchKernel", b.noisy(6, 0.2), layer=layer, phase=phase)
    row = b.task(TaskKind.KERNEL, 2, kernel, b.noisy(us, 0.02), layer=layer, phase=phase, op=op, flops=us * 9e6)
    b.edge(call, row, EdgeKind.LAUNCH, 7_500, from_start=True)
    return row


def make_runs(**demo: Any) -> dict[str, Timeline]:
    """The demo as recorded, and with a loader that is twenty times as fast."""
    graph = demo_graph(**demo)
    faster = graph.with_columns(dur=np.where(graph.kind == TaskKind.DATA, graph.dur // 20, graph.dur))
    return {"recorded": simulate(graph), "prefetch-data": simulate(faster)}


def make_tracks(**demo: Any) -> list[Track]:
    return [track(name, timeline) for name, timeline in make_runs(**demo).items()]
