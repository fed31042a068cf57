"""The protocol in small: a cell that is measured, pictures that can be told, and a page of what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from foretrace.training.product_quantised import ProductQuantised, Quantiser
from reproductions.pq_dnn import protocol, trained


def test_a_network_is_quantised_trained_again_and_tested() -> None:
    torch.manual_seed(0)
    quantiser = Quantiser(length=9, prototypes=4, bits=8)
    found = trained.quantised(trained.ResNet(), quantiser, 0, 2, protocol.RATES, 0.3, tested=250)
    assert 0 <= found["kmeans"] <= 1 and 0 <= found["accuracy"] <= 1 and 0 < found["lost"] < 1
    assert found["against"] == 0, "the nearest by squares never steps back"
    assert 1 <= found["used"] <= 4
    assert 0 <= trained.longer(trained.ResNet(), 0, 1, protocol.RATES, 0.3, tested=250) <= 1


def test_a_dense_network_is_kept(tmp_path: Path) -> None:
    first, accuracy = trained.dense(0, tmp_path, 0.3, steps=1)
    again, same = trained.dense(0, tmp_path, 0.3, steps=1)
    assert accuracy == same and not any(isinstance(each, ProductQuantised) for each in again.modules())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


def test_pictures_are_the_same_by_seed_and_balanced() -> None:
    (x, labels), (again, _) = trained.images(500, 3, 0.3), trained.images(500, 3, 0.3)
    assert torch.equal(x, again) and x.shape == (500, 3, trained.SIDE, trained.SIDE)
    assert int(torch.bincount(labels, minlength=trained.CLASSES).min()) > 20


def test_the_page_has_no_gain_without_its_loss() -> None:
    cells = [
        protocol.of_point(point, seed)
        | {"dense": 0.94, "kmeans": 0.3, "lost": 0.2, "accuracy": 0.90 + 0.01 * seed, "cpu_s": 1.0}
        for point in [
            (*point, "straight", protocol.STEPS, protocol.RATES, protocol.NOISE) for point in protocol.POINTS[:2]
        ]
        for seed in range(protocol.SEEDS)
    ]
    text = protocol.page(cells[:-1], 2000)
    compared, _, course = text.partition("How far it comes")
    assert compared.count(f"| 9, 16, L2 | straight | {protocol.STEPS} |") == 1
    assert "| 9, 16, L1 | straight" not in compared and "| 9, 16, L1 | straight" in course, "a seed is missing"
    rows = [line for line in text.splitlines() if line.startswith("| 9, 16, L2 | 3.0 |")]
    assert len(rows) == 2 and "every setting that was measured loses more" in text
