"""What is no recording is recognised by every command that reads one, and told what to do; nothing ends in a bug."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from foretrace.cli.app import application
from tests.cli.conftest import DATA, Cli
from tests.cli.test_ranges import commands, takes_a_graph

# What commands ask for beside the recording R; O is a place to write to.
NEEDS = {
    "whatif": "R --do fused-optimizer",
    "compare": f"{DATA / 'cnn.json.gz'} R",
    "report": "R --out O.html",
    "export": "R --out O.json",
    "graph": "R --out O.graph",
    "scale": "R --ranks 8 --network 1gbit",
    "calibrate run": "R --do fused-optimizer",
    "plan second-order": "R --network 1gbit --workers 2 --no-measure",
    "compression advise": "R --network 1gbit --workers 2",
    "cloud advise": "R --samples 1000",
    "fleet export": "R --to slurm --out O",
    "fleet fit": "R --out O",
    "fleet sweep": "R --out O --policy fifo --cluster 2x4x8",
    "fleet whatif": "R --add-rack 1 --now fifo --cluster 2x4x8",
    "fleet why": "R 1 --policy fifo --cluster 2x4x8",
    "fleet slots": "R --size 1 --cluster 2x4x8",
    "fleet run": "R --cluster 2x4x8",
    "fleet compare": "R --policy fifo --policy las --cluster 2x4x8",
}
FOREIGN = {
    "https://host/run.json.gz": "fetch it first: curl -LO https://host/run.json.gz",
    "r.nsys-rep": "is a report of Nsight Systems",
    "model.onnx": "is a model, which was not run",
    "table.csv": "is a table, not a recording",
    "nothing.json": "is empty",
    "rum.json": "does not exist; did you mean run.json",
}
SCRIPT = """
print("made")
import torch
import foretrace

class Loader:
    batch_size = 4
    def __iter__(self):
        return iter([torch.ones(4, 8)] * 40)

def training():
    model = torch.nn.Linear(8, 8)
    def loss(model, batch):
        print("a step")
        return model(batch).sum()
    optimizers = (torch.optim.SGD(model.parameters(), lr=0.1),)
    return foretrace.Training(name="loud", model=model, optimizers=optimizers, loader=Loader(), loss=loss)
"""


def readers() -> list[str]:
    """Commands that read a recording or a log of jobs."""
    found = {name for name, each in commands(typer.main.get_command(application())) if takes_a_graph(each)}
    return sorted(found | {"profile", "stash"})


@pytest.mark.parametrize("name", readers())
def test_what_is_no_recording_is_called_by_its_name(
    cli: Cli, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for each in ("r.nsys-rep", "model.onnx"):
        Path(each).write_bytes(b"\x08\x0e:3")
    Path("table.csv").write_text("a,b\n1,2\n")
    Path("nothing.json").touch()
    Path("run.json").write_text("{}")
    for path, says in FOREIGN.items():
        words = [path if each == "R" else each for each in NEEDS.get(name, "R").split()]
        answer = cli(*name.split(), *words)
        assert (answer.code, answer.out) == (2, ""), answer
        assert answer.err.count("\n") == 1
        if not name.startswith("fleet ") or path != "rum.json":
            assert says in answer.err or (name.startswith("fleet ") and path == "table.csv")


@pytest.mark.parametrize(
    "words", ["estimate S --device a100", "operators S", "utilisation S --device a100", "rewrite S --no-measure",
              "profile S"]
)  # fmt: skip
def test_what_a_script_prints_is_not_the_answer(cli: Cli, words: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "loud.py"
    script.write_text(SCRIPT)
    answer = cli(*[str(script) if each == "S" else each for each in words.split()], "--json")
    assert answer.code == 0, answer.err
    assert "made" in answer.err
    json.loads(answer.out)
