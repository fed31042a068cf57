"""Results in a notebook: the page's fragment, and the text of the terminal for a console."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import foretrace as ft
from foretrace.report import notebook
from foretrace.report.terminal import PIPE_WIDTH, Terminal, render
from foretrace.simulate.timeline import Timeline

RECORDING = Path(__file__).resolve().parents[1] / "data" / "recommender.json.gz"
SAID = ("what holds the step back", "fused-optimizer", "checks of this graph hold")
CELLS = (
    f"import foretrace as ft; run = ft.read({str(RECORDING)!r}).graph()",
    "run.simulate()",
    "run.apply(ft.techniques.FusedOptimizer()).whatif()",
    "run.check()",
    "print(run.simulate().step_time_s > 0)",
)


EXECUTE = """
import json, sys, nbclient, nbformat
cells = [nbformat.v4.new_code_cell(cell) for cell in json.load(sys.stdin)]
done = nbclient.NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=200, kernel_name="python3").execute()
json.dump([cell.outputs for cell in done.cells], sys.stdout)
"""


@pytest.mark.slow
def test_a_notebook_shows_results() -> None:
    """Execute a real notebook, in a process of its own, and look at what it shows."""
    for name in ("nbclient", "nbformat", "ipykernel"):
        pytest.importorskip(name)
    words = [sys.executable, "-c", EXECUTE]
    done = subprocess.run(words, input=json.dumps(CELLS), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outputs = json.loads(done.stdout)
    for (each,), says in zip(outputs[1:4], SAID, strict=True):
        _check(each["data"], says)
    assert outputs[4][0]["text"] == "True\n"


def _check(data: dict[str, str], says: str) -> None:
    assert data["text/html"].startswith('<div class="foretrace">')
    assert "<script" not in data["text/html"]
    assert says in data["text/plain"]


def test_a_shell_shows_results(timeline: Timeline) -> None:
    """The same by the formatter that notebooks use."""
    formatters: Any = pytest.importorskip("IPython.core.formatters")
    run = ft.read(RECORDING).graph()
    for found, says in zip(
        (timeline, run.apply(ft.techniques.FusedOptimizer()).whatif(), run.check()), SAID, strict=True
    ):
        _check(formatters.DisplayFormatter().format(found)[0], says)
    assert 'class="seg compute"' in formatters.DisplayFormatter().format(timeline)[0]["text/html"]


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    return ft.read(RECORDING).graph().simulate()


def test_the_fragment_is_what_the_command_shows(timeline: Timeline) -> None:
    result = notebook.result_of(timeline)
    assert notebook.text(timeline) == render(result, Terminal(width=PIPE_WIDTH))
    fragment: str = timeline._repr_html_()  # type: ignore[attr-defined]
    for name in ("compute", "Python"):
        assert name in fragment


def test_only_what_a_command_shows_is_shown() -> None:
    with pytest.raises(TypeError, match="no command shows a str"):
        notebook.result_of("text")
