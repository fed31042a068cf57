"""Traces of look-ups by what a user writes: generated, read from a file, or recorded from a model's own loader."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foretrace.arrays import Int64
from foretrace.errors import ForetraceError
from foretrace.names import numbers
from foretrace.training.rows.lookups import EmbeddingTable, Lookups, read
from foretrace.training.rows.reuse import parse_reuse

if TYPE_CHECKING:
    from torch import Tensor, nn


def trace(text: str) -> Lookups:
    """Make lookups from `zipf:...`, `reuse:FILE ...`, `recorded:MODEL ...`, or an NPZ or Parquet file. Raises
    ForetraceError.
    """
    kind, colon, rest = text.partition(":")
    if colon and kind == "reuse":
        return parse_reuse(rest)
    return recorded(rest) if colon and kind == "recorded" else read(text)


def recorded(text: str) -> Lookups:
    """Record, for `dlrm size=tiny batches=32`, what each embedding of a zoo model or script reads of its loader's
    batches.

    Raises ForetraceError where the model has no embeddings, or its batches differ in size.
    """
    import torch

    from foretrace.zoo.registry import job

    name, *words = text.split() or [""]
    size = next((each for each in words if each.startswith("size=")), "size=tiny")
    batches = numbers([each for each in words if each != size], {"batches": 32}, "recorded")["batches"]
    training = job(name, size.removeprefix("size="))()
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    modules = {key: each for key, each in training.model.named_modules() if isinstance(each, kinds)}
    if not modules or batches < 1:
        raise ForetraceError(
            f"`recorded:{name}` must have embedding tables and a batch or more, got {len(modules)} tables and "
            f"{batches} batches; choose dlrm or ncf, and batches=1 or more."
        )
    seen: dict[str, list[Int64]] = {key: [] for key in modules}

    def keep(key: str) -> None:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[key].append(inputs[0].detach().numpy().ravel().astype(np.int64))

        modules[key].register_forward_pre_hook(hook)

    for key in modules:
        keep(key)
    with torch.no_grad():
        for _, batch in zip(range(batches), training.batches(), strict=False):
            training.forward(batch)
    samples, tables = training.batch_size, []
    for key, parts in seen.items():
        ids = np.concatenate(parts) if parts else np.empty(0, np.int64)
        pooling, rest = divmod(len(ids), samples * batches)
        if rest or not pooling or len({len(each) for each in parts}) > 1:
            raise ForetraceError(f"{name} must read as many ids of {key} for every sample of a batch.")
        offsets = np.arange(samples * batches + 1, dtype=np.int64) * pooling
        tables.append(EmbeddingTable(name=key, rows=modules[key].num_embeddings, ids=ids, offsets=offsets))
    return Lookups(tables=tuple(tables), samples=samples)
