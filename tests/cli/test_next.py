"""What a command suggests to try next can be copied as it stands: it answers, and is not what was just asked.

The commands come from the application, so a new one has to say here how it is asked, or why it is not.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from foretrace.cli.app import application
from tests.cli.conftest import DATA, Cli

JOBS = Path(__file__).resolve().parents[2] / "examples" / "jobs.csv"
FLEET = "jobs.csv --cluster 2x4x8"
PARALLEL = "--workers 2 --network 1gbit/50us --method 'powersgd rank=1'"

ASKED: dict[str, tuple[str, ...]] = {
    "show": ("cnn.json.gz", "recommender.json.gz --rank 0"),
    "advise": ("cnn.json.gz", "recommender.json.gz"),
    "simulate": ("cnn.json.gz --rank 0",),
    "blame": ("cnn.json.gz", "cnn.json.gz --by layer", "recommender.json.gz --by phase"),
    "whatif": ("cnn.json.gz --do fused-optimizer --do 'scale op=*conv* by=0.5'",),
    "optimise": ("cnn.json.gz --seconds 1",),
    "compare": ("recommender.json.gz recommender-fused.json.gz",),
    "check": ("cnn.json.gz",),
    "report": ("cnn.json.gz",),
    "export": ("cnn.json.gz",),
    "graph": ("cnn.json.gz --out cnn.graph",),
    "profile": ("cnn.json.gz",),
    "techniques": ("", "compiled"),
    "devices": ("", "h100"),
    "plan second-order": ("recommender.json.gz --workers 2 --network 1gbit/50us --no-measure",),
    "compression advise": (f"recommender.json.gz {PARALLEL}",),
    "stash": ("recommender.json.gz",),
    "fleet run": (FLEET, f"{FLEET} --policy las --jobs 50"),
    "fleet compare": (f"{FLEET} --policy fifo --policy las --jobs 50",),
    "fleet why": (f"{FLEET.replace(' ', ' job150 ', 1)}",),
    "fleet whatif": (f"{FLEET} --add-rack 1", f"{FLEET} --policy las"),
    "fleet slots": (FLEET,),
    "fleet sweep": (f"{FLEET} --policy fifo --jobs 50 --out cells",),
    "fleet fit": (f"{FLEET.split(maxsplit=1)[0]} --out like.json",),
    "fleet live": (f"--from {JOBS.parent / 'slurm'}",),
    "fleet policies": ("",),
}
WITH_TORCH = {
    "zoo": ("",),
    "estimate": ("resnet50 --size tiny --device h100 --batch 2",),
    "operators": ("resnet50 --size tiny --batch 2", "resnet50 --size tiny --batch 2 --fuse"),
    "utilisation": ("resnet50 --size tiny --device h100 --batch 2",),
    "sparsity": ("vgg11 --images 1",),
}
NOT_ASKED = {
    "codesign": "suggests `plan transformer` on its design, asked in tests/plan/codesign/test_command.py",
    "record": "runs a script; what it suggests is asked by the tour in the README",
    "align": "suggests nothing",
    "llm simulate": "suggests nothing",
    "llm capacity": "suggests `llm simulate` of its best engine, asked in tests/serving/llm",
    "llm calibrate": "needs runs of a server; suggests `llm simulate` with what it kept, asked in its own test",
    "llm draft": "suggests nothing",
    "plan place": "suggests nothing",
    "plan rows": "suggests nothing",
    "plan soap": "suggests nothing",
    "plan cache": "suggests itself with --run, which shapes real links",
    "plan look-ups": "suggests nothing",
    "plan sync": "suggests itself with --run, which starts processes",
    "plan transformer": "suggests nothing",
    "plan pipeline": "suggests nothing",
    "energy tune": "suggests nothing",
    "energy measure": "suggests nothing",
    "energy colocate": "suggests nothing",
    "plan data": "times steps and the disk; suggests itself with --run, asked in its own test",
    "serve plan": "measures; suggests `serve`, which runs until Ctrl-C",
    "scale": "needs several ranks; suggests `show` of what it read",
    "rewrite": "suggests nothing",
    "program": "suggests nothing",
    "kernels": "compiles a model and suggests nothing",
    "verify": "measures; suggests `ledger`, or itself with more time",
    "ledger": "needs what `verify` measures; suggests its own summary",
    "calibrate device": "measures and suggests nothing",
    "calibrate run": "measures; suggests the `whatif` it was asked for",
    "cloud advise": "needs a recording of a device of its catalog, asked below",
    "network check": "needs a measured table; suggests `techniques data-parallel` or `calibrate network`",
    "calibrate network": "measures; suggests `techniques data-parallel`, which is asked here",
    "fleet generate": "suggests `fleet run` of what it wrote, asked by `fleet fit`",
    "fleet export": "suggests nothing",
    "fleet rig": "runs jobs in real time; suggests itself with repeats",
    "rig check": "suggests shaping real links, which needs to be root",
    "rig calibrate": "shapes real links",
    "rig verify": "shapes real links",
    "rig clean": "suggests nothing",
    "serve run": "serves until it is stopped",
    "serve load": "suggests nothing",
}


def _commands() -> Iterator[str]:
    """Names of all commands of the application, groups spelled out."""

    def under(command: Any, name: str) -> Iterator[str]:
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name
            return
        for key, each in inner.items():
            yield from under(each, f"{name} {key}".strip())

    yield from under(typer.main.get_command(application()), "")


def test_every_command_is_asked_or_says_why_not() -> None:
    known = {*ASKED, *WITH_TORCH, *NOT_ASKED}
    assert sorted(_commands()) == sorted(known)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recording, a log of jobs, and a measured table of collectives."""
    for file in DATA.glob("*.json.gz"):
        shutil.copy(file, tmp_path)
    shutil.copy(JOBS, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _hold(cli: Cli, asked: str) -> list[str]:
    """Ask, and ask what is suggested, which is returned."""
    answer = cli(*shlex.split(asked))
    assert answer.code == 0, f"{asked}: {answer.err}"
    suggested: list[str] = re.findall(r"^\s*next: (.*)$", answer.out, re.MULTILINE)
    for line in suggested:
        words = shlex.split(line)
        assert words[0] == "foretrace", line
        assert words[1:] != shlex.split(asked), f"{asked} suggests itself"
        then = cli(*words[1:])
        assert then.code == 0, f"{asked} suggests {line}, which says {then.err}"
    return suggested


@pytest.mark.parametrize("asked", [f"{command} {words}".strip() for command in ASKED for words in ASKED[command]])
def test_what_is_suggested_answers(cli: Cli, here: Path, asked: str) -> None:
    _hold(cli, asked)


ON_A_DEVICE = ("cloud advise {} --samples 1000", "show {}", "blame {}", "advise {}", "whatif {} --do compiled")


@pytest.mark.parametrize("asked", ON_A_DEVICE)
def test_what_is_suggested_about_a_device_answers(cli: Cli, here: Path, shared_data: Path, asked: str) -> None:
    shutil.copy(shared_data / "traces/triosim/h100_vgg13_kineto.json.gz", "vgg of mine.json.gz")
    _hold(cli, asked.format("'vgg of mine.json.gz'"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [f"{command} {words}".strip() for command in WITH_TORCH for words in WITH_TORCH[command]]
)
def test_what_is_suggested_about_a_model_answers(cli: Cli, here: Path, asked: str) -> None:
    pytest.importorskip("torch", reason="captures a model; install the extra torch")
    found = _hold(cli, asked)
    assert "--batch" not in asked or all("--size tiny" in each and "--batch 2" in each for each in found)
