"""Three small real trainings that read files, with stalls of known length put in; benchmarks/stalls.py runs them.

A reader that is throttled as a slow disk would be (only what is not in the page cache), a loader that computes, one
whose core others take, and a worker that is late. `burn` is what takes the cores.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from foretrace.experiment.cores import go_first
from foretrace.training.training import Training

NBYTES = 786_432  # of a file, which is a batch
FILES = 96
_SLOT = 32  # bytes per core: asked for (q), CPU ns that were burnt (q), loads (q)


class Board:
    """What loaders and burners tell each other: a file of one slot per core."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:  # noqa: PTH123
            self._map = mmap.mmap(file.fileno(), 0)

    def get(self, core: int, place: int) -> int:
        """A number of a core's slot."""
        return int(struct.unpack_from("q", self._map, _SLOT * core + 8 * place)[0])

    def put(self, core: int, place: int, value: int) -> None:
        struct.pack_into("q", self._map, _SLOT * core + 8 * place, value)


def new_board(path: Path) -> None:
    """A board of nothing."""
    path.write_bytes(bytes(_SLOT * (os.cpu_count() or 1)))


def burn(board: str, core: int) -> None:
    """Take a core whenever a loader that runs there asks for it, and count."""
    os.sched_setaffinity(0, {core})
    go_first()  # as the workers do; otherwise they would hardly notice
    own = Board(board)
    while True:
        while not own.get(core, 0):
            time.sleep(2e-4)
        begin = time.thread_time_ns()
        while own.get(core, 0):
            pass
        own.put(core, 1, own.get(core, 1) + time.thread_time_ns() - begin)


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
        """As from a disk of so many MB/s; what is in the page cache comes at once."""
        began, into = time.perf_counter(), bytearray(NBYTES)
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
            time.sleep(max(began + NBYTES / (1e6 * rate) - time.perf_counter(), 0.0))
        return into

    def _contended(self, seconds: float) -> None:
        """Use so much CPU time on a core that a burner takes meanwhile, too."""
        self._board = self._board or Board(self.case["board"])
        usual = sorted(os.sched_getaffinity(0))
        core = usual[_rank() % len(usual)]
        os.sched_setaffinity(0, {core})
        self._board.put(core, 0, 1)
        spin(seconds)
        self._board.put(core, 0, 0)
        os.sched_setaffinity(0, usual)
        self._board.put(core, 2, self._board.get(core, 2) + 1)


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
        return self.last(x)


class Lstm(nn.Module):
    """A language model whose embedding has dense gradients, ready last."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells = nn.Embedding(8192, 128), nn.LSTM(128, 160, batch_first=True)
        self.last = nn.Linear(160, 256)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(self.words(x))[0])


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
