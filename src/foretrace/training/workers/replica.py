"""`Replica`: a PyTorch model whose weights, gradients and statistics are three arrays, and the batches it trains on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from foretrace.arrays import Float32, Int64
from foretrace.errors import ForetraceError

Loss = Callable[[Tensor, Tensor], Tensor]  # of outputs and labels


class Replica:
    """One worker's model on its own samples: plain SGD, mini-batches drawn without replacement, epoch by epoch."""

    def __init__(
        self, model: nn.Module, samples: Tensor, labels: Tensor, *, batch: int, rate: float, seed: int,
        loss: Loss = nn.functional.cross_entropy,
    ) -> None:  # fmt: skip
        """Copy the model; samples (n, ...) and labels (n) are this worker's. Raises ForetraceError without any."""
        if not len(samples):
            raise ForetraceError("A worker without samples cannot train; leave it out.")
        self.model = copy.deepcopy(model)
        self.samples, self.labels, self.loss = samples, labels, loss
        self.batch, self.rate = min(batch, len(samples)), rate
        self._random = np.random.default_rng(seed)
        self._batches = self._drawn()
        parameters = list(self.model.parameters())
        self._flat, self._gradient = (torch.empty(sum(each.numel() for each in parameters)) for _ in range(2))
        at = 0
        for each in parameters:
            span = slice(at, at + each.numel())
            self._flat[span] = each.data.reshape(-1)
            each.data = self._flat[span].view_as(each)
            each.grad = self._gradient[span].view_as(each)
            at = span.stop
        self.flat: Float32 = self._flat.numpy()
        self._own = [each for each in self.model.buffers() if each.is_floating_point()]

    @property
    def buffers(self) -> Float32:
        """Statistics of batch norm."""
        if not self._own:
            return np.zeros(0, np.float32)
        return torch.cat([each.reshape(-1) for each in self._own]).numpy()

    def gradient(self) -> tuple[float, Float32]:
        at = next(self._batches)
        self.model.train()
        self._gradient.zero_()
        loss = self.loss(self.model(self.samples[at]), self.labels[at])
        loss.backward()
        return float(loss.detach()), self._gradient.numpy()

    def update(self, gradient: Float32) -> Float32:
        return gradient * np.float32(-self.rate)

    def accuracy(self, state: Float32 | None = None) -> float:
        """Return the accuracy on up to 256 own samples, which stay the same."""
        return self.judged(state, self.samples[:256], self.labels[:256])[1]

    @torch.no_grad()
    def judged(self, state: Float32 | None, samples: Tensor, labels: Tensor) -> tuple[float, float]:
        """Return loss and accuracy on samples: of the own model, or of weights followed by buffers, which it then
        forgets.
        """
        own = np.concatenate([self.flat, self.buffers]) if state is not None else None
        if state is not None:
            self._load(state)
        self.model.eval()
        out = self.model(samples)
        found = float(self.loss(out, labels)), float((out.argmax(-1) == labels).float().mean())
        if own is not None:
            self._load(own)
        return found

    def _load(self, state: Float32) -> None:
        count = len(self.flat)
        self.flat[:] = state[:count]
        at = count
        for each in self._own:
            each.copy_(torch.from_numpy(state[at : at + each.numel()].copy()).view_as(each))
            at += each.numel()

    def _drawn(self) -> Iterator[Tensor]:
        while True:
            order: Int64 = self._random.permutation(len(self.samples))
            for begin in range(0, len(order) - self.batch + 1, self.batch):
                yield torch.from_numpy(order[begin : begin + self.batch])
