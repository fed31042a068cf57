"""The answer of `foretrace kernels`: parts of the step in words."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from foretrace.experiment.kernels import CompiledStep, GeneratedKernel
from foretrace.report.programs import kernels
from foretrace.report.terminal import Terminal, render


def test_parts_are_said_and_drawn() -> None:
    rows = (
        GeneratedKernel(name="cpp_fused_relu_0", fused=True, calls=1, time_s=0.002, page_faults=0.0),
        GeneratedKernel(name="extern_kernels.mm", fused=False, calls=2, time_s=0.005, page_faults=4.0),
    )
    found = kernels(
        CompiledStep(
            kernels=rows, step_s=0.010, low_s=0.0095, high_s=0.011, eager_s=0.014, framework_s=0.0024, pages_s=0.0001,
            compile_s=30.0, steps=5, threads=1, modules=("/tmp/generated.py",),
        ),
        "vgg11",
    )  # fmt: skip
    text = render(found, Terminal(width=100))
    assert "extern_kernels.mm" in text and "−5.00 % off the step" in text and "framework" in text
    assert text.index("extern_kernels.mm") < text.index("cpp_fused_relu_0"), "the longest first"
