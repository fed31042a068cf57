"""Checkpoints of real training, kept in a folder so that a protocol goes on where it stopped."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reproductions.sparse_training.nets import NETS, accuracy, training

#: Steps of training, each some two minutes of a core.
STEPS = {"VGG": 400, "VGG-BN": 340, "ResNet": 220, "MobileNet": 208, "DenseNet": 112, "GoogLeNet": 280}
AT = (0.0, 0.125, 0.5, 1.0)  # of these steps: where masks are taken


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A network after some steps: its weights and statistics, the CPU time of the steps, and what it has learned."""

    step: int
    cpu_s: float
    accuracy: float
    state: dict[str, Any]


def checkpoints(name: str, steps: int, folder: Path) -> list[Checkpoint]:
    """A network trained for so many steps, as it was on the way; trained now unless the folder has it."""
    path = folder / f"{name}-{steps}.pt"
    if path.exists():
        return [Checkpoint(**each) for each in torch.load(path, weights_only=True)]
    job = training(name)
    at = {round(steps * share) for share in AT}
    found: list[dict[str, Any]] = []
    spent, running = 0.0, job.steps()
    for step in range(steps + 1):
        if step in at:
            state = {key: value.clone() for key, value in job.model.state_dict().items()}
            found.append({"step": step, "cpu_s": spent, "accuracy": accuracy(job.model), "state": state})
            print(f"{name} step {step}: accuracy {found[-1]['accuracy']:.3f}, {spent:.0f} s", file=sys.stderr)
        begun = time.process_time()
        next(running)
        spent += time.process_time() - begun
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(found, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)
    return [Checkpoint(**each) for each in found]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in NETS:
        checkpoints(each, STEPS[each], Path(sys.argv[1]))
