"""Large sets of ranks out of a small real one: its step repeated, as recordings that the reader reads."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

_NUMBERS = ("External id", "correlation", "Ev Idx", "Sequence number")  # of events, unique within a recording
_FAR = 1_000_000


def repeated(source: Path, target: Path, steps: int, *, stretch: float = 0.03, seed: int = 0) -> int:
    """Write the ranks of a set of one step again with `steps` steps, each a little longer or shorter; returns events.

    All events of a step are stretched alike on all ranks, so that collectives still end together.
    """
    files = sorted(source.glob("*.json.gz"))
    sets = [json.loads(gzip.decompress(file.read_bytes()), strict=False) for file in files]
    events = [[e for e in each["traceEvents"] if e["ph"] == "X" and e.get("cat") != "Trace"] for each in sets]
    start = min(float(e["ts"]) for rank in events for e in rank)
    span = max(float(e["ts"]) + float(e["dur"]) for rank in events for e in rank) - start
    factors = 1 + stretch * np.random.default_rng(seed).standard_normal(steps)
    begins = np.concatenate([[0.0], np.cumsum(np.ceil(factors * span) + 100)])  # microseconds, as all of these
    target.mkdir(parents=True, exist_ok=True)
    count = 0
    for file, whole, rank in zip(files, sets, events, strict=True):
        out: list[dict[str, Any]] = [e for e in whole["traceEvents"] if e["ph"] == "M"]
        launched = {e["args"]["correlation"] for e in rank if e.get("cat") == "cuda_runtime"}
        whole_step = [e for e in rank if e.get("cat") != "kernel" or e["args"]["correlation"] in launched]
        for i in range(steps):
            out += [
                _moved(e, i, start, float(factors[i]), float(begins[i]), float(begins[i + 1]))
                for e in (whole_step if i else rank)
            ]  # what the step before launched comes once
        count += len(out)
        text = json.dumps({**whole, "baseTimeNanoseconds": round(1000 * start), "traceEvents": out}).encode()
        (target / file.name).write_bytes(gzip.compress(text, compresslevel=1))
    return count


def _moved(event: dict[str, Any], step: int, start: float, factor: float, to: float, until: float) -> dict[str, Any]:
    """An event in its place in another step, to the nanosecond, so that what was nested stays nested."""
    begin, end = float(event["ts"]) - start, float(event["ts"]) + float(event["dur"]) - start
    ts, over = round(to + factor * begin, 3), round(to + factor * end, 3)
    moved = {**event, "ts": ts, "dur": round(over - ts, 3)}
    if str(event["name"]).startswith("ProfilerStep#"):
        moved |= {"name": f"ProfilerStep#{step}", "dur": round(until - ts - 10, 3)}
    if "args" in event:
        args = dict(event["args"])
        for key in _NUMBERS:
            if isinstance(args.get(key), int) and args[key] > 0:
                args[key] += step * _FAR
        moved["args"] = args
    return moved
