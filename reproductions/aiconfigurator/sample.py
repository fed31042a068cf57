"""The table of measured servers, cleaned: one row per measurement, one name per architecture, sizes as they were.

Rules, each with the number of rows that it touched in `Cleaned.notes`:

- a pair (TTFT, TPOT) that stands more than once is one measurement; the row kept is one whose parallel sizes were not
  mended, then the earlier file;
- DeepSeek V3, V3.1 and R1, re-quantised or not, are one architecture;
- sizes that were multiplied with each other are divided again: tp = s², experts s × s is s devices with tensor and
  expert parallelism of s; attention in s² groups with experts s × s is s groups; tp = groups = s with s² experts'
  parts is s devices. Duplicates with both spellings and equal times under both settle these;
- rows of one engine on more than eight devices are left out: they look like totals of several.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from dataclasses import dataclass, field
from math import isqrt
from pathlib import Path

from foretrace.errors import ForetraceError
from foretrace.reading import read_text
from foretrace.serving.llm.step_law import Layout

ARCHITECTURES = {
    "DeepSeek": "deepseek-v3", "Kimi-K2.5": "kimi-k2.5", "GLM-5": "glm-5", "MiniMax-M2.5": "minimax-m2.5",
    "Qwen3-235B": "qwen3-235b-a22b", "Qwen3.5-397B": "qwen3.5-397b-a17b", "Llama-3.1-8B": "llama-3-8b",
}  # fmt: skip
SYSTEMS = {"b200_sxm": "B200-SXM", "b300_sxm": "B300-SXM", "h100_sxm": "H100-SXM5-80GB", "gb200": "GB200",
           "gb300": "GB300"}  # fmt: skip
MOST_DEVICES = 8
# Public recipes with requests that warm the engine up, as since December 2025; the same before; and another one.
HARNESSES = ("recipes", "cold", "other")
_FIELDS = ("id", "silicon_data_source", "backend", "model_path", "system", "mode", "isl", "osl", "silicon_ttft_ms",
           "silicon_tpot_ms", "gemm_quant_mode", "tp_size", "moe_ep_size")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measured server under one load."""

    id: str
    architecture: str
    system: str
    engine: str
    version: str
    dtype: str
    prompt: int  # nominal tokens
    output: int
    clients: int  # requests in flight
    layout: Layout
    harness: str  # of HARNESSES
    ttft_s: float
    tpot_s: float
    prefill: Layout | None = None  # of one worker, where prompts have workers of their own; `layout` is of decoding
    prefill_workers: int = 0
    decode_workers: int = 0
    mended: bool = False

    @property
    def deployment(self) -> tuple[object, ...]:
        """What a server is set up as; rows of one deployment differ in load and version only."""
        return (self.architecture, self.system, self.engine, self.dtype, self.layout, self.prefill,
                self.prefill_workers, self.decode_workers)  # fmt: skip

    @property
    def group(self) -> tuple[str, str]:
        """Architecture and system."""
        return self.architecture, self.system


@dataclass(frozen=True, kw_only=True)
class Cleaned:
    """Rows of servers with one pool and with two, and what was done to the table."""

    aggregated: tuple[Measured, ...]
    disaggregated: tuple[Measured, ...]
    notes: dict[str, int] = field(default_factory=dict)


def _number(text: str | None, default: float = 1.0) -> float:
    return float(text) if text else default


def mended(tp: int, dp: int, moe_tp: int, ep: int) -> tuple[Layout, bool]:
    """The layout that was meant by sizes of the table, and whether it had to be mended; see the module."""
    root = isqrt(tp * dp)
    if moe_tp == ep > 1 and tp * dp == ep * ep and 1 in (tp, dp):
        return (Layout(tp=root, dp=1, ep=root) if dp == 1 else Layout(tp=1, dp=root, ep=root)), True
    if tp == dp > 1 and moe_tp == 1 and ep == tp * tp:
        return Layout(tp=tp, dp=1, ep=tp), True
    return Layout(tp=tp, dp=dp, ep=ep), False


def read(path: Path) -> Cleaned:
    """The table, cleaned. Raises ForetraceError where it is not that table."""
    rows = list(csv.DictReader(read_text(path).splitlines()))
    if not rows or (missing := [name for name in _FIELDS if name not in rows[0]]):
        lacks = ", ".join(missing) if rows else "every column"
        raise ForetraceError(f"{path} is no table of measured servers (it lacks {lacks}); give silicon_sample.csv.gz.")
    notes: dict[str, int] = defaultdict(int)
    found: dict[tuple[float, float], Measured] = {}
    for row in rows:
        notes["rows"] += 1
        one = _measured(row, notes)
        if one is None:
            continue
        key = float(f"{one.ttft_s:.6g}"), float(f"{one.tpot_s:.6g}")
        if key in found:
            notes["rows of a measurement that stands more than once, left out"] += 1
            if found[key].mended <= one.mended:
                continue
        found[key] = one
    kept = sorted(found.values(), key=lambda each: each.id)
    notes["with mended sizes"] = sum(each.mended for each in kept)
    aggregated = tuple(each for each in kept if each.prefill is None)
    large = [each for each in aggregated if each.layout.devices > MOST_DEVICES]
    notes["aggregated on more than 8 devices, left out"] = len(large)
    aggregated = tuple(each for each in aggregated if each.layout.devices <= MOST_DEVICES)
    disaggregated = tuple(each for each in kept if each.prefill is not None)
    notes["aggregated"], notes["disaggregated"] = len(aggregated), len(disaggregated)
    return Cleaned(aggregated=aggregated, disaggregated=disaggregated, notes=dict(notes))


def _measured(row: dict[str, str], notes: dict[str, int]) -> Measured | None:
    architecture = next((name for part, name in ARCHITECTURES.items() if part in row["model_path"]), "")
    if not architecture or row["system"] not in SYSTEMS:
        notes["of an unknown model or system, left out"] += 1
        return None
    source = row["silicon_data_source"]
    told = re.search(r"silicon_concurrency=(\d+)", source)
    if not told:
        notes["without a number of clients, left out"] += 1
        return None
    disaggregated = row["mode"] == "disagg"
    if disaggregated and not (row["prefill_num_workers"] and row["decode_num_workers"]):
        notes["disaggregated without a number of workers, left out"] += 1
        return None
    gemm, kind = row["gemm_quant_mode"], row["precision"] or ""
    dtype = kind or {"nvfp4": "fp4", "fp8_block": "fp8", "int4_wo": "int4"}.get(gemm, gemm or "bf16")

    def layout(prefix: str) -> tuple[Layout, bool]:
        names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
        return mended(*(int(_number(row[prefix + name])) for name in names))

    decode, fixed = layout("decode_" if disaggregated else "")
    prefill, fixed_too = layout("prefill_") if disaggregated else (None, False)
    return Measured(
        id=row["id"], architecture=architecture, system=row["system"], engine=row["backend"],
        version=row["backend_version"], dtype=dtype, prompt=int(row["isl"]), output=int(row["osl"]),
        clients=int(told[1]), layout=decode,
        harness="other" if "auto-gap-analysis" in source else "recipes" if row["backend_version"] else "cold",
        ttft_s=float(row["silicon_ttft_ms"]) / 1e3, tpot_s=float(row["silicon_tpot_ms"]) / 1e3, prefill=prefill,
        prefill_workers=int(_number(row["prefill_num_workers"], 0)),
        decode_workers=int(_number(row["decode_num_workers"], 0)), mended=fixed or fixed_too,
    )  # fmt: skip
