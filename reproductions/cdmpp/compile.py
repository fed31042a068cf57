"""A tensor program as machine code of this processor, run and timed.

The code is made by llvmlite, the compiler that numba brings along, so no C compiler is needed and a program costs
about 10 to 50 ms. Loops are not vectorised, unrolled or interchanged by the compiler: what the schedule says is what
runs. A program is compiled for a setting: "native" is this processor with all that it can, "baseline" the oldest one
of its architecture (on x86-64: 128-bit vectors, no fused multiply-add), which the same machine runs as well.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.errors import ForetraceError
from reproductions.cdmpp.emit import extents, module_text, parameters
from reproductions.cdmpp.program import Kind, Loop, Role, TensorProgram

SETTINGS = ("native", "baseline")
_ALIGNED_BYTES = 64
Array = NDArray[Any]


class Compiled:
    """A program in machine code. Keep it as long as what it was bound to is used."""

    def __init__(self, program: TensorProgram, setting: str = "native") -> None:
        self.program, self.setting = program, setting
        self.names = parameters(program)
        self._engine = _engine(module_text(program, opaque_pointers=_opaque()), setting)
        pointers = [ctypes.c_void_p] * len(self.names)
        nest_type = ctypes.CFUNCTYPE(None, *pointers, ctypes.c_int64, ctypes.c_int64)
        self._nests = [nest_type(self._engine.get_function_address(f"nest{i}")) for i in range(len(program.nests))]
        self._repeat = ctypes.CFUNCTYPE(None, *pointers, ctypes.c_int64)(self._engine.get_function_address("repeat"))

    def bind(self, inputs: Mapping[str, Array]) -> Bound:
        """The program on these inputs. Raises ForetraceError where one is missing or has another shape."""
        return Bound(self, inputs)

    def run(self, inputs: Mapping[str, Array], threads: int = 1) -> Array:
        """The program's output."""
        bound = self.bind(inputs)
        bound.run(threads)
        return bound.output


class Bound:
    """A compiled program with its buffers."""

    def __init__(self, compiled: Compiled, inputs: Mapping[str, Array]) -> None:
        program = compiled.program
        self.compiled = compiled
        self.arrays: dict[str, Array] = {}
        for buffer in program.having(Role.INPUT, Role.OUTPUT, Role.TEMPORARY):
            array = self.arrays[buffer.name] = _aligned(buffer.shape, program.dtype)
            if buffer.role is not Role.INPUT:
                array.fill(np.nan)  # what is not written shows
                continue
            given = inputs.get(buffer.name)
            if given is None or given.shape != buffer.shape:
                found = "nothing" if given is None else f"the shape {list(given.shape)}"
                raise ForetraceError(
                    f"{program.task} takes {buffer.name} of shape {list(buffer.shape)} but was given {found}; mend it."
                )
            array[...] = given
        self._pointers = [self.arrays[name].ctypes.data for name in compiled.names]

    @property
    def output(self) -> Array:
        return next(self.arrays[each.name] for each in self.compiled.program.having(Role.OUTPUT))

    def run(self, threads: int = 1) -> None:
        """Once; parallel loops are shared among `threads`."""
        program = self.compiled.program
        for function, nest, extent in zip(self.compiled._nests, program.nests, extents(program), strict=True):
            if threads > 1 and isinstance(nest, Loop) and nest.kind is Kind.PARALLEL:
                cuts = np.linspace(0, extent, min(threads, extent) + 1).astype(int).tolist()
                with ThreadPoolExecutor(threads) as pool:
                    list(pool.map(lambda a, b, f=function: f(*self._pointers, a, b), cuts[:-1], cuts[1:]))
            else:
                function(*self._pointers, 0, extent)

    def seconds(self, repetitions: int) -> float:
        """Processor time of one run in seconds, over so many runs in a row by one thread: data is where the run
        before left it.
        """
        start = time.thread_time_ns()
        self.compiled._repeat(*self._pointers, repetitions)
        return (time.thread_time_ns() - start) / 1e9 / repetitions


def _aligned(shape: tuple[int, ...], dtype: str) -> Array:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + _ALIGNED_BYTES, np.uint8)
    start = -memory.ctypes.data % _ALIGNED_BYTES
    return memory[start : start + size].view(dtype).reshape(shape)


@cache
def _llvm() -> Any:
    import llvmlite.binding as llvm  # type: ignore[import-untyped]

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


def _opaque() -> bool:
    return bool(_llvm().llvm_version_info[0] >= 16)


def _optimised(text: str, setting: str) -> tuple[Any, Any]:
    """An LLVM module, cleaned up but with its loops as they are, and the machine that it is for."""
    llvm = _llvm()
    if setting not in SETTINGS:
        raise ForetraceError(f"setting {setting!r} is unknown; take one of {list(SETTINGS)}.")
    target = llvm.Target.from_default_triple()
    baseline = "x86-64" if llvm.get_default_triple().startswith("x86_64") else "generic"
    cpu, features = baseline, ""
    if setting == "native":
        cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    machine = target.create_target_machine(cpu=cpu, features=features, opt=3)
    module = llvm.parse_assembly(text)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = options.loop_interleaving = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return module, machine


def _engine(text: str, setting: str) -> Any:
    """Machine code of an LLVM module."""
    module, machine = _optimised(text, setting)
    engine = _llvm().create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


def machine_code(program: TensorProgram, setting: str = "native") -> str:
    """The assembly listing, to look at."""
    module, machine = _optimised(module_text(program, opaque_pointers=_opaque()), setting)
    return str(machine.emit_assembly(module))
