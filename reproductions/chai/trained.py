"""A small decoder, trained for a stated number of steps on the sources of Python's standard library.

The sources come with every Python (licence: Python Software Foundation License 2). Files are divided by a hash of their
names: most are for training and choosing clusters, some for comparing ways to choose, others for judging or spare.
Every text begins with the same token, as those of LLaMA and OPT do: heads that have nothing to do attend to it.
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

STEPS, BATCH, LENGTH, WORDS = 800, 6, 160, 1024
LAYERS, WIDTH = 4, 128
_RATE, _WARM_UP_STEPS = 4e-3, 40
_SHARES = {"spare": 0.06, "compare": 0.04, "judge": 0.06}  # of the files; the rest trains, and chooses
_JUDGING = ("compare", "judge")
_BEGIN = "<|begin|>"  # word 0


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedDecoder:
    """The decoder and the text that it has not seen."""

    model: Any
    choose: Tensor  # (samples, length) int64
    compare: Tensor
    judge: Tensor
    steps: int
    cpu_s: float
    words: int  # of training text


def texts() -> dict[str, str]:
    """Return the sources of the standard library in one string per use: train, spare, compare, judge."""
    home, parts = Path(sysconfig.get_path("stdlib")), {use: list[str]() for use in ("train", *_SHARES)}
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
    heads: int, *, layers: int = LAYERS, steps: int = STEPS, seed: int = 0, samples: int = 16, choosing: int = 0,
    length: int = LENGTH, weights: Path | None = None, tell: Callable[[str], object] = print,
) -> TrainedDecoder:  # fmt: skip
    """Train the decoder, and take `samples` of `length` tokens of the texts to compare and to judge by.

    As many, or `choosing`, are taken of the training text, to choose by.

    Trained weights are kept in the folder `weights`, and read where they are there.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    began = time.process_time()
    numbers = _kept(weights and weights / "words.pt", _words)
    torch.manual_seed(seed)
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=352, num_hidden_layers=layers, bos_token_id=0,
            eos_token_id=None, num_attention_heads=heads, num_key_value_heads=heads, tie_word_embeddings=True,
            max_position_embeddings=8192, attn_implementation="sdpa",
        )
    )  # fmt: skip
    place = weights and weights / f"{layers}-layers-{heads}-heads-{steps}-steps-{seed}.pt"
    state, cpu_s = _kept(place, lambda: (_fit(model, numbers["train"], steps, tell), time.process_time() - began))
    model.load_state_dict(state)
    model.eval().requires_grad_(False)
    spread = {}
    for use, text, taken in (("choose", "train", choosing or samples), *((each, each, samples) for each in _JUDGING)):
        spread[use] = _texts(numbers[text], torch.linspace(0, len(numbers[text]) - length, taken).long(), length)
    return TrainedDecoder(model=model, steps=steps, cpu_s=cpu_s, words=len(numbers["train"]), **spread)


def _kept(path: Path | None, made: Callable[[], Any]) -> Any:
    """What is made, or was made before and kept there."""
    if path and path.exists():
        return torch.load(path)
    found = made()
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(found, path)
    return found


def _words() -> dict[str, Tensor]:
    """The texts in numbers of words."""
    found, words = texts(), Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=WORDS, special_tokens=[_BEGIN], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    words.train_from_iterator(
        [found["train"][at : at + 10_000] for at in range(0, len(found["train"]), 10_000)], trainer
    )
    return {use: torch.tensor(words.encode(text[: 1 << 23]).ids) for use, text in found.items()}


def _fit(model: nn.Module, words: Tensor, steps: int, tell: Callable[[str], object]) -> dict[str, Tensor]:
    """The parameters after so many steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(steps):
        part = min((step + 1) / _WARM_UP_STEPS, 1.0) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = _RATE * part
        batch = _texts(words, torch.randint(len(words) - LENGTH, (BATCH,)), LENGTH)
        logits = model(batch, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 49:
            tell(f"step {step + 1} of {steps}: {loss.item():.3f} nats")
    return model.state_dict()


def _texts(words: Tensor, at: Tensor, length: int) -> Tensor:
    """(texts, length): the word that begins all, and those from `at` on."""
    return torch.cat([torch.zeros(len(at), 1, dtype=torch.long), words[at[:, None] + torch.arange(length - 1)]], 1)
