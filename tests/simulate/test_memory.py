"""What holds the memory: known answers, PyTorch's own memory profiler, and the live objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from foretrace.graph.host import host_spans
from foretrace.simulate.memory import CATEGORIES, find_blocks, split, static_bytes
from foretrace.trace.read import read
from foretrace.trace.recorder import record
from foretrace.trace.trace import Category, Trace
from foretrace.training.training import Training
from tests.kineto_files import MAIN, Recording

BACKWARD = "autograd::engine::evaluate_function: MmBackward0"


class Allocator:
    """Writes `[memory]` instants of one device into a recording."""

    def __init__(self, recording: Recording, *, kind: int = 0, total: int = 0) -> None:
        self.recording, self.kind, self.total = recording, kind, total
        self.living: dict[int, int] = {}

    def event(self, ts: float, address: int, size: int) -> None:
        self.total += size
        args = {"Bytes": size, "Addr": address, "Total Allocated": self.total, "Device Type": self.kind}
        args["Device Id"] = 0 if self.kind else -1
        self.recording.events.append(
            {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]", "pid": 10, "tid": MAIN, "ts": ts,
             "args": args}
        )  # fmt: skip

    def take(self, ts: float, address: int, size: int) -> None:
        self.living[address] = size
        self.event(ts, address, size)

    def free(self, ts: float, address: int) -> None:
        self.event(ts, address, -self.living.pop(address))


def small(*, kind: int = 0, total: int = 0) -> Trace:
    """Two steps: an input, an activation, a workspace, an activation's gradient, a gradient, each of its own size."""
    recording = Recording()
    memory = Allocator(recording, kind=kind, total=total)
    for step in range(2):
        at = 1000.0 * step
        recording.note(f"ProfilerStep#{step}", at, 1000)
        recording.note("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at + 10, 80)
        recording.op("aten::stack", at + 20, 60)
        memory.take(at + 30, 1, 1_000)
        recording.op("aten::mm", at + 100, 200, **{"Sequence number": 5, "Fwd thread id": 0})
        memory.take(at + 110, 2, 20_000)
        memory.take(at + 120, 3, 300_000)  # workspace
        memory.free(at + 280, 3)
        recording.op(BACKWARD, at + 400, 200, **{"Sequence number": 5, "Fwd thread id": 1})
        recording.op("aten::mm", at + 410, 100)
        memory.take(at + 420, 4, 4_000)  # gradient: as large as the parameter
        memory.take(at + 430, 5, 70_000)  # gradient of an activation
        recording.op("autograd::engine::evaluate_function: ReluBackward0", at + 610, 40)
        memory.free(at + 640, 5)
        memory.free(at + 645, 2)
        recording.note("Optimizer.step#SGD.step", at + 700, 200)
        recording.op("aten::add_", at + 710, 100)
        memory.take(at + 720, 6, 4_000)
        memory.free(at + 800, 6)
        recording.note("Optimizer.zero_grad#SGD.zero_grad", at + 910, 50)
        memory.free(at + 920, 4)
        memory.free(at + 990, 1)
    return recording.trace()


FACTS: dict[str, Any] = {
    "parameters": [{"numel": 1000, "dtype": "float32", "trained": True, "optimizer": 0}],
    "optimizers": [{"class": "AdamW", "settings": {}}],
}


def test_every_category_of_a_small_recording() -> None:
    found = split(small(), facts=FACTS)
    assert found is not None and found.device == "cpu"
    sizes = {"weights": 4_000, "optimizer state": 8_000, "input": 1_000, "activations": 20_000, "workspace": 300_000}
    assert found.at_peak_bytes == {name: sizes.get(name, 0) for name in CATEGORIES}
    assert found.peak_bytes == 333_000
    assert (found.peak_phase, found.peak_operator, found.step) == ("forward", "aten::mm", 0)
    assert found.allocations_per_step == 6
    assert max(found.over_time_bytes["gradients"]) == 4_000
    assert max(found.over_time_bytes["activation gradients"]) == 70_000
    assert max(found.over_time_bytes["other"]) == 0
    assert all(sum(values) <= found.peak_bytes for values in zip(*found.over_time_bytes.values(), strict=True))


def test_an_accelerator_tells_what_was_there_before() -> None:
    found = split(small(kind=1, total=50_000), facts=FACTS)
    assert found is not None and found.device == "cuda:0"
    assert found.peak_bytes == 50_000 + 321_000  # the allocator's own total
    assert found.at_peak_bytes["other"] == 50_000 - 4_000 - 8_000


def test_recordings_without_allocations_or_addresses_are_not_split() -> None:
    recording = Recording()
    recording.op("aten::mm", 0, 10)
    assert split(recording.trace()) is None
    memory = Allocator(recording)
    memory.take(5, 1, 64)
    del recording.events[-1]["args"]["Addr"]
    assert split(recording.trace()) is None


def test_state_follows_from_the_class_where_it_was_not_measured() -> None:
    def state(kind: str, **settings: Any) -> int | None:
        return static_bytes({**FACTS, "optimizers": [{"class": kind, "settings": settings}]}).state

    assert (state("SGD"), state("SGD", momentum=0.9), state("AdamW", amsgrad=True)) == (0, 4_000, 12_000)
    assert state("Unknown") is None
    assert static_bytes({"parameters": []}).weights is None


# --- against PyTorch -------------------------------------------------------------------------------------------------


@pytest.fixture
def one_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def cnn() -> tuple[Any, Any, Callable[[], Any]]:
    import torch
    from torch import nn

    parts = [nn.Conv2d(3, 32, 3, 1, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64)]
    parts += [nn.ReLU(), nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*parts, nn.Linear(64, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), lambda: torch.randn(16, 3, 32, 32)


def transformer() -> tuple[Any, Any, Callable[[], Any]]:
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return model, torch.optim.AdamW(model.parameters()), lambda: torch.randn(4, 64, 128)


def facts_of(model: Any, optimizer: Any) -> dict[str, Any]:
    state = (value for entry in optimizer.state.values() for value in entry.values() if hasattr(value, "nbytes"))
    return {
        "parameters": [
            {"numel": p.numel(), "dtype": "float32", "trained": True, "optimizer": 0} for p in model.parameters()
        ],
        "buffer_bytes": sum(buffer.nbytes for buffer in model.buffers()),
        "optimizers": [{"class": type(optimizer).__name__, "state_bytes": sum(value.nbytes for value in state)}],
    }


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("make", [cnn, transformer])
def test_categories_at_the_peak_are_those_of_pytorchs_memory_timeline(
    make: Callable[[], tuple[Any, Any, Callable[[], Any]]], tmp_path: Path
) -> None:
    """PyTorch finds them by data flow between tensors, we by phase and lifetime."""
    import torch
    from torch.profiler import _memory_profiler as peer

    model, optimizer, batch = make()

    def step() -> None:
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    with torch.profiler.profile(record_shapes=True, profile_memory=True, with_stack=True) as profiler:
        step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace, facts = read(tmp_path / "trace.json"), facts_of(model, optimizer)
    _, rows = peer.MemoryProfileTimeline(profiler._memory_profile())._coalesce_timeline("cpu")
    sizes = np.array(rows)  # columns: the total, then one per category
    at = sizes[int(sizes.sum(axis=1).argmax())].tolist()
    theirs = {category.name: at[number + 1] for category, number in peer._CATEGORY_TO_INDEX.items() if category}

    found = split(trace, facts=facts)
    assert found is not None
    ours = found.at_peak_bytes
    assert found.peak_bytes == pytest.approx(sum(at), rel=0.001)
    assert ours["weights"] == theirs["PARAMETER"] + facts["buffer_bytes"]  # buffers are inputs to PyTorch
    assert ours["optimizer state"] == pytest.approx(theirs["OPTIMIZER_STATE"], rel=0.001)
    assert ours["gradients"] == theirs["GRADIENT"]
    inputs = theirs["INPUT"] - facts["buffer_bytes"]  # without a loader, batches are made in the forward pass
    assert ours["activations"] == pytest.approx(theirs["ACTIVATION"] + inputs, rel=0.01)
    assert ours["activation gradients"] == pytest.approx(theirs["AUTOGRAD_DETAIL"], rel=0.01)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("make", [cnn, transformer])
def test_a_recording_holds_the_live_objects_bytes(
    make: Callable[[], tuple[Any, Any, Callable[[], Any]]], tmp_path: Path
) -> None:
    import torch

    model, optimizer, batch = make()
    loader: Any = torch.utils.data.DataLoader(cast("Any", torch.cat([batch() for _ in range(2)])), batch_size=4)
    training = Training(
        name="live",
        model=model,
        optimizers=(optimizer,),
        loader=loader,
        loss=lambda model, batch: model(batch).square().mean(),
    )
    with record(tmp_path, wait=1, active=2, skip_first=1, rehearse=False) as recorder:
        for _ in training.steps():
            recorder.step()
            if recorder.over:
                break
    trace = read(tmp_path)
    found = split(trace)
    assert found is not None
    live = facts_of(model, optimizer)
    weights = sum(p.nbytes for p in model.parameters())
    assert found.at_peak_bytes["weights"] == weights + live["buffer_bytes"]
    assert found.at_peak_bytes["optimizer state"] == live["optimizers"][0]["state_bytes"]
    blocks = find_blocks(trace, host_spans(trace), static_bytes(trace.ranks[0].recording))
    assert blocks is not None
    gradients = blocks.category == CATEGORIES.index("gradients")
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert blocks.held()[:, CATEGORIES.index("gradients")].max() == trained
    assert blocks.nbytes[gradients].sum() == 2 * trained  # both steps
    assert found.over_time_bytes["input"] and max(found.over_time_bytes["input"]) > 0
    # The blocks account for every byte that the allocator itself counts.
    events = np.flatnonzero(trace.category == Category.MEMORY)
    total = trace.wait_correlation[events]
    held = blocks.held().sum(axis=1)
    assert np.array_equal(np.diff(held), np.diff(total))
