"""docs/write-a-technique.md: its technique passes its tests, is found by its entry point, and can be asked for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "write-a-technique.md"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The page's blocks as an installed package would lay them out."""
    technique, tests = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    entry = re.search(r"```toml\n\[project\.entry-points\.(\"[^\n]+\")\]\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert entry is not None
    (tmp_path / "without_dropout.py").write_text(technique)
    (tmp_path / "test_without_dropout.py").write_text(tests)
    facts = tmp_path / "without_dropout-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: without-dropout\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[{entry[1].strip(chr(34))}]\n{entry[2].replace(chr(34), '')}")
    return tmp_path


def run(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(package), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # none is used
    return subprocess.run(
        [sys.executable, *words], cwd=package, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_the_page_passes_its_own_conformance_tests(package: Path) -> None:
    done = run(package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", "test_without_dropout.py")
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\b10 passed", done.stdout), done.stdout[-500:]


def test_the_technique_is_found_by_its_entry_point(package: Path) -> None:
    done = run(package, "-m", "foretrace", "techniques", "without-dropout")
    assert done.returncode == 0, done.stderr
    assert "no dropout" in done.stdout and "layers=" in done.stdout and "apply: yes" in done.stdout
