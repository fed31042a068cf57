"""A char-level transformer in seven layers, and training in one process as it stands in the papers: the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foretrace.training.pipeline.job import LossScaling, PipelineJob

CHARACTERS, WIDTH, LENGTH, SAMPLES = 31, 16, 12, 3
CUTS = {1: (7,), 2: (3, 4), 4: (2, 2, 1, 2)}


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CHARACTERS, WIDTH) * 0.1)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.embedding(x, self.weight) + self.place


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 2 * WIDTH, dropout, activation="gelu", batch_first=True, norm_first=True
        )

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
        out: Tensor = self.layer(x, src_mask=mask)
        return out


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CHARACTERS, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def text(micro_batch: int) -> tuple[Tensor, Tensor]:
    """Characters that follow a rule, and the next ones."""
    generator = torch.Generator().manual_seed(micro_batch)
    start = torch.randint(CHARACTERS, (SAMPLES, 1), generator=generator)
    step = torch.randint(1, 4, (SAMPLES, 1), generator=generator)
    line = (start + step * torch.arange(LENGTH + 1)) % CHARACTERS
    return line[:, :-1], line[:, 1:]


def entropy(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())


def steep(out: Tensor, target: Tensor) -> Tensor:
    """A loss whose gradients overflow float32 once it is scaled by 2 ** 120, and do not with some powers less."""
    return entropy(out, target) * 2.0**10


def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)


def job(stages: int, *, dropout: float = 0.0, **options: Any) -> PipelineJob:
    """The transformer cut into so many stages."""
    layers: tuple[Callable[[], nn.Module], ...] = (
        Embedding,
        *[partial(Block, dropout)] * 4,
        partial(nn.LayerNorm, WIDTH),
        Head,
    )
    options = {"optimizer": momentum, "loss": entropy, "data": text, **options}
    return PipelineJob(layers=layers, cut=CUTS[stages], **options)


TIED = (("0.weight", "6.weight"),)
SCALING = LossScaling(scale=2.0**120, every=3)


def alone(
    job: PipelineJob, micro_batches: int, batches: int, *, delays: Sequence[int] | None = None
) -> tuple[dict[str, Tensor], list[float], float, tuple[int, ...]]:
    """(weights, losses, scale, skipped) of one process: w(t + 1) = w(t) - v grad f(w(t - delay)).

    `delays` has a delay per layer, none is ordinary training: torch's own clipping, loss.backward() over the whole
    model. A tied weight has a gradient per use, which are added in the order of layers.
    """
    late = delays or [0] * len(job.layers)
    layers = [job.built(layer).train() for layer in range(len(job.layers))]
    named = {f"{at}.{name}": p for at, layer in enumerate(layers) for name, p in layer.named_parameters()}
    borrowed = {name for group in job.tied for name in group[1:]}
    history: list[dict[str, Tensor]] = [{name: p.detach().clone() for name, p in named.items()}]
    optimizer = job.optimizer([p for name, p in named.items() if name not in borrowed])
    scales, since, losses, skipped = [job.scaling.scale if job.scaling else 1.0], 0, list[float](), list[int]()
    total: Any
    for t in range(batches):
        _set(named, lambda name: history[max(t - late[int(name.split(".")[0])], 0)][name])  # noqa: B023
        scale, total = scales[max(t - late[-1], 0)] if job.scaling else 1.0, 0.0
        for i in range(t * micro_batches, (t + 1) * micro_batches):
            x, target = job.data(i)
            loss = job.loss(job.run(layers, 0, x, i), target)
            total = total + loss.detach()
            share = loss / micro_batches if micro_batches > 1 else loss
            (share * scale if job.scaling else share).backward()
        losses.append(float(total) / micro_batches)
        for owner, *others in job.tied:
            for name in others:
                first, second = named[owner].grad, named[name].grad
                assert first is not None and second is not None
                named[owner].grad = first + second
                named[name].grad = None
        _set(named, lambda name: history[-1][name])
        overflow = False
        if job.scaling:
            gradients = [p.grad for p in named.values() if p.grad is not None]
            for each in gradients:
                each.mul_(1.0 / scale)
            overflow = not all(torch.isfinite(each).all() for each in gradients)
            after, since = job.scaling.after(scales[-1], since, overflow=overflow)
            scales.append(after)
        if overflow:
            skipped.append(t)
        else:
            if job.clip_norm:
                torch.nn.utils.clip_grad_norm_([p for n, p in named.items() if n not in borrowed], job.clip_norm)
            optimizer.step()
        for p in named.values():
            p.grad = None
        for owner, *others in job.tied:
            _set({name: named[name] for name in others}, lambda name: named[owner].detach())  # noqa: B023
        history.append({name: p.detach().clone() for name, p in named.items()})
    return history[-1], losses, scales[-1], tuple(skipped)


def _set(named: dict[str, nn.Parameter], value: Callable[[str], Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(value(name))
