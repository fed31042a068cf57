"""`ServedModel`: the sizes of a decoder as an engine serves it: experts, latent attention, states of fixed size."""

from __future__ import annotations

from dataclasses import dataclass

from foretrace import shipped
from foretrace.errors import ForetraceError
from foretrace.model.decoder_config import ALIASES, DECODERS, decoder_config, decoder_named
from foretrace.names import question, resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The sizes of a decoder. Layers have a dense feed-forward part, or experts of which each token meets `active`."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int  # width of a query or key
    words: int  # vocabulary
    inner: int = 0  # width of a dense feed-forward part
    dense: int = 0  # layers that have one
    experts: int = 0  # of each other layer
    active: int = 0
    expert_inner: int = 0
    shared_inner: int = 0  # width of the experts that every token meets
    latent: int = 0  # width in which keys and values are kept together (multi-head latent attention); 0: kept apart
    rope: int = 0  # width of the positions beside it
    q_latent: int = 0
    value: int = 0  # width of a value, where it is not that of a key
    every: int = 1  # one of so many layers attends to all tokens; the others keep a state of fixed size
    mixing: int = 0  # weights of a layer's attention, where the widths above do not give them
    index: int = 0  # tokens that a query attends to at most; 0: all
    gated: bool = True
    tied: bool = False
    source: str = ""

    @property
    def attention_parameters(self) -> int:
        """Weights of a layer's attention."""
        if self.mixing:
            return self.mixing
        h, heads = self.hidden, self.heads
        value = self.value or self.head
        if self.latent:
            nope = self.head - self.rope
            q = h * self.q_latent + self.q_latent * heads * self.head
            return q + h * (self.latent + self.rope) + self.latent * heads * (nope + value) + heads * value * h
        return h * self.head * (2 * heads + 2 * self.kv_heads)

    @property
    def dense_parameters(self) -> int:
        """Weights of a dense feed-forward part."""
        return (3 if self.gated else 2) * self.hidden * self.inner

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.expert_inner

    @property
    def shared_parameters(self) -> int:
        """Weights of the experts that every token meets, of a layer."""
        return 3 * self.hidden * self.shared_inner

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense

    @property
    def attending(self) -> int:
        """Layers that attend to all tokens."""
        return self.layers // self.every

    @property
    def active_parameters(self) -> int:
        """Weights that a token meets, without embedding and output."""
        met = self.active * self.expert_parameters + self.shared_parameters
        attention = self.layers * self.attention_parameters
        return attention + self.dense * self.dense_parameters + self.moe_layers * met

    @property
    def parameters(self) -> int:
        """All weights."""
        experts = self.experts * self.expert_parameters + self.shared_parameters
        layers = self.layers * self.attention_parameters + self.dense * self.dense_parameters
        return layers + self.moe_layers * experts + self.words * self.hidden * (1 if self.tied else 2)

    @property
    def kv_numbers(self) -> int:
        """Numbers that the cache keeps of a token in a layer that attends to all tokens."""
        return self.latent + self.rope if self.latent else 2 * self.kv_heads * self.head


SERVED = {each.name: each for each in shipped.rows("foretrace.serving.llm", "served.csv", ServedModel)}
_NAMES = {"deepseek-r1": "deepseek-v3", "deepseek-v3.1": "deepseek-v3"}


def served_model(name: str) -> ServedModel:
    """Return the model of this name, or of a `config.json` of llama or mistral. ForetraceError has near names."""
    bare = name.rpartition("/")[2] if "/" in name and not name.endswith(".json") else name
    if found := resolve(bare, SERVED, _NAMES):
        return SERVED[found]
    if not decoder_named(name) and not name.endswith(".json") and "/" not in name:
        hint = question(name, [*SERVED, *DECODERS], _NAMES | ALIASES)
        raise ForetraceError(f"there is no model {name!r} that can be served; {hint}")
    one = decoder_config(name)
    return ServedModel(
        name=one.name, layers=one.layers, hidden=one.hidden, heads=one.heads, kv_heads=one.kv_heads,
        head=one.width or one.hidden // one.heads, words=one.words, inner=one.inner, dense=one.layers,
        gated=one.gated, tied=one.tied, source=one.source,
    )  # fmt: skip
