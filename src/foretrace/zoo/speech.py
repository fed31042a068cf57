"""Speech recognition: Deep Speech 2.

A batch is (spectrogram (batch, 1, frequencies, frames) float32, text (batch, length) int64, 0 is CTC's blank).
Utterances have one length, as in batches sorted by length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.training.training import Training
from foretrace.zoo.data import loader

_LETTERS = 29  # blank, 26 letters, space, apostrophe
_FREQUENCIES = 161  # of windows of 20 ms at 16 kHz


@dataclass(frozen=True, kw_only=True)
class Utterance:
    """Letters, each held for some frames as a tone of its own, in noise; as a normalised log spectrogram."""

    frames: int
    letters: int

    def __call__(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        text = torch.randint(1, _LETTERS, (self.letters,), generator=generator)
        said = text.repeat_interleave(-(-self.frames // self.letters))[: self.frames]
        power = torch.rand(_FREQUENCIES, self.frames, generator=generator)
        power[said * 5, torch.arange(self.frames)] += 4
        spectrogram = power.log1p_()
        return ((spectrogram - spectrogram.mean()) / spectrogram.std())[None], text


class Recurrent(nn.Module):
    """Batch norm over time and batch, then a bidirectional GRU whose directions are added."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(inputs)
        self.gru = nn.GRU(inputs, hidden, batch_first=True, bidirectional=True)

    def forward(self, frames: Tensor) -> Tensor:
        found, _ = self.gru(self.norm(frames.flatten(0, 1)).view_as(frames))
        added: Tensor = found.unflatten(-1, (2, -1)).sum(-2)
        return added


class DeepSpeech2(nn.Module):
    """Two convolutions in time and frequency, `layers` bidirectional recurrent layers, one linear layer."""

    def __init__(self, *, channels: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, channels, (41, 11), stride=(2, 2), padding=(20, 5), bias=False),
            nn.BatchNorm2d(channels),
            nn.Hardtanh(0, 20, inplace=True),
            nn.Conv2d(channels, channels, (21, 11), stride=(2, 1), padding=(10, 5), bias=False),
            nn.BatchNorm2d(channels),
            nn.Hardtanh(0, 20, inplace=True),
        )
        width = channels * 41  # 161 frequencies halved twice
        self.recurrent = nn.Sequential(*(Recurrent(hidden if i else width, hidden) for i in range(layers)))
        self.norm = nn.BatchNorm1d(hidden)
        self.output = nn.Linear(hidden, _LETTERS)

    def forward(self, spectrograms: Tensor) -> Tensor:
        """Return scores (batch, frames / 2, letters)."""
        found = self.convolutions(spectrograms)
        found = self.recurrent(found.permute(0, 3, 1, 2).flatten(2))
        scores: Tensor = self.output(self.norm(found.flatten(0, 1))).unflatten(0, found.shape[:2])
        return scores


def ctc_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return connectionist temporal classification, mean per letter."""
    spectrograms, text = batch
    logarithms = model(spectrograms).float().log_softmax(-1).transpose(0, 1)
    frames = torch.full((len(text),), logarithms.shape[0], dtype=torch.long)
    letters = torch.full((len(text),), text.shape[1], dtype=torch.long)
    return functional.ctc_loss(logarithms, text, frames, letters, zero_infinity=True)


def deepspeech2(size: str) -> Training:
    if size == "full":  # 2 convolutions and 5 recurrent layers of 800; 8 seconds of speech
        model = DeepSpeech2(channels=32, hidden=800, layers=5)
        batches = loader(Utterance(frames=800, letters=120), batch_size=16)
    else:
        model = DeepSpeech2(channels=8, hidden=96, layers=2)
        batches = loader(Utterance(frames=64, letters=10), batch_size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=3e-3, momentum=0.9, nesterov=True)
    return Training(name="deepspeech2", model=model, optimizers=(optimizer,), loader=batches, loss=ctc_loss)
