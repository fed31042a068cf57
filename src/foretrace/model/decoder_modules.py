"""The modules of `decoders.py`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.model.decoders import Shape

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

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = shape.heads, shape.kv_heads, shape.width or shape.hidden // shape.heads
        biased, narrow = not shape.gated, shape.kv_heads * self.width
        wide = shape.heads * self.width
        self.query = nn.Linear(shape.hidden, wide, bias=biased)
        self.key = nn.Linear(shape.hidden, narrow, bias=biased)
        self.value = nn.Linear(shape.hidden, narrow, bias=biased)
        self.output = nn.Linear(wide, shape.hidden, bias=biased)

    def forward(self, x: Tensor, places: tuple[Tensor, Tensor] | None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part(x).view(batch, length, -1, self.width).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        if places is not None:
            q, k = _rotated(q, *places), _rotated(k, *places)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        out: Tensor = self.output(found.transpose(1, 2).reshape(batch, length, -1))
        return out


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


class Gated(nn.Module):
    """SiLU-gated feed-forward part (Shazeer 2020)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Plain(nn.Module):
    """GPT's feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.inner)
        self.down = nn.Linear(shape.inner, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(x), approximate="tanh"))
        return out


class Layer(nn.Module):
    """Attention and feed-forward part, each behind its norm and beside a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        norm = RMSNorm if shape.gated else nn.LayerNorm
        self.before_attention, self.attention = norm(shape.hidden), Attention(shape)
        self.before_inner, self.inner = norm(shape.hidden), Gated(shape) if shape.gated else Plain(shape)

    def forward(self, x: Tensor, places: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.before_attention(x), places)
        out: Tensor = x + self.inner(self.before_inner(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers, norm, scores of the next word."""

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        # Weights are given, so that nothing is drawn for them: of tensors without data that only takes time.
        self.embedding = nn.Embedding(shape.words, shape.hidden, _weight=torch.empty(shape.words, shape.hidden))
        places = max(length, shape.length)
        self.places = (
            None if shape.gated else nn.Embedding(places, shape.hidden, _weight=torch.empty(places, shape.hidden))
        )
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden) if shape.gated else nn.LayerNorm(shape.hidden)
        self.scores = nn.Linear(shape.hidden, shape.words, bias=False)
        if shape.tied:
            self.scores.weight = self.embedding.weight
        self.width = shape.width or shape.hidden // shape.heads

    def forward(self, words: Tensor) -> Tensor:
        """Scores (batch, length, words) of the next word."""
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
        for layer in self.layers:
            x = layer(x, rotation)
        found: Tensor = self.scores(self.norm(x))
        return found
