"""Look-ups with a published reuse histogram."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.training.rows.lookups import parse_reuse, read_reuse, reused

FILE = """set.pt
Avg col size: 2.0
Histogram of col sizes:
(0, 1]: 0.500
(1, 2]: 0.250
(2, 4]: 0.250
(4+: 0.000
[0, 1, 2, 4]
Ratio of index distribution at different column sizes:
(0, 1]: 0.250
(1, 2]: 0.250
(2, 4]: 0.500
(4+: 0.000
"""


def test_shares_by_reuse_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "stats.txt"
    path.write_text(FILE)
    lookups = parse_reuse(f"{path} samples=100 batches=10 pooling=4")
    (table,) = lookups.tables
    times = np.bincount(table.ids, minlength=table.rows)
    assert (lookups.batches, len(table.ids), len(table.offsets)) == (10, 4000, 1001)
    assert (times == 1).sum() == 1000 and (times == 2).sum() == 500 and times[(times > 2)].sum() == 2000
    assert times.min() == 1 and times.max() == 4 and table.rows == 2000  # 4000 look-ups at 2.0 each


def test_published_files_are_read_and_generated_to_one_row(shared_data: Path) -> None:
    for year, count in ((2021, 17), (2022, 16)):
        sets = read_reuse(shared_data / "embedding" / f"locality_stats_{year}.txt")
        assert len(sets) == count
        for each in sets[:4]:
            lookups = reused(each, samples=256, batches=32, pooling=8)
            (table,) = lookups.tables
            times, total = np.bincount(table.ids), len(table.ids)
            assert total == 256 * 32 * 8
            for k in range(8):
                low, high = (0 if k == 0 else 1 << (k - 1)), 1 << k
                share = times[(times > low) & (times <= high)].sum() / total
                assert share == pytest.approx(each.lookups[k], abs=2 / total + high / total), (each.name, k)


@pytest.mark.parametrize("text", ["", "/nowhere", "{} set=9", "{} samples=0", "{} samples=x", "{} rows=3"])
def test_what_cannot_be_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "stats.txt"
    path.write_text(FILE)
    with pytest.raises(ForetraceError):
        parse_reuse(text.format(path))
    path.write_text("nothing of the kind")
    with pytest.raises(ForetraceError, match="histograms"):
        read_reuse(path)
