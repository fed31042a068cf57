"""Which heads of a decoder share scores, and how many clusters each layer gets: by the measured loss.

The published rule, an elbow in the spread of scores within clusters, is beside it in `reproductions/chai`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError
from foretrace.training.clustered_heads import HeadGroups, heads_of, share_heads

_PART = 8  # samples whose scores are looked at together


def loss_after(model: Any, samples: Tensor, skip: int) -> float:
    """Return the mean loss in nats of tokens (samples, length) after the first `skip` of each, given those before.

    Raises ForetraceError where nothing is after them.
    """
    if samples.shape[1] < skip + 2:
        raise ForetraceError(f"samples must be 2 tokens longer than the {skip} of the warm-up, got {samples.shape[1]}.")
    with torch.inference_mode():
        logits = model(samples, use_cache=False).logits[:, skip:-1].float()
        return float(functional.cross_entropy(logits.flatten(0, 1), samples[:, skip + 1 :].flatten()))


def merged_heads(model: Any, samples: Tensor, *, skip: int = 0) -> Iterator[list[HeadGroups]]:
    """Let one head more follow another, each time the one whose own scores are missed least by the measured loss.

    Whom a head would follow is the one whose scores change least what it and its followers write (`missed`). Clusters
    hold for every request, from its first token on: see `share_heads`.

    Args:
        model: a decoder of `transformers`; a copy is changed.
        samples: (samples, length) int64, of text that judges nothing later.
        skip: tokens at the begin of samples whose loss does not count.

    Yields:
        The clusters of every layer for a batch of 1, with one head less that computes scores each time.

    """
    heads, apart, changed = heads_of(model), missed(model, samples), copy.deepcopy(model).eval()
    follows = [list(range(heads)) for _ in apart]  # whose scores every head uses
    clusters = share_heads(changed, [_groups(each) for each in follows])

    def tried(layer: int, head: int) -> tuple[float, list[int]] | None:
        own = follows[layer]
        if not (others := {*own} - {head}):
            return None
        to = min(others, key=apart[layer][[each == head for each in own]].sum(0).__getitem__)
        then = [to if each == head else each for each in own]
        clusters.share([_groups(then if at == layer else each) for at, each in enumerate(follows)])
        return loss_after(changed, samples, skip), then

    # What a head costs hardly falls while others are merged: one that was measured before the last of them is measured
    # again when it comes first, and taken where it stays first (lazy greedy; Minoux, 1978).
    loss, fresh = loss_after(changed, samples, skip), dict[tuple[int, int], tuple[float, list[int]]]()
    queue = [(-inf, (layer, head)) for layer in range(len(apart)) for head in range(heads)]
    while queue:
        _, move = heappop(queue)
        if move not in fresh:
            if (found := tried(*move)) is not None:
                fresh[move] = found
                heappush(queue, (found[0] - loss, move))
            continue
        loss, follows[move[0]] = fresh[move]
        fresh = {}
        yield [_groups(each) for each in follows]


def missed(model: Any, samples: Tensor) -> Float64:
    """Return how much else head h writes with the scores of head r: ||(A_h - A_r) V_h||^2, summed over all tokens.

    Args:
        model: a decoder of `transformers`; a copy is used.
        samples: (samples, length) int64.

    Returns:
        (layers, h, r).

    """

    def apart(scores: Tensor, values: Tensor) -> Tensor:
        own = scores @ values
        return torch.stack([(r[:, None] @ values - own).square().sum((0, 2, 3)) for r in scores.unbind(1)], 1)

    seen, found = copy.deepcopy(model).eval(), list[Tensor]()
    seen.set_attn_implementation("eager")
    with torch.inference_mode():
        for part in samples.split(_PART):
            answer = seen(part, output_attentions=True, use_cache=True)
            values = [each.values for each in answer.past_key_values.layers]
            found.append(torch.stack([apart(*each) for each in zip(answer.attentions, values, strict=True)]).double())
    return np.asarray(torch.stack(found).sum(0).cpu())


def _groups(follows: list[int]) -> HeadGroups:
    """Return the clusters in which every head uses the scores of the one that is listed for it."""
    kept = sorted({*follows})
    return HeadGroups(torch.tensor([kept]), torch.tensor([[kept.index(each) for each in follows]]))


def kv_saving(counts: list[int], heads: int) -> float:
    """Return the share of the bytes of keys and values that is saved: half of the mean of 1 - k / H (section 4)."""
    return float(0.5 * np.mean([1.0 - count / heads for count in counts]))
