"""The protocol in small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reproductions.__main__ import main
from reproductions.marius import protocol


def test_swaps_are_those_of_the_paper() -> None:
    cells = {row[0]: row[1:] for row in protocol.swap_rows()}
    assert cells["16"][1].startswith("38: 42 (1.11), 54 (1.42)")
    assert cells["64"][0] == "2015: 2015 (1.00)"


def test_the_page_is_written_from_small_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="trains; install the extra torch")
    random = np.random.default_rng(0)
    for name in ("cora", "citeseer"):
        np.savez(
            tmp_path / f"{name}.npz", edges=random.integers(0, 40, (120, 2)), x=random.random((40, 6)),
            label=np.arange(40) % 3, train_idx=np.arange(9), test_idx=np.arange(20, 40),
        )  # fmt: skip
    assert main(("marius", "--graphs", str(tmp_path), "--epochs", "2", "--seeds", "1", "--print")) == 0
    out = capsys.readouterr().out
    assert "| citeseer | 4 of 8 partitions |" in out and "AUC" in out
