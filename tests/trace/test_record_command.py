"""Recording scripts that know nothing of it: real processes, real ends, good and bad."""

from __future__ import annotations

import gzip
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretrace.cli.app import run
from foretrace.errors import ForetraceError
from foretrace.trace.autorecord import guard
from foretrace.trace.autorecord.launch import Launch, LaunchOutcome
from foretrace.trace.recorder import RecordOptions

pytest.importorskip("torch")

# 1 optimizer step starts it; then observe, before, 2 active, closing, after: complete after 7 steps.
SHORT = RecordOptions(wait=1, warmup=0, active=2, skip_first=0, rehearse=False)

SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn

end, workers = sys.argv[1], int(sys.argv[2])
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests that run in the background inherit that it is ignored

def main():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    critic = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    second = torch.optim.SGD(critic.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(160, 8))
    step = 0
    for (x,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=workers):
        optimizer.zero_grad()
        critic(model(x)).mean().backward()
        optimizer.step()
        second.step()
        step += 1
        if end == "hang":
            print(step, flush=True)
            time.sleep(0.2)
        if step == 5:
            if end == "exception":
                raise ValueError("the script's own mistake")
            if end == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
            if end == "os._exit":
                os._exit(7)
    print("done", step)

if __name__ == "__main__":
    main()
"""
# An optimizer and a profiler load PyTorch's compiler, half of a short script's time, only to find that nothing is to be
# compiled; a third of the rest are shapes of operators on the meta device.
LIGHT = """
import gc, sys, types
gc.disable()
sys.modules["torch._meta_registrations"] = types.ModuleType("torch._meta_registrations")
import torch
gc.enable()
torch._dynamo = sys.modules["torch._dynamo"] = types.ModuleType("torch._dynamo")
torch._dynamo.disable = lambda function, *_, **__: function
torch._dynamo.graph_break = lambda: None
getattr(torch, "_lazy_modules", set()).discard("_inductor")
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script as anybody would run it."""
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script without what takes long to load; how it ends is the same."""
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(LIGHT + SCRIPT)
    return str(path)


def launched(command: Sequence[str], folder: Path, options: RecordOptions = SHORT, **more: bool) -> LaunchOutcome:
    return Launch(command, folder, options, **more).run()


def load(path: Path) -> dict[str, Any]:
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return trace


def whole_steps(folder: Path) -> int:
    return len(load(folder / "rank0.json.gz")["foretrace"]["whole_steps"])


def names(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir()) if folder.exists() else []


def test_a_script_with_loader_workers_two_optimizers_and_a_sitecustomize_of_its_own(
    whole: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys; print('own sitecustomize', file=sys.stderr)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    outcome = launched([sys.executable, whole, "normal", "2"], tmp_path / "run")
    printed = capfd.readouterr()
    assert printed.out == "done 40\n"
    assert "own sitecustomize" in printed.err
    assert "recorded 2 steps in " in printed.err
    assert (outcome.exit_code, outcome.trouble) == (0, "")
    (recording,) = outcome.recordings
    assert names(tmp_path / "run") == ["rank0.json.gz"]
    assert (recording.rank, recording.steps, recording.path.parent) == (0, 2, tmp_path / "run")
    trace = load(recording.path)
    ours = trace["foretrace"]
    assert ours["complete"]
    assert ours["started_by"] == "command"
    assert [s["phase"] for s in ours["steps"]] == [
        "observe",
        "before",
        "active",
        "active",
        "closing",
        "after",
    ]
    steps = [e["name"] for e in trace["traceEvents"] if e["name"].startswith("ProfilerStep")]
    assert len(steps) == 3
    assert {f"ProfilerStep#{step}" for step in ours["whole_steps"]} < set(steps)
    assert [(o["class"], o["marks_steps"]) for o in ours["optimizers"]] == [("AdamW", True), ("SGD", False)]
    (loader,) = ours["loaders"]
    assert (loader["num_workers"], loader["workers"]["processes"]) == (2, 2)
    assert loader["workers"]["cpu_ns"] > 0


RANKS = f"""{LIGHT}
import time, torch.distributed as dist, unittest.mock
torch._dynamo.utils = torch._dynamo.trace_rules = unittest.mock.MagicMock()  # asked when replicas are made
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)])
model = DistributedDataParallel(model, bucket_cap_mb=0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(14):
    optimizer.zero_grad()
    if dist.get_rank() == 1:
        time.sleep(0.1)
    model(torch.randn(16, 128)).pow(2).mean().backward()
    optimizer.step()
dist.barrier()  # a rank that leaves early can abort the others
del model, optimizer  # they hold the process group, which may abort the interpreter's end
gc.collect()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_torchrun_writes_one_file_per_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Real processes, one of which sleeps: `show` names the one that they wait for, `align` finds their one clock."""
    script = tmp_path / "train.py"
    script.write_text(RANKS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    outcome = launched([*torchrun, str(script)], tmp_path / "run", replace(SHORT, active=5))
    assert outcome.exit_code == 0
    assert names(tmp_path / "run") == ["rank0.json.gz", "rank1.json.gz"]
    for rank, recording in enumerate(outcome.recordings):
        ours = load(recording.path)["foretrace"]
        assert (ours["rank"], ours["world_size"], ours["backend"]) == (rank, 2, "gloo")
        assert ours["ddp"] and ours["missing"] == [] and ours["machine"]["clock"]
    view, offsets = (answer(capfd, command, tmp_path / "run") for command in ("show", "align"))
    found = view["collectives"]
    assert found["unmatched"] == [] and found["missing"] == []
    assert found["matched"] >= 5
    assert found["straggler"]["rank"] == 1
    assert found["straggler"]["cause"] == "host"
    assert found["wait_s_mean"] > 0.5 * 0.02 / 2
    assert set(offsets["offsets_s"].values()) == {0.0}  # processes of one machine share its clock
    assert offsets["uncertainty_s"] == 1e-6


def answer(capfd: pytest.CaptureFixture[str], command: str, folder: Path) -> dict[str, Any]:
    capfd.readouterr()
    assert run([command, str(folder), "--json"]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def test_an_exception_leaves_the_steps_before_it(
    script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    outcome = launched([sys.executable, script, "exception", "0"], tmp_path)
    assert outcome.exit_code == 1
    assert "ValueError: the script's own mistake" in capfd.readouterr().err
    assert whole_steps(tmp_path) == 2


def test_an_interrupt_leaves_the_steps_before_it(script: str, tmp_path: Path) -> None:
    outcome = launched([sys.executable, script, "interrupt", "0"], tmp_path)
    assert outcome.exit_code == 128 + signal.SIGINT
    assert names(tmp_path) == ["rank0.json.gz"]
    assert whole_steps(tmp_path) == 2


def test_os_exit_leaves_nothing_and_its_exit_code(script: str, tmp_path: Path) -> None:
    outcome = launched([sys.executable, script, "os._exit", "0"], tmp_path / "run")
    assert outcome.exit_code == 7
    assert names(tmp_path / "run") == []
    assert "ended from outside or by os._exit" in outcome.trouble


def test_too_few_steps(script: str, tmp_path: Path) -> None:
    outcome = launched([sys.executable, script, "normal", "0"], tmp_path / "run", RecordOptions(wait=40))
    assert outcome.exit_code == 2
    assert "the script made 40 steps and the first recorded one is step" in outcome.trouble
    assert names(tmp_path / "run") == []


def test_stop_after_ends_the_script_and_overwrite_replaces_old_ranks(
    script: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.json.gz").write_text("old")
    with pytest.raises(ForetraceError, match="already holds rank0"):
        Launch([sys.executable, script, "normal", "0"], tmp_path, SHORT)
    outcome = launched([sys.executable, script, "normal", "0"], tmp_path, stop_after=True, overwrite=True)
    assert outcome.exit_code == 0
    assert "done" not in capfd.readouterr().out
    assert names(tmp_path) == ["rank0.json.gz"]
    assert load(tmp_path / "rank0.json.gz")["foretrace"]["complete"]


LAUNCHER = (
    "import sys; from pathlib import Path; from foretrace.trace.autorecord.launch import Launch;"
    "from foretrace.trace.recorder import RecordOptions;"
    "options = RecordOptions(wait=1, warmup=0, active=2, skip_first=0, rehearse=False);"
    "sys.exit(Launch(sys.argv[2:], Path(sys.argv[1]), options).run().exit_code)"
)


def launcher(folder: Path, *command: str) -> subprocess.Popen[str]:
    """A process of its own that records a command, its output to be read."""
    words = [sys.executable, "-c", LAUNCHER, str(folder), *command]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def test_a_signal_to_the_launcher_reaches_the_script(script: str, tmp_path: Path) -> None:
    process = launcher(tmp_path / "run", sys.executable, script, "hang", "0")
    assert process.stdout is not None
    for line in process.stdout:
        if line == "5\n":
            process.send_signal(signal.SIGTERM)
    process.stdout.close()
    assert process.wait() == 128 + signal.SIGTERM
    assert names(tmp_path / "run") == ["rank0.json.gz"]
    assert whole_steps(tmp_path / "run") == 2


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked up in /proc")
def test_the_script_ends_with_a_launcher_that_is_killed(script: str, tmp_path: Path) -> None:
    inside = 'trap "" TERM; "$@"; true'  # a shell that would continue, between the launcher and the training
    process = launcher(tmp_path / "run", "sh", "-c", inside, "sh", sys.executable, script, "hang", "0")
    assert process.stdout is not None
    for line in process.stdout:  # ends when nobody is left who could write there
        if line == "5\n":
            family = guard.descendants(process.pid) - {process.pid}
            process.kill()
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    assert len(family) == 3  # the guard, the shell, the training
    end = time.monotonic() + 60
    while (left := [pid for pid in family if Path(f"/proc/{pid}").exists()]) and time.monotonic() < end:
        time.sleep(0.05)  # the guard ends last
    assert not left
    assert whole_steps(tmp_path / "run") == 2
    assert names(tmp_path / "run") == ["rank0.json.gz"]


def test_a_script_that_profiles_itself_goes_on_undisturbed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"{LIGHT}\n"
        "w = torch.zeros(3, requires_grad=True)\n"
        "optimizer = torch.optim.SGD([w], lr=0.1)\n"
        "with torch.profiler.profile() as p:\n"
        "    for _ in range(9):\n"
        "        w.sum().backward(); optimizer.step()\n"
        "print(len(p.events()) > 0)\n"
    )
    outcome = launched([sys.executable, str(script)], tmp_path / "run")
    assert outcome.exit_code == 2
    assert "another PyTorch profiler is running" in outcome.trouble
    printed = capfd.readouterr()
    assert printed.out == "True\n"
    assert "gives up recording, the script continues" in printed.err


@pytest.mark.parametrize(
    ("program", "sentence"),
    [(LIGHT, "made 0 optimizer steps"), ("print()", "no Python process of the command imported")],
    ids=["no optimizer", "no PyTorch"],
)
def test_a_program_without_steps(tmp_path: Path, program: str, sentence: str) -> None:
    outcome = launched([sys.executable, "-c", program], tmp_path / "run")
    assert outcome.exit_code == 2
    assert sentence in outcome.trouble
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ([], "nothing to run"),
        (["python", "-I", "train.py"], "python -I ignores"),
        (["/usr/bin/python3.11", "-sE", "train.py"], "python -E ignores"),
        (["python3", "-u", "-S", "-m", "train"], "python -S ignores"),
    ],
)
def test_commands_that_cannot_be_recorded_are_refused(tmp_path: Path, command: list[str], sentence: str) -> None:
    with pytest.raises(ForetraceError, match=sentence):
        Launch(command, tmp_path, SHORT)


def test_flags_of_the_script_are_not_flags_of_python(tmp_path: Path) -> None:
    for command in (
        ["python", "train.py", "-I"],
        ["python", "-m", "train", "-S"],
        ["python", "-W", "ignore"],
    ):
        Launch(command, tmp_path, SHORT)


def test_an_isolated_interpreter_line_is_found(tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text("#!/usr/bin/env python3 -E\n")
    tool.chmod(0o755)
    with pytest.raises(ForetraceError, match="python -E ignores"):
        Launch([str(tool)], tmp_path, SHORT)


def test_a_command_that_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(ForetraceError, match=r"train\.py cannot be started: .*write `python` before it"):
        launched(["train.py"], tmp_path)


def test_only_the_standard_library_enters_the_script() -> None:
    code = (
        "import sys, foretrace.trace.autorecord.session;"
        "print(*{'numpy', 'msgspec', 'torch', 'typer', 'rich', 'numba'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
