"""Fine-tuning beside inference: the law on made figures, and two real processes on one core."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from foretrace.errors import ForetraceError
from foretrace.experiment.ledger import Ledger
from foretrace.report.energy import colocated
from foretrace.serving.energy import colocate as module
from foretrace.serving.energy.colocate import ARMS, UNKNOWN, InterferenceLaw, PassWork, colocate
from foretrace.serving.server.run import usable

BATCHES = (1, 2, 4, 8, 16)
REQUESTS = {n: PassWork(batch=n, forward_flops=1e8 * n, backward_flops=0.0, intensity=5 * n / (n + 4)) for n in BATCHES}
STEPS = {
    n: PassWork(batch=n, forward_flops=3e8 * n, backward_flops=6e8 * n, intensity=9 * n / (n + 8)) for n in BATCHES
}


def latency_s(request: int, step: int) -> float:
    return 2e-3 * float(request**0.8) * float(step**0.3)


def law() -> InterferenceLaw:
    pairs = [(a, b) for a in (1, 4, 16) for b in (1, 4, 16)]
    return InterferenceLaw.fit([(REQUESTS[a], STEPS[b]) for a, b in pairs], [latency_s(a, b) for a, b in pairs])


def test_the_law_holds_between_what_it_was_fitted_to() -> None:
    found = law()
    for request in (2, 8):
        for step in (2, 8):
            value, low, high = found.latency_s(REQUESTS[request], STEPS[step])
            assert low < value < high and low <= latency_s(request, step) <= high
            assert value == pytest.approx(latency_s(request, step), rel=0.15)


def test_only_steps_that_keep_the_limit_are_admitted() -> None:
    found, steps = law(), list(STEPS.values())
    for request in BATCHES:
        for limit_s in np.geomspace(1e-3, 0.1, 9):
            chosen = found.admitted(REQUESTS[request], steps, float(limit_s))
            kept = [each for each in steps if found.latency_s(REQUESTS[request], each)[2] <= limit_s]
            assert chosen == (max(kept, key=lambda each: each.batch) if kept else None)
    assert found.admitted(REQUESTS[16], steps, 1e-6) is None
    assert found.admitted(REQUESTS[1], steps, 1e6) == STEPS[16]


def test_a_law_that_fits_badly_says_so_by_its_range() -> None:
    pairs = [(a, b) for a in (1, 4, 16) for b in (1, 4, 16)]
    noisy = [latency_s(a, b) * (3 if (a, b) == (4, 4) else 1) for a, b in pairs]
    found = InterferenceLaw.fit([(REQUESTS[a], STEPS[b]) for a, b in pairs], noisy)
    _value, low, high = found.latency_s(REQUESTS[4], STEPS[4])
    assert high / low > 2 and low <= 3 * latency_s(4, 4) * 1.5


def test_what_varies_as_it_is_measured_widens_the_range() -> None:
    pairs = [(a, b) for a in (1, 4, 16) for b in (1, 4, 16)]
    given = [(REQUESTS[a], STEPS[b]) for a, b in pairs], [latency_s(a, b) for a, b in pairs]
    value, low, high = InterferenceLaw.fit(*given, [0.0] * 8 + [np.log(1.5)]).latency_s(REQUESTS[4], STEPS[4])
    assert high >= 1.5 * value and low <= value / 1.5
    assert value == law().latency_s(REQUESTS[4], STEPS[4])[0]


def test_too_few_pairs() -> None:
    with pytest.raises(ForetraceError, match="4 pairs"):
        InterferenceLaw.fit([(REQUESTS[1], STEPS[1])], [1.0])


@pytest.fixture
def kept_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The two processes of a question are there for the next one, too."""
    start = module._sharing
    with ExitStack() as stack:
        started = cache(lambda *how: stack.enter_context(start(*how)))
        monkeypatch.setattr(module, "_sharing", lambda *how: nullcontext(started(*how)))
        yield


@pytest.mark.slow("loads PyTorch in two processes and measures 18 pairs")
@pytest.mark.usefixtures("kept_processes")
def test_two_real_processes_share_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(module, "_ROUNDS", 3)
    found = colocate("dlrm", "ncf", slo="100x", seconds=0.5, core=usable()[0])
    assert {*found.pairs} == {(a, b) for a in UNKNOWN for b in UNKNOWN}
    assert {len(each.after.blocks_s) for each in found.pairs.values()} == {3}  # every pair in every round
    by_name = {each.name: each for each in found.arms}
    assert tuple(by_name) == ARMS and by_name["alone"].tuned_per_s == 0 < by_name["always"].tuned_per_s
    ledger = Ledger(tmp_path / "ledger.sqlite")
    view = colocated(found, str(ledger.path), ledger.add(found.rows()))
    assert view.rows == 4 == len(ledger.rows(model="dlrm")) and view.headline
    assert all(each.low_s < each.predicted_s < each.high_s and each.measured_s > 0 for each in view.pairs)
    monkeypatch.setattr(module, "_ROUNDS", 2)
    with pytest.raises(ForetraceError, match="kept by no request"):
        colocate("dlrm", "ncf", slo="1e-6ms", seconds=0.1, core=usable()[0])


def test_unknown_models() -> None:
    pytest.importorskip("torch")
    with pytest.raises(ForetraceError, match="no model"):
        colocate("resnet5000", "ncf", slo="2x")
    with pytest.raises(ForetraceError, match="no model"):
        colocate("ncf", "resnet5000", slo="2x")
    with pytest.raises(ForetraceError, match="no limit of a time"):
        colocate("ncf", "ncf", slo="never")
