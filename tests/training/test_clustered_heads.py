"""Heads that share scores: against plain formulas, token by token, and in bytes."""

from __future__ import annotations

import copy
import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from foretrace.errors import ForetraceError

pytest.importorskip("transformers", minversion="5", reason="decoders are those of transformers")

from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    StaticCache,
)

from foretrace.training.clustered_heads import (
    HeadGroups,
    cache_argument,
    cluster_heads,
    draw_groups,
    group_heads,
    share_heads,
)

HEADS, LAYERS, WORDS, WARM_UP = 8, 3, 97, 5


def decoder(kind: str, **more: Any) -> Any:
    """A small decoder whose heads differ: weights larger than at the start of a training."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": WORDS, "attn_implementation": "sdpa", "bos_token_id": 1, "eos_token_id": 2}
    if kind == "llama":
        shape |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS}
        shape |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
        model: Any = LlamaForCausalLM(LlamaConfig(**shape | more))
    elif kind == "gpt2":
        shape |= {"n_embd": 64, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64}
        model = GPT2LMHeadModel(GPT2Config(**shape | more))
    else:
        shape |= {"hidden_size": 64, "ffn_dim": 96, "word_embed_proj_dim": 64, "num_hidden_layers": LAYERS}
        shape |= {"num_attention_heads": HEADS, "max_position_embeddings": 64, "pad_token_id": 0}
        model = OPTForCausalLM(OPTConfig(**shape | more))
    for each in model.parameters():
        each.data.mul_(4 if each.dim() > 1 else 1)
    return model.eval().requires_grad_(False)


def cache_bytes(cache: Any) -> int:
    """What the tensors of a cache occupy: bytes of their storages, each counted once."""
    found = [each for layer in cache.layers for each in (layer.keys, layer.values) if each is not None]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}
    return sum(storages.values())


def saved(counts: list[int]) -> float:
    """Share of the bytes of keys and values: keys are half of them."""
    return float(0.5 * np.mean([1 - count / HEADS for count in counts]))


def clustered(model: Any, counts: list[int], **more: Any) -> Any:
    changed = copy.deepcopy(model)
    cluster_heads(changed, counts, warm_up=more.pop("warm_up", WARM_UP), **more)
    return changed


def cached(model: Any, cache: Any) -> dict[str, Any]:
    """The argument that hands a model its cache."""
    return {cache_argument(model): cache}


def prompt(batch: int = 2, length: int = 24) -> Tensor:
    return torch.randint(3, WORDS, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["llama", "gpt2", "opt"])
def model(request: pytest.FixtureRequest) -> Any:
    return decoder(request.param)


def test_as_many_clusters_as_heads_change_nothing(model: Any) -> None:
    same = clustered(model, [HEADS] * LAYERS)
    assert torch.equal(same(prompt()).logits, model(prompt()).logits)
    assert torch.equal(
        same.generate(prompt(1), max_new_tokens=4, do_sample=False),
        model.generate(prompt(1), max_new_tokens=4, do_sample=False),
    )


def test_a_prompt_at_once_equals_token_by_token(model: Any) -> None:
    shared, words, cache = clustered(model, [HEADS, 3, 2]), prompt(), DynamicCache()
    at_once = shared(words, use_cache=False).logits
    one_by_one = [shared(words[:, i : i + 1], **cached(shared, cache)).logits for i in range(words.shape[1])]
    torch.testing.assert_close(torch.cat(one_by_one, 1), at_once, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(shared(words).logits, at_once)
    whole = model(words).logits
    torch.testing.assert_close(at_once[:, :WARM_UP], whole[:, :WARM_UP], rtol=1e-4, atol=1e-4)
    assert (at_once - whole)[:, WARM_UP:].abs().max() > 0.01, "later tokens are attended by representatives"


def test_every_head_weights_its_own_values_with_the_scores_of_its_representative() -> None:
    model = decoder("llama", num_hidden_layers=1)
    shared, words = clustered(model, [2]), prompt(1)
    cache = shared(words).past_key_values
    (layer,) = cache.layers
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    found = plain(words, output_attentions=True)
    scores, values = found.attentions[0], found.past_key_values.layers[0].values
    of = layer.groups.representatives[0][layer.groups.members[0]]
    mixed = (scores[:, of] @ values)[:, :, WARM_UP:].transpose(1, 2).flatten(2)
    attention, kept = shared.model.layers[0].self_attn, []
    attention.o_proj.register_forward_pre_hook(lambda module, given: kept.append(given[0]))
    shared(words)
    torch.testing.assert_close(kept[0][:, WARM_UP:], mixed, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("counts", [[1, 1, 1], [HEADS, 4, 2], [7, 3, HEADS]])
def test_keys_that_are_dropped_free_their_bytes(counts: list[int]) -> None:
    model, words = decoder("llama"), prompt(2, 33)
    whole = cache_bytes(model(words).past_key_values)
    assert whole == 2 * LAYERS * 2 * HEADS * 33 * 8 * 4
    kept = cache_bytes(clustered(model, counts)(words).past_key_values)
    assert kept == round(whole * (1 - saved(counts)))


def test_nothing_else_keeps_the_dropped_keys_alive() -> None:
    shared = clustered(decoder("llama"), [2, 2, 2])
    cache = shared(prompt()).past_key_values
    gc.collect()
    # By type: what else lives in a process has proxies that answer nothing.
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    alive = [each for each in tensors if each.dim() == 4 and each.numel()]
    assert {each.shape[1] for each in alive if each.shape[0] == 2 and each.shape[2] == 24} == {2, HEADS}
    keys = [each for each in alive if each.shape == (2, HEADS, 24, 8)]
    assert len({each.data_ptr() for each in keys}) == LAYERS, "values alone have all heads"
    assert len(cache.layers) == LAYERS


def test_below_the_warm_up_all_heads_attend() -> None:
    model = decoder("gpt2")
    shared, words = clustered(model, [2, 2, 2], warm_up=30), prompt()
    answer = shared(words)
    torch.testing.assert_close(answer.logits, model(words).logits, rtol=1e-4, atol=1e-4)
    assert {each.keys.shape[1] for each in answer.past_key_values.layers} == {HEADS}


def test_clusters_follow_their_request_through_batches_and_crops() -> None:
    shared, words = clustered(decoder("llama"), [3, 2, 1]), prompt()
    other = torch.flip(words, [0])
    cache, flipped = shared(words).past_key_values, shared(other).past_key_values
    cache.reorder_cache(torch.tensor([1, 0]))
    after = [shared(other[:, :1], **cached(shared, each)).logits for each in (cache, flipped)]
    torch.testing.assert_close(*after)
    cache.crop(-1)
    torch.testing.assert_close(shared(other[:, :1], **cached(shared, cache)).logits, after[0])
    cache.crop(-1)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3]))
    torch.testing.assert_close(shared(other[:, :1], **cached(shared, cache)).logits, after[0])
    cache.reset()
    torch.testing.assert_close(shared(other, **cached(shared, cache)).logits, shared(other).logits)
    beams = shared.generate(prompt(1), max_new_tokens=6, num_beams=3, do_sample=False)
    assert beams.shape == (1, 30)


def test_half_precision_and_masks_of_requests_work() -> None:
    shared = clustered(decoder("llama").to(torch.bfloat16), [2, 2, 2])
    assert shared(prompt()).logits.isfinite().all()
    padded = torch.ones_like(prompt())
    padded[0, :4] = 0
    with pytest.raises(ForetraceError, match="without padding"):
        shared(prompt(), attention_mask=padded)


@given(st.integers(0, 10_000), st.integers(1, HEADS), st.integers(1, 3))
def test_groups_cover_all_heads_and_more_clusters_are_tighter(seed: int, clusters: int, batch: int) -> None:
    features = torch.randn(batch, HEADS, 6, generator=torch.Generator().manual_seed(seed))
    groups, spread = group_heads(features, clusters)
    drawn = draw_groups(batch, HEADS, clusters, torch.Generator().manual_seed(seed))
    for each in (groups, drawn):
        assert each.representatives.shape == (batch, clusters) and each.members.shape == (batch, HEADS)
        own = each.members.gather(1, each.representatives)
        assert torch.equal(own, torch.arange(clusters).expand(batch, -1)), "a representative is in its own cluster"
    assert (spread <= group_heads(features, 1)[1] + 1e-4).all()
    if clusters == HEADS:
        assert torch.allclose(spread, torch.zeros(batch), atol=1e-6)


def test_heads_alike_are_grouped() -> None:
    centres = torch.tensor([[0.0, 0.0], [5.0, 0.0], [0.0, 7.0]])
    of = torch.tensor([2, 0, 0, 1, 2, 1, 0, 2])
    noise = 0.1 * torch.randn(HEADS, 2, generator=torch.Generator().manual_seed(0))
    groups, _ = group_heads((centres[of] + noise).unsqueeze(0), 3)
    members = groups.members[0]
    assert all((members[i] == members[j]) == (of[i] == of[j]) for i in range(HEADS) for j in range(HEADS))


@pytest.mark.parametrize(
    ("kind", "more", "counts", "says"),
    [
        ("llama", {}, [2, 2], "3 layers, got 2"),
        ("llama", {}, [2, 9, 2], "1 to 8"),
        ("llama", {"num_key_value_heads": 2}, [2] * 3, "grouped-query"),
        ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1}, [1] * 3, "one head"),
        ("gpt2", {"add_cross_attention": True}, [2] * 3, "itself alone"),
    ],
)
def test_refuses_in_one_sentence(kind: str, more: dict[str, Any], counts: list[int], says: str) -> None:
    with pytest.raises(ForetraceError, match=says):
        cluster_heads(decoder(kind, **more), counts, warm_up=5)


def test_refuses_other_models_caches_and_a_second_time() -> None:
    with pytest.raises(ForetraceError, match="decoder of transformers"):
        cluster_heads(nn.Linear(2, 2), [1], warm_up=5)
    model = decoder("llama")
    used = model(prompt()).past_key_values
    cluster_heads(model, [2] * 3, warm_up=5)
    for cache in (used, StaticCache(config=model.config, max_cache_len=64)):
        with pytest.raises(ForetraceError, match="new DynamicCache"):
            model(prompt()[:, :1], **cached(model, cache))
    with pytest.raises(ForetraceError, match="clustered already"):
        cluster_heads(model, [2] * 3, warm_up=5)
    with pytest.raises(ForetraceError, match="warm-up"):
        cluster_heads(decoder("llama"), [2] * 3, warm_up=0)


def drawn(counts: list[int], seed: int = 0) -> list[HeadGroups]:
    return [draw_groups(1, HEADS, each, torch.Generator().manual_seed(seed + i)) for i, each in enumerate(counts)]


def test_known_clusters_hold_from_the_first_token_on(model: Any) -> None:
    shared, counts = copy.deepcopy(model), [HEADS, 3, 2]
    share_heads(shared, drawn(counts))
    words, cache = prompt(), DynamicCache()
    at_once = shared(words, use_cache=False).logits
    one_by_one = [shared(words[:, i : i + 1], **cached(shared, cache)).logits for i in range(words.shape[1])]
    torch.testing.assert_close(torch.cat(one_by_one, 1), at_once, rtol=1e-4, atol=1e-4)
    whole = model(words)
    assert (at_once - whole.logits)[:, 2].abs().max() > 1e-3, "there is no warm-up"
    kept = round(cache_bytes(whole.past_key_values) * (1 - saved(counts)))
    assert cache_bytes(cache) == kept
    cache.reorder_cache(torch.tensor([1, 1]))
    after = shared(words[[1, 1], :1], **cached(shared, cache)).logits
    torch.testing.assert_close(after[0], after[1])
    cache.reset()
    torch.testing.assert_close(shared(words, **cached(shared, cache)).logits, at_once, rtol=1e-4, atol=1e-4)
