"""The operators of whatever a user names as a model: of the zoo, of a script, of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from foretrace.errors import ForetraceError, NotApplicableError
from foretrace.model.decoders import SHAPES
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
    precision: str = "",
    training: bool = True,
    like: Like = "gpu",
    techniques: Sequence[Technique] = (),
    dims: Mapping[str, int] | None = None,
    length: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> OperatorGraph:
    """What a model computes in a step, without running it.

    `source` is a model of the zoo, a decoder by name, a script with a function training(), or a file that
    `model.sources` reads. `precision` is float32 where none is given, and a decoder's 16-bit weights.
    `techniques` are applied to the training, as it is captured with them. Without `training`, one forward pass without
    gradients. Raises ForetraceError for what cannot be found, read or captured, naming file, operator or layer.
    """
    path = Path(source)
    if source in entries() or path.suffix == ".py":
        from foretrace.model.capture import capture

        _none({"--dim": dims, "--length": length}, f"{source} is a training")
        make = job(source, size)
        wanted = precision or "fp32"
        found = capture(_changed(make, techniques, training), batch=batch, precision=wanted, like=like)
        return replace(found, name=found.name or source)
    if source in SHAPES:
        from foretrace.model.decoders import decoder

        _none({"--do": techniques, "--dim": dims, "--inference": not training}, f"{source} is a decoder, to be trained")
        return decoder(source, batch=batch or 1, length=length, precision=precision or "bf16-weights")
    if path.exists():
        from foretrace.model.sources import load_operators

        asked = {"--do": techniques, "--inference": not training, "--precision": precision, "--length": length}
        _none(asked, f"{source} is a file")
        return load_operators(path, dims=dims, batch=batch or 0, progress=progress)
    near = get_close_matches(source, [*entries(), *SHAPES], 3, 0.4) or ["resnet50", "llama-2-70b"]
    raise ForetraceError(f"{source} is no model of the zoo, no decoder and no file; did you mean {' or '.join(near)}?")


def _none(asked: Mapping[str, object], what: str) -> None:
    if flags := [flag for flag, given in asked.items() if given]:
        raise ForetraceError(f"{what}, so {' and '.join(flags)} cannot be asked for; leave it out.")


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
