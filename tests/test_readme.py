"""Every block of the README, then of the tour, runs as it stands, from the first to the last, in one folder.

Only what is given as a time to measure or to search is shorter, and the network of the example smaller.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from foretrace.cli.app import run

ROOT = Path(__file__).resolve().parents[1]
SMALLER = {"Net(32, 8)": "Net(16, 8)", "Pictures(640, 64)": "Pictures(640, 32)", "default=32": "default=16",
           "default=64": "default=32"}  # fmt: skip
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each block of a page that names a language."""
    text = re.sub(r"--seconds \d+", "--seconds 1", (ROOT / page).read_text(encoding="utf-8"))
    return [found for found in BLOCK.findall(text) if found[0]]


def in_a_shell(language: str, text: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a block in a process of its own."""
    runner = {"sh": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}[language]
    done = subprocess.run([*runner, text], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def in_this_process(capfd: pytest.CaptureFixture[str]) -> Callable[[str, str], tuple[int, str, str]]:
    """Run commands and Python of a block here, where PyTorch is imported once; what else it holds, in a shell."""

    def called(language: str, text: str) -> tuple[int, str, str]:
        if language == "python":
            capfd.readouterr()
            exec(compile(text, "<block>", "exec"), {"__name__": "__main__"})
            return 0, *capfd.readouterr()
        found = []
        for line in text.replace("\\\n", " ").splitlines():
            program, *words = shlex.split(line)
            if program != "foretrace" or "|" in words:
                found.append(in_a_shell(language, line))
            else:
                capfd.readouterr()
                found.append((run(words), *capfd.readouterr()))
        codes, out, said = zip(*found, strict=True)
        return max(codes), "".join(out), "".join(said)

    return called


@pytest.mark.slow("the whole tour: thirty commands, recordings and measurements among them")
def test_every_block_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_this_process: Callable[[str, str], tuple[int, str, str]],
) -> None:
    pytest.importorskip("torch", reason="the tour records a training run; install the extra torch")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    example = tmp_path / "examples" / "train_cnn.py"
    text = example.read_text(encoding="utf-8")
    for words, smaller in SMALLER.items():
        assert words in text
        text = text.replace(words, smaller)
    example.write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("NO_COLOR", "1")
    asked: list[tuple[Callable[[str, str], tuple[int, str, str]], str, str]]
    first, *others = [*blocks("README.md"), *blocks("docs/tour.md")]
    asked = [(in_a_shell, *first), *((in_this_process, *block) for block in others)]
    assert len(asked) >= 15
    for how, language, block in asked:
        code, out, said = how(language, block)
        assert code == 0, f"{block}\n{out}\n{said}"
        assert out.strip(), f"this block prints nothing:\n{block}"
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert (tmp_path / "timeline.json.gz").stat().st_size > 1_000
