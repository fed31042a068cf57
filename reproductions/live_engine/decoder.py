"""A small real decoder with a paged cache of keys and values, for engines that run on this machine.

Its weights are random: what it says means nothing, how long it takes and how much it keeps is real. Every layer is
attention and a gated network behind RMS norms (Llama, Touvron et al. 2023, section 2.2), positions are rotary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

BLOCK = 16  # tokens of a block of the cache (PagedAttention, Kwon et al. 2023, section 4.3)


@dataclass(frozen=True, slots=True)
class DecoderSize:
    """Sizes of a decoder; `kv_heads` below `heads` is grouped-query attention."""

    layers: int = 4
    width: int = 192
    heads: int = 6
    kv_heads: int = 2
    vocabulary: int = 1024

    @property
    def head_width(self) -> int:
        """Elements of one head."""
        return self.width // self.heads


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one sequence gets processed in a step: `tokens` after `context` ones whose keys are in `blocks`."""

    tokens: Sequence[int]
    context: int
    blocks: Sequence[int]  # of the cache, in order; they hold context and tokens


class PagedLayer(nn.Module):
    """One layer of a decoder."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.queries = nn.Linear(size.width, size.width, bias=False)
        self.keys_values = nn.Linear(size.width, 2 * size.kv_heads * size.head_width, bias=False)
        self.output = nn.Linear(size.width, size.width, bias=False)
        self.gate_up = nn.Linear(size.width, 8 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)
        self.attention_norm = nn.RMSNorm(size.width)
        self.network_norm = nn.RMSNorm(size.width)


class PagedDecoder(nn.Module):
    """A decoder whose keys and values lie in blocks of a pool, so that sequences of any length share its memory."""

    cache: Tensor  # (layers, 2: keys and values, rows of the pool, heads of them, their width)

    def __init__(self, size: DecoderSize, blocks: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(size.vocabulary, size.width)
            self.layers = nn.ModuleList(PagedLayer(size) for _ in range(size.layers))
            self.norm = nn.RMSNorm(size.width)
            self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.size = size
        pool = (size.layers, 2, blocks * BLOCK, size.kv_heads, size.head_width)
        self.register_buffer("cache", torch.zeros(pool, dtype=dtype), persistent=False)
        self.to(dtype).eval().requires_grad_(False)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Process one step; return the logits after the last token of each chunk, (chunks, vocabulary)."""
        tokens = torch.tensor([token for each in chunks for token in each.tokens])
        positions = torch.cat([torch.arange(each.context, each.context + len(each.tokens)) for each in chunks])
        slots = [slots_of(each.blocks, each.context + len(each.tokens)) for each in chunks]
        written = torch.cat([rows[each.context :] for rows, each in zip(slots, chunks, strict=True)])
        decoding = [index for index, each in enumerate(chunks) if len(each.tokens) == 1]
        grouped = Decoding(decoding, slots, chunks) if decoding else None
        begins = [0]
        for each in chunks:
            begins.append(begins[-1] + len(each.tokens))

        size, hidden = self.size, self.embedding(tokens)
        rotation = _rotation(positions, size.head_width, hidden.dtype)
        for layer, cache in zip(self.layers, self.cache, strict=True):
            assert isinstance(layer, PagedLayer)
            normed = layer.attention_norm(hidden)
            queries = _rotate(layer.queries(normed).view(-1, size.heads, size.head_width), rotation)
            keys, values = layer.keys_values(normed).view(-1, 2, size.kv_heads, size.head_width).unbind(1)
            cache[0, written], cache[1, written] = _rotate(keys, rotation), values
            mixed = torch.empty_like(queries)
            if grouped is not None:
                rows = torch.tensor([begins[each] for each in decoding])
                mixed[rows] = grouped.attend(queries[rows], cache)
            for begin, rows, each in zip(begins, slots, chunks, strict=False):
                if len(each.tokens) > 1:
                    part = slice(begin, begin + len(each.tokens))
                    mixed[part] = prefill(queries[part], cache[:, rows], each.context)
            hidden = hidden + layer.output(mixed.flatten(1))
            gate, up = layer.gate_up(layer.network_norm(hidden)).chunk(2, dim=1)
            hidden = hidden + layer.down(functional.silu(gate) * up)
        last = torch.tensor(begins[1:]) - 1
        logits: Tensor = self.head(self.norm(hidden[last]))
        return logits


def slots_of(blocks: Sequence[int], tokens: int) -> Tensor:
    """Return which rows of the pool hold the first `tokens` tokens of a sequence."""
    return (torch.tensor(blocks).unsqueeze(1) * BLOCK + torch.arange(BLOCK)).flatten()[:tokens]


class Decoding:
    """Attention of all sequences with one new token, padded to the longest."""

    def __init__(self, which: Sequence[int], slots: Sequence[Tensor], chunks: Sequence[Chunk]) -> None:
        lengths = torch.tensor([chunks[each].context + 1 for each in which])
        self.rows = torch.zeros(len(which), int(lengths.max()), dtype=torch.long)
        for row, each in enumerate(which):
            self.rows[row, : lengths[row]] = slots[each]
        self.mask = (torch.arange(self.rows.shape[1]) < lengths.unsqueeze(1))[:, None, None, :]

    def attend(self, queries: Tensor, cache: Tensor) -> Tensor:
        """Return (sequences, heads, width) of queries of that shape; cache: keys and values of one layer."""
        keys, values = cache[:, self.rows].transpose(2, 3)  # (sequences, heads, tokens, width)
        mixed = functional.scaled_dot_product_attention(
            queries.unsqueeze(2), keys, values, attn_mask=self.mask, enable_gqa=True
        )
        return mixed.squeeze(2)


def prefill(queries: Tensor, keys_values: Tensor, context: int) -> Tensor:
    """Attention of a chunk to what stands before it and to itself."""
    keys, values = keys_values.transpose(1, 2)
    length = queries.shape[0]
    mask = torch.ones(length, context + length, dtype=torch.bool).tril(context)
    mixed = functional.scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask, enable_gqa=True
    )
    return mixed.squeeze(0).transpose(0, 1)


def _rotation(positions: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = positions.to(torch.float64).unsqueeze(1) * frequencies
    return angles.cos().to(dtype).unsqueeze(1), angles.sin().to(dtype).unsqueeze(1)


def _rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs of elements by their position (RoFormer, Su et al. 2021, equation 34)."""
    (cos, sin), (even, odd) = rotation, heads.chunk(2, dim=-1)
    return torch.cat((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
