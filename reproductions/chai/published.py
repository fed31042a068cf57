"""What CHAI rests on: heads whose scores correlate, and counts by an elbow (Agarwal et al., ICML 2024, section 3)."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretrace.arrays import Float64
from foretrace.training.clustered_heads import group_heads, heads_of


def spreads(model: Any, samples: Tensor) -> Float64:
    """Return (layers, heads): squared distances within column + 1 clusters of heads by all their scores, summed."""
    counts = range(1, heads_of(model) + 1)
    return np.array([
        [float(group_heads(each.flatten(2), count)[1].sum()) for count in counts] for each in _scores(model, samples)
    ])  # fmt: skip


def alike(model: Any, samples: Tensor) -> Float64:
    """Return (layers, heads): the largest correlation of a head's scores with those of another head of its layer."""
    attended = torch.ones(samples.shape[1], samples.shape[1]).tril() > 0
    found = [np.corrcoef(each[..., attended].transpose(0, 1).flatten(1).numpy()) for each in _scores(model, samples)]
    return np.array([(each - 2 * np.eye(len(each))).max(1) for each in found])


def _scores(model: Any, samples: Tensor) -> tuple[Tensor, ...]:
    """Return scores (samples, heads, tokens, tokens) of every layer."""
    seen = copy.deepcopy(model).eval()
    seen.set_attn_implementation("eager")
    with torch.inference_mode():
        layers: tuple[Tensor, ...] = seen(samples, output_attentions=True).attentions
    return layers


def elbow(spread: Float64) -> int:
    """Return after how many clusters more of them gain little: where the curve is farthest below its chord."""
    span = np.linspace(0.0, 1.0, len(spread))
    fallen = (spread - spread[-1]) / max(float(spread[0] - spread[-1]), 1e-12)
    return int(np.argmax(1.0 - span - fallen)) + 1
