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
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretrace.cost.programs.emit import module, parameters
from foretrace.cost.programs.program import Purpose, TensorProgram

SETTINGS = ("native", "baseline")
PAGE_BYTES, OFFSET_BYTES = 4096, 64
Array = NDArray[Any]


class CompiledProgram:
    """A program in machine code. Keep it as long as what it was bound to is used."""

    def __init__(self, program: TensorProgram, setting: str = "native") -> None:
        self.program, self.setting = program, setting
        self.names = parameters(program)
        written = module(program)
        optimised, machine = _optimised(written.text, setting)
        machine.set_asm_verbosity(True)
        self.listing, self.trips = str(machine.emit_assembly(optimised)), written.trips
        self._code = optimised, machine

    @cached_property
    def repeat(self) -> Any:
        """The machine code: a function of the buffers' addresses and of how often to run."""
        self._engine = _llvm().create_mcjit_compiler(*self._code)
        self._engine.finalize_object()
        kinds = [*[ctypes.c_void_p] * len(self.names), ctypes.c_int64]
        return ctypes.CFUNCTYPE(None, *kinds)(self._engine.get_function_address("repeat"))

    def bind(self, inputs: Mapping[str, Array]) -> Bound:
        """Return the program on these inputs."""
        return Bound(self, inputs)

    def run(self, inputs: Mapping[str, Array]) -> Array:
        """Return the program's output."""
        bound = self.bind(inputs)
        bound.run()
        return bound.output


class Bound:
    """A compiled program with its buffers."""

    def __init__(self, compiled: CompiledProgram, inputs: Mapping[str, Array]) -> None:
        program = compiled.program
        self.compiled = compiled
        self.arrays: dict[str, Array] = {}
        for buffer in program.having(Purpose.INPUT, Purpose.OUTPUT, Purpose.TEMPORARY):
            array = self.arrays[buffer.name] = _placed(buffer.shape, program.dtype)
            if buffer.role is not Purpose.INPUT:
                array.fill(np.nan)  # what is not written shows
            else:
                array[...] = inputs[buffer.name]
        self._pointers = [self.arrays[name].ctypes.data for name in compiled.names]

    @property
    def output(self) -> Array:
        return next(self.arrays[each.name] for each in self.compiled.program.having(Purpose.OUTPUT))

    def run(self, repetitions: int = 1) -> float:
        """Run so often in a row on one thread, and return wall-clock seconds of one run. Data is where the run before
        left it.
        """
        start = time.perf_counter_ns()
        self.compiled.repeat(*self._pointers, repetitions)
        return (time.perf_counter_ns() - start) / 1e9 / repetitions


def _placed(shape: tuple[int, ...], dtype: str) -> Array:
    """Return an array that begins as every buffer of a program does, so that sets of caches are shared as simulated."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 2 * PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES + OFFSET_BYTES
    return memory[start : start + size].view(dtype).reshape(shape)


@cache
def _llvm() -> Any:
    import llvmlite.binding as llvm  # type: ignore[import-untyped]

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


def _optimised(text: str, setting: str) -> tuple[Any, Any]:
    """Return an LLVM module, cleaned up but with its loops as they are, and the machine that it is for."""
    llvm = _llvm()
    target = llvm.Target.from_default_triple()
    baseline = "x86-64" if llvm.get_default_triple().startswith("x86_64") else "generic"
    cpu, features = baseline, ""
    if setting == "native":
        cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    machine = target.create_target_machine(cpu=cpu, features=features, opt=3)
    parsed = llvm.parse_assembly(text)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = options.loop_interleaving = False
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    return parsed, machine
