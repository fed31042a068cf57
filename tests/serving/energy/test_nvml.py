"""Settings and energy of a GPU, by a library that answers as NVML does and notes what it is told to change."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from foretrace.errors import ForetraceError, MissingExtraError
from foretrace.serving.energy import nvml
from foretrace.serving.energy.command import environment, meters, setter
from foretrace.serving.energy.machine import held, recover


class Nvml:
    """One GPU: 100 to 300 W, set to 250 W; functions and their units are those of `pynvml`."""

    class NVMLError(Exception):
        """As NVML raises it."""

    def __init__(self, *, permitted: bool = True) -> None:
        self.permitted, self.limit_mw, self.energy_mj = permitted, 250_000, 5_000_000
        self.locked: dict[str, tuple[int, int]] = {}
        self.changes = 0

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"GPU {index}"

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: str) -> tuple[int, int]:
        return 100_000, 300_000

    def nvmlDeviceGetPowerManagementLimit(self, handle: str) -> int:
        return self.limit_mw

    def nvmlDeviceGetSupportedMemoryClocks(self, handle: str) -> list[int]:
        return [1593, 810]

    def nvmlDeviceGetSupportedGraphicsClocks(self, handle: str, memory_mhz: int) -> list[int]:
        return [1980, 1500, 990] if memory_mhz == 1593 else [810]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self.energy_mj += 7_000
        return self.energy_mj

    def nvmlDeviceSetPowerManagementLimit(self, handle: str, limit_mw: int) -> None:
        self._change()
        self.limit_mw = limit_mw

    def nvmlDeviceSetGpuLockedClocks(self, handle: str, low: int, high: int) -> None:
        self._change()
        self.locked["gpu"] = (low, high)

    def nvmlDeviceSetMemoryLockedClocks(self, handle: str, low: int, high: int) -> None:
        self._change()
        self.locked["memory"] = (low, high)

    def nvmlDeviceResetGpuLockedClocks(self, handle: str) -> None:
        self.locked.pop("gpu", None)

    def nvmlDeviceResetMemoryLockedClocks(self, handle: str) -> None:
        self.locked.pop("memory", None)

    def _change(self) -> None:
        if not self.permitted:
            raise self.NVMLError("Insufficient Permissions")
        self.changes += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    found = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


def test_levels_and_limits_are_the_gpus(gpu: Nvml) -> None:
    power, core, memory = (setter(name) for name in nvml.GPU_KNOBS)
    assert (power.low, power.high, power.now(), len(power.levels)) == (100, 300, 250, 7)
    assert core.levels == (990, 1500, 1980) and memory.levels == (810, 1593)
    for each, value, said in ((power, 301, "100 to 300 W, got 301"), (core, 900, "990 to 1980 MHz, got 900")):
        with pytest.raises(ForetraceError, match=said):
            each.set(value)
    with pytest.raises(ForetraceError, match="must be 100 to 300 W, got 400"):
        environment(["true"], {"gpu-power-limit": (200.0, 400.0)})
    assert gpu.changes == 0


def test_everything_is_restored_after_an_error(gpu: Nvml, tmp_path: Path) -> None:
    setters = [setter(name) for name in nvml.GPU_KNOBS]
    with pytest.raises(RuntimeError), held(setters, tmp_path / "settings.json", setter):
        for each, value in zip(setters, (150, 1500, 810), strict=True):
            each.set(value)
        assert gpu.limit_mw == 150_000 and gpu.locked == {"gpu": (990, 1500), "memory": (810, 810)}
        raise RuntimeError
    assert gpu.limit_mw == 250_000 and not gpu.locked and not list(tmp_path.glob("settings.json"))


def test_whoever_comes_after_a_kill_restores(gpu: Nvml, tmp_path: Path) -> None:
    journal = tmp_path / "settings.json"
    journal.write_text('{"gpu-power-limit": {"limit": "250.000"}, "gpu-frequency": {}}')
    gpu.limit_mw, gpu.locked["gpu"] = 120_000, (990, 990)
    assert recover(journal, setter) and not journal.exists()
    assert gpu.limit_mw == 250_000 and not gpu.locked


def test_the_gpus_counter_is_read_in_joules(gpu: Nvml, tmp_path: Path) -> None:
    (meter,) = meters(tmp_path)
    assert meter.between(meter.read(), meter.read()) == pytest.approx(7)
    assert environment(["true"], {"gpu-power-limit": ()}, root=tmp_path).measure((250,)).energy_j == pytest.approx(7)


def test_what_the_gpu_refuses_is_one_sentence(gpu: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.permitted = False
    with pytest.raises(ForetraceError, match=r"refuses nvmlDeviceSetPowerManagementLimit \(Insufficient Permissions\)"):
        setter("gpu-power-limit").set(200)
    monkeypatch.setattr(Nvml, "nvmlInit", lambda self: (_ for _ in ()).throw(Nvml.NVMLError("Driver Not Loaded")))
    with pytest.raises(ForetraceError, match="no GPU that NVML can set"):
        setter("gpu-power-limit")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MissingExtraError, match="nvidia-ml-py"):
        setter("gpu-power-limit")
    assert nvml.gpu_meter() is None
