"""Three small real trainings that read files, with stalls of known length put in; benchmarks/stalls.py runs them.

A reader that is throttled as a slow disk would be (only what is not in the page cache), a loader that computes, one
whose core others take (burner.py), and a worker that is late.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from burner import Board
from foretrace.training.training import Training

NBYTES = 786_432  # of a file, which is a batch
FILES = 96


def spin(seconds: float) -> None:
    """Use so much CPU time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Stored(Dataset[Tensor]):
    """A batch per file."""

    def __init__(self, folder: str, kind: str, case: dict[str, Any]) -> None:
        self.files = sorted(str(each) for each in Path(folder).iterdir())
        self.kind, self.case = kind, case
        self._board: Board | None = None

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        raw = np.frombuffer(self._read(self.files[index]), dtype=np.uint8)
        if (seconds := self.case.get("prepare_ms", 0) / 1e3) > 0:
            spin(seconds)
        if (seconds := self.case.get("contended_ms", 0) / 1e3) > 0:
            self._contended(seconds)
        if self.kind == "lstm":
            return torch.from_numpy(raw.view(np.uint16)[::384].astype(np.int64) % 8192).reshape(16, 64)
        shape = (256, 3072) if self.kind == "mlp" else (16, 3, 128, 128)
        return torch.from_numpy(raw.copy()).reshape(shape).float() / 255

    def _read(self, path: str) -> bytearray:
        """As if a disk of so many MB/s were behind the real one; what is in the page cache comes at once."""
        into = bytearray(NBYTES)
        handle = os.open(path, os.O_RDONLY)
        try:
            try:
                if os.preadv(handle, [into], 0, os.RWF_NOWAIT) == NBYTES:
                    return into
            except BlockingIOError:
                pass
            os.preadv(handle, [into], 0)
        finally:
            os.close(handle)
        if rate := self.case.get("disk_mb_s", 0):
            time.sleep(NBYTES / (1e6 * rate))
        return into

    def _contended(self, seconds: float) -> None:
        """Use so much CPU time on a core that a burner takes meanwhile, too."""
        self._board = self._board or Board(self.case["board"])
        usual = sorted(os.sched_getaffinity(0))
        core = usual[_rank() % len(usual)]
        os.sched_setaffinity(0, {core})
        self._board.ask(core)
        spin(seconds)
        self._board.leave(core)
        os.sched_setaffinity(0, usual)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class Mlp(nn.Module):
    """Nearly all weights in the first layer: its gradient is ready last, so nothing hides the exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(3072, 384, bias=False), nn.Linear(384, 384), nn.Linear(384, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        for _ in range(4):
            x = torch.relu(self.inner(x))
        found: Tensor = self.last(x)
        return found


class Lstm(nn.Module):
    """A language model whose embedding has dense gradients, ready last."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells = nn.Embedding(8192, 128), nn.LSTM(128, 160, batch_first=True)
        self.last = nn.Linear(160, 256)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.cells(self.words(x))[0])
        return found


def _cnn() -> nn.Module:
    """Patches as a ViT takes them, then pointwise convolutions."""
    return nn.Sequential(
        nn.Conv2d(3, 256, 32, stride=16, bias=False), nn.ReLU(), nn.Conv2d(256, 256, 1), nn.ReLU(),
        nn.Conv2d(256, 256, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def training_of(kind: str, folder: str, case: dict[str, Any]) -> Training:
    """One of "mlp", "cnn", "lstm" over the files of a folder, with the stalls of a case."""
    model = {"mlp": Mlp, "cnn": _cnn, "lstm": Lstm}[kind]()
    late_s = case.get("late_ms", 0) / 1e3

    def loss(module: Any, batch: Tensor) -> Tensor:
        if late_s and _rank() == 1:
            time.sleep(late_s)
        found: Tensor = module(batch).square().mean()
        return found

    loader = DataLoader(Stored(folder, kind, case), batch_size=1, collate_fn=_only)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Training(name=kind, model=model, optimizers=(optimizer,), loader=loader, loss=loss)


def _only(batch: list[Tensor]) -> Tensor:
    return batch[0]
