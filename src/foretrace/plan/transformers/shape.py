"""`TransformerSizes`: what a plan needs of a model: decoders by name, mixtures of experts, encoders."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from foretrace import shipped
from foretrace.errors import ForetraceError
from foretrace.model.decoder_config import ALIASES, DECODERS, DecoderConfig, decoder_config, decoder_named
from foretrace.names import question, resolve
from foretrace.zoo.registry import entries


@dataclass(frozen=True, kw_only=True)
class TransformerSizes(DecoderConfig):
    """The sizes of a transformer: of experts, `inner` is the width of one.

    Raises ForetraceError for sizes that no layer can have.
    """

    gated: bool = False  # SiLU-gated feed-forward part, without biases
    experts: int = 1  # of a layer
    active: int = 1  # experts that a word goes through
    causal: bool = True  # a decoder; else an encoder

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "inner", "words", "length", "experts", "active"):
            value = getattr(self, name)
            if value < 1:
                raise ForetraceError(
                    f"{name.replace('_', ' ')} of {self.name} must be a whole number above 0, got {value}; give 1 or "
                    "more."
                )
        if not self.width and self.hidden % self.heads:
            raise ForetraceError(
                f"hidden size {self.hidden} of {self.name} must be divided by its {self.heads} heads without a rest; "
                f"give {self.hidden - self.hidden % self.heads}."
            )

    @property
    def head(self) -> int:
        return self.width or self.hidden // self.heads

    @property
    def attention_parameters(self) -> int:
        """Weights of a layer's attention, without biases and norms."""
        return 2 * self.hidden * self.head * (self.heads + self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert, or of the feed-forward part, without biases."""
        return (3 if self.gated else 2) * self.hidden * self.inner

    @property
    def parameters(self) -> int:
        """Trained numbers, without biases and norms (about 0.1 % of a layer)."""
        layer = self.attention_parameters + self.experts * self.expert_parameters
        return self.layers * layer + self.words * self.hidden * (1 if self.tied else 2)


def of_decoder(found: DecoderConfig, length: int = 0) -> TransformerSizes:
    """Return what a plan needs of a decoder."""
    known = {each.name: getattr(found, each.name) for each in fields(found)}
    return TransformerSizes(**{**known, "length": length or found.length})


OTHERS = {each.name: each for each in shipped.rows("foretrace.plan.transformers", "shapes.csv", TransformerSizes)}


def transformer(name: str, *, length: int = 0) -> TransformerSizes:
    """Return the transformer of this name, or of a `config.json`; `length` words per sequence where it is not its own.

    Raises ForetraceError with names that come near.
    """
    other = resolve(name, OTHERS)
    if other:
        return replace(OTHERS[other], length=length or OTHERS[other].length)
    if not decoder_named(name) and not name.endswith(".json") and "/" not in name:
        place = f"place its operators: foretrace plan place {name}." if name in entries() else ""
        hint = question(name, [*DECODERS, *OTHERS], ALIASES, lists=place)
        raise ForetraceError(f"there is no transformer {name!r}; {hint}")
    return of_decoder(decoder_config(name), length)
