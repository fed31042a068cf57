"""A process group of one process, for what PyTorch does inside one worker."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A gloo group of this process alone."""
    from torch import distributed

    where = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1, timeout=timedelta(seconds=60))
    yield
    distributed.destroy_process_group()
