"""How many clusters of heads each layer gets by the published rule (Agarwal et al., CHAI, ICML 2024, section 3.2)."""

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
    seen, counts = copy.deepcopy(model).eval(), range(1, heads_of(model) + 1)
    seen.set_attn_implementation("eager")
    with torch.inference_mode():
        layers = seen(samples, output_attentions=True).attentions
    return np.array([[float(group_heads(each.flatten(2), count)[1].sum()) for count in counts] for each in layers])


def elbow(spread: Float64) -> int:
    """Return after how many clusters more of them gain little: where the curve is farthest below its chord."""
    span = np.linspace(0.0, 1.0, len(spread))
    fallen = (spread - spread[-1]) / max(float(spread[0] - spread[-1]), 1e-12)
    return int(np.argmax(1.0 - span - fallen)) + 1
