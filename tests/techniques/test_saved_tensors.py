"""Which tensors autograd saves, as the table says and hooks see it; compression and offloading predicted and done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

import pytest

pytest.importorskip("torch")
import torch
from torch import nn

from foretrace.cost.operators.calibration import Calibration
from foretrace.errors import NotApplicableError
from foretrace.graph.taskgraph import TaskGraph
from foretrace.simulate.timeline import simulate
from foretrace.techniques.base import Technique
from foretrace.techniques.memory.activation_compression import ActivationCompression
from foretrace.techniques.memory.activation_offload import ActivationOffload
from foretrace.techniques.memory.saved import find_saved
from foretrace.testing import TechniqueConformance, recorded
from foretrace.training.batches import Resident
from foretrace.training.saved_tensors import Disk, Keeping, Narrow
from foretrace.training.training import Training

LEAST = 16_384
_TYPES = {torch.float32: "float", torch.int64: "long int", torch.uint8: "unsigned char"}


class Attention(nn.Module):
    """One block of a decoder: layer norms, attention, dropout, two linear layers with GELU."""

    def __init__(self, width: int = 64, words: int = 300) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.head = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.Linear(width, words),
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.words(x)
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(a))
        made: torch.Tensor = self.head(x + self.down(nn.functional.gelu(self.up(self.norms[1](x)))))
        return made.flatten(0, 1)


class Recurrent(nn.Module):
    """An LSTM between an embedding and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.head = nn.Embedding(200, 48), nn.LSTM(48, 64, 2), nn.Linear(64, 200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.lstm(self.words(x))[0])
        return made.flatten(0, 1)


def convolutions() -> nn.Module:
    """Convolutions with batch norm and in-place ReLU, pooling, and linear layers with other activations."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.ReLU6(inplace=True)),
        *(nn.Flatten(), nn.Linear(2048, 256), nn.SiLU(), nn.Linear(256, 256), nn.Tanh(), nn.Dropout(0.2)),
        *(nn.Linear(256, 10), nn.LogSoftmax(-1)),
    )


@lru_cache
def _made(name: str) -> Training:
    torch.manual_seed(0)
    model = {"cnn": convolutions, "attention": Attention, "lstm": Recurrent}[name]()
    size = {"cnn": (16, 3, 32, 32), "attention": (8, 64), "lstm": (20, 16)}[name]
    x = torch.randn(size) if name == "cnn" else torch.randint(0, 200, size)
    batch = (x, torch.randint(0, 10, (16,)) if name == "cnn" else x.flatten())
    return Training(
        name=name,
        model=model,
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.05),),
        loader=Resident(made=(batch,), batch_size=len(x), source=[batch]),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )


@lru_cache
def _graph(name: str) -> TaskGraph:
    return recorded(_made(name).copied())


def _really_saved(training: Training) -> list[tuple[int, str]]:
    """(elements, type) of everything that a forward pass stores, each storage once."""
    seen: list[tuple[int, str]] = []

    class Watching(Disk):
        def store(self, flat: torch.Tensor) -> Any:
            seen.append((flat.numel(), _TYPES[flat.dtype]))
            return super().store(flat)

    changed = training.copied()
    keeping = Keeping(Watching(), changed.model.parameters(), LEAST)
    list(replace(changed, around_forward=(keeping,)).steps(1))
    assert not keeping.kept, "nothing stays after the backward pass"
    return seen


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["cnn", "attention", "lstm"])
def test_what_is_saved_is_what_hooks_see(name: str) -> None:
    graph = _graph(name)
    found = [each for each in find_saved(graph).tensors if graph.step[each.row] == 1 and each.nbytes >= LEAST]
    real = _really_saved(_made(name))
    workspace = [(each.numel, each.dtype) for each in found if each.dtype == "unsigned char"]
    told = Counter((each.numel, each.dtype) for each in found if each.dtype != "unsigned char")
    assert told == Counter(each for each in real if each[1] != "unsigned char")
    for (numel, _), (seen, _) in zip(workspace, [each for each in real if each[1] == "unsigned char"], strict=True):
        assert numel == pytest.approx(seen, rel=0.1), "oneDNN's workspace is estimated"
    assert all(each.use > each.row for each in found)


@pytest.mark.parametrize("name", ["cnn", "attention", "lstm"])
def test_a_file_changes_nothing(name: str) -> None:
    training = _made(name)
    torch.manual_seed(1)
    plain = [float(loss) for loss in training.copied().steps(4)]
    for technique in (ActivationOffload(min_bytes=4096), ActivationOffload(to="disk", min_bytes=0)):
        torch.manual_seed(1)
        assert [float(loss) for loss in technique.apply(training).steps(4)] == plain


@pytest.mark.parametrize("format", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["cnn", "attention", "lstm"])
def test_compression_rounds_what_waits_and_nothing_else(name: str, format: str) -> None:
    plain, rounded = _made(name).copied(), ActivationCompression(format=format, min_bytes=1024).apply(_made(name))
    torch.manual_seed(1)
    expected = [float(loss) for loss in plain.steps(3)]
    torch.manual_seed(1)
    found = [float(loss) for loss in rounded.steps(3)]
    assert found[0] == expected[0], "the forward pass is the same"
    assert found == pytest.approx(expected, rel=2e-2)
    pairs = list(zip(plain.model.parameters(), rounded.model.parameters(), strict=True))
    assert not all(torch.equal(left, right) for left, right in pairs), "the backward pass is not"


def test_a_copy_of_a_changed_training_knows_its_own_parameters() -> None:
    twice = ActivationOffload(min_bytes=0).apply(_made("attention")).copied()
    assert len(list(twice.steps(2))) == 2
    (keeping,) = twice.around_forward
    assert isinstance(keeping, Keeping)
    own = {id(each) for each in twice.model.parameters()}
    assert {id(each) for each in keeping.parameters} == own


def test_a_tensor_saved_twice_is_stored_once_and_views_of_it_too() -> None:
    keeping = Keeping(Narrow("bfloat16"), (), 0)
    x = torch.randn(8, 6)
    first, second, third = keeping.pack(x), keeping.pack(x.t()), keeping.pack(x.clone())
    assert first[0] is second[0] and third[0] is not first[0]
    assert torch.equal(keeping.unpack(second), x.bfloat16().float().t())
    assert torch.equal(keeping.unpack(first), x.bfloat16().float())
    x.add_(1)
    assert keeping.pack(x)[0] is not first[0], "changed in place: another tensor"
    half = keeping.pack(torch.randn(8, 6)[:, :3])
    assert keeping.unpack(half).shape == (8, 3)


def test_places_in_the_file_are_used_again() -> None:
    disk = Disk()
    for _ in range(3):
        places = [disk.store(torch.full((1000,), float(i))) for i in range(4)]
        assert [float(disk.restore(each)[0]) for each in places] == [0.0, 1.0, 2.0, 3.0]
        del places
    assert disk.end == 4 * 4000


@pytest.mark.parametrize(
    "technique", [ActivationCompression(min_bytes=LEAST), ActivationOffload(min_bytes=LEAST, to="disk")]
)
def test_measured_times_are_what_is_inserted(technique: Technique) -> None:
    graph = _graph("cnn")
    wanted = technique.wants(graph)
    seconds = {each.key: 1e-3 for each in wanted} | {wanted[-1].key: 1e-3, wanted[-2].key: 1e-3}
    before, after = simulate(graph), technique.predict(Calibration().extended(seconds).on(graph))
    stored = sum(1 for each in find_saved(graph).tensors if each.nbytes >= LEAST and graph.step[each.row] == 1)
    if isinstance(technique, ActivationCompression):
        stored -= 1  # the indices of the pooling
    assert simulate(after).step_time_s - before.step_time_s == pytest.approx(2e-3 * stored, rel=0.02)
    assert "bytes) less between forward and backward" in after.changes[-1].what
    assert {each.flag for each in technique.uncertain(Calibration().extended(seconds).on(graph))} == {"measured"}


def test_refusals() -> None:
    with pytest.raises(NotApplicableError, match="lie in host memory already"):
        ActivationOffload(to="host").predict(_graph("cnn"))
    with pytest.raises(NotApplicableError, match="lie in host memory already"):
        ActivationOffload(to="host").apply(_made("cnn"))
    with pytest.raises(NotApplicableError, match="give a smaller min_bytes"):
        ActivationCompression(min_bytes=1 << 40).predict(_graph("cnn"))
    with pytest.raises(NotApplicableError, match="prefetch must be 1 or more, got 0"):
        ActivationOffload(prefetch=0).predict(_graph("cnn"))


class TestCompression(TechniqueConformance):
    technique: ClassVar[Technique] = ActivationCompression(min_bytes=LEAST)


class TestOffload(TechniqueConformance):
    technique: ClassVar[Technique] = ActivationOffload(min_bytes=LEAST)
