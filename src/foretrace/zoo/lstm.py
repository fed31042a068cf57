"""Stacked LSTMs: a word language model (Zaremba et al. 2014), and models with dropout on their inputs and on their
recurrent connections, as `structured-dropout` takes them.

Words and the words that follow are (batch, steps) int64; sound is (batch, frames, features) float32, its states (batch,
frames) int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.training.structured_lstm import DropoutLSTM
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
    """Embedding, `layers` LSTM layers and a linear decoder, with dropout on every connection that is not recurrent.

    With `recurrent`, on those that are, too.
    """

    def __init__(self, *, words: int, hidden: int, layers: int, p: float, recurrent: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.dropout = nn.Dropout(p)
        self.lstm = (
            DropoutLSTM(hidden, hidden, layers, p=p, batch_first=True)
            if recurrent
            else nn.LSTM(hidden, hidden, layers, dropout=p, batch_first=True)
        )
        self.decoder = nn.Linear(hidden, words)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, *((-0.05, 0.05) if recurrent else (-0.04, 0.04)))
        self.recurrent = recurrent

    def forward(self, words: Tensor) -> Tensor:
        """Return scores (batch, steps, words) of the next word."""
        found = self.embedding(words)
        states, _ = self.lstm(found if self.recurrent else self.dropout(found))
        scores: Tensor = self.decoder(self.dropout(states))
        return scores


def word_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return mean cross entropy per word: the logarithm of the perplexity."""
    words, following = batch
    return functional.cross_entropy(model(words).float().flatten(0, 1), following.flatten())


class AcousticModel(nn.Module):
    """LSTM layers in one direction over frames of sound, and a linear layer that names the state of every frame."""

    def __init__(self, *, features: int, hidden: int, layers: int, states: int, p: float) -> None:
        super().__init__()
        self.lstm = DropoutLSTM(features, hidden, layers, p=p, batch_first=True)
        self.states = nn.Linear(hidden, states)

    def forward(self, sound: Tensor) -> Tensor:
        """Return scores (batch, frames, states)."""
        scores: Tensor = self.states(self.lstm(sound)[0])
        return scores


@dataclass(frozen=True, kw_only=True)
class StateUtterance:
    """Frames of sound that go through a few states, and the state of every frame."""

    frames: int
    features: int
    states: int

    def __call__(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        spoken = torch.randint(self.states, (-(-self.frames // 8),), generator=generator)
        state = spoken.repeat_interleave(8)[: self.frames]
        tone = (state[:, None] * torch.arange(1, self.features + 1) * 0.7).sin()
        return tone + torch.randn(self.frames, self.features, generator=generator), state


def state_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return mean cross entropy per frame."""
    sound, state = batch
    return functional.cross_entropy(model(sound).float().flatten(0, 1), state.flatten())


# Words, hidden, layers, dropout, steps and samples of each: "full" are "large", "medium" and "large" of Zaremba et al.
_SIZES = {
    "lstm-lm": {"full": (10_000, 1500, 2, 0.65, 35, 20), "tiny": (2_000, 256, 2, 0.5, 20, 16)},
    "dropout-lstm": {"full": (10_000, 650, 2, 0.5, 35, 20), "tiny": (2_000, 512, 2, 0.5, 20, 16)},
    "dropout-lstm-large": {"full": (10_000, 1500, 2, 0.65, 35, 20), "tiny": (1_000, 1024, 1, 0.5, 12, 12)},
}


def _word_model(size: str, *, name: str, recurrent: bool = True) -> Training:
    words, hidden, layers, p, steps, batch = _SIZES[name][size]
    model = WordModel(words=words, hidden=hidden, layers=layers, p=p, recurrent=recurrent)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = loader(Passage(steps=steps, words=words), batch_size=batch)
    return Training(name=name, model=model, optimizers=(optimizer,), loader=batches, loss=word_loss)


lstm_lm = partial(_word_model, name="lstm-lm", recurrent=False)
dropout_lstm = partial(_word_model, name="dropout-lstm")
dropout_lstm_large = partial(_word_model, name="dropout-lstm-large")


def acoustic_lstm(size: str) -> Training:
    features, states = (320, 2_000) if size == "full" else (160, 200)
    hidden, layers, frames, batch = (1024, 3, 80, 32) if size == "full" else (512, 2, 24, 12)
    model = AcousticModel(features=features, hidden=hidden, layers=layers, states=states, p=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batches = loader(StateUtterance(frames=frames, features=features, states=states), batch_size=batch)
    return Training(name="acoustic-lstm", model=model, optimizers=(optimizer,), loader=batches, loss=state_loss)
