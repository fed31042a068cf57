"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real traces and measurements; it is not part of the project, so tests skip without it."""
    given = os.environ.get("FORETRACE_SHARED_DATA")
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(given) if given else beside
    if not (path / "traces").is_dir():
        pytest.skip(f"shared data not found at {path}; set FORETRACE_SHARED_DATA to its folder")
    return path
