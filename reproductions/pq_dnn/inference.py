"""Inference of the ResNet as a job.

foretrace verify product-quantisation --model reproductions/pq_dnn/inference.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretrace.training.training import Training
from reproductions.pq_dnn.trained import ResNet, images


def forward(training: Training, batch: Any) -> Tensor:
    """A step: the model on a batch, no gradients."""
    training.model.eval()
    with torch.no_grad():
        found: Tensor = training.model(batch).mean()
    return found


def training() -> Training:
    """Make the job, on random weights: what a step takes does not depend on them."""
    torch.manual_seed(0)
    batches = [images(64, seed, 0.3)[0] for seed in range(8)]
    return Training(
        name="resnet8-inference", model=ResNet().requires_grad_(False), optimizers=(), loader=batches,
        loss=lambda model, batch: model(batch).mean(), run=forward,
    )  # fmt: skip
