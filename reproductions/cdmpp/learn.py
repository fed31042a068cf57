"""Training the program predictor with PyTorch: hybrid loss, and CMD where there is a second device.

As CDMPP (EuroSys 2024, section 5) has it: the loss joins the squared error of normalised labels with the relative
error of latencies, so that neither long nor short programs rule; a new device is met by fine-tuning on the programs of
a few tasks measured there, while the central moment discrepancy draws the embeddings of both devices' programs
together. For the latter the new device's other programs serve without labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foretrace.errors import ForetraceError, MissingExtraError
from reproductions.cdmpp.ast import FEATURES, Encoded
from reproductions.cdmpp.cmd import cmd_torch
from reproductions.cdmpp.labels import Labels, fit
from reproductions.cdmpp.predictor import EXTRA, ProgramPredictor, Shape, Singles, standard_inputs
from reproductions.cdmpp.prior import estimates, fit_costs

if TYPE_CHECKING:
    import torch

    Weights = dict[str, torch.Tensor]

Floats = NDArray[np.float64]
_SPAN = 2.0  # of the embedding, which lies in (-1, 1)
_MOST_RATIO = 4.0  # natural logarithm at which the relative error of a wild prediction is cut


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to train."""

    shape: Shape = field(default_factory=Shape)
    labels: str = "box-cox"
    squared: float = 1.0
    relative: float = 0.5
    """Weights of the two parts of the loss."""
    epochs: int = 150
    batch: int = 128
    rate: float = 2e-3
    decay: float = 1e-2
    dropout: float = 0.1
    seed: int = 0


def train(
    encoded: Encoded, seconds: Floats, settings: Settings | None = None, *, say: Callable[[str], None] | None = None
) -> ProgramPredictor:
    """A predictor of these programs' latencies."""
    settings = settings or Settings()
    costs = fit_costs(encoded, seconds)
    ratios = seconds / estimates(encoded, costs)[1]
    labels = fit(ratios, settings.labels)
    mean = encoded.leaves.mean(axis=0)
    deviation = np.maximum(encoded.leaves.std(axis=0), 1e-3)
    _need_torch()
    import torch

    generator = torch.Generator().manual_seed(settings.seed)
    weights = _fresh(settings.shape, generator)
    x = standard_inputs(encoded, mean, deviation, costs, settings.shape)
    _fit(weights, x, encoded, ratios, labels, settings, generator, say=say)
    return ProgramPredictor(
        shape=settings.shape, weights=_as_numpy(weights), mean=mean, deviation=deviation, costs=costs, labels=labels
    )


def adapt(
    predictor: ProgramPredictor,
    source: Encoded,
    source_seconds: Floats,
    target: Encoded,
    target_seconds: Floats,
    unlabelled: Encoded,
    settings: Settings | None = None,
    *,
    alpha: float = 0.0,
) -> ProgramPredictor:
    """The predictor fine-tuned for another device.

    Args:
        predictor: trained on the source.
        source: programs with latencies on the source: the other side of the discrepancy, and what is trained on where
            nothing was measured on the new device.
        source_seconds: their latencies.
        target: the few programs that were measured on the new device.
        target_seconds: their latencies.
        unlabelled: other programs as the new device would run them, not measured.
        settings: of the fine-tuning; the network's shape and label normalisation stay the predictor's.
        alpha: weight of the discrepancy.

    """
    settings = replace(settings or Settings(), shape=predictor.shape)
    _need_torch()
    import torch

    generator = torch.Generator().manual_seed(settings.seed)
    weights = {name: torch.tensor(value, requires_grad=True) for name, value in predictor.weights.items()}
    if not len(target):
        target, target_seconds = source, source_seconds
    x = predictor.inputs(target)
    pairs = None
    if alpha > 0:
        pairs = (predictor.inputs(source), source, predictor.inputs(unlabelled), unlabelled)
    ratios = target_seconds / estimates(target, predictor.costs)[1]
    _fit(weights, x, target, ratios, predictor.labels, settings, generator, alpha=alpha, pairs=pairs)
    return replace(predictor, weights=_as_numpy(weights), low=float("nan"), high=float("nan"))


def _need_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError:
        raise MissingExtraError("training a program predictor needs PyTorch; install foretrace[torch].") from None


def _as_numpy(weights: Mapping[str, torch.Tensor]) -> dict[str, Singles]:
    return {name: value.detach().numpy().copy() for name, value in weights.items()}


def _fresh(shape: Shape, generator: torch.Generator) -> Weights:
    """Untrained weights by the names that `predictor.py` reads."""
    import torch

    weights: Weights = {}

    def linear(name: str, inputs: int, outputs: int, gain: float = 1.0) -> None:
        scale = gain / inputs**0.5
        weights[f"{name}.weight"] = torch.randn(inputs, outputs, generator=generator) * scale
        weights[f"{name}.bias"] = torch.zeros(outputs)

    def norm(name: str) -> None:
        weights[f"{name}.weight"], weights[f"{name}.bias"] = torch.ones(shape.width), torch.zeros(shape.width)

    linear("in", len(FEATURES) + EXTRA, shape.width)
    for i in range(shape.layers):
        norm(f"{i}.attend")
        linear(f"{i}.qkv", shape.width, 3 * shape.width)
        linear(f"{i}.out", shape.width, shape.width, 0.5)
        norm(f"{i}.feed")
        linear(f"{i}.up", shape.width, shape.hidden, 2**0.5)
        linear(f"{i}.down", shape.hidden, shape.width, 0.5)
    norm("last")
    linear("embed", 2 * shape.width, shape.embedding)
    linear("decode0", shape.embedding, shape.decoder, 2**0.5)
    linear("decode1", shape.decoder, shape.decoder, 2**0.5)
    linear("decode2", shape.decoder, 1, 0.5)
    return {name: value.requires_grad_() for name, value in weights.items()}


def forward(
    w: Mapping[str, torch.Tensor], x: torch.Tensor, real: torch.Tensor, shape: Shape, dropout: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings and labels of [programs x leaves x features], of which `real` [programs x leaves] are no padding."""
    from torch.nn import functional as F

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (shape.width,), w[f"{name}.weight"], w[f"{name}.bias"])

    def attend(qkv: torch.Tensor) -> torch.Tensor:
        programs, count, _ = qkv.shape
        q, k, v = qkv.view(programs, count, 3, shape.heads, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=real[:, None, None, :])
        return found.transpose(1, 2).reshape(programs, count, shape.width)

    def drop(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, dropout, training=dropout > 0)

    h = linear("in", x)
    for i in range(shape.layers):
        if shape.attention:
            h = h + drop(linear(f"{i}.out", attend(linear(f"{i}.qkv", norm(f"{i}.attend", h)))))
        h = h + drop(linear(f"{i}.down", F.relu(linear(f"{i}.up", norm(f"{i}.feed", h)))))
    h = norm("last", h)
    there = real[..., None]
    mean = (h * x[..., -1:] * there).sum(dim=1)
    most = h.masked_fill(~there, -float("inf")).amax(dim=1)
    z = linear("embed", drop(_joined(mean, most))).tanh()
    d = F.relu(linear("decode1", F.relu(linear("decode0", z))))
    return z, linear("decode2", d)[..., 0]


def _joined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.cat([a, b], dim=-1)


def padded(x: Singles, encoded: Encoded) -> tuple[torch.Tensor, torch.Tensor]:
    """Leaves as [programs x most leaves x features] and which are real."""
    import torch

    counts = encoded.counts
    real = np.arange(counts.max(initial=1)) < counts[:, None]
    table = np.zeros((*real.shape, x.shape[1]), np.float32)
    table[real] = x
    return torch.from_numpy(table), torch.from_numpy(real)


def _log_of(label: torch.Tensor, labels: Labels) -> torch.Tensor:
    """Natural logarithm of the value over `labels.unit`, with gradients."""
    import torch

    y = label * labels.deviation + labels.mean
    if labels.method == "log":
        return y
    if labels.method == "box-cox":
        return torch.log((labels.power * y + 1).clamp(min=1e-3)) / labels.power if abs(labels.power) > 1e-9 else y
    if labels.method == "yeo-johnson":
        y = y.clamp(min=1e-4)
        x = torch.log(labels.power * y + 1) / labels.power if abs(labels.power) > 1e-9 else y
        return torch.log(torch.expm1(x).clamp(min=1e-3))
    if labels.method == "none":
        return torch.log(y.clamp(min=1e-3))
    raise ForetraceError("the relative loss has no gradient through quantile labels; set relative=0.")


def _batches(counts: NDArray[np.int64], batches: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Random batches of programs with about as many leaves, so that little is padded, in random order."""
    import torch

    mixed = torch.from_numpy(counts.astype(np.float32)) + 2 * torch.rand(len(counts), generator=generator)
    parts = torch.argsort(mixed).chunk(batches)
    return [parts[i] for i in torch.randperm(len(parts), generator=generator).tolist()]


def _fit(
    weights: Weights,
    x: Singles,
    encoded: Encoded,
    values: Floats,
    labels: Labels,
    settings: Settings,
    generator: torch.Generator,
    *,
    alpha: float = 0.0,
    pairs: tuple[Singles, Encoded, Singles, Encoded] | None = None,
    say: Callable[[str], None] | None = None,
) -> None:
    """Train the weights in place; `values` are latencies over the first estimates."""
    import torch

    table, real = padded(x, encoded)
    goal = torch.from_numpy(labels.forward(values).astype(np.float32))
    log_goal = torch.from_numpy(np.log(values / labels.unit).astype(np.float32))
    sides = (*padded(pairs[0], pairs[1]), *padded(pairs[2], pairs[3])) if pairs else None
    optimizer = torch.optim.AdamW(weights.values(), lr=settings.rate, weight_decay=settings.decay)
    batches = max(1, round(len(encoded) / settings.batch))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.rate, total_steps=settings.epochs * batches)
    state = torch.get_rng_state()
    torch.manual_seed(settings.seed)  # of dropout
    try:
        for epoch in range(settings.epochs):
            total = 0.0
            for rows in _batches(encoded.counts, batches, generator):
                most = int(encoded.counts[rows.numpy()].max())
                found = forward(weights, table[rows, :most], real[rows, :most], settings.shape, settings.dropout)[1]
                loss = settings.squared * ((found - goal[rows]) ** 2).mean()
                if settings.relative:
                    off = (_log_of(found, labels) - log_goal[rows]).clamp(-_MOST_RATIO, _MOST_RATIO)
                    loss = loss + settings.relative * torch.expm1(off).abs().clamp(max=_MOST_RATIO).mean()
                if sides is not None:
                    ours, theirs = (
                        forward(weights, side[pick], there[pick], settings.shape, settings.dropout)[0]
                        for side, there in (sides[:2], sides[2:])
                        for pick in (torch.randint(len(side), (settings.batch,), generator=generator),)
                    )
                    loss = loss + alpha * cmd_torch(ours, theirs, span=_SPAN)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
                optimizer.step()
                schedule.step()
                total += loss.item() * len(rows)
            if say is not None and (epoch + 1) % 25 == 0:
                say(f"epoch {epoch + 1} of {settings.epochs}: loss {total / len(encoded):.4f}")
    finally:
        torch.set_rng_state(state)
