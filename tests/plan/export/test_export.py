"""Plans written for launchers: files as they were checked, read back, run, and what is refused."""

from __future__ import annotations

import json
import shlex
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foretrace.cli.app import run
from foretrace.errors import ForetraceError
from foretrace.plan.export import TARGETS, export, path_of
from foretrace.plan.export.launch import LaunchedPlan
from foretrace.plan.transformers.model import Parallelism
from foretrace.plan.transformers.shape import TransformerSizes, transformer
from tests.gloo_workers import together
from tests.plan.export import slurm, split_decoder

GOLDEN = Path(__file__).parent / "golden"
LARGE = Parallelism(tensor=8, sequence=1, pipeline=8, virtual=2, data=8, recompute=1, zero=1, overlap=1)
SHARDED = Parallelism(tensor=8, sequence=1, pipeline=2, virtual=2, data=4, micro=2, recompute=2, zero=3, overlap=1)
PLAIN = Parallelism(tensor=2, data=8, micro=2, zero=2, overlap=1)
SMALL = TransformerSizes(
    name="small", layers=2, hidden=16, heads=4, kv_heads=2, inner=32, words=24, length=6, gated=True
)
CASES = {
    "torchrun": LaunchedPlan(model=transformer("gpt3-175b"), at=LARGE, batch=1536),
    "slurm": LaunchedPlan(model=transformer("gpt3-175b"), at=LARGE, batch=1536),
    "megatron": LaunchedPlan(model=transformer("gpt3-175b"), at=LARGE, batch=1536),
    "megatron-bridge": LaunchedPlan(model=transformer("llama-3-70b"), at=SHARDED, batch=128),
    "deepspeed": LaunchedPlan(model=transformer("gpt2-xl"), at=PLAIN, batch=64),
    "torchtitan": LaunchedPlan(model=transformer("llama-3-70b"), at=SHARDED, batch=128),
    "dtensor": LaunchedPlan(model=transformer("llama-3-8b"), at=PLAIN, batch=64),
}


@pytest.mark.parametrize("to", TARGETS)
def test_files_are_as_they_were_checked(to: str) -> None:
    """Megatron-LM's parser and validation of August 2026, DeepSpeed 0.19.8's and torchtitan 0.2.2's accepted theirs.

    Names of Megatron-Bridge's settings were looked up in its documentation.
    """
    assert export(CASES[to], to) == (GOLDEN / f"{TARGETS[to].file}.txt").read_text()


def test_torchrun_reads_its_line() -> None:
    from torch.distributed.run import parse_args

    for launch in (CASES["torchrun"], LaunchedPlan(model=SMALL, at=Parallelism(data=4), batch=4)):
        line = export(launch, "torchrun").splitlines()[-1].replace('"$@"', "train.py")
        read = parse_args(shlex.split(line)[2:])
        assert int(read.nnodes) * int(read.nproc_per_node) == launch.at.devices
        assert read.training_script == "train.py"


@pytest.mark.parametrize("to", ["torchrun", "slurm"])
def test_scripts_are_bash(to: str) -> None:
    subprocess.run(["bash", "-n"], input=export(CASES[to], to), text=True, check=True)


def test_slurm_would_start_its_script(tmp_path: Path) -> None:
    if missing := slurm.missing():
        pytest.skip(f"Slurm is not installed: there is no {missing}")
    text = export(CASES["slurm"], "slurm")
    with slurm.controller(tmp_path) as environment:

        def tried(script: str) -> tuple[int, str]:
            command = ["sbatch", "--test-only"]
            done = subprocess.run(command, input=script, env=environment, capture_output=True, text=True, check=False)
            return done.returncode, done.stderr

        code, said = tried(text)
        assert code == 0 and "on nodes n[1-64]" in said, said
        assert tried(text.replace("--nodes=64", "--nodes=65", 1))[0]  # it does look
        assert "unrecognized" in tried(text.replace("--exclusive", "--exclusively"))[1]


def test_degrees_and_batches_come_back() -> None:
    toml = tomllib.loads(export(CASES["torchtitan"], "torchtitan"))
    found, at = toml["parallelism"], SHARDED
    degrees = [each for name, each in found.items() if name.endswith("_degree")]
    assert torch.tensor(degrees).prod() == at.devices
    assert found["pipeline_parallel_layers_per_stage"] * at.pipeline * at.virtual == 80
    assert toml["training"]["local_batch_size"] * at.data == toml["training"]["global_batch_size"] == 128
    mixed = LaunchedPlan(model=transformer("mixtral-8x7b"), at=Parallelism(tensor=2, data=8, expert=4), batch=16)
    assert "--expert-model-parallel-size\n4\n" in export(mixed, "megatron").replace(" ", "\n")
    assert "  expert_model_parallel_size: 4\n" in export(mixed, "megatron-bridge")
    read = json.loads(export(CASES["deepspeed"], "deepspeed"))
    said = read["train_micro_batch_size_per_gpu"] * read["gradient_accumulation_steps"] * PLAIN.data
    assert said == read["train_batch_size"] == 64


def test_deepspeed_reads_its_file() -> None:
    config = pytest.importorskip("deepspeed.runtime.config", reason="deepspeed is not installed", exc_type=ImportError)
    one = replace(PLAIN, data=1)  # outside a job there is one replica
    read = config.DeepSpeedConfig(json.loads(export(replace(CASES["deepspeed"], at=one, batch=8), "deepspeed")))
    assert (read.train_batch_size, read.gradient_accumulation_steps) == (8, 4)
    assert read.zero_config.stage == PLAIN.zero
    assert read.zero_config.overlap_comm


def test_torchtitan_reads_its_file(tmp_path: Path) -> None:
    config = pytest.importorskip("torchtitan.config", reason="torchtitan is not installed", exc_type=ImportError)
    if not hasattr(config, "ConfigManager"):
        pytest.skip("this torchtitan is configured in Python")
    path = tmp_path / "plan.toml"
    path.write_text(export(CASES["torchtitan"], "torchtitan"))
    read = config.ConfigManager().parse_args(["--job.config_file", str(path)])
    assert read.parallelism.tensor_parallel_degree == SHARDED.tensor
    assert read.parallelism.pipeline_parallel_schedule == "Interleaved1F1B"
    assert read.activation_checkpoint.mode == "full"


@pytest.mark.slow("two processes of gloo and the unsplit model, trained for real")
def test_the_dtensor_plan_trains_as_the_whole_model() -> None:
    """Tensor parallelism, replicas, shards of two kinds, recomputation: losses and weights after steps are equal."""
    plans = [
        Parallelism(tensor=2, recompute=2), Parallelism(data=2), Parallelism(data=2, zero=2),
        Parallelism(data=2, zero=3, recompute=2),
    ]  # fmt: skip
    codes = [(export(LaunchedPlan(model=SMALL, at=at, batch=4), "dtensor"), at.data > 1) for at in plans]
    for found in together(split_decoder.both, 2, codes):
        for (expected, result, share), at in zip(found, plans, strict=True):
            assert (share < 0.6) == (at.tensor > 1 or at.zero > 0)
            for one, other in zip(expected, result, strict=True):
                torch.testing.assert_close(torch.tensor(other), torch.tensor(one), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("to", "name", "at", "said"),
    [
        ("deepspeed", "gpt2-xl", Parallelism(pipeline=2), "pipeline=2"),
        ("deepspeed", "gpt2-xl", Parallelism(context=2), "context=2"),
        ("deepspeed", "gpt2-xl", Parallelism(data=2, overlap=1), "overlap=0"),
        ("deepspeed", "gpt2-xl", Parallelism(recompute=2), "recompute=2"),
        ("torchtitan", "gpt2-xl", Parallelism(data=2), "8B, 70B, 405B"),
        ("torchtitan", "llama-3-8b", Parallelism(tensor=2), "fix sequence=1"),
        ("torchtitan", "llama-3-8b", Parallelism(data=2, zero=1), "zero=1"),
        ("torchtitan", "llama-3-8b", Parallelism(data=2, pipeline=2), "zero=0"),
        ("torchtitan", "llama-3-8b", Parallelism(recompute=1), "selective"),
        ("dtensor", "llama-3-8b", Parallelism(tensor=2, sequence=1), "sequence=1"),
        ("dtensor", "mixtral-8x7b", Parallelism(tensor=2), "8 experts"),
        ("deepspeed", "mixtral-8x7b", Parallelism(data=4, expert=4), "expert=4"),
        ("dtensor", "llama-3-8b", Parallelism(tensor=16), "fix tensor=8"),
        ("megatron-bridge", "gpt2-xl", Parallelism(pipeline=2, virtual=2), "fix overlap=1"),
    ],
)
def test_what_a_target_cannot_say_is_refused_with_what_can(to: str, name: str, at: Parallelism, said: str) -> None:
    with pytest.raises(ForetraceError, match=said) as refused:
        export(LaunchedPlan(model=transformer(name), at=at, batch=at.data), to)
    assert ("export to megatron" in str(refused.value)) == (to != "megatron-bridge")
    assert str(refused.value).count(".") == 1


def test_no_target_has_words_for_two_versions_of_the_weights() -> None:
    launch = LaunchedPlan(model=transformer("gpt2-xl"), at=Parallelism(pipeline=2, versions=2), batch=4)
    for to in ("megatron", "deepspeed", "dtensor"):
        with pytest.raises(ForetraceError, match=f"{to} cannot express versions=2 .*; fix versions=1.$"):
            export(launch, to)
    assert "torchrun" in export(launch, "torchrun")  # which starts processes alone


@pytest.mark.parametrize(
    ("at", "batch", "said"),
    [
        (Parallelism(data=8), 12, "give 16"),
        (Parallelism(data=12), 12, "give 16"),
        (Parallelism(pipeline=5), 4, "stages"),
        (Parallelism(virtual=2), 4, "pipeline"),
    ],
)
def test_what_does_not_fit_together_is_no_launch(at: Parallelism, batch: int, said: str) -> None:
    with pytest.raises(ForetraceError, match=said):
        LaunchedPlan(model=transformer("gpt2-xl"), at=at, batch=batch)


def test_the_command_writes_the_plan_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "gpt2-xl", "--device", "a100-80gb", "--devices", "40", "--batch", "40", "--fix", "tensor=5"]
    assert run([*words, "--export", "megatron", "--out", str(tmp_path)]) == 0
    assert str(path_of(tmp_path, "megatron")) in capsys.readouterr().out
    assert "model-parallel-size 5\n" in (tmp_path / "megatron.args").read_text()
    assert run([*words, "--export", "torchrun", "--out", str(tmp_path / "go")]) == 0
    assert "nnodes=5" in (tmp_path / "go").read_text()
    for wrong, said in (
        (["--export", "megatron"], "--out"),
        (["--export", "gigatron", "--out", "x"], "megatron"),
        (["--export", "torchtitan", "--out", str(tmp_path / "x")], "megatron"),
    ):
        assert run([*words, *wrong]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
