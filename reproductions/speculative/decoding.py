"""Decoding with a draft: what it proposes, the target verifies in one pass; what comes out is the target's own.

Speculative sampling (Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023, section 2;
Chen et al., 2023): a proposed token d of probability q(d) is accepted with min(1, p(d) / q(d)); the first one that is
not gives way to a draw from max(p - q, 0), normalised. If all are accepted, the target's last distribution gives one
more. With all probability on one token this is greedy verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import thread_time
from typing import Protocol

import torch
from torch import Tensor

from foretrace.errors import ForetraceError
from reproductions.speculative.decoder import Predictor


class Chance(Protocol):
    """Where draws come from."""

    def draw(self, probabilities: Tensor) -> int:
        """A token."""
        ...

    def happens(self, probability: float) -> bool:
        """Whether something of this probability does."""
        ...


class Dice:
    """Draws of a seeded generator."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, probabilities: Tensor) -> int:
        """A token."""
        return int(torch.multinomial(probabilities, 1, generator=self.generator))

    def happens(self, probability: float) -> bool:
        """Whether something of this probability does."""
        return probability >= 1 or float(torch.rand(1, generator=self.generator)) < probability


@dataclass(slots=True)
class Decoded:
    """Tokens that followed a prompt, and how many proposed ones every round accepted."""

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seconds: float = 0.0  # of this thread's processor time, all but reading the prompt


def decode(target: Predictor, prompt: Sequence[int], count: int, chance: Chance) -> Decoded:
    """Decode `count` tokens one by one."""
    target.keep(0)
    if len(prompt) > 1:
        target.feed(prompt[:-1])
    found, token = Decoded(), prompt[-1]
    began = thread_time()
    for _ in range(count):
        token = chance.draw(target.feed([token])[-1])
        found.tokens.append(token)
    found.seconds = thread_time() - began
    return found


def decode_speculatively(
    target: Predictor, draft: Predictor, prompt: Sequence[int], count: int, k: int, chance: Chance
) -> Decoded:
    """Decode `count` tokens or up to k more, in rounds of `k` proposals.

    Raises ForetraceError where nothing would be proposed, or where the vocabularies differ.
    """
    if k < 1:
        raise ForetraceError(f"`k=` must be 1 or more, got {k}; without a draft, decode plainly.")
    if draft.vocabulary != target.vocabulary:
        raise ForetraceError(
            f"the draft knows {draft.vocabulary} tokens and the target {target.vocabulary}; a draft must have "
            "the target's vocabulary."
        )
    for each in (target, draft):
        each.keep(0)
        if len(prompt) > 1:
            each.feed(prompt[:-1])
    text, found = list(prompt), Decoded()
    began = thread_time()
    while len(found.tokens) < count:
        proposed, q = list[int](), list[Tensor]()
        behind = text[draft.length :]  # the last token, and the one before it where all were accepted
        for _ in range(k):
            q.append(draft.feed(behind)[-1])
            proposed.append(chance.draw(q[-1]))
            behind = proposed[-1:]
        p = target.feed([text[-1], *proposed])
        kept, token = verify(p, q, proposed, chance)
        new = [*proposed[:kept], token]
        text += new
        target.keep(len(text) - 1)
        draft.keep(len(text) - 1)
        found.tokens += new
        found.accepted.append(kept)
    found.seconds = thread_time() - began
    return found


def verify(p: Tensor, q: Sequence[Tensor], proposed: Sequence[int], chance: Chance) -> tuple[int, int]:
    """How many of k proposals are accepted, and the token behind them. `p`: (k + 1, vocabulary), the target's."""
    for i, token in enumerate(proposed):
        if not chance.happens(float(p[i, token]) / float(q[i][token])):
            return i, chance.draw(torch.clamp(p[i] - q[i], min=0))
    return len(proposed), chance.draw(p[-1])
