"""How many clusters of heads each layer of a decoder gets: by how far clustering that layer alone moves the loss.

The published rule, an elbow in the spread of scores within clusters, is beside it (Agarwal et al., CHAI, section 3.2).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError
from foretrace.training.clustered_heads import SCORES, HeadGroups, cluster_heads, group_heads, heads_of


def loss_after(model: Any, samples: Tensor, skip: int) -> float:
    """Return the mean loss in nats of tokens (samples, length) after the first `skip` of each, given those before."""
    with torch.inference_mode():
        logits = model(samples, use_cache=False).logits[:, skip:-1].float()
        return float(functional.cross_entropy(logits.flatten(0, 1), samples[:, skip + 1 :].flatten()))


def deviations(
    model: Any, samples: Tensor, *, warm_up: int, by: str = SCORES, tell: Callable[[float], object] = lambda share: None
) -> Float64:
    """Measure what clustering one layer alone does to the loss.

    Args:
        model: a decoder of `transformers`; a copy is changed.
        samples: (samples, length) int64, of text that judges nothing later.
        warm_up: tokens that all heads attend; the loss is that of later ones.
        by: what heads are clustered by, as in `cluster_heads`.
        tell: called with the share that is done.

    Returns:
        (layers, heads): nats more with column + 1 clusters.

    """
    heads, layers = heads_of(model), int(model.config.num_hidden_layers)
    if samples.shape[1] < warm_up + 2:
        raise ForetraceError(
            f"samples must be longer than the warm-up of {warm_up} tokens by 2, got {samples.shape[1]}."
        )
    changed = copy.deepcopy(model).eval()
    clusters = cluster_heads(changed, [heads] * layers, warm_up=warm_up, by=by)
    whole = loss_after(changed, samples, warm_up)
    found = np.zeros((layers, heads))
    for layer in range(layers):
        for count in range(1, heads):
            clusters.counts = [count if each == layer else heads for each in range(layers)]
            found[layer, count - 1] = loss_after(changed, samples, warm_up) - whole
            tell((layer * (heads - 1) + count) / (layers * (heads - 1)))
    return found


def choose_counts(deviation: Float64, saving: float) -> list[int]:
    """Choose clusters per layer that save enough and together deviate least, taking deviations of layers to add up.

    Args:
        deviation: (layers, heads), see `deviations`.
        saving: share of the bytes of keys and values to save, above 0 and below 1/2.

    Returns:
        Clusters of each layer. Raises ForetraceError where no counts save as much.

    """
    layers, heads = deviation.shape
    wanted = int(np.ceil(2 * saving * heads * layers - 1e-9))
    if not 0 < wanted <= layers * (heads - 1):
        most = kv_saving([1] * layers, heads)
        raise ForetraceError(f"`saving=` must be above 0 and at most {most:.3f} with {heads} heads, got {saving}.")
    best = {0: (0.0, list[int]())}  # heads dropped so far, at most what is wanted: least deviation, and the counts
    for row in deviation:
        more: dict[int, tuple[float, list[int]]] = {}
        for dropped, (so_far, counts) in best.items():
            for count in range(1, heads + 1):
                at, cost = min(dropped + heads - count, wanted), so_far + max(float(row[count - 1]), 0.0)
                if at not in more or cost < more[at][0]:
                    more[at] = cost, [*counts, count]
        best = more
    return best[wanted][1]


def spreads(model: Any, samples: Tensor) -> Float64:
    """Return (layers, heads): squared distances within column + 1 clusters of heads by all their scores, summed."""
    heads, layers = heads_of(model), int(model.config.num_hidden_layers)
    seen = copy.deepcopy(model).eval()
    clusters, found = cluster_heads(seen, [1] * layers, warm_up=samples.shape[1]), np.zeros((layers, heads))

    def group(features: Sequence[Tensor], layer: int) -> HeadGroups:
        scores = torch.cat(list(features), 2)
        found[layer] = [float(group_heads(scores, count)[1].sum()) for count in range(1, heads + 1)]
        return group_heads(scores, 1)[0]

    clusters.group = group  # type: ignore[method-assign]  # all tokens are warm-up, so it is given all scores
    loss_after(seen, samples, 0)
    return found


def elbow(spread: Float64) -> int:
    """Return after how many clusters more of them gain little: where the curve is farthest below its chord."""
    span = np.linspace(0.0, 1.0, len(spread))
    fallen = (spread - spread[-1]) / max(float(spread[0] - spread[-1]), 1e-12)
    return int(np.argmax(1.0 - span - fallen)) + 1


def kv_saving(counts: list[int], heads: int) -> float:
    """Return the share of the bytes of keys and values that is saved: half of the mean of 1 - k / H (section 4)."""
    return float(0.5 * np.mean([1.0 - count / heads for count in counts]))
