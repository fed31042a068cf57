"""BERT large (Devlin et al., NAACL 2019), 335 million parameters."""

from __future__ import annotations

from torch.optim import AdamW
from transformers import BertConfig, BertForPreTraining

from foretrace.training.training import Training
from foretrace.zoo.data import loader
from foretrace.zoo.language import Pair, pretraining_loss


def training() -> Training:
    """Sequences of 128 words."""
    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    model = BertForPreTraining(config)
    batches = loader(Pair(length=128, words=config.vocab_size), batch_size=16)
    optimizer = AdamW(model.parameters(), lr=1e-4)
    return Training(name="bert-large", model=model, optimizers=(optimizer,), loader=batches, loss=pretraining_loss)
