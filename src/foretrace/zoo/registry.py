"""All models of the zoo by name, each in two sizes, and trainings from a user's own script.

    training("resnet50", "tiny")            # a Training, weights and data from the seed
    job("resnet50") / job("train.py")       # a function that makes such a Training anew

`tiny` steps take 20 to 150 ms on one core and fit any machine; `full` is the published configuration.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from foretrace.errors import ForetraceError, MissingExtraError
from foretrace.training.training import Training

SIZES = ("tiny", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One model of the zoo. `home` is the module with `make(size, seed) -> Training`, loaded when it is used."""

    name: str
    task: str  # "image classification"
    summary: str  # one line: architecture and what the two sizes are
    source: str  # paper
    home: str  # "foretrace.zoo.vision:resnet50"
    needs: str = ""  # a package beside torch


ENTRIES: tuple[Entry, ...] = ()


def entries() -> dict[str, Entry]:
    """Every model by name."""
    return {each.name: each for each in ENTRIES}


def entry(name: str) -> Entry:
    """The model of this name. Raises ForetraceError naming the nearest ones."""
    known = entries()
    if name not in known:
        near = get_close_matches(name, known, n=3, cutoff=0.4) or sorted(known)
        raise ForetraceError(f"the zoo has no model {name!r}; did you mean {' or '.join(near)}?")
    return known[name]


def training(name: str, size: str = "tiny", *, seed: int = 0) -> Training:
    """A model of the zoo as a Training. Raises ForetraceError for an unknown name or size, MissingExtraError."""
    found = entry(name)
    if size not in SIZES:
        raise ForetraceError(f"there is no size {size!r}; choose tiny or full.")
    module, _, function = found.home.partition(":")
    try:
        import torch

        make = getattr(importlib.import_module(module), function)
        torch.manual_seed(seed)
        made: Training = make(size)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        extra = "torch" if package == "torch" else "zoo"
        raise MissingExtraError(
            f'{name} needs {package}, which is not installed: pip install "foretrace[{extra}]"'
        ) from error
    return made


def job(model: str, size: str = "tiny", *, seed: int = 0) -> Callable[[], Training]:
    """What makes the training anew, the same every time: a model of the zoo, or `training()` of a script.

    Raises ForetraceError where there is no such model or the script has no such function.
    """
    path = Path(model)
    if path.suffix != ".py":
        entry(model)
        return lambda: training(model, size, seed=seed)
    if not path.is_file():
        raise ForetraceError(f"{model} does not exist; give a script with a function training(), or a zoo model.")
    return lambda: _from_script(path, seed)


def _from_script(path: Path, seed: int) -> Training:
    import torch

    spec = importlib.util.spec_from_file_location(f"_foretrace_job_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        torch.manual_seed(seed)
        spec.loader.exec_module(module)
        make = getattr(module, "training", None)
        if not callable(make):
            raise ForetraceError(f"{path} has no function training(); let it return a foretrace.Training.")
        made = make()
    finally:
        sys.path.remove(str(path.parent))
    if not isinstance(made, Training):
        raise ForetraceError(f"training() of {path} returned a {type(made).__name__}; let it return a Training.")
    return made
