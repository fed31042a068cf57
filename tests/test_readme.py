"""Every block of the README, then of the tour, runs as it stands, from the first to the last, in one folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_every_block_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the tour records a training run; install the extra torch")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "NO_COLOR": "1",
    }
    pages = (ROOT / "README.md", ROOT / "docs" / "tour.md")
    blocks = [found for page in pages for found in BLOCK.findall(page.read_text(encoding="utf-8")) if found[0]]
    assert len(blocks) >= 15
    for language, text in blocks:
        runner = {"sh": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}[language]
        done = subprocess.run(
            [*runner, text], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip(), f"this block prints nothing:\n{text}"
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "timeline.json.gz").stat().st_size > 1_000
