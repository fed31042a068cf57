"""The operators of whatever a user names as a model: of the zoo, of a script, of a file."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from foretrace.errors import ForetraceError, NotApplicableError
from foretrace.model.decoder_config import DECODERS, decoder_named
from foretrace.model.operator_graph import OperatorGraph
from foretrace.names import near, question, resolve
from foretrace.reading import address
from foretrace.zoo.registry import entries, job, script_mistakes

if TYPE_CHECKING:
    from foretrace.model.capture.capture import Like
    from foretrace.techniques.base import Technique
    from foretrace.training.training import Training

ALIASES = {"bert-base": "bert", "bert-base-uncased": "bert", "bert-base-cased": "bert", "gpt-2": "gpt2",
           "bert-large-uncased": "bert-large", "bert-large-cased": "bert-large", "resnet": "resnet50",
           "vit": "vit-b-16", "vit-base-patch16-224": "vit-b-16", "llama": "llama-2-7b"}  # fmt: skip
_FILES = (".json", ".gz", ".onnx", ".et", ".graph", ".zip", ".tgz")
_MOST_SAMPLES = 10**9  # sizes of more would not fit into 64 bits


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
    tensor: int = 1,
    update: str = "",
    attention: str = "",
    loss: str = "",
    progress: Callable[[float], None] | None = None,
) -> OperatorGraph:
    """Return what a model computes in a step, without running it.

    `source` is a model of the zoo, a decoder by name, a script with a function training(), or a file that
    `model.sources` reads. `precision` is float32 where none is given, and a decoder's 16-bit weights.
    `techniques` are applied to the training, as it is captured with them. Without `training`, one forward pass without
    gradients. `tensor` devices share every layer of a decoder; `update` is the implementation of the optimizer,
    `attention` that of attention (`capture`), `loss` that of a decoder's cross entropy. Raises ForetraceError for what
    cannot be found, read or captured, naming file, operator or layer.
    """
    if precision:
        from foretrace.model.capture.capture import precision_named

        precision = precision_named(precision)
    path = Path(source)
    if batch is not None and batch > _MOST_SAMPLES:
        raise ForetraceError(f"a batch of {batch:,} samples is beyond any device; give at most {_MOST_SAMPLES:,}.")
    if not path.exists():  # as its release is called ("openai-community/gpt2"), or written in another way
        source = resolve(source.rpartition("/")[2], entries(), ALIASES) or source
    if source in entries() or path.suffix == ".py":
        from foretrace.model.capture.capture import capture
        from foretrace.model.capture.kept import kept

        shared = tensor if tensor > 1 else 0
        _none({"dim": dims, "length": length, "tensor": shared, "loss": loss}, f"{source} is a training")
        make = job(source, size)
        wanted = precision or "fp32"

        def captured() -> OperatorGraph:
            with script_mistakes(source), warnings.catch_warnings():
                warnings.filterwarnings("ignore", module=r"torch\.")  # no data, and workers that never start
                changed = _changed(make, techniques, training)
                found = capture(changed, batch=batch, precision=wanted, like=like, update=update, attention=attention)
            return replace(found, name=found.name or source)

        if source not in entries() or any(not type(each).__module__.startswith("foretrace.") for each in techniques):
            return captured()  # by code of others, which may have changed since
        asked = {"model": source, "size": size, "batch": batch, "precision": wanted, "training": training, "like": like,
                 "update": update, "attention": attention, "do": "; ".join(map(str, techniques))}  # fmt: skip
        return kept(asked, entries()[source].needs.split(), captured)
    if is_decoder(source):
        from foretrace.model.capture.kept import kept

        def step() -> OperatorGraph:
            from foretrace.model.decoder_modules import decoder

            return decoder(source, **asked)  # type: ignore[arg-type]

        _none({"do": techniques, "dim": dims}, f"{source} is a decoder by name")
        asked = {"batch": batch or 1, "length": length, "precision": precision or "bf16-weights", "training": training,
                 "tensor": tensor, "update": update or "fused", "attention": attention, "loss": loss}  # fmt: skip
        return kept({"decoder": source, **asked}, (), step)
    if path.exists():
        from foretrace.model.readers.sources import load_operators

        refused = {"do": techniques, "inference": not training, "precision": precision, "length": length,
                 "tensor": tensor if tensor > 1 else 0, "optimizer": update, "attention": attention,
                 "loss": loss}  # fmt: skip
        _none(refused, f"{source} is a file")
        return load_operators(path, dims=dims, batch=batch or 0, progress=progress)
    if said := address(source):
        raise ForetraceError(f"{said}.")
    if path.suffix in _FILES or (len(path.parts) > 1 and not near(path.name, [*entries(), *DECODERS], ALIASES)):
        raise ForetraceError(f"{source} does not exist; give a file, a script, or a model of foretrace zoo.")
    every = "foretrace zoo lists models, docs/estimate.md decoders."
    hint = question(source.rpartition("/")[2] or source, [*entries(), *DECODERS], ALIASES, lists=every)
    raise ForetraceError(f"{source} is no model of the zoo, no decoder and no file; {hint}")


def operators_in(
    source: str,
    *,
    size: str = "",
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    step: int | None = None,
    rank: int | None = None,
    salvage: bool = False,
    progress: Callable[[float], None] | None = None,
) -> OperatorGraph:
    """Return the operators of one step of a file as it stands (`load_operators`), or of a model (`operators_of`)."""
    path = Path(source)
    if path.exists() and path.suffix != ".py":
        from foretrace.model.readers.sources import load_operators

        if size:
            raise ForetraceError(f"{source} is a file, so `size=` means nothing; leave it out.")
        return load_operators(
            path, dims=dims, step=step, rank=rank, batch=batch or 0, salvage=salvage, progress=progress
        )
    given = {"dim": bool(dims), "step": step is not None, "rank": rank is not None, "salvage": salvage}
    if wrong := [flag for flag, is_given in given.items() if is_given]:
        raise ForetraceError(f"{source} is no file, so `{wrong[0]}=` means nothing; leave it out.")
    return operators_of(source, size=size or "full", batch=batch, progress=progress)


def is_decoder(source: str) -> bool:
    """Return whether a user means a decoder, by its name or the name of its release."""
    return source not in entries() and not Path(source).exists() and bool(decoder_named(source))


def _none(asked: Mapping[str, object], what: str) -> None:
    if flags := [flag for flag, given in asked.items() if given]:
        raise ForetraceError(
            f"{what}, so {' and '.join(f'`{flag}=`' for flag in flags)} cannot be asked for; leave it out."
        )


def _changed(make: Callable[[], Training], techniques: Sequence[Technique], training: bool) -> Callable[[], Training]:
    """Return what makes the training with the techniques applied, or with a step that is its forward pass alone."""
    if training and not techniques:
        return make

    from foretrace.model.capture.capture import forward_only

    def changed() -> Training:
        made = make()
        for technique in techniques:
            before = made
            try:
                # Without the copy that `apply` makes first: the training was just made, and PyTorch 2.13 crashes on
                # autocast over deep copies of tensors without data.
                made = replace(technique.realise(made), applied=(*made.applied, str(technique)))
            except NotApplicableError as error:
                raise ForetraceError(
                    f"{str(error).rstrip('.')}; leave {technique.name} out here, and ask foretrace whatif for it with "
                    "the task graph that `out=` writes."
                ) from error
            if made.loader is not before.loader and _same_step(made, before):
                raise ForetraceError(
                    f"{technique.name} changes only how data are loaded, which a model alone does not tell; leave it "
                    "out, or record a run and ask foretrace whatif."
                )
        return made if training else forward_only(made)

    return changed


def _same_step(one: Training, other: Training) -> bool:
    """Return whether two trainings differ in their data alone."""
    kept = ("model", "run", "around_forward", "on_batch", "micro_batches", "scaler", "clip_norm", "batch_size")
    return all(getattr(one, name) == getattr(other, name) for name in kept)
