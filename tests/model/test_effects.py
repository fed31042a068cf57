"""What a step does to its calls: constants from times, roots of zeros, memory that is faulted in again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from foretrace.cost.operators.operator import Operator
from foretrace.graph.taskgraph import Phase
from foretrace.model import effects
from foretrace.model.capture.capture import capture
from foretrace.model.effects import KINDS, SIZES, StepEffects, denormals, faulted, zeros
from foretrace.model.memory.reuse import reuse
from foretrace.model.operator_graph import OperatorGraph
from foretrace.training.training import Training
from tests.model.test_reuse import graph

MIB = 1 << 20


def times(root_s: float = 0.0, turned: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)) -> dict[str, float]:
    """Of a machine where a call takes 1 µs, its code 1 µs per 16 MiB gone over, and data 10 µs per 16 MiB."""
    found = {}
    for size in (0, *SIZES):
        cold = 1e-6 * size / (16 * MIB)
        found[effects._key("data", size)] = 20e-6 + 11 * cold
        found[effects._key("layers", size)] = 1e-3 + 8 * 14 * cold  # twice the code of a layer's seven calls
        for kind in KINDS:
            found[effects._key(kind, size)] = found[effects._key(f"{kind} at once", size)] = 1e-6 + cold
    for m, ratio in zip(effects._ROWS, turned, strict=True):
        found |= {effects._key("product of rows", m): 1e-5}
        found |= {effects._key("product of rows, transposed", m): ratio * 1e-5}
    found |= {effects._key("roots"): 1e-3, effects._key("roots of zeros"): 1e-3 + effects._ELEMENTS * root_s}
    return found | {effects._key("memory"): 5e-3, effects._key("new memory"): 5e-3 + 1e-3 * 33}


def test_constants_are_those_of_the_times() -> None:
    found = StepEffects.of(times(root_s=2e-9))
    assert found is not None
    assert found.code["plain"] == pytest.approx([each / (16 * MIB) * 1e-6 for each in SIZES])
    assert found.shared == pytest.approx(0.0)
    assert found.framework == pytest.approx(2.0)
    assert found.root_s == pytest.approx(2e-9)
    assert found.fault_s == pytest.approx(1e-3 * 33 / 32 / MIB)
    assert found.far_share(np.array([0.0, 32.0 * MIB, 1e12])) == pytest.approx([0.0, 0.5, 1.0])
    assert StepEffects.of({"aten::add []": 1.0}) is None


def test_code_is_cold_after_others_touched_much() -> None:
    found = StepEffects.of(times())
    assert found is not None
    small = graph([4096, 4096], [((0,), (1,)), ((1,), (0,))])
    large = graph([32 * MIB, 32 * MIB], [((0,), (1,)), ((1,), (0,))])
    assert found.beyond(small, reuse(small)).sum() < 1e-7
    # Each call: 64 MiB since an addition began the last time, at 1 µs per 16 MiB, twice for the framework.
    assert found.beyond(large, reuse(large)) == pytest.approx([8e-6, 8e-6])


class Looked(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table, self.tied = nn.Embedding(1000, 8), tied

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(words)
        return found @ self.table.weight.t() if self.tied else found


class Loader:
    batch_size = 50

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter([torch.randint(1000, (50,))])


@pytest.mark.parametrize("tied", [False, True])
def test_rows_that_no_batch_used_have_zero_moments(tied: bool) -> None:
    model = Looked(tied)
    training = Training(
        name="looked", model=model, optimizers=(torch.optim.Adam(model.parameters()),), loader=Loader(),
        loss=lambda model, batch: functional.softplus(model(batch)).sum(),
    )  # fmt: skip
    found = zeros(capture(training, like="cpu")).sum()
    assert found == (0.0 if tied else pytest.approx(8 * 1000 * 0.999**50))


def test_memory_is_faulted_in_again_where_the_allocator_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in effects._KEEPING:
        monkeypatch.delenv(name, raising=False)
    # One block is mapped whenever it is asked for; twenty of 8 MiB come and go, and of these the heap keeps two.
    sizes = [40 * MIB] + [8 * MIB] * 20
    made = graph(sizes, [((), (i,)) for i in range(len(sizes))] + [((), ())])
    last = len(made.nodes) - 1
    made = OperatorGraph(
        name="test", nodes=made.nodes, tensors=made.tensors,
        storages=tuple(replace(each, dies=last) for each in made.storages),
    )  # fmt: skip
    found = faulted(made)
    assert found[0] == 40 * MIB and faulted(made, {0})[0] == 0.0
    assert found[1:].sum() == pytest.approx(8 * MIB * 18, abs=8 * MIB)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(1 << 32))
    assert faulted(made).sum() == 40 * MIB


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) @ torch.ones(16, 4)
        return found


def test_products_with_a_transposed_operand_take_longer_where_rows_are_few() -> None:
    model = Turned()
    training = Training(
        name="turned", model=model, optimizers=(torch.optim.SGD(model.parameters()),), loader=Loader(),
        loss=lambda model, batch: model(torch.ones(len(batch), 8)).sum(),
    )  # fmt: skip
    made = capture(training, like="cpu")
    found, plain = StepEffects.of(times(turned=(2.0, 1.5, 1.0, 1.0))), StepEffects.of(times())
    assert found is not None and plain is not None
    share = found.turning(made)
    forward = [(node.op, share[i]) for i, node in enumerate(made.nodes) if node.phase == Phase.FORWARD]
    products = {op: more for op, more in forward if more > 0}
    assert list(products) == ["aten::addmm"]
    assert 0.0 < products["aten::addmm"] < 0.5  # of 50 rows, between 16 and 64
    assert not plain.turning(made).any()


def test_narrow_products_with_a_transposed_operand_take_longer_with_more_rows_too() -> None:
    narrow = {
        effects._key(f"{effects._NARROW_PRODUCT}{how}", m): times * 1e-5
        for m in effects._NARROW_ROWS for how, times in (("", 1.0), (", transposed", 1.4))
    }  # fmt: skip
    found, plain = StepEffects.of(times() | narrow), StepEffects.of(times())
    assert found is not None and plain is not None
    for width, more in ((16, 0.4), (128, 0.4), (362, 0.2), (1024, 0.0)):
        model = nn.Linear(8, width)
        training = Training(
            name="narrow", model=model, optimizers=(torch.optim.SGD(model.parameters()),), loader=Loader(),
            loss=lambda model, batch: model(torch.ones(len(batch), 8)).sum(),
        )  # fmt: skip
        made = capture(training, like="cpu")
        assert found.turning(made).max() == pytest.approx(more, abs=1e-3)
        assert not plain.turning(made).any()


class Pictures:
    batch_size = 50

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter([torch.tensor([[0.0, 1.0, 95.0, 200.0, 1.0, 1.0, 1.0, 1.0]]).repeat(50, 1)])


def drawn(loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> OperatorGraph:
    """Return the captured step of a linear layer with this loss."""
    model = nn.Linear(8, 4)
    return capture(
        Training(name="pictures", model=model, optimizers=(torch.optim.SGD(model.parameters()),), loader=Pictures(),
                 loss=loss), like="cpu"
    )  # fmt: skip


def test_the_batch_says_how_many_denormal_numbers_products_read() -> None:
    made = drawn(lambda model, batch: model(torch.exp(-batch)).sum())
    found = {node.op: count for node, count in zip(made.nodes, denormals(made), strict=True) if count}
    assert found["aten::exp"] == 50  # one of eight numbers, of fifty rows
    assert found["aten::addmm"] == pytest.approx(50 * 8 / 8)  # each once, for the four outputs in one vector
    assert found.keys() == {"aten::exp", "aten::addmm", "aten::mm"}
    plain = drawn(lambda model, batch: model(-batch).sum())
    assert not denormals(plain).any()


def test_denormal_numbers_of_what_the_batch_does_not_say_are_those_of_others_like_it() -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        first = model(torch.exp(-batch))
        return model(torch.exp(-batch - 0 * first.sum())).sum()  # type: ignore[no-any-return]

    made = drawn(loss)
    counts = [count for node, count in zip(made.nodes, denormals(made), strict=True) if node.op == "aten::addmm"]
    assert counts == pytest.approx([50.0, 50.0])
    alone = drawn(lambda model, batch: model(torch.exp(-batch.sum() * next(model.parameters()))).sum())
    unknown = [np.isnan(count) for node, count in zip(alone.nodes, denormals(alone), strict=True) if "mm" in node.op]
    assert unknown[0], "nothing says what it makes"


class Windows(nn.Module):
    """Attention with a learned bias to which a mask is added, as windows that are shifted have it."""

    def __init__(self, far: float, fused: bool) -> None:
        super().__init__()
        self.inner, self.bias, self.far, self.fused = nn.Linear(8, 24), nn.Parameter(torch.zeros(1, 32, 32)), far, fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.inner(x[:, None, :1].expand(50, 32, 8)).chunk(3, -1)
        side = torch.arange(32) // 16
        mask = torch.zeros(32, 32).masked_fill(side[:, None] != side[None, :], self.far)
        added = self.bias + mask[None].expand(50, -1, -1).reshape(50, 32, 32)
        if self.fused:
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=added)
        found: torch.Tensor = functional.dropout((q @ k.transpose(1, 2) + added).softmax(-1), 0.1) @ v
        return found


@pytest.mark.parametrize("fused", [False, True])
def test_a_softmax_of_masked_scores_makes_denormal_numbers(fused: bool) -> None:
    def counted(far: float) -> dict[str, float]:
        model = Windows(far, fused)
        training = Training(
            name="windows", model=model, optimizers=(torch.optim.SGD(model.parameters()),), loader=Pictures(),
            loss=lambda model, batch: model(batch).sum(),
        )  # fmt: skip
        made = capture(training, like="cpu")
        found: dict[str, float] = {}
        for node, count in zip(made.nodes, denormals(made), strict=True):
            found[node.op] = found.get(node.op, 0.0) + count
        return {op: count for op, count in found.items() if count}

    found = counted(-100.0)
    vectors = 50 * 32 * 16 / 16  # half of every row
    softmax = "aten::_safe_softmax" if fused else "aten::_softmax"
    assert found[softmax] == found["aten::_softmax_backward_data"] == pytest.approx(3 * vectors)
    assert found["aten::bmm"] == pytest.approx(2 * vectors * 16)  # with the values, and for their gradients
    assert ("aten::mul" in found) != fused and not {"aten::bernoulli_", "aten::add"} & found.keys()
    assert not counted(-200.0) and not counted(-math.inf), "these are exact zeros"


def test_a_denormal_number_costs_what_a_product_of_some_took_longer() -> None:
    rows = effects._TINY_ROWS * 256**2 / effects._LANES / effects._TINY_EVERY
    slow = {effects._key("product", 256): 1e-4, effects._key("product of denormals", 256): 1e-4 + rows * 45e-9}
    found = StepEffects.of(times() | slow)
    assert found is not None
    assert found.denormal_s == pytest.approx(45e-9)
    made = drawn(lambda model, batch: model(torch.exp(-batch)).sum())
    less = StepEffects.of(times())
    assert less is not None
    more = found.beyond(made, reuse(made)).sum() - less.beyond(made, reuse(made)).sum()
    assert more == pytest.approx(45e-9 * denormals(made).sum())


def test_moments_of_another_weight_as_large_as_a_table_are_not_zero() -> None:
    """A head that is not tied has the sizes of the table, and every row of it is used."""

    class Untied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(1000, 8), nn.Linear(8, 1000, bias=False)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.head(self.table(words))
            return found

    model = Untied()
    training = Training(
        name="untied", model=model, optimizers=(torch.optim.Adam(model.parameters()),), loader=Loader(),
        loss=lambda model, batch: model(batch).sum(),
    )  # fmt: skip
    assert zeros(capture(training, like="cpu")).sum() == pytest.approx(8 * 1000 * (1 - 1 / 1000) ** 50)


def test_times_of_large_results_are_without_getting_their_memory() -> None:
    found = StepEffects.of(times())
    assert found is not None
    large = Operator.of("aten::relu", [[16 * MIB]], ["float"])
    small = Operator.of("aten::relu", [[16]], ["float"])
    left = found.without_faults({large.key: 0.1, small.key: 1e-6})
    assert left[small.key] == 1e-6
    assert left[large.key] == pytest.approx(0.1 - 64 * MIB * found.fault_s)


def test_a_real_machine_has_such_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that they are no nonsense; times are those of a shared machine."""
    monkeypatch.setattr(effects, "_TURNS", 1)
    monkeypatch.setattr(effects, "_REPEATS", 1)
    found = StepEffects.of(effects.measured())
    assert found is not None
    assert 1.0 <= found.framework <= 4.0
    assert found.far.max() == 1.0
    assert (found.turned >= 1.0).all()
    assert (np.diff(found.shared) >= 0).all()
    assert 0.0 <= found.denormal_s < 1e-5
