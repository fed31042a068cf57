"""Look-ups with the reuse of a published trace: how many of them go to rows that are read once, twice, ... in all.

The files are those of facebookresearch/dlrm_datasets (`locality_stats_2021.txt`, `_2022.txt`): per data set, the share
of rows and of look-ups by how often a row is read, in powers of two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError
from foretrace.names import numbers
from foretrace.reading import read_text
from foretrace.training.rows.lookups import MOST_IDS, EmbeddingTable, Lookups

_BIN = re.compile(r"^\(\d+(?:, \d+\]|\+): (\d+\.\d+)$", re.MULTILINE)
_MEAN = re.compile(r"^Avg col size:\s*(\d+\.?\d*)\s*$", re.MULTILINE)
_MEND = "give a file of reuse statistics as facebookresearch/dlrm_datasets publishes them"
MOST_BINS = 32


@dataclass(frozen=True, eq=False, kw_only=True)
class ReuseHistogram:
    """Bin k holds rows that are read more than 2^(k-1) times (bin 0: once) and up to 2^k; the last one has no end."""

    name: str
    mean: float  # times that a row is read
    rows: Float64  # share of rows by bin
    lookups: Float64  # share of look-ups by bin


def read_reuse(path: Path) -> tuple[ReuseHistogram, ...]:
    """Return the data sets of a file. Raises ForetraceError for what is no such file."""
    text = read_text(path, mend=_MEND)
    found = list[ReuseHistogram]()
    for part in re.split(r"\n\s*\n", text.strip()):
        mean, bins = _MEAN.search(part), [float(each) for each in _BIN.findall(part)]
        half = len(bins) // 2
        if mean is None or len(bins) % 2 or not 2 <= half <= MOST_BINS or not sum(bins[half:]):
            raise ForetraceError(f"{path}: data set {len(found)} has no two histograms and a mean; {_MEND}.")
        found.append(
            ReuseHistogram(name=part.splitlines()[0].strip(), mean=float(mean[1]), rows=np.array(bins[:half]),
                           lookups=np.array(bins[half:]) / sum(bins[half:]))
        )  # fmt: skip
    return tuple(found)


def parse_reuse(text: str) -> Lookups:
    """Parse `FILE set=0 samples=512 batches=64 pooling=26 seed=0`: one table. Raises ForetraceError."""
    words = text.split()
    given = numbers(words[1:], {"set": 0, "samples": 512, "batches": 64, "pooling": 26, "seed": 0}, "reuse")
    sets = read_reuse(Path(words[0] if words else ""))
    which = given.pop("set")
    if not 0 <= which < len(sets):
        raise ForetraceError(f"{words[0]} has data sets 0 to {len(sets) - 1}, got `set={which}`.")
    return reused(sets[which], **given)


def reused(histogram: ReuseHistogram, *, samples: int, batches: int, pooling: int, seed: int = 0) -> Lookups:
    """Return look-ups of one table, in a random order, whose shares by bin are the histogram's to one row.

    A bin whose share is less than one of its rows goes to the bin below it. Raises ForetraceError for sizes below 1.
    """
    total = samples * batches * pooling
    if min(samples, batches, pooling) < 1 or seed < 0 or total > MOST_IDS:
        raise ForetraceError(
            f"Look-ups need a sample, a batch and an id, {MOST_IDS:,} ids in all at most, and a seed of at least 0, "
            f"got {samples}, {batches}, {pooling}, {seed}."
        )
    edges = np.round(np.cumsum(histogram.lookups) * total).astype(int)
    left, counts = 0, list[int]()
    for k in range(len(edges) - 1, -1, -1):
        low, high = (0 if k == 0 else 1 << (k - 1)), (1 << k if k < len(edges) - 1 else total)
        here = int(edges[k] - (edges[k - 1] if k else 0)) + left
        if here < low + 1:
            left = here
            continue
        left = 0
        share = histogram.rows[k]
        mean = histogram.lookups[k] * histogram.mean / share if share else 1.5 * low
        rows = min(max(round(here / max(mean, 1.0)), -(-here // high)), here // (low + 1))
        counts += [here // rows + (i < here % rows) for i in range(rows)]
    random = np.random.default_rng(seed)
    ids = random.permutation(np.repeat(random.permutation(len(counts)), counts))
    offsets = np.arange(samples * batches + 1, dtype=np.int64) * pooling
    table = EmbeddingTable(name="reuse", rows=len(counts), ids=ids.astype(np.int64), offsets=offsets)
    return Lookups(tables=(table,), samples=samples)
