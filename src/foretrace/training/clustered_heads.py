"""Attention of decoders whose heads share scores: clusters of heads, one of which computes for all (CHAI).

The first tokens of a request are attended by all heads. From their scores heads are clustered, per request and layer;
from then on one representative of each cluster computes queries times keys and softmax, and every head weights its own
values with its representative's scores (Agarwal et al., CHAI: Clustered Head Attention for Efficient LLM Inference,
ICML 2024, section 3). Keys of the other heads are dropped from the cache, and their memory is freed.

Clusters may also be known beforehand (`share_heads`): then they hold for every request,
from its first token on.

Decoders are those of `transformers` whose attention can be replaced by name, with a key head for every query head.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.cost.operators.arguments import BoundCall
from foretrace.cost.operators.operator import Operator
from foretrace.errors import ForetraceError, needing

with needing("clustering heads"):  # of version 5
    from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
    from transformers.cache_utils import DynamicLayer
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

_NAME = "clustered-heads"  # of the attention, in `transformers`
_ROWS = 256  # of a prompt attended at once: their scores are kept for all heads
_SAME = 1.001  # distances within that are equal
_ROUNDS = 10  # of k-means, at most


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """Which heads compute scores, and whose scores each head uses, per sequence of a batch."""

    representatives: Tensor  # (batch, clusters) int64: heads
    members: Tensor  # (batch, heads) int64: clusters

    def map(self, change: Callable[[Tensor], Tensor]) -> HeadGroups:
        """Return the groups of other sequences, chosen by `change` along the first axis."""
        return HeadGroups(change(self.representatives), change(self.members))


def group_heads(features: Tensor, clusters: int) -> tuple[HeadGroups, Tensor]:
    """Return cluster heads by k-means, begun with heads far apart, so that it draws no random numbers.

    Args:
        features: (batch, heads, numbers) of each head.
        clusters: 1 to heads.

    Returns:
        The groups, each represented by the head nearest to its mean, and (batch,) the sum of squared distances.

    """
    features = features.float()
    batch, _, width = features.shape
    each = torch.arange(batch, device=features.device)
    chosen = [torch.cdist(features.mean(1, keepdim=True), features).squeeze(1).argmin(1)]
    for _ in range(clusters - 1):
        far = torch.cdist(features, features[each.unsqueeze(1), torch.stack(chosen, 1)]).amin(2)
        chosen.append(far.argmax(1))
    means, members = features[each.unsqueeze(1), torch.stack(chosen, 1)], None
    for _ in range(_ROUNDS):
        nearest = torch.cdist(features, means).argmin(2)
        if members is not None and bool((nearest == members).all()):
            break
        members = nearest
        own = functional.one_hot(members, clusters).transpose(1, 2).to(features.dtype)  # (batch, clusters, heads)
        size = own.sum(2, keepdim=True)
        means = torch.where(size > 0, own @ features / size.clamp(min=1), means)
    assert members is not None
    outside = functional.one_hot(members, clusters) == 0
    distance = torch.cdist(features, means).masked_fill(outside, torch.inf)
    nearest = distance <= _SAME * distance.amin(1, keepdim=True)  # of two heads both: rounding must not decide
    representatives = nearest.int().argmax(1)
    spread = (features - means.gather(1, members.unsqueeze(2).expand(-1, -1, width))).square().sum((1, 2))
    return HeadGroups(representatives, members), spread


def draw_groups(batch: int, heads: int, clusters: int, generator: torch.Generator) -> HeadGroups:
    """Draw clusters of heads at random, none empty: what chosen ones have to be better than."""
    order = torch.stack([torch.randperm(heads, generator=generator) for _ in range(batch)])
    more = torch.randint(clusters, (batch, heads - clusters), generator=generator)
    taken = torch.cat([torch.arange(clusters).expand(batch, -1), more], 1)
    return HeadGroups(order[:, :clusters], torch.empty_like(order).scatter_(1, order, taken))


class ClusteredLayer(DynamicLayer):  # type: ignore[misc]  # mypy does not read transformers
    """Keys and values of one layer: keys of all heads during the first tokens, of representatives after `drop`."""

    def __init__(self, known: HeadGroups | None = None) -> None:
        super().__init__()
        self.groups = self.known = known
        self.features: list[Tensor] = []  # scores of the first tokens, until heads are clustered

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys, of representatives where there are any, and values; return all of both."""
        if self.groups is not None:
            if self.groups is self.known:  # which is for any batch
                self.groups = self.known.map(lambda each: each.expand(len(key_states), -1))
            key_states = _take(key_states, self.groups.representatives)
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys, values

    def drop(self, groups: HeadGroups) -> None:
        """Keep the keys of representatives alone."""
        self.groups, self.features = groups, []
        self.keys: Tensor = _take(self.keys, groups.representatives)

    def reset(self) -> None:
        """Forget all tokens and clusters."""
        super().reset()
        self.groups, self.features = self.known, []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Choose sequences, as beam search does."""
        super().reorder_cache(beam_idx)
        self._choose(lambda each: each.index_select(0, beam_idx.to(each.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence."""
        super().batch_repeat_interleave(repeats)
        self._choose(lambda each: each.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences."""
        super().batch_select_indices(indices)
        self._choose(lambda each: each[indices])

    def _choose(self, change: Callable[[Tensor], Tensor]) -> None:
        self.groups = None if self.groups is None else self.groups.map(change)
        self.features = [change(each) for each in self.features]


@dataclass(kw_only=True)
class HeadClusters:
    """How the heads of a model are clustered; shared by its attention modules."""

    counts: Sequence[int]  # clusters of each layer; as many as heads: all attend
    heads: int
    warm_up: int  # tokens of a request that all heads attend
    by: str = "scores"
    groups: Sequence[HeadGroups] = ()  # known beforehand, of each layer, for a batch of 1
    shares: Sequence[Tensor] = ()  # while all heads attend, of whose scores each uses how much: (batch, heads, heads)
    _cache: Callable[[], Any] = field(default=lambda: None)  # of the request under way, not kept alive

    def before(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Give a request without tokens a cache that can drop keys. Raises ForetraceError for caches of other kinds."""
        name = cache_argument(decoder)
        cache, wanted = kwargs.get(name), kwargs.get("use_cache")
        if cache is None and (decoder.config.use_cache if wanted is None else wanted):
            cache = DynamicCache()
        if cache is not None and not any(isinstance(each, ClusteredLayer) for each in cache.layers):
            if type(cache) is not DynamicCache or cache.get_seq_length():
                raise ForetraceError(
                    f"clustered heads need a new DynamicCache per request, got {type(cache).__name__} with "
                    f"{cache.get_seq_length()} tokens; begin with an empty DynamicCache or none."
                )
            cache.layers = [ClusteredLayer(self.known(layer)) for layer in range(len(self.counts))]
        self._cache = (lambda: None) if cache is None else weakref.ref(cache)
        return args, kwargs | {name: cache}

    def layer(self, number: int) -> ClusteredLayer | None:
        """Return the cached layer of the request under way; None where nothing is cached."""
        cache = self._cache()
        return None if cache is None else cache.layers[number]

    def known(self, layer: int) -> HeadGroups | None:
        """Return the clusters of a layer that are known beforehand; None where there are none, or all heads attend."""
        return self.groups[layer] if self.groups and self.counts[layer] < self.heads else None

    def share(self, groups: Sequence[HeadGroups]) -> None:
        """Use these clusters of each layer, of a batch of 1, for requests to come."""
        self.groups, self.counts = groups, [each.representatives.shape[1] for each in groups]

    def mixed(self, scores: Tensor, layer: int) -> Tensor:
        """Return the scores (batch, heads, rows, tokens) that heads use while all attend."""
        return (self.shares[layer] @ scores.flatten(2)).view_as(scores) if self.shares else scores

    def group(self, features: Sequence[Tensor], layer: int) -> HeadGroups:
        """Return the clusters of a layer's heads for scores (batch, heads, numbers) of parts of the first tokens."""
        if self.by == "scores":
            return group_heads(torch.cat(list(features), 2), self.counts[layer])[0]
        generator = torch.Generator().manual_seed(layer)
        drawn = draw_groups(len(features[0]), self.heads, self.counts[layer], generator)
        return drawn.map(lambda each: each.to(features[0].device))


def cache_argument(model: Any) -> str:
    """Return the argument of a model of `transformers` that takes cached keys and values: `cache` from 5.24 on."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def cluster_heads(model: Any, counts: Sequence[int], *, warm_up: int, by: str = "scores") -> HeadClusters:
    """Let the heads of a decoder share scores, in place.

    Args:
        model: of `transformers`, for language.
        counts: clusters of each layer.
        warm_up: tokens of a request that all heads attend before they are clustered.
        by: "scores" of these tokens, or "random".

    Returns:
        The settings, which may be changed between requests.

    Raises:
        ForetraceError: another kind of model, or counts that do not fit it.

    """
    heads = heads_of(model)
    layers = int(model.config.num_hidden_layers)
    if len(counts) != layers:
        raise ForetraceError(
            f"clusters must be given for {layers} layers, got {len(counts)}; give one number for each."
        )
    if bad := [each for each in counts if not 1 <= each <= heads]:
        raise ForetraceError(f"clusters of a layer must be 1 to {heads}, its heads, got {bad[0]}.")
    if warm_up < 1:
        raise ForetraceError(f"the warm-up must be 1 token or more, got {warm_up}.")
    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    clusters = HeadClusters(counts=tuple(counts), heads=heads, warm_up=warm_up, by=by)
    model.set_attn_implementation(_NAME)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.head_clusters = clusters
    model.get_decoder().register_forward_pre_hook(clusters.before, with_kwargs=True)
    return clusters


def share_heads(model: Any, groups: Sequence[HeadGroups]) -> HeadClusters:
    """Let the heads of a decoder share scores in clusters that are known, in place, without a warm-up.

    Args:
        model: as in `cluster_heads`.
        groups: of each layer, for a batch of 1.

    Raises:
        ForetraceError: as `cluster_heads`.

    """
    clusters = cluster_heads(model, [each.representatives.shape[1] for each in groups], warm_up=1)
    clusters.share(groups)
    return clusters


def heads_of(model: Any) -> int:
    """Return how many heads each layer of a decoder has. Raises ForetraceError where they cannot be clustered."""
    config, name = getattr(model, "config", None), type(model).__name__
    heads = int(getattr(config, "num_attention_heads", 0))
    if not heads or not hasattr(model, "set_attn_implementation") or not model._supports_sdpa:
        raise ForetraceError(f"clustered heads need a decoder of transformers that supports sdpa, got {name}.")
    if any(isinstance(getattr(each, "head_clusters", None), HeadClusters) for each in model.modules()):
        raise ForetraceError(f"the heads of {name} are clustered already; begin with the model as it was.")
    if (keys := getattr(config, "num_key_value_heads", None)) and keys != heads:
        raise ForetraceError(
            f"the {heads} query heads of {name} share {keys} key heads already (grouped-query attention): a key could "
            "be dropped only where all queries of its group follow others; cluster a model with a key for every head."
        )
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        raise ForetraceError(f"clustered heads need a decoder that attends to itself alone, got {name}.")
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise ForetraceError(f"{name} attends to a sliding window, and clustered heads to all tokens; choose another.")
    if heads == 1:
        raise ForetraceError(f"{name} has one head per layer, which has nobody to share scores with.")
    return heads


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    dropout: float = 0.0, scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend as `transformers` wants it done.

    Args:
        module: the attention, with `layer_idx` and `head_clusters`.
        query: (batch, heads, rows, width).
        key: (batch, heads or representatives, tokens, width).
        value: (batch, heads, tokens, width).
        attention_mask: (batch or 1, 1, rows, tokens); bool (attended), or added to scores; None: causal.
        dropout: of scores.
        scaling: of scores; None: 1 / sqrt(width).
        kwargs: what other attentions take.

    Returns:
        (batch, rows, heads, width), and None for the scores.

    """
    clusters: HeadClusters = module.head_clusters
    number: int = module.layer_idx
    if clusters.counts[number] == clusters.heads:
        mixed, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return mixed, None
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ForetraceError(f"clustered heads cannot attend with {name}; choose another model.")
    layer = clusters.layer(number)
    if layer is not None:
        groups = layer.groups
    elif (groups := clusters.known(number)) is not None:
        key = _take(key, groups.representatives)
    rows, tokens = query.shape[2], value.shape[2]
    seen, scale = tokens - rows, query.shape[3] ** -0.5 if scaling is None else scaling
    if attention_mask is None and rows > 1:
        attention_mask = torch.ones(rows, tokens, dtype=torch.bool, device=query.device).tril(seen)[None, None]

    def mix(begin: int, end: int, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Attend from some rows; scores are those of the heads that compute them."""
        until = seen + end  # later tokens are masked
        scores = queries[:, :, begin:end] @ keys[:, :, :until].transpose(2, 3) * scale
        if attention_mask is not None:
            part = attention_mask[:, :, begin:end, :until]
            lowest = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(~part, lowest) if part.dtype == torch.bool else scores + part
        scores = functional.dropout(scores.softmax(-1, dtype=torch.float32).to(value.dtype), dropout)
        own = clusters.mixed(scores, number) if groups is None else _take(scores, groups.members)
        return own @ value[:, :, :until], scores

    parts, begin = [], 0
    if groups is None:
        begin = min(max(clusters.warm_up - seen, 0), rows)
        features = [] if layer is None else layer.features
        if begin:
            if attention_mask is not None and not seen and not _begins(attention_mask):
                raise ForetraceError("clustered heads need prompts without padding before them; give equal lengths.")
            mixed, scores = mix(0, begin, query, key)
            parts.append(mixed)
            features.append(scores.flatten(2))
        if tokens >= clusters.warm_up:
            groups = clusters.group(features, number)
            key = _take(key, groups.representatives)
            if layer is not None:
                layer.drop(groups)
    if begin < rows:
        assert groups is not None
        chosen = _take(query, groups.representatives)
        parts += [mix(at, min(at + _ROWS, rows), chosen, key)[0] for at in range(begin, rows, _ROWS)]
    mixed = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    return mixed.transpose(1, 2).contiguous(), None


def _begins(mask: Tensor) -> bool:
    """Return whether the first token of every sequence attends to itself."""
    first = mask[:, 0, 0, 0]
    return bool((first if first.dtype == torch.bool else first > torch.finfo(first.dtype).min).all())


def _take(of: Tensor, index: Tensor) -> Tensor:
    """Choose heads: (batch, n, rows, width) from (batch, heads, rows, width) by (batch or 1, n)."""
    return of.gather(1, index[:, :, None, None].to(of.device).expand(len(of), -1, *of.shape[2:]))


def prepared_attention(operator: Operator) -> BoundCall:
    """Prepare one step of one layer's attention, its cache included, to be timed alone (see `attention_step`)."""
    (batch, heads, rows, width), (_, _, tokens, _), *_ = operator.dims
    count = int(operator.concrete[2]) or heads
    dtype = {"float": torch.float32, "double": torch.float64, "c10::BFloat16": torch.bfloat16, "c10::Half": torch.half}[
        operator.type(0)
    ]
    module: Any = nn.Module()
    module.head_clusters = HeadClusters(counts=(count,), heads=heads, warm_up=1)
    module.layer_idx, module.is_causal = 0, True
    groups = draw_groups(batch, heads, count, torch.Generator().manual_seed(0))

    def drawn(of: int, length: int) -> Tensor:
        return torch.randn(batch, of, length, width).to(dtype)

    def step(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> object:
        layer = ClusteredLayer()
        layer.lazy_initialization(key, value)
        layer.keys, layer.values, layer.groups = keys, values, groups if count < heads else None
        cache = SimpleNamespace(layers=[layer])
        module.head_clusters._cache = lambda: cache
        keys, values = layer.update(key, value)
        return attend(module, query, keys, values, None), keys, values

    before = tokens - rows
    cached = drawn(count, before), drawn(heads, before)
    return BoundCall(function=step, args=(*(drawn(heads, rows) for _ in range(3)), *cached), kwargs={})
