"""What 16-bit work takes on a processor relative to float32, by what the processor has for it: priors of classes.

Read from `benchmarks/half_on_processor.py` (PyTorch 2.13, one thread of a Xeon with AMX, oneDNN limited to less for the
others): lowest to highest of the sizes of each class. No price is carried to another kind of processor: where nothing
says what a processor can do, there is none.
"""

from __future__ import annotations

from foretrace.graph.taskgraph import TaskGraph
from foretrace.hardware.processor import Sixteen, named, recorded_sets, sixteen_bit, trains_lstm
from foretrace.techniques.base import Prior


def half_prices(graph: TaskGraph, dtype: str) -> dict[str, Prior]:
    """Return priors of `mixed-precision` to `dtype` on the processor of a CPU recording.

    Those of matrix work are missing where the recording does not say what its processor can do.
    """
    sets = recorded_sets(graph.info.recording)
    kind = sixteen_bit(sets, dtype)
    has, table = _WITHOUT_UNITS.get(kind, (named(sets), {}))
    if kind == Sixteen.UNITS and sets is not None and "neon" not in sets:  # ARM was not measured
        table = _FLOAT16 if dtype == "float16" else _AMX if "amx_bf16" in sets else _BFLOAT16
    if table:
        table = {"overhead_us": _OVERHEAD, **table}
    where = f"measured with PyTorch 2 in {dtype} where oneDNN has {has}"
    return {
        name: Prior(value, low, high, unit=unit, why=(where if name in table else _ANYWHERE) + more)
        for name, (low, value, high, unit, more) in {**_ON_ALL, **table}.items()
    }


def lacks_recurrent(graph: TaskGraph, dtype: str) -> str:
    """Return why 16-bit layers of oneDNN's LSTM cannot run where a CPU recording was made; empty if they can, or
    unknown.
    """
    sets = recorded_sets(graph.info.recording)
    if trains_lstm(sets, dtype) is not False:
        return ""
    return f"oneDNN has no LSTM in {dtype} for {named(sets)}, so the changed step would stop with an error"


_Row = tuple[float, float, float, str, str]  # low, value, high, unit, what the sentence adds
_ANYWHERE = "measured with PyTorch 2 on processors of several kinds"
_ON_ALL: dict[str, _Row] = {
    "norm": (0.25, 0.4, 1.0, "×", ": 0.25 to 0.4 forward, 0.9 backward"),
    "elementwise": (0.6, 1.2, 1.9, "×", ": 0.6 (gelu) to 2.3 (products in cache)"),
    "overhead_us": (0.0, 14.0, 40.0, "µs", ": the same at all sizes, so small products lose"),
    "casts": (1.5, 2.0, 3.0, "", ": weight, bias or input forward; gradients backward"),
    "cast_us": (1.5, 2.5, 5.0, "µs", ": 2.3 µs without data"),
}
_OVERHEAD = (8.0, 14.0, 22.0, "µs", ": the same at all sizes, so small products lose")
# Without AMX: 2.1 to 4.2 times faster on an AMD EPYC, half to three quarters as fast on a Xeon whose AMX is not used.
_BFLOAT16: dict[str, _Row] = {
    "gemm": (0.5, 1.6, 4.0, "×", ": 4.2 times faster (AMD EPYC) to 2 times slower (Intel Xeon without its AMX)"),
    "conv": (0.5, 1.2, 2.1, "×", ": 2 times faster (AMD EPYC) to 2 times slower (Intel Xeon without its AMX)"),
    "attention": (0.2, 0.7, 1.5, "×", ": 2 times faster forward, 1.4 to 6 times slower with its backward"),
}
_AMX: dict[str, _Row] = {
    "gemm": (1.7, 3.5, 6.0, "×", ": 1.8 to 6.3 times faster"),
    "conv": (0.8, 1.8, 3.5, "×", ": 0.5 (few channels) to 3.8 times as fast"),
    "attention": (0.25, 0.9, 2.0, "×", ": 2.5 times faster forward, 1.3 to 0.17 times as fast with its backward"),
}
_CONVERTED: dict[str, _Row] = {
    "gemm": (0.15, 0.2, 0.35, "×", ": 3 to 9 times slower"),
    "conv": (0.18, 0.28, 0.7, "×", ": 1.3 to 5 times slower"),
    "attention": (0.15, 0.5, 1.5, "×", ": 2 times faster forward, 2.4 to 7 times slower with its backward"),
}
_FLOAT16: dict[str, _Row] = {
    "gemm": (0.5, 0.9, 1.1, "×", ": 2 times slower to as fast"),
    "conv": (0.005, 0.012, 0.5, "×", ": 1.2 to 3 times slower forward, 24 to 200 times backward"),
    "attention": (0.15, 0.6, 0.9, "×", ": 1.1 to 6 times slower"),
}
_NONE: dict[str, _Row] = {
    "gemm": (0.009, 0.014, 0.06, "×", ": one number after the other, 20 to 120 times slower"),
    "overhead_us": (0.0, 10.0, 40.0, "µs", ": the same at all sizes"),
    "conv": (0.02, 0.05, 0.3, "×", ": 11 to 55 times slower forward, 2 to 24 times backward"),
    "attention": (0.07, 0.3, 1.0, "×", ": as fast forward, 5 to 14 times slower with its backward"),
}
# What the sentence says of such a processor, and its rows.
_WITHOUT_UNITS = {
    Sixteen.CONVERTED: ("AVX-512 without units for it, as on the recorded processor", _CONVERTED),
    Sixteen.NONE: ("no units for it, as on the recorded processor", _NONE),
}
