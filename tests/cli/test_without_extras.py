"""Without a single optional package, commands answer, or say in one sentence what to install."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import pytest

from foretrace.errors import _DISTRIBUTIONS, needing

ROOT = Path(__file__).parents[2]
RECORDING = f"{ROOT}/tests/data/recommender.json.gz"
ANSWERED = [
    ["show", RECORDING],
    ["whatif", RECORDING, "--do", "fused-optimizer"],
    ["llm", "simulate", "llama-2-7b", "--device", "a100-80gb", "--requests", "poisson qps=2 requests=20"],
    ["plan", "transformer", "gpt3-1.3b", "--devices", "8", "--device", "a100-80gb", "--batch", "64"],
    ["fleet", "run", f"{ROOT}/examples/jobs.csv"],
]
REFUSED = {
    "torch": ["estimate", "bert", "--device", "a100-40gb"],
    "scipy": ["fleet", "run", f"{ROOT}/examples/jobs.csv", "--policy", "gavel-max-min"],
    "aiohttp": ["serve", "load", "http://127.0.0.1:9"],
}
_WITHOUT = """
import runpy, sys
from importlib.machinery import PathFinder

found = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] in {absent} else found(name, *rest)
sys.argv = ["all_answers", {asked!r}]
runpy.run_module("tests.cli.all_answers", run_name="__main__")
"""


def test_commands_answer_or_say_what_to_install(tmp_path: Path) -> None:
    lines = [line.partition(";") for line in metadata.requires("foretrace") or ()]
    optional = {name.partition(">")[0].partition("[")[0] for name, _, when in lines if "extra" in when}
    absent = {each.replace("-", "_") for each in optional} | _DISTRIBUTIONS.keys()
    assert {"torch", "scipy", "transformers", "pynvml"} < absent
    asked = tmp_path / "asked.json"
    asked.write_text(json.dumps([*ANSWERED, *REFUSED.values()]))
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT.format(absent=absent, asked=str(asked))], cwd=ROOT, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    for words, (code, _, said) in zip(ANSWERED, found, strict=False):
        assert code == 0, (words, said)
    for package, (code, _, said) in zip(REFUSED, found[len(ANSWERED) :], strict=True):
        assert code == 2
        assert f" needs {package}, which is not installed: pip install " in said


def test_without_its_metadata_python_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where foretrace runs from its source and is not installed."""

    def absent(name: str) -> NoReturn:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", absent)
    with pytest.raises(ModuleNotFoundError, match="'torch'"), needing("a command"):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
