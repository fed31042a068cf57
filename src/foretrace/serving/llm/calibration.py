"""`EngineCalibration`: what one server was measured to take beside its modelled step times; its file."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from pathlib import Path

import msgspec

from foretrace.errors import ForetraceError
from foretrace.files import write_bytes
from foretrace.reading import read_bytes
from foretrace.serving.llm.step_times import StepTimes

FORMAT = 1


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

    format: int = FORMAT
    model: str
    device: str
    devices: int
    stages: int
    level: float  # factor on the time of the devices
    host_s: float  # of a step
    request_s: float  # of a request beside steps
    low: float  # 80 % range of a step's time
    high: float
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
        found = msgspec.json.decode(read_bytes(path), type=EngineCalibration)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ForetraceError(
            f"{path} is no calibration of a server ({error}); foretrace llm calibrate makes one."
        ) from None
    sound = (found.level, found.low, found.high, found.host_s + 1, found.request_s + 1)
    if (
        found.format != FORMAT
        or not all(isfinite(each) and each > 0 for each in sound)
        or not found.low <= 1 <= found.high
    ):
        raise ForetraceError(
            f"{path} holds a number that no calibration has; make it again with foretrace llm calibrate."
        )
    return found


def scaled(steps: StepTimes, level: float, host_s: float, request_s: float, low: float, high: float) -> StepTimes:
    grids = {name: level * getattr(steps, name) for name in ("linear_s", "output_s", "prefill_s", "decode_s")}
    why = f"calibrated: {level:.3g} times the devices' time, {1e3 * host_s:.3g} ms of host per step"
    return replace(steps, **grids, host_s=host_s, request_s=request_s, low=low, high=high, whys=(*steps.whys, why))
