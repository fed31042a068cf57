"""Results in a notebook: the page's fragment, and the text of the terminal for a console."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import foretrace as ft
from foretrace.report import notebook
from foretrace.report.terminal import PIPE_WIDTH, Terminal, render
from foretrace.simulate.timeline import Timeline

RECORDING = Path(__file__).resolve().parents[1] / "data" / "recommender.json.gz"
CELLS = (
    f"import foretrace as ft; run = ft.read({str(RECORDING)!r}).graph()",
    "run.simulate()",
    "run.apply(ft.techniques.FusedOptimizer()).whatif()",
    "run.check()",
    "print(run.simulate().step_time_s > 0)",
)


def test_a_notebook_shows_results() -> None:
    """Execute a real notebook and look at what it shows."""
    nbformat: Any = pytest.importorskip("nbformat")
    nbclient: Any = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    done = nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()
    shown = [[each["data"] for each in cell.outputs if "data" in each] for cell in done.cells]
    said = ("holds the step back", "fused-optimizer", "checks of this graph hold")
    for data, words in zip(shown[1:4], said, strict=True):
        (each,) = data
        assert each["text/html"].startswith('<div class="foretrace">')
        assert "<script" not in each["text/html"]
        assert words in each["text/html"] or words in each["text/plain"]
    assert 'class="seg compute"' in shown[1][0]["text/html"]
    assert "what holds the step back" in shown[1][0]["text/plain"]
    assert done.cells[4].outputs[0]["text"] == "True\n"


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
