"""Decoding as a `Training`: a step is one token of every prompt, so that decoding is recorded, changed and verified.

foretrace verify "clustered-heads clusters=2" --model examples/decode.py
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foretrace.training.training import Training

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(kw_only=True)
class _Token:
    """The step: one token more; after `tokens` of them back to the prompt, whose keys and values stay cached."""

    tokens: int
    under_way: weakref.WeakKeyDictionary[nn.Module, list[Any]] = field(default_factory=weakref.WeakKeyDictionary)

    def __call__(self, training: Training, prompt: Tensor) -> Tensor:
        import torch

        from foretrace.training.clustered_heads import cache_argument

        model = training.model
        keys_and_values = cache_argument(model)
        if model.training:
            model.eval()
        with torch.inference_mode():
            if model not in self.under_way:
                answer = model(prompt[:, :-1], use_cache=True, logits_to_keep=1)
                self.under_way[model] = [answer[keys_and_values], prompt[:, -1:], 0]
            cache, token, done = self.under_way[model]
            if done == self.tokens:
                cache.crop(-done)
                token, done = prompt[:, -1:], 0
            logits = model(token, **{keys_and_values: cache}, use_cache=True).logits[:, -1]
            token = logits.argmax(1, keepdim=True)
            self.under_way[model] = [cache, token, done + 1]
            loss: Tensor = -logits.log_softmax(1).gather(1, token).mean()
            return loss


def decoding(model: nn.Module, prompt: Tensor, *, tokens: int = 16, name: str = "decoding") -> Training:
    """Return greedy decoding of a decoder of `transformers` as a job.

    Args:
        model: the decoder, of language; its gradients are turned off.
        prompt: (batch, length) int64, length above 1.
        tokens: that follow before it begins again, so that the context keeps its length.
        name: of the job.

    Returns:
        A training without optimizers; the loss of a step is that of the tokens chosen, in nats.

    """
    model.requires_grad_(False)
    return Training(name=name, model=model, optimizers=(), loader=[prompt], loss=_no_loss, run=_Token(tokens=tokens))


def _no_loss(model: nn.Module, batch: Any) -> Tensor:
    raise NotImplementedError("decoding learns nothing")


def training(context: int = 2048) -> Training:
    """Return decoding of a small Llama-like decoder with random weights, after a prompt of `context` tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=1376, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=8192, attn_implementation="sdpa",
    )  # fmt: skip
    return decoding(LlamaForCausalLM(config), torch.randint(3, 2048, (1, context)), name=f"decoding-{context}")
