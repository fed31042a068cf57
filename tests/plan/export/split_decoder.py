# mypy: disable-error-code="no-any-return"
"""A small decoder with the usual names, and what gloo processes do with it: split by a written file, one step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

HIDDEN, HEAD, WORDS, LENGTH, BATCH = 16, 4, 24, 6, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN // 2)
        self.v_proj, self.o_proj = nn.Linear(HIDDEN, HIDDEN // 2), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], -1, HEAD)  # as many heads as this process has
        q, k, v = (each(x).view(shape).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, 32), nn.Linear(HIDDEN, 32)
        self.down_proj = nn.Linear(32, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), FeedForward()
        self.first_norm, self.second_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.first_norm(x))
        return x + self.mlp(self.second_norm(x))


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(WORDS, HIDDEN), nn.LayerNorm(HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed_tokens(words)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.lm_head = Inside(), nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.lm_head(self.model(words))


def trained(model: nn.Module, words: Tensor) -> list[Tensor]:
    """The loss before a step and after it, and all weights then, whole."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(2):
        logits = model(words)
        loss = functional.cross_entropy(logits.flatten(0, 1), words.roll(-1, 1).flatten())
        found.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return [*found, *(each.detach() for each in whole)]


def both(rank: int, codes: list[tuple[str, bool]]) -> list[tuple[list[Any], list[Any], float]]:
    """Losses and weights of the whole model and of each split one, and the share of weights that this rank holds.

    codes: a written file, and whether it splits the batch.
    """
    found = []
    for code, shared in codes:
        torch.manual_seed(3)
        model = Decoder()
        words = torch.randint(WORDS, (BATCH, LENGTH))
        scope: dict[str, Any] = {}
        exec(code, scope)
        torch.manual_seed(3)
        split = scope["parallelize"](Decoder(), device="cpu", dtype=None)
        held = sum(
            each.to_local().numel() if hasattr(each, "to_local") else each.numel() for each in split.parameters()
        )
        mine = words.chunk(2)[rank] if shared else words
        result = trained(split, mine)
        if shared:
            for loss in result[:2]:
                torch.distributed.all_reduce(loss)
                loss.div_(2)
        expected = trained(model, words)
        share = held / sum(each.numel() for each in model.parameters())
        found.append(([each.tolist() for each in expected], [each.tolist() for each in result], share))
    return found
