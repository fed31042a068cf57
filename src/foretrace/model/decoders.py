"""Decoders by name: published configurations as plain modules, captured with four layers and unrolled.

    graph = decoder("llama-2-70b", batch=1, length=4096)
    graph = decoder("path/to/config.json")

A batch is (batch, length) int64 words; the loss is the next word's. The modules compute what the models of these names
compute: root-mean-square or layer normalisation before attention and feed-forward part, rotary or learned positions,
grouped-query attention, a gated or a plain feed-forward part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foretrace.errors import ForetraceError
from foretrace.model.decoder_config import LOSSES, MOST_WORDS, DecoderConfig, decoder_config, share
from foretrace.model.operator_graph import OperatorGraph

if TYPE_CHECKING:
    from foretrace.training.training import Training


def training_of(found: DecoderConfig, *, batch: int = 1, length: int | None = None) -> Callable[[], Training]:
    """Return a function that makes the decoder as a training with AdamW; called on meta tensors it needs no memory."""

    def make() -> Training:
        import torch
        from torch.nn import functional

        from foretrace.model.decoder_modules import Decoder, FusedCrossEntropy
        from foretrace.training.training import Training

        steps = length or found.length
        model = Decoder(found, steps)

        def loss(module: Any, words: Any) -> Any:
            following = torch.roll(words, -1, 1)  # moving the words costs less than cutting the scores
            scores = module(words).flatten(0, 1)
            if found.loss == "fused":
                return FusedCrossEntropy.apply(scores, following.flatten())  # type: ignore[no-untyped-call]
            return functional.cross_entropy(scores.float(), following.flatten())

        return Training(
            name=found.name,
            model=model,
            optimizers=(torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1),),
            loader=[torch.empty(batch, steps, dtype=torch.int64, device="meta")],
            loss=loss,
        )

    return make


def decoder(
    name: str,
    *,
    batch: int = 1,
    length: int | None = None,
    precision: str = "bf16-weights",
    training: bool = True,
    tensor: int = 1,
    update: str = "fused",
    attention: str = "",
    loss: str = "",
) -> OperatorGraph:
    """Return a step of a decoder, or a forward pass alone: a few layers captured, the others unrolled.

    `update` is the implementation of AdamW: what trains such models uses the fused one (torchtitan, the Trainer of
    transformers, Megatron), although PyTorch's own default is "foreach". `loss` is one of LOSSES instead of the one
    that those who trained the decoder use.

    Raises ForetraceError for an unknown name.
    """
    from foretrace.cost.operators.bench import no_collection
    from foretrace.model.capture.capture import capture, forward_only
    from foretrace.model.capture.light import without_compiler
    from foretrace.model.capture.unroll import CAPTURED, unrolled

    found = decoder_config(name)
    if (length is not None and not 2 <= length <= MOST_WORDS) or not 1 <= batch <= MOST_WORDS:
        raise ForetraceError(
            f"{name}: a batch of {batch} sequences of {length} words is not possible; give fewer words."
        )
    if loss not in ("", *LOSSES):
        raise ForetraceError(f"`loss=` is {' or '.join(LOSSES)}, not {loss!r}.")
    found = replace(share(found, tensor), loss=loss or found.loss)
    few = min(found.layers, CAPTURED)
    make = training_of(replace(found, layers=few), batch=batch, length=length)
    with without_compiler(), no_collection():
        called = make if training else lambda: forward_only(make())
        graph = capture(called, precision=precision, update=update, attention=attention)
        if training:
            recipe = {**graph.recipe, "loss": found.loss, "dropout": f"{found.dropout:g}" if found.dropout else "none"}
            graph = replace(graph, recipe=recipe)
        return unrolled(graph, "layers", found.layers) if few < found.layers else graph
