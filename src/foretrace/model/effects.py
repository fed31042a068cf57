"""What calls take in a step beyond what they take alone, again and again: constants of a machine, and where they count.

- Code: between two calls of an operator others ran, and what they touched drove its instructions out of the caches;
  so it did with what all calls share (the dispatcher, autograd, Python) if the call just before touched much.
- Data: how much of a call's time from afar it takes by how long ago its data was used (`memory.reuse`).
- Values: roots of exact zeros, which the state of an optimizer holds for rows of a table that no batch has used yet;
  products with denormal numbers, which exponentials make.
- Layout: a product of few rows takes longer with its second operand transposed, as layers keep their weights.
- Memory: what the allocator gave back to the system is faulted in again.

Each constant is measured in a second, on small calls between which a known number of bytes is gone over; no model
takes part. They are stored among the times of operators.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from foretrace.cost.calls import Calls, Family, Float64
from foretrace.cost.operators.operator import Operator
from foretrace.cost.operators.work_terms import NAMES, amounts
from foretrace.model.host_chains import network
from foretrace.model.memory.reuse import KEPT_BYTES, Reuse
from foretrace.model.operator_graph import BEFORE, EXPONENTIALS, SOFTMAXES, OperatorGraph, Role

if TYPE_CHECKING:
    import torch

MEASURING_S = 6.0  # what `measured` takes at most, about
SIZES = tuple(each << 20 for each in (1, 2, 4, 8, 16, 32, 64))  # bytes gone over between two calls
KINDS = ("view", "plain", "rows", "product", "convolution")
_KIND_OF = {
    Family.NONE: "view", Family.GEMM: "product", Family.ATTENTION: "product", Family.RECURRENT: "product",
    Family.CONV: "convolution", Family.NORM: "rows", Family.SOFTMAX: "rows", Family.REDUCTION: "rows",
    Family.POOL: "rows",
}  # fmt: skip
_PIECE = 256 << 10  # bytes that a call goes over where many drive code out
_FRAMEWORK_AT = (4 << 20, 16 << 20)
_LAYER = {"view": 2, "product": 2, "plain": 2, "rows": 1}  # operators that a layer's two passes call first
_ROWS = (4, 16, 64, 256)  # of a product with a matrix of 512 x 1024
_NARROW, _WIDE, _NARROW_ROWS = 128, 1024, (*_ROWS, 1024)  # with one of 512 x 128 more rows are few
_TURNS, _REPEATS = 3, 5
_ELEMENTS = 1 << 18  # whose roots are taken
_TINY_ROWS, _TINY_EVERY = 64, 16  # of a product of which one number in so many is denormal
_LANES = 16  # numbers of a vector
_NEVER_KEPT = 32 << 20  # bytes: glibc maps larger blocks and gives them back whatever it was told
_TRIMMED = 128 << 10  # bytes free at the end of its heap that it gives back, while it has freed none that is larger
_KEEPING = frozenset(["MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
_WORD = "foretrace.model.effects:"
_ROWS_OF_PRODUCT, _NARROW_PRODUCT = "product of rows", "narrow product of rows"


def is_effect(key: str) -> bool:
    """Return whether a stored time is one of these, not of an operator."""
    return key.startswith(_WORD)


_Arm = tuple[str, Callable[[], object], Sequence["torch.Tensor"]]


def _key(what: str, size: int = 0) -> str:
    return Operator.of(_WORD + what, [[]], ["Scalar"], [str(size)]).key


def measured(progress: Callable[[float], None] | None = None) -> dict[str, float]:
    """Return seconds by key: the middle of some in a row, and of several turns the least: others that use the machine
    only make it slower.
    """
    import torch

    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    big = torch.zeros(SIZES[-1] // 4)
    pieces = list(big.split(_PIECE // 4))
    found: dict[str, float] = {}
    with torch.no_grad():
        arms = list(_arms(big, pieces))
        for turn in range(_TURNS):
            for i, (key, run, prepare) in enumerate(arms):
                taken = []
                for _ in range(_REPEATS):
                    for each in prepare:
                        each.add_(1.0)
                    clock()  # its own code, too, was driven out
                    begin = clock()
                    inside = run()
                    taken.append(clock() - begin - (inside if isinstance(inside, float) else 0.0))
                found[key] = min(float(np.median(taken)), found.get(key, np.inf))
                if progress is not None:
                    progress((turn + (i + 1) / len(arms)) / _TURNS)
    return {key: max(value, 1e-9) for key, value in found.items()}


def _arms(big: torch.Tensor, pieces: Sequence[torch.Tensor]) -> Iterator[_Arm]:
    """Yield key, what to time, and what is gone over before."""
    import torch

    for kind, call in _calls().items():
        yield _key(kind), call, ()
        for size in SIZES:
            yield _key(kind, size), call, pieces[: size // _PIECE]
            yield _key(f"{kind} at once", size), call, (big[: size // 4],)
    one, two, three = (torch.ones(3 << 15) for _ in range(3))  # together more than a first-level cache, less than more
    for size in (0, *SIZES):
        yield _key("data", size), lambda: torch.add(one, two, out=three), pieces[: size // _PIECE]
    for size in (0, *_FRAMEWORK_AT):
        yield _key("layers", size), _layers((big[: size // 4],) if size else ()), ()
    for what, rows, n in ((_ROWS_OF_PRODUCT, _ROWS, _WIDE), (_NARROW_PRODUCT, _NARROW_ROWS, _NARROW)):
        for m in rows:
            left, right, turned = torch.rand(m, 512), torch.rand(512, n), torch.rand(n, 512).t()
            yield _key(what, m), partial(torch.mm, left, right), ()
            yield _key(f"{what}, transposed", m), partial(torch.mm, left, turned), ()
    for what, value in (("product", 0.5), ("product of denormals", 1e-40)):
        left, right = torch.rand(_TINY_ROWS, 256), torch.rand(256, 256)
        left[:, ::_TINY_EVERY] = value
        yield _key(what, 256), partial(torch.mm, left, right), ()
    zeros, ones = torch.zeros(_ELEMENTS), torch.rand(_ELEMENTS) + 0.5
    yield _key("roots of zeros"), lambda: torch.sqrt(zeros), ()
    yield _key("roots"), lambda: torch.sqrt(ones), ()
    block: list[torch.Tensor] = []
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def fault() -> float:
        begin = clock()
        block.clear()
        big.add_(1.0)  # what was given back is in no cache when the system gives it again
        spent = clock() - begin
        pages = mmap.mmap(-1, _NEVER_KEPT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)  # as an allocator gets them
        block.append(torch.frombuffer(pages, dtype=torch.float32).fill_(1.0))
        return spent

    yield _key("new memory"), fault, ()
    yield _key("memory"), lambda: block[0].fill_(1.0), (big,)


def _calls() -> dict[str, Callable[[], object]]:
    import torch

    small, image, weight = torch.rand(16, 16), torch.rand(1, 8, 8, 8), torch.rand(8, 8, 3, 3)
    return {
        "view": small.t,
        "plain": lambda: torch.mul(small, small),
        "rows": lambda: torch.layer_norm(small, [16]),
        "product": lambda: torch.mm(small, small),
        "convolution": lambda: torch.conv2d(image, weight, padding=1),
    }


def _layers(between: Sequence[torch.Tensor]) -> Callable[[], float]:
    """Run a small network forward and backward, its layers apart by this; yields what that took."""
    import torch

    training = network("linear")
    batch, spent = next(iter(training.loader)), [0.0]
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def pause(*_: object) -> None:
        begin = clock()
        with torch.no_grad():
            for each in between:
                each.add_(1.0)
        clock()
        spent[0] += clock() - begin

    def after(module: object, given: object, out: torch.Tensor) -> None:
        out.register_hook(pause)

    for i, layer in enumerate(training.model.children()):
        if i % 2:
            layer.register_forward_hook(after)
        else:
            layer.register_forward_pre_hook(pause)

    def run() -> float:
        spent[0] = 0.0
        with torch.enable_grad():
            training.backward(training.forward(batch))
        for weight in training.model.parameters():
            weight.grad = None
        return spent[0]

    return run


@dataclass(frozen=True, kw_only=True, eq=False)
class StepEffects:
    """The constants of a machine."""

    code: Mapping[str, Float64]  # by kind: seconds beyond a call's own, by SIZES gone over since the last one
    shared: Float64  # of what all calls share, by SIZES that the call before touched
    far: Float64  # share of data that is in no cache of the core, by SIZES
    framework: float  # times that the code of a call is, with Python and autograd
    turned: Float64  # times that a product takes with its second operand transposed, by _ROWS
    turned_narrow: Float64  # by _NARROW_ROWS, with few columns
    root_s: float  # of an exact zero, beyond that of another number
    denormal_s: float  # of a vector with a denormal number, beyond one without
    fault_s: float  # per byte that the allocator gets from the system

    @classmethod
    def of(cls, seconds: Mapping[str, float]) -> StepEffects | None:
        """Make it from stored times; None where they were not measured."""
        if _key(_ROWS_OF_PRODUCT, _ROWS[0]) not in seconds:
            return None

        def row(what: str, hot: str) -> Float64:
            taken = [seconds[_key(what, each)] - seconds[_key(hot)] for each in SIZES]
            return np.maximum.accumulate(np.maximum(taken, 0.0))

        code = {kind: row(kind, kind) for kind in KINDS}
        once = {kind: row(f"{kind} at once", kind) for kind in KINDS}
        shared = np.maximum.accumulate(np.maximum(np.median([once[each] - code[each] for each in KINDS], axis=0), 0.0))
        data = np.maximum.accumulate(np.maximum(row("data", "data") - code["plain"], 0.0))
        far = data / data[-1] if data[-1] > 0 else np.array([float(each > KEPT_BYTES) for each in SIZES])
        factors = []
        for size in _FRAMEWORK_AT:
            at = SIZES.index(size)
            direct = sum(times * code[kind][at] for kind, times in _LAYER.items()) + 2 * shared[at]
            more = (seconds[_key("layers", size)] - seconds[_key("layers")]) / 8
            factors.append(more / max(direct, 1e-9))

        def turned(what: str, rows: Sequence[int]) -> Float64:
            return np.maximum([seconds[_key(f"{what}, transposed", m)] / seconds[_key(what, m)] for m in rows], 1.0)

        wide = turned(_ROWS_OF_PRODUCT, _ROWS)
        timed = _key(_NARROW_PRODUCT, _NARROW_ROWS[0]) in seconds
        plain, tiny = (seconds.get(_key(what, 256), 0.0) for what in ("product", "product of denormals"))
        return cls(
            code=code, shared=shared, far=far, turned=wide,
            turned_narrow=turned(_NARROW_PRODUCT, _NARROW_ROWS) if timed else np.append(wide, wide[-1]),
            framework=float(np.clip(np.mean(factors), 1.0, 4.0)),
            root_s=max(seconds[_key("roots of zeros")] - seconds[_key("roots")], 0.0) / _ELEMENTS,
            denormal_s=max(tiny - plain, 0.0) * _TINY_EVERY / (_TINY_ROWS * 256**2 / _LANES),
            fault_s=max(seconds[_key("new memory")] - seconds[_key("memory")], 0.0) / _NEVER_KEPT,
        )  # fmt: skip

    def without_faults(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return times of operators without getting memory for large results, which is counted apart in a step."""
        found = dict(seconds)
        for key in seconds:
            if mapped := _mapped(key.removeprefix("near ")):
                found[key] = max(found[key] - self.fault_s * mapped, 0.1 * found[key])
        return found

    def far_share(self, since: Float64) -> Float64:
        """Return the far share of data between whose uses so many bytes of others were touched."""
        return _between(since, self.far)

    def turning(self, graph: OperatorGraph) -> Float64:
        """Return of every product how much longer it takes for a transposed second operand, as a share (n)."""
        m, n = (np.log(np.maximum(each, 1.0)) for each in (graph.calls.m, graph.calls.n))
        wide, narrow = (
            np.interp(m, np.log(rows), times - 1.0)
            for rows, times in ((_ROWS, self.turned), (_NARROW_ROWS, self.turned_narrow))
        )
        more = narrow + (wide - narrow) * np.interp(n, np.log((_NARROW, _WIDE)), (0.0, 1.0))
        return np.asarray(more * [node.op in _PRODUCTS and _is_turned(graph, node.inputs[-1]) for node in graph.nodes])

    def beyond(self, graph: OperatorGraph, lies: Reuse, timed: Container[str] = ()) -> Float64:
        """Return seconds of every call of a step beyond what it takes alone, or took where it was `timed` (n)."""
        keys = [f"{node.op} {node.text}" for node in graph.nodes]
        counted = {i for i, key in enumerate(keys) if key in timed and not _mapped(key)}
        found = self.framework * _between(lies.before, self.shared)
        family = graph.calls.family
        for kind, curve in self.code.items():
            at = np.array([_KIND_OF.get(Family(each), "plain") == kind for each in family.tolist()], dtype=bool)
            # Most code of a convolution is its own, compiled for its sizes; what surrounds it is like that of others.
            around = self.code["plain"] if kind == "convolution" else curve
            found[at] += _between(lies.code[at], curve + (self.framework - 1.0) * around)
        found += self.root_s * zeros(graph) + self.denormal_s * np.nan_to_num(denormals(graph))
        return np.asarray(found + self.fault_s * faulted(graph, counted))


_PRODUCTS = frozenset(f"aten::{each}" for each in ("mm", "addmm", "addmm_"))


def _is_turned(graph: OperatorGraph, tensor: int) -> bool:
    """Return whether views have transposed a tensor since something wrote it."""
    found, at = False, int(graph.producer[tensor])
    while at >= 0 and graph.calls.family[at] == Family.NONE and graph.nodes[at].inputs:
        found ^= graph.nodes[at].op in ("aten::t", "aten::transpose")
        at = int(graph.producer[graph.nodes[at].inputs[0]])
    return found


def _mapped(key: str) -> float:
    """Return bytes of a call's results if they are so large that they are mapped, as far as its inputs tell."""
    name, _, text = key.partition(" ")
    written = float(Calls.of([(name, text)]).written_bytes[0]) if name.startswith("aten::") else 0.0
    return written if written > _NEVER_KEPT else 0.0


def _between(nbytes: Float64, curve: Float64) -> Float64:
    """Return a curve over SIZES that begins at nothing."""
    return np.asarray(np.interp(nbytes, (0, *SIZES), (0.0, *curve)))


def zeros(graph: OperatorGraph) -> Float64:
    """Return of every call how many elements whose root it takes are exactly zero in the first steps of a training (n).

    The second moment of a row that no batch has used is zero. A table has such rows if it is only looked up.
    """
    calls, found = graph.calls, np.zeros(len(graph))
    used: dict[int, set[int]] = {}
    for i, node in enumerate(graph.nodes):
        for each in node.inputs if calls.family[i] in _READING else ():
            used.setdefault(graph.tensors[each].storage, set()).add(int(calls.family[i]))
    rows: dict[str, float] = {}
    for i, node in enumerate(graph.nodes):
        if calls.family[i] == Family.LOOKUP and len(node.inputs) > 1:
            table, index = graph.tensors[node.inputs[0]], graph.tensors[node.inputs[1]]
            weight = graph.storages[table.storage].role == Role.WEIGHT
            if weight and table.dims and used[table.storage] == {int(Family.LOOKUP)}:
                untouched = (1 - 1 / max(table.dims[0], 1)) ** np.prod(index.dims)
                name = graph.storages[table.storage].name
                rows[name] = min(float(untouched), rows.get(name, 1.0))
        elif node.op.startswith("aten::sqrt") and node.inputs:
            state = graph.tensors[node.inputs[0]]
            kept = graph.storages[state.storage]
            if kept.role == Role.OPTIMIZER:
                found[i] = rows.get(kept.name.rpartition(".")[0], 0.0) * np.prod(state.dims)
    return found


def denormals(graph: OperatorGraph) -> Float64:
    """Return how many vectors with a denormal number a call works on; NaN for a product of which nobody knows (n).

    Exponentials make such numbers, and softmaxes of masked scores. Where the example batch alone says what one makes,
    others like it make as many. Products read each number once for every vector of results.
    """
    family, found = graph.calls.family, np.zeros(len(graph))
    work = amounts(graph.calls).terms[:, NAMES.index("padded")] / (2 * _LANES)
    like: dict[str, list[float]] = {}
    for i, share in graph.denormal.items():
        if graph.nodes[i].op in EXPONENTIALS:
            like.setdefault(graph.nodes[i].text, []).append(share)
    carried: dict[int, float] = {}
    for i, node in enumerate(graph.nodes):
        read = [carried[each] for each in node.inputs if each in carried]
        share = graph.denormal.get(i, float(np.max(read)) if read else 0.0)  # NaN if one is
        if node.op in EXPONENTIALS:
            share = graph.denormal.get(i, float(np.mean(like.get(node.text, np.nan))))
            found[i] = np.nan_to_num(share) * np.prod(graph.tensors[node.outputs[0]].dims)
        elif family[i] in (Family.GEMM, Family.CONV):
            found[i] = share * work[i]
        elif family[i] in _SLOWED:
            softmax = node.op in SOFTMAXES
            share = graph.denormal.get(i, 0.0) if softmax else share
            times = _SLOWED[Family.SOFTMAX if softmax else family[i]]
            found[i] = times * np.nan_to_num(share) * np.prod(graph.tensors[node.outputs[0]].dims) / _LANES
        if node.op in EXPONENTIALS | SOFTMAXES or (read and family[i] in _PASSING and not node.op.endswith("_like")):
            carried |= dict.fromkeys(node.outputs, share)
    return found


# A vector with denormal numbers takes so many times what it takes longer in a product: in rows of 36 to 96 numbers 1.1
# to 6 times in softmaxes, which a mask by columns slows most, 0.9 to 4 in others.
_SLOWED = {Family.ELEMENTWISE: 2.0, Family.SOFTMAX: 3.0}
_PASSING = (Family.ELEMENTWISE, Family.MOVE, Family.NONE)
_READING = (Family.LOOKUP, Family.GEMM, Family.CONV, Family.NORM)


def faulted(graph: OperatorGraph, counted: Container[int] = ()) -> Float64:
    """Return of every call bytes of its results that the allocator has to get from the system (n).

    glibc's: blocks beyond a limit are mapped each time. The others lie on a heap, whose end is given back where more
    than a threshold of it is free; that follows the largest block freed, unless the environment sets it. The heap is
    taken to be as long as what lies on it. Times of the calls `counted` hold what is mapped for them.
    """
    found = np.zeros(len(graph))
    changes: list[tuple[int, int, int]] = []
    largest = 0
    for each in graph.storages:
        if each.born == BEFORE:
            continue
        if each.nbytes > _NEVER_KEPT:
            found[each.born] += each.nbytes * (each.born not in counted)
        else:
            largest = max(largest, each.nbytes)
            changes += [(each.born, 1, each.nbytes), (min(each.dies, len(graph) - 1), 2, -each.nbytes)]
    if _KEEPING & set(os.environ):
        return found
    length = used = 0
    for later in (False, True):  # the second step is like all that follow
        for node, _, more in sorted(changes):
            used += more
            if used > length:
                found[node] += (used - length) * later
                length = used
            elif length - used > max(2 * largest, _TRIMMED):
                length = used
    return found
