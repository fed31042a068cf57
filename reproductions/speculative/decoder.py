"""Decoders of bytes with caches of keys and values, and counts of n-grams: what proposes and what verifies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256
LONGEST = 192  # tokens of a text


class Predictor(Protocol):
    """What says which token comes next: a decoder behind its cache, or counts."""

    vocabulary: int

    @property
    def length(self) -> int:
        """Tokens fed and kept."""
        ...

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Probabilities of the next token after each of these, (tokens, vocabulary)."""
        ...

    def keep(self, length: int) -> None:
        """Forget what follows the first `length` tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """Layers and width of a small decoder."""

    layers: int
    width: int
    heads: int = 4
    vocabulary: int = BYTES

    def __str__(self) -> str:
        return f"{self.layers}x{self.width}"


class DecoderLayer(nn.Module):
    """Attention and a network of four times the width, behind norms (Radford et al., GPT-2, 2019)."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor, cache: Tensor | None, at: int, bias: Tensor) -> Tensor:
        """Hidden states (batch, tokens, width) after the layer; `cache`: (2, heads, LONGEST, width of a head)."""
        batch, tokens, width = hidden.shape
        parts = self.qkv(self.before(hidden)).view(batch, tokens, 3, self.heads, width // self.heads)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        if cache is not None:
            cache[0, :, at : at + tokens], cache[1, :, at : at + tokens] = keys[0], values[0]
            keys, values = cache[:, None, :, : at + tokens]
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        grown: Tensor = hidden + self.down(functional.gelu(self.up(self.between(hidden))))
        return grown


class Decoder(nn.Module):
    """A decoder whose heads attend the less, the further back (Press et al., ALiBi, ICLR 2022)."""

    def __init__(self, shape: DecoderShape, *, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(shape.vocabulary, shape.width)
            self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.layers))
            self.norm = nn.LayerNorm(shape.width)
            self.head = nn.Linear(shape.width, shape.vocabulary)
        back = torch.arange(LONGEST)[:, None] - torch.arange(LONGEST)
        slopes = 4.0 ** -torch.arange(shape.heads)
        self.bias: Tensor
        self.register_buffer("bias", (-slopes[:, None, None] * back).masked_fill(back < 0, -torch.inf))

    def forward(self, tokens: Tensor, caches: Tensor | None = None, at: int = 0) -> Tensor:
        """Scores (batch, tokens, vocabulary) of tokens that stand at `at` and behind."""
        hidden = self.tokens(tokens)
        end = at + tokens.shape[1]
        bias = self.bias[:, at:end, :end]
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, None if caches is None else caches[i], at, bias)
        scores: Tensor = self.head(self.norm(hidden))
        return scores


class Cached:
    """A decoder that keeps the keys and values of what it was fed."""

    def __init__(self, model: Decoder, *, temperature: float = 1.0) -> None:
        shape = model.shape
        self.model, self.temperature, self.vocabulary, self.length = model.eval(), temperature, shape.vocabulary, 0
        self.caches = torch.zeros(shape.layers, 2, shape.heads, LONGEST, shape.width // shape.heads)

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Probabilities of the next token after each of these, (tokens, vocabulary)."""
        end = self.length + len(tokens)
        scores = self.model(torch.tensor([tokens]), self.caches, self.length)[0]
        self.length = end
        return sharpened(scores, self.temperature)

    def keep(self, length: int) -> None:
        """Forget what follows the first `length` tokens."""
        self.length = min(self.length, length)


def sharpened(scores: Tensor, temperature: float) -> Tensor:
    """Probabilities of scores (..., vocabulary); at temperature 0 all of it is on the first of the best."""
    if temperature == 0:
        return functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)
    return torch.softmax(scores if temperature == 1 else scores / temperature, -1)


class Counts:
    """Counts of what followed the last `order` - 1 bytes of a text, and of fewer where those were never seen."""

    def __init__(self, text: bytes, *, order: int = 4) -> None:
        self.order = order
        data = np.frombuffer(text, np.uint8).astype(np.int64)
        self.tables: list[dict[int, np.ndarray[tuple[int], np.dtype[np.float32]]]] = []
        lower = np.full(BYTES, 1.0 / BYTES)
        for n in range(order):  # bytes of context
            keys = np.zeros(len(data) - n, np.int64)
            for i in range(n):
                keys = keys * BYTES + data[i : len(data) - n + i]
            pairs, counts = np.unique(keys * BYTES + data[n:], return_counts=True)
            contexts, begins = np.unique(pairs // BYTES, return_index=True)
            table = {}
            for context, begin, end in zip(contexts.tolist(), begins, [*begins[1:], len(pairs)], strict=True):
                row = np.zeros(BYTES)
                row[pairs[begin:end] % BYTES] = counts[begin:end]
                before = self.tables[-1].get(context % BYTES ** (n - 1), lower) if n else lower
                kinds = end - begin  # Witten and Bell: a new byte is as likely as there were different ones
                table[context] = ((row + kinds * before) / (row.sum() + kinds)).astype(np.float32)
            self.tables.append(table)


class Ngram:
    """The next byte by counts."""

    vocabulary = BYTES

    def __init__(self, counts: Counts, *, temperature: float = 1.0) -> None:
        self.counts, self.temperature, self.seen = counts, temperature, list[int]()

    @property
    def length(self) -> int:
        """Tokens fed and kept."""
        return len(self.seen)

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Probabilities of the next token after each of these, (tokens, 256)."""
        found = []
        for token in tokens:
            self.seen.append(token)
            found.append(self._next())
        rows = torch.from_numpy(np.stack(found))
        return rows if self.temperature == 1 else sharpened(rows.log(), self.temperature)

    def _next(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        for n in range(min(self.counts.order - 1, len(self.seen)), -1, -1):
            key = 0
            for token in self.seen[len(self.seen) - n :]:
                key = key * BYTES + token
            if (row := self.counts.tables[n].get(key)) is not None:
                return row
        raise AssertionError("an empty context was counted")

    def keep(self, length: int) -> None:
        """Forget what follows the first `length` tokens."""
        del self.seen[length:]
