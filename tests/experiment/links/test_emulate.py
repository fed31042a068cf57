"""Emulated compute: what is written is what is made."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrace.errors import ForetraceError

torch = pytest.importorskip("torch")

from foretrace.experiment.links import emulate  # noqa: E402
from foretrace.experiment.links.emulate import Emulation  # noqa: E402

EMULATIONS = st.builds(
    Emulation,
    layers=st.integers(1, 1000),
    nbytes=st.integers(1, 1000).map(lambda n: 4096 * n),
    backward_s=st.integers(0, 1000).map(lambda n: n / 1e3),
    forward_s=st.integers(0, 1000).map(lambda n: n / 1e3),
).flatmap(
    lambda found: st.integers(0, round(1e3 * min(found.backward_s, found.forward_s or found.backward_s))).map(
        lambda n: replace(found, computed_s=n / 1e3)
    )
)


@given(EMULATIONS)
def test_text_and_back(emulation: Emulation) -> None:
    assert emulate.parse(str(emulation)) == emulation


def test_gradients_have_the_stated_size() -> None:
    training = emulate.training(emulate.parse("3x64kb/1ms/1ms"))
    assert [4 * each.numel() for each in training.model.parameters()] == [64 * 1024] * 3
    before = [each.clone() for each in training.model.parameters()]
    losses = list(training.steps(2))
    assert len(losses) == 2
    assert all(not torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True))


def test_a_part_of_a_pass_is_computed() -> None:
    steps = emulate.training(emulate.parse("2x64kb/6ms/5ms/4ms")).steps()
    next(steps)
    wall, cpu = time.monotonic(), time.process_time()
    next(steps)
    assert time.process_time() - cpu >= 16e-3 and time.monotonic() - wall >= 22e-3
    with pytest.raises(ForetraceError, match="more than a pass has"):
        emulate.parse("2x64kb/6ms/5ms/5.5ms")


@pytest.mark.parametrize("text", [
    "", "12", "12x1mb", "1mb/20ms", "-1x1mb/20ms", "0x1mb/20ms", "1x0mb/20ms", "1x1gb/20ms", "1x1mb/nanms",
    "1x1mb/infms", "1x1mb/-1ms", "1x1mb/20s", "2000x1mb/1ms", "100x100mb/1ms", "1x1mb/99999ms",
])  # fmt: skip
def test_what_is_no_emulation_is_refused(text: str) -> None:
    with pytest.raises(ForetraceError, match=r"emulated training|give 1 to|may take"):
        emulate.parse(text)
