"""Losses of our K-FAC beside those of kfac-pytorch, whose source is read from a checkout and is no part of this."""

from __future__ import annotations

import importlib
import sys
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch

from foretrace.errors import ForetraceError
from foretrace.experiment.messages import Worker
from foretrace.experiment.processes import together
from foretrace.techniques.arguments import parse
from foretrace.training.training import Training
from reproductions.kaisa.tasks import TASKS
from reproductions.kept import Cell

STEPS, BATCH, RATE = 40, 250, 0.05
SETTING = {"damping": 0.003, "clip": 0.001, "decay": 0.95}
FRACTIONS = (0.5, 1.0)  # of two workers


@contextmanager
def library(checkout: Path | None) -> Iterator[Any]:
    """The module `kfac.preconditioner` of a checkout, or of what is installed; its version is `version`.

    Raises ForetraceError where there is neither.
    """
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says which of its own optional parts are missing
        path = list(sys.path)
        if checkout is not None:
            about = checkout / "pyproject.toml"
            if not about.is_file():
                raise ForetraceError(f"{checkout} must be a checkout of kfac-pytorch; clone it there.")
            project = tomllib.loads(about.read_text(encoding="utf-8"))["project"]
            # It reads its own version from the metadata that an installation would leave.
            info = Path(folder) / f"kfac_pytorch-{project['version']}.dist-info"
            info.mkdir()
            text = f"Metadata-Version: 2.1\nName: kfac-pytorch\nVersion: {project['version']}\n"
            (info / "METADATA").write_text(text, encoding="utf-8")
            sys.path[:0] = [folder, str(checkout)]
        try:
            yield importlib.import_module("kfac.preconditioner")
        except ModuleNotFoundError as error:
            raise ForetraceError(f"kfac-pytorch is not here ({error}); give a checkout of it.") from None
        finally:
            sys.path[:] = path


class Theirs:
    """An optimizer behind the library's preconditioner."""

    def __init__(self, optimizer: Any, preconditioner: Any) -> None:
        self.optimizer, self.preconditioner = optimizer, preconditioner

    def step(self) -> None:
        """Precondition, then update."""
        self.preconditioner.step()
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients."""
        self.optimizer.zero_grad(set_to_none)


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared in a process."""

    task: str
    checkout: str
    fraction: float
    steps: int


def losses(asked: Compared, worker: Worker | None = None) -> list[list[float]]:
    """Losses by step, ours and theirs, of the same training; of this worker where there are several."""
    task = next(each for each in TASKS if each.name == asked.task)
    often = "factors_every=5 inverses_every=20"
    words = f"kfac {often} scaling=mean fraction={asked.fraction:g} " + " ".join(f"{k}={v}" for k, v in SETTING.items())

    def start() -> Training:
        made = task.training(BATCH, 0, lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=0.9))
        return parse("data-parallel workers=2 network=1gbit").apply(made) if worker is not None else made

    torch.set_num_threads(1)
    found = [[float(each) for each in parse(words).apply(start()).steps(asked.steps)]]
    training = start()
    with library(Path(asked.checkout) if asked.checkout else None) as kfac:
        theirs = kfac.KFACPreconditioner(
            training.model, factor_update_steps=5, inv_update_steps=20, damping=SETTING["damping"], lr=RATE,
            factor_decay=SETTING["decay"], kl_clip=SETTING["clip"], grad_worker_fraction=asked.fraction,
        )  # fmt: skip
        training = replace(training, optimizers=(Theirs(training.optimizers[0], theirs),))  # type: ignore[arg-type]
        return [*found, [float(each) for each in training.steps(asked.steps)]]


def compare(name: str, checkout: Path | None, *, steps: int = STEPS, fractions: Sequence[float] = FRACTIONS) -> Cell:
    """Losses of a task alone, and of two workers at each fraction. Raises ForetraceError without the library."""
    with library(checkout):
        version = importlib.import_module("kfac").__version__
    asked = Compared(task=name, checkout=str(checkout.resolve()) if checkout else "", fraction=1.0, steps=steps)
    cases = [_case(1, 1.0, losses(asked))]
    if fractions:
        with together(2) as processes:
            for fraction in fractions:
                given = msgspec.structs.replace(asked, fraction=fraction)
                cases.append(_case(2, fraction, processes.ask(losses, given, "comparing losses")[0]))
    return {"version": version, "cases": cases}


def _case(workers: int, fraction: float, found: list[list[float]]) -> Cell:
    ours, theirs = found
    apart = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    return {"workers": workers, "fraction": fraction, "ours": ours, "theirs": theirs, "apart": apart}
