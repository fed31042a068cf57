"""Which heads of a decoder share scores, and how many clusters each layer gets: by the measured loss.

The published rule, an elbow in the spread of scores within clusters, is beside it in `reproductions/chai`.
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
_ROUNDS = 8  # how often slopes are taken anew until one head per layer is left


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
    """Let one head more follow others, each time the one that costs the loss least, all that follow already considered.

    What moves cost is told by the loss to second order in what heads write with the scores of others: its gradient, and
    the Fisher matrix of all layers together (Hassibi and Stork, Optimal Brain Surgeon, 1993). Both are taken anew as
    heads are merged. Clusters hold for every request, from its first token on: see `share_heads`.

    Args:
        model: a decoder of `transformers`; a copy is used.
        samples: (samples, length) int64, of text that judges nothing later, without padding.
        skip: tokens at the begin of samples whose loss does not count.

    Yields:
        The clusters of every layer for a batch of 1, with one head less that computes scores each time.

    """
    _checked(samples, skip)
    heads, generator = heads_of(model), torch.Generator().manual_seed(0)
    layers = int(model.config.num_hidden_layers)
    follows = np.tile(np.arange(heads), (layers, 1))  # whose scores every head uses
    every, gone = max(layers * (heads - 1) // _ROUNDS, 1), np.zeros(0)
    for merge in range(layers * (heads - 1)):
        if merge % every == 0:
            slope, drawn = slopes(model, follows, samples, skip=skip, generator=generator)
            gone = np.zeros(drawn.shape[-1])
        moves = (
            (layer, *_merge(slope[layer], drawn[layer], own, head, gone))
            for layer, own in enumerate(follows) if len({*own}) > 1 for head in np.unique(own)
        )  # fmt: skip
        layer, _, follows[layer], gone = min(moves, key=lambda each: each[1])
        yield [_groups(each) for each in follows.tolist()]


def _merge(
    slope: Float64, drawn: Float64, own: np.ndarray, head: int, gone: Float64
) -> tuple[float, np.ndarray, Float64]:
    """What it costs the loss that no head of a layer uses the scores of `head`, and where its followers go."""
    others, then, cost = np.setdiff1d(own, head), own.copy(), 0.0
    for member in np.flatnonzero(own == head):
        way = drawn[member, others] - drawn[member, head]  # (others, samples)
        costs = slope[member, others] - slope[member, head] + way @ gone + 0.5 * np.square(way).sum(1)
        best = int(costs.argmin())
        cost, gone, then[member] = cost + float(costs[best]), gone + way[best], others[best]
    return cost, then, gone


def slopes(
    model: Any, follows: np.ndarray, samples: Tensor, *, skip: int, generator: torch.Generator
) -> tuple[Float64, Float64]:
    """Return how the loss changes with the share that head h's scores have of head r's, where heads follow others.

    Args:
        model: a decoder of `transformers`; a copy is used.
        follows: (layers, heads): whose scores each head uses.
        samples: (samples, length) int64, without padding.
        skip: tokens at the begin of samples whose loss does not count.
        generator: draws tokens from what the model predicts.

    Returns:
        The gradient of the mean loss, (layers, h, r), in nats; and (layers, h, r, samples), whose products, summed over
        the samples, are its Fisher matrix.

    """
    changed = copy.deepcopy(model).eval().requires_grad_(False)
    clusters = cluster_heads(changed, [1] * len(follows), warm_up=samples.shape[1] + 1)  # so that all heads attend
    whole = functional.one_hot(torch.from_numpy(follows), follows.shape[1]).to(samples.device, changed.dtype)
    found: tuple[list[Tensor], list[Tensor]] = [], []
    for part in samples.split(_PART):
        clusters.shares = [each.expand(len(part), -1, -1).clone().requires_grad_() for each in whole]
        told = changed(part, use_cache=False).logits[:, skip:-1].float().log_softmax(-1)
        drawn = torch.multinomial(told.detach().exp().flatten(0, 1).cpu(), 1, generator=generator)
        for kept, words in zip(found, (part[:, skip + 1 :], drawn.view(told.shape[:2]).to(part.device)), strict=True):
            nats = -told.gather(2, words.unsqueeze(2)).sum()
            kept.append(torch.stack(torch.autograd.grad(nats, clusters.shares, retain_graph=True)).cpu())
    tokens = samples[:, skip + 1 :].numel()
    real, fisher = (torch.cat(each, 1).double().permute(0, 2, 3, 1).numpy() for each in found)
    return real.sum(-1) / tokens, np.ascontiguousarray(fisher / np.sqrt(tokens))


def _groups(follows: list[int]) -> HeadGroups:
    """Return the clusters in which every head uses the scores of the one that is listed for it."""
    kept = sorted({*follows})
    return HeadGroups(torch.tensor([kept]), torch.tensor([[kept.index(each) for each in follows]]))


def kv_saving(counts: list[int], heads: int) -> float:
    """Return the share of the bytes of keys and values that is saved: half of the mean of 1 - k / H (section 4)."""
    return float(0.5 * np.mean([1.0 - count / heads for count in counts]))
