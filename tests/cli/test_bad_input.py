"""A mistake of the user is one line on standard error and exit code 2; a bug keeps its traceback."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from foretrace import flow
from foretrace.techniques.compute.fused_optimizer import FusedOptimizer
from tests.cli.conftest import Cli

MISTAKES = {
    "no such command": ("shwo",),
    "no file named": ("show",),
    "no such file": ("show", "nowhere.json.gz"),
    "unknown option": ("show", "{cnn}", "--stpes", "3"),
    "no number": ("show", "{cnn}", "--rank", "first"),
    "no such rank": ("show", "{cnn}", "--rank", "7"),
    "no step numbers": ("show", "{cnn}", "--steps", "last"),
    "steps backwards": ("show", "{cnn}", "--steps", "8-3"),
    "no such step": ("show", "{cnn}", "--steps", "123456"),
    "no such grouping": ("blame", "{cnn}", "--by", "colour"),
    "no rows": ("blame", "{cnn}", "--top", "0"),
    "no technique": ("whatif", "{cnn}"),
    "unknown technique": ("whatif", "{cnn}", "--do", "mixed-precison"),
    "unknown parameter": ("whatif", "{cnn}", "--do", "prefetch-data wokers=4"),
    "no value": ("whatif", "{cnn}", "--do", "scale by=half phase=forward"),
    "nothing selected": ("whatif", "{cnn}", "--do", "scale name=*gemm* by=0.5"),
    "does not fit": ("whatif", "{cnn}", "--do", "cuda-graphs"),
    "one side only": ("compare", "{cnn}"),
    "nowhere to write": ("export", "{cnn}", "--out", "no/such/folder/t.json"),
    "text instead of a recording": ("show", "{text}"),
    "JSON that is no recording": ("show", "{json}"),
    "an empty file": ("show", "{empty}"),
    "a pipe nobody writes to": ("show", "{pipe}"),
    "such a pipe instead of a model": ("estimate", "{pipe}", "--device", "h100"),
    "a folder without recordings": ("show", "{folder}"),
    "a cut archive": ("show", "{cut}"),
    "a cut graph": ("show", "{cut_graph}"),
    "filters on a graph": ("show", "{graph}", "--steps", "1"),
    "nothing to record": ("record",),
    "operators to a file that is no JSON": ("operators", "gan", "--out", "operators.txt"),
    "samples that a recording does not have": ("operators", "{cnn}", "--batch", "8"),
    "the size of a recording": ("operators", "{cnn}", "--size", "tiny"),
    "a measured table cut short": ("utilisation", "gan", "--size", "tiny", "--measured", "{cut_table}"),
    "a rewritten model to nowhere": ("rewrite", "actor-critic", "--out", "no/such/model.pt2"),
    "a file to rewrite": ("rewrite", "model.onnx"),
    "more threads than can be": ("rewrite", "actor-critic", "--threads", "99999999999999999999"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bad")
    cnn = Path(__file__).resolve().parents[1] / "data" / "cnn.json.gz"
    made = {name: folder / name for name in ("text", "json", "empty", "cut", "cut_graph", "graph", "folder")}
    made["text"].write_text("dear reader\n")
    made["json"].write_text('{"shape": [1, 2]}')
    made["empty"].write_bytes(b"")
    made["cut"] = folder / "cut.json.gz"
    made["cut"].write_bytes(cnn.read_bytes()[:20_000])
    flow.read(cnn).graph().save(made["graph"])
    made["cut_graph"].write_bytes(made["graph"].read_bytes()[:50_000])
    made["folder"].mkdir()
    made["pipe"] = folder / "pipe"
    os.mkfifo(made["pipe"])
    made["cut_table"] = folder / "table.csv.gz"
    rows = "arch_idx,arch,device,ms,op,text\n" + '0,x,h100,1,aten::mm,"[[[2, 2]], [], []]"\n' * 5000
    made["cut_table"].write_bytes(gzip.compress(rows.encode())[:-30])
    return made | {"cnn": cnn}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_one_line_and_exit_code_2(
    cli: Cli, files: dict[str, Path], mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = cli(*(part.format(**files) for part in MISTAKES[mistake]))
    assert answer.code == 2, answer
    assert answer.out == ""
    assert answer.err.startswith("foretrace: ")
    assert answer.err.count("\n") == 1
    assert "Traceback" not in answer.err
    assert not list(tmp_path.iterdir()), "a refused command leaves nothing behind"


def test_salvage_reads_what_is_left_of_a_cut_file(cli: Cli, files: dict[str, Path]) -> None:
    answer = cli("show", files["cut"], "--salvage", "--json")
    assert answer.code == 0, answer.err
    assert "cut.json.gz" in answer.err


def test_a_bug_keeps_its_traceback_and_says_how_to_report_it(
    cli: Cli, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(flow, "read", broken)
    answer = cli("show", files["cnn"])
    assert answer.code == 1
    assert "Traceback" in answer.err
    assert answer.err.splitlines()[-1].startswith("foretrace: this is a bug")


def test_a_bug_in_one_technique_costs_no_other_its_advice_and_is_reported(
    cli: Cli, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("no time at all")

    whole = cli("advise", files["cnn"], "--json")
    assert (whole.code, whole.err) == (0, "")
    names = [row["name"] for row in json.loads(whole.out)["rows"]]
    monkeypatch.setattr(FusedOptimizer, "change", broken)
    answer = cli("advise", files["cnn"], "--json")
    assert answer.code == 1
    said = json.loads(answer.out)
    assert [row["name"] for row in said["rows"]] == [name for name in names if name != "fused-optimizer"]
    assert {"name": "fused-optimizer", "why": "ZeroDivisionError: no time at all"} in said["failed"]
    assert "Traceback" in answer.err and "these techniques failed: fused-optimizer" in answer.err
    assert answer.err.splitlines()[-1].startswith("foretrace: this is a bug")


def test_an_interrupted_command_ends_as_the_shell_expects(
    cli: Cli, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(flow, "read", interrupted)
    answer = cli("show", files["cnn"])
    assert answer.code == 130
    assert "Traceback" not in answer.err


def test_the_end_of_a_file_is_no_interrupt(cli: Cli, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise EOFError("cut")

    monkeypatch.setattr(flow, "read", broken)
    answer = cli("show", files["cnn"])
    assert answer.code == 1
    assert answer.err.splitlines()[-1].startswith("foretrace: this is a bug")


def test_a_misspelt_option_is_named_with_the_page_that_helps(cli: Cli, files: dict[str, Path]) -> None:
    answer = cli("show", files["cnn"], "--stpes", "3")
    assert "--stpes" in answer.err
    assert "foretrace show --help" in answer.err


def test_files_without_a_folder_are_refused_before_the_work(cli: Cli, recommender: Path, tmp_path: Path) -> None:
    for option in ("--save", "--perfetto", "--html"):
        answer = cli("whatif", recommender, "--do", "fused-optimizer", option, tmp_path / "none" / "file.json")
        assert answer.code == 2 and answer.out == ""
        assert answer.err.count("\n") == 1 and "there is no folder" in answer.err


def test_the_fleet_without_a_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    import numba

    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    answer = cli("fleet", "run", Path(__file__).parents[2] / "examples" / "jobs.csv", "--cluster", "2x4x8")
    assert answer.code == 2 and answer.out == ""
    assert "needs numba's compiler; unset NUMBA_DISABLE_JIT" in answer.err
