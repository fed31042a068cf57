"""`foretrace llm calibrate` as an answer: what a server takes beside its modelled steps, and how near its runs are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from foretrace.report.blocks import Block, Column, Line, table
from foretrace.report.units import count, digits, seconds
from foretrace.report.views import Report, taken
from foretrace.serving.llm.calibration import CalibratedRun, EngineCalibration


class LlmCalibrateView(Report, frozen=True, kw_only=True):
    """`foretrace llm calibrate`: overheads of a server, from measured runs of it."""

    command: str = "llm calibrate"
    model: str
    device: str
    devices: int
    stages: int
    level: float  # factor on the time of the devices
    host_s: float  # of a step
    request_s: float  # of a request beside steps
    low: float  # 80 % range of a step's time at other loads, as factors
    high: float
    runs: tuple[CalibratedRun, ...]

    def shown(self, top: int) -> Iterator[Block]:
        """Yield runs before and after, and the range."""
        columns = [Column("run"), Column("load", "digits"), Column("TTFT", "seconds"), Column("before", "seconds"),
                   Column("now", "seconds"), Column("TPOT", "seconds"), Column("before", "seconds"),
                   Column("now", "seconds")]  # fmt: skip
        rows = [
            (run.source, run.load, run.ttft_s, run.ttft_before_s, run.ttft_after_s, run.tpot_s, run.tpot_before_s,
             run.tpot_after_s) for run in self.runs
        ]  # fmt: skip
        yield table(columns, rows, top=top, noun="run")
        yield Line(f"{digits(self.low)} to {digits(self.high)} times, 4 times out of 5, for a step at other loads",
                   label="range")  # fmt: skip


def llm_calibrated(found: EngineCalibration, saved: Path | None = None) -> LlmCalibrateView:
    """Return the answer to a calibration."""
    many = f"{count(len(found.runs))} run{'' if len(found.runs) == 1 else 's'}"
    sentence = (
        f"This server of {found.model} takes {digits(found.level)} times the predicted time of its devices, "
        f"{seconds(found.host_s)} of host per step and {seconds(found.request_s)} per request, by {many}."
    )
    simulate = f"foretrace llm simulate {found.model} --device {found.device} --calibration {saved}"
    return taken(LlmCalibrateView, found, headline=sentence, next=simulate if saved else "")
