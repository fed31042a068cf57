"""What CHAI rests on: heads whose scores correlate, and counts by an elbow (Agarwal et al., ICML 2024, section 3).

Beside it, counts for clusters per request by what they change.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretrace.arrays import Float64
from foretrace.training.clustered_heads import cluster_heads, group_heads, heads_of
from foretrace.training.head_counts import loss_after

_EIGHTHS = (1, 2, 3, 4, 6)  # of the heads, as clusters that are measured


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


def measured_counts(model: Any, samples: Tensor, warm_up: int, savings: Sequence[float]) -> list[list[int]]:
    """Return clusters of each layer that save so much of keys and values at the least sum of losses, for each saving.

    The loss of a count is that of its layer alone, clustered per request by the scores of the first `warm_up` tokens.
    """
    layers, heads = int(model.config.num_hidden_layers), heads_of(model)
    levels, whole = sorted({max(heads * part // 8, 1) for part in _EIGHTHS}), loss_after(model, samples, warm_up)
    ways: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # by heads that compute no scores: the least loss
    for layer in range(layers):
        lost = {heads: 0.0}
        for count in levels:
            changed = copy.deepcopy(model)
            cluster_heads(changed, [count if each == layer else heads for each in range(layers)], warm_up=warm_up)
            lost[count] = loss_after(changed, samples, warm_up) - whole
        more: dict[int, tuple[float, list[int]]] = {}
        for saved, (loss, counts) in ways.items():
            for count, own in lost.items():
                way, at = (loss + own, [*counts, count]), saved + heads - count
                more[at] = min(more.get(at, way), way)
        ways = more
    return [min(way for saved, way in ways.items() if saved >= 2 * each * layers * heads - 1e-9)[1] for each in savings]
