"""`DecoderConfig`: the sizes of a decoder: published ones by name, or those of a `config.json` of transformers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from foretrace import reading, shipped
from foretrace.errors import ForetraceError
from foretrace.names import question, resolve

MOST_WORDS = 1 << 24
# How scores become a cross entropy: in float32, operator by operator; or 16-bit scores in one kernel each way (apex,
# flash-attn, Liger).
LOSSES = ("separate", "fused")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The sizes of a decoder."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int  # width of the feed-forward part
    words: int  # vocabulary
    length: int  # words of a sequence, unless another number is asked for
    gated: bool = True  # SiLU-gated feed-forward part, RMS norm, rotary positions, no biases; else GPT's
    tied: bool = False  # embedding and output share their weight
    width: int = 0  # of a head, where it is not hidden / heads: of a share of the heads
    dropout: float = 0.0  # of attention's weights, of what is added to the residual, of the embedding
    loss: str = "separate"  # of LOSSES; what those who trained it use
    unpads: bool = False  # moves queries, keys and values out of the padded batch ahead of fused attention, and back
    source: str = ""

    @property
    def parameters(self) -> int:
        """Trained numbers."""
        h, width = self.hidden, self.hidden // self.heads
        attention = 2 * h * h + 2 * h * self.kv_heads * width
        table = self.words * h
        if self.gated:
            return self.layers * (attention + 3 * h * self.inner + 2 * h) + h + table * (1 if self.tied else 2)
        biases = 2 * h + 2 * self.kv_heads * width + self.inner + h
        layer = attention + 2 * h * self.inner + biases + 4 * h
        return self.layers * layer + 2 * h + table * (1 if self.tied else 2) + self.length * h


DECODERS = {each.name: each for each in shipped.rows("foretrace.model", "decoders.csv", DecoderConfig)}


def decoder_config(name: str) -> DecoderConfig:
    """Return the decoder of this name, or of a local `config.json` of transformers. Raises ForetraceError."""
    found = decoder_named(name)
    if found:
        return DECODERS[found]
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        return _from_config(path / "config.json" if path.is_dir() else path)
    raise ForetraceError(f"there is no decoder {name!r}; {question(name, DECODERS, ALIASES)}")


# Llama 3.1 has the sizes of Llama 3; releases put "meta" and what they were trained to do around a name.
ALIASES = {
    **{name.replace("llama-3-", "llama-3.1-"): name for name in DECODERS if name.startswith("llama-3-")},
    **{f"meta-{name}": name for name in DECODERS if name.startswith("llama")},
    **{f"code-llama-{name.partition('-')[2]}": name for name in DECODERS if name.startswith("codellama")},
}
_TUNED = re.compile(r"([-_](hf|chat|instruct|base|v\d[\d.]*))+$", re.IGNORECASE)


def decoder_named(name: str) -> str:
    """Return the decoder that a user means, also by its release's name ("meta-llama/Llama-2-7b-hf"); "" if none."""
    bare = _TUNED.sub("", name.rpartition("/")[2])
    return resolve(bare, DECODERS, ALIASES) or ""


def share(found: DecoderConfig, tensor: int) -> DecoderConfig:
    """Return one of `tensor` devices' part of a layer (Megatron-LM, 2019): heads, width, vocabulary. ForetraceError."""
    if tensor == 1:
        return found
    if found.heads % tensor or found.inner % tensor:
        raise ForetraceError(f"the {found.heads} heads of {found.name} cannot be cut into {tensor} equal shares.")
    return replace(
        found,
        heads=found.heads // tensor,
        kv_heads=max(found.kv_heads // tensor, 1),
        inner=found.inner // tensor,
        words=-(-found.words // tensor),
        width=found.hidden // found.heads,
    )


_WHOLE = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
    "max_position_embeddings", "head_dim",
)  # fmt: skip


_OPTIONAL = ("num_key_value_heads", "max_position_embeddings", "head_dim")


def _from_config(path: Path) -> DecoderConfig:
    try:
        found = msgspec.json.decode(reading.read_bytes(path))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ForetraceError(f"{path} is no configuration that can be read: {error}.") from error
    kind = found.get("model_type") if isinstance(found, dict) else None
    for key in _WHOLE:
        if not isinstance(found, dict) or key not in found or (found[key] is None and key in _OPTIONAL):
            continue
        value = found[key]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < MOST_WORDS:
            raise ForetraceError(
                f"{path}: {key} must be a whole number from 1 to {MOST_WORDS - 1:,}, got {value!r}; correct it."
            )
    if kind not in ("llama", "mistral"):
        raise ForetraceError(
            f"{path} is a configuration of model_type {kind!r}; llama and mistral can be taken, or capture the model "
            "from a script."
        )
    try:
        layers, hidden, heads = (found[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        made = DecoderConfig(
            name=path.parent.name or kind, source=str(path), layers=layers, hidden=hidden, heads=heads,
            kv_heads=found.get("num_key_value_heads") or heads, inner=found["intermediate_size"],
            words=found["vocab_size"], length=min(found.get("max_position_embeddings") or 4096, 4096),
            tied=bool(found.get("tie_word_embeddings", False)),
        )  # fmt: skip
    except KeyError as error:
        raise ForetraceError(f"{path} has no {error}; give a whole configuration of transformers.") from error
    width = found.get("head_dim") or hidden // heads
    if width * heads != hidden or found.get("attention_bias") or found.get("mlp_bias"):
        raise ForetraceError(f"{path}: heads of another width or biases are not known here; capture it from a script.")
    return made
