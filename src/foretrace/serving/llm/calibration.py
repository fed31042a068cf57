"""`EngineCalibration`: what one server takes beside the model of its step times, from measured runs; its file.

Runs are results of `vllm bench serve` (and `benchmark_serving.py`), of SGLang's `bench_serving`, which appends a line
per run, and of `foretrace llm simulate --json`. From mean times per output token comes a factor on the time of the
devices and, where two loads or more were measured, the host's time per step; from mean times to the first token what a
request waits beside steps. How far such a calibration is off at other loads was measured on the servers of
`reproductions/aiconfigurator`; that is its range, and what it leaves of its own runs widens it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, inf
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError
from foretrace.files import write_bytes
from foretrace.reading import read_struct, read_text
from foretrace.serving.llm.engine import EngineRules, simulate
from foretrace.serving.llm.metrics import Latency, latency_statistics
from foretrace.serving.llm.step_times import StepTimes
from foretrace.serving.requests import KINDS, Requests, of, requests

_LEVELS = (0.1, 10.0)  # factors on the devices' time that a server of this model and device can have
_HOSTS = (1e-5, 0.5)  # seconds
_SPREAD = 0.1  # of lengths around their mean, where a run says no more: what public recipes draw
_ROUNDS = 8
_MOST = 1_000_000  # requests of a run
_POSITIVE = msgspec.Meta(gt=0, lt=1 << 62)
_SAME_LOAD = 1.2  # runs whose clients or rates differ by less say nothing on the host apart from devices
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

    format: Literal[2] = 2
    model: str
    device: str
    devices: int
    stages: int
    server: str  # what else step times depend on, too
    level: _Factor  # on the time of the devices
    host_s: _Seconds  # of a step
    request_s: _Seconds  # of a request beside steps
    low: Annotated[float, msgspec.Meta(gt=0, le=1)]  # 80 % range of a step's time
    high: Annotated[float, msgspec.Meta(ge=1, lt=1e9)]
    runs: tuple[CalibratedRun, ...]

    def applied(self, steps: StepTimes) -> StepTimes:
        """Return the step times of this server. Raises ForetraceError where it is another one's."""
        if self.server != steps.server:
            raise ForetraceError(f"`calibration=` is of {self.server}, not of {steps.server}; calibrate that server.")
        return scaled(steps, self.level, self.host_s, self.request_s, self.low, self.high)

    def save(self, path: Path) -> None:
        """Write the file that `read_calibration` reads."""
        write_bytes(path, msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def read_calibration(path: Path) -> EngineCalibration:
    """Return what `save` wrote. Raises ForetraceError."""
    return read_struct(path, EngineCalibration, "calibration of a server", "make one with foretrace llm calibrate")


def scaled(steps: StepTimes, level: float, host_s: float, request_s: float, low: float, high: float) -> StepTimes:
    """Return the step times of a server that takes so many times the devices' time, and this of host and requests."""
    grids = {name: level * getattr(steps.table, name) for name in ("linear_s", "output_s", "prefill_s", "decode_s")}
    why = f"calibrated: {level:.3g} times the devices' time, {1e3 * host_s:.3g} ms of host per step"
    table = steps.table._replace(**grids, host_s=host_s, low=low, high=high)
    return replace(steps, table=table, request_s=request_s, whys=(*steps.whys, why))


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """One run of a load generator, means in seconds."""

    source: str
    load: float  # clients, else requests per second
    requests: Requests
    ttft_s: float
    tpot_s: float
    server: str = ""  # as `StepTimes` names it; "": not known


def calibrate(steps: StepTimes, runs: Sequence[MeasuredRun], low: float, high: float) -> EngineCalibration:
    """Fit the overheads of a server. `low`, `high`: what one run leaves at other loads, as factors.

    Raises ForetraceError where there is no run, or no factor explains one.
    """
    if not runs:
        raise ForetraceError("nothing to calibrate from; give one measured run or more.")
    if other := next((run for run in runs if run.server not in ("", steps.server)), None):
        raise ForetraceError(f"{other.source} ran {other.server}, not {steps.server}; calibrate that server.")
    loads = [run.load for run in runs]
    free = 2 if max(loads) / min(loads) > _SAME_LOAD else 1
    rules = EngineRules(sequences=max(EngineRules().sequences, *(run.requests.concurrency for run in runs)))
    measured = np.log([run.tpot_s for run in runs])

    def played(level: float, host_s: float, request_s: float) -> list[tuple[float, float]]:
        """Return mean TTFT and TPOT of each run."""
        made = scaled(steps, level, host_s, request_s, 1.0, 1.0)
        return [_means(run, made, rules) for run in runs]

    def errors(at: Float64) -> Float64:
        return measured - np.log([tpot for _, tpot in played(exp(at[0]), exp(at[1]), request_s)])

    def beside(found: Sequence[tuple[float, float]], counted_s: float) -> float:
        """Return what a request takes beside steps, by runs played with `counted_s` of it."""
        return max(counted_s + median(run.ttft_s - ttft for run, (ttft, _) in zip(runs, found, strict=True)), 0.0)

    request_s = steps.request_s  # clients of a closed loop wait for it, so it decides how many are at the engine
    at = np.log([1.0, max(steps.table.host_s, _HOSTS[0])])  # logarithms of level and host
    bounds = np.log([_LEVELS, _HOSTS])
    for _ in range(_ROUNDS):
        off = errors(at)
        slopes = np.stack([(off - errors(at + 0.05 * one)) / 0.05 for one in np.eye(2)[:free]], axis=1)
        step = np.linalg.lstsq(slopes.T @ slopes + 1e-4 * np.eye(free), slopes.T @ off, rcond=None)[0]
        at[:free] = np.clip(at[:free] + np.clip(step, -1.0, 1.0), *bounds[:free].T)
        before_s = request_s
        request_s = beside(played(exp(at[0]), exp(at[1]), request_s), request_s)
        if np.abs(step).max() < 1e-4 and abs(request_s - before_s) < 1e-4:
            break
    level, host_s = exp(at[0]), exp(at[1]) if free > 1 else steps.table.host_s
    if not _LEVELS[0] * 1.01 < level < _LEVELS[1] * 0.99:
        raise ForetraceError(
            f"{runs[0].source}: no server of {steps.model} on {steps.device} takes {level:.2g} times that time; "
            "check `tp=`, `dtype=` and the device."
        )
    before, after = played(1.0, steps.table.host_s, steps.request_s), played(level, host_s, request_s)
    left = max(max(run.tpot_s / tpot, tpot / run.tpot_s) for run, (_, tpot) in zip(runs, after, strict=True))
    return EngineCalibration(
        model=steps.model, device=steps.device, devices=steps.devices, stages=steps.stages, server=steps.server,
        level=level, host_s=host_s, request_s=request_s, low=min(low, 1 / left), high=max(high, left),
        runs=tuple(
            CalibratedRun(
                source=run.source, load=run.load, requests=len(run.requests), ttft_s=run.ttft_s,
                ttft_before_s=old[0], ttft_after_s=new[0], tpot_s=run.tpot_s,
                tpot_before_s=old[1], tpot_after_s=new[1],
            )
            for run, old, new in zip(runs, before, after, strict=True)
        ),
    )  # fmt: skip


def _means(run: MeasuredRun, steps: StepTimes, rules: EngineRules) -> tuple[float, float]:
    served = simulate(run.requests, steps, rules)
    ttft, tpot = (latency_statistics(served, latency)["mean"] for latency in ("ttft", "tpot"))
    if not ttft or not tpot:
        raise ForetraceError(f"{run.source}: none of its requests fits into the cache of this engine; check `tp=`.")
    return ttft, tpot


# --- results of load generators --------------------------------------------------------------------------------------


class _Saved(msgspec.Struct):
    """What a load generator saves of a run, as far as it matters here."""

    completed: Annotated[int, _POSITIVE]
    total_input_tokens: Annotated[float, _POSITIVE]
    total_output_tokens: Annotated[float, _POSITIVE]
    mean_ttft_ms: Annotated[float, _POSITIVE]
    mean_tpot_ms: Annotated[float, _POSITIVE]
    input_lens: list[float] | None = None
    output_lens: list[float] | None = None
    max_concurrency: int | None = None
    request_rate: float | str | None = None  # "inf" or Infinity: all at once

    def run(self, where: str) -> MeasuredRun:
        """Return the run, with lengths drawn where they were not saved."""
        count, clients = self.completed, max(self.max_concurrency or 0, 0)
        rate = self.request_rate if isinstance(self.request_rate, float) and 0 < self.request_rate < inf else 0.0
        ttft_s, tpot_s = self.mean_ttft_ms / 1e3, self.mean_tpot_ms / 1e3
        if rate and clients:  # by Little's law so many requests are at the server where nothing holds them back
            at_once = rate * (ttft_s + tpot_s * (self.total_output_tokens / count - 1))
            clients, rate = (0, rate) if at_once < clients else (clients, 0.0)
        if count > _MOST:
            raise ForetraceError(f"{where}: a run of {count:.3g} requests is more than {_MOST:,}; give a shorter one.")
        lengths = [each for each in (self.input_lens, self.output_lens) if each is not None and len(each) == count]
        if len(lengths) == 2:
            prompts, outputs = (np.maximum(np.array(each), 1) for each in lengths)
        else:
            random = np.random.default_rng(0)
            prompts, outputs = (
                np.maximum(np.round(total / count * random.uniform(1 - _SPREAD, 1 + _SPREAD, count)), 1)
                for total in (self.total_input_tokens, self.total_output_tokens)
            )
        arrivals = np.cumsum(np.random.default_rng(1).exponential(1 / rate if rate else 0.0, count))
        asked = of(arrivals - arrivals[0], prompts, outputs, concurrency=min(clients, count), drawn=rate > 0,
                   source=where)  # fmt: skip
        return MeasuredRun(source=where, load=rate or float(clients or count), requests=asked, ttft_s=ttft_s,
                           tpot_s=tpot_s)  # fmt: skip


class _Simulated(msgspec.Struct):
    """What this needs of the answer of `foretrace llm simulate`."""

    server: str
    replicas: int
    policy: str
    source: str
    requests: Annotated[int, _POSITIVE]
    ttft_s: Latency
    tpot_s: Latency
    pools: dict[str, Any] | None
    speculation: dict[str, Any] | None

    def run(self, where: str) -> MeasuredRun:
        """Return the run; its requests are drawn or read again."""
        if self.replicas > 1 or self.pools or self.speculation or self.policy != EngineRules().policy:
            raise ForetraceError(
                f"{where} must be of one engine without a draft whose policy is {EngineRules().policy}; simulate that."
            )
        drawn = self.source.partition(" ")[0].lower() in KINDS
        count = f" requests={self.requests}" if drawn and "requests=" not in self.source else ""
        asked = requests(self.source + count)
        asked = asked.take(np.arange(min(self.requests, len(asked))))  # of a trace, those that came in time
        load = float(asked.concurrency) or len(asked) / max(float(asked.arrival_s[-1]), 1e-9)
        ttft_s, tpot_s = self.ttft_s.mean.value or 0.0, self.tpot_s.mean.value or 0.0
        if not (0 < ttft_s < inf and 0 < tpot_s < inf):
            raise ForetraceError(f"{where} has no mean TTFT and TPOT above 0; simulate longer answers.")
        return MeasuredRun(source=where, load=load, requests=asked, ttft_s=ttft_s, tpot_s=tpot_s,
                           server=self.server)  # fmt: skip


def read_runs(path: Path) -> list[MeasuredRun]:
    """Return the runs in a file: one JSON object, or one per line. Raises ForetraceError with what is missing."""
    text = read_text(path)
    try:
        try:
            found = [json.loads(text)]  # which knows Infinity, as Python writes it
        except ValueError:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise ForetraceError(f"{path} is no JSON of a load generator ({error}); give the file it saved.") from None
    if not found or not all(isinstance(each, dict) for each in found):
        raise ForetraceError(f"{path} holds no result of a run; give what vllm bench serve or bench_serving saved.")
    runs = []
    for number, row in enumerate(found, 1):
        where = f"{path.name}{f', line {number}' if len(found) > 1 else ''}"
        kind: type[_Saved | _Simulated] = _Simulated if row.get("command") == "llm simulate" else _Saved
        try:
            runs.append(msgspec.convert(row, kind).run(where))
        except msgspec.ValidationError as error:
            raise ForetraceError(f"{where}: {error}; give the whole result of a run.") from None
    return runs
