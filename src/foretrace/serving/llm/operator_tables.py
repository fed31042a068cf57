"""`MeasuredTimes`: parts of a step from `OperatorTables`, measured operators in a folder of parquet files.

The files are those of the collector of aiconfigurator (Apache-2.0), `DEVICE/KIND/ENGINE/VERSION/NAME_perf.parquet`:
products by (m, n, k), attention of prompts by (batch, length) and of decoding by (batch, step), experts by tokens, and
collectives by elements of 16 bits. The newest version of an engine counts. Between points, logarithms of times are
linear in logarithms of sizes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from itertools import product
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError, needing
from foretrace.hardware.devices import Device, find
from foretrace.serving.llm.step_law import LawTimes

_Key = tuple[Any, ...]
_HEADS = ("num_heads", "num_key_value_heads", "head_dim")
_EXPERTS = ("moe_dtype", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size")
# Kind of table -> name of its file, the columns that say which table a row is of, and those of its sizes.
_FILES = {
    "gemm": ("gemm", ("gemm_dtype",), ("m", "n", "k")),
    "prefill": ("context_attention", _HEADS, ("batch_size", "isl")),
    "decode": ("generation_attention", _HEADS, ("batch_size", "step")),
    "experts": ("moe", _EXPERTS, ("num_tokens",)),
    "all_reduce": ("custom_allreduce", ("num_gpus",), ("message_size",)),
}
_BYTES = {"message_size": 2}  # of one in a column of sizes
_GEMM_DTYPES = {"bf16": "bfloat16"}
_EXPERT_DTYPES = {"fp8": ("fp8_block", "fp8"), "bf16": ("bfloat16",), "int4": ("int4_wo",)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeGrid:
    """Seconds over one or more increasing axes of sizes, (A, B, ...); NaN where nothing was measured."""

    axes: tuple[Float64, ...]
    seconds: Float64

    @classmethod
    def of(cls, measured: Mapping[tuple[int, ...], list[float]]) -> TimeGrid:
        """Return a grid of the sizes that occur; the median where one was measured more than once."""
        found = [np.unique(column, return_inverse=True) for column in np.array(list(measured), np.float64).T]
        seconds = np.full([len(axis) for axis, _ in found], np.nan)
        seconds[tuple(at for _, at in found)] = [median(each) for each in measured.values()]
        return cls(axes=tuple(axis for axis, _ in found), seconds=seconds)

    def at(self, *sizes: float | Float64) -> Float64:
        """Return seconds at sizes that are broadcast against each other; beyond an axis its last segment is continued.

        A cell with a corner that was not measured has the time of its nearest measured corner.
        """
        given = np.broadcast_arrays(*(np.asarray(size, np.float64) for size in sizes))
        places: list[list[tuple[Any, Any]]] = []  # of each axis, index and weight of the points around
        for axis, size in zip(self.axes, given, strict=True):
            if len(axis) == 1:
                places.append([(0, 1.0)])
                continue
            logs = np.log(axis)
            at = np.clip(np.searchsorted(axis, size, side="right") - 1, 0, len(axis) - 2)
            share = (np.log(np.maximum(size, axis[0])) - logs[at]) / (logs[at + 1] - logs[at])
            places.append([(at, 1 - share), (at + 1, share)])
        total, weights = np.zeros(given[0].shape), np.zeros(given[0].shape)
        for corner in product(*places):
            value, weight = np.log(self.seconds[tuple(at for at, _ in corner)]), prod(share for _, share in corner)
            total += np.where(np.isnan(value), 0.0, weight * np.nan_to_num(value))
            weights += np.where(np.isnan(value), 0.0, weight)
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Float64 = np.exp(total / weights)
        return found


@dataclass(frozen=True, kw_only=True)
class OperatorTables:
    """Measured operators of one device, for one engine where they were. Seconds.

    Grids by kind and key: gemm: (type) -> (m, n, k); prefill, decode: (heads, heads of keys, width) -> (batch, length);
    experts: (type, sizes) -> (tokens); all_reduce: (devices) -> (bytes).
    """

    grids: Mapping[str, Mapping[_Key, TimeGrid]]  # of every kind, none where it was not measured
    sources: Mapping[str, str]  # kind of table -> engine and version


def multiplied(grid: TimeGrid, m: Float64, n: float, k: float) -> Float64:
    """Return seconds of [m x k] by [k x n]."""
    # Where n or k lies beyond the table, several products of its largest size are as much work.
    parts = max(1.0, n / grid.axes[1][-1]) * max(1.0, k / grid.axes[2][-1])
    found: Float64 = parts * grid.at(m, min(n, grid.axes[1][-1]), min(k, grid.axes[2][-1]))
    return found


def nearest(keys: Iterable[_Key], wanted: _Key) -> _Key | None:
    """Return the nearest heads and width; None where a factor of 4 lies between them, but for heads alone."""

    def far(key: _Key) -> Float64:
        found: Float64 = np.abs(np.log(np.array(key) / np.array(wanted)))
        return found

    key = min(keys, key=lambda each: float(far(each).sum()), default=None)
    return None if key is None or (key[1:] != wanted[1:] and far(key).max() > np.log(4)) else key


@dataclass(kw_only=True)
class MeasuredTimes(LawTimes):
    """Parts of a step from measured operators, each where it was measured; `left` says what was not."""

    tables: OperatorTables
    left: list[str] = field(default_factory=list)
    used: dict[str, str] = field(default_factory=dict)
    scaled: bool = False

    def _table(self, kind: str, *keys: _Key) -> TimeGrid | None:
        """Return the first of these tables that was measured, and note which part comes from where."""
        grids = self.tables.grids[kind]
        found = next((grids[key] for key in keys if key in grids), None)
        if found is None:
            self.left.append(f"{kind.replace('_', '-')}: by the law, it was not measured")
        else:
            self.used[kind] = self.tables.sources[kind]
        return found

    def linear(self, tokens: Float64) -> Float64:
        """See `LawTimes`; what lies between products are bytes at the rate of weights, and a kernel each."""
        model, tp, everyone, dtype = self.model, self.layout.tp, self.layout.stage_devices, self.kept.name
        others = model.latent or model.mixing  # products that the widths below do not give
        grid = self._table("gemm", *([] if others else [(_GEMM_DTYPES.get(dtype, dtype),)]))
        if grid is None:  # all of them: the law's kernels are not those of some measured operators
            return LawTimes(**{each.name: getattr(self, each.name) for each in fields(LawTimes)}).linear(tokens)
        own = np.maximum(tokens / self.layout.dp, 1.0)
        heads, kv = model.heads / tp, max(model.kv_heads / tp, 1)
        total = model.layers * (
            multiplied(grid, own, (heads + 2 * kv) * model.head, model.hidden)
            + multiplied(grid, own, model.hidden, heads * model.head)
        )
        if model.dense:
            wide = (2 if model.gated else 1) * model.inner / everyone
            total = total + model.dense * (
                multiplied(grid, tokens, wide, model.hidden)
                + multiplied(grid, tokens, model.hidden, model.inner / everyone)
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
        sizes = (model.hidden, model.expert_inner, model.active, model.experts, layout.stage_devices // layout.ep,
                 layout.ep)  # fmt: skip
        grid = self._table("experts", *((each, *sizes) for each in _EXPERT_DTYPES.get(name, (name,))))
        return super().experts(tokens) if grid is None else grid.at(tokens)

    def all_reduce(self, nbytes: Float64) -> Float64:
        """See `LawTimes`."""
        grid = self._table("all_reduce", (self.layout.stage_devices,))
        return super().all_reduce(nbytes) if grid is None else grid.at(nbytes)

    def output(self, sequences: Float64) -> Float64:
        """See `LawTimes`."""
        grid = self.tables.grids["gemm"].get(("bfloat16",))
        if grid is None:
            return super().output(sequences)
        rows = np.maximum(sequences / self.layout.dp, 1.0)
        return multiplied(grid, rows, self.model.words / self.layout.tp, self.model.hidden)

    def _attention_table(self, kind: str) -> tuple[TimeGrid | None, float]:
        """Return the grid of this attention, and the factor on it: heads divide the work."""
        model, tp = self.model, self.layout.tp
        wanted = (max(model.heads // tp, 1), max(model.kv_heads // tp, 1), model.head)
        key = None if model.latent or self.kept.cache < 2 else nearest(self.tables.grids[kind], wanted)
        grid = self._table(kind, *([key] if key else []))
        if not key:
            return grid, 1.0
        self.scaled |= key != wanted
        return grid, (1.0 if key == wanted else wanted[0] / key[0]) * model.attending / self.layout.pp

    def decode(self, batch: Float64, context: Float64) -> Float64:
        """See `LawTimes`."""
        by_law = super().decode(batch, context)
        grid, scale = self._attention_table("decode")
        if grid is None:
            return by_law
        seconds = scale * grid.at(np.maximum(batch / self.layout.dp, 1.0)[:, None], context)
        return np.maximum.accumulate(np.where(np.isfinite(seconds), seconds, by_law), axis=1)

    def prefill(self, chunk: Float64, context: Float64) -> Float64:
        """See `LawTimes`. A chunk costs what prompt costs more than context, and never less than the chunk alone."""
        grid, scale = self._attention_table("prefill")
        if grid is None:
            return super().prefill(chunk, context)
        before = np.where(context > 0, grid.at(1.0, np.maximum(context, 1.0)), 0.0)
        seconds = np.maximum(grid.at(1.0, chunk[:, None] + context) - before, grid.at(1.0, chunk)[:, None])
        return scale * np.maximum.accumulate(seconds, axis=0)


def read_tables(folder: Path, device: Device, engine: str) -> OperatorTables:
    """Read the tables of this device under `folder`; those of the engine first. Raises ForetraceError."""
    if not folder.is_dir():
        raise ForetraceError(f"`tables=` {folder} is no folder; give one with parquet files of measured operators.")
    found, others = defaultdict[str, list[Path]](list), set()
    for path in sorted(folder.rglob("*_perf.parquet")):
        head = _rows(path, 1)
        name = str(head[0].get("device", "")) if head else ""
        on = find(name)
        if on is not None and on.short == device.short:
            found[path.name.removesuffix("_perf.parquet")].append(path)
        else:
            others.add(name or path.parent.name)
    sources = dict[str, str]()
    grids: dict[str, dict[_Key, TimeGrid]] = {kind: {} for kind in _FILES}
    for kind, (file, names, sizes) in _FILES.items():
        if file in found:
            path = max(found[file], key=lambda each: (each.parent.parent.name == engine, _version(each.parent.name)))
            grids[kind] = _grids(_rows(path), names, sizes)
            sources[kind] = f"{path.parent.parent.name} {path.parent.name}"
            if not grids[kind]:
                raise ForetraceError(f"{path} holds no time above 0 that can be taken; copy it again.")
    if not sources:
        there = ", ".join(sorted(others)[:4]) or "no such file"
        raise ForetraceError(f"{folder} holds no measured operators of {device.short} ({there}); give another folder.")
    return OperatorTables(grids=grids, sources=sources)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", text))


def _rows(path: Path, most: int = 0) -> list[dict[str, Any]]:
    with needing("reading tables of operators"):
        import pyarrow as arrow
        from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        table = next(file.iter_batches(batch_size=most)) if most else file.read()
        rows: list[dict[str, Any]] = table.to_pylist()
    except (OSError, arrow.ArrowException, StopIteration) as error:
        raise ForetraceError(f"{path} cannot be read as parquet ({error}); copy it again.") from None
    return rows


def _grids(rows: list[dict[str, Any]], names: Iterable[str], sizes: Iterable[str]) -> dict[_Key, TimeGrid]:
    """Return grids of the rows that count, by what is in the columns `names`; of both ways, those in a graph count."""
    measured: dict[_Key, dict[tuple[int, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in [row for row in rows if "graph" in str(row.get("kernel_source", ""))] or rows:
        at, latency_ms = tuple(int(row[each]) * _BYTES.get(each, 1) for each in sizes), float(row["latency"])
        if _counts(row) and min(at) > 0 and 0 < latency_ms < 1e9:
            measured[tuple(row[name] for name in names)][at].append(latency_ms * 1e-3)
    return {key: TimeGrid.of(each) for key, each in measured.items()}


def _counts(row: dict[str, Any]) -> bool:
    """Return whether a row is none of attention in 8 bits or a window, nor of experts that routers do not choose."""
    in_16_bits = all(row.get(each, "bfloat16") == "bfloat16" for each in ("kv_cache_dtype", "attn_dtype"))
    return in_16_bits and not row.get("window_size") and row.get("distribution") != "balanced"
