"""Text that every Python installation has, and decoders trained on it by a stated number of steps."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from foretrace.errors import ForetraceError
from reproductions.speculative.decoder import Decoder, DecoderShape

SEQUENCE, BATCH = 160, 8  # bytes and sequences of a step
_PEAK, _WARM = 3e-3, 20  # learning rate, and the steps in which it rises; then it falls to a tenth


@dataclass(frozen=True)
class Text:
    """Bytes to train on, and those that prompts come from: no file is in both."""

    training: bytes
    held_out: bytes


@cache
def standard_library() -> Text:
    """Modules of the standard library of this Python (PSF licence, version 2), every eighth file held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    if len(files) < 16:
        raise ForetraceError(
            "this Python has no sources of its standard library; use one that was installed with them."
        )
    texts = [each.read_bytes() for each in files]
    return Text(b"\n".join(each for i, each in enumerate(texts) if i % 8), b"\n".join(texts[::8]))


def trained(shape: DecoderShape, text: bytes, steps: int, *, seed: int = 0) -> tuple[Decoder, float]:
    """A decoder after so many steps of AdamW, and its loss in nats per byte over the last tenth of them."""
    model = Decoder(shape, seed=seed).train()
    data = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=_PEAK, betas=(0.9, 0.98), weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(steps):
        share = min(1.0, (step + 1) / _WARM) * (0.55 + 0.45 * np.cos(np.pi * step / steps))
        optimizer.param_groups[0]["lr"] = _PEAK * share
        at = torch.randint(len(data) - SEQUENCE - 1, (BATCH,), generator=generator)
        batch = data[at[:, None] + torch.arange(SEQUENCE + 1)]
        scores = model(batch[:, :-1])
        loss = functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return model.eval().requires_grad_(False), float(np.mean(losses[-max(steps // 10, 1) :]))
