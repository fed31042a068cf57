"""Hold the simulator of engines against a real one: the same scheduler, requests and rules, and measured steps.

    python -m reproductions live_engine [--runs 5] [--policy chunked] [--load 0.7] [--ledger FILE] [--write]

The steps of the live engine are timed alone (`measure_steps`), what they leave out is fitted on requests of its own
(`calibrate`), and only then each run is predicted and made. Two real runs differ, too: that difference is the floor
below which no error means anything.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Ledger, Row
from foretrace.experiment.statistics import paired_ratio
from foretrace.experiment.trial import TriedPrediction, figured
from foretrace.serving.llm.engine import EngineRules, Served, simulate
from foretrace.serving.llm.step_times import HIGH, LOW, MIDDLE, StepTimes, TimeTable
from foretrace.serving.requests import requests
from reproductions import parser_of
from reproductions.live_engine.decoder import BLOCK, Chunk, Decoding, prefill, slots_of
from reproductions.live_engine.engine import LiveEngine, LiveRun
from reproductions.systems import put
from tables import machine, percent, table, today

_REPEATS = 5  # of each timed call; the median counts
_CALIBRATING = 1000  # added to a seed: requests that no run is judged by


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedEngine:
    """What became of predictions for a live engine."""

    rules: EngineRules
    runs: int
    seed: int
    requests: str  # of each run
    steps: int  # of all runs
    step_error: float  # median of |expected / measured - 1| of single steps
    preemptions: int
    figures: dict[str, TriedPrediction]

    def rows(self) -> list[Row]:
        """What the ledger keeps of it, a row per figure."""
        own = {"policy": self.rules.policy, "token_budget": self.rules.budget, "sequences": self.rules.sequences}
        return [
            each.row(f"serve-llm {name}", parameters=own, model="a small decoder", size=self.requests)
            for name, each in self.figures.items()
        ]


def figures_of(served: Served) -> dict[str, float]:
    """Time to the first token and time per further token, seconds, by the name they are reported under."""
    first = served.first_s - served.arrival_s
    several = served.output > 1
    each = ((served.finish_s - served.first_s)[several]) / (served.output[several] - 1)
    return {f"{name}.p{q}": float(np.quantile(values, q / 100))
            for name, values in (("ttft", first), ("tpot", each)) for q in (50, 90) if len(values)}  # fmt: skip


def verify(
    engine: LiveEngine,
    rules: EngineRules,
    *,
    runs: int = 5,
    number: int = 40,
    load: float = 0.7,
    seed: int = 0,
    lengths: str = "prompt=16-160 output=16-96",
    tell: Callable[[str, float], object] | None = None,
) -> VerifiedEngine:
    """Predict runs of a live engine and make them.

    Args:
        engine: the engine.
        rules: its scheduler's.
        runs: of other requests each; every one is made twice.
        number: requests of a run.
        load: arrivals as a share of what the engine, by prediction, can serve.
        seed: of requests.
        lengths: of them, see `requests`.
        tell: called with what is going on, and the share that is done.

    Raises:
        ForetraceError: fewer than 3 runs, a load that cannot be, or rules that no live engine has.

    """
    if runs < 3:
        raise ForetraceError(f"`runs=` must be 3 or more for a median, got {runs}.")
    if not 0 < load < 10:
        raise ForetraceError(f"`load=` must be above 0 and below 10, got {load}.")
    rules = replace(rules, utilisation=1.0, prefix_cache=False)
    lengths = f"{lengths} requests={number}"
    burst = requests(f"burst {lengths}", seed=seed + _CALIBRATING)
    say = tell or (lambda what, share: None)
    say("timing steps", 0.0)
    steps = measure_steps(engine, rules, longest=int((burst.prompt + burst.output).max()))
    busy = simulate(burst, steps, rules)
    arrivals = f"poisson qps={load * number / busy.seconds:.4g} {lengths}"
    say("calibrating", 0.2)
    trial = requests(arrivals, seed=seed + _CALIBRATING)
    engine.serve(trial, rules)  # compiles the scheduler
    steps = calibrate(steps, engine.serve(trial, rules, steps=steps))
    measured, again, predicted, off, count, preempted = [], [], [], [], 0, 0
    for run in range(runs):
        say(f"run {run + 1} of {runs}", 0.3 + 0.7 * run / runs)
        trial = requests(arrivals, seed=seed + run)
        predicted.append([figures_of(simulate(trial, steps, rules, end=end)) for end in (MIDDLE, LOW, HIGH)])
        real = engine.serve(trial, rules, seed=run, steps=steps)
        measured.append(figures_of(real.served))
        again.append(figures_of(engine.serve(trial, rules, seed=run).served))
        off += np.abs(real.expected_s / real.step_s - 1).tolist()
        count += real.served.steps
        preempted += real.served.preemptions
    return VerifiedEngine(
        rules=rules, runs=runs, seed=seed, requests=arrivals, steps=count, step_error=statistics.median(off),
        preemptions=preempted,
        figures={name: _figure(name, predicted, measured, again, seed) for name in measured[0]},
    )  # fmt: skip


def _figure(
    name: str, predicted: Sequence[Sequence[dict[str, float]]], measured: Sequence[dict[str, float]],
    again: Sequence[dict[str, float]], seed: int,
) -> TriedPrediction:  # fmt: skip
    """A figure of runs of an engine, in seconds, each held against its own prediction."""
    middle, low, high = ([run[end][name] for run in predicted] for end in range(3))
    real, second = [run[name] for run in measured], [run[name] for run in again]
    value = statistics.median(middle)
    least, most = (paired_ratio(middle, end).value for end in (low, high))
    expected = value, value * min(1.0, least), value * max(1.0, most)
    return figured(expected, real, second, each_s=middle, clock="cpu", seed=seed)


def calibrate(steps: StepTimes, run: LiveRun) -> StepTimes:
    """Add what steps took beyond their parts to the time of the host, and the spread of single steps as range."""
    more = max(0.0, float(np.median(run.step_s - run.expected_s)))
    low, high = np.quantile(run.step_s / (run.expected_s + more), [0.1, 0.9]).tolist()
    host_s = steps.table.host_s + more
    return replace(steps, table=steps.table._replace(host_s=host_s, low=min(1.0, low), high=max(1.0, high)))


def measure_steps(engine: LiveEngine, rules: EngineRules, *, longest: int) -> StepTimes:
    """Time the parts of a step of a live engine alone; `longest`: tokens of a sequence."""
    decoder, size = engine.decoder, engine.decoder.size
    sequences = min(rules.sequences, engine.blocks)
    most = min(rules.budget, sequences * longest, engine.blocks * BLOCK)
    tokens, chunk, batch = _doubling(1, most), _doubling(1, min(longest, most)), _doubling(1, max(2, sequences))
    context = [0, *_doubling(BLOCK, longest)]
    cache = decoder.cache[0]

    def chunk_s(count: int, before: int) -> float:
        queries = torch.randn(count, size.heads, size.head_width, dtype=cache.dtype)
        rows = slots_of(range(-(-(before + count) // BLOCK)), before + count) % len(cache[0])
        return _seconds(lambda: prefill(queries, cache[:, rows], before)) * size.layers

    def decode_s(count: int, before: int) -> float:
        chunks = _decoding(count, before, engine.blocks)
        queries = torch.randn(count, size.heads, size.head_width, dtype=cache.dtype)
        slots = [slots_of(each.blocks, before + 1) for each in chunks]
        made = Decoding(range(count), slots, chunks)
        begin = _seconds(lambda: Decoding(range(count), slots, chunks))
        return begin + _seconds(lambda: made.attend(queries, cache)) * size.layers

    def whole_s(chunks: Sequence[Chunk]) -> float:
        return _seconds(lambda: decoder(chunks))

    def linear_s(count: int) -> float:
        sizes = [longest] * (count // longest) + [count % longest] * (count % longest > 0)
        chunks = [Chunk([0] * size, 0, range(-(-size // BLOCK))) for size in sizes]
        return max(0.0, whole_s(chunks) - sum(chunk_s(size, 0) for size in sizes))

    linear = [linear_s(count) for count in tokens]
    decode = [[decode_s(b, y) for y in context[1:]] for b in batch]
    output = [
        max(0.0, whole_s(_decoding(b, context[1], engine.blocks)) - first - float(np.interp(b, tokens, linear)))
        for b, (first, *_) in zip(batch, decode, strict=True)
    ]
    per_token = float(cache.element_size() * 2 * size.layers * size.kv_heads * size.head_width)
    table = TimeTable(
        tokens=_row(tokens), linear_s=_row(linear), sequences=_row(batch), output_s=_row(output), chunk=_row(chunk),
        context=_row(context),
        prefill_s=np.array([[chunk_s(c, x) for x in context] for c in chunk]), batch=_row(batch),
        mean_context=_row([1, *context[1:]]),
        decode_s=np.array([[each[0], *each] for each in decode]),
    )  # fmt: skip
    return StepTimes(
        table=table, model="a small decoder", device="this processor",
        memory_bytes=engine.blocks * BLOCK * per_token, weight_bytes=0.0, kv_bytes_per_token=per_token,
    )  # fmt: skip


def _decoding(count: int, before: int, blocks: int) -> list[Chunk]:
    """So many sequences with one new token each; their blocks may overlap, which costs the same."""
    each = before // BLOCK + 1
    return [Chunk([0], before, [(i * each + k) % blocks for k in range(each)]) for i in range(count)]


def _doubling(first: int, last: int) -> list[int]:
    found = [first]
    while found[-1] * 2 < last:
        found.append(found[-1] * 2)
    return [*found, last] if last > first else [first, first + 1]


def _row(values: Sequence[float]) -> Float64:
    return np.array(values, np.float64)


def _seconds(call: Callable[[], object]) -> float:
    """Median CPU seconds of this thread for a call."""
    times = []
    with torch.inference_mode():
        call()
        for _ in range(_REPEATS):
            began = time.thread_time()
            call()
            times.append(time.thread_time() - began)
    return statistics.median(times)


# --- the page --------------------------------------------------------------------------------------------------------

HEAD = """# A live engine under the simulator's scheduler

A decoder with random weights serves requests on one thread of this processor: paged cache, batches that change with
every step, preemption. Its scheduler is the simulator's own code (`push`, `schedule`, `complete` of
`serving/llm/scheduler.py`); only the step differs. The parts of a step are timed alone, one run calibrates what is
left, and only then each run is predicted and made twice. The clock is the thread's CPU time; idle time is skipped.
*Two real runs* is how far a second run of the same requests is from the first: no error below that means anything.
*Error* and *two real runs* are medians of the runs' ratios, times are medians over the runs. Rows go to the ledger.
Written by `make reproduce NAME=live_engine ARGS=--write`.
"""


def page(found: VerifiedEngine) -> str:
    """The page of one verification."""

    def ms(seconds: float) -> str:
        return f"{1e3 * seconds:.3g} ms"

    rows = [
        [name, ms(each.before_s), " – ".join(ms(each.before_s * end) for end in (each.predicted.low,
         each.predicted.high)), ms(each.after.median_s), f"{percent(each.error, signed=True)} %",
         f"{percent(each.same.value - 1, signed=True)} %", "yes" if each.covered else "no"]
        for name, each in found.figures.items()
    ]  # fmt: skip
    header = ("figure", "predicted", "80 % range", "measured", "error", "two real runs", "covered")
    told = (
        f"{found.runs} runs of `{found.requests}`, policy {found.rules.policy}, {found.steps} steps, "
        f"{found.preemptions} preemptions; single steps are predicted within {percent(found.step_error)} % (median)."
    )
    return f"{HEAD}\n*{today()}, {machine()}.*\n\n{told}\n\n{table(header, rows)}\n"


def main(arguments: Sequence[str]) -> int:
    """Verify, keep the rows, print the page or write it beside this file."""
    parser = parser_of("live_engine", __doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=40, help="of a run")
    parser.add_argument("--load", type=float, default=0.7, help="rate of requests, of what the engine can serve")
    parser.add_argument("--policy", default="chunked")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=256, help="of 16 tokens, that the cache has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ledger", type=Path, help="by default the user's")
    parser.add_argument("--no-ledger", action="store_true")
    parser.add_argument("--write", action="store_true", help="write the page beside this file")
    given = parser.parse_args(arguments)
    kept = None if given.no_ledger else Ledger(given.ledger).checked()
    found = verify(
        LiveEngine(blocks=given.blocks), EngineRules(policy=given.policy, sequences=given.sequences), runs=given.runs,
        number=given.requests, load=given.load, seed=given.seed,
        tell=lambda what, share: print(f"  {what}", file=sys.stderr, flush=True),
    )  # fmt: skip
    if kept is not None:
        kept.add(found.rows())
    if given.write:
        put(Path(__file__).with_name("README.md"), page(found))
    else:
        print(page(found), end="")
    return 0
