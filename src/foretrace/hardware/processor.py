"""What a processor can do for a process: the instruction sets that its libraries may use, and its cores.

The hardware offers, the settings of the process take away: oneDNN obeys ONEDNN_MAX_CPU_ISA, a scheduler keeps a process
on some cores, a control group grants it so much of their time. Sixteen-bit products run ten times faster or fifty
times slower than float32 ones by what of this there is, so a time without it says little.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

# Names of instruction sets, and the flags that Linux lists for each (all of them).
_FLAGS = {
    **{name: (name,) for name in ("sse4_1", "avx")},
    "avx2": ("avx2", "fma"),
    **{name: (name,) for name in ("avx_vnni", "avx_ne_convert")},
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq"),
    **{name: (name,) for name in ("avx512_vnni", "avx512_bf16", "avx512_fp16")},
    **{name: ("amx_tile", name) for name in ("amx_int8", "amx_bf16", "amx_fp16")},
    "neon": ("asimd",),
    "neon_fp16": ("asimdhp",),
    "neon_bf16": ("bf16",),
    **{name: (name,) for name in ("sve", "sve2")},
}
# oneDNN developer guide, "CPU Dispatcher Control": what each value of ONEDNN_MAX_CPU_ISA lets it use.
_AVX2 = ("sse4_1", "avx", "avx2")
_AVX512 = (*_AVX2, "avx512")
_BF16 = (*_AVX512, "avx512_vnni", "avx512_bf16")
_FP16 = (*_BF16, "avx512_fp16", "avx_vnni")
_AMX = (*_FP16, "amx_int8", "amx_bf16")
_LIMITS = {
    "SSE41": ("sse4_1",),
    "AVX": ("sse4_1", "avx"),
    "AVX2": _AVX2,
    "AVX2_VNNI": (*_AVX2, "avx_vnni"),
    "AVX2_VNNI_2": (*_AVX2, "avx_vnni", "avx_ne_convert"),
    "AVX512_CORE": _AVX512,
    "AVX512_CORE_VNNI": (*_AVX512, "avx512_vnni"),
    "AVX512_CORE_BF16": _BF16,
    "AVX512_CORE_FP16": _FP16,
    "AVX10_1_512": _FP16,
    "AVX512_CORE_AMX": _AMX,
    "AVX10_1_512_AMX": _AMX,
}
_LIMITING = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # the second is the older name


class Sixteen(StrEnum):
    """How a processor computes products of 16-bit numbers."""

    UNITS = "units"  # instructions of its own for the type
    CONVERTED = "converted"  # as float32 on AVX-512, converted on the way
    NONE = "none"  # one by one: its libraries have nothing for it
    UNKNOWN = "unknown"


def instruction_sets(environment: Mapping[str, str] | None = None) -> tuple[str, ...] | None:
    """Return the instruction sets that libraries of a process with this environment (ours) may use; None if unknown."""
    offered = _offered()
    if offered is None:
        return None
    settings = os.environ if environment is None else environment
    limit = next((settings[name] for name in _LIMITING if settings.get(name)), "").upper()
    allowed = _LIMITS.get(limit, offered)  # oneDNN passes over a value that it does not know
    return tuple(each for each in offered if each in allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caches:
    """(sets, ways) of the first two caches, in lines, and entries of the first translation buffer."""

    first: tuple[int, int] = (64, 8)
    second: tuple[int, int] = (1024, 8)
    pages: int = 64


def caches_here() -> Caches:
    """Return the caches of this processor as Linux tells; those of a usual one where it does not."""
    found: dict[int, tuple[int, int]] = {}
    for place in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind, level, sets, ways = (
                (place / name).read_text(encoding="ascii").strip()
                for name in ("type", "level", "number_of_sets", "ways_of_associativity")
            )
            if kind != "Instruction" and int(sets) > 0 and int(ways) > 0:
                found[int(level)] = (int(sets), int(ways))
        except (OSError, ValueError):
            continue
    return Caches(first=found.get(1, Caches().first), second=found.get(2, Caches().second))


@contextmanager
def operator_threads(number: int | None) -> Iterator[None]:
    """Let PyTorch use so many threads per operator meanwhile; as many as it takes by itself where none is given."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def allowed_cores() -> tuple[int, ...]:
    """Return the numbers of the cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def usable_cores() -> float:
    """Return cores whose time this process can have: by its affinity, and by what its control groups grant."""
    count, quota = float(len(allowed_cores())), cpu_quota()
    return count if quota is None else min(count, quota)


def cpu_quota() -> float | None:
    """Return cores that control groups (version 1, or all levels of version 2) grant, None without a limit."""
    limits = [_quota(text) for text in _quota_files()]
    known = [each for each in limits if each is not None]
    return min(known) if known else None


def recorded_sets(recording: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the instruction sets that a recording (`TaskGraph.info.recording`) says its process had; None: unknown.

    Recordings made before they were kept say what PyTorch's own kernels use; where that is less than AVX-512, the
    processor has no more to offer.
    """
    machine = recording.get("machine") or {}
    told = machine.get("instruction_sets")
    if told is not None:
        return tuple(str(each) for each in told)
    narrow = recording.get("cpu_capability") in ("AVX2", "DEFAULT")
    return _AVX2 if narrow and machine.get("architecture") in ("x86_64", "AMD64") else None


def sixteen_bit(sets: Collection[str] | None, dtype: str) -> Sixteen:
    """Return how a processor with these instruction sets multiplies matrices of `dtype` (bfloat16 or float16)."""
    if sets is None:
        return Sixteen.UNKNOWN
    short = {"bfloat16": "bf16", "float16": "fp16"}[dtype]
    if {f"avx512_{short}", f"amx_{short}", f"neon_{short}"} & set(sets):
        return Sixteen.UNITS
    if "neon" in sets:
        return Sixteen.UNKNOWN
    return Sixteen.CONVERTED if "avx512" in sets and dtype == "bfloat16" else Sixteen.NONE


def trains_lstm(sets: Collection[str] | None, dtype: str) -> bool | None:
    """Return whether oneDNN trains an LSTM of `dtype` (bfloat16 or float16) there: in bfloat16 from AVX-512 on.

    None: unknown. Autocast gives oneDNN such a layer even where it does not, and training stops with an error.
    """
    if sets is None or "neon" in sets:
        return None
    return dtype == "bfloat16" and "avx512" in sets


def named(sets: Collection[str] | None) -> str:
    """Return instruction sets in a few words: the widest that computes, and what it has for 16 bit."""
    if sets is None:
        return "unknown instruction sets"
    widest = next((word for name, word in _WIDEST.items() if name in sets), "no vector instructions")
    extra = [word for name, word in _EXTRA.items() if name in sets]
    return " with ".join([widest, " and ".join(extra)]) if extra else widest


_WIDEST = {
    "avx512": "AVX-512",
    "avx2": "AVX2",
    "avx": "AVX",
    "sse4_1": "SSE4.1",
    "sve2": "SVE2",
    "sve": "SVE",
    "neon": "NEON",
}
_EXTRA = {
    "avx512_bf16": "bfloat16", "neon_bf16": "bfloat16", "avx512_fp16": "float16", "neon_fp16": "float16",
    "amx_bf16": "AMX",
}  # fmt: skip


def _offered() -> tuple[str, ...] | None:
    """Return what the hardware has and the system lets programs use, in the order of _FLAGS; None if unknown."""
    flags = _flags_of_linux() or _flags_of_pytorch()
    return None if flags is None else tuple(name for name, needed in _FLAGS.items() if flags.issuperset(needed))


@cache
def _flags_of_linux() -> frozenset[str] | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    return frozenset(found.group(1).split()) if found else None


def _flags_of_pytorch() -> frozenset[str] | None:
    """Return where the system has no list: as PyTorch tells, if it is loaded and knows."""
    cpu = getattr(sys.modules.get("torch"), "cpu", None)
    if cpu is None or not hasattr(cpu, "get_capabilities"):
        return None
    words = {"fma3": "fma", "avx512_f": "avx512f", "avx512_bw": "avx512bw", "avx512_vl": "avx512vl",
             "avx512_dq": "avx512dq", "neon": "asimd"}  # fmt: skip
    return frozenset(words.get(name, name) for name, has in cpu.get_capabilities().items() if has is True)


def _quota_files() -> list[str]:
    """Return contents of the files that limit the CPU time of this process, "quota period" each."""
    root = Path("/sys/fs/cgroup")
    found = []
    try:
        mine = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        mine = []
    own = next((line[3:].strip("/") for line in mine if line.startswith("0::")), "")
    places = [root, *(root.joinpath(*Path(own).parts[:n]) for n in range(1, len(Path(own).parts) + 1))]
    for place in places:
        try:
            found.append((place / "cpu.max").read_text(encoding="ascii"))
        except (OSError, UnicodeDecodeError):
            continue
    try:
        old = [
            (root / "cpu" / f"cpu.cfs_{word}_us").read_text(encoding="ascii").strip() for word in ("quota", "period")
        ]
        found.append(" ".join(old))
    except (OSError, UnicodeDecodeError):
        pass
    return found


def _quota(text: str) -> float | None:
    """Return cores of "quota period"; None for "max period", and for "-1 period"."""
    quota, _, period = text.strip().partition(" ")
    if quota.isdecimal() and period.strip().isdecimal() and int(period) > 0 and int(quota) > 0:
        return int(quota) / int(period)
    return None
