"""Decoders by name: published configurations as plain modules, captured with four layers and unrolled.

    graph = decoder("llama-2-70b", batch=1, length=4096)
    graph = decoder("path/to/config.json")

A batch is (batch, length) int64 words; the loss is the next word's. The modules compute what the models of these names
compute: root-mean-square or layer normalisation before attention and feed-forward part, rotary or learned positions,
grouped-query attention, a gated or a plain feed-forward part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.cost.operators.bench import no_collection
from foretrace.errors import ForetraceError
from foretrace.model.capture.capture import capture, forward_only
from foretrace.model.capture.light import without_compiler
from foretrace.model.capture.unroll import CAPTURED, unrolled
from foretrace.model.decoder_config import LOSSES, MOST_WORDS, DecoderConfig, decoder_config, share
from foretrace.model.operator_graph import OperatorGraph
from foretrace.training.training import Training

_BASE = 10_000.0  # of rotary positions (Su et al., RoFormer, 2021)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang and Sennrich 2019), in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    """Causal attention; `kv_heads` heads of keys and values are shared by groups of queries."""

    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = shape.heads, shape.kv_heads, shape.width or shape.hidden // shape.heads
        biased, narrow = not shape.gated, shape.kv_heads * self.width
        wide = shape.heads * self.width
        self.query = nn.Linear(shape.hidden, wide, bias=biased)
        self.key = nn.Linear(shape.hidden, narrow, bias=biased)
        self.value = nn.Linear(shape.hidden, narrow, bias=biased)
        self.output = nn.Linear(wide, shape.hidden, bias=biased)
        self.dropout, self.unpads = shape.dropout, shape.unpads

    def forward(self, x: Tensor, places: tuple[Tensor, Tensor] | None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (part(x) for part in (self.query, self.key, self.value))
        if self.unpads:  # as `flash_attn.bert_padding` does, where a batch has no padding, too
            rows = torch.arange(batch * length, device=x.device)
            q, k, v = (_Rows.apply(each.flatten(0, 1), rows, False) for each in (q, k, v))  # type: ignore[no-untyped-call]
        q, k, v = (each.view(batch, length, -1, self.width).transpose(1, 2) for each in (q, k, v))
        if places is not None:
            q, k = _rotated(q, *places), _rotated(k, *places)
        found = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True,
            enable_gqa=self.heads != self.kv_heads,
        )  # fmt: skip
        found = found.transpose(1, 2).reshape(batch, length, -1)
        if self.unpads:
            found = _Rows.apply(found.flatten(0, 1), rows, True).view_as(found)  # type: ignore[no-untyped-call]
        out: Tensor = self.output(found)
        return out


class _Rows(torch.autograd.Function):
    """Rows taken out of a matrix; or, with `pad`, put into one of zeros, which costs what taking them does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, pad: bool) -> Tensor:
        ctx.rows, ctx.pad = rows, pad
        if pad:
            x.new_zeros(x.shape)
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _Rows.forward(ctx, gradients[0], ctx.rows, not ctx.pad), None, None


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


class Gated(nn.Module):
    """SiLU-gated feed-forward part (Shazeer 2020)."""

    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class PlainFeedForward(nn.Module):
    """GPT's feed-forward part."""

    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.inner)
        self.down = nn.Linear(shape.inner, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(x), approximate="tanh"))
        return out


class DecoderLayer(nn.Module):
    """Attention and feed-forward part, each behind its norm and beside a residual connection."""

    def __init__(self, shape: DecoderConfig) -> None:
        super().__init__()
        norm = RMSNorm if shape.gated else nn.LayerNorm
        self.before_attention, self.attention = norm(shape.hidden), Attention(shape)
        self.before_inner, self.inner = norm(shape.hidden), Gated(shape) if shape.gated else PlainFeedForward(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, places: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.dropout(self.attention(self.before_attention(x), places))
        out: Tensor = x + self.dropout(self.inner(self.before_inner(x)))
        return out


class Decoder(nn.Module):
    """Embedding, layers, norm, scores of the next word."""

    def __init__(self, shape: DecoderConfig, length: int) -> None:
        super().__init__()
        # Weights are given, so that nothing is drawn for them: of tensors without data that only takes time.
        self.embedding = nn.Embedding(shape.words, shape.hidden, _weight=torch.empty(shape.words, shape.hidden))
        places = max(length, shape.length)
        self.places = (
            None if shape.gated else nn.Embedding(places, shape.hidden, _weight=torch.empty(places, shape.hidden))
        )
        self.dropout = nn.Dropout(shape.dropout)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden) if shape.gated else nn.LayerNorm(shape.hidden)
        self.scores = nn.Linear(shape.hidden, shape.words, bias=False)
        if shape.tied:
            self.scores.weight = self.embedding.weight
        self.width = shape.width or shape.hidden // shape.heads

    def forward(self, words: Tensor) -> Tensor:
        """Return scores (batch, length, words) of the next word."""
        x = self.embedding(words)
        at = torch.arange(words.shape[1], device=words.device)
        rotation = None
        if self.places is not None:
            x = x + self.places(at)
        else:
            frequencies = _BASE ** (torch.arange(0, self.width, 2, device=words.device).float() / -self.width)
            angles = at.float()[:, None] * frequencies
            both = torch.cat((angles, angles), -1)
            rotation = (both.cos().to(x.dtype), both.sin().to(x.dtype))
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x, rotation)
        found: Tensor = self.scores(self.norm(x))
        return found


# Kernels that others bring along (apex, flash-attn, Liger), as operators that are captured and never run.
_FUSED = torch.library.Library("fused", "FRAGMENT")
_FUSED.define("cross_entropy(Tensor scores, Tensor target) -> (Tensor, Tensor)")
_FUSED.define("cross_entropy_backward(Tensor scores, Tensor target, Tensor sums, Tensor grad) -> Tensor")
_FUSED.impl("cross_entropy", lambda scores, _: tuple(scores.new_empty(len(scores), dtype=torch.float32) for _ in "ls"),
            "Meta")  # fmt: skip
_FUSED.impl("cross_entropy_backward", lambda scores, *_: torch.empty_like(scores), "Meta")


class FusedCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of 16-bit scores (rows, words): read once forward, read and written once backward."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, target: Tensor) -> Tensor:
        losses, sums = torch.ops.fused.cross_entropy(scores, target)
        ctx.save_for_backward(scores, target, sums)
        return losses.mean()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.ops.fused.cross_entropy_backward(*ctx.saved_tensors, gradients[0]), None


def training_of(found: DecoderConfig, *, batch: int = 1, length: int | None = None) -> Callable[[], Training]:
    """Return a function that makes the decoder as a training with AdamW; called on meta tensors it needs no memory."""

    def make() -> Training:
        steps = length or found.length
        model = Decoder(found, steps)

        def loss(module: Any, words: Any) -> Any:
            following = torch.roll(words, -1, 1)  # moving the words costs less than cutting the scores
            scores = module(words).flatten(0, 1)
            if found.loss == "fused":
                return FusedCrossEntropy.apply(scores, following.flatten())  # type: ignore[no-untyped-call]
            return functional.cross_entropy(scores.float(), following.flatten())

        return Training(
            name=found.name,
            model=model,
            optimizers=(torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1),),
            loader=[torch.empty(batch, steps, dtype=torch.int64, device="meta")],
            loss=loss,
        )

    return make


def decoder(
    name: str,
    *,
    batch: int = 1,
    length: int | None = None,
    precision: str = "bf16-weights",
    training: bool = True,
    tensor: int = 1,
    update: str = "fused",
    attention: str = "",
    loss: str = "",
) -> OperatorGraph:
    """Return a step of a decoder, or a forward pass alone: a few layers captured, the others unrolled.

    `update` is the implementation of AdamW: what trains such models uses the fused one (torchtitan, the Trainer of
    transformers, Megatron), although PyTorch's own default is "foreach". `loss` is one of LOSSES instead of the one
    that those who trained the decoder use.

    Raises ForetraceError for an unknown name.
    """
    found = decoder_config(name)
    if (length is not None and not 2 <= length <= MOST_WORDS) or not 1 <= batch <= MOST_WORDS:
        raise ForetraceError(
            f"{name}: a batch of {batch} sequences of {length} words is not possible; give fewer words."
        )
    if loss not in ("", *LOSSES):
        raise ForetraceError(f"`loss=` is {' or '.join(LOSSES)}, not {loss!r}.")
    found = replace(share(found, tensor), loss=loss or found.loss)
    few = min(found.layers, CAPTURED)
    make = training_of(replace(found, layers=few), batch=batch, length=length)
    with without_compiler(), no_collection():
        called = make if training else lambda: forward_only(make())
        graph = capture(called, precision=precision, update=update, attention=attention)
        if training:
            recipe = {**graph.recipe, "loss": found.loss, "dropout": f"{found.dropout:g}" if found.dropout else "none"}
            graph = replace(graph, recipe=recipe)
        return unrolled(graph, "layers", found.layers) if few < found.layers else graph
