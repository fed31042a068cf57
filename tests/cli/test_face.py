"""What commands have in common: panels, --json and --html, examples that run, one name per option, completion."""

from __future__ import annotations

import gc
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from foretrace.cli import app, main
from tests.cli.conftest import DATA, Cli

ROOT = Path(__file__).resolve().parents[2]
WRITE_FILES = {
    "record",
    "report",
    "export",
    "graph",
    "fleet generate",
    "fleet export",
    "serve run",
}  # and answer nothing

# Examples that do not run here, and why.
NOT_RUN = {
    "record": "records a script, which the tour in the README does",
    "optimise": "searches for a minute",
    "align": "needs the recordings of several ranks",
    "scale": "needs the recordings of several ranks",
    "stash": "runs a training on shaped links, for minutes",
    "profile": "trains a model, for a minute",
    "verify": "trains both arms, for minutes",
    "ledger": "needs rows that only verify writes",
    "zoo": "trains a model, for a minute",
    "rewrite": "searches and measures, for minutes",
    "kernels": "compiles a model, for a minute",
    "network check": "needs the output of nccl-tests",
    "compression advise": "times hooks for a minute",
    "rig calibrate": "shapes real links, which needs to be root",
    "rig verify": "shapes real links, which needs to be root",
    "rig clean": "needs to be root",
    "rig check": "ends with 1 where there can be no rig",
    "calibrate device": "times operators for a minute",
    "calibrate run": "times operators for a minute",
    "calibrate network": "times collectives for a minute",
    "serve plan": "measures a model, for a minute",
    "plan second-order": "times K-FAC for a minute",
    "plan data": "times steps and the disk, for half a minute",
    "fleet compare": "plays 60 runs",
    "fleet sweep": "plays 30 runs",
    "serve run": "serves until it is stopped",
    "serve load": "asks a server, which has to run",
    "energy tune": "needs a counter of energy",
    "fleet rig": "runs jobs on a Slurm of its own, for a minute",
    "energy measure": "needs a counter of energy",
    "energy colocate": "measures two models, for a minute",
}
NEEDS_TORCH = {"estimate", "operators", "utilisation", "sparsity"}
# What is added to an example that would compute for long: the same way through the program, with less to do.
LESS = {
    "llm capacity": ("--requests", "poisson requests=40"),
    "codesign": ("--no-layer",),
    "program": ("--tries", "8", "--measure", "1"),
}

# What every option means. An option that means the same elsewhere has the same name there.
MEANINGS = {
    "--accept-noise": "keep times that vary", "--acceptance": "proposals that a model accepts",
    "--accumulate": "micro-batches per update", "--add-rack": "more units",
    "--against": "techniques of the baseline", "--all-ranks": "all ranks as one graph",
    "--allow-large": "read large files",
    "--alpha": "how much worse graphs may be that are followed", "--any-sets": "several pieces on a device",
    "--apply": "change settings of the machine",
    "--area": "most area of a chip",
    "--array": "hardware that skips zeros",
    "--arrivals": "when requests come", "--at": "a moment of a log", "--attention": "implementation",
    "--backend": "what exchanges messages", "--batch": "samples per step",
    "--batches": "where steps take batches from", "--between": "link between machines",
    "--bucket-mb": "size of a bucket", "--budget": "most that may be spent",
    "--by": "what a row sums up", "--calibrate": "time programs before", "--calibration": "use stored operator times",
    "--calls": "of a cost model by a search", "--certificate": "for TLS",
    "--checkpoint-gb": "size of a model's state", "--checkpoint-s": "seconds between saves",
    "--clients": "who wait for answers", "--cluster": "machines and their GPUs",
    "--compute-ms": "time of the passes of a batch", "--context": "tokens attended to",
    "--counts": "machines to try",
    "--data": "files of the data set", "--days": "length of a log", "--deadline-s": "longest wait for an answer",
    "--device": "which device", "--devices": "how many devices", "--dim": "size of an open dimension",
    "--do": "techniques, in order", "--dp": "groups that attend to different sequences",
    "--draft": "what proposes tokens", "--draws": "how often a queue is played on", "--history": "past jobs",
    "--dtype": "number format of served weights", "--emulate": "layers that sleep", "--engine": "whose step times",
    "--ep": "devices that share experts", "--epochs": "epochs to train",
    "--evaluations": "how many settings to measure", "--every": "steps between updates",
    "--every-s": "seconds between looks at the load", "--exact": "weigh every assumption alone",
    "--decode": "words in the cache of a decoding step",
    "--explain": "why others lost", "--export": "write the rows", "--first-steps": "steps to keep",
    "--fail": "a node that fails", "--fix": "a degree that is given", "--for": "what to make small",
    "--format": "format of a log",
    "--from": "smallest size", "--fuse": "fuse operators", "--gpu": "a GPU's products", "--gpus": "devices in all",
    "--gradient-mb": "size of all gradients",
    "--grid": "carbon of a kWh", "--host": "address to listen at", "--html": "the answer as a page",
    "--images": "samples whose masks are taken",
    "--import": "add exported rows", "--inference": "forward pass alone", "--input": "sizes of a model's input",
    "--inside": "link inside a machine", "--jitter-s": "how far submissions are shifted", "--job": "one job of a log",
    "--jobs": "how many jobs", "--json": "the answer as JSON", "--keep": "keep what was recorded",
    "--keep-memory": "malloc keeps memory", "--k": "tokens of a round",
    "--key": "of a certificate", "--kind": "kind of collective",
    "--kinds": "kinds of collectives", "--ledger": "which ledger", "--latency-ms": "most of a pass",
    "--layer": "order operators on cores", "--length": "words of a sequence",
    "--level": "a level of a cluster", "--like": "settings of this recording",
    "--limit": "seconds after which to stop", "--link": "rate of every worker's link",
    "--load": "how densely jobs come", "--look-ahead": "batches that are known ahead",
    "--loss": "implementation", "--measure": "time it here, too",
    "--measured": "times before all predictors", "--memory": "store allocations", "--memory-limit": "most memory",
    "--method": "a method of compression", "--micro-batches": "micro-batches of a batch",
    "--model": "a zoo model or script", "--modules": "store module calls", "--mtbf-h": "hours between failures",
    "--mttr-h": "hours to repair", "--network": "what joins workers or machines", "--no-ledger": "write no row",
    "--nodes": "machines of a cluster", "--now": "the policy as it is", "--objective": "what a placement is judged by",
    "--on": "where work runs: here or Ray", "--only-buckets": "no technique but buckets",
    "--operators": "how many operators", "--optimizer": "implementation",
    "--out": "where what is made is written", "--parameters": "most of a model",
    "--overwrite": "replace an older recording",
    "--peak-gb-s": "peak of memory", "--peak-gflops": "peak of arithmetic", "--per-node": "workers of a machine",
    "--perfetto": "timelines for Perfetto", "--pipeline": "refused", "--plan": "write what is to be timed",
    "--play": "placements by playing the log", "--plot": "draw the offers", "--policy": "scheduling policy",
    "--pools": "engines for prompts, and for decoding", "--port": "port to listen at", "--pp": "stages of a pipeline",
    "--precision": "number formats of a training", "--preemption": "what becomes of a cache",
    "--price": "of a device per hour", "--prices": "types and prices", "--profile": "latencies of instances",
    "--queue": "samples that may wait", "--rank": "one rank", "--ranks": "how many ranks to predict",
    "--racks": "units above machines", "--rate": "requests per second", "--recompute": "blocks run again",
    "--recompute-every": "N-th blocks",
    "--reentrant": "how blocks run again", "--rehearse": "throw the first profile away",
    "--repeats": "runs of the same",
    "--repetitions": "how often each size is timed", "--replicas": "how many engines",
    "--requests": "what an engine serves", "--restart-s": "cost of a move", "--restart-s-per-gpu": "the same per GPU",
    "--resume": "state of a search", "--router": "which engine gets a request", "--rules": "more rules",
    "--run": "run what was planned",
    "--salvage": "use the good part of a damaged file", "--sample": "neighbours per hop",
    "--samples": "how many samples", "--save": "keep the graph",
    "--planner": "what cuts a model into stages", "--schedule": "a schedule of a pipeline",
    "--seconds": "time to spend", "--seed": "of all that is drawn", "--strategy": "how a space is searched, too",
    "--seeds": "how many seeds", "--sequence-parallel": "refused", "--sequences": "running at a time",
    "--set": "values to try", "--shapes": "store input sizes", "--size": "size of a model",
    "--sizes": "how many sizes", "--skip-first": "steps to skip", "--slo": "limits of latency",
    "--speedup": "how much faster than the log", "--speeds": "how placement decides speed",
    "--split": "cores of instances", "--state": "what a search has found",
    "--step": "one step", "--steps": "which or how many steps", "--stop-after": "end the script",
    "--storage-gb-s": "how fast state moves", "--subtraces": "parts of a log", "--summary": "only the summary",
    "--system": "one of several systems", "--tables": "measured operators", "--tail": "quantile of a latency",
    "--task": "what is learnt of a graph",
    "--technique": "rows of a technique", "--tensor": "devices that share a layer",
    "--threads": "threads of an operator", "--times": "times filled in", "--to": "largest size",
    "--trace": "a log of jobs, or how to draw one", "--trainers": "who train from one table",
    "--tries": "schedules that are drawn",
    "--to-cluster": "another cluster", "--to-load": "another load", "--token-budget": "tokens of a step",
    "--token-file": "a secret of clients", "--tokens": "words to train on", "--tolerance": "what counts as near",
    "--top": "rows of a ranking", "--tp": "devices that share a layer", "--trust": "packages that may be called",
    "--types": "instance types", "--unequal": "stages that differ", "--utilisation": "share of the memory",
    "--skip": "layers that are left out",
    "--width": "numbers in a row", "--wait": "unprofiled steps", "--wait-s": "how long a job insists",
    "--warmup": "steps with the profiler prepared", "--within": "hours", "--workers": "how many workers",
    "--setting": "what was measured of one", "--dense": "accuracy without a change", "--bits": "of a number",
    "--most-loss": "accuracy that may be lost", "--bytes-per-cycle": "from memory", "--on-chip": "nothing is read",
    "--share": "of a model's weights, that are sent",
    "--commits": "after which a run ends", "--commit-ms": "from a commit to its answer",
    "--write": "write the configuration", "--zero": "stage of ZeRO",
}  # fmt: skip
# Where an option means something else, and what; a new one needs a reason as good as these.
ELSEWHERE = {
    ("serve run", "--plan"): "plans to serve by",
    ("network check", "--on"): "the network that is expected",
    ("fleet run", "--measure"): "jobs that means are over",
    ("fleet slots", "--size"): "GPUs of a job",
    ("fleet rig", "--gpus"): "of each machine",
    ("fleet export", "--to"): "the scheduler that files are for",
    ("fleet live", "--from"): "a folder of outputs",
    ("fleet live", "--save"): "keep the outputs",
    ("plan rows", "--memory"): "for tables, of a device",
    ("plan transformer", "--export"): "the launcher that a plan is written for",
    ("llm simulate", "--seconds"): "how long requests come",
    ("llm capacity", "--devices"): "most of one engine",
    ("llm simulate", "--calibration"): "what was found of this server",
    ("scale", "--samples"): "how often noise is drawn",
    ("plan cache", "--optimizer"): "how rows are updated",
    ("serve plan", "--threads"): "cores that all instances share",
    ("plan second-order", "--memory"): "for factors and inverses, of a worker",
    ("plan data", "--memory"): "most memory of a training",
    ("program", "--measure"): "how many of the best are timed",
    ("estimate", "--measure"): "how many of the model's operators are timed",
}


def commands() -> Iterator[tuple[str, Any]]:
    """Every command by its words."""

    def under(command: Any, name: str) -> Iterator[tuple[str, Any]]:
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command
            return
        for key, each in inner.items():
            yield from under(each, f"{name} {key}".strip())

    yield from under(typer.main.get_command(app.application()), "")


COMMANDS = dict(commands())


def options(command: Any) -> set[str]:
    return {name for each in command.params for name in each.opts if name.startswith("--")}


def examples(name: str) -> list[str]:
    """The commands behind "Example:" in the help of one."""
    text = " ".join((COMMANDS[name].help or "").split())
    found = re.findall(r"(?:Example:|, or) (foretrace .*?)(?=, or foretrace|, then|$)", text)
    return [each.removesuffix(".") for each in found]


def test_panels_hold_every_command_once() -> None:
    named = [each for names in app.PANELS.values() for each in names]
    assert sorted(named) == sorted(typer.main.get_command(app.application()).commands)  # type: ignore[attr-defined]


def test_help_shows_the_panels_in_order(cli: Cli) -> None:
    text = cli("--help").out
    places = [text.index(f"\n{title}:\n") for title in app.PANELS]
    assert places == sorted(places)


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - WRITE_FILES))
def test_every_answer_has_json_and_a_page(name: str) -> None:
    assert {"--json", "--html"} <= options(COMMANDS[name])


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_an_example(name: str) -> None:
    found = examples(name)
    assert found
    assert all(each.startswith(f"foretrace {name}") for each in found)


def test_options_have_one_meaning() -> None:
    used = {(name, option) for name, command in COMMANDS.items() for option in options(command)}
    assert {option for _, option in used} == MEANINGS.keys()
    assert used >= ELSEWHERE.keys()


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the examples find what they name."""
    for name, recording in (("run", "recommender"), ("before", "recommender"), ("after", "recommender-fused")):
        (tmp_path / name).mkdir()
        shutil.copy(DATA / f"{recording}.json.gz", tmp_path / name)
    shutil.copy(ROOT / "examples" / "jobs.csv", tmp_path)
    shutil.copytree(ROOT / "examples" / "slurm", tmp_path / "slurm")
    shutil.copy(DATA / "serving" / "vllm_bench.json", tmp_path / "bench.json")
    monkeypatch.setenv("FORETRACE_LEDGER", str(tmp_path / "ledger.sqlite"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "operators").symlink_to(Path(os.environ["FORETRACE_CACHE"]) / "operators")
    monkeypatch.setenv("FORETRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in NEEDS_TORCH else ())
        for name in COMMANDS
        if name not in NOT_RUN
    ],
)
def test_examples_run(cli: Cli, workplace: Path, name: str) -> None:
    if name in NEEDS_TORCH:
        pytest.importorskip("torch")
    if name == "fleet generate":
        assert cli(*shlex.split(examples("fleet fit")[0])[1:]).code == 0
    for each in examples(name):
        if "model.onnx" not in each:  # a model of the user's
            answer = cli(*shlex.split(each)[1:], *LESS.get(name, ()))
            assert answer.code == 0, f"{each}: {answer.err}"


def test_only_commands_are_left_out() -> None:
    assert NOT_RUN.keys() <= COMMANDS.keys()


@pytest.fixture(scope="module")
def completion(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[str]]:
    """Ask a shell what it offers for the last of some words, by the script that --show-completion prints there."""
    folder = tmp_path_factory.mktemp("completion")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    assert shutil.which("foretrace", path=path) is not None

    def run(shell: str, script: str) -> str:
        found = shutil.which(shell)
        if found is None:
            pytest.skip(f"{shell} is not installed")
        words = [found, *(["--norc"] if shell == "bash" else ["-f"]), "-c", f"{script}; true"]
        done = subprocess.run(
            words, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True
        )
        return done.stdout

    def offered(shell: str, words: list[str]) -> list[str]:
        script = folder / f"completion.{shell}"
        if not script.exists():
            script.write_text(run(shell, "foretrace --show-completion"))
            assert "_FORETRACE_COMPLETE" in script.read_text()
        if shell == "bash":
            asked = f"COMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}"
            shown = 'printf "%s\\n" "${COMPREPLY[@]}"'
            return run(shell, f"source {script}; {asked}; _foretrace_completion foretrace; {shown}").split("\n")
        load = (
            f"autoload -Uz compinit; compinit -u -D; source {script}; [[ $_comps[foretrace] = _foretrace_completion ]]"
        )
        asked = f"words=({' '.join(map(shlex.quote, words))}); CURRENT={len(words)}"
        shown = "_arguments() { print -rl -- $* }"  # the shell's own function takes what is offered
        return run(shell, f"{load} || exit 1; {asked}; {shown}; _foretrace_completion").split("\n")

    return offered


COMPLETED = {
    "foretrace wha": "whatif",
    "foretrace fleet sl": "slots",
    "foretrace whatif run/ --do pre": "prefetch-data",
    "foretrace whatif run/ --do '\"prefetch-data w'": "prefetch-data workers=",
    "foretrace estimate resnet5": "resnet50",
    "foretrace estimate llama-2-7": "llama-2-7b",
    "foretrace estimate resnet50 --device h100-s": "h100-sxm5-80gb",
    "foretrace fleet run jobs.csv --policy tire": "tiresias",
}
IN_SHELLS = ("foretrace wha", "foretrace whatif run/ --do '\"prefetch-data w'")  # what answers is the same in each


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize("words", IN_SHELLS)
def test_a_shell_completes(completion: Callable[..., list[str]], shell: str, words: str) -> None:
    assert any(COMPLETED[words] in line for line in completion(shell, shlex.split(words)))


@pytest.mark.parametrize("words", COMPLETED)
def test_words_are_completed(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What the script of a shell asks for, in this process."""
    split = shlex.split(words)
    monkeypatch.setenv("_FORETRACE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(split))
    monkeypatch.setenv("COMP_CWORD", str(len(split) - 1))
    with pytest.raises(SystemExit) as ended:
        app.run([])
    assert ended.value.code == 0
    assert any(COMPLETED[words] in line for line in capsys.readouterr().out.splitlines())


def test_a_shell_is_left_to_complete_paths(completion: Callable[..., list[str]]) -> None:
    assert not any(completion("bash", ["foretrace", "show", "rec"]))  # then `complete -o default` names files


def test_a_process_that_ends_searches_for_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretrace.cli.app.run", lambda _: 3)
    monkeypatch.setattr("sys.argv", ["foretrace"])
    try:
        with pytest.raises(SystemExit, match="3"):
            main()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
