"""`compiled`: the model through `torch.compile`.

What the interpreter and the dispatcher do between operators goes; runs of operators that are bound by memory
(elementwise work, normalisation, reductions) become one pass over their data; matrix products and convolutions stay the
library's. One call checks its guards. On a processor the generated code draws the random numbers of dropout one by one
and finds the largest number of a window by comparing places, both slower than the library, and images have their
channels last. Where the compiled code is available, its kernels as `foretrace kernels` timed them say it instead. Not
modelled without it: kernels that the compiler picks otherwise, which is why the range is wide.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from math import inf, prod
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from foretrace.arrays import Float64, Mask
from foretrace.errors import ForetraceError, NotApplicableError
from foretrace.graph.edit import remove, retime
from foretrace.graph.insert import HostTask, insert
from foretrace.graph.select import previous_on_lane, select, trained
from foretrace.graph.taskgraph import Phase, TaskGraph, TaskKind
from foretrace.graph.work import tensors
from foretrace.reading import parse_json, read_text
from foretrace.techniques.base import Prior, Technique, derived, parameter, prior
from foretrace.techniques.compute.classes import MATRIX, WorkClass, classify, holes
from foretrace.trace.trace import decode_shapes
from foretrace.training.training import Training

# Memory-bound operators that the compiler does not merge into others' loops.
_APART = ("aten::*embedding*", "aten::*index*", "aten::*scatter*", "aten::*gather*", "aten::*pool*",
          "aten::*bernoulli*", "aten::*sort*", "aten::*topk*", "aten::*unique*", "aten::nonzero*", "aten::*rnn*",
          "aten::*lstm*", "aten::*gru*", "aten::nll_loss*")  # fmt: skip
_CALL = "compiled call"
_VIEWS = tuple(f"aten::{name}" for name in ("view", "reshape", "transpose", "permute", "t", "expand", "unsqueeze",
               "squeeze", "select", "slice", "split", "chunk", "unbind", "flatten", "as_strided", "detach", "to",
               "alias", "_unsafe_view", "linear", "matmul", "conv2d", "convolution", "_convolution",
               "layer_norm", "batch_norm", "_batch_norm_impl_index", "dropout"))  # fmt: skip
_SLOWER_OPS = {"random_ns": ("aten::bernoulli_*",), "pools": ("aten::max_pool?d_with_indices*",)}  # on a processor
# What the compiler leaves in a recording, and this technique in a graph.
_COMPILED = ("Torch-Compiled Region*", "CompiledFunction*", "*## Call CompiledFxGraph*", "triton_???_fused*", _CALL)


@dataclass(frozen=True, kw_only=True)
class Compiled(Technique):
    """Trace the model and compile it; the loss function and the optimizer stay as they are."""

    across = "each"
    summary = "torch.compile: no interpreter between operators, elementwise chains in one pass"
    source = "Ansel et al., PyTorch 2 (ASPLOS 2024); torch.compile"
    effort = "one line (torch.compile); minutes of compiling at the start"
    needs = "a C++ compiler, or a CUDA device"

    mode: str = parameter(
        "default", doc="default, or reduce-overhead (CUDA graphs)", choices=("default", "reduce-overhead")
    )
    kernels: str = parameter("", doc="the answer of `foretrace kernels MODEL --json` for this very training, in a file")
    code: float | None = derived(doc="the step as these kernels say, relative")
    rest: float | None = derived(doc="time of what a merged chain holds beside its longest operator, relative")
    longest: float | None = derived(doc="time of the longest operator of a merged chain, relative")
    matrix: float | None = prior(
        1.0,
        0.93,
        1.08,
        doc="time of matrix products (on a device, also convolutions), relative",
        why="the same library, but layouts and workspaces may change",
    )
    conv: float | None = derived(doc="time of convolutions on a processor, relative")
    host: float | None = prior(
        0.25,
        0.1,
        0.5,
        doc="host time around the operators, relative",
        why="one compiled function instead of the interpreter, dispatcher and autograd for every operator",
    )
    random_ns: float | None = derived(unit="ns", doc="time of a number that dropout draws, ns")
    pools: float | None = derived(doc="time of pooling by the largest number, both passes, relative")
    holes: float | None = derived(doc="time of host stretches of over 1 ms between two calls or operators, relative")
    call_us: float | None = prior(
        120.0,
        60.0,
        300.0,
        unit="µs",
        doc="host time per call of the compiled model, forward and backward together",
        why="guards are checked, inputs and saved tensors handed over",
    )

    def priors(self, graph: TaskGraph) -> dict[str, Prior]:
        found = {**super().priors(graph), **(_ON_CPU if graph.info.platform == "cpu" else _ON_DEVICE)}
        if self.kernels:
            step = _timed_step(self.kernels)
            off = abs(step.sum_s / step.step_s - 1)
            spread = max(step.interval_s[1] / step.step_s - 1, 1 - step.interval_s[0] / step.step_s)
            wide = 1 + max(0.04, off + spread)
            why = f"parts of the step of {step.model}, {100 * off:.1f} % off their whole where they were timed"
            return {"code": Prior(1.0, 1 / wide, wide, why=why)}
        body = trained(graph)
        if graph.info.platform == "cpu":
            shown = {name: bool(np.any(body & select(graph, name=ops))) for name, ops in _SLOWER_OPS.items()}
            found |= {name: _SLOWER[name] for name in shown if shown[name]}
        return found | ({"holes": _HOLES} if np.any(body & holes(graph)) else {})

    def change(self, graph: TaskGraph) -> TaskGraph:
        kind = TaskKind.OPERATOR if graph.info.platform == "cpu" else TaskKind.KERNEL
        if self.mode == "reduce-overhead" and graph.info.platform == "cpu":
            raise self.refuse("mode=reduce-overhead launches CUDA graphs, and the recording has no device work.")
        body = trained(graph)
        work = body & (graph.kind == kind)
        if not work.any():
            raise self.refuse("the recording shows no operators of a forward or backward pass.")
        if any(fnmatchcase(name, pattern) for name in graph.names for pattern in _COMPILED):
            raise self.refuse("the model, or a part of it, is compiled already.")
        classes, values = classify(graph).work, self.values(graph)
        if self.kernels:
            return self._as_timed(graph, values["code"])
        matrix = work & np.isin(classes, MATRIX)
        dispatch = _dispatch(graph, body)
        # Kernels of other libraries (fbgemm, torchvision) are called as they are.
        foreign = graph.on_device & ~select(graph, op="aten::*")
        apart = (select(graph, name=_APART) | select(graph, op=_APART) | foreign) & ~dispatch
        merged = work & (classes == WorkClass.MEMORY) & ~apart & ~dispatch
        dur = graph.dur.astype(np.float64)
        convolutions = matrix & (classes == WorkClass.CONV)
        dur[convolutions] *= values.get("conv", values["matrix"])
        dur[matrix & ~convolutions] *= values["matrix"]
        unknown = dispatch & holes(graph)
        dur[dispatch & ~unknown] *= values["host"]
        dur[unknown] *= values.get("holes", 1.0)
        gone = self._merge(graph, merged, matrix | (work & apart), dur, values)
        slower = {name: work & apart & select(graph, name=ops) for name, ops in _SLOWER_OPS.items() if name in values}
        for name, rows in slower.items():
            dur[rows] = values[name] * (graph.dur[rows] if name == "pools" else _numbers(graph, rows))
        changed = (matrix | dispatch | merged | np.any(list(slower.values()), axis=0)) & ~gone
        what = "compiled {}: less host time, one pass per chain of elementwise work"
        result = retime(graph, changed, dur[changed], what=what)
        if gone.any():
            result = remove(result, gone)
        result = insert(result, self._calls(graph, body, 1e3 * values["call_us"]))
        if self.mode == "reduce-overhead":
            from foretrace.techniques.compute.cuda_graphs import CudaGraphs

            result = CudaGraphs(phases="forward,backward").signed(result)
        return result

    def _as_timed(self, graph: TaskGraph, factor: float) -> TaskGraph:
        """Return passes and update as much shorter as the sum of kernels, framework and pages was than the eager step
        that took turns with it.
        """
        step = _timed_step(self.kernels)
        whole = (trained(graph) | (graph.phase == Phase.OPTIMIZER)) & ~graph.on_device
        scale = step.sum_s / step.eager_s
        what = f"compiled {{}}: {scale:.3g} of the step without the compiler, as {step.model} beside it"
        return retime(graph, whole, graph.dur[whole] * factor * scale, what=what)

    def realise(self, training: Training) -> Training:
        import torch

        kind = torch.device(training.device).type
        if kind == "cpu" and self.mode == "reduce-overhead":
            raise self.refuse("mode=reduce-overhead launches CUDA graphs, and this training runs on a processor.")
        if kind == "cpu" and not compiler():
            raise self.refuse("torch.compile needs a C++ compiler on a processor; install g++, or name one by CXX.")
        if training.run is not None:
            raise self.refuse("the training has a step function of its own, which calls parts of the model itself.")
        return training.compiled(self.mode)

    def _merge(self, graph: TaskGraph, merged: Mask, between: Mask, dur: Float64, values: dict[str, float]) -> Mask:
        """Return new times of chains in `dur`, on their longest member; the others, which go. A chain ends at
        `between`.
        """
        gone = np.zeros(len(graph), dtype=np.bool_)
        order = np.lexsort((np.arange(len(graph)), graph.lane))
        order = order[(merged | between)[order]]
        if not len(order):
            return gone
        part = np.stack([graph.lane[order], graph.step[order], graph.phase[order]])
        ends = np.any(part[:, 1:] != part[:, :-1], axis=0) | between[order[1:]] | between[order[:-1]]
        chain = np.append(0, np.cumsum(ends))[merged[order]]
        mine = order[merged[order]]
        if not len(mine):
            return gone
        firsts = np.flatnonzero(np.diff(chain, prepend=-1))
        total = np.add.reduceat(graph.dur[mine], firsts)
        most_first = np.lexsort((-graph.dur[mine], chain))  # of equal ones the first
        longest = mine[most_first[firsts]]
        rest = total - graph.dur[longest]
        dur[longest] = graph.dur[longest] * values["longest"] + rest * values["rest"]
        gone[mine] = True
        gone[longest] = False
        return gone

    def _calls(self, graph: TaskGraph, body: Mask, call_ns: float) -> list[HostTask]:
        """Return what every step pays for calling the compiled function."""
        previous = previous_on_lane(graph)
        host = np.flatnonzero(body & ~graph.on_device & (graph.phase == Phase.FORWARD) & (graph.step >= 0))
        _, place = np.unique(graph.step[host], return_index=True)
        firsts = [row for row in host[place].tolist() if previous[row] >= 0]
        return [HostTask(after=int(previous[row]), like=row, name=_CALL, dur_ns=round(call_ns)) for row in firsts]


class _TimedStep(msgspec.Struct, frozen=True):
    """What of the answer of `foretrace kernels` counts here."""

    command: Literal["kernels"]
    model: str
    step_s: float
    sum_s: float
    eager_s: float
    interval_s: tuple[float, float]


@cache
def _timed_step(file: str) -> _TimedStep:
    """Raise NotApplicableError where the file is no such answer."""
    try:
        found = msgspec.convert(parse_json(read_text(Path(file)), file), _TimedStep)
    except (msgspec.ValidationError, ForetraceError) as error:
        raise NotApplicableError(f"kernels={file} is no answer of foretrace kernels MODEL --json ({error})") from None
    if not 0 < found.interval_s[0] <= found.step_s <= found.interval_s[1] < inf or not (
        0 < found.sum_s < inf and 0 < found.eager_s < inf
    ):
        raise NotApplicableError(f"kernels={file} has times that cannot be; run foretrace kernels MODEL --json again")
    return found


def compiler() -> str | None:
    """Return the C++ compiler that PyTorch would use, None if there is none."""
    named = os.environ.get("CXX")
    return next(
        (found for each in ([named] if named else ["g++", "clang++", "c++"]) if (found := shutil.which(each))), None
    )


def _dispatch(graph: TaskGraph, body: Mask) -> Mask:
    """Return host tasks around the work: the interpreter, autograd's nodes, views, operators that hand on to others.

    Operators of other libraries do work of their own.
    """
    python = np.isin(graph.kind, (TaskKind.PYTHON, TaskKind.CPU))
    operator = graph.kind == TaskKind.OPERATOR
    aten = select(graph, name="aten::*")
    nodes = select(graph, name=("autograd::*", "torch::autograd::*"))
    works = select(graph, name="*AccumulateGrad*") | (select(graph, name="*::*") & ~aten & ~nodes)
    return np.asarray(body & ~works & (python | (operator & (~aten | select(graph, name=_VIEWS)))))


def _numbers(graph: TaskGraph, rows: Mask) -> Float64:
    """Return elements of the first tensor that each of these operators is given; 0 where that was not recorded."""
    texts = (graph.shapes[at] if at >= 0 else "[[], [], []]" for at in graph.shape[rows].tolist())
    return np.array([prod(next(tensors(decode_shapes(each)), ((0,), 4))[0]) for each in texts], dtype=np.float64)


_HOLES = Prior(
    1.0,
    0.1,
    1.0,
    why="the recording does not show what the host does in them; what belongs to the model may become faster",
)
_SLOWER = {
    "random_ns": Prior(
        20.0,
        5.0,
        40.0,
        unit="ns",
        why="ten rounds of Philox for every number: 5 where the C++ compiler makes vectors of them, 35 where not, and "
        "more beside look-ups",
    ),
    "pools": Prior(
        3.0,
        1.0,
        6.0,
        why="generated loops compare places of a window one by one: 1.8 times as long in a tiny VGG, whose step is "
        "longer by as much as 3 times would say",
    ),
}
_ON_CPU = {
    "matrix": Prior(1.0, 0.8, 1.3, why="the same library; attention may be taken apart"),
    "conv": Prior(
        0.85,
        0.6,
        1.15,
        why="the compiler puts channels of images last on processors: whole steps of four convolution networks came "
        "to 0.66 to 0.88 of those in the usual layout, layers of many channels gain nothing",
    ),
    "rest": Prior(0.35, 0.1, 0.9, why="data stays in registers; arithmetic remains"),
    "longest": Prior(
        1.05,
        0.8,
        1.5,
        why="generated loops against the library's; measured on processors: steps 0.9 to 1.09 times as long",
    ),
}
_ON_DEVICE = {
    "rest": Prior(0.15, 0.0, 0.5, why="data stays in registers"),
    "longest": Prior(1.0, 0.8, 1.2, why="generated kernels stream as fast as the library's"),
}
