"""What `torch.compile` generated for a processor: every kernel timed within the real step, and what else the step is.

Four kinds of steps run in turns. *Plain* steps are the truth, *eager* ones are those without the compiler. In *timed*
ones a clock stands around every call of the generated modules, to fused kernels and to library ones: each is seen with
the caches that the program leaves it and with the pages that its results touch first. In *hollow* ones these calls only
empty the caches, which is not counted, and earlier results stand in, which leaves the framework: guards, autograd, the
loss. The optimizer is taken from timed steps. What none of them holds, giving pages back, is counted by page
faults and the price of one. Kernels + framework + pages is held against the plain step.
"""

from __future__ import annotations

import mmap
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.techniques.compute.compiled import compiler

if TYPE_CHECKING:
    from foretrace.training.training import Training

_WARM_UP = 3
_LIBRARY = ("extern_kernels", "aten", "torch")
_PAGES = 4096  # that are touched to price one
_OTHERS = np.ones(16 << 20, dtype=np.uint8)  # more than the caches of a core hold; written, so in pages of its own


@dataclass(frozen=True, kw_only=True)
class GeneratedKernel:
    """One kernel of a step: its median time, calls and page faults in a step."""

    name: str
    fused: bool  # generated; otherwise of a library
    calls: int
    time_s: float
    page_faults: float


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A compiled training step and its parts, seconds; medians over `steps` of each kind, in turns."""

    kernels: tuple[GeneratedKernel, ...]
    step_s: float
    low_s: float  # 10 and 90 % of plain steps
    high_s: float
    eager_s: float  # without the compiler
    framework_s: float
    pages_s: float
    compile_s: float
    steps: int
    threads: int
    modules: tuple[str, ...]

    @property
    def kernels_s(self) -> float:
        return sum(each.time_s for each in self.kernels)

    @property
    def sum_s(self) -> float:
        """The step as its parts say."""
        return self.kernels_s + self.framework_s + self.pages_s


@dataclass
class _Watch:
    """What the calls of generated modules do: "plain", "timed", "kept" or "hollow".

    Results are kept by a step of their own: one that is timed gives memory back as it always does.
    """

    mode: str = "plain"
    place: int = 0  # in the step
    names: list[tuple[str, bool]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)  # of calls and of allocations, in order
    updates_s: float = 0.0  # of the optimizers in the step
    emptying_s: float = 0.0  # of the step: caches were emptied meanwhile
    clock: Callable[[], int] = time.perf_counter_ns

    def kernel(self, name: str, fused: bool, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call that computes."""

        def called(*given: Any, **named: Any) -> Any:
            if self.mode == "plain":
                return function(*given, **named)
            if self.mode == "hollow":
                self.empty_caches((*given, *named.values()))
                return self.earlier()
            if self.mode == "kept":
                self.results.append(function(*given, **named))
                return self.results[-1]
            faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            begin = self.clock()
            result = function(*given, **named)
            self.seconds.append((self.clock() - begin) / 1e9)
            self.faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - faults)
            self.names.append((name, fused))
            return result

        return called

    def allocation(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call that makes an empty tensor."""

        def called(*given: Any, **named: Any) -> Any:
            if self.mode == "hollow":
                return self.earlier()
            result = function(*given, **named)
            if self.mode == "kept":
                self.results.append(result)
            return result

        return called

    def empty_caches(self, given: Sequence[Any]) -> None:
        """Read as many bytes as a call would touch, so that what comes next finds the caches as behind it."""
        begin = self.clock()
        nbytes = sum(each.nbytes for each in given if hasattr(each, "nbytes"))
        _OTHERS[: min(nbytes, _OTHERS.nbytes)].max(initial=0)
        self.emptying_s += (self.clock() - begin) / 1e9

    def earlier(self) -> Any:
        """Return what the same call gave in the last step that was kept."""
        result = self.results[self.place]
        self.place += 1
        return _detached(result)

    def start(self, mode: str) -> None:
        self.mode, self.place, self.updates_s, self.emptying_s = mode, 0, 0.0, 0.0
        if mode == "timed":
            self.names, self.seconds, self.faults = [], [], []
        if mode != "hollow":
            self.results = []


def _detached(result: Any) -> Any:
    if isinstance(result, tuple | list):
        return type(result)(map(_detached, result))
    return result.detach() if hasattr(result, "detach") else result


class _Space:
    """A namespace of library functions whose calls are watched."""

    def __init__(self, inner: Any, watch: _Watch, path: str) -> None:
        self._inner, self._watch, self._path = inner, watch, path

    def __getattr__(self, name: str) -> Any:
        import torch

        found, path = getattr(self._inner, name), f"{self._path}.{name}".removeprefix("torch.ops.")
        if isinstance(found, torch._ops.OpOverload) or (self._path == "extern_kernels" and callable(found)):
            found = self._watch.kernel(path.removesuffix(".default"), False, found)
        elif isinstance(found, torch._ops.OpOverloadPacket | torch._ops._OpNamespace | torch._ops._Ops):
            found = _Space(found, self._watch, path if path != "torch.ops" else "torch.ops")
        else:
            return found
        setattr(self, name, found)
        return found


def step_kernels(
    training: Training, *, seconds: float = 20.0, mode: str = "default", tell: Callable[[float], None] | None = None
) -> CompiledStep:
    """Compile the model of a training, and time its step and every kernel in it for so long.

    Raises ForetraceError where no C++ compiler is, where the step is a function of its own, or where the compiler made
    no kernel.
    """
    import torch

    if compiler() is None:
        raise ForetraceError("torch.compile needs a C++ compiler on a processor; install g++, or name one by CXX.")
    if training.run is not None:
        raise ForetraceError(f"{training.name} has a step function of its own, which calls parts of the model itself.")
    training.model.train()
    made = training.compiled(mode)
    batch = next(iter(made.batches()), None)
    if batch is None:
        raise ForetraceError(f"the loader of {training.name} gives no batch; give it at least one batch of samples.")
    before, begin = set(map(id, _generated())), time.perf_counter()
    made.step(batch)
    compiled_s = time.perf_counter() - begin
    for _ in range(_WARM_UP):
        made.step(batch)
    modules = [each for each in _generated() if id(each) not in before]
    watch = _Watch()
    plain, eager, hollow, updates = list[float](), list[float](), list[float](), list[float]()
    timed: list[tuple[list[tuple[str, bool]], list[float], list[int]]] = []
    with _watched(modules, watch), _updates(training, watch):
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(plain) < 3:
            # A step that is not timed comes first: the results that hollow ones kept have been given back.
            for kind, into in (
                ("eager", None), ("eager", eager), ("plain", None), ("plain", plain), ("timed", None), ("kept", None),
                ("hollow", hollow),
            ):  # fmt: skip
                watch.start(kind)
                compiled_call = training.model._compiled_call_impl
                if kind == "eager":  # both trainings have the same model; a call of it goes to what is set here
                    training.model._compiled_call_impl = None
                begin = time.perf_counter()
                (training if kind == "eager" else made).step(batch)
                taken = time.perf_counter() - begin
                training.model._compiled_call_impl = compiled_call
                if kind == "timed":
                    updates.append(watch.updates_s)
                if into is not None:
                    into.append(taken - (watch.updates_s if kind == "hollow" else 0.0) - watch.emptying_s)
            timed.append((watch.names, watch.seconds, watch.faults))
            if tell is not None:
                tell(min(1.0, 1 - (end - time.perf_counter()) / seconds))
    if not timed[-1][0]:
        raise ForetraceError(f"torch.compile made no kernel of {training.name}; it runs as it is written.")
    same = [each for each in timed if each[0] == timed[-1][0]]
    times, faults = (np.median([each[i] for each in same], axis=0) for i in (1, 2))
    low, step, high = np.quantile(plain, [0.1, 0.5, 0.9]).tolist()
    return CompiledStep(
        kernels=_kernels(timed[-1][0], times.tolist(), faults.tolist()), step_s=step, low_s=low, high_s=high,
        eager_s=float(np.median(eager)), framework_s=float(np.median(hollow) + np.median(updates)),
        pages_s=float(faults.sum()) * page_s(), compile_s=compiled_s,
        steps=len(plain), threads=torch.get_num_threads(), modules=tuple(str(each.__file__) for each in modules),
    )  # fmt: skip


def page_s() -> float:
    """Return seconds to give a page back to the system, measured: what a step pays for each one beside the fault
    itself.
    """
    found = []
    for _ in range(5):
        memory = mmap.mmap(-1, _PAGES * mmap.PAGESIZE)
        for place in range(0, len(memory), mmap.PAGESIZE):
            memory[place] = 1
        begin = time.perf_counter()
        memory.close()
        found.append((time.perf_counter() - begin) / _PAGES)
    return float(np.median(found))


def _kernels(
    names: Sequence[tuple[str, bool]], times: Sequence[float], faults: Sequence[float]
) -> tuple[GeneratedKernel, ...]:
    """Return one row per name, in program order."""
    rows = []
    for name, fused in dict.fromkeys(names):
        at = [i for i, each in enumerate(names) if each == (name, fused)]
        rows.append(
            GeneratedKernel(
                name=name, fused=fused, calls=len(at), time_s=sum(times[i] for i in at),
                page_faults=sum(faults[i] for i in at),
            )
        )  # fmt: skip
    return tuple(rows)


def _generated() -> list[ModuleType]:
    """Return the modules that the compiler wrote and this process loaded."""
    from torch._inductor.codecache import PyCodeCache

    return [each for each in PyCodeCache.modules if hasattr(each, "call")]


@contextmanager
def _updates(training: Training, watch: _Watch) -> Iterator[None]:
    """Add the time of optimizers to the step meanwhile."""
    begun = 0

    def before(*_: Any) -> None:
        nonlocal begun
        begun = watch.clock()

    def after(*_: Any) -> None:
        watch.updates_s += (watch.clock() - begun) / 1e9

    hooks = [hook for each in training.optimizers
             for hook in (each.register_step_pre_hook(before), each.register_step_post_hook(after))]  # fmt: skip
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _watched(modules: Sequence[ModuleType], watch: _Watch) -> Iterator[None]:
    """Send their calls through `watch` meanwhile."""
    kept = [dict(vars(each)) for each in modules]
    try:
        for module in modules:
            names = vars(module)
            for name, value in list(names.items()):
                if name.startswith("cpp_") and callable(value):
                    names[name] = watch.kernel(name, True, value)
                elif name.startswith("empty_strided"):
                    names[name] = watch.allocation(value)
                elif name in _LIBRARY:
                    names[name] = _Space(value, watch, "torch.ops.aten" if name == "aten" else name)
        yield
    finally:
        for module, before in zip(modules, kept, strict=True):
            vars(module).update(before)
