"""What a calibration holds for: processor and what the process may use of it, threads, PyTorch, the memory allocator.

Each of these moves operator times by tens of per cent: times of another combination are refused, not scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretrace.hardware.processor import recorded_sets
from foretrace.trace.observe import machine

ALLOCATOR = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")  # variables that decide how freed memory is kept

_WORDS = {
    "cpu": "processor",
    "architecture": "architecture",
    "cores": "number of cores",
    "torch": "PyTorch",
    "threads": "number of threads",
    "thread_cores": "cores for these threads",
    "instruction_sets": "instruction sets",
    "capability": "instruction set of PyTorch's kernels",
    "device": "device",
    "allocator": "allocator settings",
}


def fingerprint() -> dict[str, Any]:
    """Return the fingerprint of this process as it is now."""
    return _fingerprint(
        {"machine": machine.machine(), "environment": machine.environment(), **machine.torch_settings()}
    )


def fingerprint_of(recording: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fingerprint of the process that was recorded, from `TaskGraph.info.recording`; {} where the recording
    does not say.
    """
    return _fingerprint(recording) if recording.get("machine") and recording.get("threads") else {}


def _fingerprint(facts: Mapping[str, Any]) -> dict[str, Any]:
    where, environment, device = facts["machine"], facts.get("environment", {}), facts.get("device", {})
    threads, usable = facts.get("threads", {}).get("intra_op"), where.get("usable_cores")
    sets = recorded_sets(facts)
    return {
        "cpu": where.get("cpu"),
        "architecture": where.get("architecture"),
        "cores": where.get("cores"),
        "torch": facts.get("torch"),
        "threads": threads,
        "thread_cores": min(threads, usable) if threads and usable else None,
        "instruction_sets": None if sets is None else list(sets),
        "capability": facts.get("cpu_capability"),
        "device": device.get("name") if device.get("type") == "cuda" else "cpu",
        "allocator": {key: value for key, value in environment.items() if key.startswith(ALLOCATOR)},
    }


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return what two fingerprints do not share, in words: "number of threads (1, not 2)"."""
    pairs = ((word, one.get(key), other.get(key)) for key, word in _WORDS.items())
    return [f"{word} ({_told(mine)}, not {_told(theirs)})" for word, mine, theirs in pairs if mine != theirs]


def _told(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}={each}" for key, each in sorted(value.items(), key=str)) or "default"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "unknown" if value is None else str(value)


def allocator_settings() -> dict[str, str]:
    """Return the allocator settings of this process."""
    return {key: value for key, value in machine.environment().items() if key.startswith(ALLOCATOR)}
