"""How many clusters layers get: by what moves of heads change in predictions, and by the published savings."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foretrace.errors import ForetraceError

pytest.importorskip("transformers", minversion="5", reason="decoders are those of transformers")

from foretrace.training.clustered_heads import HeadGroups, share_heads
from reproductions.chai import head_counts
from tests.training.test_clustered_heads import HEADS, LAYERS, decoder, drawn, prompt


def test_published_savings() -> None:
    llama_7b, llama_33b = [32] * 18 + [4] * 14, [48] * 18 + [36] * 8 + [24] * 6 + [8] * 2 + [6] * 26
    assert head_counts.kv_saving(llama_7b, 32) == pytest.approx(0.191, abs=5e-4)
    assert len(llama_33b) == 60 and head_counts.kv_saving(llama_33b, 52) == pytest.approx(0.265, abs=5e-4)


@pytest.fixture
def loud() -> Any:
    """A decoder whose heads attend to little, and head 5 of layer 1 asks and is asked as head 2: the same scores."""
    model = decoder("llama")
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            linear.weight.mul_(4)
        layer.self_attn.o_proj.weight.mul_(0.05)  # so that what heads write is small, and two orders are all there is
    for linear in (model.model.layers[1].self_attn.q_proj, model.model.layers[1].self_attn.k_proj):
        linear.weight[40:48] = linear.weight[16:24]
    return model


def divergence(model: Any, groups: list[HeadGroups], samples: Tensor, skip: int = 0) -> float:
    """Of predictions with shared scores from those of all heads, nats per token."""
    shared = copy.deepcopy(model)
    share_heads(shared, groups)
    whole, after = (each(samples).logits[:, skip:-1].log_softmax(-1) for each in (model, shared))
    return float((whole.exp() * (whole - after)).sum(-1).mean())


def test_what_moves_change_is_the_divergence_of_predictions(loud: Any) -> None:
    samples, skip = prompt(256, 12), 3
    sway = head_counts.swayed(loud, samples, skip)
    assert sway.shape == (LAYERS, HEADS, HEADS, len(samples))
    np.testing.assert_allclose(sway[1, 5, 2], sway[1, 5, 5], atol=1e-5)
    told, found = [], []
    for layer, head, to in ((0, 1, 4), (0, 3, 2), (1, 7, 0), (2, 4, 5), (2, 0, 7)):
        groups = [HeadGroups(torch.arange(HEADS)[None], torch.arange(HEADS)[None]) for _ in range(LAYERS)]
        kept = [each for each in range(HEADS) if each != head]
        members = torch.tensor([[kept.index(to if each == head else each) for each in range(HEADS)]])
        groups[layer] = HeadGroups(torch.tensor([kept]), members)
        found.append(divergence(loud, groups, samples, skip))
        told.append(0.5 * float(np.square(sway[layer, head, to] - sway[layer, head, head]).sum()))
    np.testing.assert_allclose(told, found, rtol=0.4)
    assert loud.config._attn_implementation == "sdpa", "the model itself is left as it was"


def test_heads_are_merged_one_by_one_and_cost_less_than_random_ones(loud: Any) -> None:
    samples = prompt(64, 24)
    path = list(head_counts.merged_heads(loud, samples))
    counts = [sum(each.representatives.shape[1] for each in groups) for groups in path]
    assert counts == list(range(LAYERS * HEADS - 1, LAYERS - 1, -1))
    before = np.tile(np.arange(HEADS), (LAYERS, 1))
    for groups in path:
        follows = np.array([each.representatives[0][each.members[0]].tolist() for each in groups])
        assert all((own[own] == own).all() for own in follows), "a representative uses its own scores"
        (gone,) = np.argwhere((before == np.arange(HEADS)) & (follows != np.arange(HEADS)))
        moved = np.argwhere(follows != before)
        assert all(at == gone[0] and before[at, head] == gone[1] for at, head in moved), "its followers alone move"
        before = follows
    half = path[len(path) // 2]
    counts, others = [each.representatives.shape[1] for each in half], prompt(32, 30)[:, 6:]
    assert divergence(loud, half, others) < min(divergence(loud, drawn(counts, 10 * i), others) for i in range(3))
    with pytest.raises(ForetraceError, match="2 tokens longer"):
        next(head_counts.merged_heads(loud, samples, skip=23))
