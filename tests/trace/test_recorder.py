"""`foretrace.record` around real training loops in this process."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from foretrace.errors import ForetraceError, MissingExtraError, TraceError
from foretrace.hardware.processor import instruction_sets
from foretrace.trace.recorder import RecordOptions, record
from foretrace.trace.recording_file import write_recording

torch: Any = pytest.importorskip("torch")

SHORT: dict[str, Any] = {"wait": 1, "warmup": 0, "active": 2, "skip_first": 1, "rehearse": False}


def train(recorder: Any, steps: int) -> None:
    """A model with named layers, a loss module and a data loader; `recorder.step()` after every step."""
    model = torch.nn.Sequential()
    model.add_module("first", torch.nn.Linear(8, 16))
    model.add_module("relu", torch.nn.ReLU())
    model.add_module("last", torch.nn.Linear(16, 4))
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.utils.data.TensorDataset(torch.randn(4 * steps, 8), torch.zeros(4 * steps, dtype=torch.long))
    for x, y in torch.utils.data.DataLoader(data, batch_size=4):
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        recorder.step()


def load(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The profiler's own part of a recording, and ours."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    return trace, trace.pop("foretrace")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """One complete recording with every option on."""
    folder = tmp_path_factory.mktemp("recording") / "run"
    with record(folder, wait=2, warmup=1, active=3, skip_first=1) as r:
        train(r, 20)
    assert r.path == folder / "rank0.json.gz"
    assert [f.name for f in folder.iterdir()] == ["rank0.json.gz"]
    return load(r.path)


def test_the_file_is_the_profilers_trace_of_the_whole_steps(
    recording: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    trace, ours = recording
    names = [e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
    assert {f"ProfilerStep#{step}" for step in ours["whole_steps"]} <= set(names)
    assert sum(n.startswith("Optimizer.step") for n in names) >= 3
    everything = [e["name"] for e in trace["traceEvents"]]
    assert everything.count("nn.Module: Linear_0") >= 3
    assert any(n == "[memory]" for n in everything)
    assert any("Input Dims" in e.get("args", {}) for e in trace["traceEvents"])
    assert trace["traceName"] == "rank0.json.gz"
    assert trace.get("host_name", "") == ""


def test_steps_walk_through_the_phases(recording: tuple[dict[str, Any], dict[str, Any]]) -> None:
    _, ours = recording
    phases = ["skip"] + ["untouched"] * 2 + ["rehearse"] * 4 + ["observe"]
    phases += ["before"] * 2 + ["warmup"] + ["active"] * 3 + ["after"] * 2
    assert [s["phase"] for s in ours["steps"]] == phases
    assert ours["whole_steps"] == [s["step"] for s in ours["steps"] if s["phase"] == "active"]
    assert ours["complete"]
    assert all(s["wall_ns"] > 0 and s["cpu_ns"] > 0 and s["batches"] == 1 for s in ours["steps"])
    assert set(ours["overhead"]) == {"unprofiled", "profiled", "untouched"}
    assert ours["overhead"]["profiled"]["wall_ns"] > 0


def test_the_model_is_described(recording: tuple[dict[str, Any], dict[str, Any]]) -> None:
    trace, ours = recording
    modules = ours["modules"]
    assert [(m["name"], m["class"], m["parameters"]) for m in modules[:4]] == [
        ("", "Sequential", 0),
        ("first", "Linear", 144),
        ("relu", "ReLU", 0),
        ("last", "Linear", 68),
    ]
    called = [modules[index]["class"] for index in ours["module_calls"]]
    assert called == ["Sequential", "Linear", "ReLU", "Linear", "CrossEntropyLoss"]
    # to the next one's begin: PyTorch 2.5 ends the event of a step early
    first, after = (
        next(e["ts"] for e in trace["traceEvents"] if e["name"] == f"ProfilerStep#{step}")
        for step in ours["whole_steps"][:2]
    )
    inside = [e for e in trace["traceEvents"] if "dur" in e and first <= e["ts"] < after]
    events = sorted((e for e in inside if e["name"].startswith("nn.Module: ")), key=lambda e: float(e["ts"]))
    assert [e["name"].split()[1].rpartition("_")[0] for e in events] == called  # so names can be given to events
    names = [p["name"] for p in ours["parameters"]]
    assert names == ["first.weight", "first.bias", "last.weight", "last.bias"]
    assert ours["parameters"][0] == {
        "root": 0,
        "name": "first.weight",
        "shape": [16, 8],
        "dtype": "float32",
        "numel": 128,
        "device": "cpu",
        "trained": True,
        "optimizer": 0,
        "group": 0,
    }
    ready = [names[index] for index, _ in ours["gradient_order"]]
    assert sorted(ready) == sorted(names)
    assert {ready[0], ready[1]} == {"last.weight", "last.bias"}  # backward begins at the end
    assert ours["missing"] == []


def test_optimizer_loader_and_surroundings_are_described(
    recording: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    _, ours = recording
    (optimizer,) = ours["optimizers"]
    assert optimizer["class"] == "AdamW"
    assert optimizer["settings"]["fused"] in (None, False)
    assert "lr" not in optimizer["settings"]
    assert optimizer["tensors"] == {"float32": {"count": 4, "elements": 212}}
    assert optimizer["steps"] == len(ours["steps"])
    (loader,) = ours["loaders"]
    assert (loader["dataset"], loader["batch_size"], loader["num_workers"]) == ("TensorDataset", 4, 0)
    assert ours["threads"]["intra_op"] == torch.get_num_threads()
    assert ours["torch"] == torch.__version__
    assert ours["machine"]["cores"] >= ours["machine"]["usable_cores"] > 0
    sets = instruction_sets()
    assert ours["machine"]["instruction_sets"] == (None if sets is None else list(sets))
    assert (ours["rank"], ours["world_size"], ours["backend"]) == (0, 1, "")
    assert len(ours["load"]["end"]) == 3
    assert ours["memory"]["peak_rss_bytes"] > 0


def test_nothing_of_the_recorder_stays_behind(tmp_path: Path) -> None:
    from torch.nn.modules import module
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    before = dataloader._BaseDataLoaderIter.__next__
    with record(tmp_path, **SHORT) as r:
        assert dataloader._BaseDataLoaderIter.__next__ is not before
        train(r, 9)
        r.step()  # after the end: nothing happens
    assert dataloader._BaseDataLoaderIter.__next__ is before
    assert not module._global_forward_pre_hooks
    assert not optimizer._global_optimizer_post_hooks


def test_an_exception_keeps_the_whole_steps_and_passes_through(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), record(tmp_path, **{**SHORT, "active": 9}) as r:
        train(r, 6)  # skip, observe, before, 3 of 9 active
        raise ZeroDivisionError
    assert r.path is not None
    trace, ours = load(r.path)
    assert len(ours["whole_steps"]) == 3
    assert not ours["complete"]
    recorded = {e["name"] for e in trace["traceEvents"] if e["name"].startswith("ProfilerStep")}
    assert {f"ProfilerStep#{step}" for step in ours["whole_steps"]} <= recorded


def test_too_few_steps_write_nothing_and_say_how_many_are_needed(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="made 2 steps and the first recorded one is step 4"):  # noqa: SIM117
        with record(tmp_path / "run", **SHORT) as r:
            train(r, 2)
    assert r.path is None
    assert not (tmp_path / "run").exists()


def test_a_loop_without_optimizer_or_model(tmp_path: Path) -> None:
    with record(tmp_path, **SHORT, shapes=False, memory=False, modules=False) as r:
        for _ in range(9):
            torch.ones(4).sum()
            r.step()
    assert r.path is not None
    trace, ours = load(r.path)
    assert ours["optimizers"] == []
    assert not any("Input Dims" in e.get("args", {}) for e in trace["traceEvents"])


def test_several_models_and_parameters_that_no_module_owns(tmp_path: Path) -> None:
    models = [torch.nn.Linear(3, 3) for _ in range(2)]
    loose = torch.zeros(5, requires_grad=True)
    optimizers = [
        torch.optim.SGD(models[1].parameters(), lr=0.1),
        torch.optim.SGD([*models[0].parameters(), loose], lr=0.1),
    ]
    with record(tmp_path, **SHORT) as r:
        for _ in range(9):
            (models[0](models[1](torch.ones(1, 3))).sum() + loose.sum()).backward()
            for optimizer in optimizers:
                optimizer.step()
            r.step()
    assert r.path is not None
    _, ours = load(r.path)
    assert [(p["root"], p["name"], p["optimizer"]) for p in ours["parameters"]] == [
        (0, "weight", 0),
        (0, "bias", 0),
        (1, "weight", 1),
        (1, "bias", 1),
        (-1, "", 1),
    ]
    assert [o["steps"] for o in ours["optimizers"]] == [6, 6]


def test_a_second_profiler_is_refused(tmp_path: Path) -> None:
    with (
        torch.profiler.profile(),
        pytest.raises(TraceError, match="another PyTorch profiler"),
        record(tmp_path, **SHORT) as r,
    ):
        train(r, 9)
    assert list(tmp_path.iterdir()) == []


def test_device_times_come_from_events_around_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:  # one tick per event, a quarter of a millisecond each
        made = 0

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            Event.made += 1
            self.tick = Event.made

        def elapsed_time(self, other: Event) -> float:
            return 0.25 * (other.tick - self.tick)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    with record(tmp_path, **SHORT) as r:
        for _ in range(9):
            r.step()
    assert r.path is not None
    _, ours = load(r.path)
    assert [s["device_ns"] for s in ours["steps"]] == [250_000] * 6
    assert ours["overhead"]["profiled"]["device_ns"] == 250_000


@pytest.mark.parametrize("name", ["wait", "warmup", "active", "skip_first"])
def test_counts_that_cannot_work_are_refused(name: str) -> None:
    wrong: dict[str, Any] = {name: -1}
    with pytest.raises(ForetraceError, match=f"{name}=-1"):
        RecordOptions(**wrong)


def test_without_pytorch_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"pip install \"foretrace\[torch\]\""):
        record(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(TraceError, match=r"run/rank0\.json\.gz cannot be written"):
        write_recording(lambda name: None, tmp_path / "run" / "rank0.json.gz", {})


@pytest.mark.parametrize("padding", [0, 5000, 1 << 20, (1 << 20) + 10, 3 << 20])
def test_the_key_is_added_whatever_the_length(tmp_path: Path, padding: int) -> None:
    original = {"host_name": "secret", "traceEvents": ["x" * padding], "traceName": '/tmp/a \\"b\\".json'}
    path = tmp_path / "rank0.json.gz"
    write_recording(lambda name: Path(name).write_text(json.dumps(original)), path, {"a": [1, None, "é"]})
    trace, ours = load(path)
    assert ours == {"a": [1, None, "é"]}
    assert trace == {"host_name": "", "traceEvents": original["traceEvents"], "traceName": "rank0.json.gz"}


@pytest.mark.parametrize("text", ["", "[1, 2]", '{"traceEvents": [', '{"a": 1} trailing'])
def test_an_export_that_was_cut_leaves_nothing(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="does not end with a JSON object"):
        write_recording(lambda name: Path(name).write_text(text), tmp_path / "rank0.json.gz", {})
    assert list(tmp_path.iterdir()) == []
