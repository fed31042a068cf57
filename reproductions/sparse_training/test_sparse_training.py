"""Skipping is exact on every network, and the protocol in small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foretrace.training.sparsity import exact, taken
from reproductions.sparse_training.nets import NETS, training
from reproductions.sparse_training.protocol import main
from reproductions.sparse_training.trained import checkpoints


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", NETS)
def test_skipping_leaves_all_gradients_bit_identical(name: str, seed: int) -> None:
    torch.set_num_threads(1)
    job = training(name, batch=2, seed=seed)
    convs = taken(job, images=2).convs
    # All but the first have a ReLU before them (DenseNet's transitions, too), and much is skipped.
    assert [each.maskable for each in convs] == [False] + [True] * (len(convs) - 1)
    skipped = sum((~each.inputs).sum() for each in convs[1:]) / sum(each.inputs.size for each in convs[1:])
    assert 0.2 < skipped < 0.8
    dense = sum(each.zeros[1] for each in convs) / len(convs) < 0.05
    assert dense == (name not in ("VGG", "GoogLeNet"))
    assert exact(job)


def test_the_protocol_prints_its_tables(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reproductions.sparse_training.trained.accuracy", lambda model: 0.5)
    for home in ("trained", "protocol"):
        monkeypatch.setattr(f"reproductions.sparse_training.{home}.AT", (1.0,))
    assert main(["--net", "VGG", "--steps", "1", "--folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "| published | 1.69 – 5.43 |" in text and "| VGG | 1 | 0.500 |" in text and "exact at 1 of 1" in text
    assert [each.step for each in checkpoints("VGG", 1, tmp_path)] == [1]
