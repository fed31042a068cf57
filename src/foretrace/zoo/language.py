"""Language models of `transformers` with random weights: BERT, GPT-2 and a Llama decoder.

Words are (batch, length) int64; attention is torch's scaled_dot_product_attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretrace.training.training import Training
from foretrace.zoo.data import integer, loader, sentence

_IGNORED = -100  # a label that no loss counts
_MASK, _SEPARATOR, _BEGIN = 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two sentences with 15 % of the words masked, and whether the second follows the first (Devlin et al., 3.1)."""

    length: int
    words: int

    def __call__(self, generator: torch.Generator) -> dict[str, Tensor | int]:
        half = self.length // 2
        text = sentence(self.length, self.words, generator)
        follows = integer(2, generator)
        if not follows:
            text[half:] = sentence(self.length - half, self.words, generator)
        text[0], text[half - 1], text[-1] = _BEGIN, _SEPARATOR, _SEPARATOR
        masked = (torch.rand(self.length, generator=generator) < 0.15) & (text >= 4)
        return {
            "input_ids": text.masked_fill(masked, _MASK),
            "token_type_ids": (torch.arange(self.length) >= half).long(),
            "labels": text.masked_fill(~masked, _IGNORED),
            "next_sentence_label": 1 - follows,
        }


@dataclass(frozen=True, kw_only=True)
class Text:
    """A piece of text."""

    length: int
    words: int

    def __call__(self, generator: torch.Generator) -> dict[str, Tensor]:
        return {"input_ids": sentence(self.length, self.words, generator)}


def pretraining_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return masked words and next sentence."""
    found = model(input_ids=batch["input_ids"], token_type_ids=batch["token_type_ids"])
    words = functional.cross_entropy(found.prediction_logits.float().flatten(0, 1), batch["labels"].flatten())
    follows = functional.cross_entropy(found.seq_relationship_logits.float(), batch["next_sentence_label"])
    return words + follows


def next_word_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return mean cross entropy of every word but the first, given those before."""
    words = batch["input_ids"]
    scores = model(input_ids=words, use_cache=False).logits
    return functional.cross_entropy(scores[:, :-1].float().flatten(0, 1), words[:, 1:].flatten())


def _bert(size: str, *, name: str, full: dict[str, int]) -> Training:
    from transformers import BertConfig, BertForPreTraining

    shape: dict[str, Any] = {"attn_implementation": "sdpa"} | full
    length, batch_size = 128, 32
    if size == "tiny":
        shape |= {"vocab_size": 2048, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
        shape |= {"intermediate_size": 512, "max_position_embeddings": 64}
        length, batch_size = 64, 8
    config = BertConfig(**shape)
    pairs = Pair(length=length, words=config.vocab_size)
    return _training(name, BertForPreTraining(config), pairs, batch_size, pretraining_loss, lr=1e-4)


_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
bert = partial(_bert, name="bert", full={})  # the defaults of BertConfig are BERT base
bert_large = partial(_bert, name="bert-large", full=_LARGE)


def gpt2(size: str) -> Training:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape: dict[str, Any] = {"attn_implementation": "sdpa"}  # the smallest of the paper, 124 million parameters
    length, batch_size = 1024, 8
    if size == "tiny":
        shape |= {"vocab_size": 2048, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 64}
        shape |= {"bos_token_id": _BEGIN, "eos_token_id": _SEPARATOR}
        length, batch_size = 64, 8
    config = GPT2Config(**shape)
    text = Text(length=length, words=config.vocab_size)
    return _training("gpt2", GPT2LMHeadModel(config), text, batch_size, next_word_loss, lr=3e-4)


def llama(size: str) -> Training:
    from transformers import LlamaConfig, LlamaForCausalLM

    # Llama's architecture in the size of TinyLlama: 1.1 thousand million parameters, grouped-query attention
    shape: dict[str, Any] = {"attn_implementation": "sdpa"}
    shape |= {"vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22}
    shape |= {"num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048}
    length, batch_size = 2048, 4
    if size == "tiny":
        shape |= {"vocab_size": 2048, "hidden_size": 160, "intermediate_size": 432, "num_hidden_layers": 4}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        length, batch_size = 64, 8
    config = LlamaConfig(**shape)
    text = Text(length=length, words=config.vocab_size)
    return _training("llama", LlamaForCausalLM(config), text, batch_size, next_word_loss, lr=4e-4)


def _training(name: str, model: nn.Module, draw: Any, batch_size: int, loss: Any, *, lr: float) -> Training:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    batches = loader(draw, batch_size=batch_size)
    return Training(name=name, model=model, optimizers=(optimizer,), loader=batches, loss=loss)
