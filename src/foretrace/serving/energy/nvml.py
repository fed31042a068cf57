"""Settings and energy of an NVIDIA GPU by NVML, through the package `nvidia-ml-py`."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from foretrace.errors import ForetraceError, needing
from foretrace.serving.energy.machine import Meter, Setter, State

GPU_KNOBS = ("gpu-power-limit", "gpu-frequency", "gpu-memory-frequency")
_MW = 1e3


@dataclass(frozen=True, kw_only=True)
class NvmlSetter(Setter):
    """A power limit (W), or the highest clock (MHz) of cores or memory.

    NVML does not tell to which range clocks are locked, so they are restored by unlocking them.
    """

    library: Any
    handle: Any

    def now(self) -> float:
        """Return the limit, or the highest clock."""
        if self.name != "gpu-power-limit":
            return self.high
        return float(_asked(self.library, "nvmlDeviceGetPowerManagementLimit", self.handle)) / _MW

    def state(self) -> State:
        """Return the limit, where NVML tells it."""
        return {"limit": f"{self.now():.3f}"} if self.name == "gpu-power-limit" else {}

    def _write(self, value: float) -> None:
        if self.name == "gpu-power-limit":
            _asked(self.library, "nvmlDeviceSetPowerManagementLimit", self.handle, round(value * _MW))
        else:
            _asked(self.library, f"nvmlDeviceSet{self._clocks}LockedClocks", self.handle, round(self.low), round(value))

    def restore(self, state: State) -> None:
        """Restore the limit as it was, and unlock clocks."""
        if self.name != "gpu-power-limit":
            _asked(self.library, f"nvmlDeviceReset{self._clocks}LockedClocks", self.handle)
        elif "limit" in state:
            self.set(float(state["limit"]))

    @property
    def _clocks(self) -> str:
        return "Gpu" if self.name == "gpu-frequency" else "Memory"


def library() -> Any:
    """Return NVML, ready to be asked. Raises MissingExtraError without the package, ForetraceError without a driver."""
    with needing("setting a GPU"):
        found = import_module("pynvml")
    try:
        found.nvmlInit()
    except found.NVMLError as error:
        raise ForetraceError(f"this machine has no GPU that NVML can set ({error}); tune something else.") from None
    return found


def gpu_setter(found: Any, name: str) -> NvmlSetter:
    """Return one of `GPU_KNOBS` of GPU 0. Raises ForetraceError where the GPU does not offer it."""
    handle = _asked(found, "nvmlDeviceGetHandleByIndex", 0)
    if name == "gpu-power-limit":
        low, high = (each / _MW for each in _asked(found, "nvmlDeviceGetPowerManagementLimitConstraints", handle))
        levels = [low + (high - low) * i / 6 for i in range(7)]
    else:
        levels = sorted(map(float, _asked(found, "nvmlDeviceGetSupportedMemoryClocks", handle)))
        if name == "gpu-frequency":
            levels = sorted(map(float, _asked(found, "nvmlDeviceGetSupportedGraphicsClocks", handle, int(levels[-1]))))
        low, high = levels[0], levels[-1]
    unit = "W" if name == "gpu-power-limit" else "MHz"
    return NvmlSetter(library=found, handle=handle, name=name, unit=unit, low=low, high=high, levels=tuple(levels))


def gpu_meter() -> Meter | None:
    """Return the meter of GPU 0; None where there is none, it does not count, or there is no package to ask it."""

    def counter() -> float:
        return float(_asked(found, "nvmlDeviceGetTotalEnergyConsumption", handle)) / 1e3

    try:
        found = library()
        handle = _asked(found, "nvmlDeviceGetHandleByIndex", 0)
        counter()
    except ForetraceError:
        return None
    return Meter(name="GPU (NVML)", counters=(counter,))


def _asked(found: Any, function: str, *arguments: Any) -> Any:
    """Return what NVML answers; raises ForetraceError with its reason."""
    try:
        return getattr(found, function)(*arguments)
    except found.NVMLError as error:
        raise ForetraceError(f"the GPU refuses {function} ({error}); it may need root, or not offer this.") from None
