"""The operators of whatever a user names as a model: of the zoo, of a script, of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from foretrace.errors import ForetraceError, NotApplicableError
from foretrace.model.operator_graph import OperatorGraph
from foretrace.zoo.registry import entries, job

if TYPE_CHECKING:
    from torch import Tensor

    from foretrace.model.capture import Like
    from foretrace.techniques.base import Technique
    from foretrace.training.batches import Batch
    from foretrace.training.training import Training


def operators_of(
    source: str,
    *,
    size: str = "full",
    batch: int | None = None,
    precision: str = "fp32",
    training: bool = True,
    like: Like = "gpu",
    techniques: Sequence[Technique] = (),
    dims: Mapping[str, int] | None = None,
    progress: Callable[[float], None] | None = None,
) -> OperatorGraph:
    """What a model computes in a step, without running it.

    `source` is a model of the zoo, a script with a function training(), or a file that `model.sources` reads.
    `techniques` are applied to the training, as it is captured with them. Without `training`, one forward pass without
    gradients. Raises ForetraceError for what cannot be found, read or captured, naming file, operator or layer.
    """
    path = Path(source)
    if source in entries() or path.suffix == ".py":
        from foretrace.model.capture import capture

        _none(dims, source, "--dim")
        make = job(source, size)
        found = capture(_changed(make, techniques, training), batch=batch, precision=precision, like=like)
        return replace(found, name=found.name or source)
    for flag, given in (("--do", techniques), ("--inference", not training), ("--precision", precision != "fp32")):
        _none(given, source, flag)
    if path.exists():
        from foretrace.model.sources import load_operators

        return load_operators(path, dims=dims, batch=batch or 0, progress=progress)
    near = get_close_matches(source, entries(), 3, 0.4) or ["resnet50", "bert"]
    raise ForetraceError(f"{source} is no model of the zoo and no file; did you mean {' or '.join(near)}?")


def _none(given: object, source: str, flag: str) -> None:
    if given:
        raise ForetraceError(f"{source} is no model of the zoo and no script, so {flag} means nothing; leave it out.")


def _changed(make: Callable[[], Training], techniques: Sequence[Technique], training: bool) -> Callable[[], Training]:
    """What makes the training with the techniques applied, or with a step that is its forward pass alone."""
    if training and not techniques:
        return make

    def changed() -> Training:
        made = make()
        for technique in techniques:
            try:
                made = technique.apply(made)
            except NotApplicableError as error:
                raise ForetraceError(f"{error} It cannot be applied before the model is captured.") from error
        return made if training else replace(made, run=_forward, optimizers=())

    return changed


def _forward(training: Training, batch: Batch) -> Tensor:
    """A step that only predicts."""
    import torch

    training.model.eval()
    with torch.no_grad():
        return training.forward(batch)
