"""Handwritten digits that come with scikit-learn, which is optional."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from foretrace.errors import MissingExtraError


@cache
def handwritten(noise: float, seed: int = 20) -> tuple[Tensor, Tensor]:
    """The 1,797 images (N, 1, 8, 8) from 0 to 1, in a drawn order and under noise, and their digits.

    Raises MissingExtraError where scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtraError(
            "scikit-learn is not installed, whose digits these are: pip install 'foretrace[reproductions]'."
        ) from None
    found, random = load_digits(), torch.Generator().manual_seed(20)
    order = torch.randperm(len(found.target), generator=random)
    image = torch.from_numpy(found.images).float()[order, None] / 16
    drawn = torch.randn(image.shape, generator=torch.Generator().manual_seed(seed))
    return image + noise * drawn, torch.from_numpy(found.target)[order].long()
