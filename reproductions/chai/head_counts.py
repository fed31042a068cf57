"""Which heads of a decoder share scores, and how many clusters each layer gets: by what that changes in predictions.

The published rule, an elbow in the spread of scores within clusters, is beside it in `published`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from foretrace.arrays import Float64
from foretrace.errors import ForetraceError
from foretrace.training.clustered_heads import HeadGroups, cluster_heads, heads_of

_PART = 8  # samples whose scores are looked at together


def loss_after(model: Any, samples: Tensor, skip: int) -> float:
    """Return the mean loss in nats of tokens (samples, length) after the first `skip` of each, given those before.

    Raises ForetraceError where nothing is after them.
    """
    _checked(samples, skip)
    with torch.inference_mode():
        logits = model(samples, use_cache=False).logits[:, skip:-1].float()
        return float(functional.cross_entropy(logits.flatten(0, 1), samples[:, skip + 1 :].flatten()))


def _checked(samples: Tensor, skip: int) -> None:
    if samples.shape[1] < skip + 2:
        raise ForetraceError(f"samples must be 2 tokens longer than the {skip} of the warm-up, got {samples.shape[1]}.")


def merged_heads(model: Any, samples: Tensor, *, skip: int = 0) -> Iterator[list[HeadGroups]]:
    """Let one head more follow others, each time the one that changes least, all that follow already considered.

    What it changes is how far the model's predictions are from those of all heads (Kullback-Leibler divergence), to
    second order in what heads write with the scores of others, of all layers together (Hassibi and Stork, Optimal Brain
    Surgeon, 1993). Clusters hold for every request, from its first token on: see `share_heads`.

    Args:
        model: a decoder of `transformers`; a copy is used.
        samples: (samples, length) int64, of text that judges nothing later, without padding.
        skip: tokens at the begin of samples whose predictions do not count.

    Yields:
        The clusters of every layer for a batch of 1, with one head less that computes scores each time.

    """
    sway, heads = swayed(model, samples, skip), heads_of(model)
    follows = np.tile(np.arange(heads), (len(sway), 1))  # whose scores every head uses
    gone = np.zeros(len(samples))  # what all that follow sway
    for _ in range(follows.size - len(sway)):
        moves = (
            (layer, *_merge(sway[layer], own, head, gone))
            for layer, own in enumerate(follows) if len({*own}) > 1 for head in np.unique(own)
        )  # fmt: skip
        layer, _, follows[layer], gone = min(moves, key=lambda each: each[1])
        yield [_groups(each) for each in follows.tolist()]


def _merge(sway: Float64, own: np.ndarray, head: int, gone: Float64) -> tuple[float, np.ndarray, Float64]:
    """Return what it changes that no head of a layer uses the scores of `head`, and where its followers go."""
    others, then, cost = np.setdiff1d(own, head), own.copy(), 0.0
    for member in np.flatnonzero(own == head):
        way = sway[member, others] - sway[member, head]  # (others, samples)
        costs = way @ gone + 0.5 * np.square(way).sum(1)
        best = int(costs.argmin())
        cost, gone, then[member] = cost + float(costs[best]), gone + way[best], others[best]
    return cost, then, gone


def swayed(model: Any, samples: Tensor, skip: int) -> Float64:
    """Return how predictions change with the share that head h's scores have of head r's.

    Args:
        model: a decoder of `transformers`; a copy is used.
        samples: (samples, length) int64, without padding.
        skip: tokens at the begin of samples whose predictions do not count.

    Returns:
        (layers, h, r, samples): gradients of the loss of tokens that the model itself draws. Their products, summed
        over the samples, are the Fisher matrix of a token: half of it is the divergence in nats, to second order.

    """
    _checked(samples, skip)
    changed, heads = copy.deepcopy(model).eval().requires_grad_(False), heads_of(model)
    layers, generator = int(model.config.num_hidden_layers), torch.Generator().manual_seed(0)
    clusters = cluster_heads(changed, [1] * layers, warm_up=samples.shape[1] + 1)  # so that all heads attend
    found = []
    for part in samples.split(_PART):
        whole = torch.eye(heads, device=part.device, dtype=changed.dtype).repeat(len(part), 1, 1)
        clusters.shares = [whole.clone().requires_grad_() for _ in range(layers)]
        told = changed(part, use_cache=False).logits[:, skip:-1].float().log_softmax(-1).flatten(0, 1)
        drawn = torch.multinomial(told.detach().exp().cpu(), 1, generator=generator).to(part.device)
        found.append(torch.stack(torch.autograd.grad(-told.gather(1, drawn).sum(), clusters.shares)).cpu())
    sway = torch.cat(found, 1).double().permute(0, 2, 3, 1).numpy()
    return np.ascontiguousarray(sway / np.sqrt(samples[:, skip + 1 :].numel()))


def _groups(follows: list[int]) -> HeadGroups:
    """Return the clusters in which every head uses the scores of the one that is listed for it."""
    kept = sorted({*follows})
    return HeadGroups(torch.tensor([kept]), torch.tensor([[kept.index(each) for each in follows]]))


def kv_saving(counts: list[int], heads: int) -> float:
    """Return the share of the bytes of keys and values that is saved: half of the mean of 1 - k / H (section 4)."""
    return float(0.5 * np.mean([1.0 - count / heads for count in counts]))
