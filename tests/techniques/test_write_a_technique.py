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


class Passed:
    """A plug-in that counts tests that passed, and keeps what others said."""

    def __init__(self) -> None:
        self.count, self.said = 0, ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count += report.when == "call" and report.passed
        self.said += "" if report.passed else f"{report.outcome} {report.nodeid} {report.longreprtext}\n"


def test_the_page_passes_its_own_conformance_tests(
    package: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a session of pytest of its own, in this process, which has imported PyTorch."""
    monkeypatch.chdir(package)
    monkeypatch.syspath_prepend(package)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # none is used
    for name in [each for each in os.environ if each.startswith("PYTEST_XDIST_")]:
        monkeypatch.delenv(name)
    passed, before = Passed(), set(sys.modules)
    words = ["-q", "--rootdir", str(package), "-p", "no:cacheprovider", "-p", "no:faulthandler", "-W", "error"]
    try:
        code = pytest.main([*words, "test_without_dropout.py"], plugins=[passed])
    finally:
        for name in ("without_dropout", "test_without_dropout"):
            if name not in before:
                sys.modules.pop(name, None)
    assert (code, passed.count) == (0, 11), passed.said[-3000:] + capfd.readouterr().out[-500:]


def test_the_technique_is_found_by_its_entry_point(package: Path) -> None:
    done = run(package, "-m", "foretrace", "techniques", "without-dropout")
    assert done.returncode == 0, done.stderr
    assert "no dropout" in done.stdout and "layers=" in done.stdout and "apply: yes" in done.stdout
