"""All models of the zoo by name, each in two sizes, and trainings from a user's own script.

    training("resnet50", "tiny")            # a Training, weights and data from the seed
    job("resnet50") / job("train.py")       # a function that makes a new Training

`tiny` steps take 20 to 170 ms on one core and fit any machine; `full` is the published configuration.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path

from foretrace import shipped
from foretrace.errors import ForetraceError, needing
from foretrace.names import question, resolve
from foretrace.reading import address
from foretrace.training.training import Training

SIZES = ("tiny", "full")
_ASKED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """One model of the zoo. `home` is the module with `make(size) -> Training`, loaded when it is used."""

    name: str
    task: str  # "image classification"
    summary: str  # one line: architecture and what the two sizes are
    source: str  # paper
    home: str  # "foretrace.zoo.vision:resnet50"
    parameters: tuple[int, int]  # of tiny and of full
    needs: str = ""  # a package beside torch


ENTRIES = shipped.rows("foretrace.zoo", "models.csv", ZooModel, {"parameters": lambda text: text.split("|")})


def entries() -> dict[str, ZooModel]:
    """Return every model by name."""
    return {each.name: each for each in ENTRIES}


def entry(name: str) -> ZooModel:
    """Return the model of this name. Raises ForetraceError naming the nearest ones."""
    known = entries()
    found = resolve(name, known)
    if found is None:
        if said := address(name):
            raise ForetraceError(f"{said}.")
        if Path(name).suffix or len(Path(name).parts) > 1:
            raise ForetraceError(f"{name} is neither a Python script nor a model of foretrace zoo; give one of them.")
        raise ForetraceError(f"the zoo has no model {name!r}; {question(name, known)}")
    return known[found]


def training(name: str, size: str = "tiny", *, seed: int = 0) -> Training:
    """Return a model of the zoo as a Training. Raises ForetraceError for an unknown name or size, MissingExtraError."""
    found = entry(name)
    size = resolve(size, SIZES) or size
    if size not in SIZES:
        raise ForetraceError(f"there is no size {size!r}; choose tiny or full.")
    module, _, function = found.home.partition(":")
    with needing(name):
        import torch

        make = getattr(importlib.import_module(module), function)
        torch.manual_seed(seed)
        made: Training = make(size)
    return made


def job(model: str, size: str = "tiny", *, seed: int = 0) -> Callable[[], Training]:
    """Return a function that makes the same training every time: a model of the zoo, or `training()` of a script.

    Raises ForetraceError where there is no such model or the script has no such function.
    """
    path = Path(model)
    if path.suffix != ".py":
        entry(model)
        return lambda: training(model, size, seed=seed)
    if not path.is_file():
        raise ForetraceError(f"{model} does not exist; give a script with a function training(), or a zoo model.")
    return lambda: _from_script(path, seed)


@contextmanager
def script_mistakes(source: str | Path) -> Iterator[None]:
    """Turn what the code of a script raises into a ForetraceError that names its line; what is raised elsewhere stays.

    What it prints goes to standard error: standard output is for answers.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except ForetraceError:
        raise
    except Exception as error:
        mistake = _mistake(Path(source), error)
        if mistake is None:
            raise
        raise mistake from error


def _mistake(path: Path, error: BaseException, function: str = "training") -> ForetraceError | None:
    """Return the last line of the script that led to the error; None where the script is not to blame."""
    lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if _same(each.filename, path)]
    if isinstance(error, SyntaxError) and _same(error.filename or "", path):
        lines.append(error.lineno)
    if not lines:
        return None
    if isinstance(error, SystemExit):
        return ForetraceError(f"{path} ends itself in line {lines[-1]}; keep that under if __name__ == '__main__'.")
    said = (getattr(error, "msg", None) or str(error)).strip().splitlines()
    what = f"{type(error).__name__}{': ' if said else ''}{said[0].rstrip('.') if said else ''}"
    runs = "training() and a step of it run by themselves" if function == "training" else f"{function}() runs by itself"
    return ForetraceError(f"{path} line {lines[-1]} raises {what}; see that {runs}.")


def _same(name: str, path: Path) -> bool:
    return name.endswith(path.suffix) and Path(name).resolve() == path.resolve()


def call_script(path: Path, function: str, returns: str, *, seed: int = 0) -> object:
    """Return what a script's function returns, called without arguments; `returns` says what that should be.

    Random numbers of PyTorch begin at `seed`. Raises ForetraceError for a mistake in the script.
    """
    import torch

    spec = importlib.util.spec_from_file_location(f"_foretrace_job_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        torch.manual_seed(seed)
        with redirect_stdout(sys.stderr):  # standard output is for answers
            spec.loader.exec_module(module)
        make = getattr(module, function, None)
        if not callable(make):
            raise ForetraceError(f"{path} has no function {function}(); let it return {returns}.")
        if any(each.default is each.empty and each.kind in _ASKED for each in signature(make).parameters.values()):
            raise ForetraceError(f"{function}() of {path} needs arguments; give each a default value.")
        with redirect_stdout(sys.stderr):
            made: object = make()
    except RuntimeError:  # of tensors without data, too; whoever made them knows another way
        raise
    except (Exception, SystemExit) as error:
        raise (_mistake(path, error, function) or error) from error
    finally:
        sys.path.remove(str(path.parent))
    return made


def _from_script(path: Path, seed: int) -> Training:
    made = call_script(path, "training", "a foretrace.Training", seed=seed)
    if not isinstance(made, Training):
        raise ForetraceError(
            f"training() of {path} returned {type(made).__name__}; let it return a foretrace.Training."
        )
    return made
