"""Two runs of any command on the same input print the same bytes of --json, measured times aside.

Each runs in this process and in another, whose sets and dictionaries of texts are ordered by different seeds. What is
asked as one of the golden questions is held equal to the answer that is kept, too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer

from foretrace.cli.app import application
from foretrace.report.jsonout import MEASURED
from tests.cli import all_answers
from tests.cli.test_ranges import commands
from tests.golden import golden

ROOT = golden.ROOT
RUN = "R/recommender.json.gz"
JOBS = "X/jobs.csv"
SMALL = f"{JOBS} --cluster 2x4x8"
# How each command is asked, with letters for folders as in golden questions; T and W are empty ones of each process.
ASKED = {
    "show": f"{RUN}",
    "simulate": f"{RUN}",
    "blame": f"{RUN} --by layer",
    "whatif": f"{RUN} --do fused-optimizer --do prefetch-data",
    "advise": f"{RUN}",
    "optimise": f"{RUN} --seconds 600",
    "compare": f"{RUN} R/recommender-fused.json.gz",
    "check": f"{RUN}",
    "profile": f"{RUN}",
    "stash": f"{RUN} --workers 4 --between 1gbit",
    "cloud advise": f"{RUN} --samples 100000 --epochs 2 --step K80-half=0.2",
    "plan second-order": f"{RUN} --network 1gbit --workers 4 --no-measure",
    "compression advise": f"{RUN} --network 1gbit --workers 4 --no-measure --method powersgd",
    "align": "D/traces/param/dlrm_kineto_8rank",
    "scale": "D/traces/param/dlrm_kineto_8rank --ranks 64 --network 100gbit/5us",
    "techniques": "",
    "zoo": "",
    "devices": "",
    "estimate": "gpt2 --size tiny --device a100",
    "operators": "gpt2 --size tiny",
    "utilisation": "gpt2 --size tiny --device a100",
    "sparsity": "vgg11 --images 1",
    "rewrite": "actor-critic --size tiny --device a100 --no-measure --budget 3",
    "plan place": "bert --size tiny --device a100 --devices 4 --objective latency --seconds 0",
    "plan rows": "'zipf:1.1 tables=3 rows=300 samples=32 batches=4' --devices 3 --memory 140KB --inference",
    "plan transformer": "gpt2-xl --device a100-80gb --devices 16 --batch 64",
    "codesign": "gpt2-medium --devices 8 --batch 64 --area 8",
    "plan cache": "'zipf:1.05 samples=64 batches=16' --link 50mbit",
    "plan look-ups": "mobilenet-v2 --size tiny --setting 9/16/l1=0.75 --dense 0.76 --samples 5000",
    "plan sync": "100,100,300ms --commit-ms 20 --parameters 1000 --link 1gbit",
    "plan soap": "vgg11 --size tiny --device p100 --devices 4 --calls 60",
    "plan pipeline": "bert --size tiny --device a100 --devices 2",
    "serve plan": "bert --profile D/serving/packrat/packrat_profile.csv --threads 16 --batch 64",
    "network check": "D/network/vtrain_allreduce_v100/AR_GPU7_1M_1024M.csv.gz --on nccl:V100-SXM2",
    "llm capacity": "llama-3-8b --device h100 --devices 1 --slo ttft=1s --seconds 600"
    " --requests R/serving/requests.csv",
    "llm simulate": "llama-3-8b --device h100 --seconds 30",
    "llm draft": "llama-2-70b --device h100 --tp 4 --parameters 5e8",
    "llm calibrate": "R/serving/vllm_bench.json --model llama-3-8b --device h100",
    "program": "gemv m=32 k=64 --tries 8 --measure 0",
    "energy tune": "zeus:R/energy workload=squad",
    "fleet run": f"{SMALL} --policy las",
    "fleet compare": f"{SMALL} --policy fifo --policy las",
    "fleet why": f"{JOBS} job20 --cluster 2x4x8",
    "fleet whatif": f"{SMALL} --now fifo --policy las",
    "fleet slots": f"{JOBS} --cluster 2x4x8 --size 8 --at 86400",
    "fleet sweep": f"{JOBS} --policy fifo --policy las --jobs 50 --out T/sweep",
    "fleet fit": f"{JOBS} --out T/like.json",
    "fleet generate": "T/like.json --jobs 200 --out T/more.csv",
    "fleet export": f"{JOBS} --to slurm --cluster 2x4x8 --job job20 --out T/slurm",
    "fleet live": "60 --from X/slurm --add-rack 1 --draws 20",
    "fleet policies": "",
}
# Commands that write files instead of an answer; all that they leave in W is compared.
WRITE = {
    "report": f"{RUN} --do fused-optimizer --out W/report.html",
    "export": f"{RUN} --do fused-optimizer --out W/both.json",
    "graph": f"{RUN} --do fused-optimizer --out W/changed.graph",
}
MEASURE = {
    "verify": "runs both arms",
    "calibrate device": "times operators",
    "calibrate run": "times operators",
    "calibrate network": "times collectives",
    "rig check": "asks this machine, and as root only",
    "rig calibrate": "times a link",
    "rig verify": "runs workers",
    "rig clean": "asks this machine",
    "fleet rig": "runs jobs on a real scheduler",
    "record": "records a run",
    "serve run": "serves until it is stopped",
    "serve load": "times a server",
    "energy measure": "reads counters of this machine",
    "energy colocate": "runs two models",
    "kernels": "times a step",
    "plan data": "times steps and the disk",
}
ELSEWHERE = {
    "ledger": "prints measured rows as they were stored: tests/verify",
}


def test_no_command_is_left_out() -> None:
    every = dict(commands(typer.main.get_command(application())))
    assert set(every) == {*ASKED, *WRITE, *MEASURE, *ELSEWHERE}
    assert set(WRITE) == {name for name in set(every) - set(MEASURE) if not answers_in_json(every[name])}


def answers_in_json(command: Any) -> bool:
    return any("--json" in option.opts for option in command.params)


def without_measured(command: str, text: str) -> str:
    """The answer's bytes with measured fields left out."""
    if command not in MEASURED:
        return text
    answer = json.loads(text)
    for path in MEASURED[command]:
        *outer, last = path.split(".")
        place: Any = answer
        for key in outer:
            place = place[key]
        assert last in place, f"{command} has no {path}"
        place[last] = None
    return json.dumps(answer)


def asked(folder: Path, data: Path) -> list[list[str]]:
    """The words of all commands, with `folder` to themselves."""
    (folder / "written").mkdir(parents=True)
    questions = [f"{name} {words} --json" for name, words in ASKED.items()]
    questions += [f"{name} {words}" for name, words in WRITE.items()]
    given = golden.places(data, folder) | {"W": str(folder / "written")}
    return [golden.placed(each, given) for each in questions]


def here(folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """What this process answers to all commands, with what other tests captured: code, output and messages."""
    questions = asked(folder, data)
    monkeypatch.chdir(ROOT)
    all_answers.settle(golden.environment(folder), monkeypatch)
    return [[*each] for each in all_answers.answers(questions)]


def elsewhere(folder: Path, data: Path) -> list[list[Any]]:
    """What a process answers whose hashes of texts begin at another seed."""
    questions = asked(folder, data)
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    return golden.elsewhere(questions, golden.environment(folder) | {"PYTHONHASHSEED": seed}, folder)


@pytest.mark.slow("every command twice, once in a process of its own")
def test_two_runs_print_the_same_bytes(shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    folders = [tmp_path / name for name in ("a", "b")]
    # One after the other: the second finds the loops that the first compiled.
    found = [here(folders[0], shared_data, monkeypatch), elsewhere(folders[1], shared_data)]
    plain = [
        [text.replace(str(folder), "T") for _, text, _ in each] for folder, each in zip(folders, found, strict=True)
    ]
    wrong = {
        name: said
        for name, (code, _, said), *texts in zip([*ASKED, *WRITE], found[0], *plain, strict=True)
        if code not in (0, 1) or len({without_measured(name, text) for text in texts}) > 1
    }
    assert not wrong  # code 1: a check that says no
    kept = {f"{name} {words}".strip(): answer for (name, words), answer in zip(ASKED.items(), found[0], strict=False)}
    given = golden.places(shared_data, folders[0])
    same = {name: golden.kept_form(kept[words], given) for name, words in golden.questions().items() if words in kept}
    assert len(same) > 20 and golden.compare(same) == {}
    files = [{path for path in folder.glob("written/**/*") if path.is_file()} for folder in folders]
    written = [
        {path.relative_to(folder): path.read_bytes() for path in found}
        for folder, found in zip(folders, files, strict=True)
    ]
    assert len(written[0]) >= len(WRITE)
    assert [name for name in written[0] if written[0][name] != written[1].get(name)] == []
