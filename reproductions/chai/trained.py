"""A small decoder with eight heads, trained for a stated number of steps on the sources of Python's standard library.

The sources come with every Python (licence: Python Software Foundation License 2). Files are divided by a hash of their
names: most are for training, some for choosing counts of clusters, others for judging them.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional

STEPS, BATCH, LENGTH, WORDS = 600, 8, 256, 1024
LAYERS, HEADS, WIDTH = 6, 8, 160
_RATE, _WARM_UP_STEPS = 3e-3, 40
_SHARES = {"choose": 0.06, "judge": 0.06}  # of the files; the rest trains


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedDecoder:
    """The decoder and the text that it has not seen."""

    model: Any
    choose: Tensor  # (samples, length) int64
    judge: Tensor
    steps: int
    cpu_s: float
    words: int  # of training text


def texts() -> dict[str, str]:
    """Return the sources of the standard library in one string per use: train, choose, judge."""
    home, parts = Path(sysconfig.get_path("stdlib")), dict[str, list[str]](train=[], choose=[], judge=[])
    for path in sorted(home.rglob("*.py")):
        name = path.relative_to(home).as_posix()
        if name.startswith(("site-packages", "test", "lib2to3/tests", "idlelib")):
            continue
        place, use = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 2**32, "train"
        for other, share in _SHARES.items():
            use, place = (other, 2.0) if place < share else (use, place - share)
        parts[use].append(path.read_text(encoding="utf-8", errors="replace"))
    return {use: "\n".join(each) for use, each in parts.items()}


def train(
    *, steps: int = STEPS, seed: int = 0, samples: int = 16, length: int = 512, tell: Callable[[str], object] = print
) -> TrainedDecoder:
    """Train the decoder, and take `samples` of `length` tokens of the text to choose by and of that to judge by."""
    from transformers import LlamaConfig, LlamaForCausalLM

    began, found = time.process_time(), texts()
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=WORDS, initial_alphabet=alphabet, show_progress=False)
    words.train_from_iterator(
        [found["train"][at : at + 10_000] for at in range(0, len(found["train"]), 10_000)], trainer
    )
    numbers = {use: torch.tensor(words.encode(text[: 1 << 22]).ids) for use, text in found.items()}

    torch.manual_seed(seed)
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=432, num_hidden_layers=LAYERS, bos_token_id=None,
            eos_token_id=None, num_attention_heads=HEADS, num_key_value_heads=HEADS, tie_word_embeddings=True,
            max_position_embeddings=8192, attn_implementation="sdpa",
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(steps):
        part = min((step + 1) / _WARM_UP_STEPS, 1.0) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = _RATE * part
        at = torch.randint(len(numbers["train"]) - LENGTH, (BATCH, 1)) + torch.arange(LENGTH)
        batch = numbers["train"][at]
        logits = model(batch, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 49:
            tell(f"step {step + 1} of {steps}: {loss.item():.3f} nats, {time.process_time() - began:.0f} s of CPU time")
    model.eval().requires_grad_(False)
    taken = {use: numbers[use][: len(numbers[use]) // length * length].view(-1, length) for use in _SHARES}
    spread = {use: rows[torch.linspace(0, len(rows) - 1, samples).long()] for use, rows in taken.items()}
    return TrainedDecoder(
        model=model, steps=steps, cpu_s=time.process_time() - began, words=len(numbers["train"]), **spread
    )
