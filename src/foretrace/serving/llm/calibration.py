"""`EngineCalibration`: what one server was measured to take beside its modelled step times; its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from foretrace.errors import ForetraceError
from foretrace.files import write_bytes
from foretrace.reading import read_bytes
from foretrace.serving.llm.step_times import StepTimes

_Factor = Annotated[float, msgspec.Meta(gt=0, lt=1e9)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]


class CalibratedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run, and what was predicted of it before and after."""

    source: str
    load: float
    requests: int
    ttft_s: float
    ttft_before_s: float
    ttft_after_s: float
    tpot_s: float
    tpot_before_s: float
    tpot_after_s: float


class EngineCalibration(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, and the server that it holds for."""

    format: Literal[1] = 1
    model: str
    device: str
    devices: int
    stages: int
    level: _Factor  # on the time of the devices
    host_s: _Seconds  # of a step
    request_s: _Seconds  # of a request beside steps
    low: Annotated[float, msgspec.Meta(gt=0, le=1)]  # 80 % range of a step's time
    high: Annotated[float, msgspec.Meta(ge=1, lt=1e9)]
    runs: tuple[CalibratedRun, ...]

    def applied(self, steps: StepTimes) -> StepTimes:
        """The step times of this server. Raises ForetraceError where it is another one's."""
        mine, asked = ((self.model, self.device, self.devices, self.stages),
                       (steps.model, steps.device, steps.devices, steps.stages))  # fmt: skip
        if mine != asked:
            names = "of {} on {} ({} devices in {} stages)"
            raise ForetraceError(
                f"`calibration=` is {names.format(*mine)}, not {names.format(*asked)}; calibrate that server."
            )
        return scaled(steps, self.level, self.host_s, self.request_s, self.low, self.high)

    def save(self, path: Path) -> None:
        """Write the file that `read_calibration` reads."""
        write_bytes(path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def read_calibration(path: Path) -> EngineCalibration:
    """What `save` wrote. Raises ForetraceError."""
    try:
        return msgspec.json.decode(read_bytes(path), type=EngineCalibration)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ForetraceError(
            f"{path} is no calibration of a server ({error}); foretrace llm calibrate makes one."
        ) from None


def scaled(steps: StepTimes, level: float, host_s: float, request_s: float, low: float, high: float) -> StepTimes:
    grids = {name: level * getattr(steps, name) for name in ("linear_s", "output_s", "prefill_s", "decode_s")}
    why = f"calibrated: {level:.3g} times the devices' time, {1e3 * host_s:.3g} ms of host per step"
    return replace(steps, **grids, host_s=host_s, request_s=request_s, low=low, high=high, whys=(*steps.whys, why))
