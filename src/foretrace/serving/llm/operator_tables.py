"""`MeasuredTimes`: parts of a step from `OperatorTables`, measured operators in a folder of parquet files.

The files are those of the collector of aiconfigurator (Apache-2.0), `DEVICE/KIND/ENGINE/VERSION/NAME_perf.parquet`:
products by (m, n, k), attention of prompts by (batch, length) and of decoding by (batch, step), experts by tokens, and
collectives by elements of 16 bits. The newest version of an engine counts. Between points, logarithms of times are
linear in logarithms of sizes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError, MissingExtraError
from foretrace.hardware.devices import Device, find
from foretrace.serving.llm.step_law import LawTimes

GEMM_DTYPES = {"bf16": "bfloat16", "fp8": "fp8", "fp8_block": "fp8_block"}
_Key = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeGrid:
    """Seconds over one or more increasing axes of sizes, (A, B, ...); NaN where nothing was measured."""

    axes: tuple[Float64, ...]
    seconds: Float64

    def at(self, *sizes: float | Float64) -> Float64:
        """Return seconds at sizes that are broadcast against each other; beyond an axis its last segment is continued.

        A cell with a corner that was not measured has the time of its nearest measured corner.
        """
        given = np.broadcast_arrays(*(np.asarray(size, np.float64) for size in sizes))
        lower, shares = [], []
        for axis, size in zip(self.axes, given, strict=True):
            logs = np.log(axis)
            at = np.clip(np.searchsorted(axis, size, side="right") - 1, 0, max(len(axis) - 2, 0))
            lower.append(at)
            step = logs[at + 1] - logs[at] if len(axis) > 1 else np.ones(at.shape)
            shares.append((np.log(np.maximum(size, axis[0])) - logs[at]) / step)
        total, weights = np.zeros(given[0].shape), np.zeros(given[0].shape)
        for corner in np.ndindex(*(min(2, len(axis)) for axis in self.axes)):
            value = np.log(self.seconds[tuple(at + bit for at, bit in zip(lower, corner, strict=True))])
            weight = np.ones(given[0].shape)
            for share, bit, axis in zip(shares, corner, self.axes, strict=True):
                weight = weight * (share if bit else 1 - share) if len(axis) > 1 else weight
            known = ~np.isnan(value)
            total += np.where(known, weight * np.nan_to_num(value), 0.0)
            weights += np.where(known, weight, 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Float64 = np.exp(total / weights)
        return found


@dataclass(frozen=True, kw_only=True)
class OperatorTables:
    """Measured operators of one device, for one engine where they were. Seconds."""

    device: str
    gemm: Mapping[str, TimeGrid] = field(default_factory=dict)  # dtype -> (m, n, k)
    prefill: Mapping[_Key, TimeGrid] = field(default_factory=dict)  # heads, heads of keys, width -> (batch, length)
    decode: Mapping[_Key, TimeGrid] = field(default_factory=dict)  # the same -> (batch, step)
    experts: Mapping[tuple[str, _Key], TimeGrid] = field(default_factory=dict)  # dtype, sizes -> (tokens,)
    all_reduce: Mapping[int, TimeGrid] = field(default_factory=dict)  # devices -> (bytes,)
    sources: Mapping[str, str] = field(default_factory=dict)  # kind of table -> engine and version

    def product(self, m: Float64, n: float, k: float, dtype: str) -> Float64:
        """Return seconds of [m x k] by [k x n]. Raises KeyError where this type was not measured."""
        grid = self.gemm[GEMM_DTYPES.get(dtype, dtype)]
        # Where n or k lies beyond the table, several products of its largest size are as much work.
        parts = max(1.0, n / grid.axes[1][-1]) * max(1.0, k / grid.axes[2][-1])
        found: Float64 = parts * grid.at(m, min(n, grid.axes[1][-1]), min(k, grid.axes[2][-1]))
        return found


def nearest(grids: Mapping[_Key, TimeGrid], wanted: _Key) -> tuple[TimeGrid, float] | None:
    """Return the grid of the nearest key and the factor on its times by the first size, the one that divides
    the work.
    """
    if not grids:
        return None
    key = min(grids, key=lambda each: float(np.abs(np.log(np.array(each) / np.array(wanted))).sum()))
    if key[1:] != wanted[1:] and np.abs(np.log(np.array(key) / np.array(wanted))).max() > np.log(4):
        return None
    return grids[key], 1.0 if key == wanted else wanted[0] / key[0]


@dataclass(kw_only=True)
class MeasuredTimes(LawTimes):
    """Parts of a step from measured operators, each where it was measured; `left` says what was not."""

    tables: OperatorTables
    left: list[str] = field(default_factory=list)
    used: dict[str, str] = field(default_factory=dict)
    scaled: bool = False

    def linear(self, tokens: Float64) -> Float64:
        """See `LawTimes`; what lies between products are bytes at the rate of weights, and a kernel each."""
        model, tp, everyone, dtype = self.model, self.layout.tp, self.layout.stage_devices, self.kept.name
        lack = "" if GEMM_DTYPES.get(dtype, dtype) in self.tables.gemm else f"none of {dtype} were measured"
        if model.latent or model.mixing or (self.kept.attention < 2 and dtype != "fp8"):
            lack = "those of this attention were not measured"
        if lack:  # all of them: the law's kernels are not those of some measured operators
            self.left.append(f"products by the law: {lack}")
            return LawTimes(**{each.name: getattr(self, each.name) for each in fields(LawTimes)}).linear(tokens)
        self.used["gemm"] = self.tables.sources["gemm"]
        own, product = np.maximum(tokens / self.layout.dp, 1.0), self.tables.product
        heads, kv = model.heads / tp, max(model.kv_heads / tp, 1)
        total = model.layers * (
            product(own, (heads + 2 * kv) * model.head, model.hidden, dtype)
            + product(own, model.hidden, heads * model.head, dtype)
        )
        if model.dense:
            wide = (2 if model.gated else 1) * model.inner / everyone
            total = total + model.dense * (
                product(tokens, wide, model.hidden, dtype)
                + product(tokens, model.hidden, model.inner / everyone, dtype)
            )
        if model.experts:
            total = total + model.moe_layers * self.experts(tokens)
        nbytes = 2.0 * (8 * model.hidden + 4 * heads * model.head)
        products = 2 * model.layers + 2 * model.dense + 2 * model.moe_layers
        small = (self.kernels - products - 2 * model.layers) * self.law.kernel_s
        rate = self.device.memory_gb_s * 1e9 * self.law.weight_rate
        total = total + model.layers * nbytes * own / rate + max(small, 0.0)
        if everyone > 1:
            total = total + 2 * model.layers * self.all_reduce(2.0 * model.hidden * own)
        found: Float64 = total / self.layout.pp
        return found

    def experts(self, tokens: Float64) -> Float64:
        """See `LawTimes`."""
        model, layout, name = self.model, self.layout, self.kept.name
        key = (model.hidden, model.expert_inner, model.active, model.experts, layout.stage_devices // layout.ep,
               layout.ep)  # fmt: skip
        names = {"fp8": ("fp8_block", "fp8"), "bf16": ("bfloat16",), "int4": ("int4_wo",)}.get(name, (name,))
        grid = next((self.tables.experts[each, key] for each in names if (each, key) in self.tables.experts), None)
        if grid is None:
            self.left.append("experts by the law: these sizes were not measured")
            return super().experts(tokens)
        self.used["experts"] = self.tables.sources["experts"]
        return grid.at(tokens)

    def all_reduce(self, nbytes: Float64) -> Float64:
        """See `LawTimes`."""
        everyone = self.layout.stage_devices
        if everyone not in self.tables.all_reduce:
            self.left.append(f"collectives of {everyone} devices by the law: they were not measured")
            return super().all_reduce(nbytes)
        self.used["all_reduce"] = self.tables.sources["all_reduce"]
        return self.tables.all_reduce[everyone].at(nbytes)

    def output(self, sequences: Float64) -> Float64:
        """See `LawTimes`."""
        if GEMM_DTYPES["bf16"] not in self.tables.gemm:
            return super().output(sequences)
        rows = np.maximum(sequences / self.layout.dp, 1.0)
        return self.tables.product(rows, self.model.words / self.layout.tp, self.model.hidden, "bf16")

    def _grid(self, what: str) -> tuple[TimeGrid, float] | None:
        """Return the grid of this attention, and the factor on it."""
        grids: Mapping[tuple[int, ...], TimeGrid] = getattr(self.tables, what)
        model, tp = self.model, self.layout.tp
        wanted = (max(model.heads // tp, 1), max(model.kv_heads // tp, 1), model.head)
        found = None if model.latent or self.kept.cache < 2 else nearest(grids, wanted)
        if found is None:
            self.left.append(f"attention ({what}) by the law: it was not measured")
            return None
        self.used[what] = self.tables.sources[what]
        self.scaled |= wanted not in grids
        return found[0], found[1] * model.attending / self.layout.pp

    def decode(self, batch: Float64, context: Float64) -> Float64:
        """See `LawTimes`."""
        by_law = super().decode(batch, context)
        if (found := self._grid("decode")) is None:
            return by_law
        grid, scale = found
        seconds = scale * grid.at(np.maximum(batch / self.layout.dp, 1.0)[:, None], context)
        return np.maximum.accumulate(np.where(np.isfinite(seconds), seconds, by_law), axis=1)

    def prefill(self, chunk: Float64, context: Float64) -> Float64:
        """See `LawTimes`. A chunk costs what the whole prompt does more than the context alone, and never less than
        the chunk alone.
        """
        if (found := self._grid("prefill")) is None:
            return super().prefill(chunk, context)
        grid, scale = found
        before = np.where(context > 0, grid.at(1.0, np.maximum(context, 1.0)), 0.0)
        seconds = np.maximum(grid.at(1.0, chunk[:, None] + context) - before, grid.at(1.0, chunk)[:, None])
        return scale * np.maximum.accumulate(seconds, axis=0)


def read_tables(folder: Path, device: Device, engine: str) -> OperatorTables:
    """Read the tables of this device under `folder`; those of the engine first. Raises ForetraceError."""
    found: dict[str, dict[Path, tuple[bool, tuple[int, ...]]]] = defaultdict(dict)
    if not folder.is_dir():
        raise ForetraceError(f"`tables=` {folder} is no folder; give one with parquet files of measured operators.")
    others = set()
    for path in sorted(folder.rglob("*_perf.parquet")):
        head = _columns(path, 1)
        name = str(head[0].get("device", "")) if head else ""
        on = find(name)
        if on is None or on.short != device.short:
            others.add(name or path.parent.name)
            continue
        rank = path.parent.parent.name == engine, _version(path.parent.name)
        found[path.name.removesuffix("_perf.parquet")][path] = rank
    kinds = {"gemm": "gemm", "context_attention": "prefill", "generation_attention": "decode", "moe": "experts",
             "custom_allreduce": "all_reduce"}  # fmt: skip
    read: dict[str, Any] = {}
    sources = {}
    for file, name in kinds.items():
        if file in found:
            path = max(found[file], key=lambda each: found[file][each])
            read[name] = _READERS[name](_columns(path))
            sources[name] = f"{path.parent.parent.name} {path.parent.name}"
    if not read:
        there = ", ".join(sorted(others)[:4]) or "no such file"
        raise ForetraceError(f"{folder} holds no measured operators of {device.short} ({there}); give another folder.")
    return OperatorTables(device=device.short, sources=sources, **read)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", text))


def _columns(path: Path, most: int = 0) -> list[dict[str, Any]]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError(
            "pyarrow is needed to read tables of operators: pip install 'foretrace[tables]'."
        ) from error
    try:
        file = parquet.ParquetFile(path)
        table = next(file.iter_batches(batch_size=most)) if most else file.read()
        rows: list[dict[str, Any]] = table.to_pylist()
    except (OSError, arrow.ArrowException, StopIteration) as error:
        raise ForetraceError(f"{path} cannot be read as parquet ({error}); copy it again.") from None
    return rows


def _grid(rows: Iterator[tuple[_Key, float]]) -> TimeGrid:
    """Return a grid of the sizes that occur; the median where one was measured more than once. Times in ms."""
    cells: dict[_Key, list[float]] = defaultdict(list)
    for sizes, latency in rows:
        if min(sizes) > 0 and 0 < latency < 1e9:
            cells[sizes].append(latency * 1e-3)
    if not cells:
        raise ForetraceError("a table of operators holds no time above 0; copy its file again.")
    axes = [sorted({key[i] for key in cells}) for i in range(len(next(iter(cells))))]
    where = [{size: at for at, size in enumerate(axis)} for axis in axes]
    seconds = np.full([len(axis) for axis in axes], np.nan)
    for sizes, times in cells.items():
        seconds[tuple(where[i][size] for i, size in enumerate(sizes))] = median(times)
    return TimeGrid(axes=tuple(np.array(axis, np.float64) for axis in axes), seconds=seconds)


def _grouped(
    rows: list[dict[str, Any]], group: Callable[[dict[str, Any]], Any], sizes: tuple[str, ...]
) -> dict[Any, TimeGrid]:
    groups: dict[Any, list[tuple[_Key, float]]] = defaultdict(list)
    for row in rows:
        key = group(row)
        if key is not None:
            groups[key].append((tuple(int(row[size]) for size in sizes), float(row["latency"])))
    return {key: _grid(iter(each)) for key, each in groups.items()}


def _heads(row: dict[str, Any]) -> _Key | None:
    """Return heads and width of attention to all tokens in 16 bits; others are left out."""
    if row.get("window_size") or row["kv_cache_dtype"] != "bfloat16" or row["attn_dtype"] != "bfloat16":
        return None
    return int(row["num_heads"]), int(row["num_key_value_heads"]), int(row["head_dim"])


def _expert_sizes(row: dict[str, Any]) -> tuple[str, _Key] | None:
    if row["distribution"] == "balanced":
        return None  # routers are not
    names = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
    return str(row["moe_dtype"]), tuple(int(row[name]) for name in names)


def _all_reduces(rows: list[dict[str, Any]]) -> dict[int, TimeGrid]:
    """Return all-reduces by devices. Sizes are elements of 16 bits; times in a graph count where both ways were
    measured.
    """
    graphs = [row for row in rows if "graph" in str(row.get("kernel_source", ""))] or rows
    found = _grouped(graphs, lambda row: int(row["num_gpus"]), ("message_size",))
    return {n: TimeGrid(axes=(2 * grid.axes[0],), seconds=grid.seconds) for n, grid in found.items()}


_READERS: Mapping[str, Callable[[list[dict[str, Any]]], Any]] = {
    "gemm": lambda rows: _grouped(rows, lambda row: str(row["gemm_dtype"]), ("m", "n", "k")),
    "prefill": lambda rows: _grouped(rows, _heads, ("batch_size", "isl")),
    "decode": lambda rows: _grouped(rows, _heads, ("batch_size", "step")),
    "experts": lambda rows: _grouped(rows, _expert_sizes, ("num_tokens",)),
    "all_reduce": _all_reduces,
}
