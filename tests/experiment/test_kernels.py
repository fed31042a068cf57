"""Kernels of a compiled step: calls are watched in program order, and a real compiled model's parts add up."""

from __future__ import annotations

from functools import partial
from time import thread_time, thread_time_ns
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from foretrace.errors import ForetraceError  # noqa: E402
from foretrace.experiment import kernels  # noqa: E402
from foretrace.techniques.compute.compiled import compiler  # noqa: E402
from foretrace.testing import small_training  # noqa: E402
from foretrace.training.training import Training  # noqa: E402


def test_calls_are_timed_in_order_and_hollow_ones_give_earlier_results() -> None:
    module: Any = ModuleType("generated")
    module.cpp_fused_add_0 = lambda x: x.add_(1)
    module.extern_kernels = type("E", (), {"mm": staticmethod(torch.mm)})()
    module.aten = torch.ops.aten
    module.empty_strided_cpu = lambda *given: torch.zeros(2, 2)
    plain = dict(vars(module))

    def call() -> Any:
        made = module.empty_strided_cpu((2, 2), (2, 1), torch.float32)
        module.cpp_fused_add_0(made)
        return module.aten.relu.default(module.extern_kernels.mm(made, made))

    watch = kernels._Watch()
    with kernels._watched([module], watch):
        watch.start("timed")
        right = call()
        assert [name for name, _ in watch.names] == ["cpp_fused_add_0", "extern_kernels.mm", "aten.relu"]
        assert [fused for _, fused in watch.names] == [True, False, False]
        watch.start("kept")
        call()
        watch.start("hollow")
        assert torch.equal(call(), right) and watch.place == 4, "an allocation and three calls"
        assert len(watch.seconds) == 3, "nothing was timed again"
    assert vars(module) == plain


def test_a_page_costs_something() -> None:
    assert 1e-9 < kernels.page_s() < 1e-4


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "compiler", lambda: None)
    with pytest.raises(ForetraceError, match=r"C\+\+ compiler"):
        kernels.step_kernels(small_training())


def perceptron() -> Training:
    """Few kernels to compile: a second of a core each."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
    return Training(
        name="perceptron", model=model, optimizers=(torch.optim.SGD(model.parameters(), lr=0.01),),
        loader=[torch.randn(256, 64) for _ in range(4)], loss=lambda module, batch: module(batch).square().mean(),
    )  # fmt: skip


@pytest.mark.slow("compiles a model with a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own compiler
def test_parts_add_up_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the processor's time of this thread: others take none of it."""
    if compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(kernels, "time", SimpleNamespace(perf_counter=thread_time, perf_counter_ns=thread_time_ns))
    monkeypatch.setattr(kernels, "_Watch", partial(kernels._Watch, clock=thread_time_ns))
    found = kernels.step_kernels(perceptron(), seconds=0.5)
    assert any(each.fused for each in found.kernels) and any(not each.fused for each in found.kernels)
    assert found.sum_s == pytest.approx(found.kernels_s + found.framework_s + found.pages_s)
    assert 0.3 < found.sum_s / found.step_s < 3 and found.steps >= 3
    assert 0.1 < found.step_s / found.eager_s < 10
