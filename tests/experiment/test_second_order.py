"""K-FAC of a recorded model on processes: bytes as predicted from the recording."""

from __future__ import annotations

import pytest

from foretrace.techniques.distributed.recorded_layers import factored_layers
from foretrace.testing import recorded
from foretrace.training.second_order.grid import share_out
from foretrace.zoo.registry import training
from tests.experiment.second_order_states import run_second_order


def test_processes_keep_and_send_what_the_recording_predicts() -> None:
    layers = [each.layer for each in factored_layers(recorded(training("ncf")))]
    found = {}
    fractions = (0.5, 1.0)
    for fraction, states in zip(fractions, run_second_order("ncf", fractions, steps=3, every=2), strict=True):
        shares = share_out(layers, workers=2, fraction=fraction)
        for rank, each in enumerate(states):
            sent = shares.traffic(rank)
            assert each.held_bytes == shares.held_bytes(rank) and each.failures == 0
            expected = 2 * sent.factors, 2 * sent.inverses, 3 * sent.gradients
            assert (each.factors_bytes, each.inverses_bytes, each.gradients_bytes) == expected
            assert each.parameters == pytest.approx(states[0].parameters, rel=1e-6)
        found[fraction] = states[0].parameters
    assert found[0.5] == pytest.approx(found[1.0], rel=1e-4, abs=1e-4)
