"""Small training runs, written as a builder would write them: one on a GPU, one on a processor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from foretrace.graph.taskgraph import NO_RELEASE, EdgeKind, GraphInfo, Lane, Phase, TaskGraph, TaskKind
from foretrace.graph.writer import GraphWriter
from foretrace.trace.trace import LaneKind

US = 1_000
MS = 1_000_000
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
MULTI = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
STEP, ZERO = "Optimizer.step#{}.step", "Optimizer.zero_grad#{}.zero_grad"
THREAD, STREAM = 0, 1


class Writer(GraphWriter):
    """Tasks and edges in program order; kernels are 1 us apart."""

    def __init__(self, *, lanes: tuple[Lane, ...], info: GraphInfo) -> None:
        super().__init__(lanes, info, gap_ns=1 * US)

    def task(self, kind: TaskKind, lane: int, name: str, dur: int, **columns: Any) -> int:
        given = {"recorded": len(self) + 1, "release": NO_RELEASE if len(self) else 0, "step": len(self.marks) - 1}
        return super().task(kind, lane, name, dur, **given | columns)

    def mark(self, lane: int = THREAD, name: str = "step", after: Iterable[int] = (), **columns: Any) -> None:
        super().mark(lane, name, after, step=len(self.marks), **columns)


@dataclass(kw_only=True)
class Gpu:
    """A convolution network on one GPU; times in microseconds, per step."""

    steps: int = 4
    layers: int = 6
    host_us: int = 20  # between two calls
    kernel_us: int = 200
    small_us: int = 20  # elementwise kernels
    data_us: int = 3000
    loader: str = LOADER
    device: str = "Tesla V100-SXM2-32GB"
    kernel: str = "volta_scudnn_128x64_relu_interior_nn_v1"
    optimizer: str = "SGD"
    update: str = "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float> >"
    sync_in_step: bool = False
    flops: float = 1e9
    nbytes: int = 4_000_000
    recording: dict[str, Any] = field(default_factory=dict)

    def graph(self) -> TaskGraph:
        writer = Writer(
            lanes=(
                Lane(rank=0, kind=LaneKind.CPU, label="main thread"),
                Lane(rank=0, kind=LaneKind.GPU, device=0, stream=7, label="gpu0 stream 7"),
            ),
            info=GraphInfo(
                platform="cuda", devices=(self.device,), steps=tuple(range(self.steps)), recording=self.recording
            ),
        )
        writer.mark()
        for _ in range(self.steps):
            self._step(writer)
            writer.mark()
        return writer.graph()

    def _step(self, writer: Writer) -> None:
        if self.data_us:
            writer.task(TaskKind.DATA, THREAD, self.loader, self.data_us * US, phase=int(Phase.DATA))
        copy = self._launch(
            writer, "Memcpy HtoD (Pageable -> Device)", 50, Phase.FORWARD, "aten::copy_", kind=TaskKind.COPY,
            call="cudaMemcpyAsync", nbytes=1_000_000,
        )  # fmt: skip
        back = writer.task(TaskKind.RETURN, THREAD, "cudaMemcpyAsync", 0, phase=int(Phase.FORWARD))
        writer.edge(copy, back, EdgeKind.SYNC, -5 * US)
        for phase, op in ((Phase.FORWARD, "aten::cudnn_convolution"), (Phase.BACKWARD, "aten::convolution_backward")):
            for i in range(self.layers):
                self._host(writer, phase, op)
                layer = f"conv{i}"
                self._launch(
                    writer, self.kernel, self.kernel_us, phase, op, layer=layer, nbytes=self.nbytes, flops=self.flops
                )
                self._host(writer, phase, "aten::relu")
                relu = "void at::native::vectorized_elementwise_kernel<4, at::native::relu<float> >"
                self._launch(writer, relu, self.small_us, phase, "aten::relu", layer=layer, nbytes=8_000_000)
            if self.sync_in_step and phase == Phase.FORWARD:
                writer.task(TaskKind.CALL, THREAD, "cudaStreamSynchronize", 5 * US, phase=int(phase), op="aten::item")
                waits = writer.task(TaskKind.RETURN, THREAD, "cudaStreamSynchronize", 0, phase=int(phase))
                writer.edge(writer.last[STREAM], waits, EdgeKind.SYNC, 5 * US)
        for _ in range(self.layers):
            for op in ("aten::mul_", "aten::add_"):
                layer = STEP.format(self.optimizer)
                self._host(writer, Phase.OPTIMIZER, op, layer)
                self._launch(writer, self.update, 5, Phase.OPTIMIZER, op, layer=layer, nbytes=40_000)
        for _ in range(self.layers):
            layer = ZERO.format(self.optimizer)
            self._host(writer, Phase.OPTIMIZER, "aten::zero_", layer)
            self._launch(writer, "void fill<float>", 3, Phase.OPTIMIZER, "aten::zero_", layer=layer)

    def _host(self, writer: Writer, phase: Phase, op: str, layer: str = "") -> None:
        writer.task(TaskKind.CPU, THREAD, op, self.host_us * US, op=op, layer=layer, phase=int(phase))

    def _launch(
        self,
        writer: Writer,
        name: str,
        dur_us: int,
        phase: Phase,
        op: str,
        *,
        kind: TaskKind = TaskKind.KERNEL,
        call: str = "cudaLaunchKernel",
        layer: str = "",
        **columns: Any,
    ) -> int:
        of = writer.task(TaskKind.CALL, THREAD, call, 6 * US, op=op, layer=layer, phase=int(phase))
        row = writer.task(kind, STREAM, name, dur_us * US, op=op, layer=layer, phase=int(phase), **columns)
        writer.edge(of, row, EdgeKind.LAUNCH, 7 * US, from_start=True)
        return row


@dataclass(kw_only=True)
class Cpu:
    """A perceptron on a processor, AdamW as a loop over its tensors; times in microseconds."""

    steps: int = 4
    layers: int = 5
    gemm_us: int = 400
    relu_us: int = 30
    data_us: int = 1500
    tensors: int = 10
    elements: int = 1_000_000
    optimizer: str = "AdamW"
    casts: int = 0
    recording: dict[str, Any] = field(default_factory=dict)

    def graph(self) -> TaskGraph:
        writer = Writer(
            lanes=(Lane(rank=0, kind=LaneKind.CPU, label="main thread"),),
            info=GraphInfo(
                platform="cpu", steps=tuple(range(self.steps)), recording={**processor_facts(), **self.recording}
            ),
        )
        writer.mark()
        for _ in range(self.steps):
            self._step(writer)
            writer.mark()
        return writer.graph()

    def _step(self, writer: Writer) -> None:
        if self.data_us:
            writer.task(TaskKind.DATA, THREAD, LOADER, self.data_us * US // 3, phase=int(Phase.DATA))
            writer.task(TaskKind.DATA, THREAD, "aten::stack", self.data_us * US // 3, phase=int(Phase.DATA))
            writer.task(TaskKind.DATA, THREAD, LOADER, self.data_us * US // 3, phase=int(Phase.DATA))
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            for i in range(self.layers):
                for _ in range(self.casts):
                    self._operator(writer, "aten::_to_copy", 3, phase)
                self._operator(writer, "aten::linear", 2, phase)
                name = "aten::addmm" if phase == Phase.FORWARD else "aten::mm"
                self._operator(writer, name, self.gemm_us, phase, layer=f"linear{i}", flops=1e8, nbytes=500_000)
                self._operator(writer, "aten::relu", self.relu_us, phase, layer=f"linear{i}", nbytes=100_000)
                writer.task(TaskKind.PYTHON, THREAD, "python", 10 * US, phase=int(phase))
        layer = STEP.format(self.optimizer)
        each = self.elements // self.tensors
        for _ in range(self.tensors):
            for name, arrays in (("aten::mul_", 2), ("aten::lerp_", 3), ("aten::addcmul_", 4), ("aten::addcdiv_", 4)):
                nbytes = 4 * each * arrays
                self._operator(writer, name, nbytes / 20_000, Phase.OPTIMIZER, layer=layer, nbytes=nbytes)  # 20 GB/s
            writer.task(TaskKind.PYTHON, THREAD, layer, 8 * US, layer=layer, phase=int(Phase.OPTIMIZER))
        layer = ZERO.format(self.optimizer)
        writer.task(TaskKind.PYTHON, THREAD, layer, 20 * US, layer=layer, phase=int(Phase.OPTIMIZER))

    def _operator(self, writer: Writer, name: str, dur_us: float, phase: Phase, **columns: Any) -> None:
        writer.task(TaskKind.OPERATOR, THREAD, name, round(dur_us * US), op=name, phase=int(phase), **columns)


def processor_facts(*sets: str) -> dict[str, Any]:
    """Return a recorder's facts of a processor with these instruction sets; AVX-512 bfloat16 without any."""
    return {"machine": {"instruction_sets": list(sets or ("avx2", "avx512", "avx512_bf16"))}}


def optimizer_facts(tensors: int, elements: int, name: str = "AdamW", **settings: Any) -> dict[str, Any]:
    """Return what a recorder stores about an optimizer."""
    return {
        "optimizers": [
            {"class": name, "settings": settings, "tensors": {"float32": {"count": tensors, "elements": elements}}}
        ]
    }
