"""A word language model of stacked LSTMs (Zaremba et al. 2014).

Words and the words that follow are (batch, steps) int64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.training.training import Training
from foretrace.zoo.data import loader, sentence


@dataclass(frozen=True, kw_only=True)
class Passage:
    """Consecutive words of a text, and for each the word that follows."""

    steps: int
    words: int

    def __call__(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        text = sentence(self.steps + 1, self.words, generator)
        return text[:-1], text[1:]


class WordModel(nn.Module):
    """Embedding, `layers` LSTM layers and a linear decoder, with dropout on every connection that is not recurrent."""

    def __init__(self, *, words: int, hidden: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(hidden, hidden, layers, dropout=dropout, batch_first=True)
        self.decoder = nn.Linear(hidden, words)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.04, 0.04)

    def forward(self, words: Tensor) -> Tensor:
        """Scores (batch, steps, words) of the next word."""
        states, _ = self.lstm(self.dropout(self.embedding(words)))
        scores: Tensor = self.decoder(self.dropout(states))
        return scores


def word_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy per word: the logarithm of the perplexity."""
    words, following = batch
    return functional.cross_entropy(model(words).float().flatten(0, 1), following.flatten())


def lstm_lm(size: str) -> Training:
    if size == "full":  # "large" of the paper: 66 million parameters
        model = WordModel(words=10_000, hidden=1500, layers=2, dropout=0.65)
        batches = loader(Passage(steps=35, words=10_000), batch_size=20)
    else:
        model = WordModel(words=2_000, hidden=256, layers=2, dropout=0.5)
        batches = loader(Passage(steps=20, words=2_000), batch_size=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return Training(name="lstm-lm", model=model, optimizers=(optimizer,), loader=batches, loss=word_loss)
