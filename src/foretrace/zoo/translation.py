"""Translation: recurrent networks with attention, and the Transformer.

A batch is (source, target): word numbers (batch, length) int64; the target begins with the begin mark. Sentences
have one length, as in batches sorted by length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.training.training import Training
from foretrace.zoo.data import loader, sentence

_BEGIN = 3


@dataclass(frozen=True, kw_only=True)
class SentencePair:
    """A sentence and its translation, which here is the sentence backwards in other words."""

    length: int
    words: int

    def __call__(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        source = sentence(self.length, self.words, generator)
        target = (source.flip(0) - 4 + self.words // 3) % (self.words - 4) + 4
        return source, torch.cat([torch.tensor([_BEGIN]), target])


class LuongAttention(nn.Module):
    """Scores of every decoder state against every encoder state: Luong's "general" form, then tanh of both."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.score = nn.Linear(hidden, hidden, bias=False)
        self.combine = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, states: Tensor, memory: Tensor) -> Tensor:
        weights = torch.bmm(states, self.score(memory).transpose(1, 2)).softmax(-1)
        context = torch.bmm(weights, memory)
        return torch.tanh(self.combine(torch.cat([context, states], -1)))


class Seq2Seq(nn.Module):
    """LSTM encoder, its first layer in both directions, and LSTM decoder with global attention."""

    def __init__(self, *, words: int, hidden: int, layers: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.source = nn.Embedding(words, hidden)
        self.target = nn.Embedding(words, hidden)
        self.dropout = nn.Dropout(dropout)
        self.both_ways = nn.LSTM(hidden, hidden // 2, 1, batch_first=True, bidirectional=True)
        between = dropout if layers > 2 else 0.0
        self.encoder = nn.LSTM(hidden, hidden, layers - 1, dropout=between, batch_first=True)
        self.decoder = nn.LSTM(hidden, hidden, layers, dropout=dropout, batch_first=True)
        self.attention = LuongAttention(hidden)
        self.output = nn.Linear(hidden, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return scores (batch, target length, words) of the next word, given the true words so far."""
        first, (end, cell) = self.both_ways(self.dropout(self.source(source)))
        memory, (ends, cells) = self.encoder(self.dropout(first))
        # both directions of the first layer make the initial state of the decoder's first
        state = torch.cat([torch.cat([end[0], end[1]], -1)[None], ends])
        cell = torch.cat([torch.cat([cell[0], cell[1]], -1)[None], cells])
        states, _ = self.decoder(self.dropout(self.target(target)), (state, cell))
        scores: Tensor = self.output(self.dropout(self.attention(states, memory)))
        return scores


class MultiHead(nn.Module):
    """Multi-head attention with a projection for queries, keys and values each."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.drop = heads, dropout
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def forward(self, states: Tensor, memory: Tensor, *, causal: bool = False) -> Tensor:
        def split(found: Tensor) -> Tensor:  # (batch, length, width) -> (batch, heads, length, width / heads)
            parted: Tensor = found.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            return parted

        mixed = functional.scaled_dot_product_attention(
            split(self.query(states)),
            split(self.key(memory)),
            split(self.value(memory)),
            dropout_p=self.drop if self.training else 0.0,
            is_causal=causal,
        )
        found: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return found


class Layer(nn.Module):
    """Self-attention, attention to the encoder (`crossed`) and a feed-forward network, normalised after each."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, *, crossed: bool) -> None:
        super().__init__()
        self.crossed = crossed
        self.attention = MultiHead(width, heads, dropout)
        self.norm1 = nn.LayerNorm(width)
        if crossed:
            self.cross = MultiHead(width, heads, dropout)
            self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Dropout(dropout), nn.Linear(inner, width))
        self.norm3 = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, memory: Tensor | None = None) -> Tensor:
        states = self.norm1(states + self.dropout(self.attention(states, states, causal=self.crossed)))
        if memory is not None:
            states = self.norm2(states + self.dropout(self.cross(states, memory)))
        found: Tensor = self.norm3(states + self.dropout(self.feed(states)))
        return found


class Transformer(nn.Module):
    """Encoder and decoder of Vaswani et al., one embedding matrix for source, target and output."""

    def __init__(
        self, *, words: int, width: int, layers: int, heads: int, inner: int, length: int = 256, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(words, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.dropout = nn.Dropout(dropout)
        self.encoder = nn.ModuleList(Layer(width, heads, inner, dropout, crossed=False) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(width, heads, inner, dropout, crossed=True) for _ in range(layers))
        self.register_buffer("positions", _sinusoids(length, width), persistent=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return scores (batch, target length, words) of the next word."""
        memory = self._embedded(source)
        for layer in self.encoder:
            memory = layer(memory)
        states = self._embedded(target)
        for layer in self.decoder:
            states = layer(states, memory)
        return functional.linear(states, self.embedding.weight)

    def _embedded(self, words: Tensor) -> Tensor:
        assert isinstance(self.positions, Tensor)  # a registered buffer
        found = self.embedding(words) * math.sqrt(self.width) + self.positions[: words.shape[1]]
        dropped: Tensor = self.dropout(found)
        return dropped


def translation_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return mean cross entropy per word with label smoothing of 0.1."""
    source, target = batch
    scores = model(source, target[:, :-1])
    return functional.cross_entropy(scores.float().flatten(0, 1), target[:, 1:].flatten(), label_smoothing=0.1)


def seq2seq(size: str) -> Training:
    if size == "full":  # 4 layers of 1000 cells, 50,000 words (Luong et al., section 4.1)
        model = Seq2Seq(words=50_000, hidden=1000, layers=4)
        batches = loader(SentencePair(length=30, words=50_000), batch_size=128)
    else:
        model = Seq2Seq(words=2_000, hidden=192, layers=2)
        batches = loader(SentencePair(length=16, words=2_000), batch_size=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return Training(name="seq2seq", model=model, optimizers=(optimizer,), loader=batches, loss=translation_loss)


def transformer(size: str) -> Training:
    if size == "full":  # "base" of the paper: 65 million parameters; about 4,000 words a batch here
        model = Transformer(words=37_000, width=512, layers=6, heads=8, inner=2048)
        batches = loader(SentencePair(length=32, words=37_000), batch_size=128)
    else:
        model = Transformer(words=2_000, width=128, layers=2, heads=4, inner=512, length=64)
        batches = loader(SentencePair(length=24, words=2_000), batch_size=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.98), eps=1e-9)
    return Training(name="transformer", model=model, optimizers=(optimizer,), loader=batches, loss=translation_loss)


def _sinusoids(length: int, width: int) -> Tensor:
    """Return the positional encoding (length, width) of section 3.5."""
    angles = torch.arange(length)[:, None] * torch.exp(torch.arange(0, width, 2) * (-math.log(10_000) / width))
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
