"""docs/write-a-reader.md: its reader is found by its entry point and reads its log; damage is said with its place."""

from __future__ import annotations

import gzip
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from foretrace import flow
from foretrace.errors import ForetraceError, GraphError, TraceError
from foretrace.model.readers.sources import load_operators, reader_of
from foretrace.trace import readers

PAGE = (Path(__file__).parents[2] / "docs" / "write-a-reader.md").read_text(encoding="utf-8")
LOG = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)[0]


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's block as an installed package would lay it out."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(code.splitlines()) <= 60
    entry = re.search(r"```toml\n\[project\.entry-points\.(\"[^\n]+\")\]\n(.*?)```", PAGE, re.DOTALL)
    assert entry is not None
    folder = tmp_path / "package"
    facts = folder / "steplog-1.0.dist-info"
    facts.mkdir(parents=True)
    (folder / "steplog.py").write_text(code)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: steplog\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[{entry[1].strip(chr(34))}]\n{entry[2].replace(chr(34), '')}")
    monkeypatch.syspath_prepend(folder)
    readers.plugged.cache_clear()
    yield folder
    sys.modules.pop("steplog", None)
    readers.plugged.cache_clear()


def log(folder: Path, text: str = LOG, name: str = "run.log") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["run.log", "run.csv", "run.log.gz"])
def test_the_log_becomes_a_graph(tmp_path: Path, name: str) -> None:
    run = flow.read(log(tmp_path, name=name))
    scenario = run.graph()
    assert scenario.graph.n_steps == 2 and scenario.graph.on_device.sum() == 2
    assert scenario.simulate().step_times_ns.tolist() == [1_000_000, 1_000_000]
    assert [rank.rank for rank in run.trace.ranks] == [0]


def test_ranks_and_steps(tmp_path: Path) -> None:
    first = log(tmp_path, name="a.log")
    other = log(tmp_path, LOG.replace("rank 0", "rank 1"), name="b.log")
    assert [rank.rank for rank in flow.read([first, other]).trace.ranks] == [0, 1]
    assert flow.read(first, steps=[2]).graph().graph.n_steps == 1
    assert reader_of(first).name == "steplog"
    with pytest.raises(GraphError, match="no operator with the sizes of its inputs"):
        load_operators(first)


def test_damage_is_said_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"line 4 of the log.*record again"):
        flow.read(log(tmp_path, LOG.replace("60.0\t20.0\tlaunch", "60.0\tlong\tlaunch")))
    with pytest.raises(TraceError, match=r"before its start|negative"):
        flow.read(log(tmp_path, LOG.replace("60.0\t20.0\tlaunch", "60.0\t-20.0\tlaunch")))


def test_a_reader_of_models(tmp_path: Path, package: Path) -> None:
    from foretrace.model.readers.json_form import loads

    form = b'{"format": "foretrace operators", "version": 1, "calls": [{"op": "aten::relu", "dims": [[8, 256]]}]}'
    module: Any = import_module("steplog")
    module.READER = readers.Reader(
        name="steplog",
        knows=module.knows,
        operators=lambda data, name, where: loads(form, where),
        takes=frozenset({"where"}),
    )
    found = log(tmp_path)
    with pytest.raises(ForetraceError, match="has one step only"):
        load_operators(found, step=1)
    assert len(load_operators(found, name="mine").nodes) == 1


@pytest.mark.parametrize("value", ["steplog:knows", "steplog:NONE"])
def test_a_broken_entry_point_is_named(package: Path, value: str) -> None:
    (package / "steplog-1.0.dist-info" / "entry_points.txt").write_text(f"[foretrace.readers]\nsteplog = {value}\n")
    with pytest.raises(ForetraceError, match=rf"{value}\).*(uninstall it|cannot be loaded)"):
        readers.plugged()
