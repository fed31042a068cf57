"""Some steps of a training, timed: what `foretrace zoo NAME` tells about a model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from foretrace.errors import ForetraceError
from foretrace.training.training import Training

_WARM_UP = 2  # steps that allocate state and memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Times (s) of steps with data loading in them, and the losses (warm-up included)."""

    parameters: int
    batch_size: int
    threads: int  # of torch within an operator
    step_s: tuple[float, ...]
    loading_s: tuple[float, ...]  # of each step, until its batch was there
    losses: tuple[float, ...]

    def quantiles_s(self) -> tuple[float, float, float]:
        """Return 10th percentile, median and 90th percentile of a step."""
        low, median, high = np.quantile(self.step_s, [0.1, 0.5, 0.9]).tolist()
        return low, median, high

    @property
    def median_loading_s(self) -> float:
        return float(np.median(self.loading_s))

    @property
    def samples_per_s(self) -> float:
        """Throughput at the median step."""
        return self.batch_size / self.quantiles_s()[1]


def trial(training: Training, steps: int, progress: Callable[[float], None] | None = None) -> Trial:
    """Run some steps after a warm-up; `progress` is called with the share that is done.

    Raises ForetraceError where the loader is empty or a loss is not finite.
    """
    import torch

    training.model.train()
    batches = training.batches()
    times, loading, losses = [], [], []
    for i in range(_WARM_UP + steps):
        begin = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            raise ForetraceError(
                f"the loader of {training.name} gives no batch; give it at least one batch of samples."
            )
        loaded = time.perf_counter()
        loss = float(training.step(batch))  # waits for the device, too
        if i >= _WARM_UP:
            times.append(time.perf_counter() - begin)
            loading.append(loaded - begin)
        losses.append(loss)
        if progress is not None:
            progress((i + 1) / (_WARM_UP + steps))
        if not math.isfinite(loss):
            raise ForetraceError(f"the loss of {training.name} is {loss} at step {i + 1}; lower its learning rate.")
    return Trial(
        parameters=sum(each.numel() for each in training.model.parameters()),
        batch_size=training.batch_size,
        threads=torch.get_num_threads(),
        step_s=tuple(times),
        loading_s=tuple(loading),
        losses=tuple(losses),
    )
